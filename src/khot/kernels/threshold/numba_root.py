"""The threshold of one row of finite items: Newton's method over the row, from a guess or inside a bracket by counting.

Where the softness is small beside the spread
of the items, or Newton's method does not get there from the guess, :mod:`.numba_counting` brackets the threshold.

The same loop finds the thresholds of masks and of magnitudes. They differ in the scale sigma of
z = (x - t) / sigma, which is s, or s t^(p-1) and grows with t: a :class:`Scale`.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np

from ..links.base_numba import Compiled, NumbaLink, normal_quantile
from ..newton import COARSEST, NEAR, RESOLUTION
from ..numba_math import Real
from ..numba_rows import CHUNK, distance, highest, lowest, moments
from ..numba_tools import inlined, per_row, summed
from ..rows import SAMPLE_SIZE
from .numba_counting import encloser
from .numba_gaps import balancer

# How a search ends: UNSURE where a mask may consist of zeros and ones; INFINITE, before it begins, if an item is.
LOST, FOUND, UNSURE, INFINITE = range(4)

SHORT = 2.0**-30  # of a step between neighbouring doubles, relative to distances from the threshold
STEPS, NEWTON_STEPS = 30, 8  # usual are 2 to 5; from the latter on every other step cuts the bracket
NARROWEST, WIDEST = 2.0**-50, 2.0**50  # scales with which nothing overflows but what is left to others anyway
FAR = 8.0  # scales over which the tails fall by a factor
LAST_UNITS = 8.0  # in the last place that a sum may be off after these steps
SMALL = 0.15  # softness, in deviations of the items, below which counting comes first
NO_QUANTILES = math.nan, math.nan, math.nan, math.nan
EXPONENTIAL_GAP = 80.0  # scales of a gap around t whose other side a capped exponential does not see
JUST_ABOVE = 2.0**-10  # scales by which t lies above an item that is about to reach its cap
SLACK = 2.0**-10  # scales by which a quantile to a few digits may be off


class Shape(NamedTuple):
    """What a loop knows of a link besides its functions."""

    compact: bool
    reaches_zero: bool
    reach: float


class Scale(NamedTuple):
    """How z = (x - t) / sigma of items depends on t; functions of float64 numbers.

    Attributes:
        name: What tells the compiled functions below from others.
        at: ``(t, s, q)``: sigma.
        threshold: ``(u, z, s, q)``: the t at which the item u has this z.
        guess: ``(mean, variance, s, q, known, centre, spread)``: t, from moments of the items, see ``known`` below.
        step: ``(signed, total, slope, excess, k, q, t, sigma)``: what Newton's method adds to t.
        middle: ``(low, high)``: where to cut a bracket of t.
        split: ``(base, t, rest, s, q)``: anchor and offset of base + t + rest.
        trivial: ``(x, k)``: whether every threshold far enough will do, and the anchor and offset of one that does.
        grows: Whether sigma grows with t.
    """

    name: str
    at: Compiled
    threshold: Compiled
    guess: Compiled
    step: Compiled
    middle: Compiled
    split: Compiled
    trivial: Compiled
    grows: bool


def fixed_scale(name: str, link: NumbaLink, shape: Shape, real: Real) -> Scale:
    """That of masks, sigma = s."""
    reach, newton_step = shape.reach, link.newton_step

    @inlined
    def at(t, s, q):
        return s

    @inlined
    def threshold(u, z, s, q):
        return u - z * s

    @per_row
    def guess(mean, variance, s, q, known, centre, spread):
        """-t is the quantile of s * (noise of law F) - x: of F's own shape if x is constant, about normal if wide."""
        _, quantile, normal, _ = known
        own = spread * s * s
        share = variance / (variance + own)
        mixed = (1 - share) * (quantile - centre) / math.sqrt(spread) + share * normal
        return mean - centre * s - mixed * math.sqrt(variance + own)

    @inlined
    def step(signed, total, slope, excess, k, q, t, sigma):
        return newton_step(signed, total, slope, excess, k, q) * sigma

    @inlined
    def middle(low, high):
        return 0.5 * low + 0.5 * high

    @inlined
    def split(base, t, rest, s, q):
        anchor = np.float64(real(base + t))
        return anchor, (((base - anchor) + t) + rest) / s

    @per_row
    def trivial(x, k):
        if k == 0:
            return True, np.float64(highest(x)), reach
        if k == x.shape[0]:
            return True, np.float64(lowest(x)), -reach
        return False, 0.0, 0.0

    return Scale(name, at, threshold, guess, step, middle, split, trivial, False)


