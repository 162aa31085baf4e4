r"""Swaps in k-hot vectors, drawn by locally balanced proposals, and the probabilities of the proposals.

A *block* consists of k-hot rows x, ``(rows, n)``, with a law p. A swap takes one unit i out of one of its rows, where
:math:`x_i = 1`, and another unit j into that row. With the slope :math:`d = \partial \log p / \partial x`, to first
order :math:`p(x') / p(x) = e^{d_j - d_i}`. Proposals in proportion to :math:`g(t) = \sqrt t` of that ratio are
balanced, since g(t) = t g(1/t), and factorise [1, 2]:

.. math:: q_d(i, j \mid x) = \frac{e^{-d_i / 2} e^{d_j / 2}}{Z_d(x)}, \qquad
    Z_d(x) = \sum_{\text{rows}} \sum_{i: x_i = 1} e^{-d_i / 2} \sum_{j: x_j = 0} e^{d_j / 2}

A zero slope makes all swaps equally probable.

If the size of a row may be anything from low to high, a swap may also take a unit out and none in, or one in and none
out. "None" is treated as unit n, with slope 0. It can leave while the size is below high, and enter while the size is
above low. Each of these moves has the additional weight c, a constant of the row, such that about half of equally
probable moves change the size; otherwise only one in k + 1 would. (None for none is not a move.) If low = high, these
moves have probability 0, and at the ends of a range so do those that would leave it; Z(x') differs from Z(x) for this
reason too.

Proposals are drawn from the mixture :math:`u q_0 + (1 - u) q_d`, and the ratio between the two directions of a swap is
computed for the whole mixture. Any slope that is a function of x gives a correct ratio; its quality only affects how
often a swap is accepted. Everything takes O(rows n) time, in float64.

Shapes: ``value`` and ``slope`` are ``(blocks, rows, n)``, ``sizes`` is a pair of ``(blocks, rows)``; results have one
number for each block.

References:
    [1] Zanella (2020), "Informed proposals for local MCMC in discrete spaces", JASA 115(530), section 2.
    [2] Grathwohl, Swersky, Hashemi, Duvenaud, Maddison (2021), "Oops I took a gradient", ICML, section 3.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Swap(NamedTuple):
    """For each block, the row in which units are swapped, the unit that leaves and the unit that enters; n for none."""

    row: Tensor
    leaving: Tensor
    entering: Tensor
    has_none: bool = True  # whether one of the units may be "none"

    @property
    def reverse(self) -> "Swap":
        return Swap(self.row, self.entering, self.leaving, self.has_none)

    def log_prob(self, start: "Point", uniform_share: float) -> Tensor:
        """The log-probability with which the mixture proposes these swaps."""
        return start.proposals.log_prob(self, uniform_share)

    def places(self, rows: int, width: int) -> Tensor:
        """The positions of the leaving and entering units in flattened blocks ``(rows, width)``, ``(blocks, 2)``."""
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


@dataclass(frozen=True)
class Sizes:
    """The smallest and the largest number of ones that each row may have, as integers."""

    low: Tensor
    high: Tensor

    @cached_property
    def vary(self) -> bool:
        """Whether some row may have several sizes."""
        return bool((self.low != self.high).any())

    def possible(self, n: int) -> Tensor:
        """Whether a block of rows of n units has any swap at all, ``(blocks,)``, whatever its values."""
        has_choice = (self.low != self.high) | ((self.low > 0) & (self.low < n))
        return has_choice.any(-1)

    def weights_of_none(self, count: Tensor, n: int) -> Tensor:
        """log c of none leaving and entering, ``(2, blocks, rows)``; -inf at the end where it cannot.

        With this c as many moves change the size as keep it, in the middle of the range.
        """
        middle = (self.low + self.high).double() / 2
        log_weight = (middle * (n - middle) / n).clamp(min=1.0).log()
        return log_weight.masked_fill(count == torch.stack((self.high, self.low)), -torch.inf)


class Proposals(NamedTuple):
    """The swaps from a state under both parts of the mixture, uniform ones first: logarithms of their weights.

    The weight of i for j is :math:`(d_j - d_i) / 2` in the informed part and 0 in the uniform one; for none, c replaces
    the exponential of a unit. The sums are computed once for each state.
    """

    closed: Tensor  # (2, blocks, rows, n): the units that cannot leave, and those that cannot enter
    half: Tensor  # d / 2, and 0 for none if sizes vary, float64
    none: Tensor | None  # (2, blocks, rows): weights of none leaving and entering, -inf at the ends of the range
    for_unit: Tensor  # (2, blocks, rows): total weight of all that may enter for a unit
    for_none: Tensor  # the same for none
    row: Tensor  # (2, blocks, rows): total weight of all swaps of a row
    total: Tensor  # (2, blocks): log Z

    @classmethod
    def of(cls, value: Tensor, slope: Tensor, sizes: Sizes) -> "Proposals":
        ones, half = value == 1, slope.double() / 2
        closed = torch.stack((~ones, ones))
        informed = torch.stack((-half, half)).masked_fill_(closed, -torch.inf).logsumexp(-1)
        count, n = ones.sum(-1), ones.shape[-1]
        leave, enter = torch.stack((torch.stack((count, n - count)).double().log(), informed), 1)
        for_unit, row, none = enter, leave + enter, None
        if sizes.vary:
            none = sizes.weights_of_none(count, n)
            half = torch.nn.functional.pad(half, (0, 1))
            none_leaves, none_enters = none
            for_unit = torch.logaddexp(enter, none_enters)
            row = torch.logaddexp(leave + for_unit, none_leaves + enter)
        total = row.logsumexp(-1) if row.shape[-1] > 1 else row.squeeze(-1)
        return cls(closed, half, none, for_unit, enter, row, total)

    def draw(self, uniform_share: float) -> Swap:
        """One swap for each block, from the mixture; meaningless in blocks that have no swap."""
        _, blocks, rows = self.row.shape
        part = (torch.rand(blocks, dtype=torch.float32, device=self.row.device) >= uniform_share).long()
        block = torch.arange(blocks, device=part.device)
        if rows == 1:
            row, closed, half = torch.zeros_like(part), self.closed.squeeze(2), self.half.squeeze(1)
        else:
            row = _pick(self.row[part, block])
            closed, half = self.closed[:, block, row], self.half[block, row]
        half = half[:, : closed.shape[-1]] * part.unsqueeze(1)
        weights = torch.stack((-half, half)).masked_fill_(closed, -torch.inf)
        if self.none is None:
            leaving, entering = (weights + gumbel(weights[0])).argmax(-1)  # other units leave than enter
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
        """The log-probability with which the mixture proposes these swaps."""
        rows, width = self.half.shape[1:]
        out, into = self.half.flatten(1).gather(1, swap.places(rows, width)).unbind(1)
        total = self.total
        if self.none is not None:
            is_unit = torch.stack((swap.leaving, swap.entering)) < width - 1
            total = total - self._none_in(swap.row).masked_fill(is_unit, 0.0).sum(0)
        uniform, informed = total
        return log_mixture(-uniform, into - out - informed, uniform_share)


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
        """This state in the chosen blocks, and the other one elsewhere."""
        by_unit = chosen[:, None, None]
        return Point(
            torch.where(by_unit, self.value, other.value),
            torch.where(by_unit, self.slope, other.slope),
            torch.where(chosen, self.log_joint, other.log_joint),
            self.sizes,
        )


class Move(Protocol):
    """A proposal, which each class draws in its own way."""

    @property
    def reverse(self) -> "Move": ...

    def of(self, value: Tensor) -> Tensor: ...

    def log_prob(self, start: Point, uniform_share: float) -> Tensor: ...


def log_ratio(move: Move, here: Point, there: Point, uniform_share: float) -> Tensor:
    """The logarithm of the Metropolis-Hastings ratio p(x') q(x | x') / (p(x) q(x' | x)); -inf if undefined."""
    back, forth = move.reverse.log_prob(there, uniform_share), move.log_prob(here, uniform_share)
    ratio = there.log_joint.double() - here.log_joint.double() + back - forth
    return ratio.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def log_mixture(uniform: Tensor, informed: Tensor, uniform_share: float) -> Tensor:
    """The log-probability under the mixture, from those under its two parts."""
    u, v = (math.log(share) if share > 0 else -math.inf for share in (uniform_share, 1 - uniform_share))
    return torch.logaddexp(u + uniform, v + informed)


def gumbel(like: Tensor) -> Tensor:
    """Gumbel noise: added to logarithms of weights, its largest entry is a draw in proportion to the weights."""
    return torch.empty_like(like).exponential_().log_().neg_()


def _pick(log_weight: Tensor) -> Tensor:
    """An index along the last axis, drawn in proportion to the weights."""
    return (log_weight + gumbel(log_weight)).argmax(-1)
