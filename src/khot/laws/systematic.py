r"""Systematic sampling: one uniform number for all units, in random or in given order.

In the given order the units lie one after the other on a line, unit i on :math:`[V_{i-1}, V_i)` with V the cumulative
sum of the probabilities, and the points u, u + 1, u + 2, ... choose those they fall on, u uniform on [0, 1). With
:math:`F_i + f_i = V_i` the integer and the fractional part, :math:`F_i + [u < f_i]` of the first i units are chosen.

Hence the closed forms below. The f_i cut [0, 1) into intervals, each with a vector of its own whose probability is its
length. x has partial sums :math:`s_i`, each of which demands :math:`u < f_i` (if it is :math:`F_i + 1`),
:math:`u \ge f_i` (if it is :math:`F_i`), or is impossible. Two units are chosen together as far as their intervals
overlap modulo 1.

Probabilities are ``(..., n)``, k is an integer tensor of the batch shape; results are float64. Arguments are not
checked here. Functions that are called with the same probabilities, k and ``kept`` share the line.

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
from khot.kernels.tournament import balance

from .kept import Kept, kept_if_constant

TOLERANCE = 16 * torch.finfo(torch.float64).eps  # fractional parts of partial sums closer than this count as equal


class Line(NamedTuple):
    """The ends of the units' intervals; tensors of the shape of ``probs``, float64 but for the first."""

    certain: Tensor  # bool: units of probability 1, chosen in any case; they have no length on the line
    units: Tensor  # number of units with a length up to this one
    k: Tensor  # the whole length, (..., 1)
    whole: Tensor  # the end is whole + fraction
    fraction: Tensor  # in [0, 1]


def _lay_out(probs: Tensor, k: Tensor) -> Line:
    certain = probs >= 1
    probs = torch.where(certain, 0, probs)
    k = (k - certain.sum(-1)).unsqueeze(-1).double()
    end = probs.cumsum(-1)
    # The fractions of a long row would lose the digits that the sums drop: these, summed up, and what the whole then
    # lacks to k are added to the fractions.
    dropped = (probs - (end - pad(end[..., :-1], (1, 0)))).cumsum(-1)
    lacking = k - end[..., -1:] - dropped[..., -1:]
    dropped = dropped + lacking * (end / end[..., -1:].clamp(min=torch.finfo(end.dtype).tiny))
    whole = end.detach().floor()
    fraction = end - whole + dropped.detach()
    carry = fraction.detach().floor()
    units = (probs > 0).double().cumsum(-1)
    last = units == units[..., -1:]
    return Line(certain, units, k, torch.where(last, k, whole + carry), torch.where(last, 0, fraction - carry))


def line_in_order(probs: Tensor, k: Tensor) -> Line:
    """The line of units with these inclusion probabilities, which are balanced here, in the given order."""
    line = _lay_out(balance(probs, k), k)
    return line._replace(fraction=_join(line.fraction))


