"""The threshold of one row of finite items, by Newton's method from a guess, or in a bracket found by counting.

The residual sum F - k is that of :mod:`khot.kernels.threshold.residual`, and so are most steps. If the softness is
small compared with the spread of the items, or Newton's method fails from the guess, :mod:`.numba_counting` brackets
the threshold, which then takes a few steps.

The same loop finds the thresholds of masks and of magnitudes. They differ in the scale sigma of z = (x - t) / sigma,
which is the softness s, or s t^(p-1) and grows with t: see :mod:`.numba_magnitudes`.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np

from ..cpu.loops import inlined, per_row, summed
from ..cpu.maths import Real
from ..cpu.rows import CHUNK, Origin, distance, highest, lowest, moments
from ..exact.newton import COARSEST, NEAR, RESOLUTION
from ..links.base import Link
from ..links.base_numba import Compiled, NumbaLink, normal_quantile, normal_spacing
from ..selection.numba_counting import count_above
from .numba_counting import SMALL, encloser, focus
from .numba_gaps import sides

# How a search ends: UNSURE if a mask may consist of zeros and ones; UNSEEN in a gap so wide that all tails underflow,
# which tell nothing about t; INFINITE, before it begins, if an item is.
LOST, FOUND, UNSURE, UNSEEN, INFINITE = range(5)

SAMPLE_SIZE, LONG = 2**10, 2**16  # items of a sample, and of rows which start from the root of one
STEPS, NEWTON_STEPS = 30, 8  # 2 to 5 are usual; from the latter on every second step cuts the bracket
NARROWEST, WIDEST = 2.0**-50, 2.0**50  # scales with which nothing overflows, except in rows that are left anyway
NO_QUANTILES = math.nan, math.nan, math.nan, math.nan
SHORT = 2.0**-30  # the size of a step between neighbouring doubles, relative to distances from the threshold
LAST_UNITS = 8.0  # units in the last place by which a sum may be off after NEWTON_STEPS
JUST_ABOVE = 2.0**-10  # scales by which t lies above an item that is about to reach its cap
WIDE = 80.0  # scales of a gap around t with tails that are exponential to all digits, since exp(-40) is less than eps
SLACK = 2.0**-10  # scales by which an approximate quantile may be off
LEAST = 1 / 16  # share of the mean of magnitudes at which a search for their threshold starts at least


class Place(NamedTuple):
    """The threshold of a row, and the numbers that give its scale."""

    anchor: float
    offset: float
    s: float
    q: float


class Scale(NamedTuple):
    """How z = (x - t) / sigma of items depends on t; functions of float64 numbers.

    Attributes:
        name: Distinguishes the compiled functions below from others.
        at: ``(t, s, q)``: sigma.
        threshold: ``(u, z, s, q)``: the t at which the item u has this z.
        step: ``(signed, total, slope, excess, k, q, t, sigma)``: the step of t by Newton's method.
        split: ``(base, t, rest, s, q)``: anchor and offset of base + t + rest.
        grows: Whether sigma grows with t.
    """

    name: str
    at: Compiled
    threshold: Compiled
    step: Compiled
    split: Compiled
    grows: bool


def fixed_scale(name: str, link: NumbaLink, real: Real) -> Scale:
    """The scale of masks, sigma = s."""
    newton_step = link.newton_step

    @inlined
    def at(t, s, q):
        return s

    @inlined
    def threshold(u, z, s, q):
        return u - z * s

    @inlined
    def step(signed, total, slope, excess, k, q, t, sigma):
        return newton_step(signed, total, slope, excess, k, q) * sigma

    @inlined
    def split(base, t, rest, s, q):
        anchor = np.float64(real(base + t))
        return anchor, (((base - anchor) + t) + rest) / s

    return Scale(name, at, threshold, step, split, False)


def _tail_sums(link: NumbaLink, real: Real) -> Compiled:
    """``(x, base, t, inverse, q)``: at base + t, the number of items above, and sums of the tails and slopes.

    The tails are F below t and 1 - F above it. They are summed twice, first with a minus sign above t.
    """
    terms, wide = link.terms, link.distances or real
    two = wide(2)

    @summed
    def of_chunk(x, origin, q):
        above = signed = total = slope = wide(0)
        for i in range(x.shape[0]):
            is_above, tail, rate = terms(distance(wide(x[i]), origin), q)
            above += is_above
            signed += tail - two * is_above * tail
            total += tail
            slope += rate
        return above, signed, total, slope

    @per_row
    def sums(x, base, t, inverse, q):
        anchor = wide(base + t)
        origin = Origin(anchor, wide(inverse), wide(((base - np.float64(anchor)) + t) * inverse))
        above = signed = total = slope = 0.0
        for i in range(0, x.shape[0], CHUNK):
            a, s, u, w = of_chunk(x[i : i + CHUNK], origin, q)
            above += a
            signed += s
            total += u
            slope += w
        return above, signed, total, slope

    return sums


def _judge(link: NumbaLink, grows: bool, real: Real) -> Compiled:
    """``(i, signed, total, slope, excess, move, t, sigma, q)``: how move i ends a search; LOST if it goes on."""
    eps, smallest = float(np.finfo(real).eps), float(np.finfo(real).tiny) / float(np.finfo(real).eps)
    tolerance, reaches_zero = 0.5 * eps**0.5, link.of.reaches_zero

    @inlined
    def of_smooth(i, signed, total, slope, excess, move, t, sigma, q):
        if excess == 0 and total < smallest:
            return UNSEEN
        return FOUND if abs(move) <= tolerance * sigma else LOST

    @inlined
    def of_compact(i, signed, total, slope, excess, move, t, sigma, q):
        residual = signed + excess
        # If doubles are too far apart for a small residual, take a step that ends between two of them and crosses no
        # kink.
        between = min(RESOLUTION * abs(t), COARSEST * sigma)
        # Later, with fewer digits, because sums of equal items may accumulate the rounding of their equal z.
        units = 1 + q if i < NEWTON_STEPS else max(1 + q, LAST_UNITS)
        small = abs(residual) <= units * eps * (total + abs(excess))
        if not small and not (slope * excess < 0 and abs(move) <= min(between, SHORT * sigma * (total / slope))):
            return LOST
        leaving = excess == 0 and (slope > 0 or grows)
        reaching = excess < 0 and q * total >= (1 - NEAR) * slope and abs(residual) <= NEAR * total
        return UNSURE if reaches_zero and excess == math.floor(excess) and (leaving or reaching) else FOUND

    return of_compact if link.of.compact else of_smooth


def _searcher(scale: Scale, link: NumbaLink, real: Real) -> Compiled:
    """``(x, k, s, q, base, t, low, high)``: anchor and offset of the threshold, and how the search has ended.

    The threshold is base + t. The base is a number of the row's dtype near it, so that t has all digits; it is 0 if the
    scale grows. The bracket may be infinite. A step that leaves it, or does not halve the step before last, is replaced
    by a cut.
    """
    sums, judge, compact, grows = _tail_sums(link, real), _judge(link, scale.grows, real), link.of.compact, scale.grows
    scale_at, newton_step, split = scale.at, scale.step, scale.split

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
                stays = (compact and excess >= 0) or how == UNSEEN or not math.isfinite(move)
                move = 0.0 if stays else move
                anchor, offset = split(base, t + move, (t - (t + move)) + move, s, q)
                return anchor, offset, how
            if residual > 0:
                low = max(low, t)
            else:
                high = min(high, t)
            if low < t + move < high and abs(move) <= 0.5 * older and (i < NEWTON_STEPS or i % 2 > 0):
                older, last, t = last, abs(move), t + move
            else:
                older, last, t = last, high - low, 0.5 * low + 0.5 * high
                if grows and high > 4 * low > 0:
                    t = math.sqrt(low) * math.sqrt(high)
                if not math.isfinite(t):
                    break
        return 0.0, 0.0, LOST

    return search


@per_row
def _guess(mean, variance, s, quantile, normal, centre, spread):
    """-t is a quantile of s * (noise of law F) - x: of F's shape for constant x, and about normal for wide x."""
    own = spread * s * s
    share = variance / (variance + own)
    mixed = (1 - share) * (quantile - centre) / math.sqrt(spread) + share * normal
    return mean - centre * s - mixed * math.sqrt(variance + own)


