"""The score-function estimator (REINFORCE) and its baselines."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution

from khot._torch_internals import is_recomputed
from khot._validation import check_strided, checked_share, expanded
from khot.distributions.base import draw

from ._convention import Loss, check_design, checked_call, declares, evaluate
from .wrapper import scores_of, wide

Baseline = Literal["none", "moving_average", "leave_one_out"] | Callable[[Distribution], float | Tensor]

LEAVE_ONE_OUT = "with baseline='leave_one_out'"  # the only baseline that needs more than one draw


class MovingAverage:
    """A baseline with memory: the exponentially weighted mean of the losses of earlier calls.

    It is one number for all rows of the batch, 0 before the first call. Pass the same object to every call.

    Args:
        decay: Weight in [0, 1) of the past, against the losses of the latest call.

    Example:
        >>> baseline = MovingAverage(decay=0.9)
        >>> design = ConditionalPoisson(logits=torch.zeros(4), k=2)
        >>> for _ in range(3):
        ...     surrogate = score_function(design, lambda x: x.sum(-1), baseline=baseline)
        >>> baseline.mean
        tensor(2.)
    """

    def __init__(self, decay: float = 0.99) -> None:
        checked_share("decay", decay, below="<")
        self.decay = decay
        self.mean: float | Tensor = 0.0
        self._weight = 0.0  # total weight of all losses so far; the rest belongs to the initial 0, which `mean` ignores

    def __call__(self, design: Distribution) -> float | Tensor:
        if is_recomputed():
            raise RuntimeError(
                "a MovingAverage has moved when an activation checkpoint runs its block once more, and would be biased "
                "there: leave the estimator outside the checkpoint, or use baseline='leave_one_out'"
            )
        return self.mean

    def state_dict(self) -> dict[str, float | Tensor]:
        """The mean, its weight and the decay, to be saved with the model."""
        return {"mean": self.mean, "weight": self._weight, "decay": float(self.decay)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes with the mean and the decay of another object."""
        if set(state_dict) != set(self.state_dict()):
            raise ValueError(f"`state_dict` must be that of a MovingAverage, but has the keys {sorted(state_dict)}")
        self.mean, self._weight, self.decay = (state_dict[name] for name in ("mean", "weight", "decay"))

    def update(self, losses: Tensor) -> None:
        """Takes the losses of a call into account."""
        if losses.numel():
            self._weight = self.decay * self._weight + 1 - self.decay
            self.mean = self.mean + (1 - self.decay) / self._weight * (wide(losses).mean() - self.mean)


