"""Magnitudes of one row in numba: their scale, their values and their first derivatives.

The formulas are those of :mod:`khot.kernels.threshold.kinds` and :mod:`khot.kernels.threshold.derivatives`.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math

import numpy as np

from ..cpu.loops import inlined, per_row, specialised, summed
from ..cpu.maths import EXP, LOG, Real
from ..cpu.rows import CHUNK, Origin, difference, distance, pull_from
from ..links.base_numba import Compiled, NumbaLink
from ..links.clipped_power_numba import power_below
from .numba_root import Scale

OVERSHOOT = 2**-10  # relative to the step at which the last pooled entry leaves, so that it becomes an exact zero
SHRINK_STEPS = 7
SMALLEST = 2.0**-900  # thresholds above which no float64 underflows
NARROWEST = {np.float32: 2.0**-126, np.float64: 2.0**-900}  # scales above which one over the scale does not overflow
LARGEST = 2.0**40  # entries above which powers lose digits in float32


@inlined
def _power(x, exponent):
    return x if exponent == 1 else x**exponent


# ---- Capped entries: the y >= 0 with y + s y^(p-1) = a > 0, and u = y^(p-1), as in .kinds.shrink


def _shrinker(variant: str, real: Real) -> tuple[Compiled, Compiled, int, Compiled]:
    """The functions that find u by Newton's method: start, step and number of steps; and y as a function of u."""
    one, half = real(1), real(0.5)
    if variant == "clip":
        at_once = inlined(lambda a, s, q: a / (one + s))
        same = inlined(lambda u, a, s, q: u)
        return at_once, same, 0, same

    power, exp, log = power_below(variant, real), EXP[real], LOG[real]

    @inlined
    def start(a, s, q):
        return min(a / s, exp(log(a) / q))

    @inlined
    def step(u, a, s, q):
        rate = power(u, q)
        return ((q - one) * rate * u + a) / (q * rate + s)

    @inlined
    def value(u, a, s, q):
        return a - s * u if s * u < half * a else power(u, q) * u

    return start, step, SHRINK_STEPS, value


def _root_filler(variant: str, real: Real) -> Compiled:
    """``(a, s, q, u)``: u of all nonzero entries a, step by step, which compilers vectorise."""
    start, step, steps, _ = _shrinker(variant, real)
    zero, one = real(0), real(1)

    @per_row
    def fill_roots(a, s, q, u):
        for i in range(a.shape[0]):
            u[i] = start(a[i] if a[i] > zero else one, s, q)
        for _ in range(steps):
            for i in range(a.shape[0]):
                u[i] = step(u[i], a[i] if a[i] > zero else one, s, q)

    return fill_roots


# ---- The scale sigma = s t^(p-1)


def ordinary_place(real: Real) -> Compiled:
    """``(t, s, q)``: whether the loop can compute with this threshold and its scale."""
    narrowest = NARROWEST[real]

    @per_row
    def is_ordinary(t, s, q):
        return t == 0 or (t > SMALLEST and s * _power(t, 1 / q) > narrowest)

    return is_ordinary


@functools.cache
def _shrink(variant: str) -> Compiled:
    """``(a, s, q)``: y of one number in float64."""
    with specialised(variant):
        start, step, steps, value = _shrinker(variant, np.float64)

        @per_row
        def shrink(a, s, q):
            u = start(a, s, q)
            for _ in range(steps):
                u = step(u, a, s, q)
            return value(u, a, s, q)

    return shrink


def growing_scale(variant: str, name: str, real: Real) -> Scale:
    shrink, infinity = _shrink(variant), real(np.inf)

    @inlined
    def at(t, s, q):
        return s * _power(t, 1 / q)

    @per_row
    def threshold(u, z, s, q):
        return shrink(u, z * s, q) if z > 0 and u > 0 else u

    @per_row
    def step(signed, total, slope, excess, k, q, t, sigma):
        """Newton's step for t^(1-p), in which the sum is nearly a power."""
        growth = total * (_power(-excess / total, 1 / q) - 1) if excess <= 0 else -(total + excess) / q
        if excess == 0:
            growth *= 1 + OVERSHOOT
        return t * math.expm1(-q * math.log1p(growth / (total + t / sigma * slope)))

    @per_row
    def split(base, t, rest, s, q):
        """The anchor is the number next above t; the base is 0."""
        anchor = real(t)
        if np.float64(anchor) - t < rest:
            anchor = np.nextafter(anchor, infinity)
        return np.float64(anchor), min(((t - np.float64(anchor)) + rest) / s / _power(t, 1 / q), 0.0)

    return Scale(name, at, threshold, step, split, True)


@functools.cache
def _placer(variant: str) -> Compiled:
    """``(place)``: t, and 1 / sigma and the offset for distances; at t = 0 all entries are capped."""
    shrink = _shrink(variant)
    with specialised(variant):

        @per_row
        def origin_of(place):
            anchor, offset, s, q = place
            if anchor == 0:
                return 0.0, 0.0, -2.0
            t = shrink(anchor, (0 - offset) * s, q)
            if q == 1:
                return t, 1 / (s * t), offset
            root = t ** (1 / q)  # then corrected, so that its q-th power has all digits of t
            return t, 1 / (s * root * (1 + (t / root**q - 1) / q)), offset

    return origin_of


