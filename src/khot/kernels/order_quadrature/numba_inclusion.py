r"""Inclusion probabilities of order sampling by logistic noise, and products with their Jacobian, a row at a time.

With m the inclusion probabilities given that k units have come, which are the same at all times,

.. math:: \pi_i = \int P(N = k) \, F_i \Big( \sum_j (1 - F_j) m_j + (1 - F_i) m_i \Big) ds

and likewise :math:`1 - \pi_i`. Products with the Jacobian are derivatives along a vector, taken under the integral
sign; that of m is given.

Of a unit that is expected to have come, it is ``rarer`` not to have come, m and F stand for ``usual`` fates, and signs
change: see :mod:`.numba_logistic`.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from ..numba_tools import per_row, summed
from .numba_logistic import evaluate_count, find_range, split
from .numba_range import fill_nodes

LONGEST_GAP = 1200.0  # e^-600, by which units across it are drawn, is no probability that anybody asks for


@per_row
def seen_from_tilt(theta, drawn, k, anchor, offset, space):
    return split(theta, drawn, k, anchor, offset, LONGEST_GAP, space)


@per_row
def _fill_chances(sides, log_count, ends, depth, space):
    """P(N = k), times the weights, at the nodes; these are between given ends, or those to be found and given."""
    points, chance = space.of_nodes[3], space.of_nodes[4]
    if np.isnan(ends[0]):
        ends[0], ends[1] = find_range(sides, depth, 0.0, points, chance)
    nodes, width = fill_nodes(ends[0], ends[1], depth, sides.curvature, points)
    evaluate_count(sides, points, nodes, chance)
    for i in range(nodes):
        chance[i] = np.exp(chance[i] + log_count) * width
    return chance[:nodes]


@per_row
def _add_rates(weight, power, rarer, usual, to_usual, to_rarer):
    for i in range(to_usual.shape[0]):
        x = weight * power[i]
        large = 1.0 / (1.0 + x)
        to_usual[i] += large * rarer
        to_rarer[i] += x * large * usual


@per_row
def _fill_rates(sides, came, missing, leaving, arriving):
    """sum_j (1 - F_j) m_j and sum_j F_j (1 - m_j) at the nodes."""
    leaving[:], arriving[:] = 0.0, 0.0
    for j in range(sides.above):
        i = sides.place[j]
        _add_rates(sides.weight[j], sides.down, missing[i], came[i], arriving, leaving)
    for j in range(sides.above, sides.end):
        i = sides.place[j]
        _add_rates(sides.weight[j], sides.up, came[i], missing[i], leaving, arriving)


@summed
def _rarer_fate(weight, power, chance, rate, rarer):
    total = 0.0
    for i in range(chance.shape[0]):
        x = weight * power[i]
        large = 1.0 / (1.0 + x)
        total += chance[i] * (x * large) * (rate[i] + large * rarer)
    return total


@per_row
def inclusion(sides, came, missing, log_count, ends, depth, space, result):
    """Inclusion probabilities of a row of finite positions, 0 < k < n."""
    chance = _fill_chances(sides, log_count, ends, depth, space)
    nodes = chance.shape[0]
    leaving, arriving = space.of_nodes[5, :nodes], space.of_nodes[6, :nodes]
    _fill_rates(sides, came, missing, leaving, arriving)
    for j in range(sides.above):
        i = sides.place[j]
        result[i] = 1.0 - _rarer_fate(sides.weight[j], sides.down, chance, arriving, missing[i])
    for j in range(sides.above, sides.end):
        i = sides.place[j]
        result[i] = _rarer_fate(sides.weight[j], sides.up, chance, leaving, came[i])


@per_row
def _add_changes(weight, power, g, change, rarer, usual, log_count, to_usual, to_rarer):
    """Derivatives of log P(N = k), and of the sums of :func:`_add_rates`."""
    for i in range(log_count.shape[0]):
        x = weight * power[i]
        large = 1.0 / (1.0 + x)
        small = x * large
        bend = g * small * large
        log_count[i] += g * (rarer - small)
        to_usual[i] += large * change - bend * rarer
        to_rarer[i] += bend * usual - small * change


@summed
def _change_of_fate(weight, power, g, change, rarer, chance, log_count, rate, rate_change):
    total = 0.0
    for i in range(chance.shape[0]):
        x = weight * power[i]
        large = 1.0 / (1.0 + x)
        small = x * large
        moved = (log_count[i] + g * large) * (rate[i] + large * rarer)
        total += chance[i] * small * (moved + rate_change[i] + large * (change - g * small * rarer))
    return total


@per_row
def product(sides, came, missing, log_count, ends, depth, space, vector, change, result):
    """The Jacobian of :func:`inclusion` times a vector, of which ``change`` is the derivative of m along it."""
    chance = _fill_chances(sides, log_count, ends, depth, space)
    nodes = chance.shape[0]
    leaving, arriving = space.of_nodes[5, :nodes], space.of_nodes[6, :nodes]
    moved, leaving_change, arriving_change = (
        space.of_nodes[7, :nodes], space.of_nodes[8, :nodes], space.of_nodes[9, :nodes]
    )  # fmt: skip
    mean = _fill_rates_and_mean(sides, came, missing, vector, leaving, arriving)
    moved[:], leaving_change[:], arriving_change[:] = 0.0, 0.0, 0.0
    for j in range(sides.end):
        i, weight = sides.place[j], sides.weight[j]
        g = vector[i] - mean
        if j < sides.above:
            _add_changes(
                weight, sides.down, -g, -change[i], missing[i], came[i], moved, arriving_change, leaving_change
            )
        else:
            _add_changes(weight, sides.up, g, change[i], came[i], missing[i], moved, leaving_change, arriving_change)
    for j in range(sides.end):
        i, weight = sides.place[j], sides.weight[j]
        g = vector[i] - mean
        if j < sides.above:
            result[i] = -_change_of_fate(
                weight, sides.down, -g, -change[i], missing[i], chance, moved, arriving, arriving_change
            )
        else:
            result[i] = _change_of_fate(weight, sides.up, g, change[i], came[i], chance, moved, leaving, leaving_change)


@per_row
def _fill_rates_and_mean(sides, came, missing, vector, leaving, arriving):
    """:func:`_fill_rates`; and a mean of the vector, less which it has the same product, of smaller terms."""
    _fill_rates(sides, came, missing, leaving, arriving)
    total, sum_of_weights = 0.0, np.finfo(np.float64).tiny
    for j in range(sides.end):
        i = sides.place[j]
        weight = came[i] * missing[i]
        total += weight * vector[i]
        sum_of_weights += weight
    return total / sum_of_weights
