r"""Swaps in k-hot vectors, drawn by locally balanced proposals, and the probabilities of the proposals.

A *block* is some k-hot rows x, ``(rows, n)``, of a law p. A swap in it takes one unit i out of one row, where
:math:`x_i = 1`, and another unit j of that row in. With the slope :math:`d = \partial \log p / \partial x`, to first
order :math:`p(x') / p(x) = e^{d_j - d_i}`. Proposals in proportion to :math:`g(t) = \sqrt t` of that ratio are
balanced, since g(t) = t g(1/t), and factorise [1, 2]:

.. math:: q_d(i, j \mid x) = \frac{e^{-d_i / 2} e^{d_j / 2}}{Z_d(x)}, \qquad
    Z_d(x) = \sum_{\text{rows}} \sum_{i: x_i = 1} e^{-d_i / 2} \sum_{j: x_j = 0} e^{d_j / 2}

A zero slope makes all swaps equally probable.

Where the size of a row may be anything from low to high, a swap may also take a unit out and none in, or one in and
none out: "none" is the unit n, of slope 0, which can be left while the size is below high and entered while it is above
low. Each of these moves has the additional weight c, a constant of the row, so that of equally probable ones about half
are such: without it they would be one in k + 1. (None for none is no move.) Where low = high they have no probability,
and at the ends of a range those that would leave it: Z(x') differs from Z(x) by that, too.

Proposals are drawn from :math:`u q_0 + (1 - u) q_d`, whose ratio between
the two directions of a swap is computed of the whole mixture. Any slope that is a function of x gives a right ratio;
how good it is decides only how often a swap is accepted. Everything is O(rows n), in float64.

Shapes: ``value`` and ``slope`` are ``(blocks, rows, n)``, ``sizes`` a pair of ``(blocks, rows)``; results have one
number for each block.

References:
    [1] Zanella (2020), "Informed proposals for local MCMC in discrete spaces", JASA 115(530), section 2.
    [2] Grathwohl, Swersky, Hashemi, Duvenaud, Maddison (2021), "Oops I took a gradient", ICML, section 3.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Swap(NamedTuple):
    """In each block the row in which units are swapped, the one that leaves and the one that enters; n for none."""

    row: Tensor
    leaving: Tensor
    entering: Tensor

    @property
    def reverse(self) -> "Swap":
        return Swap(self.row, self.entering, self.leaving)

    def of(self, value: Tensor) -> Tensor:
        """The values after the swap."""
        block = torch.arange(len(value), device=value.device)
        value = torch.nn.functional.pad(value, (0, 1))
        value[block, self.row, self.leaving] = 0
        value[block, self.row, self.entering] = 1
        return value[..., :-1].contiguous()


class _Ends(NamedTuple):
    low: Tensor
    high: Tensor


class Sizes(_Ends):
    """The smallest and the largest number of ones that each row may have; integers."""

    @cached_property
    def vary(self) -> bool:
        """Whether any row may have one of several sizes."""
        return bool((self.low != self.high).any())

    @cached_property
    def ends(self) -> Tensor:
        """The sizes at which none cannot leave, and those at which none cannot enter."""
        return torch.stack((self.high, self.low))

    def log_weight(self, n: int) -> Tensor:
        """log c: with it as many moves change the size as do not, where that is in the middle of its range."""
        if n not in self._log_weights:
            middle = (self.low + self.high).double() / 2
            self._log_weights[n] = (middle * (n - middle) / n).clamp(min=1.0).log()
        return self._log_weights[n]

    @cached_property
    def _log_weights(self) -> dict[int, Tensor]:
        return {}


class Proposals(NamedTuple):
    """The swaps from a state under both parts of the mixture, uniform ones first: logarithms of their weights.

    That of i for j is ``units[0, ..., i] + units[1, ..., j]``, -inf where it is impossible. All are made once for each
    state.
    """

    units: Tensor  # (2, 2, blocks, rows, n): leaving and entering, under both parts; none is one more if sizes vary
    for_unit: Tensor  # (2, blocks, rows): of all that may enter for a unit
    for_none: Tensor  # and for none
    row: Tensor  # (2, blocks, rows): of all swaps of a row
    total: Tensor  # (2, blocks): log Z
    sizes_vary: bool

    @classmethod
    def of(cls, value: Tensor, slope: Tensor, sizes: Sizes) -> "Proposals":
        ones, half = value == 1, slope.double() / 2
        zero = torch.zeros_like(half)
        slopes = torch.stack((zero, -half, zero, half)).view(2, 2, *half.shape)
        units = slopes.masked_fill(torch.stack((~ones, ones)).unsqueeze(1), -torch.inf)
        leave, enter = units.logsumexp(-1)
        for_unit, row = enter, leave + enter
        if sizes.vary:
            none = sizes.log_weight(value.shape[-1]).masked_fill(ones.sum(-1) == sizes.ends, -torch.inf).unsqueeze(1)
            none_leaves, none_enters = none
            for_unit = torch.logaddexp(enter, none_enters)
            row = torch.logaddexp(leave + for_unit, none_leaves + enter)
            units = torch.cat((units, none.expand(units.shape[:-1]).unsqueeze(-1)), -1)
        total = row.logsumexp(-1) if row.shape[-1] > 1 else row.squeeze(-1)
        return cls(units, for_unit, enter, row, total, sizes.vary)

    @property
    def possible(self) -> Tensor:
        """Whether there is any swap in a block."""
        return self.total[0] > -torch.inf

    def draw(self, uniform_share: float) -> Swap:
        """One swap for each block, from the mixture; of no meaning in blocks where there is none."""
        _, blocks, rows = self.row.shape
        block = torch.arange(blocks, device=self.row.device)
        part = (torch.rand(blocks, device=block.device) >= uniform_share).long()
        row = _pick(self.row[part, block]) if rows > 1 else torch.zeros_like(block)
        leaving, entering = self.units[:, part, block, row]
        if not self.sizes_vary:
            return Swap(row, _pick(leaving), _pick(entering))
        weight = leaving + self.for_unit[part, block, row].unsqueeze(-1)
        weight[:, -1] = leaving[:, -1] + self.for_none[part, block, row]
        chosen = _pick(weight)
        entering[:, -1].masked_fill_(chosen == weight.shape[-1] - 1, -torch.inf)
        return Swap(row, chosen, _pick(entering))

    def log_prob(self, swap: Swap, uniform_share: float) -> Tensor:
        """Log-probability with which the mixture proposes these swaps."""
        block = torch.arange(len(swap.row), device=swap.row.device)
        leaving, entering = self.units
        chosen = leaving[:, block, swap.row, swap.leaving] + entering[:, block, swap.row, swap.entering]
        uniform, informed = chosen - self.total
        return torch.logaddexp(uniform + _log(uniform_share), informed + _log(1 - uniform_share))


@dataclass(frozen=True)
class Point:
    """A state of the chain: k-hot values, the slopes there, and the log joint density of each block."""

    value: Tensor
    slope: Tensor
    log_joint: Tensor
    sizes: Sizes

    @cached_property
    def proposals(self) -> Proposals:
        return Proposals.of(self.value, self.slope, self.sizes)


def log_ratio(swap: Swap, here: Point, there: Point, uniform_share: float) -> Tensor:
    """Logarithm of p(x') q(x | x') / (p(x) q(x' | x)), of Metropolis and Hastings; -inf where it is undefined."""
    back = there.proposals.log_prob(swap.reverse, uniform_share)
    forth = here.proposals.log_prob(swap, uniform_share)
    ratio = there.log_joint.double() - here.log_joint.double() + back - forth
    return ratio.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def _pick(log_weight: Tensor) -> Tensor:
    """An index along the last axis, in proportion to the weights: the largest after adding Gumbel noise."""
    return (log_weight - torch.empty_like(log_weight).exponential_().log()).argmax(-1)
