"""Implicit maximum likelihood: perturb-and-MAP forward, the difference between two MAP states backward."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from khot._contents import is_dry_run
from khot._notes import feels_between_vertices
from khot._torch_internals import is_mapped
from khot._validation import check_choice, check_draw, check_positive_contents, checked_positive, checked_share
from khot.distributions.base import column, unrounded
from khot.distributions.entry import entry

from .perturbation import PerturbedScores, PerturbedWrapper, gumbel_noise, sum_of_gamma_noise
from .wrapper import Scorer, substitute_gradient

STATE = ("alpha", "entries", "increment", "target", "decay")  # of an AdaptiveStep
NOISES = {"gumbel": gumbel_noise, "sum_of_gamma": sum_of_gamma_noise}


class AdaptiveStep:
    r"""A step for :class:`IMLE` that adapts to the scale of scores and cotangents and to the sparsity of the gradient.

    .. math:: \lambda = \alpha \, \lVert\theta + \epsilon\rVert \, / \, \lVert g\rVert

    with norms over the whole batch. After each backward pass :math:`\alpha` grows by ``increment`` if a running mean of
    the number of nonzero gradient entries per draw is below ``target``. Otherwise it shrinks by the same amount, but
    not below 0. The smallest step that lets gradients through has the least bias. Unlike in the paper, the norm is that
    of the perturbed scores, so it does not vanish if learning starts from zeros.

    Args:
        initial: First :math:`\alpha`.
        increment: Change of :math:`\alpha` per backward pass.
        target: Target number of nonzero gradient entries per draw.
        decay: Weight of the past in the running mean, in [0, 1), which starts at ``target``.

    References:
        [1] Minervini, Franceschi, Niepert (2023), "Adaptive perturbation-based gradient estimation for discrete latent
            variable models", arXiv:2209.04862.

    Example:
        >>> logits = torch.zeros(5, requires_grad=True)
        >>> step = AdaptiveStep()
        >>> IMLE(logits=logits, k=2, step=step).rsample().sum().backward()  # the sum is constant: no entries
        >>> step.alpha
        1.001
    """

    def __init__(self, initial: float = 1.0, increment: float = 1e-3, target: float = 1.0, decay: float = 0.9) -> None:
        for name, value in (("initial", initial), ("increment", increment), ("target", target)):
            checked_positive(name, value, torch.Size())
            check_positive_contents(name, value)
        checked_share("decay", decay, below="<")
        self.alpha, self.increment, self.target, self.decay = float(initial), increment, target, decay
        self.entries = float(target)  # running mean

    def step(self, scores: Tensor, g: Tensor) -> float:
        """The step for these perturbed scores and this cotangent; 0 if the cotangent is 0."""
        if is_mapped(scores) or is_mapped(g):
            raise NotImplementedError("a vmap cannot change the state of an AdaptiveStep: pass a number as the step")
        if is_dry_run(scores, g):
            return 0.0
        norm = torch.linalg.vector_norm(g).item()
        size = torch.linalg.vector_norm(scores.masked_fill(scores.isinf(), 0)).item()
        return self.alpha * size / norm if norm > 0 else 0.0

    def update(self, gradient: Tensor) -> None:
        """Adapts to the gradient ``(..., n)`` of a batch of draws."""
        if is_dry_run(gradient):
            return
        draws = max(gradient.shape[:-1].numel(), 1)
        self.entries = self.decay * self.entries + (1 - self.decay) * int(gradient.count_nonzero()) / draws
        change = self.increment if self.entries < self.target else -self.increment
        self.alpha = max(self.alpha + change, 0.0)

    def state_dict(self) -> dict[str, float]:
        """The state and the settings, as numbers, to be saved with the model."""
        return {name: float(getattr(self, name)) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Resumes with the state and the settings of another object."""
        vars(self).update({name: state_dict[name] for name in STATE})


