r"""The root behind every relaxed top-k mask: t with sum_i F((x_i - t) / s) = k, row by row.

Residual. Split the row at t itself and let u_i be the short tail, F(z_i) below and 1 - F(z_i) above. With
m = #{x_i > t},

    R(t) = sum_{z_i <= 0} u_i - sum_{z_i > 0} u_i + (m - k),

where m - k is exact: sum F - k would lose every digit where all entries are nearly 0 or 1 and k is an integer.

Step. Write R = A - B with A = P + (m - k)_+, B = Q + (k - m)_+, P and Q the tail sums below and above. Newton's method
on log(A / B) = 2 atanh(R / (A + B)) is exact in one step both where all entries share one exponential tail and inside a
gap of many scales around t, the two places where Newton on R itself fails; near the root it is Newton on R. Its
derivative is estimated from W = -s dR/dt as W / (P + Q) * (P / A + Q / B), which is exact in the tails and at the root.
A compact link takes a step of its own. A bracket guards either, see :mod:`khot.kernels.newton`.

Threshold. Where scores are many scales from 0, or near the limits of their dtype, no float64 t tells z to any accuracy.
The result is therefore t = anchor + offset * s, the anchor a number of x's dtype next to t, no further out than the
items. Then x - anchor is exact for the items near t and accurate for the others, and z = (x - anchor) / s - offset has
an error relative to itself. The search first runs in t, whose doubles it sees exactly, and where two neighbouring ones
do not tell the root, from there on in the offset.

Layout: x (rows, n), unit last stride; k, scale, anchor, offset (rows,) in float64. Elementwise arithmetic in float32 or
float64. On the way, t carries more digits than a float32 x: z = ((x - t_high) - t_low) / s, t_high the nearest float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from khot._distributed.shards import Shards

from ..links.base import Link, TailSums
from ..newton import COARSEST, MAX_STEPS, NEAR, RESOLUTION, Evaluation, Root, guarded_newton
from ..rows import (
    FARTHEST,
    SAMPLE_SIZE,
    Span,
    Threshold,
    distances_of,
    double_distances,
    fill_distances,
    row_range,
    twice_inverse,
)
from .local_loops import LocalSums

FIRST_STEPS = 5  # steps on all rows before those that are left get some by themselves
FEW_ITEMS = 2**16  # so few take a step together in less time than it takes to tell those that need it from the others
ROUGH = 2**-10  # relative, how far a link's inverse may be off where nothing tells that a bracket is too narrow
WIDENINGS = 14  # of a bracket, each of which squares its width in scales: 2^1024 is beyond all doubles
COARSE = 2**-50  # relative, a few doubles
REANCHORINGS = 4  # at most so many searches in the offset; one or two are usual
SHORT = 2**-30  # of a step of that kind, relative to the distance from t of the items that make up the sum
POLISHING_STEPS = 4  # at most; usual are one or two
LARGEST_STEP, NOTHING = 2**-16, 2**-27  # of that kind, in scales, and what a sum may be off, relative
SMALL = 0.5  # a sum k so small that no entry which is scaled to make up for rounding gets to 1
SLIGHT = 2**-10  # relative, at most, what is made up for
LARGE_SCALE = {torch.float32: 2.0**64, torch.float64: 2.0**500}  # above which t might overflow, and rows are shrunk
SHRINKAGE = {torch.float32: 2.0**-100, torch.float64: 2.0**-600}  # what it takes from small x is nothing to the scale


def solve_rows(
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    link: Link,
    span: Span,
    shards: Shards | None = None,
    local_sums: LocalSums | None = None,
) -> Threshold:
    """The thresholds of contiguous rows whose contents are in order, of which x may be the part of one process.

    A backend may have a loop for what a step sums up here; rows that a few steps do not solve do without.
    """
    fraction = ((k - span.selected) / span.finite.clamp(min=1)).clamp(0, 1)
    # F(z) averages to `fraction` when all items are equal, so the root lies within one offset of the extreme items.
    offset = scale * link.inverse(fraction.clamp(1e-300, 1 - 2.0**-53))
    slack = 2**-10 * scale
    low, high = span.lowest - offset - slack, span.highest - offset + slack
    guess = _first_guess(x, span, fraction, scale, offset, link)
    start = torch.maximum(torch.minimum(guess, high), low)
    none = k <= span.selected
    trivial = none | (k >= span.selected + span.finite)
    rows = _Rows.of(x, k, scale, link, shards, local_sums)
    t, rest, done = _guarded_steps(rows, start, low, high, trivial) if link.compact else _newton(rows, start, trivial)
    at = _split(rows, t, rest)
    if bool(trivial.any()):  # beyond the last item, as far as F needs
        anchor, reach = torch.where(none, span.highest, span.lowest), (2 * none.double() - 1) * link.reach
        at = Threshold(torch.where(trivial, anchor, at.anchor), torch.where(trivial, reach, at.offset))
    if not bool(done.all()):
        hard = (~done).nonzero().squeeze(-1)
        again = _solve_hard_rows(rows.take(hard)._replace(local_sums=None), torch.where(t.isfinite(), t, start)[hard])
        at.anchor[hard], at.offset[hard] = again.anchor, again.offset
    is_rounded = link.is_steep and x.dtype == torch.float32 and shards is None
    return _polished(rows, at) if is_rounded else at


def _polished(rows: "_Rows", at: Threshold) -> Threshold:
    """The threshold after steps from sums over float64 distances, whose rounding in float32 a steep link multiplies."""
    for _ in range(POLISHING_STEPS):
        blocks = double_distances(rows.x, at, rows.scale)
        parts = [[sum(v) for v in zip(*map(rows.link.tail_sums, block), strict=True)] for block in blocks]
        sums = TailSums(*(torch.cat(v).double() for v in zip(*parts, strict=True)))
        excess = sums.above - rows.k
        size = sums.total + torch.where(excess == 0, 1.0, excess.abs())  # of the entries that are free, or of one
        off = (sums.signed + excess).abs() > NOTHING * size
        if not bool(off.any()):
            break
        step = rows.link.newton_step(sums, excess).clamp(-LARGEST_STEP, LARGEST_STEP)
        at = Threshold(at.anchor, at.offset + torch.where(off & step.isfinite(), step, 0.0))
    return at


class _Rows(NamedTuple):
    """Rows to solve: x (rows, n), k, scale and its inverse (rows,), twice the inverse as a column, and their link.

    Where other processes have parts of the rows, x is that of this one, and what is found of rows is reduced.
    """

    x: Tensor
    k: Tensor
    scale: Tensor
    inverse: Tensor
    twice_inverse: Tensor
    local_sums: LocalSums | None
    shards: Shards | None
    link: Link

    @classmethod
    def of(
        cls,
        x: Tensor,
        k: Tensor,
        scale: Tensor,
        link: Link,
        shards: Shards | None = None,
        local_sums: LocalSums | None = None,
    ) -> "_Rows":
        return cls(x, k, scale, scale.reciprocal(), twice_inverse(scale, x.dtype), local_sums, shards, link)

    def take(self, rows: Tensor) -> "_Rows":
        return _Rows.of(self.x[rows], self.k[rows], self.scale[rows], self.link, self.shards, self.local_sums)

    @property
    def n(self) -> int:
        """Items of a row."""
        return self.x.shape[-1] if self.shards is None else self.shards.n

    @property
    def are_few(self) -> bool:
        """Whether they are taken together in less time than it takes to tell some from the others."""
        return len(self.k) * self.n <= FEW_ITEMS

    def sums(self, t: Tensor, buffer: Tensor) -> tuple[TailSums, Tensor]:
        """The sums at t in float64, and m - k."""
        if self.local_sums is not None:
            sums = self.local_sums(self.x, t, self.scale, self.link)
        else:
            sums = self.link.tail_sums(fill_distances(buffer, self.x, t, self.inverse, self.twice_inverse))
        sums = self.reduced(sums)
        return sums, sums.above - self.k

    def reduced(self, sums: TailSums) -> TailSums:
        """Sums over the items that are here, as those over the rows, in float64."""
        return TailSums(*((v.double() for v in sums) if self.shards is None else self.shards.sum(*sums)))

    def neighbours(self, above: Tensor) -> tuple[Tensor, Tensor]:
        """The largest item that is not above a threshold and the smallest that is, float64; or infinite."""
        left = torch.where(above, -torch.inf, self.x).amax(-1).double()
        right = torch.where(above, self.x, torch.inf).amin(-1).double()
        if self.shards is not None:
            left, right = self.shards.max(left, -right)
            right = -right
        return left, right

    def underflow(self, sums: TailSums, excess: Tensor) -> Tensor:
        """Where t lies in a gap that all tails cross with underflow, so that any t there is a root to the eye."""
        limits = torch.finfo(self.x.dtype)
        return (excess == 0) & (sums.total < limits.tiny / limits.eps)

    def at_kink(self, sums: TailSums, excess: Tensor) -> Tensor:
        """Where a compact link's root seems to consist of zeros and ones, with t at the end of its free interval."""
        leaving = (excess == 0) & (sums.slope > 0)
        # All z = 1 shows in F' = condition * F, and in what is missing from k.
        reaching = self.link.condition * sums.total >= (1 - NEAR) * sums.slope
        reaching &= (excess < 0) & ((sums.signed + excess).abs() <= NEAR * sums.total)
        return (leaving | reaching) & (excess == excess.round())

    def judge(self, t: Tensor, sums: TailSums, excess: Tensor) -> Evaluation:
        """For :func:`guarded_newton`."""
        step, residual = self.link.newton_step(sums, excess), sums.signed + excess
        if self.link.compact:  # its kinks make the residual the measure, not the step
            rounding = (1 + self.link.condition) * torch.finfo(self.x.dtype).eps
            found = residual.abs() <= rounding * (sums.total + excess.abs())
            # Where k entries are at their caps what is left is nothing, and the step may cross a kink.
            step = step.masked_fill(found & (excess >= 0), 0.0) * self.scale
            # Where the doubles are too far apart for that, a step to between them that crosses no kink and is so short,
            # relative to the items above t, that what it leaves shows in no sum.
            between = torch.minimum(RESOLUTION * t.abs(), COARSEST * self.scale)
            between = torch.minimum(between, SHORT * self.scale * (sums.total / sums.slope))
            return step, residual, found | ((step.abs() <= between) & (sums.slope * excess < 0))
        gap = self.underflow(sums, excess)
        found = gap | (residual == 0) | (step.abs() <= self.tolerance())
        return (step * self.scale).masked_fill(gap, torch.nan), residual, found

    def tolerance(self) -> float:
        """The last step, in scales: where convergence is quadratic on the link's scale, its error is about eps."""
        return 0.5 * torch.finfo(self.x.dtype).eps ** 0.5


