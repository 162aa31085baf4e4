r"""Inclusion probabilities of order sampling, and products with their Jacobian, for noise of any law, row by row.

By time s unit i has arrived with probability :math:`F_i`, a function of :math:`x_i = e^{s + \vartheta_i}`; it arrives
at the rate :math:`f_i`. The number N of units that have arrived is a sum of independent Bernoulli variables.
Probabilities of N with some units left out are sums over its characteristic function. With
:math:`\varphi_i = 1 - F_i + F_i z` and :math:`T = z^{1 - k} \prod_i \varphi_i` at M points z of the unit circle,

.. math:: u_i = P(N_{-i} = k - 1) = \operatorname{mean} \frac{T}{\varphi_i}, \qquad
    \pi_i = \int F_i \Big( \sum_j f_j u_j + f_i u_i \Big) ds, \qquad
    (J g)_i = \int f_i \operatorname{mean} \frac{T}{\varphi_i}
    \Big( g_i \sum_j \frac{f_j}{\varphi_j} - \sum_j \frac{f_j g_j}{\varphi_j} \Big) ds.

The means are exact except for counts that differ from k by M or more, and points of large angle are negligible:
:math:`|\prod \varphi_i| \le \exp(-2 v \sin^2(\text{angle} / 2))` with v the variance of N. The k-th unit arrives while
about k are expected to have arrived. The integrals end where Chernoff's bound of P(N = k) is e^-depth.

Logistic noise has a faster method, :mod:`.numba_same_design`, which needs the characteristic function only once.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum, per_row, summed
from ..cpu.maths import EXP, LOG
from .numba_plane import multiply, plane_of, turn
from .numba_range import BLOCK, MOST_NODES, ROOM, Array

exp = EXP[np.float64]
log = LOG[np.float64]
MOST_ANGLES = 128
TRIALS = 60  # most steps of a search, which takes 3 to 12
LONGEST, FARTHEST = 2.0, 8.0  # longest steps of positions and times
ACCURACY, RESOLUTION = 1e-3, 1e-20  # of a position, and rounding of a squared mean
SLACK = 3.0  # in addition to the depth, for P(N = k) itself
TINY = 1e-300


class Space(NamedTuple):
    """Arrays for units, nodes and angles."""

    came: Array  # F
    missing: Array  # 1 - F
    rate: Array  # f
    fewer: Array  # u
    node: Array
    width: Array
    of_nodes: Array
    of_angles: Array


@inlined
def space_for(n, k, has_vector):
    units, nodes = np.empty((4, n)), np.empty((8, MOST_NODES))
    return Space(units[0], units[1], units[2], units[3], nodes[6], nodes[7], nodes[:6], np.empty((8, MOST_ANGLES)))


class _Tilted(NamedTuple):
    """Sums over the units at a time, for the law of N weighted by z^N."""

    mean: float
    rest: float  # the mean of n - N
    variance: float
    log_sum: float  # log E z^N
    slope: float  # its derivative in the time
    rate: float  # the sum of the f


@functools.cache
def tilted_of(noise):
    law = noise.law

    @summed
    def tilted(weight, up, z):
        mean = rest = variance = log_sum = slope = rate = 0.0
        for i in range(weight.shape[0]):
            at = law(weight[i] * up)
            both = at.missing + at.came * z
            came, missing = at.came * z / both, at.missing / both
            mean += came
            rest += missing
            variance += came * missing
            log_sum += log(both)
            slope += at.rate * (z - 1.0) / both
            rate += at.rate
        return _Tilted(mean, rest, variance, log_sum, slope, rate)

    return tilted


@functools.cache
def search_for_peak(tilted):
    """The search for a time, between two others, at which about k units are expected to have arrived."""

    @per_row
    def find_peak(row, first, last):
        n, peak = row.weight.shape[0], 0.5 * (first + last)
        for _ in range(TRIALS):
            at = tilted(row.weight, math.exp(peak), 1.0)
            if _is_near(at, row.k):
                break
            first, last = (peak, last) if at.mean < row.k else (first, peak)
            step = _excess(at, n, row.k) / (n * max(at.rate, TINY))
            peak -= min(max(step, -FARTHEST), FARTHEST)
            if not first < peak < last:
                peak = 0.5 * (first + last)
        return peak

    return find_peak


def range_by_chernoff(noise):
    """The search for the range of the integral, which ends where Chernoff's bound of P(N = k) is e^-depth.

    The bound is :math:`z^{-k} E z^N` for any z > 0, and least if the mean of the weighted law is k. A z is given by the
    position of a unit that has even chances under these weights, for that changes little from one time to another.
    """
    law, tilted = noise.law, tilted_of(noise)
    bend, find_peak = bend_of(tilted), search_for_peak(tilted)

    @per_row
    def bound(row, time, even):
        """The logarithm of the bound, its derivative in the time, and the position of a unit with even chances."""
        n, k, lowest, highest = row.weight.shape[0], row.k, -ROOM - time, math.log(ROOM) - time
        even = min(max(even, lowest), highest)
        for _ in range(TRIALS):
            unit = law(math.exp(time + even))
            z = unit.missing / unit.came
            at = tilted(row.weight, math.exp(time), z)
            if _is_near(at, k) or highest - lowest < ACCURACY:
                break
            lowest, highest = (even, highest) if at.mean > k else (lowest, even)
            step = _excess(at, n, k) / (n * at.variance) * (unit.came * unit.missing / unit.rate)
            even += min(max(step, -LONGEST), LONGEST)
            if not lowest < even < highest:
                even = 0.5 * (lowest + highest)
        return at.log_sum - k * math.log(z), at.slope, even

    @per_row
    def end(row, inside, outside, time, depth):
        """The time between two others, starting from a third, where the bound is less than e^-depth by a factor e."""
        even, is_last = -inside, outside > inside
        for _ in range(TRIALS):
            value, slope, even = bound(row, time, even)
            inside, outside = (time, outside) if value > -depth else (inside, time)
            if 0 <= -depth - value < 1:
                break
            step = (-depth - 0.5 - value) / slope
            time += math.log(max(1.0 + step, 0.1)) if is_last else step  # in the end, the bound is linear in e^time
            if not (inside - time) * (time - outside) > 0:
                time = 0.5 * (inside + outside)
        return outside

    @per_row
    def find_range(row, low, high, depth):
        peak = find_peak(row, low, high)
        before = 0.3 + 0.9 * depth / row.k  # where k units of one position are too few
        low, high = end(row, peak, low, peak - before, depth), end(row, peak, high, peak + 1.0, depth)
        return low, high, bend(row, low, peak, high), peak

    return find_range


@functools.cache
def bend_of(tilted):
    """The curvature of normal densities with the moments of N, at the peak and half-way to the ends."""

    @per_row
    def bend(row, low, peak, high):
        curvature = 0.0
        for time in (0.5 * (low + peak), peak, 0.5 * (peak + high)):
            at = tilted(row.weight, math.exp(time), 1.0)
            curvature = max(curvature, at.rate * at.rate / max(at.variance, TINY))
        return curvature

    return bend


@inlined
def _excess(at, n, k):
    """Newton's step for the logarithm of mean / rest, which is nearly linear in log-odds, times a derivative."""
    return (math.log(at.mean / k + TINY) - math.log(at.rest / (n - k) + TINY)) * at.mean * at.rest


