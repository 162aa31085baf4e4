r"""The residual of a threshold, and the distance to the root that it suggests, for rows in float64, in plain torch.

For ordinary rows the residual is sum F - k. If the mask is almost only zeros and ones, this difference has lost its
digits. For such rows, let u_i be the short tail of an item: F(z_i) below the threshold, 1 - F(z_i) above, where m items
lie. Then

    sum F - k = A - B,  A = sum of the tails below + max(m - k, 0),  B = sum of the tails above + max(k - m, 0),

two sums of positive numbers, computed from the logarithms of the tails, which do not underflow. The search uses
g = log A - log B, which has the sign of sum F - k and falls with t. Newton's method for g is exact in one step if tails
are exponential, in a gap of many scales as well as near the root. For a compact link, capped items count as above,
which leaves no tail there.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vecdot

from ..exact.newton import COARSEST, RESOLUTION, Evaluation
from ..exact.reductions import Whole
from ..exact.row_slabs import in_cache
from ..exact.rows import Span, Threshold
from ..links.base import Link
from .kinds import Kind, ratios, root_of

TOLERANCE = 2.0**-27  # a step of so many scales is the last, after which Newton's method has all digits
EPS = torch.finfo(torch.float64).eps
UNDERFLOW = torch.finfo(torch.float64).tiny / EPS  # sums below which logarithms of tails are used
INSIDE = 2.0**-20  # a sum of F (1 - F) above which some F is neither 0 nor 1
SHORT = 2.0**-30  # the size of a step between neighbouring doubles, relative to distances from the threshold
FARTHEST = 1e306  # in scales, as good as infinite


class Rows(NamedTuple):
    """Rows to solve: items x (rows, n), k and softness (rows,).

    If other processes hold further items of the rows, results for a row are reduced over all of them.
    """

    x: Tensor
    k: Tensor
    softness: Tensor
    link: Link
    kind: Kind
    over: Whole

    def take(self, which: Tensor) -> "Rows":
        return self._replace(x=self.x[which].double(), k=self.k[which], softness=self.softness[which])

    def distances(self, at: Threshold) -> Tensor:
        """z, for numbers of such a size that no difference overflows."""
        if self.kind.grows:
            return self.kind.distances(self.x, at, self.softness, self.link)
        return (self.x - at.anchor.unsqueeze(-1)) / self.softness.unsqueeze(-1) - at.offset.unsqueeze(-1)

    def scale(self, t: Tensor) -> Tensor:
        return self.kind.scale(t, self.softness, self.link)

    def moved(self, t: Tensor, step: Tensor) -> Tensor:
        """A step in scales, at a threshold t, as a step of t, even if the scale itself overflows."""
        return step * self.softness * root_of(t, self.link.q) if self.kind.grows else step * self.softness

    def growth(self, t: Tensor) -> Tensor:
        """The rate at which the scale grows with t, if it does."""
        return self.softness * t ** (1 / self.link.q - 1) / self.link.q

    def neighbours(self, above: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest item outside ``above`` and the smallest in it, infinite if there is none; how many are in it."""
        left = self.x.masked_fill(above, -torch.inf).amax(-1)
        right = self.x.masked_fill(~above, torch.inf).amin(-1)
        left, right = self.over.max(left, -right)
        return left, -right, self.over.sum(above.sum(-1).double())[0]


def plain_step(rows: Rows, span: Span, t: Tensor, precision: float, last: float) -> tuple[Tensor, Tensor]:
    """A step of t in scales from plain sums, and whether t with that step is the root.

    It is Newton's method for the log-odds of the mean of F, which is a straight line if tails are exponential, or for
    the sum itself. The sum has the rounding of numbers next to 1; a root counts as found only if this moves it by no
    more than a small multiple of ``precision``, in scales, and the step is at most ``last``.
    """
    link = rows.link

    def sums(x: Tensor, t: Tensor, softness: Tensor) -> tuple[Tensor, ...]:
        if rows.kind.grows:
            z = ratios(x.double(), Threshold(t, torch.zeros_like(t)), root_of(t, link.q), softness)
        else:
            z = (x.double() - t.unsqueeze(-1)) / softness.unsqueeze(-1)
        value, slope = link.value_and_slope(z)
        found = [value.sum(-1), slope.sum(-1)]
        if link.compact:
            found.append(vecdot(value, value))
        if rows.kind.grows:
            found.append(vecdot(slope, z.clamp(0, 1)))
        return tuple(found)

    total, falls, *further = rows.over.sum(*in_cache(sums, rows.x, t, rows.softness))
    if rows.kind.grows:  # as t rises, so does the scale
        falls = falls + further[1] * rows.growth(t)
    excess, below = total - rows.k, rows.k - span.selected
    rounded = rows.k * EPS
    exact = rounded <= precision * falls
    if link.compact and link.reaches_zero:
        step = excess / falls
    else:
        above = span.finite - below
        odds = torch.log1p(excess / below) - torch.log1p(-excess / above)
        step = odds / (falls / (below + excess) + falls / (above - excess))
    if link.compact:  # the remainder might be a step across a kink, or all items might lie at kinks
        found = exact & (excess.abs() <= (3 + link.condition) * rounded) & (total - further[0] > INSIDE)
        return step.masked_fill(found, 0.0), found
    return step, exact & (step.abs() <= last)


