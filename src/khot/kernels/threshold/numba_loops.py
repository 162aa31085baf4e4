"""The loops of the numba backend, compiled for one link, one dtype, and values or logarithms.

Forward: Newton's method of :mod:`khot.kernels.threshold.search` from the same start, row by row. Backward: as
:mod:`khot.kernels.threshold.derivative`. A loop marks the rows that it has ``left`` to others.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..links.base import Link
from ..links.base_numba import NumbaLink, normal_quantile, numba_link, variant_of
from ..newton import COARSEST, NEAR, RESOLUTION
from ..numba_math import Real
from ..numba_rows import (
    CHUNK,
    REALS_AT,
    bytes_at,
    difference,
    distance,
    doubles_at,
    gather_finite,
    highest,
    look,
    lowest,
    of_row,
    scatter,
    total_of,
)
from ..numba_tools import inlined, kernel, per_row, specialised, summed
from ..rows import SAMPLE_SIZE

Compiled = Any  # a function that numba has compiled

# How a search ends: KINK where the mask seems to consist of zeros and ones, INFINITE before it begins if an item is.
LOST, FOUND, KINK, INFINITE = range(4)

CANCELLED = 2**-6  # of what is pulled: how much has to be left of it in float32
DOMINANT = 0.75  # share of the slopes above which what an item pulls itself may cancel what it is pulled
SHORT = 2**-30  # of a step between neighbouring doubles, of a compact link, relative to the items that make up the sum
SMALL = 0.5  # a sum k so small that no entry which is scaled to make up for rounding gets to 1
SLIGHT = 2**-10  # relative, at most, what is made up for
STEPS, GUARDED_STEPS = 16, 32  # usual are 2 to 5; rows that take more are left to others
NO_QUANTILES = math.nan, math.nan, math.nan
NARROWEST, WIDEST = 2.0**-50, 2.0**50  # softness with which nothing overflows but what is left to others anyway


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.numba_tools.kernel`."""

    mask: Compiled
    derivative: Compiled


class Shape(NamedTuple):
    """What a loop knows of a link besides its functions."""

    compact: bool
    reaches_zero: bool
    reach: float


def loops_of(link: Link, real: Real, log: bool) -> Loops:
    """The loops for a link that has a numba piece."""
    shape = Shape(link.compact, link.reaches_zero, link.reach)
    return _loops(type(link).__module__, variant_of(link), shape, real, log)


@functools.cache
def _loops(module: str, variant: str, shape: Shape, real: Real, log: bool) -> Loops:
    with specialised(f"{variant} {real.__name__}{' log' if log else ''}"):
        link = numba_link(module, variant, real)
        return Loops(kernel(_mask(link, shape, real, log)), kernel(_derivative(link, shape, real, log)))


def _mask(link: NumbaLink, shape: Shape, real: Real, log: bool) -> Any:
    solve, fill = _solver(link, shape, real), _filler(link, shape, real, log)
    reals_at, ends = REALS_AT[real], (real(-np.inf), real(0)) if log else (real(0), real(1))

    @per_row
    def without_infinite(x, k, scale, q, centre, spread, sample, known, y):
        """Solves and fills a row by its finite items alone, so that the others change no bit of their values."""
        items = np.empty(x.shape[0], real)
        finite, selected = gather_finite(x, items)
        items, k = items[:finite], k - selected
        a, c, how, known = solve(items, k, scale, q, centre, spread, sample, known)
        if how != LOST and y.shape[0] > 0:
            fill(items, k, a, scale, c, q, items)
            scatter(x, items, ends, y)
        return a, c, how, known

    def mask(first, last, n, x, k, one_k, scale, one_scale, y, anchor, offset, left, q, centre, spread):
        xs, ys = reals_at(x, last, n), reals_at(y, last, n if y != 0 else 0)
        anchors, offsets, is_left = (
            doubles_at(anchor, 1, last)[0],
            doubles_at(offset, 1, last)[0],
            bytes_at(left, 1, last)[0],
        )
        sample, count, known = np.empty(2 * SAMPLE_SIZE if n >= 4 * SAMPLE_SIZE else 0, real), 0, NO_QUANTILES
        for r in range(first, last):
            row, size, s = xs[r], of_row(k, one_k, r), of_row(scale, one_scale, r)
            a, c, how, known = solve(row, size, s, q, centre, spread, sample, known)
            if how == INFINITE:
                a, c, how, known = without_infinite(row, size, s, q, centre, spread, sample, known, ys[r])
            elif how != LOST and y != 0:
                fill(row, size, a, s, c, q, ys[r])
            anchors[r], offsets[r], is_left[r] = a, c, how == LOST
            count += how == LOST
        return count

    return mask