@inlined
def _is_near(at, k):
    """Whether a mean is so near k that the bound is off by less than 0.05, and the peak by 0.3 deviations."""
    return (at.mean - k) ** 2 <= 0.1 * at.variance + RESOLUTION


@inlined
def _angles(n, k, mean, variance, turns, depth, rows):
    """The number of points on the circle, and how many of one half are not negligible, in whole blocks.

    Also writes their cosines and sines, with those of ``turns`` times the angle, twice if they represent conjugates.
    """
    third = (depth + SLACK) / 3
    points = int(min(n + 1.0, abs(k - mean) + third + math.sqrt(third * third + 6 * third * variance) + 2.0)) | 1
    most, share = (points + 1) // 2, 3 * third / (2 * variance + TINY)
    if share < 1:
        most = min(most, int(math.asin(math.sqrt(share)) / math.pi * points) + 2)
    most = min(most, MOST_ANGLES)
    blocks = (most + BLOCK - 1) // BLOCK * BLOCK
    angle = 2 * math.pi / points
    turn(angle, plane_of(rows, 0, blocks))
    turn(turns % points * angle, plane_of(rows, 2, blocks))
    for j in range(1, blocks):
        weight = 2.0 if j < most else 0.0
        rows[2, j], rows[3, j] = weight * rows[2, j], weight * rows[3, j]
    for j in range(most, blocks):
        rows[0, j], rows[1, j] = 1.0, 0.0
    return points, blocks


@inlined
def rarer_fates(space, n, k):
    """The probabilities of the fate that fewer units have, and of the other: few powers of z lose few digits."""
    return (space.missing, space.came) if 2 * k > n else (space.came, space.missing)


@inlined
def walk(space, n, k, turns, mean, variance, depth):
    """The quadrature points z and T times their weights, for the time of the fates in ``space``."""
    rarer, usual = rarer_fates(space, n, k)
    points, count = _angles(float(n), k, mean, variance, turns, depth, space.of_angles)
    z, product = plane_of(space.of_angles, 0, count), plane_of(space.of_angles, 2, count)
    for i in range(n):
        multiply(usual[i], rarer[i], z, product)
    return points, z, product


