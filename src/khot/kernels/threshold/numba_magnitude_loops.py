"""The loops of the magnitudes in numba, compiled for one exponent and one dtype, for ordinary rows.

Forward: Newton's method of :mod:`khot.kernels.magnitude.search` from the same start, row by row. Backward: the formulas
of :mod:`khot.kernels.magnitude`. A loop marks the rows that it has ``left`` to others: those with entries, strengths or
thresholds that are not of ordinary size, and those that a few steps do not solve.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..links import clipped_power
from ..links.base_numba import NumbaLink, normal_quantile, numba_link
from ..links.clipped_power_numba import power_below
from ..newton import COARSEST, NEAR, RESOLUTION
from ..numba_math import EXP, LOG, Real
from ..numba_rows import CHUNK, REALS_AT, bytes_at, doubles_at, minimum, of_row
from ..numba_tools import inlined, kernel, per_row, specialised, summed
from ..rows import SAMPLE_SIZE
from .kinds import SHRINK_STEPS

Compiled = Any  # a function that numba has compiled

LOST, FOUND, HARD = range(3)  # how a search ends: HARD where all entries may be zero or capped
OVERSHOOT = 2**-10  # relative to the step at which the last pooled entry leaves, so that it becomes an exact zero
ORDINARY = 2.0**24  # thresholds and strengths up to which, and down to the inverse of which, float32 does
STEPS = 24  # usual are 3 to 8; rows that take more are left to others
WITH_LOOPS_OF_THEIR_OWN = {1.0: "clip", 3.0: "clip_power_3"}  # q of p = 2 and p = 4/3, the usual ones
WIDE = 4.0  # ratio of the ends of a bracket above which its middle is that of their logarithms


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.numba_tools.kernel`."""

    odd_map: Compiled
    derivative: Compiled


class Row(NamedTuple):
    """Of the absolute values of a row.

    Attributes:
        nonzero: How many are not 0.
        smallest, largest: Of those that are not 0.
        mean, variance: Of all; not finite where the row is not, or nearly not.
    """

    nonzero: Any
    smallest: Any
    largest: Any
    mean: Any
    variance: Any


class Place(NamedTuple):
    """A threshold as the entries see it, in their dtype: z = (a - anchor) * inverse * second - offset."""

    anchor: Any
    inverse: Any
    second: Any
    offset: Any


class Chunks(NamedTuple):
    """What loops over rows and over pieces of rows are made of; all but ``place`` of some entries of a row.

    Attributes:
        look: ``(x)``: the :class:`Row`.
        sums: ``(x, t, strength, q)``: number of capped entries, and the sums of F and F' of the others.
        place: ``(anchor, offset, strength, q)``: t, and its :class:`Place`.
        fill_roots: ``(x, strength, q, u)``: u of all entries but 0.
        fill: ``(x, at, t, strength, q, y)``: y in the place of the roots u.
        slopes: ``(x, at, g, q, out)``: f; their sum, that of z^q over the same entries, and the pull.
        pull_back: ``(x, at, g, u, mean, rate, strength, q, out)``: dL/dx in the place of the slopes; the levers.
    """

    look: Compiled
    sums: Compiled
    place: Compiled
    fill_roots: Compiled
    fill: Compiled
    slopes: Compiled
    pull_back: Compiled


def variant_of(q: float) -> str:
    """The name of what is compiled for an exponent."""
    return WITH_LOOPS_OF_THEIR_OWN.get(q, "clip_power")


@functools.cache
def chunks_of(variant: str, real: Real) -> Chunks:
    """What is done to some entries of a row."""
    with specialised(f"{variant} {real.__name__}"):
        link, power = numba_link(clipped_power.__name__, variant, real), power_below(variant, real)
        shrinker, place = _shrinker(variant, real), _placer(_thresholder(variant), real)
        fill_roots, fill = _root_filler(shrinker, real), _filler(link, shrinker, real)
        return Chunks(_looker(real), _sums(link, real), place, fill_roots, fill, *_gradients(link, power, real))


@functools.cache
def loops_of(variant: str, real: Real) -> Loops:
    """The loops for exponents of a variant, see :func:`variant_of`."""
    chunks = chunks_of(variant, real)
    with specialised(real.__name__):
        split = _splitter(real)
    with specialised(f"{variant} {real.__name__}"):
        search, leave_kink = _searcher(chunks.sums, real), _kink_leaver(chunks.place, real)
        solve = _solver(chunks.look, split, _shrink(variant), search, leave_kink)
        return Loops(kernel(_odd_map(solve, chunks, real)), kernel(_derivative(chunks, real)))