def _filler(link: NumbaLink, shape: Shape, real: Real, log: bool) -> Compiled:
    """``(x, k, anchor, scale, offset, q, y)``: the mask of finite items."""
    value, wide = link.log_value if log else link.value, link.distances or real
    settles = real is np.float32 and not log and not (shape.compact and shape.reaches_zero)

    @per_row
    def fill(x, k, anchor, scale, offset, q, y):
        a, inverse, c = wide(anchor), wide(1 / scale), wide(offset)
        for i in range(x.shape[0]):
            y[i] = value(distance(wide(x[i]), a, inverse, c), q)
        if settles and k < SMALL:
            _settle(y, k)

    return fill


@per_row
def _settle(y, k):
    """Scales a mask so small that no entry can reach its cap, and far out in a tail, where all share the rounding of z.

    There a change of the threshold multiplies the entries of one tail by about the same.
    """
    rate = np.float32(k / total_of(y) - 1)
    if 0 < abs(rate) < SLIGHT:
        for i in range(y.shape[0]):
            y[i] += rate * y[i]


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


def _smooth_search(link: NumbaLink, real: Real) -> Compiled:
    """``(x, k, scale, q, t, low, high)``: t, what its rounding took, and whether it is the root; no bracket."""
    sums, newton_step = tail_sums(link, real), link.newton_step
    limits = np.finfo(real)
    tolerance, smallest = 0.5 * float(limits.eps) ** 0.5, float(limits.tiny) / float(limits.eps)

    @per_row
    def search(x, k, scale, q, t, low, high):
        inverse = 1 / scale
        for _ in range(STEPS):
            above, signed, total, slope = sums(x, t, inverse, q)
            step = newton_step(signed, total, slope, above - k, k, q)
            before, move = t, step * scale
            t = before + move
            if abs(step) <= tolerance:
                return t, (before - t) + move, FOUND if above != k or total >= smallest else LOST
            if not math.isfinite(t):
                break
        return t, 0.0, LOST

    return search


def _compact_search(link: NumbaLink, shape: Shape, real: Real) -> Compiled:
    """The same inside a bracket, for a link with kinks."""
    sums, newton_step, reaches_zero = tail_sums(link, real), link.newton_step, shape.reaches_zero
    eps, magnified = float(np.finfo(real).eps), link.distances is None or link.distances is real

    @per_row
    def at_kink(signed, total, slope, excess, q):
        if not reaches_zero or excess != math.floor(excess):
            return False
        leaving = excess == 0 and slope > 0
        reaching = excess < 0 and q * total >= (1 - NEAR) * slope and abs(signed + excess) <= NEAR * total
        return leaving or reaching

    @per_row
    def is_end(t, low, high, room):
        return low - room < t <= low or high <= t < high + room

    @per_row
    def search(x, k, scale, q, t, low, high):
        inverse, older, last = 1 / scale, high - low, high - low
        r_low, r_high = x.shape[0] - k, -k
        for i in range(GUARDED_STEPS):
            above, signed, total, slope = sums(x, t, inverse, q)
            excess = above - k
            residual = signed + excess
            found = KINK if at_kink(signed, total, slope, excess, q) else FOUND
            move = newton_step(signed, total, slope, excess, k, q) * scale
            if abs(residual) <= (1 + magnified * q) * eps * (total + abs(excess)):
                rest = move if excess < 0 else 0.0  # else what is left is nothing, and the step may cross a kink
                return t + rest, (t - (t + rest)) + rest, found
            between = min(RESOLUTION * abs(t), COARSEST * scale)
            if slope > 0 and slope * excess < 0 and abs(move) <= min(between, SHORT * scale * (total / slope)):
                return t + move, (t - (t + move)) + move, found
            if residual > 0:
                low, r_low = t, residual
            else:
                high, r_high = t, residual
            proposal, size = t + move, abs(move)
            if is_end(proposal, low, high, between):  # which rounding has put there
                proposal = low + between if proposal <= low else high - between
            if low < proposal < high and size <= 0.5 * older:
                older, last, t = last, size, proposal
            else:
                share = min(max(r_low / (r_low - r_high), 0.02), 0.98) if i % 2 == 0 else 0.5
                older, last, t = last, high - low, (1 - share) * low + share * high
        return t, 0.0, LOST

    return search


