r"""Order sampling with logarithms of uniform variables, row by row: log P(S) and its gradient.

By time s unit i has arrived with probability min(x, 1), :math:`x_i = e^{s + \vartheta_i}`. With B the probability that
all units of S have arrived and no other one,

.. math:: P(S) = \int B \, \#\{i \in S: x_i < 1\} \, ds = \int B \sum_{j \notin S} \frac{x_j}{1 - x_j} \, ds,

because the last of S arrives at s, or the first of the others. Between the times at which one more unit of S has
certainly arrived, both are polynomials of e^s. The integrals end when all of S have certainly arrived, or one of the
others. These times move with the positions. The derivative with respect to the position of a unit is taken under the
integral sign, of the form in which this unit does not occur in the rate: the second form for units of S, and the first
for the others.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined
from ..cpu.maths import EXP, LOG
from .numba_gauss import fill_gauss, sort_upward
from .numba_range import GRID, MARGIN, TRIALS, first_within, highest_of

exp, log = EXP[np.float64], LOG[np.float64]
LEAST_FACTOR = 1e-250  # of a product that has room for one more
LARGEST = 1.7e308
SLACK = 6.0  # in addition to the depth, for the rate of the second form where the first is small


@inlined
def _evaluate(distance, drawn, s):
    """log B and the two rates."""
    product, total, last, first = 1.0, 0.0, 0.0, 0.0
    for i in range(distance.shape[0]):
        z = s + distance[i]
        if drawn[i] and z < 0:
            total += z
            last += 1.0
        elif not drawn[i]:
            x = exp(z)
            rest = max(1.0 - x, 1e-17)
            product *= rest
            first += x / rest
            if product < LEAST_FACTOR:
                total += log(product)
                product = 1.0
    return total + log(product), last, first


@inlined
def _find_range(distance, drawn, margin, depth, points, values):
    """The range where the integrand is at least e^-depth of its peak; minus the second derivative of its logarithm."""
    low, high, curvature = -margin, 0.0, 0.0
    for _ in range(TRIALS):
        step = (high - low) / GRID
        for i in range(GRID):  # not at 0, where the integrand ends
            points[i] = low + (i + 0.5) * step
            log_chance, last, _ = _evaluate(distance, drawn, points[i])
            values[i] = log_chance + log(last)
        least = highest_of(values, GRID) - depth
        for i in range(GRID):
            values[i] -= least
        first, last_one = first_within(values)
        curvature = 0.0
        for i in range(max(first, 1), min(last_one, GRID - 2) + 1):
            curvature = max(curvature, (2 * values[i] - values[i - 1] - values[i + 1]) / (step * step))
        if first == 0 and last_one >= GRID - 4:
            break
        low = max(low, points[first] - step)
        high = min(high, points[last_one] + step)
        if GRID * step < 2 * (high - low):
            break
    return low, high, curvature


@inlined
def log_prob(theta, drawn, k, depth, with_slopes, slope, space):
    """log P(S) of a row of finite positions, 0 < k < n, to e^-depth; writes the derivatives. NaN without room."""
    n = theta.shape[0]
    node, width, distance, kinks = space.of_nodes[0], space.of_nodes[1], space.of_units[0, :n], space.of_units[1, :n]
    last, best = np.inf, -np.inf
    for i in range(n):
        if drawn[i]:
            last = min(last, theta[i])
        else:
            best = max(best, theta[i])
    reference, members = max(last, best), 0
    for i in range(n):
        distance[i] = min(max(theta[i] - reference, -LARGEST), LARGEST)
        if drawn[i]:
            kinks[members] = -distance[i]
            members += 1
    depth += SLACK
    low, high, curvature = _find_range(distance, drawn, MARGIN + math.log(n), depth, node, width)
    sort_upward(kinks[:members])
    nodes = fill_gauss(kinks[:members], n, low, high, curvature, depth, node, width)
    if nodes < 0:
        return np.nan
    chance, by_first = space.of_nodes[2], space.of_nodes[3]
    peak = -np.inf
    for j in range(nodes):
        chance[j], by_last, by_first[j] = _evaluate(distance, drawn, node[j])
        space.of_nodes[4, j] = by_last
        peak = max(peak, chance[j])
    total = 0.0
    for j in range(nodes):
        share = exp(chance[j] - peak) * width[j]
        chance[j], by_first[j] = share * space.of_nodes[4, j], share * by_first[j]
        total += chance[j]
    if with_slopes:
        for i in range(n):
            slope[i] = 0.0
            for j in range(nodes):
                z = node[j] + distance[i]
                if drawn[i]:
                    slope[i] += by_first[j] / total if z < 0 else 0.0
                else:
                    x = exp(z)
                    slope[i] -= chance[j] / total * (x / max(1.0 - x, 1e-17))
    return log(total) + peak