def _quantiles_of(link: NumbaLink) -> Compiled:
    """``(share, q, known)``: what ``known`` has for a share k / n, see :func:`solver`."""
    quantile_of = link.quantile

    @per_row
    def quantiles(share, q, known):
        if share == known[0]:
            return known
        share = min(max(share, 1e-300), 1 - 2.0**-53)
        normal = normal_quantile(share)
        return share, quantile_of(share, q), normal, normal_spacing(normal)

    return quantiles


def _search_from_guess_of(scale: Scale, search: Compiled, compact: bool, real: Real) -> Compiled:
    """``(x, mean, variance, start, k, s, law, bound, known)``: searches from a start or, if that is NaN, from a guess.

    Returns LOST if this does not pay.
    """
    scale_at, threshold, grows = scale.at, scale.threshold, scale.grows

    @per_row
    def search_from_guess(x, mean, variance, start, k, s, law, bound, known):
        (q, centre, spread), (_, quantile, normal, _) = law, known
        if math.isnan(start) and grows:
            start = threshold(max(mean - math.sqrt(variance) * normal, LEAST * mean), quantile, s, q)
        elif math.isnan(start):
            start = _guess(mean, variance, s, quantile, normal, centre, spread)
        sigma = scale_at(start, s, q)
        if not sigma * sigma >= SMALL * SMALL * variance:
            return 0.0, 0.0, LOST
        base, low, high = 0.0 if grows else np.float64(real(start)), -np.inf, np.inf
        if grows:
            low, high = 0.0, np.float64(highest(x))
        elif compact:  # if all items are equal, F(z) = k / n, so t lies within a quantile of the extreme ones
            low = threshold(lowest(x) - base, bound + SLACK, s, q)
            high = threshold(highest(x) - base, bound - SLACK, s, q)
        return search(x, k, s, q, base, min(max(start - base, low), high), low, high)

    return search_from_guess


