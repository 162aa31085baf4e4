r"""Logistic noise, row by row: the units of a row at all times, the law of their count, log P(S) and its gradient.

Times are relative to one at which about k units are expected to have arrived. Let z be the log-odds of having arrived
by then. At a time s later, the initially less likely event, to have arrived if z < 0 and to be missing if z > 0, has
the odds :math:`x_i = e^{-|z_i| \pm s}` and the probability x / (1 + x). This and its complement have full relative
accuracy. Only one exp is needed per unit and per time, since

.. math:: \log P(N = k) = \text{const} + (k - \text{number of } z > 0) s - \sum_i \log(1 + x_i).

Given N = k the law of the units that have arrived is the same at all times: up to a constant, the integrand of log P(S)
is P(N = k) times the rate at which the missing members arrive. Loops run over the units and, inside, over the nodes of
the quadrature, of which there are many in short rows.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum
from ..cpu.maths import EXP, LOG
from .numba_range import GRID, MARGIN, MOST_NODES, RATES, TRIALS, density, fill_nodes, first_within, highest_of, weigh
from .numba_tilt import solve_tilt, tilted

Array = np.ndarray[Any, Any]

FAR = 700.0  # e^-700 is a normal number, and negligible compared with 1
LONGEST_GAP = 500.0  # between the smallest z > 0 and the largest below, over which P(N = k) is 1
LARGEST = 1.7e308
ROOM = 600.0  # logarithm of a product of doubles
LEAST_RATE = 1e-300  # its logarithm is finite
NARROW = 1.5  # ratio of depth and curvature below which these determine a range well enough
LEAST_BEND = 0.02
STAGGER = 72  # nine cache lines
exp, log = EXP[np.float64], LOG[np.float64]


class Space(NamedTuple):
    """Arrays for units, at least ``(3, n)``, and for nodes, at least ``(4, nodes)``."""

    place: Array
    of_units: Array
    of_nodes: Array


class Sides(NamedTuple):
    """The units in four blocks: those with z > 0 in S, the others with z > 0, those below in S, the others below."""

    place: Array  # their positions in the row
    weight: Array  # e^-|z|
    drawn_above: int  # where the blocks end
    above: int
    drawn_below: int
    end: int
    slope: float  # k - number above
    drift: float  # first and minus second derivative of log P(N = k) at the time 0
    curvature: float
    upper: float  # smallest |z| above and below, at most half of the longest gap
    lower: float
    constant: float  # logarithm of the part of P(S) that does not depend on time
    excess: float  # length that was cut off a gap over which P(S) is constant
    # Arrays for the nodes.
    up: Array
    down: Array
    product: Array


@inlined
def space(n, rows_of_units, rows_of_nodes):
    """Empty rows that begin at different offsets of a page, since equal ones cause false conflicts in a processor."""
    return Space(
        np.empty(n, np.int64), np.empty((3 + rows_of_units, n)), np.empty((4 + rows_of_nodes, MOST_NODES + STAGGER))
    )


@inlined_sum
def _fill_weights(z, weight):
    for i in range(z.shape[0]):
        weight[i] = exp(-min(abs(z[i]), FAR))


@inlined_sum
def _moments(weight):
    """Sums of x / (1 + x) and of x / (1 + x)^2."""
    mean = curvature = 0.0
    for i in range(weight.shape[0]):
        large = 1.0 / (1.0 + weight[i])
        mean += weight[i] * large
        curvature += weight[i] * large * large
    return mean, curvature


@inlined
def split(theta, drawn, k, anchor, offset, longest_gap, space):
    """The :class:`Sides` of a row of finite positions, of which those ``drawn`` are in S, relative to a tilt."""
    count = theta.shape[0]
    z, unordered, weight = space.of_units[0, :count], space.of_units[1, :count], space.of_units[2, :count]
    upper, lower, inner, outer = LARGEST, LARGEST, np.inf, -np.inf
    above, drawn_above, drawn_below = 0, 0, 0
    for i in range(count):
        z[i] = min(max(tilted(theta[i], anchor, offset), -LARGEST), LARGEST)
        if z[i] > 0:
            upper, inner = min(upper, z[i]), min(inner, theta[i])
            above += 1
            drawn_above += drawn[i]
        else:
            lower, outer = min(lower, -z[i]), max(outer, theta[i])
            drawn_below += drawn[i]
    upper, lower = upper if above > 0 else 0.0, lower if above < count else 0.0
    # With k above, nothing happens in the middle of a long gap. Otherwise a side that is far away is simply certain.
    longest = longest_gap / 2 if above == k else LARGEST
    cut_upper, cut_lower = max(upper - longest, 0.0), max(lower - longest, 0.0)
    constant = 0.0
    for i in range(count):
        if z[i] > 0 and cut_upper > 0:
            z[i] = min(theta[i] - inner + longest, LARGEST)  # exact, next to a gap of any length
        elif z[i] <= 0 and cut_lower > 0:
            z[i] = max(theta[i] - outer - longest, -LARGEST)
        if (z[i] > 0) != drawn[i]:
            constant -= abs(z[i])
    _fill_weights(z, unordered)
    a, b, c, d = 0, drawn_above, above, above + drawn_below  # the next index of each block
    for i in range(count):
        if z[i] > 0:
            place = a if drawn[i] else b
            a, b = (a + 1, b) if drawn[i] else (a, b + 1)
        else:
            place = c if drawn[i] else d
            c, d = (c + 1, d) if drawn[i] else (c, d + 1)
        weight[place], space.place[place] = unordered[i], i
    mean_above, curvature_above = _moments(weight[:above])
    mean_below, curvature_below = _moments(weight[above:])
    slope, excess = float(k - above), cut_upper + cut_lower
    return Sides(
        space.place, weight, drawn_above, above, above + drawn_below, count, slope, slope + mean_above - mean_below,
        curvature_above + curvature_below, min(upper, longest_gap / 2), min(lower, longest_gap / 2),
        constant - drawn_below * excess, excess if drawn_below > 0 else 0.0,
        space.of_nodes[0], space.of_nodes[1], space.of_nodes[2],
    )  # fmt: skip


@inlined
def _multiply(weight, power, count, product):
    for i in range(count):
        product[i] *= 1.0 + weight * power[i]


@inlined
def _multiply_four(a, b, c, d, power, count, product):
    for i in range(count):
        x = power[i]
        product[i] *= ((1.0 + a * x) * (1.0 + b * x)) * ((1.0 + c * x) * (1.0 + d * x))


@inlined
def take_logarithm(count, product, values):
    for i in range(count):
        values[i] -= log(product[i])
        product[i] = 1.0


@inlined
def begin(sides, points, count, values):
    """Writes e^s and e^-s, a product of 1 and the logarithm without it; returns how many factors it can take."""
    up, down, product = sides.up, sides.down, sides.product
    farthest = 1.0
    for i in range(count):
        farthest = max(farthest, abs(points[i]))
    _fill_powers(points, count, up, down)
    for i in range(count):
        values[i], product[i] = sides.slope * points[i], 1.0
    return max(1, int(ROOM / (farthest + 1)))


@inlined
def _fill_powers(points, count, up, down):
    for i in range(count):
        up[i] = exp(points[i])
    for i in range(count):
        down[i] = 1.0 / up[i]


@inlined
def _evaluate_side(weight, power, count, factors, each, product, values):
    """Multiplies the factors of a side; returns how many are in the product, which can take ``each``."""
    n = weight.shape[0]
    fours = n // 4 * 4 if each >= 4 else 0
    for j in range(0, fours, 4):
        if factors + 4 > each:
            take_logarithm(count, product, values)
            factors = 0
        _multiply_four(weight[j], weight[j + 1], weight[j + 2], weight[j + 3], power, count, product)
        factors += 4
    for j in range(fours, n):
        if factors + 1 > each:
            take_logarithm(count, product, values)
            factors = 0
        _multiply(weight[j], power, count, product)
        factors += 1
    return factors


@inlined
def evaluate_count(sides, points, count, values):
    """log P(N = k) at some times, up to a constant."""
    each = begin(sides, points, count, values)
    weight, above, product = sides.weight, sides.above, sides.product
    factors = _evaluate_side(weight[:above], sides.down, count, 0, each, product, values)
    _evaluate_side(weight[above:], sides.up, count, factors, each, product, values)
    take_logarithm(count, product, values)


@inlined
def _reach(curvature, drift, depth, most):
    r"""How far away P(N = k) may be by a factor of e^-depth, if only its slope and curvature are known.

    Its logarithm is concave, with a curvature c(s) that changes by a factor of at most e^s: it has fallen by
    :math:`c (e^{-s} - 1 + s) \ge c s^2 / (2 + 2s/3)`, minus the rise due to the slope.
    """
    square, linear = curvature / 2 - drift / 3, drift + depth / 3
    if square < LEAST_BEND:
        return most
    return min(most, (linear + math.sqrt(linear * linear + 4 * square * depth)) / (2 * square))


@inlined
def find_range(sides, depth, lift, points, values):
    """The range where P(N = k) is at least e^-depth of its peak; at times -s, at least e^-(depth + lift s) of it.

    The logarithm is concave. At times before and after 0, a line through the points next to an end lies above it.
    """
    margin = MARGIN + math.log(sides.end)
    low = -_reach(sides.curvature, lift - sides.drift, depth, margin + sides.upper)
    high = _reach(sides.curvature, sides.drift, depth, margin + sides.lower)
    if depth < NARROW * sides.curvature:
        return low, high
    for _ in range(TRIALS):
        width = high - low
        for i in range(GRID):
            points[i] = low + width * (i / (GRID - 1))
        evaluate_count(sides, points, GRID, values)
        least = highest_of(values, GRID) - depth
        for i in range(GRID):
            values[i] += lift * max(-points[i], 0.0) - least
        first, last = first_within(values)
        low, high = points[max(first - 1, 0)], points[min(last + 1, GRID - 1)]
        if first < last and points[first + 1] <= 0:
            low = max(low, points[first] - _run(values[first + 1] - values[first], values[first], points))
        if first < last and points[last - 1] >= 0:
            high = min(high, points[last] + _run(values[last - 1] - values[last], values[last], points))
        if high - low > width / 4:
            break
    return low, high


@inlined
def nodes_per_unit(sides, depth):
    r"""The :func:`density` of nodes, or a smaller one for a short row.

    The logistic function has its poles at a height of pi. At a smaller height y, a factor F or 1 - F of the integrand
    grows by at most 1 / cos(y / 2), so the error with steps h is at most
    :math:`2 \cos(y/2)^{-n} e^{-2 \pi y / h}`, here for y = 2.
    """
    of_short_row = (depth + (sides.end + RATES) * -math.log(math.cos(1.0))) / (4 * math.pi)
    return min(density(depth, sides.curvature), of_short_row)


@inlined
def _run(rise, fall, points):
    """The length over which a line that rises by this much from point to point falls by that much."""
    step = points[1] - points[0]
    return fall / rise * step if rise > 0 else step


@inlined
def _multiply_member(weight, power, count, product, rate, above):
    for i in range(count):
        x = weight * power[i]
        product[i] *= 1.0 + x
        missing = (x if above else 1.0) / (1.0 + x)
        rate[i] += missing


@inlined
def _evaluate_members(weight, power, count, factors, each, product, values, rate, above):
    for j in range(weight.shape[0]):
        if factors + 1 > each:
            take_logarithm(count, product, values)
            factors = 0
        _multiply_member(weight[j], power, count, product, rate, above)
        factors += 1
    return factors


@inlined
def _evaluate_set(sides, points, count, values, rate):
    """The logarithm of the integrand of P(S), up to a constant, and the rate at which members arrive."""
    each = begin(sides, points, count, values)
    rate[:count] = 0.0
    weight, product, up, down = sides.weight, sides.product, sides.up, sides.down
    ends = sides.drawn_above, sides.above, sides.drawn_below
    factors = _evaluate_members(weight[: ends[0]], down, count, 0, each, product, values, rate, True)
    factors = _evaluate_side(weight[ends[0] : ends[1]], down, count, factors, each, product, values)
    factors = _evaluate_members(weight[ends[1] : ends[2]], up, count, factors, each, product, values, rate, False)
    _evaluate_side(weight[ends[2] :], up, count, factors, each, product, values)
    take_logarithm(count, product, values)
    for i in range(count):
        rate[i] = max(rate[i], LEAST_RATE)
        values[i] += log(rate[i])


@inlined_sum
def _mean_rarer(weight, power, share):
    total = 0.0
    for i in range(share.shape[0]):
        x = weight * power[i]
        total += share[i] * (x / (1.0 + x))
    return total


@inlined_sum
def _mean_usual(weight, power, share):
    total = 0.0
    for i in range(share.shape[0]):
        total += share[i] / (1.0 + weight * power[i])
    return total


@inlined_sum
def _member_slope(weight, power, share, per_rate, above):
    """The mean of (1 - F)(1 - F / R)."""
    total = 0.0
    for i in range(share.shape[0]):
        x = weight * power[i]
        usual = 1.0 / (1.0 + x)
        rarer = x * usual
        missing, came = (rarer, usual) if above else (usual, rarer)
        total += missing * (share[i] - came * per_rate[i])
    return total


@inlined
def log_prob(theta, drawn, k, depth, with_slopes, slope, space):
    """log P(S) of a row of finite positions, 0 < k < n, to e^-depth; writes the derivatives."""
    points, values, step, rate = space.of_nodes[3], space.of_nodes[4], space.of_nodes[5], space.of_nodes[6]
    anchor, offset = solve_tilt(theta, k)
    sides = split(theta, drawn, k, anchor, offset, LONGEST_GAP, space)
    low, high = find_range(sides, depth, 1.0, points, values)
    nodes, width = fill_nodes(low, high, nodes_per_unit(sides, depth), points)
    step[:nodes] = width
    if sides.excess > 0:  # a stretch over which the integrand is flat
        points[nodes], step[nodes] = 0.0, sides.excess
        nodes += 1
    _evaluate_set(sides, points, nodes, values, rate)
    total = weigh(values, nodes, step)
    if with_slopes:
        _slopes(sides, values[:nodes], rate[:nodes], slope)
    return total + sides.constant


@inlined
def _slopes(sides, share, rate, slope):
    for i in range(share.shape[0]):
        rate[i] = share[i] / rate[i]
    for j in range(sides.end):
        weight, above = sides.weight[j], j < sides.above
        power = sides.down if above else sides.up
        if j < sides.drawn_above or (not above and j < sides.drawn_below):
            found = _member_slope(weight, power, share, rate, above)
        elif above:
            found = -_mean_usual(weight, power, share)
        else:
            found = -_mean_rarer(weight, power, share)
        slope[sides.place[j]] = found
