r"""log P(S) and its gradient for exponential ranks, row by row.

The first of the units outside S arrives after an exponential variable of rate :math:`W = \sum_{j \notin S} w_j`, with
:math:`w_i = e^{\vartheta_i}`. All of S must have arrived by then,

.. math:: P(S) = \int e^{s - e^s} \prod_{i \in S} \big(1 - e^{-x_i}\big) \, ds, \qquad x_i = e^s w_i / W.

The loops run over the units and, inside, over the nodes of the quadrature, because short rows have many nodes. The
logarithm h of the integrand is concave. It is within a depth D of its peak only for s > -D - 1, since the product
increases. At the peak :math:`e^s \le |S| + 1 = \nu`, and after it h falls at least as fast as a Poisson
log-probability of :math:`\nu` with the mean :math:`e^s`.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum, per_row
from ..cpu.maths import EXP, LOG
from .numba_range import ROOM, WIDEST, Array, nodes_of, range_of, take_logarithm

exp, log = EXP[np.float64], LOG[np.float64]
SLACK = 2.0  # in addition to the depth, for the logarithm of a probability near 1


class _Row(NamedTuple):
    """The units of a row."""

    weight: Array  # w / W
    drawn: Array
    delay: float  # of the last of S behind the first of the others, as a position
    of_nodes: Array


def log_prob_of(noise):
    """``(theta, drawn, members, last, best, depth, with_slopes, slope, room)``: log P(S) of a row, to e^-depth.

    All positions are finite and 0 < ``members`` < n. ``last`` is the position of the lowest of the members and ``best``
    that of the highest of the others. The result is infinite if the row is left. ``slope`` receives the derivatives.
    """
    law, nodes_of_row = noise.law, nodes_of(noise)

    @inlined
    def add_member(w, up, product):
        for i in range(up.shape[0]):
            product[i] *= law(w * up[i]).came

    @inlined_sum
    def member_slope(w, up, share):
        total = 0.0
        for i in range(up.shape[0]):
            total += share[i] * law(w * up[i]).ahead
        return total

    @per_row
    def evaluate(row, points, values):
        count, farthest, taken = points.shape[0], 0.0, 0
        up, product = row.of_nodes[0, :count], row.of_nodes[1, :count]
        for i in range(count):
            up[i], product[i] = exp(points[i]), 1.0
            values[i], farthest = points[i] - up[i], max(farthest, abs(points[i]))
        each = max(1, int(ROOM / (farthest + row.delay + 1.0)))
        for j in range(row.weight.shape[0]):
            if row.drawn[j]:
                add_member(row.weight[j], up, product)
                taken += 1
                if taken % each == 0:
                    take_logarithm(product, values)
        take_logarithm(product, values)

    find_range = range_of(evaluate)

    @inlined
    def log_prob(theta, drawn, members, last, best, depth, with_slopes, slope, room):
        n, of_nodes, weight, total = theta.shape[0], room.of_nodes, room.came[: theta.shape[0]], 0.0
        for i in range(n):
            weight[i] = exp(theta[i] - best)
            total += 0.0 if drawn[i] else weight[i]
        for i in range(n):
            weight[i] /= total
        delay = best + math.log(total) - last
        if delay > WIDEST:
            return np.inf
        row = _Row(weight, drawn, max(delay, 0.0), of_nodes)
        depth, nu = depth + SLACK, members + 1.0
        high = math.log(nu + depth + math.sqrt(depth * (depth + 2.0 * nu)))
        low, high, curvature, _ = find_range(row, -depth - 1.0, high, depth, room.node, room.width)
        nodes = nodes_of_row(n, low, high, curvature, depth, room.node, room.width)
        if nodes < 0:
            return np.inf
        share, up, width = of_nodes[2, :nodes], of_nodes[0, :nodes], room.width[:nodes]
        evaluate(row, room.node[:nodes], share)
        found = _weigh(share, width)
        if with_slopes:
            total = 0.0
            for i in range(n):
                slope[i] = member_slope(weight[i], up, share) if drawn[i] else 0.0
                total += slope[i]
            for i in range(n):
                slope[i] -= 0.0 if drawn[i] else total * weight[i]
        return found

    return log_prob


@inlined
def _weigh(values, width):
    """Turns logarithms of values into shares of the integral, and returns its logarithm."""
    peak, total = values[0], 0.0
    for i in range(values.shape[0]):
        peak = max(peak, values[i])
    for i in range(values.shape[0]):
        values[i] = exp(values[i] - peak) * width[i]
        total += values[i]
    for i in range(values.shape[0]):
        values[i] /= total
    return math.log(total) + peak