@inlined
def distance(a, at):
    return (a - at.anchor) * at.inverse * at.second - at.offset


@inlined
def _is_ordinary(number):
    return 1 / ORDINARY < number < ORDINARY


@per_row
def _power(x, exponent):
    return x if exponent == 1 else x**exponent


# ---- Capped entries: the y >= 0 with y + strength y^(p-1) = a > 0, and u = y^(p-1), as in :func:`.search.shrink`


class Shrinker(NamedTuple):
    """How u is found.

    Attributes:
        start: ``(a, strength, q)``: where Newton's method for u starts.
        step: ``(u, a, strength, q)``: one of its steps.
        steps: How many it takes.
        value: ``(u, a, strength, q)``: y.
    """

    start: Compiled
    step: Compiled
    steps: int
    value: Compiled


def _shrinker(variant: str, real: Real) -> Shrinker:
    one, half = real(1), real(0.5)
    if variant == "clip":
        at_once = inlined(lambda a, strength, q: a / (one + strength))
        same = inlined(lambda u, a, strength, q: u)
        return Shrinker(at_once, same, 0, same)

    power, exp, log = power_below(variant, real), EXP[real], LOG[real]

    @inlined
    def start(a, strength, q):
        return min(a / strength, exp(log(a) / q))

    @inlined
    def step(u, a, strength, q):
        rate = power(u, q)
        return ((q - one) * rate * u + a) / (q * rate + strength)

    @inlined
    def value(u, a, strength, q):
        return a - strength * u if strength * u < half * a else power(u, q) * u

    return Shrinker(start, step, SHRINK_STEPS, value)


def _root_filler(shrinker: Shrinker, real: Real) -> Compiled:
    """``(x, strength, q, u)``: u of all entries of x but 0, step by step, which a compiler takes several of at once."""
    start, step, steps, _ = shrinker
    zero, one = real(0), real(1)

    @inlined
    def size(x):
        return abs(x) if x != zero else one

    @per_row
    def fill_roots(x, strength, q, u):
        for i in range(x.shape[0]):
            u[i] = start(size(x[i]), strength, q)
        for _ in range(steps):
            for i in range(x.shape[0]):
                u[i] = step(u[i], size(x[i]), strength, q)

    return fill_roots


@functools.cache
def _shrink(variant: str) -> Compiled:
    """``(a, strength, q)``: y of one number in float64."""
    with specialised(variant):
        start, step, steps, value = _shrinker(variant, np.float64)

        @per_row
        def shrink(a, strength, q):
            u = start(a, strength, q)
            for _ in range(steps):
                u = step(u, a, strength, q)
            return value(u, a, strength, q)

    return shrink


@functools.cache
def _thresholder(variant: str) -> Compiled:
    """``(anchor, offset, strength, q)``: t, and t^(p-1) whose q-th power has all digits of t."""
    shrink = _shrink(variant)
    with specialised(variant):

        @per_row
        def threshold(anchor, offset, strength, q):
            t = shrink(anchor, (0 - offset) * strength, q)
            if q == 1:
                return t, t
            root = t ** (1 / q)
            return t, root * (1 + (t / root**q - 1) / q)

    return threshold


def _placer(threshold: Compiled, real: Real) -> Compiled:
    """``(anchor, offset, strength, q)``: t, and its :class:`Place`. At t = 0 every entry but 0 is capped."""

    @per_row
    def place(anchor, offset, strength, q):
        if anchor == 0:
            return 0.0, Place(real(0), real(0), real(0), real(-2))
        t, root = threshold(anchor, offset, strength, q)
        return t, Place(real(anchor), real(1 / strength), real(1 / root), real(offset))

    return place


# ---- What a search looks at


@summed
def _chunk_moments(x):
    nonzero = total = squares = x[0] - x[0]
    for i in range(x.shape[0]):
        a = abs(x[i])
        nonzero += a > 0
        total += a
        squares += a * a
    return nonzero, total, squares


@functools.cache
def _looker(real: Real) -> Compiled:
    with specialised(real.__name__):
        return _compiled_look(real)