def _split(rows: _Rows, t: Tensor, rest: Tensor) -> Threshold:
    """t + rest as a :class:`Threshold`."""
    anchor, farthest = _nearest(t, rows.x.dtype), FARTHEST[rows.x.dtype]
    return Threshold(anchor, (((t - anchor) + rest) * rows.inverse).clamp(-farthest, farthest))


def _nearest(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of a dtype next to t, finite and in float64."""
    largest = torch.finfo(dtype).max
    return t.clamp(-largest, largest).to(dtype).double()


def _newton(rows: _Rows, t: Tensor, trivial: Tensor, steps: int = FIRST_STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """A few unguarded steps, enough for almost all rows; returns t, what its rounding took, and which rows are done."""
    buffer, tolerance = torch.empty_like(rows.x), rows.tolerance()
    for remaining in reversed(range(steps)):
        sums, excess = rows.sums(t, buffer)
        step = rows.link.newton_step(sums, excess)
        before, move = t, step * rows.scale
        t = before + move
        done = trivial | (step.abs() <= tolerance)
        left = len(done) - int(done.sum())
        if remaining and 0 < 2 * left <= len(done) and not rows.are_few:  # the others have no more work
            part, rest = (~done).nonzero().squeeze(-1), (before - t) + move
            done = _sure(rows, sums, excess, trivial, done)
            t[part], rest[part], done[part] = _newton(rows.take(part), t[part], done[part], remaining)
            return t, rest, done
        if not left:
            break
    return t, (before - t) + move, _sure(rows, sums, excess, trivial, done)


def _sure(rows: _Rows, sums: TailSums, excess: Tensor, trivial: Tensor, done: Tensor) -> Tensor:
    """Without those in a gap whose tails have few digits or none, which no step can be judged by."""
    limits = torch.finfo(rows.x.dtype)
    if not bool((sums.total < limits.tiny / limits.eps).any()):
        return done
    return done & (trivial | ~rows.underflow(sums, excess))


def _guarded_steps(rows: _Rows, t: Tensor, low: Tensor, high: Tensor, trivial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_newton` for a compact link, whose kinks need the guard; rows that may end at one are not done."""
    steps = 2 * FIRST_STEPS if rows.are_few else FIRST_STEPS
    root, latest = _search(rows, t, low, high, trivial, steps)
    done = root.found
    if latest is not None and rows.link.reaches_zero:
        done = done & (trivial | ~rows.at_kink(*latest))
    return root.t, root.rest, done


def _search(
    rows: _Rows, t: Tensor, low: Tensor, high: Tensor, done: Tensor, max_steps: int = MAX_STEPS
) -> tuple[Root, tuple[TailSums, Tensor] | None]:
    """Newton guarded by the bracket ``[low, high]``, on all rows that are not ``done``, and the last sums."""
    buffer = torch.empty_like(rows.x)
    latest: tuple[TailSums, Tensor] | None = None

    def evaluate(t: Tensor) -> Evaluation:
        nonlocal latest
        latest = rows.sums(t, buffer)
        return rows.judge(t, *latest)

    residuals = rows.n - rows.k, -rows.k
    return guarded_newton(evaluate, t, (low, high), residuals, done, max_steps=max_steps), latest


def _solve_hard_rows(rows: _Rows, start: Tensor) -> Threshold:
    """The thresholds of rows that a few steps in t do not solve, or that end in a gap or at a kink."""
    dtype = rows.x.dtype
    large = rows.scale > LARGE_SCALE[dtype]
    shrinkage = torch.ones_like(rows.scale).masked_fill(large, SHRINKAGE[dtype])
    if bool(large.any()):
        x = rows.x * shrinkage.to(dtype)[:, None]
        rows = _Rows.of(x, rows.k, rows.scale * shrinkage, rows.link, rows.shards)
    span = row_range(rows.x, rows.shards)
    wrong = span.nan | ~((rows.k > span.selected) & (rows.k < span.selected + span.finite) & (rows.scale > 0))
    low, high, width = _bracket(rows, span)
    start = torch.maximum(torch.minimum((start * shrinkage).nan_to_num(0.0), high), low)
    root, _ = _search(rows, start, low, high, wrong)
    if not bool(root.done.all()):
        raise RuntimeError(f"found no threshold: {rows.link} must increase from 0 to 1, and its functions not be NaN")
    at = _split(rows, root.t, root.rest)
    if not bool(root.found.all()):
        lost = (~root.found).nonzero().squeeze(-1)
        again = _search_offset(rows.take(lost), at.anchor[lost], root.low[lost], root.high[lost], width[lost])
        at.anchor[lost], at.offset[lost] = again.anchor, again.offset
    at = _leave_kink(rows, at) if rows.link.compact else _balance_gap(rows, at)
    anchor = _nearest(at.anchor / shrinkage, dtype) * shrinkage  # t itself may lie beyond the dtype
    return Threshold(anchor / shrinkage, (at.offset + (at.anchor - anchor) / rows.scale).masked_fill(wrong, torch.nan))


def _bracket(rows: _Rows, span: Span) -> tuple[Tensor, Tensor, Tensor]:
    """Where the residual is positive and where negative, and how many scales beyond the items.

    Widened until they are, since a link's inverse may be rough; beyond the largest double there is no t.
    """
    fraction = (rows.k - span.selected) / span.finite.clamp(min=1)
    width = (1 + ROUGH) * rows.link.inverse(fraction.clamp(1e-300, 1 - 2.0**-53)).abs().nan_to_num(0.0) + 1
    buffer, largest = torch.empty_like(rows.x), torch.finfo(torch.float64).max
    for _ in range(WIDENINGS):
        low = (span.lowest - width * rows.scale - COARSE * span.lowest.abs()).clamp(-largest, largest)
        high = (span.highest + width * rows.scale + COARSE * span.highest.abs()).clamp(-largest, largest)
        (below, shortfall), (above, excess) = rows.sums(low, buffer), rows.sums(high, buffer)
        missed = (below.signed + shortfall < 0) & (low > -largest)
        missed |= (above.signed + excess > 0) & (high < largest)
        if not bool(missed.any()):
            break
        width = torch.where(missed, width * width.clamp(min=4), width)
    return low, high, width


def _search_offset(rows: _Rows, anchor: Tensor, low: Tensor, high: Tensor, width: Tensor) -> Threshold:
    """The thresholds between two neighbouring doubles, from the distances to the one that is nearer."""
    x, k, scale, *_, link = rows
    one, none, start = torch.ones_like(k), torch.zeros_like(k, dtype=torch.bool), torch.zeros_like(k)
    farthest = FARTHEST[x.dtype]
    for remaining in reversed(range(REANCHORINGS)):
        unit = _Rows.of(distances_of(x, Threshold(anchor, torch.zeros_like(k)), scale), k, one, link, rows.shards)
        first, last = (((end - anchor) / scale).clamp(-farthest, farthest) for end in (low, high))
        first, last = first - 2**-10 * first.abs() - width, last + 2**-10 * last.abs() + width
        root, _ = _search(unit, torch.maximum(torch.minimum(start, last), first), first, last, none)
        offset = root.t + root.rest
        above, below = offset > farthest, offset < -farthest
        t = torch.where(above, high, torch.where(below, low, anchor + offset * scale))
        nearest = _nearest(t, x.dtype)
        start = ((anchor - nearest) / scale + offset).masked_fill(above | below, 0.0)
        nearer = start.abs() < 0.9 * offset.abs()  # by enough not to go back and forth
        if not (remaining and bool(nearer.any())):
            break
        start, anchor = torch.where(nearer, start, offset), torch.where(nearer, nearest, anchor)
    return Threshold(anchor, offset)


def _leave_kink(rows: _Rows, at: Threshold) -> Threshold:
    """Where the mask consists of zeros and ones that leave the threshold free, puts it away from either end."""
    x, k, scale, *_, link = rows
    if not link.reaches_zero:
        return at
    above = distances_of(x, at, scale) > 0.5
    left, right = rows.neighbours(above)
    room = (0.5 * right - 0.5 * left) * (2 / scale) - 1
    count = above.sum(-1) if rows.shards is None else rows.shards.sum(above.sum(-1))[0]
    free = (count == k) & (room >= 0)
    return Threshold(torch.where(free, left, at.anchor), torch.where(free, (0.5 * room).clamp(max=1), at.offset))


def _balance_gap(rows: _Rows, at: Threshold) -> Threshold:
    """Where k items lie above t and all tails underflow, the root: they balance, seen up to a common factor."""
    sums = rows.reduced(rows.link.tail_sums(distances_of(rows.x, at, rows.scale)))
    gap = rows.underflow(sums, sums.above - rows.k)
    if not bool(gap.any()):
        return at
    x, scale = rows.x, rows.scale
    left, right = rows.neighbours(distances_of(x, at, scale) > 0)
    anchor = torch.where(gap, (0.5 * left + 0.5 * right).to(x.dtype).double(), at.anchor)
    z = distances_of(x, Threshold(anchor, torch.zeros_like(anchor)), scale)
    buffer = torch.empty_like(z)
    farthest = FARTHEST[x.dtype]
    left, right = (((0.5 * v - 0.5 * anchor) * (2 / scale)).clamp(-farthest, farthest) for v in (left, right))

    def evaluate(offset: Tensor) -> Evaluation:
        torch.sub(z, offset.to(z.dtype)[:, None], out=buffer)
        _, signed, total, slope = _scaled_sums(rows, buffer)
        step = torch.atanh(signed / total) * total / slope
        return step, signed, signed.isnan() | (signed == 0) | (step.abs() <= resolution * (right - left))

    resolution, one = torch.finfo(x.dtype).eps, torch.ones_like(left)
    offset = guarded_newton(evaluate, 0.5 * (left + right), (left, right), (one, -one), ~gap).t
    return Threshold(anchor, torch.where(gap, offset, at.offset))


def _scaled_sums(rows: _Rows, z: Tensor) -> TailSums:
    """The tails and slopes at z up to a factor of each row, so that not all underflow; may overwrite z."""
    if rows.shards is None:
        return TailSums(*(v.double() for v in rows.link.scaled_tail_sums(z)))
    largest = rows.link.log_tail(z).amax(-1).double()
    (top,) = rows.shards.max(largest)
    above, *tails = rows.link.scaled_tail_sums(z)
    here = torch.where(largest > -torch.inf, (largest - top).exp(), 0.0)
    tails = [torch.where(here > 0, here * v, 0.0) for v in tails]
    return TailSums(*rows.shards.sum(above, *tails))


def _first_guess(x: Tensor, span: Span, fraction: Tensor, scale: Tensor, offset: Tensor, link: Link) -> Tensor:
    """A start: the root of a sample of a long row; of a short one, what its mean and variance say."""
    n = x.shape[-1]
    if span.moments is not None:
        centre, variance = span.moments
    elif n >= 4 * SAMPLE_SIZE:
        sample = x[:, :: n // SAMPLE_SIZE].contiguous()
        span = row_range(sample)
        at = solve_rows(sample, span.selected + fraction * span.finite, scale, link, span)
        return at.anchor + at.offset * scale
    else:
        centre = x.mean(-1).double()
        variance = (torch.linalg.vector_norm(x, dim=-1).double().square() / n - centre.square()).clamp(min=0)
    middle, spread = link.start(x.device)
    mean, own = middle * scale, spread * scale.square()
    # -t is the quantile of scale * (noise of law F) - x: of F's own shape if x is constant, about normal if x is wide.
    share = variance / (variance + own)
    quantile = torch.lerp((offset - mean) / own.sqrt(), torch.special.ndtri(fraction), share)
    return (centre - mean - quantile * (variance + own).sqrt()).nan_to_num(0.0)