@inlined_sum
def _sums_without(rarer, usual, i, j, z, law):
    """The sums of T / phi for two units. LLVM unrolls a loop for one unit so far that few angles stay scalar."""
    first = second = 0.0
    r, u, v, w = rarer[i], usual[i], rarer[j], usual[j]
    for at in range(z.real.shape[0]):
        a, b, c, d = u + r * z.real[at], r * z.imaginary[at], w + v * z.real[at], v * z.imaginary[at]
        first += (law.real[at] * a + law.imaginary[at] * b) / (a * a + b * b)
        second += (law.real[at] * c + law.imaginary[at] * d) / (c * c + d * d)
    return first, second


@inlined
def fill_fewer(space, n, k, mean, variance, depth):
    """Writes the u: without unit i, k - 1 units have arrived, or n - k are missing."""
    rarer, usual = rarer_fates(space, n, k)
    points, z, law = walk(space, n, k, k - n if 2 * k > n else 1 - k, mean, variance, depth)
    for i in range(0, n, 2):
        j = min(i + 1, n - 1)
        first, second = _sums_without(rarer, usual, i, j, z, law)
        space.fewer[i], space.fewer[j] = first / points, second / points


@inlined
def _add_inclusion(space, k, mean, variance, width, depth, result):
    """Adds the contribution of a node to the probabilities."""
    came, fewer, total, n = space.came, space.fewer, 0.0, result.shape[0]
    fill_fewer(space, n, k, mean, variance, depth)
    for i in range(n):
        fewer[i] *= space.rate[i] * width
        total += fewer[i]
    for i in range(n):
        result[i] += came[i] * (total + fewer[i])


@inlined
def _add(rarer, usual, f, g, z, a_sum, b_sum):
    """Adds f and f g, divided by the factor of a unit, to two sums."""
    for i in range(z.real.shape[0]):
        a, b = usual + rarer * z.real[i], rarer * z.imaginary[i]
        scale = f / (a * a + b * b)
        x, y = a * scale, b * scale
        a_sum.real[i] += x
        a_sum.imaginary[i] -= y
        b_sum.real[i] += g * x
        b_sum.imaginary[i] -= g * y


@inlined
def times_law(law, z):
    for i in range(z.real.shape[0]):
        x, y = z.real[i], z.imaginary[i]
        z.real[i] = x * law.real[i] - y * law.imaginary[i]
        z.imaginary[i] = x * law.imaginary[i] + y * law.real[i]


@inlined_sum
def _mean_of_two(rarer, usual, g, z, a_sum, b_sum):
    total = 0.0
    for i in range(z.real.shape[0]):
        a, b = usual + rarer * z.real[i], rarer * z.imaginary[i]
        real, imaginary = g * a_sum.real[i] - b_sum.real[i], g * a_sum.imaginary[i] - b_sum.imaginary[i]
        total += (real * a + imaginary * b) / (a * a + b * b)
    return total


@inlined
def _add_product(space, k, mean, variance, width, depth, vector, result):
    """Adds the contribution of a node to the product of the Jacobian with a vector."""
    rate, rows, n = space.rate, space.of_angles, result.shape[0]
    rarer, usual = rarer_fates(space, n, k)
    points, z, law = walk(space, n, k, 1 - min(k, n - k), mean, variance, depth)
    count = z.real.shape[0]
    a_sum, b_sum = plane_of(rows, 4, count), plane_of(rows, 6, count)
    rows[4:, :count] = 0.0
    for i in range(n):
        _add(rarer[i], usual[i], rate[i], vector[i], z, a_sum, b_sum)
    times_law(law, a_sum)
    times_law(law, b_sum)
    scale = width / points
    for i in range(n):
        result[i] += rate[i] * (_mean_of_two(rarer[i], usual[i], vector[i], z, a_sum, b_sum) * scale)


def fill_fates_of(noise):
    """The fates of the units at a time; the mean of N and its variance."""
    law = noise.law

    @inlined_sum
    def fill_fates(weight, up, came, missing, rate):
        mean = variance = 0.0
        for i in range(weight.shape[0]):
            at = law(weight[i] * up)
            came[i], missing[i], rate[i] = at.came, at.missing, at.rate
            mean += at.came
            variance += at.came * at.missing
        return mean, variance

    return fill_fates


def of_rows_by_nodes(noise):
    """The functions of a row for noise of any law, whose nodes are in the space: its range, its results, products."""
    fill_fates = fill_fates_of(noise)

    @inlined
    def inclusion(space, weight, k, nodes, when, depth, given, result):
        result[:] = 0.0
        for node in range(nodes):
            mean, variance = fill_fates(weight, exp(space.node[node]), space.came, space.missing, space.rate)
            _add_inclusion(space, k, mean, variance, space.width[node], depth, result)

    @inlined
    def product(space, weight, k, nodes, when, depth, given, vector, result):
        result[:] = 0.0
        for node in range(nodes):
            mean, variance = fill_fates(weight, exp(space.node[node]), space.came, space.missing, space.rate)
            _add_product(space, k, mean, variance, space.width[node], depth, vector, result)

    return space_for, range_by_chernoff(noise), inclusion, product