def _compiled_look(real: Real) -> Compiled:
    nothing = real(np.inf)

    @summed
    def smallest(x):
        found = nothing
        for i in range(x.shape[0]):
            a = abs(x[i])
            found = minimum(found, a if a > 0 else nothing)
        return found

    @summed
    def largest(x):
        found = -abs(x[0])
        for i in range(x.shape[0]):
            found = minimum(found, -abs(x[i]))
        return -found

    @per_row
    def look(x):
        n, nonzero, total, squares = x.shape[0], 0.0, 0.0, 0.0
        for i in range(0, n, CHUNK):
            c, t, s = _chunk_moments(x[i : i + CHUNK])
            nonzero += c
            total += t
            squares += s
        mean = total / n
        variance = max(squares / n - mean * mean, 0.0) if math.isfinite(squares) else np.nan
        return Row(nonzero, np.float64(smallest(x)), np.float64(largest(x)), mean, variance)

    return look


def _sums(link: NumbaLink, real: Real) -> Compiled:
    """``(x, t, strength, q)``: number of capped entries, and the sums of F and F' of the others."""
    terms = link.terms

    @summed
    def of_chunk(x, at, q):
        above = total = slope = real(0)
        for i in range(x.shape[0]):
            is_above, tail, rate = terms(distance(abs(x[i]), at), q)
            above += is_above
            total += tail
            slope += rate
        return above, total, slope

    @per_row
    def sums(x, t, strength, q):
        anchor, second = real(t), 1 / _power(t, 1 / q)
        offset = real((t - np.float64(anchor)) / strength * second)
        at = Place(anchor, real(1 / strength), real(second), offset)
        above = total = slope = 0.0
        for i in range(0, x.shape[0], CHUNK):
            a, u, w = of_chunk(x[i : i + CHUNK], at, q)
            above += a
            total += u
            slope += w
        return above, total, slope

    return sums


# ---- Search


@per_row
def _relative_step(above, total, slope, inverse, k, q):
    """Newton's step of t over t; NaN where there is none. ``inverse`` is t in scales."""
    excess = above - k
    growth = total * (_power(-excess / total, 1 / q) - 1) if excess <= 0 else -(total + excess) / q
    if excess == 0:
        growth *= 1 + OVERSHOOT
    return math.expm1(-q * math.log1p(growth / (total + inverse * slope)))


@per_row
def _middle(low, high):
    return math.sqrt(low) * math.sqrt(high) if high > WIDE * low else 0.5 * low + 0.5 * high


def _searcher(sums: Compiled, real: Real) -> Compiled:
    """``(x, k, strength, q, t, low, high)``: t, what its rounding took, and how the search has ended."""
    eps = float(np.finfo(real).eps)

    @per_row
    def search(x, k, strength, q, t, low, high):
        older, last, r_low, r_high = high - low, high - low, x.shape[0] - k, -k
        for i in range(STEPS):
            above, total, slope = sums(x, t, strength, q)
            excess, inverse = above - k, _power(t, 1 - 1 / q) / strength if q != 1 else 1 / strength
            residual = total + excess
            relative = _relative_step(above, total, slope, inverse, k, q)
            small = abs(residual) <= (1 + q) * eps * (total + abs(excess))
            # Where the doubles are too far apart for a small residual, a step to between them that crosses no kink.
            if small or (abs(relative) * inverse <= min(RESOLUTION * inverse, COARSEST) and slope > 0):
                whole = q * total >= (1 - NEAR) * slope and abs(residual) <= NEAR * total
                hard = (excess == 0 or whole) and k == math.floor(k)
                move = t * relative if math.isfinite(relative) else 0.0
                return t + move, (t - (t + move)) + move, HARD if hard else FOUND
            if residual > 0:
                low, r_low = t, residual
            else:
                high, r_high = t, residual
            proposal, size = t + t * relative, abs(t * relative)
            if low < proposal < high and size <= 0.5 * older:
                older, last, t = last, size, proposal
            else:
                share = min(max(r_low / (r_low - r_high), 0.02), 0.98)
                cut = (1 - share) * low + share * high if i % 2 == 0 else _middle(low, high)
                older, last, t = last, high - low, cut
        return t, 0.0, LOST

    return search


@functools.cache
def _splitter(real: Real) -> Compiled:
    """``(t, rest, strength, q)``: an anchor next above t, and the offset."""
    infinity = real(np.inf)

    @per_row
    def split(t, rest, strength, q):
        anchor = real(t)
        if np.float64(anchor) - t < rest:
            anchor = np.nextafter(anchor, infinity)
        offset = ((t - np.float64(anchor)) + rest) / strength / _power(t, 1 / q)
        return np.float64(anchor), min(offset, 0.0)

    return split