def evaluate(rows: Rows, at: Threshold) -> Evaluation:
    """A step of t in scales, a number with the sign of sum F - k, and whether t with that step is the root."""
    if rows.link.compact:
        return _compact_step(rows, at)
    g, falls, rises = _by_logarithms(rows, at)
    step = g / (falls + rises)
    return step, g, (step.abs() <= TOLERANCE) | (g == 0)


def _by_logarithms(rows: Rows, at: Threshold) -> tuple[Tensor, Tensor, Tensor]:
    """g and the rates at which log A falls and log B rises with t, in scales."""
    link, z = rows.link, rows.distances(at)
    above = z > 0
    excess = rows.over.sum(above.sum(-1).double())[0] - rows.k
    tail = torch.where(above, link.log_complement(z), link.log_value(z))
    below, beyond = rows.over.logsumexp(*(torch.where(side, tail, -torch.inf) for side in (~above, above)))
    a = torch.logaddexp(below, excess.clamp(min=0).log())
    b = torch.logaddexp(beyond, (-excess).clamp(min=0).log())
    # The rates are mean hazards, weighted by the tails. A difference of sums of slopes and of tails would round more.
    total = torch.where(above, beyond.unsqueeze(-1), below.unsqueeze(-1))
    weighted = torch.where(tail > -torch.inf, (tail - total + link.log_hazard(z)).exp(), 0.0)
    falls, rises = rows.over.sum(*(weighted.masked_fill(side, 0.0).sum(-1) for side in (above, ~above)))
    falls, rises = (below - a).nan_to_num(0.0).exp() * falls, (beyond - b).nan_to_num(0.0).exp() * rises
    g, blind = (a - b).nan_to_num(0.0, torch.inf, -torch.inf), (a == -torch.inf) & (b == -torch.inf)
    if bool(blind.any()):  # in a gap so wide that even logarithms are useless, the middle is the root
        left, right, _ = rows.neighbours(above)
        away = ((left - at.anchor) + (right - at.anchor)) / rows.softness - 2 * at.offset
        g = torch.where(blind, away.clamp(-FARTHEST, FARTHEST), g)
        falls, rises = (torch.where(blind, 1.0, v) for v in (falls, rises))
    return g, falls, rises


def _compact_step(rows: Rows, at: Threshold) -> Evaluation:
    """For a link whose kinks make the residual the criterion, not the step.

    P, the sum of uncapped items, is about a power of the distance to t, or an exponential of it: Newton's method for
    P^(1/order) = (k - capped)^(1/order), or for log P. If more items are capped than k, it is Newton's method for the
    residual, or a step by which all entries together fall. Without any slope it is a step as if one item had some.
    """
    link, z = rows.link, rows.distances(at)
    value, slope = link.value(z), link.slope(z)
    capped = (value >= 1).double()
    if rows.kind.grows:  # as t rises, so does the scale
        slope = slope * (1 + z.clamp(0, 1) * rows.growth(rows.kind.threshold(at, rows.softness, link)).unsqueeze(-1))
    m, below, falls = rows.over.sum(capped.sum(-1), vecdot(value, 1 - capped), slope.sum(-1))
    excess = m - rows.k
    residual = below + excess
    if link.reaches_zero:
        under = link.q * below / falls * (1 - (-excess / below) ** (1 / link.q))
        step = torch.where(excess < 0, under, residual / torch.where(falls > 0, falls, 1.0))
    else:
        lost = (below < UNDERFLOW) & (excess < 0)
        step = torch.where(excess < 0, (below / -excess).log(), torch.log1p(residual / rows.k))
        step = torch.where(lost, _log_of_uncapped(rows, at) - (-excess).log(), step) if bool(lost.any()) else step
    size = below + excess.abs()
    found = residual.abs() <= (1 + link.condition) * EPS * size
    # If doubles are too far apart for that, take a step that ends between two of them and crosses no kink. It is so
    # short that the rest does not change any sum.
    apart = (RESOLUTION * at.anchor.abs() / rows.scale(at.anchor)).clamp(max=COARSEST)
    found |= (excess < 0) & (falls > 0) & (step.abs() <= torch.minimum(apart, SHORT * below / falls))
    return step.masked_fill(found & (excess >= 0), 0.0), residual, found  # the remainder may be a step across a kink


def _log_of_uncapped(rows: Rows, at: Threshold) -> Tensor:
    z = rows.distances(at)
    return rows.over.logsumexp(rows.link.log_value(z).masked_fill(rows.link.value(z) >= 1, -torch.inf))[0]