# ---- Values and derivatives of absolute values


def filler(link: NumbaLink, variant: str, real: Real) -> Compiled:
    """``(a, k, place, y)``: the magnitudes."""
    fill_roots, origin_of, value = _root_filler(variant, real), _placer(variant), link.value
    *_, kept = _shrinker(variant, real)
    zero, one = real(0), real(1)

    @per_row
    def fill_part(a, origin, t, s, q, y):
        for i in range(a.shape[0]):
            z = distance(a[i], origin)
            y[i] = kept(y[i], a[i], s, real(q)) if (z >= one) & (a[i] > zero) else t * value(z, q)

    @per_row
    def fill(a, k, place, y):
        t, inverse, c = origin_of(place)
        origin, s, q = Origin(real(place.anchor), real(inverse), real(c)), real(place.s), place.q
        for i in range(0, a.shape[0], CHUNK):
            part, out = a[i : i + CHUNK], y[i : i + CHUNK]
            fill_roots(part, s, real(q), out)
            fill_part(part, origin, real(t), s, q, out)

    return fill


def _slopes_of(link: NumbaLink, real: Real) -> Compiled:
    """``(a, origin, g, q, out)``: writes slopes f; returns sums of f, of z^q over the same entries, and of f g."""
    terms, zero = link.terms, real(0)

    @summed
    def slopes(a, origin, g, q, out):
        total = shares = pull = zero
        for i in range(a.shape[0]):
            _, share, f = terms(distance(a[i], origin), q)
            out[i] = f
            total += f
            shares += share
            pull += f * g[i]
        return total, shares, pull

    return slopes


def _pull_back_of(variant: str, real: Real) -> Compiled:
    """``(a, origin, g, u, centre, rate, s, q, out)``: replaces slopes with dL/da, given the roots u.

    The centre is a number next to the mean cotangent, and by how much it exceeds the mean. Returns two levers: one of
    the entries that follow the threshold, and one of the capped entries.
    """
    power, zero, one = power_below(variant, real), real(0), real(1)

    @summed
    def pull_back(a, origin, g, u, centre, rate, s, q, out):
        levers = own_levers = zero
        for i in range(a.shape[0]):
            z = distance(a[i], origin)
            steepness = power(u[i], q)
            own = g[i] * (steepness / (steepness + s / q)) if (z >= one) & (a[i] > zero) else zero
            centred = out[i] * (difference(g[i], centre[0]) + centre[1])
            levers += centred * z if out[i] > zero else zero
            own_levers += own * u[i]
            out[i] = centred * rate + own
        return levers, own_levers

    return pull_back


def gradient_of(link: NumbaLink, variant: str, real: Real) -> Compiled:
    """``(a, g, place, idle, with_k, with_scale, roots, out)``: like :func:`.numba_masks.gradient_of`."""
    slopes, pull_back = _slopes_of(link, real), _pull_back_of(variant, real)
    origin_of, fill_roots, is_ordinary = _placer(variant), _root_filler(variant, real), ordinary_place(real)

    @per_row
    def gradient(a, g, place, idle, with_k, with_scale, roots, out):
        n, total, shares, pull, levers, own, left = a.shape[0], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        anchor, _, s, q = place
        if not is_ordinary(anchor, s, q):
            return 0.0, 0.0, False
        t, inverse, c = origin_of(place)
        origin = Origin(real(anchor), real(inverse), real(c))
        for i in range(0, n, CHUNK):
            f, h, p = slopes(a[i : i + CHUNK], origin, g[i : i + CHUNK], q, out[i : i + CHUNK])
            total += f
            shares += h
            pull += p
        rate = t * inverse if t > 0 else 1.0  # t / sigma
        weight = total + shares / rate
        near = real(pull / total if total > 0 else 0.0)
        for i in range(0, n, CHUNK):
            left += pull_from(g[i : i + CHUNK], out[i : i + CHUNK], near)
        # The mean is that of the pooled entries, and the others follow the threshold with a cotangent of 0.
        whole = weight if weight > 0 else 1.0
        mean, centre = (near * total + left) / whole, (near, real((near * (shares / rate) - left) / whole))
        for i in range(0, n, CHUNK):
            part, given, result = a[i : i + CHUNK], g[i : i + CHUNK], out[i : i + CHUNK]
            u = roots[: part.shape[0]]
            fill_roots(part, real(s), real(q), u)
            v, w = pull_back(part, origin, given, u, centre, real(rate), real(s), real(q), result)
            levers += v
            own += w
        of_k, of_scale = t * mean, -(t / s) * levers - own
        return of_k, of_scale, math.isfinite(of_k) and math.isfinite(of_scale)

    return gradient