@feels_between_vertices
class IMLE(PerturbedWrapper):
    r"""The top k of perturbed logits; the gradient is how they change when the logits move against the cotangent.

    .. math:: x &= \mathrm{top}_k(\theta + \epsilon), \quad g = \nabla f(x), \\ \text{cotangent of } \theta &:=
        \frac{1}{\lambda} \big(x - \mathrm{top}_k(\theta - \lambda g + \epsilon)\big)

    with the same noise in both. As :math:`\lambda \to 0` its mean tends to the product of g with the Jacobian of E[x]
    if g does not depend on x. So in this limit it is exact for linear f; otherwise, and for finite steps, it is biased.
    Small steps give rare and large gradients, large steps frequent and biased ones. The published estimator lacks the
    factor :math:`1/\lambda`, with which the gradient has the scale of f.

    ``noise="gumbel"`` draws without replacement (Gumbel top-k). ``"sum_of_gamma"`` is the noise of [1], whose sum over
    k units is nearly Gumbel. The noise of one unit is then smaller by a factor of about :math:`\sqrt{k}`, so draws vary
    less than those of Gumbel top-k, or of :class:`~khot.ConditionalPoisson` with ``logits / temperature``, and much
    less if k is large. ``rsample`` returns exact k-hot vectors, which can be differentiated once.

    ``mean`` and ``log_prob`` are not known, so an ELBO needs the argument ``log_prob``.

    Args:
        logits, k, log_prob, validate_args: See :class:`~khot.PerturbedTopK`.
        step: :math:`\lambda`, a positive number, a tensor that broadcasts to the batch shape, or an
            :class:`AdaptiveStep`, whose state each backward pass updates.
        noise: ``"gumbel"`` or ``"sum_of_gamma"``.
        temperature: Scale of the noise, which gets no gradient; a positive number, or a tensor that broadcasts to the
            batch shape.

    References:
        [1] Niepert, Minervini, Franceschi (2021), "Implicit MLE: backpropagating through discrete exponential family
            distributions", arXiv:2106.01798.

    Example:
        >>> logits = torch.tensor([0.0, 20.0, 40.0], requires_grad=True)
        >>> x = IMLE(logits=logits, k=2, step=100.0).rsample()
        >>> torch.autograd.grad(x[1], logits)[0]  # 20 - 100 + noise is no longer among the top two
        tensor([-0.0100,  0.0100,  0.0000])
    """

    def __init__(
        self,
        logits: Tensor,
        k: int | Tensor,
        step: float | Tensor | AdaptiveStep = 1.0,
        *,
        noise: str = "gumbel",
        temperature: float | Tensor = 1.0,
        log_prob: Scorer = None,
        validate_args: bool | None = None,
    ) -> None:
        check_choice("noise", noise, NOISES)
        design = PerturbedScores(logits, k, NOISES[noise], temperature, "temperature", validate_args)
        super().__init__(design, log_prob, validate_args)
        self.step = step if isinstance(step, AdaptiveStep) else self._checked_softness("step", step)

    def _rsample(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.from_scores(self.design.perturb(shape + self.batch_shape + self.event_shape, generator))

    @entry
    def from_scores(self, scores: Tensor) -> Tensor:
        """The draw for perturbed scores ``(*sample_shape, *batch_shape, n)``, with the gradient of this estimator."""
        check_draw("scores", scores, self)
        design = unrounded(self.design)
        value = design.top(scores)
        if self.needs_gradient:
            pull_back = partial(_pull_back, design=design, step=self.step)
            value = substitute_gradient(value, design.logits, pull_back, value, scores)
        return value.to(self.dtype)


def _pull_back(g: Tensor, value: Tensor, scores: Tensor, design: PerturbedScores, step: Any) -> Tensor:
    if not isinstance(step, AdaptiveStep):
        return (value - design.top(scores - column(step) * g)) / column(step)
    size = step.step(scores, g)
    gradient = (value - design.top(scores - size * g)) / (size or 1.0)
    step.update(gradient)
    return gradient