def _gap_closer(scale: Scale, link: type[Link]) -> Compiled:
    """``(x, left, right, s, q)``: whether t is known in a gap with k items above it; anchor and offset.

    For a clipped power, t lies anywhere between the kinks, where all items are zero or capped; for a capped
    exponential, whose tail vanishes, at the item on the right, which is just capped; for a smooth link, where the tails
    of the items on both sides are equal.
    """
    scale_at, grows = scale.at, scale.grows

    @per_row
    def of_power(x, left, right, s, q):
        room = (right - left) / scale_at(left, s, q) - 1
        if grows:  # at the largest zero, which rounding cannot bring back
            return left > 0 and room >= 0, left, 0.0
        return room >= 0, left, min(0.5 * room, 1.0)

    @inlined
    def of_exponential(x, left, right, s, q):
        return right - left > WIDE * s, right, 0.0

    @per_row
    def of_tails(x, left, right, s, q):
        if not right - left > WIDE * s:
            return False, 0.0, 0.0
        below, above, _, _ = sides(x, left, right, 1 / s, 1 / s, x[:0])
        anchor = np.float64(x.dtype.type(0.5 * left + 0.5 * right))
        return True, anchor, 0.5 * (((right - anchor) - (anchor - left)) / s + math.log(below / above))

    if not link.compact:
        return of_tails
    return of_power if link.reaches_zero else of_exponential


def _search_by_counting_of(scale: Scale, search: Compiled, link: NumbaLink, real: Real) -> Compiled:
    """``(x, k, s, q, u, step)``: a search inside a bracket, see :func:`.numba_counting.encloser`."""
    enclose, close_gap = encloser(scale.name, scale.at, real), _gap_closer(scale, link.of)
    threshold, grows, quantile_of = scale.threshold, scale.grows, link.quantile
    is_exponential = link.of.compact and not link.of.reaches_zero

    @per_row
    def search_by_counting(x, k, s, q, u, step):
        low, high, above_low, above_high, is_gap = enclose(x, k, u, step, s, q)
        if is_gap:
            found, anchor, offset = close_gap(x, low, high, s, q)
            if found:
                return anchor, offset, FOUND
        middle = 0.5 * low + 0.5 * high
        base = 0.0 if grows else np.float64(real(middle))
        share, most = (k - above_high) / (above_low - above_high), (k - above_high) / (x.shape[0] - above_high)
        start = threshold(middle - base, quantile_of(share, q), s, q)
        if is_exponential and is_gap:  # the item on the right is about to reach its cap
            start = (high - base) + JUST_ABOVE * s
        low = threshold(low - base, quantile_of(k / above_low, q) + SLACK, s, q)
        high = threshold(high - base, quantile_of(most, q) - SLACK, s, q)
        return search(x, k, s, q, base, min(max(start, low), high), low, high)

    return search_by_counting


