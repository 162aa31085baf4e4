r"""Inclusion probabilities for logistic noise, and products with their Jacobian, row by row.

The units that have arrived, given that there are k of them, are the same conditional Poisson design at all times. With
m its inclusion probabilities, found from the characteristic function at one time, see :mod:`.numba_arrivals`,

.. math:: \pi_i = \int P(N = k) \, F_i \Big( \sum_j (1 - F_j) m_j + (1 - F_i) m_i \Big) ds, \qquad
    \log P(N = k) = \text{const} + k s + \sum_i \log(1 - F_i).

Products with the Jacobian are derivatives along a vector g, taken under the integral sign, with those of m, the
covariances of the units with :math:`\sum_j g_j x_j` in that design. Loops run over the units and, inside, over the
nodes, because short rows have many nodes. The last node has no weight: it is the time at which m is found.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined, inlined_sum, per_row, summed
from ..cpu.maths import EXP, LOG
from ..cpu.rows import dot
from .numba_arrivals import fill_fates_of, fill_fewer, plane_of, rarer_fates, space_for, times_law, walk
from .numba_range import (
    ROOM,
    TAILS,
    TRIALS,
    density_of_logistic,
    fill_range_of,
    search_for_peak,
    take_logarithm,
    tilted_of,
)

exp, log = EXP[np.float64], LOG[np.float64]
SLACK = 2.0  # in addition to the depth, for the logarithm of a probability near 1


@summed
def _log_chance(row, time):
    """log P(N = k), up to a constant, and its derivative in the time."""
    value, slope, up = row.k * time, float(row.k), math.exp(time)
    for i in range(row.weight.shape[0]):
        x = row.weight[i] * up
        value -= log(1.0 + x)
        slope -= x / (1.0 + x)
    return value, slope


@per_row
def _end(row, time, least):
    """A time where log P(N = k) is less than this by at most 1, from one beyond: a tangent lies above it."""
    value, slope = _log_chance(row, time)
    for _ in range(TRIALS):
        if least - value <= 1.0:
            break
        time += (least - value) / slope
        value, slope = _log_chance(row, time)
    return time


def _range_of(law):
    """The search for where log P(N = k) is within the depth of its peak."""
    tilted = tilted_of(law)
    find_peak = search_for_peak(tilted)

    @per_row
    def find_range(row, low, high, depth):
        peak, n = find_peak(row, low, high), row.weight.shape[0]
        least, density = _log_chance(row, peak)[0] - depth - TAILS, density_of_logistic(row.k, n - row.k, depth)
        return _end(row, low, least), _end(row, high, least), density, peak

    return find_range


@inlined
def _add_rates(w, m, up, product, rate):
    """Multiplies by F or 1 - F, whichever is larger at the one time, and adds (1 - F) m."""
    above = w > 1.0
    for i in range(up.shape[0]):
        missing = 1.0 / (1.0 + w * up[i])
        product[i] *= w * up[i] * missing if above else missing
        rate[i] += missing * m


@inlined
def _add_changes(w, m, dm, g, up, log_count, change):
    """Adds the derivatives of the logarithm of 1 - F, and of (1 - F) m."""
    gm = g * m
    for i in range(up.shape[0]):
        missing = 1.0 / (1.0 + w * up[i])
        came = 1.0 - missing
        log_count[i] -= g * came
        change[i] += missing * (dm - came * gm)


@inlined
def _begin(space, weight, k, nodes, log_count, given):
    """e^s, sum_j (1 - F_j) m_j, and P(N = k) times the weights, at all nodes, if its logarithm is this at one time.

    Without the units with w > 1, which are nearly the k, as a factor, its logarithm there is the last result.
    """
    points, up, rate = space.node[: nodes + 1], space.of_nodes[0, : nodes + 1], space.of_nodes[1, : nodes + 1]
    chance, product = space.of_nodes[2, : nodes + 1], space.of_nodes[3, : nodes + 1]
    points[nodes], slope, farthest = 0.0, float(k), 1.0
    for j in range(weight.shape[0]):
        slope -= weight[j] > 1.0
    for i in range(nodes + 1):
        up[i], rate[i], product[i], chance[i] = exp(points[i]), 0.0, 1.0, slope * points[i]
        farthest = max(farthest, abs(points[i]))
    each = max(1, int(ROOM / (farthest + 1.0)))
    for j in range(weight.shape[0]):
        _add_rates(weight[j], given[j], up, product, rate)
        if j % each == each - 1:
            take_logarithm(product, chance)
    take_logarithm(product, chance)
    at_one_time = chance[nodes]
    for i in range(nodes):
        chance[i] = exp(chance[i] - at_one_time + log_count) * space.width[i]
    return up[:nodes], rate[:nodes], chance[:nodes], at_one_time


@inlined_sum
def _sum_of_fates(w, m, up, rate, chance):
    total = 0.0
    for i in range(up.shape[0]):
        missing = 1.0 / (1.0 + w * up[i])
        total += chance[i] * (w * up[i] * missing) * (rate[i] + missing * m)
    return total


@inlined_sum
def _sum_of_changes(w, m, dm, g, up, rate, chance, log_count, change):
    total = 0.0
    for i in range(up.shape[0]):
        missing = 1.0 / (1.0 + w * up[i])
        came = w * up[i] * missing
        bend = (log_count[i] + missing * g) * (rate[i] + missing * m)
        total += chance[i] * came * (bend + change[i] + missing * (dm - came * (g * m)))
    return total


@inlined
def _add_fates(rarer, usual, g, z, total):
    """Adds g s z / phi for the rarer fate, of probability s."""
    for i in range(z.real.shape[0]):
        a, b = usual + rarer * z.real[i], rarer * z.imaginary[i]
        scale = g * rarer / (a * a + b * b)
        total.real[i] += scale * (z.real[i] * a + z.imaginary[i] * b)
        total.imaginary[i] += scale * (z.imaginary[i] * a - z.real[i] * b)


@inlined_sum
def _covariance(rarer, usual, g, z, law, weighted):
    """The sum of s T (H + g (1 - s) / phi) / phi, for given T and T H."""
    total, gu = 0.0, g * usual
    for i in range(z.real.shape[0]):
        a, b = usual + rarer * z.real[i], rarer * z.imaginary[i]
        inverse = 1.0 / (a * a + b * b)
        x, y = a * inverse, -b * inverse
        real = weighted.real[i] + gu * (law.real[i] * x - law.imaginary[i] * y)
        imaginary = weighted.imaginary[i] + gu * (law.real[i] * y + law.imaginary[i] * x)
        total += real * x - imaginary * y
    return total * rarer


def of_rows_with_one_design(law):
    """The functions of a row; ``given`` are its m."""
    fill_fates = fill_fates_of(law)

    @inlined
    def inclusion(space, weight, k, nodes, when, depth, given, result):
        n, total = result.shape[0], 0.0
        mean, variance = fill_fates(weight, 1.0, space.came, space.missing, space.rate)
        fill_fewer(space, n, k, mean, variance, depth)
        for i in range(n):
            given[i] = space.came[i] * space.fewer[i]
            total += given[i]
        for i in range(n):
            given[i] = given[i] * (k / total)
        when[4] = log(total / k)
        up, rate, chance, _ = _begin(space, weight, k, nodes, when[4], given)
        for i in range(n):
            result[i] = _sum_of_fates(weight[i], given[i], up, rate, chance)

    @inlined
    def product(space, weight, k, nodes, when, depth, given, vector, result):
        n, change_of = result.shape[0], space.fewer
        mean, variance = fill_fates(weight, 1.0, space.came, space.missing, space.rate)
        rarer, usual = rarer_fates(space, n, k)
        points, z, law = walk(space, n, k, 1 - min(k, n - k), mean, variance, depth)
        weighted, mean_of_g = plane_of(space.of_angles, 4, z.real.shape[0]), 0.0
        weighted.real[:], weighted.imaginary[:] = 0.0, 0.0
        for i in range(n):
            _add_fates(rarer[i], usual[i], vector[i], z, weighted)
            mean_of_g += vector[i] * given[i]
        for i in range(z.real.shape[0]):
            weighted.real[i] -= -mean_of_g if 2 * k > n else mean_of_g
        times_law(law, weighted)
        scale = exp(-when[4]) / points
        for i in range(n):
            change_of[i] = _covariance(rarer[i], usual[i], vector[i], z, law, weighted) * scale
        up, rate, chance, _ = _begin(space, weight, k, nodes, when[4], given)
        log_count, change = space.of_nodes[4, :nodes], space.of_nodes[5, :nodes]
        log_count[:], change[:] = mean_of_g, 0.0
        for i in range(n):
            _add_changes(weight[i], given[i], change_of[i], vector[i], up, log_count, change)
        for i in range(n):
            result[i] = _sum_of_changes(
                weight[i], given[i], change_of[i], vector[i], up, rate, chance, log_count, change
            )

    return space_for, _range_of(law), inclusion, product


def log_prob_with_one_design(law):
    r"""As :func:`.log_prob_of`, for logistic noise.

    With :math:`f_j / F_j = 1 - F_j` and :math:`P(N = k)` without its constant, :math:`P(S) = \prod_{i \in S} w_i \int
    P(N = k) \sum_{j \in S} (1 - F_j) \, ds`. As in the formula for :math:`\pi`, a linear function of m, the indicator
    of S takes the place of m in that for the derivatives.
    """
    fill_range = fill_range_of(_range_of(law))

    @inlined
    def log_prob(theta, drawn, members, last, best, depth, with_slopes, slope, room):
        n, when = theta.shape[0], room.of_angles[0]
        weight, given, found = room.came[:n], room.missing[:n], 0.0
        nodes = fill_range(theta, members, depth + SLACK, weight, room, when)
        if nodes < 0:
            return np.inf
        for i in range(n):
            given[i] = 1.0 if drawn[i] else 0.0
            found += (given[i] - (weight[i] > 1.0)) * (theta[i] - when[3])
        up, rate, chance, at_one_time = _begin(room, weight, members, nodes, 0.0, given)
        total = dot(chance, rate)
        if with_slopes:
            for i in range(n):
                slope[i] = given[i] - _sum_of_fates(weight[i], given[i], up, rate, chance) / total
        return found + at_one_time + log(total)

    return log_prob
