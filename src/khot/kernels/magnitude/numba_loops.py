"""The loops of the sparse maps by absolute value, compiled for one exponent, one dtype and one of the two maps.

Forward: the searches of :mod:`khot.kernels.magnitude.search`, row by row. Backward: the sums of
:mod:`khot.kernels.magnitude.local_shape`. A loop marks the rows that it has ``left`` to others: those with numbers so
large or small that what comes up on the way may leave the dtype, and those that a few Newton steps do not solve.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..capped_simplex.numba_loops import NO_QUANTILES, Shape, distance, of_row, solver
from ..links.base_numba import NumbaLink, normal_quantile, numba_link, variant_of
from ..links.clipped_power import ClippedPower
from ..newton import COARSEST, NEAR, RESOLUTION
from ..numba_math import EXP, LOG, Real
from ..numba_rows import CHUNK, REALS_AT, bytes_at, difference, doubles_at, highest, moments
from ..numba_tools import inlined, kernel, per_row, specialised, summed
from ..rows import SAMPLE_SIZE
from .search import OVERSHOOT, SHRINK_STEPS

STEPS = 24  # usual are 3 to 8; rows that take more are left to others
LARGEST = {np.float32: 2.0**24, np.float64: 2.0**300}  # of the numbers of a row; the smallest is its inverse

Compiled = Any  # a function that numba has compiled


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.numba_tools.kernel`."""

    odd_map: Compiled
    derivative: Compiled


class Pieces(NamedTuple):
    """What both loops are made of, in the dtype of the loop.

    Attributes:
        link: Of F(z) = clip(z, 0, 1)^q.
        power: ``(z, q)``: z^(q-1) for positive z.
        shrink: ``(a, strength, q)``: see :func:`khot.kernels.magnitude.search.shrink`.
        place: ``(anchor, offset, strength, q)``: in float64 t, 1 / scale, and whether all are within range.
    """

    link: NumbaLink
    power: Compiled
    shrink: Compiled
    place: Compiled


def loops_of(link: ClippedPower, real: Real, magnitude: bool) -> Loops:
    """The loops for one of the two maps."""
    return _loops(variant_of(link), link.reach, real, magnitude)


@functools.cache
def _loops(variant: str, reach: float, real: Real, magnitude: bool) -> Loops:
    with specialised(f"{variant} {real.__name__}"):
        link = numba_link(ClippedPower.__module__, variant, real)
    with specialised(f"{'magnitude' if magnitude else 'signed'} {variant} {real.__name__}"):
        pieces = _pieces(link, variant, real, magnitude)
        if magnitude:
            solve, value = _magnitude_solver(pieces, real), _magnitude_value(pieces, real)
        else:
            solve, value = _signed_solver(pieces, Shape(True, True, reach), real), _signed_value(pieces)
        return Loops(kernel(_odd_map(solve, value, pieces, real)), kernel(_derivative(pieces, magnitude, real)))


def _pieces(link: NumbaLink, variant: str, real: Real, magnitude: bool) -> Pieces:
    exp, log, one, half = EXP[real], LOG[real], real(1), real(0.5)
    largest = LARGEST[real]
    powers = {
        "clip": lambda z, q: one,
        "clip_power_2": lambda z, q: z,
        "clip_power_3": lambda z, q: z * z,
        "clip_power_4": lambda z, q: z * z * z,
        "clip_power": lambda z, q: exp((real(q) - one) * log(z)),
    }
    power, linear = inlined(powers[variant]), variant == "clip"

    @inlined
    def shrink(a, strength, q):
        if linear:
            return a / (one + strength), a / (one + strength)
        q_real = real(q)
        u = min(a / strength, exp(log(a) / q_real))
        for _ in range(SHRINK_STEPS):
            rate = power(u, q)
            u = ((q_real - one) * rate * u + a) / (q_real * rate + strength)
        taken = strength * u
        return a - taken if taken < half * a else power(u, q) * u, u

    @per_row
    def place(anchor, offset, strength, q):
        if not magnitude:
            return anchor, 1 / strength, 1 / largest < strength < largest
        if anchor == 0:  # all entries are capped
            return 0.0, 0.0, 1 / largest < strength < largest
        t = anchor if offset == 0 else _threshold(anchor, -offset * strength, q)
        in_range = 1 / largest < strength < largest and 1 / largest < anchor < largest and t > 0
        return t, t ** (-1 / q) / strength, in_range

    return Pieces(link, power, shrink, place)


