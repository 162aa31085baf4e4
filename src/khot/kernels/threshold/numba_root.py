"""The threshold of one row of finite items: Newton's method over the row, from a guess or inside a bracket by counting.

Steps and their start are those of :mod:`khot.kernels.threshold.search`. Where the softness is small beside the spread
of the items, or Newton's method does not get there from the guess, :mod:`.numba_counting` brackets the threshold.

The same loop finds the thresholds of masks and of magnitudes. They differ in the scale sigma of
z = (x - t) / sigma, which is s, or s t^(p-1) and grows with t: a :class:`Scale`.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..links.base_numba import Compiled, NumbaLink, normal_quantile
from ..newton import COARSEST, NEAR, RESOLUTION
from ..numba_math import Real
from ..numba_rows import CHUNK, distance, highest, lowest, moments
from ..numba_tools import inlined, per_row, specialised, summed
from ..rows import SAMPLE_SIZE
from .numba_counting import encloser
from .numba_gaps import balancer
from .search import SHORT

# How a search ends: UNSURE where a mask may consist of zeros and ones; INFINITE, before it begins, if an item is.
LOST, FOUND, UNSURE, INFINITE = range(4)

STEPS, NEWTON_STEPS = 30, 8  # usual are 2 to 5; from the latter on every other step cuts the bracket
NARROWEST, WIDEST = 2.0**-50, 2.0**50  # scales with which nothing overflows but what is left to others anyway
SMALL = 0.3  # softness, in deviations of the items, below which counting comes first
NO_QUANTILES = math.nan, math.nan, math.nan, math.nan
EXPONENTIAL_GAP = 80.0  # scales of a gap around t whose other side a capped exponential does not see
JUST_BELOW = 2.0**-10  # scales by which an item lies below its cap that is about to reach it
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
        split: ``(t, rest, s, q)``: anchor and offset of t + rest.
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
    def split(t, rest, s, q):
        anchor = np.float64(real(t))
        return anchor, ((t - anchor) + rest) / s

    @per_row
    def trivial(x, k):
        if k == 0:
            return True, np.float64(highest(x)), reach
        if k == x.shape[0]:
            return True, np.float64(lowest(x)), -reach
        return False, 0.0, 0.0

    return Scale(name, at, threshold, guess, step, middle, split, trivial, False)


def tail_sums(link: NumbaLink, real: Real) -> Compiled:
    """``(x, t, inverse, q)``: the sums of :class:`khot.kernels.links.base.TailSums` at t."""
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
    def sums(x, t, inverse, q):
        anchor = wide(t)
        offset = wide((t - np.float64(anchor)) * inverse)
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
    """``(signed, total, slope, excess, move, t, sigma, q)``: how a search ends with this move, LOST if not yet."""
    limits = np.finfo(real)
    eps, smallest = float(limits.eps), float(limits.tiny) / float(limits.eps)
    tolerance, reaches_zero = 0.5 * eps**0.5, shape.reaches_zero

    @inlined
    def of_smooth(signed, total, slope, excess, move, t, sigma, q):
        sure = excess != 0 or total >= smallest
        return FOUND if sure and abs(move) <= tolerance * sigma else LOST

    @per_row
    def of_compact(signed, total, slope, excess, move, t, sigma, q):
        residual = signed + excess
        # Where doubles are too far apart for a small residual, a step to between them that crosses no kink.
        between = min(RESOLUTION * abs(t), COARSEST * sigma)
        small = abs(residual) <= (1 + q) * eps * (total + abs(excess))
        if not small and not (slope * excess < 0 and abs(move) <= min(between, SHORT * sigma * (total / slope))):
            return LOST
        leaving = excess == 0 and (slope > 0 or grows)
        reaching = excess < 0 and q * total >= (1 - NEAR) * slope and abs(residual) <= NEAR * total
        return UNSURE if reaches_zero and excess == math.floor(excess) and (leaving or reaching) else FOUND

    return of_compact if shape.compact else of_smooth


def _searcher(scale: Scale, link: NumbaLink, shape: Shape, real: Real) -> Compiled:
    """``(x, k, s, q, t, low, high)``: t, what its rounding took, and how the search has ended.

    The bracket may be infinite. A step that leaves it, or does not halve the one before last, gives way to a cut.
    """
    sums, judge, compact = tail_sums(link, real), _judge(shape, scale.grows, real), shape.compact
    scale_at, newton_step, middle = scale.at, scale.step, scale.middle

    @per_row
    def search(x, k, s, q, t, low, high):
        older = last = high - low
        for i in range(STEPS):
            sigma = scale_at(t, s, q)
            above, signed, total, slope = sums(x, t, 1 / sigma, q)
            excess = above - k
            residual = signed + excess
            move = newton_step(signed, total, slope, excess, k, q, t, sigma)
            how = judge(signed, total, slope, excess, move, t, sigma, q)
            if how != LOST:
                rest = 0.0 if compact and excess >= 0 or not math.isfinite(move) else move
                return t + rest, (t - (t + rest)) + rest, how
            low, high = max(low, t) if residual > 0 else low, min(high, t) if residual < 0 else high
            proposal = t + move
            if not (low < proposal < high and abs(move) <= 0.5 * older) or (i >= NEWTON_STEPS and i % 2 == 0):
                move, proposal = high - low, middle(low, high)
                if not math.isfinite(proposal):
                    break
            older, last, t = last, abs(move), proposal
        return t, 0.0, LOST

    return search


def _gap_closer(scale: Scale, link: NumbaLink, shape: Shape, real: Real) -> Compiled:
    """``(x, k, s, q, left, right)``: whether t is known in this gap between items; anchor and offset, or a start."""
    scale_at, threshold, grows, quantile_of = scale.at, scale.threshold, scale.grows, link.quantile

    @per_row
    def of_power(x, k, s, q, left, right):
        room = (right - left) / scale_at(left, s, q) - 1
        if grows:  # at the largest zero, which no rounding brings back
            is_wide, offset = left > 0 and room >= 0, 0.0
        else:
            is_wide, offset = room >= 0, min(0.5 * room, 1.0)
        if is_wide:
            return True, left, offset
        return False, threshold(0.5 * left + 0.5 * right, quantile_of(0.5, q), s, q), 0.0

    @per_row
    def of_exponential(x, k, s, q, left, right):
        is_wide = right - left > EXPONENTIAL_GAP * s
        return is_wide, right if is_wide else right + JUST_BELOW * s, 0.0

    if shape.compact:
        return of_power if shape.reaches_zero else of_exponential
    assert link.far is not None
    balance, gap = balancer(link.far, scale.name, real), link.far.gap

    @per_row
    def of_smooth(x, k, s, q, left, right):
        if right - left > gap * s:
            anchor, offset, found = balance(x, k, s, left, right)
            if found:
                return True, anchor, offset
        return False, 0.5 * left + 0.5 * right, 0.0

    return of_smooth


def solver(scale: Scale, link: NumbaLink, shape: Shape, real: Real) -> Compiled:
    """``(x, k, s, q, centre, spread, sample, known)``: anchor, offset, how the search ends, ``known``.

    ``known`` is a share k / n, the quantiles there of the link and of the normal law, and the share over n times the
    density of that, often those of the row before: the latter is how many deviations neighbouring items are apart.
    """
    search, close_gap = _searcher(scale, link, shape, real), _gap_closer(scale, link, shape, real)
    enclose = encloser(scale.at, real, f"{scale.name} {real.__name__}")
    compact, quantile_of, threshold = shape.compact, link.quantile, scale.threshold
    scale_at, guess, split, trivial = scale.at, scale.guess, scale.split, scale.trivial

    @per_row
    def search_from(start, x, k, s, q, quantile):
        low, high = -np.inf, np.inf
        if compact:  # all items equal have F(z) = k / n, so t lies within a quantile of the extreme ones
            low = threshold(np.float64(lowest(x)), quantile + SLACK, s, q)
            high = threshold(np.float64(highest(x)), quantile - SLACK, s, q)
            start = min(max(start, low), high)
        return search(x, k, s, q, start, low, high)

    @per_row
    def start_of_sample(x, share, s, q, centre, spread, sample, known):
        """The threshold of some items of a long row; NaN if there is none."""
        stride = x.shape[0] // SAMPLE_SIZE
        part = sample[: (x.shape[0] + stride - 1) // stride]
        for i in range(part.shape[0]):  # a slice assigned to a slice would compile numba's strings, for its error
            part[i] = x[i * stride]
        mean, variance = moments(part, part[0])
        start = guess(part[0] + mean, variance, s, q, known, centre, spread)
        t, _, how = search_from(start, part, share * part.shape[0], s, q, known[1])
        return t if how != LOST else np.nan

    @per_row
    def search_by_counting(x, k, s, q, u, step):
        low, high, above_low, above_high, is_gap = enclose(x, k, u, step, s, q)
        if is_gap:
            found, start, offset = close_gap(x, k, s, q, low, high)
            if found:
                return start, offset, FOUND
        else:
            share = (k - above_high) / (above_low - above_high)
            start = threshold(0.5 * low + 0.5 * high, quantile_of(share, q), s, q)
        least, most = k / above_low, (k - above_high) / (x.shape[0] - above_high)
        low = threshold(low, quantile_of(least, q) + SLACK, s, q)
        high = threshold(high, quantile_of(most, q) - SLACK, s, q)
        t, rest, how = search(x, k, s, q, min(max(start, low), high), low, high)
        anchor, offset = split(t, rest, s, q)
        return anchor, offset, how

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
            t, rest, how = search_from(start, x, k, s, q, known[1])
            anchor, offset = split(t, rest, s, q)
        if how != FOUND:
            u, step = mean, np.inf
            if variance < np.inf:
                u, step = mean - deviation * known[2], deviation * known[3]
            a, c, again = search_by_counting(x, k, s, q, u, step)
            if again != LOST:
                anchor, offset, how = a, c, FOUND
        return anchor, offset, FOUND if how == UNSURE else how, known

    return solve