@per_row
def _first_guess(mean, variance, scale, quantile, normal, centre, spread):
    """-t is the quantile of scale * (noise of law F) - x: of F's own shape if x is constant, about normal if wide."""
    own = spread * scale * scale
    share = variance / (variance + own)
    mixed = (1 - share) * (quantile - centre) / math.sqrt(spread) + share * normal
    return mean - centre * scale - mixed * math.sqrt(variance + own)


@per_row
def _leave_kink(x, k, scale, anchor, offset):
    """Where the mask consists of zeros and ones that leave the threshold free, puts it away from either end."""
    count, left, right = 0, -np.inf, np.inf
    for i in range(x.shape[0]):
        if (x[i] - anchor) > (0.5 + offset) * scale:
            count, right = count + 1, min(right, np.float64(x[i]))
        else:
            left = max(left, np.float64(x[i]))
    room = (right - left) / scale - 1
    free = count == k and room >= 0
    return (left, min(0.5 * room, 1.0)) if free else (anchor, offset)


def _solver(link: NumbaLink, shape: Shape, real: Real) -> Compiled:
    """``(x, k, scale, q, centre, spread, sample, known)``: anchor, offset, how the search ends, ``known``.

    ``known`` is a share k / n with the quantiles there of the link and the normal law, often those of the row before.
    """
    compact, reach, quantile_of = shape.compact, shape.reach, link.quantile
    search = _compact_search(link, shape, real) if compact else _smooth_search(link, real)

    @per_row
    def search_from(start, x, span, k, scale, q, centre, spread, known):
        """From a start, or if that is NaN from what mean and variance say."""
        _, _, low, high, mean, variance = span
        _, quantile, normal = known
        if math.isnan(start):
            start = _first_guess(mean, variance, scale, quantile, normal, centre, spread)
        if compact:  # all items equal have F(z) = fraction, so the root lies within a quantile of the extreme ones
            low -= (quantile + 2.0**-10) * scale
            high -= (quantile - 2.0**-10) * scale
            start = min(max(start, low), high)
        return search(x, k, scale, q, start, low, high)

    @per_row
    def solve(x, k, scale, q, centre, spread, sample, known):
        span, n = look(x, compact), x.shape[0]
        _, finite, low, high, _, variance = span
        if finite < n:
            return 0.0, 0.0, INFINITE if finite > 0 else LOST, known  # none is finite either if there is a NaN
        # Not so far apart that squares overflow, nor what is to become an error.
        if not (math.isfinite(variance) and NARROWEST < scale < WIDEST and 0 <= k <= n):
            return 0.0, 0.0, LOST, known
        if k == 0 or k == n:  # beyond the last item, as far as F needs
            low, high = look(x, True)[2:4]
            return high if k == 0 else low, reach if k == 0 else -reach, FOUND, known
        share = min(max(k / n, 1e-300), 1 - 2.0**-53)
        if share != known[0]:
            known = share, quantile_of(share, q), normal_quantile(share)
        start = np.nan
        if n >= 4 * SAMPLE_SIZE:
            stride = n // SAMPLE_SIZE
            part = sample[: (n + stride - 1) // stride]
            for i in range(part.shape[0]):  # a slice assigned to a slice would compile numba's strings, for its error
                part[i] = x[i * stride]
            size = share * part.shape[0]
            start, _, _ = search_from(np.nan, part, look(part, compact), size, scale, q, centre, spread, known)
        t, rest, how = search_from(start, x, span, k, scale, q, centre, spread, known)
        anchor = np.float64(real(t))
        offset = ((t - anchor) + rest) / scale
        if how == KINK:
            anchor, offset = _leave_kink(x, k, scale, anchor, offset)
        return anchor, offset, how, known

    return solve


# ---- Backward


def _derivative(link: NumbaLink, shape: Shape, real: Real, log: bool) -> Any:
    gradient = _log_gradient(link, real) if log else _gradient(link, shape.compact and shape.reaches_zero, real)

    reals_at = REALS_AT[real]

    def derivative(first, last, n, x, scale, one_scale, anchor, offset, g, grad_x, grad_k, grad_scale, left, q):
        xs, gs, grads = reals_at(x, last, n), reals_at(g, last, n), reals_at(grad_x, last, n)
        count, is_left = 0, bytes_at(left, 1, last)[0]
        for r in range(first, last):
            s = of_row(scale, one_scale, r)
            inverse = 1 / s
            at = real(of_row(anchor, 0.0, r)), real(inverse), real(of_row(offset, 0.0, r))
            row, out = xs[r], grads[r]
            of_k, done = gradient(row, at, gs[r], q, real(1 if grad_scale != 0 else inverse), out)
            is_left[r] = not (done and NARROWEST < s < WIDEST)
            count += is_left[r]
            if grad_k != 0:
                doubles_at(grad_k, 1, last)[0, r] = of_k
            if grad_scale != 0:
                doubles_at(grad_scale, 1, last)[0, r] = -inverse * _lever(row, at, out)
                _multiply(out, real(inverse))
        return count

    return derivative


@per_row
def _multiply(x, factor):
    for i in range(x.shape[0]):
        x[i] *= factor


@summed
def _lever(x, at, grad):
    """The sum of z dL/dz in float64, where no product overflows; infinite items have no slope."""
    total = 0.0
    for i in range(x.shape[0]):
        z = np.float64(distance(x[i], *at))
        total += (z if abs(z) < np.inf else 0.0) * np.float64(grad[i])
    return total


@per_row
def _balance(grad, top):
    """Makes the sum of a row 0: the entry ``top`` is minus the sum of the others, which by itself it may not tell."""
    others = 0.0
    for i in range(grad.shape[0]):
        if i != top:
            others += grad[i]
    grad[top] = -others


def _gradient(link: NumbaLink, may_vanish: bool, real: Real) -> Compiled:
    """``(x, at, g, q, factor, out)``: dL/dk and whether all is done; dL/dz times the factor in ``out``."""
    slope, smallest = link.slope, float(np.finfo(real).tiny) / float(np.finfo(real).eps)

    @summed
    def slopes(x, at, g, q, out):
        total = pull = real(0)
        for i in range(x.shape[0]):
            w = slope(distance(x[i], *at), q)
            out[i] = w
            total += w
            pull += w * g[i]
        return total, pull

    @summed
    def rest(g, w, mean):
        total = real(0)
        for i in range(g.shape[0]):
            total += w[i] * difference(g[i], mean)
        return total

    @per_row
    def gradient(x, at, g, q, factor, out):
        n, total, pull, left = x.shape[0], 0.0, 0.0, 0.0
        for i in range(0, n, CHUNK):
            t, p = slopes(x[i : i + CHUNK], at, g[i : i + CHUNK], q, out[i : i + CHUNK])
            total += t
            pull += p
        if may_vanish and total < smallest:
            total = max(total, smallest)
        if not total >= smallest:
            return 0.0, False
        mean = pull / total
        for i in range(0, n, CHUNK):  # nearly equal cotangents lose digits once
            left += rest(g[i : i + CHUNK], out[i : i + CHUNK], real(mean))
        left /= total
        top = np.argmax(out) if highest(out) > DOMINANT * total else -1
        for i in range(n):
            out[i] = out[i] * ((g[i] - real(mean)) - real(left)) * factor
        if top >= 0:
            _balance(out, top)
        return mean + left, True

    return gradient


def _log_gradient(link: NumbaLink, real: Real) -> Compiled:
    """The same of the logarithm."""
    slope, log_derivative = link.slope, link.log_derivative
    smallest, single = float(np.finfo(real).tiny) / float(np.finfo(real).eps), real is np.float32

    @inlined
    def direct(x, z, g, q):
        return log_derivative(z, q) * g if x > -np.inf else real(0)

    @summed
    def slopes(x, at, g, q, out):
        total = pull = real(0)
        for i in range(x.shape[0]):
            z = distance(x[i], *at)
            w = slope(z, q)
            out[i] = w
            total += w
            pull += direct(x[i], z, g[i], q)
        return total, pull

    @per_row
    def gradient(x, at, g, q, factor, out):
        n, total, pull = x.shape[0], 0.0, 0.0
        for i in range(0, n, CHUNK):
            t, p = slopes(x[i : i + CHUNK], at, g[i : i + CHUNK], q, out[i : i + CHUNK])
            total += t
            pull += p
        if not total >= smallest:
            return 0.0, False
        largest, mean = np.float64(highest(out)), real(pull / total)
        top = np.argmax(out) if largest > DOMINANT * total else -1
        for i in range(n):
            z = distance(x[i], *at)
            out[i] = (direct(x[i], z, g[i], q) - out[i] * mean) * factor
        if top >= 0:
            _balance(out, top)
        if single:  # what cancels so far that the rounding of z shows is left to others
            farthest = max(np.float64(highest(out)), -np.float64(lowest(out)))
            if farthest < CANCELLED * abs(factor) * (largest / total) * abs(pull):
                return 0.0, False
        return pull / total, True

    return gradient