@per_row
def _threshold(anchor, pull, q):
    """The t > 0 with t + pull t^(p-1) = anchor, in float64."""
    if q == 1:
        return anchor / (1 + pull)
    u = min(anchor / pull, anchor ** (1 / q))
    for _ in range(SHRINK_STEPS):
        rate = u ** (q - 1)
        u = ((q - 1) * rate * u + anchor) / (q * rate + pull)
    return anchor - pull * u if pull * u < 0.5 * anchor else u**q


# ---- Forward


def _odd_map(solve: Compiled, value: Compiled, pieces: Pieces, real: Real) -> Any:
    reals_at, place = REALS_AT[real], pieces.place

    @per_row
    def fill(x, anchor, inverse, offset, t, strength, q, y):
        idle = inverse == 0
        for i in range(x.shape[0]):
            size = value(abs(x[i]), distance(abs(x[i]), anchor, inverse, offset), idle, t, strength, q)
            y[i] = -size if x[i] < 0 else size

    @per_row
    def absolute(x, a):
        for i in range(x.shape[0]):
            a[i] = abs(x[i])

    def odd_map(first, last, n, x, k, strength, y, anchor, offset, left, q, centre, spread):
        xs, ys = reals_at(x, last, n), reals_at(y, last, n)
        anchors, offsets = doubles_at(anchor, 1, last)[0], doubles_at(offset, 1, last)[0]
        is_left, count, known = bytes_at(left, 1, last)[0], 0, NO_QUANTILES
        a, sample = np.empty(n, real), np.empty(2 * SAMPLE_SIZE if n >= 4 * SAMPLE_SIZE else 0, real)
        for r in range(first, last):
            s = of_row(strength, 0.0, r)
            absolute(xs[r], a)
            at, c, done, known = solve(a, of_row(k, 0.0, r), s, q, centre, spread, sample, known)
            t, inverse, in_range = place(at, c, s, q)
            anchors[r], offsets[r], is_left[r] = at, c, not (done and in_range)
            count += is_left[r]
            if done and in_range and y != 0:
                fill(xs[r], real(at), real(inverse), real(c), real(t), real(s), q, ys[r])
        return count

    return odd_map


def _signed_value(pieces: Pieces) -> Compiled:
    of_link = pieces.link.value

    @inlined
    def value(a, z, idle, t, strength, q):
        return of_link(z, q)

    return value


def _magnitude_value(pieces: Pieces, real: Real) -> Compiled:
    power, shrink, zero, one, half = pieces.power, pieces.shrink, real(0), real(1), real(0.5)

    @inlined
    def value(a, z, idle, t, strength, q):
        capped = (idle or z >= one) and a > zero
        inside = z > zero and z < one and not idle
        kept, _ = shrink(a if capped else one, strength, q)
        z = z if inside else half
        return kept if capped else t * power(z, q) * z if inside else zero

    return value


def _signed_solver(pieces: Pieces, shape: Shape, real: Real) -> Compiled:
    """``(a, k, strength, q, centre, spread, sample, known)``: anchor, offset, whether they are it, and ``known``."""
    solve_mask, largest = solver(pieces.link, shape, real), LARGEST[real]

    @per_row
    def solve(a, k, strength, q, centre, spread, sample, known):
        _, variance = moments(a, a[0])
        if not (math.isfinite(variance) and 1 / largest < strength < largest):
            return 0.0, 0.0, False, known
        anchor, offset, done, known = solve_mask(a, k, strength, q, centre, spread, sample, known)
        if not anchor + offset * strength > 0:  # the threshold does not follow below 0
            return 0.0, 0.0, done, known
        return anchor, offset, done, known

    return solve


