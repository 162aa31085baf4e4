r"""The times at which the units of a row arrive: the range of the integrals over time, and the nodes of the rules.

These functions depend on the noise through its fates: F, 1 - F and f at :math:`x = e^{s + \vartheta}`. Each factory
makes one of them.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum
from ..cpu.maths import EXP
from .numba_gauss import fill_gauss, sort_upward
from .numba_range import density

exp = EXP[np.float64]
BEYOND = 40.0  # distance beyond a time, after which a unit has certainly arrived
CENTRE_STEPS, END_STEPS = 60, 40
CLOSE = 0.25  # largest distance of the mean from k at the centre, in standard deviations of N
ROOM = 2.5  # by how much the exponent at an end may exceed the depth
TINY = 1e-300


class Moments(NamedTuple):
    """Moments of the number N of units that have arrived."""

    mean: float
    variance: float
    rate: float
    certain: int  # how many have certainly arrived


def moments_of(fates):
    """The law of N at a time, described by its mean and its variance."""

    @inlined_sum
    def moments(weight, up):
        mean = variance = rate = 0.0
        certain = 0
        for i in range(weight.shape[0]):
            came, missing, f = fates(weight[i] * up)
            mean += came
            variance += came * missing
            rate += f
            certain += missing <= 0.0
        return Moments(mean, variance, rate, certain)

    return moments


def exponent_of(moments):
    """Bounds of the law of N."""

    @inlined
    def exponent(weight, k, s):
        """A bound: P(N = k) at the time s is at most e to the minus this number; and the moments of N."""
        found = moments(weight, exp(s))
        n, mean = float(weight.shape[0]), max(found.mean, TINY)
        away, rest = abs(mean - k), max(n - mean, TINY)
        if found.certain > k:
            return np.inf, found
        bernstein = away * away / (2.0 * found.variance + away / 1.5)
        ones = k * math.log(k / mean) - k + mean
        zeros = (n - k) * math.log((n - k) / rest) - (n - k) + rest
        return max(bernstein, ones, zeros), found

    return exponent


def centre_of(moments):
    """The search for the middle of the range."""

    @inlined
    def centre(weight, k, low, high):
        """A time at which about k units are expected to have arrived."""
        s, found = low, moments(weight, exp(low))
        for _ in range(CENTRE_STEPS):
            away = k - found.mean
            if away * away <= CLOSE * CLOSE * found.variance:
                break
            low, high = (s, high) if away > 0 else (low, s)
            step = s + math.log(k / max(found.mean, TINY)) * found.mean / max(found.rate, TINY)
            s = step if low < step < high else 0.5 * (low + high)
            found = moments(weight, exp(s))
        return s, found

    return centre


def end_of(exponent):
    """The search for one of its ends."""

    @inlined
    def end(weight, k, s, first, limit, depth, lift):
        """A time at which the exponent is the depth, from s by steps towards a limit; and the curvature on the way."""
        inner, outer, step, curvature = 0.0, abs(limit - s), first, 0.0
        sign = 1.0 if limit > s else -1.0
        for _ in range(END_STEPS):
            step = min(step, outer)
            found, law = exponent(weight, k, s + sign * step)
            wanted = depth + lift * step
            if found < wanted:
                curvature = max(curvature, law.rate * law.rate / max(law.variance, TINY))
                inner = step
                step *= min(max(math.sqrt(1.1 * wanted / max(found, TINY)), 1.1), 2.0)
                step = step if step < outer else 0.5 * (inner + outer)
            else:
                outer = step
                if found < wanted + ROOM or outer - inner < 0.02:
                    break
                ratio = math.sqrt(wanted / found) if found < np.inf else 0.5
                step *= ratio + 0.02
                step = step if inner < step < outer else 0.5 * (inner + outer)
        return s + sign * outer, curvature

    return end


def bounds_of(centre, end):
    """The whole range."""

    @inlined
    def bounds(theta, k, depth, weight):
        """The ends of the integral, and minus the second derivative of the logarithm of the integrand."""
        lowest, highest = np.inf, -np.inf
        for i in range(theta.shape[0]):
            lowest, highest = min(lowest, theta[i]), max(highest, theta[i])
        half = 0.5 * (highest - lowest)
        for i in range(theta.shape[0]):
            weight[i] = exp(theta[i] - lowest - half)
        first = -half - math.log(theta.shape[0]) - 1.0
        s, law = centre(weight, float(k), first, half + BEYOND)
        step = math.sqrt(2.0 * depth * law.variance) / max(law.rate, TINY)
        curvature = law.rate * law.rate / max(law.variance, TINY)
        low, before = end(weight, float(k), s, step, first - depth - BEYOND, depth, 0.0)
        high, after = end(weight, float(k), s, step, half + BEYOND, depth, 1.0)
        return low, high, max(curvature, before, after)

    return bounds


@inlined
def trapezoids(low, high, curvature, depth, space):
    width = high - low
    count = int(min(width * density(depth, curvature), space.node.shape[0] - 2)) + 2
    step = width / (count - 1)
    for i in range(count):
        space.node[i], space.width[i] = low + i * step, step
    return count


def nodes_of(has_kinks):
    """A function that writes the nodes of a row and returns their number, -1 if there is no room for so many."""

    @inlined
    def nodes(theta, ends, curvature, depth, space):
        if not has_kinks:
            return trapezoids(ends[0], ends[1], curvature, depth, space)
        n, kinks = theta.shape[0], space.fewer[: theta.shape[0]]
        middle = 0.5 * (theta.min() + theta.max())
        for i in range(n):
            kinks[i] = middle - theta[i]
        sort_upward(kinks)
        return fill_gauss(kinks, n, ends[0], ends[1], curvature, depth, space.node, space.width)

    return nodes


def fill_fates_of(fates):
    """The fates of the units at a time; the mean of N, its variance, and how many have probably arrived."""

    @inlined_sum
    def fill_fates(weight, up, came, missing, rate):
        mean = variance = 0.0
        likely = 0
        for i in range(weight.shape[0]):
            p, q, f = fates(weight[i] * up)
            came[i], missing[i], rate[i] = p, q, f
            mean += p
            variance += p * q
            likely += p > 0.5
        return mean, variance, likely

    return fill_fates


def walk_of(fates, has_kinks):
    """The functions of a row for a noise: its range, its nodes, and the fates of its units at a time."""
    moments = moments_of(fates)
    exponent = exponent_of(moments)
    bounds = bounds_of(centre_of(moments), end_of(exponent))
    return bounds, nodes_of(has_kinks), fill_fates_of(fates)
