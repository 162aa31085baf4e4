r"""Systematic sampling: one uniform number for all units, in a random or a given order.

In the given order, the units lie one after the other on a line, unit i on :math:`[V_{i-1}, V_i)` with V the cumulative
sum of the probabilities. The points u, u + 1, u + 2, ..., with u uniform on [0, 1), choose the units that they fall on.
Seen from the points, the line is wound around a circle of length 1, on which u is the only point.

This gives the closed forms below. x is drawn by those u with :math:`V_i - s_i \le u < V_i - s_i + 1` for all of its
partial sums :math:`s_i`, where :math:`V_n = s_n = k`. So

.. math:: P(x) = 1 - (\max_i D_i - \min_i D_i), \qquad D_i = \sum_{j \le i} (\pi_j - x_j),

and x is impossible if this is not positive. The fractional parts of the V_i cut the circle into intervals. Each has its
own vector, whose probability is its length. The probability that two units are chosen together is the length by which
their intervals overlap.

V is an integer multiple of :math:`2^{-62}`. Such sums lose no digits, however long the row is. The difference between
the last one and k is given to the units in proportion to their distances from 0 and 1.

Probabilities are ``(..., n)``, k is an integer tensor of the batch shape; results are float64. Arguments are not
checked here. Functions that are called with the same probabilities and ``kept`` share the line.

References:
    [1] Madow (1949), "On the theory of systematic sampling, II", Annals of Mathematical Statistics 20(3).
    [2] Tillé (2006), "Sampling Algorithms", chapter 7.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot.kernels import random_numbers
from khot.kernels.draws import balance
from khot.kernels.operators.autograd import by_formula, with_derivatives_of

from .once import Once, or_new

ONE = 2**62  # represents 1 on the line; sums are modulo 4
LONG = 2**20  # units of rows whose float32 probabilities may sum to a number that is further than 2 from k
TOLERANCE = 16 * torch.finfo(torch.float64).eps  # cuts of the circle that are closer than this count as equal


def line(probs: Tensor, k: Tensor) -> Tensor:
    """V, as int64 multiples of 2^-62 modulo 4; the last one is k."""
    wide = balance(probs, k) if probs.shape[-1] > LONG else probs.double()
    length = (wide * ONE).long()
    end = length.cumsum(-1)
    room = length.minimum(ONE - length).cumsum(-1, dtype=torch.float64)
    share = room / room[..., -1:]  # NaN in a row of certain units, which has no excess
    excess = end[..., -1:] - (k.unsqueeze(-1) << 62)  # over k, by less than 2, as sums are modulo 4
    return end - torch.where(share < 1, (share * excess).long(), excess)


class Cuts(NamedTuple):
    """The ends of the units in floating point, float64 ``(..., n)``; ends that differ only by rounding are equal.

    Attributes:
        whole: The integer part.
        fraction: The rest, in [0, 1], differentiable in the probabilities.
    """

    whole: Tensor
    fraction: Tensor

    @property
    def end(self) -> Tensor:
        return self.whole + self.fraction

    @property
    def start(self) -> Tensor:
        """The start, relative to the integer part of the end of the previous unit."""
        return pad(self.fraction[..., :-1], (1, 0))

    @property
    def length(self) -> Tensor:
        return (self.whole - pad(self.whole[..., :-1], (1, 0))) + (self.fraction - self.start)

    def intervals(self) -> tuple[Tensor, Tensor]:
        """Left ends and lengths of the intervals of u, including those of length 0."""
        left = pad(self.fraction, (1, 0)).sort(-1).values
        return left, pad(left[..., 1:], (0, 1), value=1.0) - left


def cuts_in_order(probs: Tensor, k: Tensor, kept: Once | None = None) -> Cuts:
    """The cuts of the line in the given order."""
    end = _kept_line(probs, k, kept)
    start = pad(end[..., :-1], (1, 0))
    fraction = end & (ONE - 1)
    whole = ((end - start) + (start & (ONE - 1)) >> 62).cumsum(-1).double()
    joined = _joined(fraction.double() / ONE)
    return Cuts(whole, with_derivatives_of(joined, balance(probs, k).cumsum(-1)))


def _kept_line(probs: Tensor, k: Tensor, kept: Once | None) -> Tensor:
    return or_new(kept).made("line", line, probs, k)


def _joined(fraction: Tensor) -> Tensor:
    """Makes fractions that differ only by rounding equal, and rounds those next to 0 or 1."""
    ordered, order = fraction.sort(-1)
    first = ordered - pad(ordered[..., :-1], (1, 0)) > TOLERANCE  # the first of each group of equal ones
    position = torch.where(first, torch.arange(1, ordered.shape[-1] + 1, device=ordered.device), 0).cummax(-1).values
    joined = pad(ordered, (1, 0)).gather(-1, position)
    joined = torch.where((1 - ordered[..., -1:] <= TOLERANCE) & (position == position[..., -1:]), 1.0, joined)
    return torch.empty_like(joined).scatter(-1, order, joined)


def start_points(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """The u of each draw of each row, with one number in place of the units."""
    return random_numbers.uniform((*shape[:-1], 1), torch.float64, device, generator)


def choose(end: Tensor, u: Tensor) -> Tensor:
    """The units of a line that the points u, u + 1, ... fall on, as bool ``(..., n)``."""
    start = pad(end[..., :-1], (1, 0))
    return ((u * ONE).long() - start) & (ONE - 1) < end - start


def draw_in_order(
    probs: Tensor, k: Tensor, draws: int, generator: torch.Generator | None = None, kept: Once | None = None
) -> Tensor:
    """Draws ``(draws, ..., n)`` in the given order."""
    u = start_points(torch.Size((draws, *probs.shape)), probs.device, generator)
    return choose(_kept_line(probs, k, kept), u)


def draw_in_random_order(
    probs: Tensor, k: Tensor, draws: int, generator: torch.Generator | None = None, kept: Once | None = None
) -> Tensor:
    """Draws ``(draws, ..., n)``, each in its own order."""
    shape = torch.Size((draws, *probs.shape))
    order = random_numbers.shuffled(shape, probs.device, generator)
    end = line(probs.expand(shape).gather(-1, order), k)
    shuffled = choose(end, start_points(shape, probs.device, generator))
    return torch.empty_like(shuffled).scatter(-1, order, shuffled)


def log_prob_in_order(probs: Tensor, k: Tensor, value: Tensor, kept: Once | None = None) -> Tensor:
    """Log-probability of k-hot values in the given order; ``-inf``, without gradient, for impossible ones."""
    distance = _kept_line(probs, k, kept) - (value.detach().cumsum(-1, dtype=torch.long) << 62)
    distance = distance.clamp(-ONE, ONE - 1)  # sums modulo 4 of impossible values leave this range before they wrap
    length = by_formula(_length, _length_and_ends, _pull_back, probs, distance)
    impossible = length <= TOLERANCE
    return length.masked_fill(impossible, 1.0).log().masked_fill(impossible, -torch.inf)


def _length_and_ends(probs: Tensor, distance: Tensor) -> tuple[Tensor, ...]:
    """Returns the length of the interval of u that yields ``value``, given D, and what its derivative needs."""
    lowest, highest = distance.aminmax(dim=-1, keepdim=True)
    return (ONE - (highest - lowest)).squeeze(-1).double() / ONE, lowest, highest


def _length(probs: Tensor, distance: Tensor) -> Tensor:
    length, *ends = _length_and_ends(probs, distance)
    return with_derivatives_of(length, (_slope(probs.detach(), distance, *ends) * probs).sum(-1))


def _pull_back(g: Tensor, probs: Tensor, *ends: Tensor) -> Tensor:
    return (g.unsqueeze(-1) * _slope(probs, *ends)).sum_to_size(probs.shape).to(probs.dtype)


def _slope(probs: Tensor, distance: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """The derivative of the length, ``(..., n)``, the mean over all D that are lowest, or highest; it is a constant."""
    near, probs = int(TOLERANCE * ONE), probs.double()
    weight = _equal_weights(distance <= lowest + near) - _equal_weights(distance >= highest - near)
    of_end, spread = weight - weight.cumsum(-1), probs * (1 - probs)  # sums from each unit on, as the sum of all is 0
    total = spread.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    return (of_end - (of_end * spread).sum(-1, keepdim=True) / total).masked_fill(probs <= 0, 0.0)


def _equal_weights(chosen: Tensor) -> Tensor:
    return chosen / chosen.sum(-1, keepdim=True, dtype=torch.float64)


def entropy_in_order(probs: Tensor, k: Tensor, kept: Once | None = None) -> Tensor:
    """Entropy in nats in the given order."""
    _, length = cuts_in_order(probs, k, kept).intervals()
    return -(length * torch.where(length > 0, length, 1).log()).sum(-1)


def pairs_in_order(probs: Tensor, k: Tensor, kept: Once | None = None) -> Tensor:
    """E[x_i x_j], ``(..., n, n)``, with the probabilities on the diagonal."""
    cuts = cuts_in_order(probs, k, kept)
    start, end = cuts.start, cuts.start + cuts.length  # 0 <= start <= end <= 2
    pairs = torch.zeros((), dtype=start.dtype, device=start.device)
    for turn in (-1, 0, 1):
        first_end = torch.minimum(end.unsqueeze(-1), end.unsqueeze(-2) + turn)
        last_start = torch.maximum(start.unsqueeze(-1), start.unsqueeze(-2) + turn)
        pairs = pairs + (first_end - last_start).clamp(min=0)
    off_diagonal = ~torch.eye(probs.shape[-1], dtype=torch.bool, device=start.device)
    return pairs * off_diagonal + torch.diag_embed(probs.double())


def mode_in_order(probs: Tensor, k: Tensor, kept: Once | None = None) -> Tensor:
    """The vector of the longest interval, as bool ``(..., n)``."""
    left, length = cuts_in_order(probs, k, kept).intervals()
    longest = length.argmax(-1, keepdim=True)
    return choose(_kept_line(probs, k, kept), left.gather(-1, longest) + length.gather(-1, longest) / 2)


def find(end: Tensor, u: Tensor, k: int) -> Tensor:
    """The units that the points u, u + 1, ... fall on, ``(*sample, *batch, k)``: the first that end beyond each.

    ``end`` is that of :class:`Cuts`. Units that are as long as the distance between points may be missed.
    """
    end = end.cummax(-1).values.view(-1, end.shape[-1])
    below_k = k * (1 - torch.finfo(u.dtype).eps)  # even if u + k - 1 rounds up
    points = (u + torch.arange(k, dtype=u.dtype, device=u.device)).clamp(max=below_k)
    rows, draws = len(end), math.prod(u.shape) // max(1, len(end))
    by_row = points.view(draws, rows, k).transpose(0, 1).reshape(rows, draws * k)
    found = torch.searchsorted(end, by_row, right=True)
    return found.view(rows, draws, k).transpose(0, 1).reshape(points.shape)