def _magnitude_solver(pieces: Pieces, real: Real) -> Compiled:
    """The same of the magnitudes."""
    largest, search = LARGEST[real], _magnitude_search(pieces.link, real)

    @per_row
    def start_of(a, k, strength, q, mean, variance):
        """What mean and variance say: the root if all entries were the quantile."""
        share = min(max(k / a.shape[0], 1e-300), 1 - 2.0**-53)
        quantile = mean - math.sqrt(variance) * normal_quantile(share)
        return _threshold(quantile, strength * share ** (1 / q), q) if quantile > 0 else 0.0

    @per_row
    def root_from(a, k, strength, q, top, start):
        low = min(2.0**-1000, top)  # below all thresholds that are not left to others
        return search(a, k, strength, q, min(max(start, low), top), low, top)

    @per_row
    def solve(a, k, strength, q, centre, spread, sample, known):
        n = a.shape[0]
        mean, variance = moments(a, a[0])
        top = np.float64(highest(a)) if math.isfinite(variance) else np.nan
        if not (top < largest and 1 / largest < strength < largest and 0 <= k <= n):
            return 0.0, 0.0, False, known
        if k >= _number_above_zero(a):
            return 0.0, 0.0, True, known
        if k == 0:
            return top, 0.0, True, known
        start = start_of(a, k, strength, q, a[0] + mean, variance)
        if n >= 4 * SAMPLE_SIZE:
            stride = n // SAMPLE_SIZE
            part = sample[: (n + stride - 1) // stride]
            part[:] = a[::stride]
            most = np.float64(highest(part))
            t, _, found, _ = root_from(part, k * (part.shape[0] / n), strength, q, most, min(start, most))
            start = t if found else start
        t, rest, found, whole = root_from(a, k, strength, q, top, start)
        if not found:
            return 0.0, 0.0, False, known
        inverse = t ** (-1 / q) / strength
        nearest = real(t)  # the anchor is the number next above t
        if np.float64(nearest) - t < rest:
            nearest = np.nextafter(nearest, real(np.inf))
        anchor = np.float64(nearest)
        offset = min(((t - anchor) + rest) * inverse, 0.0)
        if whole:
            free, largest_zero = _free(a, k, t, rest, strength, q)
            if free:
                return largest_zero, 0.0, True, known
        return anchor, offset, True, known

    return solve


@summed
def _number_above_zero(a):
    count = 0
    for i in range(a.shape[0]):
        count += a[i] > 0
    return count


@per_row
def _free(a, k, t, rest, strength, q):
    """Whether k entries are capped and all others zero, with room for t; and the largest zero."""
    inverse = t ** (-1 / q) / strength
    count, left, right = 0, 0.0, np.inf
    for i in range(a.shape[0]):
        if ((a[i] - t) - rest) * inverse > 0.5:
            count, right = count + 1, min(right, np.float64(a[i]))
        else:
            left = max(left, np.float64(a[i]))
    if count != k or left == 0:
        return False, left
    return (right - left) / strength * left ** (-1 / q) >= 1, left


def _magnitude_search(link: NumbaLink, real: Real) -> Compiled:
    """``(a, k, strength, q, t, low, high)``: t, what its rounding took, whether it is found, perhaps all caps and 0."""
    terms, eps = link.terms, float(np.finfo(real).eps)

    @summed
    def of_chunk(a, anchor, inverse, offset, q):
        above = total = slope = real(0)
        for i in range(a.shape[0]):
            is_above, tail, rate = terms(distance(a[i], anchor, inverse, offset), q)
            above += is_above
            total += tail
            slope += rate
        return above, total, slope

    @per_row
    def sums(a, t, inverse, q):
        anchor = real(t)
        offset = real((t - np.float64(anchor)) * inverse)
        above = total = slope = 0.0
        for i in range(0, a.shape[0], CHUNK):
            c, u, w = of_chunk(a[i : i + CHUNK], anchor, real(inverse), offset, q)
            above += c
            total += u
            slope += w
        return above, total, slope

    @per_row
    def growth_of(total, slope, excess, inverse, q):
        """Of t^(-1/q), relative, by one step; not a number where there is none."""
        if excess <= 0:
            growth = total * ((-excess / total) ** (1 / q) - 1)
            if excess == 0:
                growth *= 1 + OVERSHOOT
        else:
            growth = -(total + excess) / q
        return growth / (total + inverse * slope)

    @per_row
    def search(a, k, strength, q, t, low, high):
        older, last = high - low, high - low
        r_low, r_high = a.shape[0] - k, -k
        for i in range(STEPS):
            root = t ** (-1 / q)
            above, total, slope = sums(a, t, root / strength, q)
            excess = above - k
            residual, inverse = total + excess, t * root / strength  # t in scales
            whole = excess == 0 or (q * total >= (1 - NEAR) * slope and abs(residual) <= NEAR * total)
            relative = math.expm1(-q * math.log1p(growth_of(total, slope, excess, inverse, q)))
            step, between = t * relative, min(RESOLUTION * inverse, COARSEST)
            small = abs(residual) <= (1 + q) * eps * (total + abs(excess))
            if small or (abs(relative) * inverse <= between and slope > 0):
                step = step if math.isfinite(step) else 0.0
                return t + step, (t - (t + step)) + step, True, whole and k == math.floor(k)
            if residual > 0:
                low, r_low = t, residual
            else:
                high, r_high = t, residual
            proposal, size = t + step, abs(step)
            if low < proposal < high and size <= 0.5 * older:
                older, last, t = last, size, proposal
            else:
                share = min(max(r_low / (r_low - r_high), 0.02), 0.98)
                cut = (1 - share) * low + share * high
                if i % 2 == 1:
                    cut = math.sqrt(low) * math.sqrt(high) if high > 4 * low else 0.5 * (low + high)
                older, last, t = last, high - low, cut
        return t, 0.0, False, False

    return search


# ---- Backward


def _derivative(pieces: Pieces, magnitude: bool, real: Real) -> Any:
    slope, power, shrink, place = pieces.link.slope, pieces.power, pieces.shrink, pieces.place
    reals_at, zero, one = REALS_AT[real], real(0), real(1)

    @inlined
    def inward(g, x):
        return g if x > zero else -g if x < zero else zero

    @inlined
    def own(a, z, idle, strength, q):
        """h and e of an entry."""
        capped = (idle or z >= one) and a > zero
        _, u = shrink(a if capped else one, strength, q)
        rate = power(u, q)
        return rate / (rate + strength / real(q)) if capped else zero, u

    @summed
    def slopes(x, g, at, idle, q, out):
        total = share = pull = zero
        for i in range(x.shape[0]):
            z = distance(abs(x[i]), *at)
            f = zero if idle else slope(z, q)
            out[i] = f
            total += f
            pull += f * inward(g[i], x[i])
            if magnitude:
                share += f * z
        return total, share, pull

    @per_row
    def gradients(x, g, at, idle, mean, rate, strength, q, out):
        for i in range(x.shape[0]):
            push = inward(g[i], x[i])
            grad = out[i] * difference(push, mean) * rate
            if magnitude:
                h, _ = own(abs(x[i]), distance(abs(x[i]), *at), idle, strength, q)
                grad += h * push
            out[i] = inward(grad, x[i])

    @summed
    def levers(x, g, at, idle, mean, gain, strength, q):
        """-dL/d strength in float64."""
        total = 0.0
        for i in range(x.shape[0]):
            push, z = inward(g[i], x[i]), distance(abs(x[i]), *at)
            f = zero if idle else slope(z, q)
            total += np.float64(f * difference(push, mean) * min(max(z, zero), one)) * gain
            if magnitude:
                h, e = own(abs(x[i]), z, idle, strength, q)
                total += np.float64(h * push * e)
        return total

    @per_row
    def derive(x, g, at, t, s, q, out):
        """The mean, and 1 / scale times the gain."""
        idle, total, share, pull = at[1] == 0, 0.0, 0.0, 0.0
        for i in range(0, x.shape[0], CHUNK):
            part = slice(i, i + CHUNK)
            w, c, p = slopes(x[part], g[part], at, idle, q, out[part])
            total += w
            share += c
            pull += p
        if magnitude:
            gain, rate = t, t ** (1 - 1 / q) / s
            weight = total + share / (q * rate) if not idle else 0.0
        else:
            gain, rate = 1.0, 1 / s
            weight = total if at[0] != 0 or at[2] != 0 else 0.0
        mean = pull / weight if weight > 0 else 0.0
        gradients(x, g, at, idle, real(mean), real(rate), real(s), q, out)
        return mean, gain

    def derivative(first, last, n, x, strength, anchor, offset, g, grad_x, grad_k, grad_strength, left, q):
        xs, gs, grads = reals_at(x, last, n), reals_at(g, last, n), reals_at(grad_x, last, n)
        is_left, count = bytes_at(left, 1, last)[0], 0
        of_k = doubles_at(grad_k, 1, last)[0]
        for r in range(first, last):
            s, c, row = of_row(strength, 0.0, r), of_row(offset, 0.0, r), xs[r]
            exact = of_row(anchor, 0.0, r)
            t, inverse, in_range = place(exact, c, s, q)
            rounded = real(exact)  # others may have solved the row in float64
            at = rounded, real(inverse), real(c + (exact - np.float64(rounded)) * inverse)
            is_left[r] = not in_range
            count += is_left[r]
            if in_range:
                mean, gain = derive(row, gs[r], at, t, s, q, grads[r])
                of_k[r] = gain * mean
                if grad_strength != 0:
                    total = levers(row, gs[r], at, at[1] == 0, real(mean), gain / s, real(s), q)
                    doubles_at(grad_strength, 1, last)[0, r] = -total
        return count

    return derivative
