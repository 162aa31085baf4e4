r"""Order sampling with logarithms of exponential variables, row by row: log P(S) and its gradient.

Unit i arrives at the rate :math:`w_i = e^{\vartheta_i}`. With W the sum of the rates of units outside S,
:math:`a = e^s` and :math:`x_i = a w_i`, the integrand is

.. math:: e^{-a W} \prod_{i \in S} (1 - e^{-x_i}) \sum_{j \in S} h_j, \qquad h_j = x_j / (e^{x_j} - 1).

Only one sum depends on the other units, however many there are. For members that arrive late, :math:`w_i \le 1`, the
product contains :math:`(1 - e^{-x_i}) / x_i`, which is near 1, and :math:`x_i` is handled in logarithms.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum
from ..cpu.maths import EXP, LOG
from .numba_range import GRID, MARGIN, TRIALS, density, fill_nodes, first_within, highest_of, weigh

Array = np.ndarray[Any, Any]

FARTHEST = 700.0  # beyond this below and above, 1 - exp(-x) is x or 1 throughout
ROOM = 600.0  # logarithm of a product of doubles
LARGEST = 1.7e308
LEAST_HAZARD = 1e-300  # its logarithm is finite
SMALL = 0.5  # largest x for which 1 - exp(-x) is computed from the series
BACKWARDS = tuple((-1.0) ** j / math.factorial(j + 1) for j in range(13, -1, -1))  # series of (1 - exp(-x)) / x
exp, log = EXP[np.float64], LOG[np.float64]


class Rates(NamedTuple):
    """The members of S, and the sum of the rates of the others, both relative to a reference."""

    place: Array  # positions of the members in the row
    rate: Array  # w
    late: int  # how many of them have w <= 1; they arrive before the others
    others: float  # W
    # Arrays for the nodes.
    up: Array
    hazard: Array
    product: Array


@inlined
def fate(x):
    """(1 - exp(-x)) / x and exp(-x), each with its own relative accuracy."""
    missing = exp(-x)
    series = 0.0
    for coefficient in BACKWARDS:
        series = series * x + coefficient
    return (series if x < SMALL else (1.0 - missing) / x), missing


@inlined
def _add_member(rate, late, up, count, hazard, product):
    for i in range(count):
        x = rate * up[i]
        came, missing = fate(x)
        product[i] *= came if late else came * x
        hazard[i] += missing / came


@inlined
def _evaluate(rates, points, count, values):
    """The logarithm of the integrand."""
    up, hazard, product = rates.up, rates.hazard, rates.product
    farthest = 1.0
    for i in range(count):
        farthest = max(farthest, abs(points[i]))
        up[i] = exp(points[i])
        values[i], hazard[i], product[i] = rates.late * points[i] - up[i] * rates.others, 0.0, 1.0
    each = max(1, int(ROOM / (farthest + 1)))
    for j in range(rates.rate.shape[0]):
        _add_member(rates.rate[j], j < rates.late, up, count, hazard, product)
        if j % each == each - 1:
            _take_logarithm(count, product, values)
    _take_logarithm(count, product, values)
    for i in range(count):
        hazard[i] = max(hazard[i], LEAST_HAZARD)
        values[i] += log(hazard[i])


@inlined
def _take_logarithm(count, product, values):
    for i in range(count):
        values[i] += log(product[i])
        product[i] = 1.0


@inlined_sum
def _member_slope(rate, up, share, per_hazard):
    """The mean of h + h (1 - x - h) / sum h."""
    total = 0.0
    for i in range(share.shape[0]):
        x = rate * up[i]
        came, missing = fate(x)
        hazard = missing / came
        total += hazard * (share[i] + (1.0 - x - hazard) * per_hazard[i])
    return total


@inlined
def _gather(theta, drawn, place, rate):
    """The rates, relative to the last member or the first of the others; returns the sum of the late logarithms."""
    last, best = np.inf, -np.inf
    for i in range(theta.shape[0]):
        if drawn[i]:
            last = min(last, theta[i])
        else:
            best = max(best, theta[i])
    reference = max(last, best)
    members, late, others, constant = 0, 0, 0.0, 0.0
    for are_late in (True, False):
        for i in range(theta.shape[0]):
            z = min(max(theta[i] - reference, -LARGEST), LARGEST)
            if drawn[i] and (z <= 0) == are_late:
                place[members], rate[members] = i, exp(min(max(z, -FARTHEST), FARTHEST / 2))
                constant += min(z, 0.0)
                members += 1
            elif are_late and not drawn[i]:
                others += exp(z)
        late = members if are_late else late
    return reference, members, late, others, constant


@inlined
def _find_range(rates, margin, depth, points, values):
    """The range where the integrand is at least e^-depth of its peak; minus the second derivative of its logarithm."""
    low, high, curvature = -margin, margin, 0.0
    for _ in range(TRIALS):
        width = high - low
        step = width / (GRID - 1)
        for i in range(GRID):
            points[i] = low + i * step
        _evaluate(rates, points, GRID, values)
        least = highest_of(values, GRID) - depth
        for i in range(GRID):
            values[i] -= least
        first, last = first_within(values)
        low, high = points[max(first - 1, 0)], points[min(last + 1, GRID - 1)]
        curvature = 0.0
        for i in range(max(first, 1), min(last, GRID - 2) + 1):
            curvature = max(curvature, (2 * values[i] - values[i - 1] - values[i + 1]) / (step * step))
        if high - low >= width / 2:
            break
    return low, high, curvature


@inlined
def log_prob(theta, drawn, k, depth, with_slopes, slope, space):
    """log P(S) of a row of finite positions, 0 < k < n, to e^-depth; writes the derivatives."""
    points, values, step = space.of_nodes[3], space.of_nodes[4], space.of_nodes[5]
    reference, members, late, others, constant = _gather(theta, drawn, space.place, space.of_units[0])
    rates = Rates(
        space.place, space.of_units[0, :members], late, others, space.of_nodes[0], space.of_nodes[1], space.of_nodes[2]
    )
    margin = MARGIN + math.log(theta.shape[0])
    low, high, curvature = _find_range(rates, margin, depth, points, values)
    nodes, width = fill_nodes(low, high, density(depth, curvature), points)
    step[:nodes] = width
    _evaluate(rates, points, nodes, values)
    total = weigh(values, nodes, step)
    if with_slopes:
        _slopes(rates, values[:nodes], theta, reference, slope)
    return total + constant


@inlined
def _slopes(rates, share, theta, reference, slope):
    mean, hazard = 0.0, rates.hazard
    for i in range(share.shape[0]):
        mean += share[i] * rates.up[i]
        hazard[i] = share[i] / hazard[i]
    for i in range(theta.shape[0]):
        slope[i] = -exp(theta[i] - reference) * mean
    for j in range(rates.rate.shape[0]):
        slope[rates.place[j]] = _member_slope(rates.rate[j], rates.up, share, hazard)
