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
    has_none: bool = True  # whether one of the units may be none

    @property
    def reverse(self) -> "Swap":
        return Swap(self.row, self.entering, self.leaving, self.has_none)

    def places(self, rows: int, width: int) -> Tensor:
        """Where the units that leave and enter are in blocks ``(rows, width)`` written as one row, ``(blocks, 2)``."""
        units = torch.stack((self.leaving, self.entering), 1)
        return units if rows == 1 else units + (self.row * width).unsqueeze(1)

    def of(self, value: Tensor) -> Tensor:
        """The values after the swap."""
        if self.has_none:
            value = torch.nn.functional.pad(value, (0, 1))
        blocks, rows, width = value.shape
        fate = torch.tensor([0, 1], dtype=value.dtype, device=value.device).expand(blocks, 2)
        value = value.reshape(blocks, -1).scatter(1, self.places(rows, width), fate).view(blocks, rows, width)
        return value[..., :-1].contiguous() if self.has_none else value


class _Ends(NamedTuple):
    low: Tensor
    high: Tensor


class Sizes(_Ends):
    """The smallest and the largest number of ones that each row may have; integers."""

    @cached_property
    def vary(self) -> bool:
        """Whether any row may have one of several sizes."""
        return bool((self.low != self.high).any())

    def possible(self, n: int) -> Tensor:
        """Whether there is any swap in a block of rows of n units, ``(blocks,)``, whatever their values."""
        has_choice = (self.low != self.high) | ((self.low > 0) & (self.low < n))
        return has_choice.any(-1)

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

    def log_counts(self, ones: Tensor, count: Tensor) -> Tensor:
        """Logarithms of the numbers of ones and of zeros, ``(2, blocks, rows)``; constants where sizes are."""
        n = ones.shape[-1]
        if self.vary:
            if n not in self._logs:
                logs = torch.arange(n + 1, dtype=torch.float64, device=count.device).log()
                self._logs[n] = torch.stack((logs, logs.flip(0)))
            return self._logs[n][:, count]
        if ones.shape not in self._log_counts:
            self._log_counts[ones.shape] = torch.stack((count, n - count)).double().log()
        return self._log_counts[ones.shape]

    @cached_property
    def _logs(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _log_counts(self) -> dict[torch.Size, Tensor]:
        return {}

    @cached_property
    def _log_weights(self) -> dict[int, Tensor]:
        return {}


class Proposals(NamedTuple):
    """The swaps from a state under both parts of the mixture, uniform ones first: logarithms of their weights.

    That of i for j is :math:`(d_j - d_i) / 2` in the informed part and 0 in the uniform one, and none for a unit weighs
    c instead of its own exponential. The sums are made once for each state.
    """

    closed: Tensor  # (2, blocks, rows, n): of which units none can leave and enter
    half: Tensor  # d / 2, and 0 for none if sizes vary, float64
    none: Tensor | None  # (2, blocks, rows): of none that leaves and enters, -inf at the ends of the range
    for_unit: Tensor  # (2, blocks, rows): of all that may enter for a unit
    for_none: Tensor  # and for none
    row: Tensor  # (2, blocks, rows): of all swaps of a row
    total: Tensor  # (2, blocks): log Z

    @classmethod
    def of(cls, value: Tensor, slope: Tensor, sizes: Sizes) -> "Proposals":
        ones, half = value == 1, slope.double() / 2
        closed = torch.stack((~ones, ones))
        informed = torch.stack((-half, half)).masked_fill_(closed, -torch.inf).logsumexp(-1)
        count = ones.sum(-1) if sizes.vary else sizes.low.expand(ones.shape[:-1])
        leave, enter = torch.stack((sizes.log_counts(ones, count), informed), 1)
        for_unit, row, none = enter, leave + enter, None
        if sizes.vary:
            none = sizes.log_weight(value.shape[-1]).masked_fill(count == sizes.ends, -torch.inf)
            half = torch.nn.functional.pad(half, (0, 1))
            none_leaves, none_enters = none
            for_unit = torch.logaddexp(enter, none_enters)
            row = torch.logaddexp(leave + for_unit, none_leaves + enter)
        total = row.logsumexp(-1) if row.shape[-1] > 1 else row.squeeze(-1)
        return cls(closed, half, none, for_unit, enter, row, total)

    def mixed(self, chosen: Tensor, other: "Proposals") -> "Proposals":
        """These in the chosen blocks, the others elsewhere."""
        by_row, by_unit = chosen[:, None], chosen[:, None, None]
        return Proposals(
            torch.where(by_unit, self.closed, other.closed),
            torch.where(by_unit, self.half, other.half),
            None if self.none is None or other.none is None else torch.where(by_row, self.none, other.none),
            torch.where(by_row, self.for_unit, other.for_unit),
            torch.where(by_row, self.for_none, other.for_none),
            torch.where(by_row, self.row, other.row),
            torch.where(chosen, self.total, other.total),
        )

    def draw(self, uniform_share: float) -> Swap:
        """One swap for each block, from the mixture; of no meaning in blocks where there is none."""
        _, blocks, rows = self.row.shape
        part = (torch.rand(blocks, device=self.row.device) >= uniform_share).long()
        block = torch.arange(blocks, device=part.device)
        if rows == 1:
            row, closed, half = torch.zeros_like(part), self.closed.squeeze(2), self.half.squeeze(1)
        else:
            row = _pick(self.row[part, block])
            closed, half = self.closed[:, block, row], self.half[block, row]
        half = half[:, : closed.shape[-1]] * part.unsqueeze(1)
        weights = torch.stack((-half, half)).masked_fill_(closed, -torch.inf)
        if self.none is None:
            leaving, entering = _pick(weights)
            return Swap(row, leaving, entering, has_none=False)
        none_leaves, none_enters = self._none_in(row)
        for_unit, for_none = torch.stack((self.for_unit, self.for_none))[:, part, block, row]
        unit_leaves, none_leaves = weights[0] + for_unit.unsqueeze(1), none_leaves + for_none
        leaving = _pick(torch.cat((unit_leaves, none_leaves.unsqueeze(1)), 1))
        none_enters = none_enters.masked_fill(leaving == closed.shape[-1], -torch.inf)
        return Swap(row, leaving, _pick(torch.cat((weights[1], none_enters.unsqueeze(1)), 1)))

    def _none_in(self, row: Tensor) -> Tensor:
        """The weights of none in this row of each block, ``(2, blocks)``."""
        assert self.none is not None
        if self.none.shape[-1] == 1:
            return self.none.squeeze(2)
        return self.none[:, torch.arange(len(row), device=row.device), row]

    def log_prob(self, swap: Swap, uniform_share: float) -> Tensor:
        """Log-probability with which the mixture proposes these swaps."""
        rows, width = self.half.shape[1:]
        out, into = self.half.flatten(1).gather(1, swap.places(rows, width)).unbind(1)
        total = self.total
        if self.none is not None:
            is_unit = torch.stack((swap.leaving, swap.entering)) < width - 1
            total = total - self._none_in(swap.row).masked_fill(is_unit, 0.0).sum(0)
        uniform, informed = total
        return torch.logaddexp(_log(uniform_share) - uniform, into - out + (_log(1 - uniform_share) - informed))


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

    def mixed(self, chosen: Tensor, other: "Point") -> "Point":
        """This state in the chosen blocks, the other one elsewhere, without sums over units being made again."""
        by_unit = chosen[:, None, None]
        new = Point(
            torch.where(by_unit, self.value, other.value),
            torch.where(by_unit, self.slope, other.slope),
            torch.where(chosen, self.log_joint, other.log_joint),
            self.sizes,
        )
        new.__dict__["proposals"] = self.proposals.mixed(chosen, other.proposals)  # the cache of the property
        return new


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