def tail_sums(link: NumbaLink, real: Real) -> Compiled:
    """``(x, base, t, inverse, q)``: the sums of :class:`khot.kernels.links.base.TailSums` at base + t."""
    terms, wide = link.terms, link.distances or real
    two = wide(2)

    @summed
    def of_chunk(x, anchor, inverse, offset, q):
        above = signed = total = slope = wide(0)
        for i in range(x.shape[0]):
            is_above, tail, rate = terms(distance(wide(x[i]), anchor, inverse, offset), q)
            above += is_above
            signed += tail - two * is_above * tail
            total += tail
            slope += rate
        return above, signed, total, slope

    @per_row
    def sums(x, base, t, inverse, q):
        anchor = wide(base + t)
        offset = wide(((base - np.float64(anchor)) + t) * inverse)
        above = signed = total = slope = 0.0
        for i in range(0, x.shape[0], CHUNK):
            a, s, u, w = of_chunk(x[i : i + CHUNK], anchor, wide(inverse), offset, q)
            above += a
            signed += s
            total += u
            slope += w
        return above, signed, total, slope

    return sums


def _judge(shape: Shape, grows: bool, real: Real) -> Compiled:
    """``(i, signed, total, slope, excess, move, t, sigma, q)``: how a search ends with its i-th move, LOST if not."""
    limits = np.finfo(real)
    eps, smallest = float(limits.eps), float(limits.tiny) / float(limits.eps)
    tolerance, reaches_zero = 0.5 * eps**0.5, shape.reaches_zero

    @inlined
    def of_smooth(i, signed, total, slope, excess, move, t, sigma, q):
        sure, reach = excess != 0 or total >= smallest, tolerance * sigma
        # In tails like powers, far out, a step is nothing beside the distance of the items, whose rounding it may be.
        return FOUND if sure and (abs(move) <= reach or FAR * abs(move) * slope <= reach * total) else LOST

    @per_row
    def of_compact(i, signed, total, slope, excess, move, t, sigma, q):
        residual = signed + excess
        # Where doubles are too far apart for a small residual, a step to between them that crosses no kink.
        between = min(RESOLUTION * abs(t), COARSEST * sigma)
        # After a while, when the rounding of equal z may add up in sums of equal items, with less.
        units = 1 + q if i < NEWTON_STEPS else max(1 + q, LAST_UNITS)
        small = abs(residual) <= units * eps * (total + abs(excess))
        if not small and not (slope * excess < 0 and abs(move) <= min(between, SHORT * sigma * (total / slope))):
            return LOST
        leaving = excess == 0 and (slope > 0 or grows)
        reaching = excess < 0 and q * total >= (1 - NEAR) * slope and abs(residual) <= NEAR * total
        return UNSURE if reaches_zero and excess == math.floor(excess) and (leaving or reaching) else FOUND

    return of_compact if shape.compact else of_smooth


def _searcher(scale: Scale, link: NumbaLink, shape: Shape, real: Real) -> Compiled:
    """``(x, k, s, q, base, t, low, high)``: anchor and offset of the threshold, and how the search has ended.

    It is base + t, the base a number of the row's dtype near it, so that t has all digits; 0 if the scale grows. The
    bracket may be infinite. A step that leaves it, or does not halve the one before last, gives way to a cut.
    """
    sums, judge, compact = tail_sums(link, real), _judge(shape, scale.grows, real), shape.compact
    scale_at, newton_step, middle, split = scale.at, scale.step, scale.middle, scale.split

    @per_row
    def search(x, k, s, q, base, t, low, high):
        older = last = high - low
        for i in range(STEPS):
            sigma = scale_at(t, s, q)
            above, signed, total, slope = sums(x, base, t, 1 / sigma, q)
            excess = above - k
            residual = signed + excess
            move = newton_step(signed, total, slope, excess, k, q, t, sigma)
            how = judge(i, signed, total, slope, excess, move, t, sigma, q)
            if how != LOST:
                move = 0.0 if (compact and excess >= 0) or not math.isfinite(move) else move
                anchor, offset = split(base, t + move, (t - (t + move)) + move, s, q)
                return anchor, offset, how
            low, high = max(low, t) if residual > 0 else low, min(high, t) if residual < 0 else high
            proposal = t + move
            if not (low < proposal < high and abs(move) <= 0.5 * older) or (i >= NEWTON_STEPS and i % 2 == 0):
                move, proposal = high - low, middle(low, high)
                if not math.isfinite(proposal):
                    break
            older, last, t = last, abs(move), proposal
        return 0.0, 0.0, LOST

    return search


def _gap_closer(scale: Scale, link: NumbaLink, shape: Shape, real: Real) -> Compiled:
    """``(x, k, s, q, left, right)``: whether t is known in this gap between items; its anchor and offset."""
    scale_at, grows = scale.at, scale.grows

    @per_row
    def of_power(x, k, s, q, left, right):
        room = (right - left) / scale_at(left, s, q) - 1
        if grows:  # at the largest zero, which no rounding brings back
            return left > 0 and room >= 0, left, 0.0
        return room >= 0, left, min(0.5 * room, 1.0)

    @per_row
    def of_exponential(x, k, s, q, left, right):
        return right - left > EXPONENTIAL_GAP * s, right, 0.0

    if shape.compact:
        return of_power if shape.reaches_zero else of_exponential
    assert link.far is not None
    balance, gap = balancer(link.far, scale.name, real), link.far.gap

    @per_row
    def of_smooth(x, k, s, q, left, right):
        if right - left > gap * s:
            anchor, offset, found = balance(x, k, s, left, right)
            return found, anchor, offset
        return False, 0.0, 0.0

    return of_smooth


