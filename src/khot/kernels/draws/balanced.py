r"""Inclusion probabilities without the rounding error of their sum.

With the spread :math:`s_i = \pi_i (1 - \pi_i)`, the probabilities become

.. math:: b_i = \pi_i + r s_i, \qquad r = \frac{k - \sum_i \pi_i}{\sum_i s_i},

where r is limited to [-1, 1], so that b lies in [0, 1]. Units of probability 0 and 1 stay as they are.
"""

import torch
from torch import Tensor

from ..exact.small_numbers import TINY
from ..operators.autograd import with_derivative


def balance(probs: Tensor, k: Tensor) -> Tensor:
    """Removes the rounding error of inclusion probabilities: float64 values near ``probs`` whose rows sum to ``k``.

    The difference is spread in proportion to ``probs * (1 - probs)``, which leaves 0 and 1 unchanged. Differentiable;
    numbers whose reciprocals, the size of derivatives of logarithms, are out of range count as constants.
    """
    return _balance(probs.double(), k)


def missing_share(probs: Tensor, k: Tensor) -> Tensor:
    """The multiple of ``probs * (1 - probs)`` that :func:`balance` adds to a row, ``(..., 1)`` in float64."""
    return _ratio(probs.double(), k)[2].clamp(-1, 1)


def _ratio(probs: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """s, its sum, and r before it is limited."""
    spread = probs * (1 - probs)
    total = spread.sum(-1, keepdim=True) + TINY  # so that it is not 0; any other sum remains the same
    return spread, total, (k.unsqueeze(-1) - probs.sum(-1, keepdim=True)) / total


def _balanced(probs: Tensor, k: Tensor) -> Tensor:
    spread, _, ratio = _ratio(probs, k)
    return torch.addcmul(probs, spread, ratio.clamp(-1, 1))


def pull_back_balance(g: Tensor, probs: Tensor, k: Tensor) -> Tensor:
    """The transposed derivative of :func:`balance` at float64 ``probs``, times g."""
    spread, total, ratio = _ratio(probs, k)
    r = ratio.clamp(-1, 1)
    g = g.masked_fill(torch.addcmul(probs, spread, r) < TINY, 0.0)
    g = g - ((g * spread).sum(-1, keepdim=True) / total).masked_fill(ratio != r, 0.0)
    return _slope(probs, r) * g


def _push_forward(tangent: Tensor, probs: Tensor, k: Tensor) -> Tensor:
    spread, total, ratio = _ratio(probs, k)
    r = ratio.clamp(-1, 1)
    change = _slope(probs, r) * tangent
    dr = (change.sum(-1, keepdim=True) / total).masked_fill(ratio != r, 0.0)
    return (change - spread * dr).masked_fill(torch.addcmul(probs, spread, r) < TINY, 0.0)


def _slope(probs: Tensor, r: Tensor) -> Tensor:
    """The derivative of b at fixed r, 1 + (1 - 2 pi) r."""
    return torch.addcmul(1 + r, probs, r, value=-2)


_balance = with_derivative(_balanced, pull_back_balance, _push_forward)