@declares(unbiased=True)
def score_function(
    design: Distribution,
    f: Loss,
    num_samples: int = 1,
    baseline: Baseline = "none",
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Unbiased gradients for any f, differentiable or not: draws with a smaller loss become more likely.

    .. math:: \nabla E[f(x)] \approx \frac1S \sum_s \big(f(x_s) - b_s\big) \nabla \log p(x_s) + \nabla f(x_s)

    A baseline :math:`b_s` that does not depend on the draw :math:`x_s` changes the variance but not the expectation:

    * ``"none"``: 0.
    * ``"leave_one_out"``: the mean of the other S - 1 losses.
    * ``"moving_average"``: the mean of the losses of the preceding draws in the same call, 0 for the first. It forgets
      them after the call; for S = 1, or to remember, use a :class:`~khot.MovingAverage` object.
    * a function ``baseline(design)`` that returns a number or a tensor that broadcasts to ``batch_shape``, such as a
      learned critic. It never sees the draws. If it has a method ``update``, this gets the detached losses afterwards.

    Parameters inside f get the mean of their gradients. Derivatives of the surrogate of any order are unbiased. On
    :class:`~khot.ConditionalPoisson` this is SFESS, except that its published control variate includes a draw's own
    loss, which shrinks the expected gradient to (S - 1) / S of the exact one. In Pyro, a site that is a design without
    an estimator gets this estimate; TraceGraph_ELBO takes its baseline from ``infer={"baseline": {...}}`` of the site.
    ``"leave_one_out"`` is the recommended estimator if :class:`~khot.ReinMax` is not available or too biased.

    Args:
        design: A distribution over vectors with ``log_prob``, or several of them made independent by ``to_event``.
        f: Maps values to losses ``(num_samples, *batch_shape)``, see :mod:`khot.estimators`.
        num_samples: Number of independent draws, S; at least 2 for ``"leave_one_out"``.
        baseline: The baseline that is subtracted from the losses; it gets no gradient.
        generator: Source of randomness; by default torch's own.

    Returns:
        Surrogate of shape ``batch_shape``, whose value is the mean of f over the draws.

    Raises:
        NotImplementedError: If ``design`` has no ``log_prob``.

    References:
        [1] Williams (1992), "Simple statistical gradient-following algorithms", Machine Learning 8.
        [2] Kool, van Hoof, Welling (2019), "Buy 4 REINFORCE samples, get a baseline for free!", for leave-one-out.
        [3] Foerster et al. (2018), "DiCE: the infinitely differentiable Monte Carlo estimator", arXiv:1802.05098.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> design = ConditionalPoisson(logits=logits, k=2)
        >>> surrogate = score_function(design, lambda x: x[..., 0] * x[..., 1], 1000, baseline="leave_one_out")
        >>> (gradient,) = torch.autograd.grad(surrogate, logits)
        >>> assert gradient[0] > 0.05 and gradient[3] < -0.05  # about 1/12 and -1/12
    """
    _check_baseline(baseline)
    num_samples = checked_call(design, f, num_samples, _least_draws(baseline), LEAVE_ONE_OUT)
    values = draw(design, (num_samples,), generator)
    losses = evaluate(f, values, design)
    return _learn(baseline, losses, _surrogate(design, values, losses, baseline))


def score_function_surrogate(
    design: Distribution, value: Tensor, losses: Tensor, baseline: Baseline = "none"
) -> Tensor:
    r"""The surrogate of :func:`score_function`, from given draws and losses.

    .. math:: \frac1S \sum_s f_s + (f_s - b_s) \big(\log p(x_s) - \overline{\log p(x_s)}\big)

    up to second order, where the bar marks constants. It is for programs in which sampler and loss are separate::

        value = design.sample((S,))                                  # here
        losses = f(value)                                            # elsewhere
        score_function_surrogate(design, value, losses).sum().backward()

    The estimate is unbiased, to any order, if the draws are independent draws from ``design``.

    Args:
        design: The distribution of the draws, with ``log_prob``.
        value: Draws ``(S, *batch_shape, *event_shape)``, treated as constants.
        losses: f at the draws, ``(S, *batch_shape)``; if they have a gradient, it is added.
        baseline: See :func:`score_function`; ``"leave_one_out"`` needs at least 2 draws.

    Returns:
        Surrogate of shape ``batch_shape``: its value is the mean of the losses, its gradient the estimate.

    Raises:
        NotImplementedError: If ``design`` has no ``log_prob``.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> design = ConditionalPoisson(logits=logits, k=2)
        >>> value = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
        >>> surrogate = score_function_surrogate(design, value, losses=torch.tensor([3.0]))
        >>> surrogate, torch.autograd.grad(surrogate, logits)[0]
        (tensor(3., grad_fn=<...>), tensor([ 1.5000,  1.5000, -1.5000, -1.5000]))
    """
    _check_baseline(baseline)
    check_design(design)
    _check_draws(design, value, losses, min_samples=_least_draws(baseline))
    return _learn(baseline, losses, _surrogate(design, value.detach(), losses, baseline))


def _check_baseline(baseline: Any) -> None:
    if not callable(baseline) and not (isinstance(baseline, str) and baseline in NAMED):
        raise ValueError(f"`baseline` must be a function of the design or one of {tuple(NAMED)}, but got {baseline!r}")


def _least_draws(baseline: Baseline) -> int:
    return 2 if baseline == "leave_one_out" else 1


def _check_draws(design: Distribution, value: Any, losses: Any, min_samples: int) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"`value` must be a tensor, but got {type(value).__name__}")
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        got = f"dtype {losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(f"`losses` must be a floating-point tensor, but got {got}")
    check_strided("losses", losses)
    shape = design.batch_shape + design.event_shape
    if value.dim() != len(shape) + 1 or value.shape[1:] != shape:
        wanted = ", ".join(map(str, ("S", *shape)))
        raise ValueError(f"`value` must have shape ({wanted}), S draws of `design`, but got {tuple(value.shape)}")
    if len(value) < min_samples:
        needed_by = f" {LEAVE_ONE_OUT}" if min_samples > 1 else ""
        raise ValueError(f"`value` must contain at least {min_samples} draws{needed_by}, but got {len(value)}")
    if losses.shape != value.shape[:1] + design.batch_shape:
        shape = value.shape[:1] + design.batch_shape
        raise ValueError(f"`losses` must have shape (S, *batch_shape) = {tuple(shape)}, but got {tuple(losses.shape)}")


def _learn(baseline: Baseline, losses: Tensor, surrogate: Tensor) -> Tensor:
    """Updates the baseline with the losses, after the surrogate has used it; returns the surrogate."""
    if update := getattr(baseline, "update", None):
        update(losses.detach())
    return surrogate


def _surrogate(design: Distribution, values: Tensor, losses: Tensor, baseline: Baseline) -> Tensor:
    log_prob, dtype = scores_of(design, values)
    dtype, losses = torch.promote_types(dtype, losses.dtype), wide(losses)
    advantage = losses - _baseline_values(design, losses.detach(), baseline)
    # 0, with the derivatives of every order of p(x) / p(x).detach(), as in DiCE.
    likelier = torch.expm1(log_prob - log_prob.detach())
    return (losses + advantage * likelier).mean(0).to(dtype)


def _baseline_values(design: Distribution, losses: Tensor, baseline: Baseline) -> float | Tensor:
    """The baseline of each draw; broadcasts with ``losses`` (S, *batch_shape)."""
    if not callable(baseline):
        return NAMED[baseline](losses)
    value: Any = baseline(design)
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"`baseline` must return a number or a tensor, but returned {type(value).__name__}")
    return expanded("baseline(design)", value.detach(), losses.shape[1:])


def _mean_so_far(losses: Tensor) -> Tensor:
    count = torch.arange(losses.shape[0], device=losses.device).view(-1, *(1,) * (losses.dim() - 1))
    return (losses.cumsum(0) - losses) / count.clamp(min=1)


def _mean_of_the_others(losses: Tensor) -> Tensor:
    return (losses.sum(0) - losses) / (losses.shape[0] - 1)


NAMED: dict[str, Callable[[Tensor], float | Tensor]] = {
    "none": lambda losses: 0.0,
    "moving_average": _mean_so_far,
    "leave_one_out": _mean_of_the_others,
}