def _kink_leaver(place: Compiled, real: Real) -> Compiled:
    half, zero, nothing = real(0.5), real(0), real(np.inf)

    @summed
    def divide(x, at):
        """How many entries are nearer to their cap than to zero, the smallest of them, and the largest other one."""
        count, left, right = zero, zero, nothing
        for i in range(x.shape[0]):
            a = abs(x[i])
            above = distance(a, at) > half
            count += above
            left = minimum(left, -(zero if above else a))
            right = minimum(right, a if above else nothing)
        return count, -left, right

    @per_row
    def leave_kink(x, k, strength, q, anchor, offset):
        """Where all entries are zero or capped, the threshold at the largest zero, which no rounding brings back."""
        _, at = place(anchor, offset, strength, q)
        count, left, right = 0.0, 0.0, np.inf
        for i in range(0, x.shape[0], CHUNK):
            c, low, high = divide(x[i : i + CHUNK], at)
            count, left, right = count + c, max(left, np.float64(low)), min(right, np.float64(high))
        free = count == k and left > 0 and (right - left) / strength / _power(left, 1 / q) >= 1
        return (left, 0.0) if free else (anchor, offset)

    return leave_kink


def _solver(look: Compiled, split: Compiled, shrink: Compiled, search: Compiled, leave_kink: Compiled) -> Compiled:
    """``(x, k, strength, q, sample)``: anchor and offset, and whether they are the threshold."""
    tiny = float(np.finfo(np.float64).tiny)

    @per_row
    def search_from(start, x, row, k, strength, q):
        """From a start, or if that is NaN from what mean and variance say."""
        # At `low` every nonzero entry is capped: half of it is above t, half above the scale at t.
        low = max(min(row.smallest / 2, (row.smallest / strength / 2) ** q), tiny)
        high = max(row.largest, low)
        if math.isnan(start):
            share = min(max(k / x.shape[0], 1e-300), 1 - 2.0**-53)
            quantile = row.mean - math.sqrt(row.variance) * normal_quantile(share)
            start = shrink(quantile, strength * _power(share, 1 / q), q) if quantile > 0 else low
        return search(x, k, strength, q, min(max(start, low), high), low, high)

    @per_row
    def solve(x, k, strength, q, sample):
        row = look(x)
        if not (math.isfinite(row.variance) and _is_ordinary(strength) and 0 <= k <= x.shape[0]):
            return 0.0, 0.0, False
        if k >= row.nonzero and row.largest < ORDINARY:
            return 0.0, 0.0, True
        if not _is_ordinary(row.largest):
            return 0.0, 0.0, False
        if k == 0:
            return row.largest, 0.0, True
        start = np.nan
        if x.shape[0] >= 4 * SAMPLE_SIZE:
            stride = x.shape[0] // SAMPLE_SIZE
            part = sample[: (x.shape[0] + stride - 1) // stride]
            for i in range(part.shape[0]):
                part[i] = x[i * stride]
            of_part = look(part)
            size = k / x.shape[0] * part.shape[0]
            if size < of_part.nonzero:
                start, _, _ = search_from(np.nan, part, of_part, size, strength, q)
        t, rest, how = search_from(start, x, row, k, strength, q)
        if how == LOST or not _is_ordinary(t):
            return 0.0, 0.0, False
        anchor, offset = split(t, rest, strength, q)
        if how == HARD:
            anchor, offset = leave_kink(x, k, strength, q, anchor, offset)
        return anchor, offset, _is_ordinary(anchor)

    return solve


# ---- Forward


def _filler(link: NumbaLink, shrinker: Shrinker, real: Real) -> Compiled:
    value, kept, zero, one = link.value, shrinker.value, real(0), real(1)

    @per_row
    def fill(x, at, t, strength, q, y):
        for i in range(x.shape[0]):
            a = abs(x[i])
            z = distance(a, at)
            capped = (z >= one) & (a > zero)
            size = kept(y[i], a, strength, real(q)) if capped else t * value(z, q)
            y[i] = -size if x[i] < zero else size

    return fill


def _odd_map(solve: Compiled, chunks: Chunks, real: Real) -> Any:
    reals_at, place, fill_roots, fill = REALS_AT[real], chunks.place, chunks.fill_roots, chunks.fill

    def odd_map(first, last, n, x, k, strength, y, anchor, offset, left, q):
        xs, ys = reals_at(x, last, n), reals_at(y, last, n)
        anchors, offsets = doubles_at(anchor, 1, last)[0], doubles_at(offset, 1, last)[0]
        sample, count = np.empty(2 * SAMPLE_SIZE if n >= 4 * SAMPLE_SIZE else 0, real), 0
        is_left = bytes_at(left, 1, last)[0]
        for r in range(first, last):
            s = of_row(strength, 0.0, r)
            a, c, done = solve(xs[r], of_row(k, 0.0, r), s, q, sample)
            anchors[r], offsets[r], is_left[r] = a, c, not done
            count += not done
            if done and y != 0:
                t, at = place(a, c, s, q)
                for i in range(0, n, CHUNK):
                    x_part, y_part = xs[r, i : i + CHUNK], ys[r, i : i + CHUNK]
                    fill_roots(x_part, real(s), real(q), y_part)
                    fill(x_part, at, real(t), real(s), q, y_part)
        return count

    return odd_map


# ---- Backward


def _gradients(link: NumbaLink, power: Compiled, real: Real) -> tuple[Compiled, Compiled]:
    """``slopes`` and ``pull_back``."""
    terms, zero, one = link.terms, real(0), real(1)

    @inlined
    def inward(x, g):
        return g if x > zero else -g

    @summed
    def slopes(x, at, g, q, out):
        """The slopes f in ``out``; their sum, that of z^q over the same entries, and the pull <f, g>."""
        total = shares = pull = zero
        for i in range(x.shape[0]):
            _, share, f = terms(distance(abs(x[i]), at), q)
            out[i] = f
            total += f
            shares += share
            pull += f * inward(x[i], g[i])
        return total, shares, pull

    @summed
    def pull_back(x, at, g, u, mean, rate, strength, q, out):
        """dL/dx in place of the slopes, from the roots u; the levers of entries that follow the threshold, and own."""
        levers = own_levers = zero
        for i in range(x.shape[0]):
            a, push = abs(x[i]), inward(x[i], g[i])
            z = distance(a, at)
            capped = (z >= one) & (a > zero)
            steepness = power(u[i], q)
            own = push * (steepness / (steepness + strength / q)) if capped else zero
            centred = out[i] * (push - mean)
            levers += centred * z if out[i] > zero else zero
            own_levers += own * u[i]
            out[i] = inward(x[i], centred * rate + own)
        return levers, own_levers

    return slopes, pull_back


def _derivative(chunks: Chunks, real: Real) -> Any:
    reals_at, (_, _, place, fill_roots, _, slopes, pull_back) = REALS_AT[real], chunks

    @per_row
    def gradient(x, at, g, t, strength, q, roots, out):
        """dL/dk and dL/dstrength; dL/dx in ``out``."""
        n, total, shares, pull, levers, own = x.shape[0], 0.0, 0.0, 0.0, 0.0, 0.0
        for i in range(0, n, CHUNK):
            f, s, p = slopes(x[i : i + CHUNK], at, g[i : i + CHUNK], q, out[i : i + CHUNK])
            total += f
            shares += s
            pull += p
        ratio = strength * _power(t, 1 / q) / t if t > 0 else 1.0  # sigma / t
        weight = total + ratio * shares
        mean, rate = pull / weight if weight > 0 else 0.0, real(1 / ratio)
        for i in range(0, n, CHUNK):
            part, given, result = x[i : i + CHUNK], g[i : i + CHUNK], out[i : i + CHUNK]
            u = roots[: part.shape[0]]
            fill_roots(part, real(strength), real(q), u)
            v, w = pull_back(part, at, given, u, real(mean), rate, real(strength), real(q), result)
            levers += v
            own += w
        return t * mean, -(t / strength) * levers - own

    def derivative(first, last, n, x, strength, anchor, offset, g, grad_x, grad_k, grad_strength, left, q):
        xs, gs, grads = reals_at(x, last, n), reals_at(g, last, n), reals_at(grad_x, last, n)
        anchors, is_left = doubles_at(anchor, 1, last)[0], bytes_at(left, 1, last)[0]
        roots, count = np.empty(min(n, CHUNK), real), 0
        for r in range(first, last):
            s, a = of_row(strength, 0.0, r), anchors[r]
            done = _is_ordinary(s) and (_is_ordinary(a) or a == 0)
            if done:
                t, at = place(a, of_row(offset, 0.0, r), s, q)
                of_k, of_strength = gradient(xs[r], at, gs[r], t, s, q, roots, grads[r])
                doubles_at(grad_k, 1, last)[0, r] = of_k
                if grad_strength != 0:
                    doubles_at(grad_strength, 1, last)[0, r] = of_strength
                done = math.isfinite(of_k) and math.isfinite(of_strength)
            is_left[r] = not done
            count += not done
        return count

    return derivative
