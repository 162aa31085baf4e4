r"""Inclusion probabilities of order sampling by logistic noise, and products with their Jacobian, a row at a time.

With m the inclusion probabilities given that k units have come, which are the same at all times,

.. math:: \pi_i = \int P(N = k) \, F_i \Big( \sum_j (1 - F_j) m_j + (1 - F_i) m_i \Big) ds

and likewise :math:`1 - \pi_i`. The Jacobian is symmetric, as :math:`\pi` is the gradient of the expected sum of the k
largest :math:`\vartheta_i - E_i`: its products with a vector serve backward and forward mode. They are derivatives along
that vector, taken under the integral sign.

Seen from where k units are expected, :mod:`.numba_logistic`, the less probable of "has come" and "is missing" is
x / (1 + x) on both sides. Below it is F, above 1 - F, and in what follows a ``sign`` tells the one from the other.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import NamedTuple

import numpy as np

from ..numba_tools import per_row, summed
from .numba_count import covariance_product, masses
from .numba_logistic import Sides, around_threshold, evaluate_count, split
from .numba_range import MARGIN, MAX_NODES, fill_nodes, range_finder

FARTHEST = 600.0  # e^-600 is no probability that anybody asks for
TILT_STEPS = 60

_range_of_count = range_finder(evaluate_count)


class Room(NamedTuple):
    """For numbers of each unit, node, and number of units that have come."""

    unit: np.ndarray
    drawn: np.ndarray
    of_units: np.ndarray  # (9, n)
    of_nodes: np.ndarray  # (12, nodes)
    upto: np.ndarray  # (n + 1, size + 1)
    sums: np.ndarray  # the same, or empty
    after: np.ndarray  # (4, size + 1)


@per_row
def room(n, size, with_sums):
    """Room for rows of n units of which at most ``size`` are of the rarer kind."""
    sums = np.empty((n + 1, size + 1) if with_sums else (0, 0))
    unit, drawn = np.empty(n, np.int64), np.zeros(n, np.bool_)
    of_units, of_nodes = np.empty((9, n)), np.empty((12, MAX_NODES + 2))
    return Room(unit, drawn, of_units, of_nodes, np.empty((n + 1, size + 1)), sums, np.empty((4, size + 1)))


class Law(NamedTuple):
    """The units on their sides, and what they do given N = k; of length ``sides.end``."""

    sides: Sides
    came: np.ndarray  # m
    missing: np.ndarray  # 1 - m
    nodes: int


@per_row
def _tilt(sides, half):
    """About the time at which k are expected, at which N = k is no rare event."""
    low, high, time = -half - MARGIN, half + MARGIN, 0.0
    for _ in range(TILT_STEPS):
        up, down = math.exp(time), math.exp(-time)
        missed, slope = -sides.slope, 0.0
        for j in range(sides.end):
            x = sides.weight[j] * (down if j < sides.above else up)
            small = x / (1.0 + x)
            missed += -small if j < sides.above else small
            slope += small / (1.0 + x)
        if missed * missed <= 0.25 * slope + 1e-20:
            break
        low, high = (low, time) if missed > 0 else (time, high)
        newton = time - missed / max(slope, 1e-300)
        time = newton if low < newton < high else (low + high) / 2
    return time


@per_row
def _given_count(sides, k, time, room, came, missing):
    """P(i has come | N = k) and its complement; the smaller probabilities p and q themselves, and P(N = k)."""
    up, down = math.exp(time), math.exp(-time)
    flip = 2 * k > sides.end  # the zeros are fewer than the ones, and counted
    p, q = room.of_units[3], room.of_units[4]
    for j in range(sides.end):
        above = j < sides.above
        x = sides.weight[j] * (down if above else up)
        large = 1.0 / (1.0 + x)
        p[j], q[j] = (x * large, large) if above == flip else (large, x * large)
    size = sides.end - k if flip else k
    if flip:
        return masses(p, q, sides.end, size, room.upto, room.after, missing, came)
    return masses(p, q, sides.end, size, room.upto, room.after, came, missing)


@per_row
def prepare(theta, count, k, room):
    """The :class:`Law` of a row of finite positions; nodes and P(N = k), times the weights, in ``room.of_nodes``."""
    of_nodes, of_units = room.of_nodes, room.of_units
    points, values, product = of_nodes[0], of_nodes[1], of_nodes[4]
    came, missing = of_units[1], of_units[2]
    inner, outer = around_threshold(theta, count, k)
    ends, half, _, _ = split(theta, room.drawn, count, inner, outer, FARTHEST, room.unit, of_units[0])
    sides = Sides(
        room.unit, of_units[0], 0, ends[1], ends[1], ends[3], float(k - ends[1]), of_nodes[2], of_nodes[3], product,
        of_nodes[5],
    )  # fmt: skip
    time = _tilt(sides, half)
    log_count = math.log(_given_count(sides, k, time, room, came, missing))
    margin = half + MARGIN + math.log(count)
    low, high = _range_of_count(sides, -margin, margin, points, values)
    nodes, width = fill_nodes(low, high, points)
    points[nodes] = time
    evaluate_count(sides, points, nodes + 1, values)
    for i in range(nodes):
        values[i] = math.exp(values[i] - values[nodes] + log_count) * width
    return Law(sides, came, missing, nodes)


@per_row
def _add_rates(weight, power, nodes, rarer, usual, to_usual, to_rarer):
    """Adds a unit to sum_j (1 - F_j) m_j and sum_j F_j (1 - m_j), or the other way round."""
    for i in range(nodes):
        x = weight * power[i]
        large = 1.0 / (1.0 + x)
        to_usual[i] += large * rarer
        to_rarer[i] += x * large * usual


@summed
def _rarer_fate(weight, power, nodes, share, rate, rarer):
    total = 0.0
    for i in range(nodes):
        x = weight * power[i]
        large = 1.0 / (1.0 + x)
        total += share[i] * (x * large) * (rate[i] + large * rarer)
    return total


@per_row
def _rates(law, leaving, arriving):
    """sum_j (1 - F_j) m_j and sum_j F_j (1 - m_j) at the nodes."""
    sides, nodes = law.sides, law.nodes
    leaving[:nodes], arriving[:nodes] = 0.0, 0.0
    for j in range(sides.above):
        _add_rates(sides.weight[j], sides.down, nodes, law.missing[j], law.came[j], arriving, leaving)
    for j in range(sides.above, sides.end):
        _add_rates(sides.weight[j], sides.up, nodes, law.came[j], law.missing[j], leaving, arriving)


@per_row
def inclusion(theta, count, k, room, probs):
    """Inclusion probabilities of a row of finite positions, 0 < k < count."""
    law = prepare(theta, count, k, room)
    sides, nodes, share = law.sides, law.nodes, room.of_nodes[1]
    leaving, arriving = room.of_nodes[6], room.of_nodes[7]
    _rates(law, leaving, arriving)
    for j in range(sides.above):
        out = _rarer_fate(sides.weight[j], sides.down, nodes, share, arriving, law.missing[j])
        probs[sides.unit[j]] = 1.0 - out
    for j in range(sides.above, sides.end):
        probs[sides.unit[j]] = _rarer_fate(sides.weight[j], sides.up, nodes, share, leaving, law.came[j])


@per_row
def _add_changes(weight, power, nodes, sign, g, change, rarer, usual, log_count, to_usual, to_rarer):
    """Derivatives of log P(N = k), and of the sums of :func:`_add_rates`."""
    for i in range(nodes):
        x = weight * power[i]
        large = 1.0 / (1.0 + x)
        small = x * large
        bend = sign * g * small * large
        log_count[i] += sign * g * (rarer - small)
        to_usual[i] += large * change - bend * rarer
        to_rarer[i] += bend * usual - small * change


@summed
def _change_of_fate(weight, power, nodes, sign, g, change, rarer, share, log_count, rate, rate_change):
    total = 0.0
    for i in range(nodes):
        x = weight * power[i]
        large = 1.0 / (1.0 + x)
        small = x * large
        moved = (log_count[i] + sign * g * large) * (rate[i] + large * rarer)
        total += share[i] * small * (moved + rate_change[i] + large * (change - sign * g * small * rarer))
    return total


@per_row
def product(theta, count, k, room, vector, result):
    """The Jacobian of :func:`inclusion` times a vector."""
    law = prepare(theta, count, k, room)
    sides, nodes, share = law.sides, law.nodes, room.of_nodes[1]
    leaving, arriving = room.of_nodes[6], room.of_nodes[7]
    log_count, leaving_change, arriving_change = room.of_nodes[8], room.of_nodes[9], room.of_nodes[10]
    p, q, g, change = room.of_units[3], room.of_units[4], room.of_units[5], room.of_units[6]
    _rates(law, leaving, arriving)
    _centre(law, vector, g)
    size = min(k, sides.end - k)
    flip = 2 * k > sides.end
    counted, other = (law.missing, law.came) if flip else (law.came, law.missing)
    covariance_product(p, q, g, sides.end, size, room.upto, room.sums, room.after, counted, other, change)
    for values in (log_count, leaving_change, arriving_change):
        values[:nodes] = 0.0
    for j in range(sides.end):  # the change of what is rarer: of 1 - m above, of m below
        if j < sides.above:
            _add_changes(
                sides.weight[j], sides.down, nodes, -1.0, g[j], -change[j], law.missing[j], law.came[j],
                log_count, arriving_change, leaving_change,
            )  # fmt: skip
        else:
            _add_changes(
                sides.weight[j], sides.up, nodes, 1.0, g[j], change[j], law.came[j], law.missing[j],
                log_count, leaving_change, arriving_change,
            )  # fmt: skip
    for j in range(sides.end):
        if j < sides.above:
            result[sides.unit[j]] = -_change_of_fate(
                sides.weight[j], sides.down, nodes, -1.0, g[j], -change[j], law.missing[j],
                share, log_count, arriving, arriving_change,
            )  # fmt: skip
        else:
            result[sides.unit[j]] = _change_of_fate(
                sides.weight[j], sides.up, nodes, 1.0, g[j], change[j], law.came[j],
                share, log_count, leaving, leaving_change,
            )  # fmt: skip


@per_row
def _centre(law, vector, g):
    """The vector without its weighted mean, which changes no product and leaves smaller terms, in order of the blocks."""
    total, sum_of_weights = 0.0, 1e-300
    for j in range(law.sides.end):
        weight = law.came[j] * law.missing[j]
        total += weight * vector[law.sides.unit[j]]
        sum_of_weights += weight
    for j in range(law.sides.end):
        g[j] = vector[law.sides.unit[j]] - total / sum_of_weights
