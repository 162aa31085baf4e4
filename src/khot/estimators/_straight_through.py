"""Straight-through: a hard k-hot sample in the forward pass, inclusion probabilities in the backward pass."""

import torch
from torch import Tensor

from khot._notes import feels_between_vertices
from khot._validation import check_draw
from khot.distributions.base import unrounded
from khot.distributions.entry import entry
from khot.kernels.operators.autograd import with_derivatives_of

from .wrapper import DesignWrapper, wide


@feels_between_vertices
class StraightThrough(DesignWrapper):
    r"""A sampling design whose draws carry the gradient of its inclusion probabilities.

    .. math:: x \sim \text{design}, \qquad \frac{\partial x}{\partial \theta} := \frac{\partial \pi}{\partial \theta},
        \quad \pi = E[x]

    ``rsample`` returns exact k-hot vectors. The gradient of E[f(x)] is exact for linear f, whatever the design, and
    otherwise biased to first order in the curvature of f; its variance is small. On :class:`~khot.ConditionalPoisson`
    it is the SIMPLE estimator.

    This is the cheapest estimator, but not the recommended one for a site in Pyro: log-likelihoods are curved, and more
    draws do not remove the bias. Use :class:`~khot.ReinMax` if the design supports it, and otherwise
    :func:`~khot.score_function` with ``baseline="leave_one_out"``.

    The result is a Pyro distribution with ``has_rsample``: it replaces the design in a guide or a model, and trains
    under Trace_ELBO and TraceMeanField_ELBO. These need the log-probability of the draw. If the design has none, choose
    the term for the ELBO: ``log_prob=`` another design with the same inclusion probabilities, such as
    ``ConditionalPoisson(probs=pi)``, or ``log_prob="none"``, which scores 0 and thus drops the entropy of the draw from
    the ELBO.

    Args:
        design: The design to draw from.
        log_prob: How draws are scored: None for the design itself, another design of the same shape, size and inclusion
            probabilities, or ``"none"`` for 0.
        validate_args: Whether to check that the two designs agree, and values given to ``log_prob``; by default, as the
            designs do.

    Raises:
        ValueError: With validation on, if the two designs differ in size or inclusion probabilities.

    References:
        [1] Bengio, Leonard, Courville (2013), "Estimating or propagating gradients through stochastic neurons",
            arXiv:1308.3432.
        [2] "Differentiable top-k: from one-hot to k-hot", the pi-straight-through estimator.
        [3] Ahmed, Zeng, Niepert, Van den Broeck (2023), "SIMPLE: a gradient estimator for k-subset sampling".

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> x = StraightThrough(ConditionalPoisson(logits=logits, k=2)).rsample()
        >>> torch.autograd.grad(x[0], logits)[0]
        tensor([ 0.2500, -0.0833, -0.0833, -0.0833])
    """

    def _rsample(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self._attached(self.design.sample(shape, generator=generator))

    @entry
    def attach_gradient(self, value: Tensor) -> Tensor:
        """``value``, a draw ``(*sample_shape, *batch_shape, n)`` from any source, with this estimator's gradient."""
        check_draw("value", value, self)
        return self._attached(value)

    def _attached(self, value: Tensor) -> Tensor:
        return with_derivatives_of(wide(value), unrounded(self.design).mean).to(value.dtype)
