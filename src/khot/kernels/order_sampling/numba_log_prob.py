r"""log P(S) and its gradient, row by row, for noise of any law.

The loops run over the units and, inside, over the nodes of the quadrature, because short rows have many nodes. With
B the probability that all units of S have arrived and no other one, and :math:`h_i = f_i / F_i`, the integrand is
:math:`B \sum_{i \in S} h_i`. Members of S come first in all arrays.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum, per_row
from ..cpu.maths import EXP, LOG
from ..cpu.rows import highest, lowest
from .numba_range import MARGIN, MOST_NODES, ROOM, WIDEST, multiply, nodes_of, range_of, take_logarithm

Array = np.ndarray[Any, Any]

exp, log = EXP[np.float64], LOG[np.float64]
LEAST_RATE = 1e-300  # its logarithm is finite
SLACK = 2.0  # in addition to the depth, for the logarithm of a probability near 1


class Row(NamedTuple):
    """A set, seen from the last of its units or the first of the others."""

    place: Array  # positions in the row, those of the members first
    weight: Array  # exponentials of distances
    members: int
    delay: float  # distance of the last of the units
    total: float  # sum of the weights of the other units
    # Arrays for the nodes.
    up: Array
    rate: Array  # of the members
    product: Array


class Space(NamedTuple):
    """Arrays for units and for nodes."""

    place: Array
    of_units: Array
    of_nodes: Array


@inlined
def space_for(n):
    return Space(np.empty(n, np.int64), np.empty((2, n)), np.empty((6, MOST_NODES)))


@inlined
def _row_of(theta, drawn, members, last, best, space):
    origin, first, others, total = max(last, best), 0, members, 0.0
    n, weight, of_nodes = theta.shape[0], space.of_units[0], space.of_nodes
    for i in range(n):
        at = first if drawn[i] else others
        space.place[at], weight[at] = i, exp(theta[i] - origin)
        if drawn[i]:
            first += 1
        else:
            others += 1
            total += weight[at]
    row = Row(space.place[:n], weight[:n], members, origin - last, total, of_nodes[0], of_nodes[1], of_nodes[2])
    return origin, row


@inlined
def _multiply_logistic(row, up, product, values, each):
    """Logarithms of products of 1 - F = 1 / (1 + x)."""
    for i in range(up.shape[0]):
        values[i] *= -1.0
    multiply(row.weight[row.members :], up, product, values, each)
    for i in range(up.shape[0]):
        values[i] *= -1.0


@inlined
def _multiply_exponential(row, up, product, values, each):
    """Logarithms of products of 1 - F = exp(-x), which depend on the sum of the x only."""
    for i in range(up.shape[0]):
        values[i] -= row.total * up[i]


def _evaluate_of(noise):
    """The logarithm of the integrand."""
    law, multiply_others = noise.law, _multiply_logistic if noise.is_logistic else _multiply_exponential

    @inlined
    def add_member(w, up, product, rate):
        for i in range(up.shape[0]):
            at = law(w * up[i])
            product[i] *= at.came
            rate[i] += at.ahead

    @per_row
    def evaluate(row, points, values):
        count, farthest = points.shape[0], 1.0  # no logarithm of a factor at its time of arrival is larger
        up, rate, product = row.up[:count], row.rate[:count], row.product[:count]
        for i in range(count):
            up[i], rate[i], product[i], values[i] = exp(points[i]), 0.0, 1.0, 0.0
            farthest = max(farthest, abs(points[i]) + 1.0)
        each = max(1, int(ROOM / (farthest + row.delay)))
        for j in range(row.members):
            add_member(row.weight[j], up, product, rate)
            if j % each == each - 1:
                take_logarithm(product, values)
        take_logarithm(product, values)
        multiply_others(row, up, product, values, max(1, int(ROOM / farthest)))
        for i in range(count):
            rate[i] = max(rate[i], LEAST_RATE)
            values[i] += log(rate[i])

    return evaluate


def _slopes_of(noise):
    """The derivatives."""
    law, is_logistic = noise.law, noise.is_logistic

    @inlined_sum
    def member_slope(w, up, share, per_rate):
        total = 0.0
        for i in range(up.shape[0]):
            at = law(w * up[i])
            total += share[i] * at.ahead + per_rate[i] * at.bend
        return total

    @inlined_sum
    def other_slope(w, up, share):
        total = 0.0
        for i in range(up.shape[0]):
            total -= share[i] * law(w * up[i]).behind
        return total

    @inlined
    def slopes(row, share, slope):
        count = share.shape[0]
        up, per_rate = row.up[:count], row.rate[:count]
        for i in range(count):
            per_rate[i] = share[i] / per_rate[i]
        for j in range(row.members):
            slope[row.place[j]] = member_slope(row.weight[j], up, share, per_rate)
        slope_of_one = 0.0 if is_logistic else other_slope(1.0, up, share)
        for j in range(row.members, row.weight.shape[0]):
            w = row.weight[j]
            slope[row.place[j]] = other_slope(w, up, share) if is_logistic else w * slope_of_one

    return slopes


@inlined
def _weigh(values, width):
    """Turns logarithms of values into shares of the integral, and returns its logarithm."""
    peak, total = highest(values), 0.0
    for i in range(values.shape[0]):
        values[i] = exp(values[i] - peak) * width[i]
        total += values[i]
    for i in range(values.shape[0]):
        values[i] /= total
    return math.log(total) + peak


def log_prob_of(noise):
    """The function of a row for a noise."""
    evaluate = _evaluate_of(noise)
    find_range, nodes_of_row, slopes = range_of(evaluate), nodes_of(noise), _slopes_of(noise)

    @inlined
    def log_prob(theta, drawn, members, last, best, depth, with_slopes, slope, space):
        """log P(S) of a row of finite positions, 0 < k < n, to e^-depth, infinite if left; writes the derivatives.

        ``last`` is the position of the lowest of the members, ``best`` that of the highest of the others.
        """
        if highest(theta) - lowest(theta) > WIDEST:
            return np.inf
        origin, row = _row_of(theta, drawn, members, last, best, space)
        points, width, values = space.of_nodes[3], space.of_nodes[4], space.of_nodes[5]
        margin = MARGIN + math.log(theta.shape[0])
        low, high, depth = origin - highest(theta) - margin, origin - lowest(theta) + margin, depth + SLACK
        low, high, curvature, _ = find_range(row, low, high, depth, points, values)
        nodes = nodes_of_row(theta.shape[0], low, high, curvature, depth, points, width)
        if nodes < 0:
            return np.inf
        evaluate(row, points[:nodes], values[:nodes])
        total = _weigh(values[:nodes], width[:nodes])
        if with_slopes:
            slopes(row, values[:nodes], slope)
        return total

    return log_prob
