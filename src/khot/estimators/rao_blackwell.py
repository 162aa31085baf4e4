"""Straight-through Gumbel top-k, averaged over the noise that remains random once the hard sample is known."""

import torch
from torch import Tensor
from torch.types import _size as SizeLike

from khot._notes import feels_between_vertices
from khot._tracing import one_operation
from khot._validation import check_draw, check_function, check_generator, checked_count
from khot.distributions.design import Relaxation
from khot.kernels.operators.autograd import with_derivatives_of
from khot.kernels.random_numbers import exponential
from khot.relaxations import sigmoid_topk

from .perturbation import PerturbedScores, PerturbedWrapper, gumbel_noise
from .wrapper import Scorer, wide


@feels_between_vertices
class RaoBlackwellStraightThrough(PerturbedWrapper):
    r"""The top k of Gumbel-perturbed logits, with the mean Jacobian of a relaxation given the draw.

    .. math:: x = \mathrm{top}_k(\theta + G), \qquad \frac{\partial x}{\partial \theta} := \frac1M \sum_{m=1}^M
        J_T(\theta + G_m), \quad G_m \sim G \mid \text{the top } k \text{ of } \theta + G \text{, in their order}

    J_T is the Jacobian of ``relaxation(·, k, T)``. The estimator is the conditional expectation, estimated with M
    draws, of the straight-through Gumbel estimator, which has M = 1 and uses the noise of x itself: the mean is the
    same, and the variance is not larger. It has the same bias: from the relaxation, less for smaller T, and to first
    order in the curvature of f. The G_m carry no gradient, because neither does the conditional expectation of a
    Jacobian.

    ``rsample`` returns exact k-hot vectors; if a gradient is needed it costs O(M n) time and memory per draw. ``mean``
    and ``log_prob`` of the law are not known here. For an ELBO, choose how draws are scored: ``log_prob=`` a design of
    the same shape and size, or ``"none"``, which scores 0 and drops the entropy.

    Args:
        temperature: Softness of the relaxation, T, with gradient; a positive number, or a tensor that broadcasts to the
            batch shape.
        logits: Log-weights ``(..., n)``; ``-inf`` excludes a unit, ``inf`` includes it.
        k: Number of ones, an int or an integer tensor that broadcasts to the batch shape.
        num_conditional: Number of conditional draws of the noise, M.
        relaxation: Map ``relaxation(scores, k, temperature)`` onto the capped simplex.
        log_prob: How draws are scored.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes or values are out of range.

    References:
        [1] Paulus, Maddison, Krause (2021), "Rao-Blackwellizing the straight-through Gumbel-softmax gradient
            estimator", arXiv:2010.04838, for k = 1.

    Example:
        >>> logits = torch.tensor([0.0, 10.0, 20.0], requires_grad=True)
        >>> RaoBlackwellStraightThrough(0.5, logits=logits, k=2).rsample().detach()
        tensor([0., 1., 1.])
    """

    def __init__(
        self,
        temperature: float | Tensor,
        logits: Tensor,
        k: int | Tensor,
        num_conditional: int = 10,
        *,
        relaxation: Relaxation = sigmoid_topk,
        log_prob: Scorer = None,
        validate_args: bool | None = None,
    ) -> None:
        num_conditional = checked_count("num_conditional", num_conditional)
        check_function("relaxation", relaxation, "(scores, k, temperature)")
        design = PerturbedScores(logits, k, gumbel_noise, validate_args=validate_args)
        super().__init__(design, log_prob, validate_args)
        self.temperature = self._checked_softness("temperature", temperature)
        self.num_conditional, self.relaxation = num_conditional, relaxation

    def rsample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        return self.from_scores(self.design.perturb(self._extended_shape(sample_shape), generator), generator)

    def from_scores(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The draw for perturbed scores ``(*sample_shape, *batch_shape, n)``, with the gradient of this estimator."""
        check_draw("scores", scores, self)
        check_generator(generator, self.design.logits.device)
        design = self.design.in_float32
        value, logits = design.top(scores), design.logits
        if not torch.is_grad_enabled():
            return value.to(self.dtype)
        others = resample_scores(logits, wide(scores), design.k, self.num_conditional, generator)
        zero = (logits - logits.detach()).nan_to_num(0.0)  # also for infinite logits
        relaxed = self.relaxation(others + zero, self.design.k, self.temperature).mean(0)
        return with_derivatives_of(value, relaxed).to(self.dtype)


@one_operation
@torch.no_grad()
def resample_scores(
    logits: Tensor, scores: Tensor, k: Tensor, count: int, generator: torch.Generator | None = None
) -> Tensor:
    r"""Gumbel-perturbed logits, conditioned on their k largest being those of ``scores``, in the same order.

    :math:`e^{-u_i}` of perturbed logits u are independent exponential arrival times of rates :math:`e^{\theta_i}`.
    Which unit arrives next is independent of when. So, given the order of the first k, the gaps between them are
    exponential with the total rate of all units that have not arrived, and after the last one the others start afresh.
    The computation is in logarithms.

    Args:
        logits: Log-weights ``(*batch, n)``.
        scores: Perturbed logits ``(*sample, *batch, n)``.
        k: Integer tensor of the batch shape.
        count: Number of draws.
        generator: Source of randomness; by default torch's own.

    Returns:
        ``(count, *sample, *batch, n)``.
    """
    order = scores.argsort(-1, descending=True)
    rate = logits.expand(scores.shape).gather(-1, order)  # in logarithms, as everything below
    rate_left = rate.flip(-1).logcumsumexp(-1).flip(-1)
    wait = exponential((count, *scores.shape), scores.dtype, scores.device, generator).log_()
    arrival = (wait - rate_left).logcumsumexp(-1)

    size = k.unsqueeze(-1)
    index = (size - 1).clamp(min=0).expand(*arrival.shape[:-1], 1)
    last = arrival.gather(-1, index).masked_fill(size == 0, -torch.inf)
    first_k = torch.arange(scores.shape[-1], device=scores.device) < size
    time = torch.where(first_k, arrival, torch.logaddexp(last, wait - rate))
    return torch.empty_like(time).scatter(-1, order.expand(time.shape), -time)
