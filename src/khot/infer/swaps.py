r"""Swaps in k-hot vectors, drawn by locally balanced proposals, and the probabilities of the proposals.

A *block* is some k-hot rows x, ``(rows, n)``, of a law p. A swap in it takes one unit i out of one row, where
:math:`x_i = 1`, and another unit j of that row in. With the slope :math:`d = \partial \log p / \partial x`, to first
order :math:`p(x') / p(x) = e^{d_j - d_i}`. Proposals in proportion to :math:`g(t) = \sqrt t` of that ratio are
balanced, since g(t) = t g(1/t), and factorise [1, 2]:

.. math:: q_d(i, j \mid x) = \frac{e^{-d_i / 2} e^{d_j / 2}}{Z_d(x)}, \qquad
    Z_d(x) = \sum_{\text{rows}} \sum_{i: x_i = 1} e^{-d_i / 2} \sum_{j: x_j = 0} e^{d_j / 2}

A zero slope makes all swaps equally probable. Proposals are drawn from :math:`u q_0 + (1 - u) q_d`, whose ratio between
the two directions of a swap is computed of the whole mixture. Any slope that is a function of x gives a right ratio;
how good it is decides only how often a swap is accepted. Everything is O(rows n), in float64.

Shapes: ``value`` and ``slope`` are ``(blocks, rows, n)``; results have one number for each block.

References:
    [1] Zanella (2020), "Informed proposals for local MCMC in discrete spaces", JASA 115(530), section 2.
    [2] Grathwohl, Swersky, Hashemi, Duvenaud, Maddison (2021), "Oops I took a gradient", ICML, section 3.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Swap(NamedTuple):
    """In each block the row in which units are swapped, the one that leaves and the one that enters; long."""

    row: Tensor
    leaving: Tensor
    entering: Tensor

    @property
    def reverse(self) -> "Swap":
        return Swap(self.row, self.entering, self.leaving)

    def of(self, value: Tensor) -> Tensor:
        """The values after the swap."""
        block = torch.arange(len(value), device=value.device)
        value = value.clone()
        value[block, self.row, self.leaving] = 0
        value[block, self.row, self.entering] = 1
        return value


class Point(NamedTuple):
    """A state of the chain: k-hot values, the slopes there, and the log joint density of each block."""

    value: Tensor
    slope: Tensor
    log_joint: Tensor


def can_swap(value: Tensor) -> Tensor:
    """Whether a block has a row with zeros and ones in it."""
    ones = value.sum(-1)
    return ((ones > 0) & (ones < value.shape[-1])).any(-1)


def draw_swap(value: Tensor, slope: Tensor, uniform_share: float) -> Swap:
    """One swap for each block, from the mixture; of no meaning in blocks where there is none."""
    uniform = torch.rand(len(value), device=value.device) < uniform_share
    leaving, entering = _log_weights(value, slope.masked_fill(uniform[:, None, None], 0))
    block = torch.arange(len(value), device=value.device)
    row = _pick(leaving.logsumexp(-1) + entering.logsumexp(-1))
    return Swap(row, _pick(leaving[block, row]), _pick(entering[block, row]))


def log_proposal(swap: Swap, value: Tensor, slope: Tensor, uniform_share: float) -> Tensor:
    """Log-probability with which the mixture proposes these swaps at ``value``."""
    uniform = math.log(uniform_share) if uniform_share > 0 else -math.inf
    informed = math.log1p(-uniform_share) if uniform_share < 1 else -math.inf
    return torch.logaddexp(
        uniform + _log_component(swap, value, torch.zeros_like(slope)), informed + _log_component(swap, value, slope)
    )


def log_ratio(swap: Swap, here: Point, there: Point, uniform_share: float) -> Tensor:
    """Logarithm of p(x') q(x | x') / (p(x) q(x' | x)), of Metropolis and Hastings; -inf where it is undefined."""
    back = log_proposal(swap.reverse, there.value, there.slope, uniform_share)
    forth = log_proposal(swap, here.value, here.slope, uniform_share)
    ratio = there.log_joint.double() - here.log_joint.double() + back - forth
    return ratio.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _log_weights(value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Of each unit to leave, and to enter; -inf where it cannot."""
    half, ones = slope.double() / 2, value == 1
    return (-half).masked_fill(~ones, -torch.inf), half.masked_fill(ones, -torch.inf)


def _log_component(swap: Swap, value: Tensor, slope: Tensor) -> Tensor:
    leaving, entering = _log_weights(value, slope)
    block = torch.arange(len(value), device=value.device)
    chosen = leaving[block, swap.row, swap.leaving] + entering[block, swap.row, swap.entering]
    return chosen - (leaving.logsumexp(-1) + entering.logsumexp(-1)).logsumexp(-1)


def _pick(log_weight: Tensor) -> Tensor:
    """An index along the last axis, in proportion to the weights: the largest after adding Gumbel noise."""
    return (log_weight - torch.empty_like(log_weight).exponential_().log()).argmax(-1)