def solver(scale: Scale, link: NumbaLink, shape: Shape, real: Real) -> Compiled:
    """``(x, k, s, q, centre, spread, sample, known)``: anchor, offset, how the search ends, ``known``.

    ``known`` is a share k / n, the quantiles there of the link and of the normal law, and the share over n times the
    density of that, often those of the row before: the latter is how many deviations neighbouring items are apart.
    """
    search, close_gap = _searcher(scale, link, shape, real), _gap_closer(scale, link, shape, real)
    enclose = encloser(scale.at, real, f"{scale.name} {real.__name__}")
    compact, quantile_of, threshold = shape.compact, link.quantile, scale.threshold
    scale_at, guess, trivial, grows = scale.at, scale.guess, scale.trivial, scale.grows
    is_exponential = compact and not shape.reaches_zero

    @per_row
    def search_from(start, x, k, s, q, quantile):
        base, low, high = 0.0 if grows else np.float64(real(start)), -np.inf, np.inf
        if grows:
            low, high = 0.0, np.float64(highest(x))
        elif compact:  # all items equal have F(z) = k / n, so t lies within a quantile of the extreme ones
            low = threshold(lowest(x) - base, quantile + SLACK, s, q)
            high = threshold(highest(x) - base, quantile - SLACK, s, q)
        start = min(max(start - base, low), high)
        return search(x, k, s, q, base, start, low, high)

    @per_row
    def start_of_sample(x, share, s, q, centre, spread, sample, known):
        """The threshold of some items of a long row; NaN if there is none."""
        stride = x.shape[0] // SAMPLE_SIZE
        part = sample[: (x.shape[0] + stride - 1) // stride]
        for i in range(part.shape[0]):  # a slice assigned to a slice would compile numba's strings, for its error
            part[i] = x[i * stride]
        mean, variance = moments(part, part[0])
        start = guess(part[0] + mean, variance, s, q, known, centre, spread)
        anchor, offset, how = search_from(start, part, share * part.shape[0], s, q, known[1])
        return anchor + offset * scale_at(anchor, s, q) if how != LOST else np.nan

    @per_row
    def search_by_counting(x, k, s, q, u, step):
        low, high, above_low, above_high, is_gap = enclose(x, k, u, step, s, q)
        if is_gap:
            found, anchor, offset = close_gap(x, k, s, q, low, high)
            if found:
                return anchor, offset, FOUND
        middle = 0.5 * low + 0.5 * high
        base = 0.0 if grows else np.float64(real(middle))
        share, least = (k - above_high) / (above_low - above_high), k / above_low
        most = (k - above_high) / (x.shape[0] - above_high)
        start = threshold(middle - base, quantile_of(share, q), s, q)
        if is_exponential and is_gap:  # the item on the right is about to reach its cap
            start = (high - base) + JUST_ABOVE * s
        low = threshold(low - base, quantile_of(least, q) + SLACK, s, q)
        high = threshold(high - base, quantile_of(most, q) - SLACK, s, q)
        return search(x, k, s, q, base, min(max(start, low), high), low, high)

    @per_row
    def solve(x, k, s, q, centre, spread, sample, known):
        n = x.shape[0]
        mean, variance = moments(x, x[0])
        mean += x[0]
        if not math.isfinite(variance):
            low, high = np.float64(lowest(x)), np.float64(highest(x))
            if not math.isfinite(high - low):
                return 0.0, 0.0, INFINITE, known
            mean, variance = 0.5 * low + 0.5 * high, np.inf  # numbers so far apart that their squares overflow
        if not (NARROWEST < s < WIDEST and 0 <= k <= n):
            return 0.0, 0.0, LOST, known
        is_trivial, anchor, offset = trivial(x, k)
        if is_trivial:
            return anchor, offset, FOUND, known
        share = min(max(k / n, 1e-300), 1 - 2.0**-53)
        if share != known[0]:
            normal = normal_quantile(share)
            known = share, quantile_of(share, q), normal, math.exp(0.5 * normal * normal) * math.sqrt(2 * math.pi) / n
        how, deviation = LOST, math.sqrt(variance)
        start = guess(mean, variance, s, q, known, centre, spread)
        if scale_at(start, s, q) >= SMALL * deviation:
            if n >= 4 * SAMPLE_SIZE:
                of_sample = start_of_sample(x, share, s, q, centre, spread, sample, known)
                start = start if math.isnan(of_sample) else of_sample
            anchor, offset, how = search_from(start, x, k, s, q, known[1])
        if how != FOUND:
            u, step = mean, deviation * known[3]
            if how == UNSURE:  # half a scale above t lies the gap, if it is one
                u = anchor + (offset + 0.5) * scale_at(anchor, s, q)
            elif variance < np.inf:
                u -= deviation * known[2]
            a, c, again = search_by_counting(x, k, s, q, u, step)
            if again != LOST:
                anchor, offset, how = a, c, FOUND
        return anchor, offset, FOUND if how == UNSURE else how, known

    return solve
