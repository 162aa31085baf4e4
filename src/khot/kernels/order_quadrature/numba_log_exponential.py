r"""Order sampling by logarithms of exponential variables, a row at a time: log P(S) and its gradient.

Unit i comes at the rate :math:`w_i = e^{\vartheta_i}`. With W the sum of the rates of those outside of S, :math:`a = e^s`
and :math:`x_i = a w_i`, the integrand is

.. math:: e^{-a W} \prod_{i \in S} (1 - e^{-x_i}) \sum_{j \in S} h_j, \qquad h_j = x_j / (e^{x_j} - 1):

of all others there is no more than a sum, however many they are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import NamedTuple

import numpy as np

from ..numba_math import EXP, LOG
from ..numba_tools import inlined, per_row, summed
from .numba_range import MARGIN, fill_nodes, range_finder
from .numba_shares import LEAST_RATE, weigh

FARTHEST = 500.0  # below, 1 - exp(-x) is x
HIGHEST = 300.0  # above, it is 1 all along
LARGEST = 1.7e308
SMALL = 0.5  # of x whose 1 - exp(-x) is taken from the series
SERIES = tuple((-1.0) ** j / math.factorial(j + 1) for j in range(14))  # of (1 - exp(-x)) / x
exp, log = EXP[np.float64], LOG[np.float64]


class Rates(NamedTuple):
    """Members of S, and the sum of the rates of the others, both seen from a reference."""

    unit: np.ndarray  # places of the members in the row
    rate: np.ndarray  # w
    end: int  # their number
    others: float  # W
    # Room for numbers of each node.
    up: np.ndarray
    hazard: np.ndarray


@inlined
def _came(x):
    """1 - exp(-x) and exp(-x), each to its own relative accuracy."""
    missing = exp(-x)
    series = 0.0
    for j in range(len(SERIES) - 1, -1, -1):
        series = series * x + SERIES[j]
    return (x * series if x < SMALL else 1.0 - missing), missing


@per_row
def _add_member(rate, up, count, hazard, values):
    for i in range(count):
        x = rate * up[i]
        came, missing = _came(x)
        values[i] += log(came)
        hazard[i] += x * missing / came


@per_row
def evaluate(rates, points, count, values):
    """The logarithm of the integrand."""
    up, hazard = rates.up, rates.hazard
    for i in range(count):
        up[i] = math.exp(points[i])
        values[i], hazard[i] = -up[i] * rates.others, 0.0
    for j in range(rates.end):
        _add_member(rates.rate[j], up, count, hazard, values)
    for i in range(count):
        values[i] += log(max(hazard[i], LEAST_RATE))


_range = range_finder(evaluate)


@summed
def _member_slope(rate, up, count, share, per_hazard):
    """The mean of h + h (1 - x - h) / sum h."""
    total = 0.0
    for i in range(count):
        x = rate * up[i]
        came, missing = _came(x)
        hazard = x * missing / came
        total += hazard * (share[i] + (1.0 - x - hazard) * per_hazard[i])
    return total


@per_row
def _gather(theta, drawn, count, unit, rate):
    """The rates, seen from the last of the members or the first of the others; what members far below lack."""
    last, best = np.inf, -np.inf
    for i in range(count):
        if drawn[i]:
            last = min(last, theta[i])
        else:
            best = max(best, theta[i])
    reference = max(last, best)
    members, others, lacking = 0, 0.0, 0.0
    for i in range(count):
        z = max(theta[i] - reference, -LARGEST)
        if drawn[i]:
            unit[members], rate[members] = i, math.exp(min(max(z, -FARTHEST), HIGHEST))
            lacking += min(z + FARTHEST, 0.0)
            members += 1
        else:
            others += math.exp(z)
    return reference, members, others, lacking


@per_row
def log_prob(theta, drawn, count, k, slopes, slope, unit, rate, rooms):
    """log P(S) of a row of finite positions, 0 < k < count; fills in the derivatives."""
    points, values, step, up, hazard, _, _ = rooms
    reference, members, others, lacking = _gather(theta, drawn, count, unit, rate)
    rates = Rates(unit, rate, members, others, up, hazard)
    margin = MARGIN + math.log(count)
    low, high = _range(rates, -margin, margin, points, values)
    nodes, width = fill_nodes(low, high, points)
    step[:nodes] = width
    evaluate(rates, points, nodes, values)
    total = weigh(values, nodes, step)
    if slopes:
        mean = 0.0
        for i in range(nodes):
            mean += values[i] * up[i]
            hazard[i] = values[i] / max(hazard[i], LEAST_RATE)
        for i in range(count):
            slope[i] = -math.exp(theta[i] - reference) * mean
        for j in range(members):
            slope[unit[j]] = _member_slope(rate[j], up, nodes, values, hazard)
    return total + lacking
