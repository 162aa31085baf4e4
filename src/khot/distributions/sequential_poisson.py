"""Sequential Poisson sampling: order sampling with uniform variables."""

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property

from khot.kernels.order_sampling.noises import LOG_UNIFORM

from .order_sampling import OrderSampling, interior_of, with_certain


class SequentialPoisson(OrderSampling):
    r"""Selects the k units of smallest :math:`Q_i = U_i / \lambda_i`, U independent and uniform on [0, 1].

    This is the cheapest of the order sampling designs: noise, a product and a top-k. Its inclusion probabilities
    ``mean`` are near :math:`\lambda` = ``probs``, though less so than those of :class:`~khot.ParetoSampling`. Units of
    probability 1 are handled separately, so they are always drawn.

    ``log_prob`` and ``mean`` are exact and differentiable. They are computed by Gauss' rule between the points where a
    :math:`\lambda_i t` reaches 1, to about 1e-11, or 1e-9 where the result is rounded to float32. There are up to n
    such points, so both are slow in long rows with many probabilities near 1, where the other order sampling designs
    are fast:

    .. math:: P(S) = \int \prod_{i \in S} \min(1, \lambda_i t) \, d\Big[- \prod_{j \notin S} (1 - \lambda_j t)_+\Big]

    Args:
        probs: Target inclusion probabilities :math:`\lambda` ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``, from which ``probs = relaxation(logits, k, temperature)``.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
        relaxation: Map onto the capped simplex.
        temperature: Softness of the relaxation.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] Ohlsson (1998), "Sequential Poisson sampling", Journal of Official Statistics 14(2).

    Example:
        >>> design = SequentialPoisson(probs=torch.tensor([0.2, 0.4, 0.6, 0.8]))
        >>> design.mean
        tensor([0.1661, 0.3640, 0.6522, 0.8177])
    """

    _noise = LOG_UNIFORM

    @lazy_property
    def _positions(self) -> Tensor:
        # Scores give probabilities in float64: one that rounds to 1 in float32 would make its unit certain.
        probs = torch.sigmoid(self.log_odds) if self.relaxes_logits else self.probs
        interior, p = interior_of(probs)
        return with_certain(p.log(), interior, probs)
