"""The score-function estimator (REINFORCE) and its baselines."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution

from khot._tracing import shape_of

from ._convention import Loss, check_call, declares, evaluate

NAMES = ("none", "moving_average", "leave_one_out")
Baseline = Literal["none", "moving_average", "leave_one_out"] | Callable[[Distribution], float | Tensor]


class MovingAverage:
    """A baseline that remembers: the exponentially weighted mean of the losses of earlier calls.

    One number for all rows of the batch, 0 before the first call. Give the same object to every call.

    Args:
        decay: Weight in [0, 1) of what is remembered against the losses of the latest call.

    Raises:
        ValueError: If ``decay`` is out of range.

    Example:
        >>> baseline = MovingAverage(decay=0.9)
        >>> design = ConditionalPoisson(logits=torch.zeros(4), k=2)
        >>> for _ in range(3):
        ...     surrogate = score_function(design, lambda x: x.sum(-1), baseline=baseline)
        >>> baseline.mean
        tensor(2.)
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must satisfy 0 <= decay < 1, but got {decay}")
        self.decay = decay
        self.mean: float | Tensor = 0.0
        self._weight = 0.0  # of all losses so far; the rest is the initial 0, which `mean` leaves out

    def __call__(self, design: Distribution) -> float | Tensor:
        return self.mean

    def update(self, losses: Tensor) -> None:
        if losses.numel():
            self._weight = self.decay * self._weight + 1 - self.decay
            self.mean = self.mean + (1 - self.decay) / self._weight * (losses.mean() - self.mean)


@declares(unbiased=True)
def score_function(design: Distribution, f: Loss, num_samples: int = 1, baseline: Baseline = "none") -> Tensor:
    r"""Unbiased gradients for any f, differentiable or not: each draw is made likelier by how much better it is.

    .. math:: \nabla E[f(x)] \approx \frac1S \sum_s \big(f(x_s) - b_s\big) \nabla \log p(x_s) + \nabla f(x_s)

    A baseline :math:`b_s` that does not depend on the draw :math:`x_s` changes the variance, not the expectation:

    * ``"none"``: 0.
    * ``"leave_one_out"``: the mean of the other S - 1 losses.
    * ``"moving_average"``: the mean of the losses of the draws before it in the same call, 0 for the first. A call
      keeps nothing for the next one; that is what a :class:`~khot.MovingAverage` object is for, the choice when S = 1.
    * a function ``baseline(design)`` that returns a number or a tensor that broadcasts to ``batch_shape``, such as a
      learned critic of what the design was computed from. It never sees the draws. If it has a method ``update``, that
      is called with the detached losses ``(S, *batch_shape)`` afterwards.

    Parameters inside f get the mean of their gradients. Second and higher derivatives of the surrogate are unbiased
    too. On :class:`~khot.ConditionalPoisson` this is SFESS, except that its published control variate includes a draw's
    own loss, which shrinks the expected gradient to (S - 1) / S of the exact one. In Pyro, a design that is a site by
    itself is estimated like this; TraceGraph_ELBO takes its baseline from ``infer={"baseline": {...}}`` of the site.

    Args:
        design: A distribution over vectors with ``log_prob``.
        f: Maps values ``(num_samples, *batch_shape, n)`` to losses ``(num_samples, *batch_shape)``.
        num_samples: Number of independent draws, S; at least 2 for ``"leave_one_out"``.
        baseline: What is subtracted from the losses; no gradient goes through it.

    Returns:
        Surrogate of shape ``batch_shape``: its value is the mean of f over the draws, its gradient the estimate.

    Raises:
        TypeError: If ``design`` is no distribution, or f or the baseline returns something else than it has to.
        ValueError: If ``num_samples`` is too small, the baseline is unknown, or a shape is wrong.
        NotImplementedError: If ``design`` has no ``log_prob``.

    References:
        [1] Williams (1992), "Simple statistical gradient-following algorithms for connectionist reinforcement
            learning".
        [2] Kool, van Hoof, Welling (2019), "Buy 4 REINFORCE samples, get a baseline for free!", for leave-one-out.
        [3] Foerster et al. (2018), "DiCE: the infinitely differentiable Monte Carlo estimator", arXiv:1802.05098.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> design = ConditionalPoisson(logits=logits, k=2)
        >>> surrogate = score_function(design, lambda x: x[..., 0] * x[..., 1], 1000, baseline="leave_one_out")
        >>> (gradient,) = torch.autograd.grad(surrogate, logits)
        >>> bool(gradient[0] > 0.05 and gradient[3] < -0.05)  # about 1/12 and -1/12
        True
    """
    if not callable(baseline) and baseline not in NAMES:
        raise ValueError(f"`baseline` must be a function of the design or one of {NAMES}, but got {baseline!r}")
    check_call(design, num_samples, min_samples=2 if baseline == "leave_one_out" else 1)
    values = design.sample((num_samples,))
    losses = evaluate(f, values)
    surrogate = _surrogate(design, values, losses, baseline)
    if update := getattr(baseline, "update", None):
        update(losses.detach())
    return surrogate


def _surrogate(design: Distribution, values: Tensor, losses: Tensor, baseline: Baseline) -> Tensor:
    advantage = losses - _baseline_values(design, losses.detach(), baseline)
    log_prob = design.log_prob(values)
    # 0, with the derivatives of p(x) / p(x).detach(): those of every order, as DiCE has them.
    likelier = torch.expm1(log_prob - log_prob.detach())
    return (losses + advantage * likelier).mean(0)


def _baseline_values(design: Distribution, losses: Tensor, baseline: Baseline) -> float | Tensor:
    """b of each draw; broadcasts with ``losses`` (S, *batch_shape)."""
    if callable(baseline):
        return _checked(baseline(design), losses)
    if baseline == "none":
        return 0.0
    num_samples = shape_of(losses)[0]
    count = torch.arange(num_samples, device=losses.device).view(-1, *(1,) * (losses.dim() - 1))
    if baseline == "moving_average":
        return (losses.cumsum(0) - losses) / count.clamp(min=1)
    return (losses.sum(0) - losses) / (num_samples - 1)


def _checked(value: Any, losses: Tensor) -> float | Tensor:
    if isinstance(value, int | float):
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"`baseline` must return a number or a tensor, but returned {type(value).__name__}")
    batch_shape = shape_of(losses)[1:]
    try:
        return value.detach().expand(batch_shape)
    except RuntimeError:
        message = f"`baseline` must return what broadcasts to the batch shape {tuple(batch_shape)}, but got shape "
        raise ValueError(f"{message}{tuple(value.shape)}") from None