def _start_of_sample_of(scale: Scale, search_from_guess: Compiled) -> Compiled:
    """``(x, share, s, law, sample, known)``: the threshold of a sample of a long row's items; NaN if none is found."""
    scale_at = scale.at

    @per_row
    def start_of_sample(x, share, s, law, sample, known):
        stride = x.shape[0] // SAMPLE_SIZE
        part = sample[: (x.shape[0] + stride - 1) // stride]
        for i in range(part.shape[0]):  # assigning a slice to a slice would compile numba's strings, for its error
            part[i] = x[i * stride]
        mean, variance = moments(part, part[0])
        size = share * part.shape[0]
        a, c, how = search_from_guess(part, part[0] + mean, variance, np.nan, size, s, law, known[1], known)
        return a + c * scale_at(a, s, law[0]) if how != LOST else np.nan

    return start_of_sample


def solver(scale: Scale, link: NumbaLink, real: Real) -> Compiled:
    """``(x, k, s, law, sample, known)``: anchor, offset, how the search ends, ``known``.

    ``law`` is q, and the centre and the spread of the link. ``known`` has a share k / n, the quantiles there of the
    link and of the normal law, and n times the distance of neighbouring items there, in deviations. These are often the
    same as for the previous row.
    """
    search = _searcher(scale, link, real)
    search_from_guess = _search_from_guess_of(scale, search, link.of.compact, real)
    search_by_counting = _search_by_counting_of(scale, search, link, real)
    start_of_sample, quantiles = _start_of_sample_of(scale, search_from_guess), _quantiles_of(link)
    scale_at, grows, reach = scale.at, scale.grows, link.of.reach

    @per_row
    def solve(x, k, s, law, sample, known):
        n, q = x.shape[0], law[0]
        mean, variance = moments(x, x[0])
        mean += x[0]
        if not math.isfinite(variance):
            low, high = np.float64(lowest(x)), np.float64(highest(x))
            if not math.isfinite(high - low):
                return 0.0, 0.0, INFINITE, known
            mean, variance = 0.5 * low + 0.5 * high, np.inf  # numbers so far apart that their squares overflow
        if not (NARROWEST < s < WIDEST and 0 <= k <= n):
            return 0.0, 0.0, LOST, known
        if grows and k >= count_above(x, real(0)):
            return 0.0, 0.0, FOUND, known
        if k == 0:
            return np.float64(highest(x)), 0.0 if grows else reach, FOUND, known
        if k == n:
            return np.float64(lowest(x)), -reach, FOUND, known
        known, start, count = quantiles(k / n, q, known), np.nan, float(n)
        bound = known[1]
        if n >= LONG:
            start = start_of_sample(x, k / n, s, law, sample, known)
        if math.isnan(start):
            mean, variance, above, count = focus(x, k, s, mean, variance)
            known = quantiles((k - above) / count, q, known)
        anchor, offset, how = search_from_guess(x, mean, variance, start, k, s, law, bound, known)
        if how != FOUND:
            deviation = math.sqrt(variance)
            u, step = mean, deviation * known[3] / count
            if how in (UNSURE, UNSEEN):  # the gap, if there is one, is half a scale above t
                u = anchor + (offset + 0.5) * scale_at(anchor, s, q)
            elif variance < np.inf:
                u -= deviation * known[2]
            a, c, again = search_by_counting(x, k, s, q, u, step)
            if again in (FOUND, UNSURE):
                anchor, offset, how = a, c, FOUND
        return anchor, offset, FOUND if how == UNSURE else how, known

    return solve