def start_points(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """u of each draw of each row, one number in the place of the units."""
    return random_numbers.uniform((*shape[:-1], 1), torch.float64, device, generator)


def draw_in_order(
    probs: Tensor, k: Tensor, draws: int, generator: torch.Generator | None = None, kept: Kept | None = None
) -> Tensor:
    """Draws ``(draws, ..., n)`` in the given order."""
    line = kept_if_constant(kept, line_in_order, probs, k)
    return choose(line, start_points(torch.Size((draws, *probs.shape)), probs.device, generator))


def draw_in_random_order(
    probs: Tensor, k: Tensor, draws: int, generator: torch.Generator | None = None, kept: Kept | None = None
) -> Tensor:
    """Draws ``(draws, ..., n)``, each in an order of its own."""
    shape = torch.Size((draws, *probs.shape))
    order = random_numbers.shuffled(shape, probs.device, generator)
    line = _lay_out(kept_if_constant(kept, balance, probs, k).expand(shape).gather(-1, order), k)
    shuffled = choose(line, start_points(shape, probs.device, generator))
    return torch.empty_like(shuffled).scatter(-1, order, shuffled)


def log_prob_in_order(probs: Tensor, k: Tensor, value: Tensor, kept: Kept | None = None) -> Tensor:
    """Log-probability of k-hot values in the given order; ``-inf``, without gradient, of impossible ones."""
    line = kept_if_constant(kept, line_in_order, probs, k)
    excess = (value.double() - line.certain.double()).cumsum(-1) - line.whole
    below, above = excess == 1, excess == 0
    upper = torch.where(below, line.fraction, 1).amin(-1)
    lower = torch.where(above, line.fraction, 0).amax(-1)
    possible = (below | above).all(-1) & (upper > lower) & (value >= line.certain.double()).all(-1)
    return torch.where(possible, upper - lower, 1).log().masked_fill(~possible, -torch.inf)


def entropy_in_order(probs: Tensor, k: Tensor, kept: Kept | None = None) -> Tensor:
    """Entropy in nats in the given order."""
    _, length = intervals(kept_if_constant(kept, line_in_order, probs, k).fraction)
    return -(length * torch.where(length > 0, length, 1).log()).sum(-1)


def pairs_in_order(probs: Tensor, k: Tensor, kept: Kept | None = None) -> Tensor:
    """E[x_i x_j], ``(..., n, n)``, with the probabilities on the diagonal."""
    line = kept_if_constant(kept, line_in_order, probs, k)
    start = pad(line.fraction[..., :-1], (1, 0))
    end = line.fraction + (line.whole - pad(line.whole[..., :-1], (1, 0)))
    start, end = torch.where(line.certain, 0, start), torch.where(line.certain, 1, end)  # 0 <= start <= end < 2
    pairs = torch.zeros((), dtype=start.dtype, device=start.device)
    for turn in (-1, 0, 1):
        first_end = torch.minimum(end.unsqueeze(-1), end.unsqueeze(-2) + turn)
        last_start = torch.maximum(start.unsqueeze(-1), start.unsqueeze(-2) + turn)
        pairs = pairs + (first_end - last_start).clamp(min=0)
    off_diagonal = ~torch.eye(probs.shape[-1], dtype=torch.bool, device=start.device)
    return pairs * off_diagonal + torch.diag_embed(probs.double())


def _join(fraction: Tensor) -> Tensor:
    """Makes fractions equal that differ by rounding, from 0 and 1 too."""
    ordered, order = fraction.detach().sort(-1)
    first = ordered - pad(ordered[..., :-1], (1, 0)) > TOLERANCE  # of those that are one
    position = torch.where(first, torch.arange(1, ordered.shape[-1] + 1, device=ordered.device), 0).cummax(-1).values
    joined = pad(ordered, (1, 0)).gather(-1, position)
    joined = torch.where((1 - ordered[..., -1:] <= TOLERANCE) & (position == position[..., -1:]), 1.0, joined)
    return fraction + (torch.empty_like(joined).scatter(-1, order, joined) - fraction).detach()


def intervals(fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Left ends and lengths of the intervals of u, those without a length included."""
    cuts = pad(fraction, (1, 0)).sort(-1).values
    return cuts, pad(cuts[..., 1:], (0, 1), value=1.0) - cuts


def choose(line: Line, u: Tensor) -> Tensor:
    """The units that the points u, u + 1, ... fall on, as bool ``(..., n)``."""
    count = (line.whole + (u < line.fraction)).cummax(-1).values
    # At most one more for each unit and k in the end, also where rounding would have it otherwise.
    count = line.units + (count - line.units).clamp(max=0).cummin(-1).values
    count = torch.maximum(torch.minimum(count, line.k), line.k - line.units[..., -1:] + line.units)
    return (count > pad(count[..., :-1], (1, 0))) | line.certain


def find(line: Line, u: Tensor, k: int) -> Tensor:
    """The units that the points u, u + 1, ... fall on, ``(*sample, *batch, k)``: the first ones that end beyond."""
    end = (line.whole + line.fraction).cummax(-1).values.view(-1, line.whole.shape[-1])
    below_k = k * (1 - torch.finfo(u.dtype).eps)  # also where u + k - 1 rounds up
    points = (u + torch.arange(k, dtype=u.dtype, device=u.device)).clamp(max=below_k)
    rows, draws = len(end), math.prod(u.shape) // max(1, len(end))
    by_row = points.view(draws, rows, k).transpose(0, 1).reshape(rows, draws * k)
    found = torch.searchsorted(end, by_row, right=True)
    return found.view(rows, draws, k).transpose(0, 1).reshape(points.shape)
