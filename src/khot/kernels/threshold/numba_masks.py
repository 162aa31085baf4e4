"""Masks of one row at its threshold in numba, and their derivatives, by the formulas of :mod:`khot.kernels.threshold`.

Signed masks are masks of abs(x), to which :mod:`.numba_loops` gives signs. A threshold of 0 is idle.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from ..cpu.loops import inlined, per_row, summed
from ..cpu.maths import Real
from ..cpu.rows import CHUNK, Origin, distance, dot, highest, lowest, pull_from, total_of
from ..links.base_numba import Compiled, NumbaLink
from .gaps import UNDERFLOW
from .numba_counting import place_of
from .numba_gaps import gap_shares_of

CANCELLED = 2**-6  # share of a sum that must remain after cancellation in float32
DOMINANT = 0.75  # share of the slopes above which an item's own pull may cancel the pull on it
TINY = float(np.finfo(np.float64).tiny)
SMALL = 0.5  # a sum k so small that no entry reaches 1 when it is scaled to compensate for rounding
SLIGHT = 2**-10  # largest relative correction
# Thresholds above which the distance of an item may overflow
HUGE = {real: float(np.finfo(real).max * np.finfo(real).eps) for real in (np.float32, np.float64)}


def filler(link: NumbaLink, log: bool, real: Real) -> Compiled:
    """``(x, k, place, y)``: the mask of finite items, or its logarithm."""
    value, wide = link.log_value if log else link.value, link.distances or real
    may_settle = settles(link, log, real)

    @per_row
    def fill(x, k, place, y):
        origin = Origin(wide(place.anchor), wide(1 / place.s), wide(place.offset))
        for i in range(x.shape[0]):
            y[i] = value(distance(wide(x[i]), origin), place.q)
        if may_settle and k < SMALL:
            settle(y, k)

    return fill


def settles(link: NumbaLink, log: bool, real: Real) -> bool:
    """Whether rounding of z shows in the sums of small masks."""
    return real is np.float32 and not log and not (link.of.compact and link.of.reaches_zero)


@per_row
def settle(y, k):
    """Scales a mask with a small sum so that it sums to k: far out in a tail, all entries share the rounding of z.

    There a change of the threshold multiplies all entries by about the same factor, and none can reach its cap.
    """
    total = 0.0
    for i in range(y.shape[0]):  # in order, so that items without a share change nothing
        total += y[i]
    rate = np.float32(k / total - 1)
    if 0 < abs(rate) < SLIGHT:
        for i in range(y.shape[0]):
            y[i] += rate * y[i]


# ---- Derivatives


@summed
def _lever(x, origin, grad):
    """The sum of z dL/dz in float64, in which no product overflows; infinite items have no slope."""
    total = 0.0
    for i in range(x.shape[0]):
        z = np.float64(distance(x[i], origin))
        total += (z if abs(z) < np.inf else 0.0) * np.float64(grad[i])
    return total


@per_row
def _finish(x, origin, top, with_scale, out):
    """Returns dL/ds, and writes dL/dx to ``out``, which has dL/dz, or dL/dz divided by s if dL/ds is not wanted.

    The sum of dL/dz is 0. The entry ``top``, if there is one with nearly all of the slopes, is minus the sum of the
    others: computed directly, it may be the difference of two numbers that agree in all their digits.
    """
    if top >= 0:
        out[top] = 0
        out[top] = -total_of(out)
    if not with_scale:
        return 0.0
    lever = _lever(x, origin, out)
    for i in range(out.shape[0]):
        out[i] *= origin.inverse
    return -origin.inverse * lever


def gradient_of(link: NumbaLink, real: Real, of_scores: bool) -> Compiled:
    """``(x, g, place, idle, with_k, with_scale, buffer, out)``: dL/dk, dL/ds, whether all is done.

    dL/dx is in ``out``. If all slopes underflow, it is 0, and dL/dk is computed if it is wanted, which is compiled
    unless only the derivative in the scores ever is. An idle threshold does not move.
    """
    slope, smallest = link.slope, float(np.finfo(real).tiny) / float(np.finfo(real).eps)
    vanishes = of_scores or (link.of.compact and link.of.reaches_zero)
    gap_shares: Compiled = None if vanishes else gap_shares_of(link)

    @summed
    def slopes(x, origin, g, q, out):
        total = pull = real(0)
        for i in range(x.shape[0]):
            w = slope(distance(x[i], origin), q)
            out[i] = w
            total += w
            pull += w * g[i]
        return total, pull

    @per_row
    def gradient(x, g, place, idle, with_k, with_scale, buffer, out):
        n, total, pull, left, size, inverse = x.shape[0], 0.0, 0.0, 0.0, 1.0, 1 / place.s
        origin = Origin(real(place.anchor), real(inverse), real(place.offset))
        for i in range(0, n, CHUNK):
            t, p = slopes(x[i : i + CHUNK], origin, g[i : i + CHUNK], place.q, out[i : i + CHUNK])
            total += t
            pull += p
        if total < smallest:
            if vanishes or not with_k:
                total = smallest
            elif gap_shares(x, place, out)[1]:
                size, total, pull = total, 1.0, dot(out, g)
        if not total >= smallest:
            return 0.0, 0.0, False
        mean, top = real(0 if idle else pull / total), -1
        if not idle:
            largest = highest(out)
            top = place_of(out, largest) if largest > DOMINANT * total else -1
            for i in range(0, n, CHUNK):  # again, since nearly equal cotangents lose digits in the first pass
                left += pull_from(g[i : i + CHUNK], out[i : i + CHUNK], mean)
            left /= total
        factor, remainder = real(size if with_scale else size * inverse), real(left)
        for i in range(n):
            out[i] = out[i] * ((g[i] - mean) - remainder) * factor
        of_scale = _finish(x, origin, top, with_scale and not of_scores, out)
        return np.float64(mean) + left, of_scale, True

    return gradient


def log_gradient_of(link: NumbaLink, precise: NumbaLink, real: Real) -> Compiled:
    """:func:`gradient_of` for the logarithm, from the link in this dtype and in float64."""
    slope, log_derivative, gap_shares = link.slope, link.log_derivative, gap_shares_of(link)
    tiny, smallest = float(np.finfo(real).tiny), float(np.finfo(real).tiny) / float(np.finfo(real).eps)
    single, again = real is np.float32, _exact_log_gradient(precise)

    @inlined
    def direct(x, z, g, q):
        return log_derivative(z, q) * g if x > -np.inf else real(0)

    @summed
    def slopes(x, origin, g, q, out):
        total = pull = real(0)
        for i in range(x.shape[0]):
            z = distance(x[i], origin)
            w = slope(z, q)
            out[i] = w
            total += w
            pull += direct(x[i], z, g[i], q)
        return total, pull

    @summed
    def pull_in_gap(x, origin, g, q, shares, total):
        """dL/dk = sum g_i omega_i / F(z_i): above the gap F is 1, and below omega / F' is 1 / sum F'."""
        above = below = 0.0
        for i in range(x.shape[0]):
            z = distance(x[i], origin)
            if z > 0:
                above += g[i] * shares[i]
            else:
                below += direct(x[i], z, g[i], q)
        return above + below / max(total, tiny)  # divided once, since quotients may overflow with either sign

    @per_row
    def gradient(x, g, place, idle, with_k, with_scale, buffer, out):
        n, total, pull, inverse, q = x.shape[0], 0.0, 0.0, 1 / place.s, place.q
        origin = Origin(real(place.anchor), real(inverse), real(place.offset))
        for i in range(0, n, CHUNK):
            t, p = slopes(x[i : i + CHUNK], origin, g[i : i + CHUNK], q, out[i : i + CHUNK])
            total += t
            pull += p
        of_k, in_gap = pull / total, total < smallest
        if in_gap and gap_shares(x, place, out)[1]:
            of_k, total = pull_in_gap(x, origin, g, q, out, total), 1.0
        if not total >= smallest:
            return 0.0, 0.0, False
        largest, mean = np.float64(highest(out)), real(pull / total)
        top, factor = place_of(out, largest) if largest > DOMINANT * total else -1, 1 if with_scale else inverse
        for i in range(n):
            out[i] = (direct(x[i], distance(x[i], origin), g[i], q) - out[i] * mean) * real(factor)
        if single and not in_gap:  # otherwise the shares have no rounding of z
            farthest = max(np.float64(highest(out)), -np.float64(lowest(out)))
            if farthest < CANCELLED * factor * (largest / total) * abs(pull):
                of_k = again(x, g, place, factor, out)
        return of_k, _finish(x, origin, top, with_scale, out), True

    return gradient


def _exact_log_gradient(link: NumbaLink) -> Compiled:
    """``(x, g, place, factor, out)``: dL/dk; dL/dz times the factor, where float32 cancels."""
    slope, log_derivative = link.slope, link.log_derivative

    @inlined
    def of_item(x, origin, g, q):
        z = distance(np.float64(x), origin)
        return slope(z, q), log_derivative(z, q) * g if x > -np.inf else 0.0

    @per_row
    def gradient(x, g, place, factor, out):
        total = pull = 0.0
        origin = Origin(place.anchor, 1 / place.s, place.offset)
        for i in range(x.shape[0]):
            w, direct = of_item(x[i], origin, g[i], place.q)
            total += w
            pull += direct
        for i in range(x.shape[0]):
            w, direct = of_item(x[i], origin, g[i], place.q)
            out[i] = (direct - w * (pull / total)) * factor
        return pull / total

    return gradient


def threshold_gradient_of(link: NumbaLink, real: Real) -> Compiled:
    """:func:`gradient_of` for the offset, with its cotangent in ``g``, from the link of float64.

    dL/dx_i is the share of an item's slope divided by s, dL/dk is minus the reciprocal of their sum, and dL/ds follows
    from the mean z. The link is that of float64, in which slopes seldom underflow.
    """
    slope, least, vanishes = link.slope, float(np.finfo(real).tiny), link.of.compact and link.of.reaches_zero
    gap_shares: Compiled = None if vanishes else gap_shares_of(link)

    @inlined
    def of_item(x, origin, q):
        z = distance(np.float64(x), origin)
        is_finite = abs(z) < np.inf
        return z if is_finite else 0.0, slope(z, q) if is_finite else 0.0

    @summed
    def slopes(x, origin, q):
        total = lever = 0.0
        for i in range(x.shape[0]):
            z, w = of_item(x[i], origin, q)
            total += w
            lever += w * z
        return total, lever

    @per_row
    def gradient(x, g, place, idle, with_k, with_scale, buffer, out):
        origin, s, push = Origin(place.anchor, 1 / place.s, place.offset), place.s, g[0]
        total, lever = slopes(x, origin, place.q)
        share = 1 / total if total > TINY else 0.0
        if vanishes or total >= UNDERFLOW:
            mean, rate, done = lever * share, share if vanishes else min(share, 1 / least), True
            for i in range(out.shape[0]):
                out[i] = of_item(x[i], origin, place.q)[1] * share * (push / s)
        else:
            (mean, done), rate = gap_shares(x, place, out), 1 / max(total, least)
            for i in range(out.shape[0]):
                out[i] *= push / s
        return -rate * push, -push * (mean + place.offset) / s, done

    return gradient
