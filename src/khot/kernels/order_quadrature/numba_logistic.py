r"""Order sampling by logistic noise, a row at a time: log P(S) and its gradient, inclusion probabilities and products.

Times s are seen from the middle between the k-th largest position and the next, where the positions above and those
below are :math:`\pm\zeta_i, \zeta_i \ge 0`. With :math:`x_i = e^{-\zeta_i \mp s}` the probabilities that unit i has come
are 1 / (1 + x) above and x / (1 + x) below, each and its complement to its own relative accuracy, without another exp;

.. math:: \log \prod_{i \in S} F_i \prod_{i \notin S} (1 - F_i) = c + (k - \text{number above}) s - \sum_i \log(1 + x_i).

Loops go through the units and, inside, the nodes of the quadrature, which are many where rows are short.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import NamedTuple

import numpy as np

from ..numba_math import LOG
from ..numba_tools import per_row, summed
from .numba_range import MARGIN, fill_nodes, range_finder
from .numba_shares import LEAST_RATE, weigh

FAR = 700.0  # e^-700 is a normal number, and nothing beside 1
LONGEST_GAP = 100.0  # of a flat integrand; a gap of inclusion probabilities is as long as FAR
LARGEST = 1.7e308
ROOM = 600.0  # logarithm of a product of doubles
log = LOG[np.float64]


class Sides(NamedTuple):
    """Units in four blocks: those above that are in S, others above, those below that are in S, others below."""

    unit: np.ndarray  # their places in the row
    weight: np.ndarray  # e^-zeta
    drawn_above: int  # where the blocks end
    above: int
    drawn_below: int
    end: int
    slope: float  # k - number above
    # Room for numbers of each node.
    up: np.ndarray
    down: np.ndarray
    product: np.ndarray
    rate: np.ndarray


@per_row
def around_threshold(theta, count, k):
    """The k-th largest of the first ``count`` positions, and the next."""
    ordered = np.partition(theta[:count], count - k)
    outer = ordered[0]
    for i in range(1, count - k):
        outer = max(outer, ordered[i])
    return ordered[count - k], outer


@per_row
def split(theta, drawn, count, inner, outer, longest_gap, unit, weight):
    """Blocks of open units by the side of the threshold they are on; their ends and the constant c."""
    gap = min(inner - outer, LARGEST)
    half = min(gap, longest_gap) / 2
    place, constant, across = 0, 0.0, 0
    ends = np.empty(4, np.int64)
    for block in range(4):
        for i in range(count):
            is_above = theta[i] >= inner
            if is_above == (block < 2) and drawn[i] == (block % 2 == 0):
                zeta = theta[i] - inner + half if is_above else outer - theta[i] + half
                zeta = min(zeta, LARGEST)
                unit[place], weight[place] = i, math.exp(-min(zeta, FAR))
                if is_above != drawn[i]:
                    constant -= zeta
                    across += not is_above
                place += 1
        ends[block] = place
    excess = gap - 2 * half
    return ends, half, constant - across * excess, (excess if across > 0 else 0.0)


@per_row
def _multiply(weight, power, count, product):
    for i in range(count):
        product[i] *= 1.0 + weight * power[i]


@per_row
def _multiply_above(weight, power, count, product, rate):
    for i in range(count):
        x = weight * power[i]
        product[i] *= 1.0 + x
        rate[i] += x / (1.0 + x)


@per_row
def _multiply_below(weight, power, count, product, rate):
    for i in range(count):
        x = 1.0 + weight * power[i]
        product[i] *= x
        rate[i] += 1.0 / x


@per_row
def _take_logarithm(count, product, values):
    for i in range(count):
        values[i] -= log(product[i])
        product[i] = 1.0


@per_row
def _fill_powers(points, count, up, down):
    """e^s and e^-s; after how many factors 1 + x a product has to be taken care of."""
    farthest = 1.0
    for i in range(count):
        up[i], down[i] = math.exp(points[i]), math.exp(-points[i])
        farthest = max(farthest, abs(points[i]))
    return max(1, int(ROOM / (farthest + 1)))


@per_row
def evaluate_count(sides, points, count, values):
    """log P(N = k) at some times, up to a constant."""
    each = _fill_powers(points, count, sides.up, sides.down)
    product = sides.product
    for i in range(count):
        values[i], product[i] = sides.slope * points[i], 1.0
    for j in range(sides.above):
        _multiply(sides.weight[j], sides.down, count, product)
        if j % each == each - 1:
            _take_logarithm(count, product, values)
    _take_logarithm(count, product, values)
    for j in range(sides.above, sides.end):
        _multiply(sides.weight[j], sides.up, count, product)
        if j % each == each - 1:
            _take_logarithm(count, product, values)
    _take_logarithm(count, product, values)


@per_row
def evaluate_set(sides, points, count, values):
    """The logarithm of the integrand of P(S), up to c: that of P(N = k) and of the rate of the members to come."""
    each = _fill_powers(points, count, sides.up, sides.down)
    product, rate = sides.product, sides.rate
    for i in range(count):
        values[i], product[i], rate[i] = sides.slope * points[i], 1.0, 0.0
    for j in range(sides.end):
        above = j < sides.above
        power = sides.down if above else sides.up
        if j < sides.drawn_above:
            _multiply_above(sides.weight[j], power, count, product, rate)
        elif above or j >= sides.drawn_below:
            _multiply(sides.weight[j], power, count, product)
        else:
            _multiply_below(sides.weight[j], power, count, product, rate)
        if j % each == each - 1:
            _take_logarithm(count, product, values)
    _take_logarithm(count, product, values)
    for i in range(count):
        values[i] += log(max(rate[i], LEAST_RATE))


_range_of_set = range_finder(evaluate_set)


@summed
def _mean_came(weight, power, count, share):
    total = 0.0
    for i in range(count):
        x = weight * power[i]
        total += share[i] * (x / (1.0 + x))
    return total


@summed
def _mean_missing(weight, power, count, share):
    total = 0.0
    for i in range(count):
        total += share[i] / (1.0 + weight * power[i])
    return total


@summed
def _member_slope(weight, power, count, share, per_rate, above):
    """The mean of (1 - F)(1 - F / R)."""
    total = 0.0
    for i in range(count):
        x = weight * power[i]
        small = 1.0 / (1.0 + x)
        missing, came = (x * small, small) if above else (small, x * small)
        total += missing * (share[i] - came * per_rate[i])
    return total


@per_row
def log_prob(theta, drawn, count, k, slopes, slope, unit, weight, rooms):
    """log P(S) of a row of finite positions, 0 < k < count; fills in the derivatives."""
    points, values, step, up, down, product, rate = rooms
    inner, outer = around_threshold(theta, count, k)
    ends, half, constant, excess = split(theta, drawn, count, inner, outer, LONGEST_GAP, unit, weight)
    sides = Sides(
        unit, weight, ends[0], ends[1], ends[2], ends[3], float(k - ends[1]), up, down, product, rate
    )
    margin = half + MARGIN + math.log(count)
    low, high = _range_of_set(sides, -margin, margin, points, values)
    nodes, width = fill_nodes(low, high, points)
    step[:nodes] = width
    if excess > 0:  # a gap in which the integrand is flat
        points[nodes], step[nodes] = 0.0, excess
        nodes += 1
    evaluate_set(sides, points, nodes, values)
    total = weigh(values, nodes, step)
    if slopes:
        _slopes(sides, nodes, values, slope)
    return total + constant


@per_row
def _slopes(sides, nodes, share, slope):
    per_rate = sides.rate
    for i in range(nodes):
        per_rate[i] = share[i] / max(per_rate[i], LEAST_RATE)
    for j in range(sides.end):
        weight, above = sides.weight[j], j < sides.above
        power = sides.down if above else sides.up
        if j < sides.drawn_above or (not above and j < sides.drawn_below):
            slope[sides.unit[j]] = _member_slope(weight, power, nodes, share, per_rate, above)
        elif above:
            slope[sides.unit[j]] = -_mean_missing(weight, power, nodes, share)
        else:
            slope[sides.unit[j]] = -_mean_came(weight, power, nodes, share)
