r"""Inclusion probabilities of order sampling by logistic noise, and products with their Jacobian, row by row.

With m the inclusion probabilities given that k units have arrived, which are the same at all times,

.. math:: \pi_i = \int P(N = k) \, F_i \Big( \sum_j (1 - F_j) m_j + (1 - F_i) m_i \Big) ds

and likewise :math:`1 - \pi_i`. Products with the Jacobian are derivatives along a vector, taken under the integral
sign.

As in :mod:`.numba_logistic`, the rarer fate of a unit, of probability x / (1 + x), is to have arrived, or, if it is
above, to be missing. Vectors and their products count rarer fates, with a minus sign above. Loops process four units at
a time if possible, which shares reads and writes.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum
from ..cpu.maths import EXP
from .numba_logistic import Sides, evaluate_count, find_range, nodes_per_unit, split
from .numba_range import fill_nodes

Array = np.ndarray[Any, Any]

exp = EXP[np.float64]
LONGEST_GAP = 1200.0  # units across it are drawn with probability e^-600, which is negligible


class Law(NamedTuple):
    """A row, and the probabilities of the rarer fate of each unit, in the order of the sides, given N = k."""

    sides: Sides
    rarer: Array
    usual: Array
    log_count: float  # logarithm of P(N = k) at the time 0, times the product of 1 + x there


class Nodes(NamedTuple):
    """The numbers of nodes that :func:`_part_of_change` uses: c, c (L C + C'), c L and c C."""

    chance: Array
    rest: Array
    by_rarer: Array
    rate: Array


@inlined
def seen_from_tilt(theta, drawn, k, anchor, offset, space):
    return split(theta, drawn, k, anchor, offset, LONGEST_GAP, space)


@inlined
def _fill_chances(law, ends, depth, space):
    """P(N = k), times the weights, at the nodes between given ends; ends that are NaN are found and stored."""
    points, chance = space.of_nodes[3], space.of_nodes[4]
    if np.isnan(ends[0]):
        ends[0], ends[1] = find_range(law.sides, depth, 0.0, points, chance)
    nodes, width = fill_nodes(ends[0], ends[1], nodes_per_unit(law.sides, depth), points)
    evaluate_count(law.sides, points, nodes, chance)
    _fill_exponentials(law.log_count, width, chance[:nodes])
    return chance[:nodes]


@inlined
def _fill_exponentials(shift, factor, values):
    for i in range(values.shape[0]):
        values[i] = exp(values[i] + shift) * factor


@inlined
def _fates(weight, power):
    """x / (1 + x) and 1 / (1 + x)."""
    x = weight * power
    large = 1.0 / (1.0 + x)
    return x * large, large


@inlined
def _rates_of(weight, power, rarer, usual):
    small, large = _fates(weight, power)
    return large * rarer, small * usual


@inlined
def _add_rates(law, start, stop, power, to_usual, to_rarer):
    """Adds units to the rates at which they will yet take their rarer fate, and at which they must give it up."""
    weight, rarer, usual = law.sides.weight, law.rarer, law.usual
    fours = start + (stop - start) // 4 * 4
    for j in range(start, fours, 4):
        w0, w1, w2, w3 = weight[j], weight[j + 1], weight[j + 2], weight[j + 3]
        r0, r1, r2, r3 = rarer[j], rarer[j + 1], rarer[j + 2], rarer[j + 3]
        u0, u1, u2, u3 = usual[j], usual[j + 1], usual[j + 2], usual[j + 3]
        for i in range(to_usual.shape[0]):
            a, b = _rates_of(w0, power[i], r0, u0), _rates_of(w1, power[i], r1, u1)
            c, d = _rates_of(w2, power[i], r2, u2), _rates_of(w3, power[i], r3, u3)
            to_usual[i] += (a[0] + b[0]) + (c[0] + d[0])
            to_rarer[i] += (a[1] + b[1]) + (c[1] + d[1])
    for j in range(fours, stop):
        w0, r0, u0 = weight[j], rarer[j], usual[j]
        for i in range(to_usual.shape[0]):
            a = _rates_of(w0, power[i], r0, u0)
            to_usual[i] += a[0]
            to_rarer[i] += a[1]


@inlined
def _fill_rates(law, leaving, arriving):
    """sum_j (1 - F_j) m_j and sum_j F_j (1 - m_j) at the nodes."""
    sides = law.sides
    leaving[:], arriving[:] = 0.0, 0.0
    _add_rates(law, 0, sides.above, sides.down, arriving, leaving)
    _add_rates(law, sides.above, sides.end, sides.up, leaving, arriving)


@inlined
def _part_of_fate(weight, power, chance, rate, rarer):
    small, large = _fates(weight, power)
    return chance * small * (rate + large * rarer)


@inlined_sum
def _four_fates(weight, rarer, j, power, chance, rate):
    w0, w1, w2, w3 = weight[j], weight[j + 1], weight[j + 2], weight[j + 3]
    r0, r1, r2, r3 = rarer[j], rarer[j + 1], rarer[j + 2], rarer[j + 3]
    a = b = c = d = 0.0
    for i in range(chance.shape[0]):
        a += _part_of_fate(w0, power[i], chance[i], rate[i], r0)
        b += _part_of_fate(w1, power[i], chance[i], rate[i], r1)
        c += _part_of_fate(w2, power[i], chance[i], rate[i], r2)
        d += _part_of_fate(w3, power[i], chance[i], rate[i], r3)
    return a, b, c, d


@inlined_sum
def _one_fate(weight, rarer, j, power, chance, rate):
    a, w0, r0 = 0.0, weight[j], rarer[j]
    for i in range(chance.shape[0]):
        a += _part_of_fate(w0, power[i], chance[i], rate[i], r0)
    return a


@inlined
def _fill_fates(weight, rarer, start, stop, power, chance, rate, fate):
    fours = start + (stop - start) // 4 * 4
    for j in range(start, fours, 4):
        fate[j], fate[j + 1], fate[j + 2], fate[j + 3] = _four_fates(weight, rarer, j, power, chance, rate)
    for j in range(fours, stop):
        fate[j] = _one_fate(weight, rarer, j, power, chance, rate)


@inlined
def rarer_fates(law, ends, depth, space, fate):
    """The probabilities of the rarer fates at the end of the draw: to be drawn, or, above, not to be drawn."""
    sides = law.sides
    chance = _fill_chances(law, ends, depth, space)
    leaving, arriving = space.of_nodes[5, : chance.shape[0]], space.of_nodes[6, : chance.shape[0]]
    _fill_rates(law, leaving, arriving)
    _fill_fates(sides.weight, law.rarer, 0, sides.above, sides.down, chance, arriving, fate)
    _fill_fates(sides.weight, law.rarer, sides.above, sides.end, sides.up, chance, leaving, fate)


@inlined
def _changes_of(weight, power, h, change, rarer, usual):
    """The changes of minus log P(N = k), and of the rates of :func:`_rates_of`."""
    small, large = _fates(weight, power)
    bend = h * small * large
    return h * small, large * change - bend * rarer, bend * usual - small * change


@inlined
def _add_changes(law, h, change, start, stop, power, log_count, to_usual, to_rarer):
    weight, rarer, usual = law.sides.weight, law.rarer, law.usual
    fours = start + (stop - start) // 4 * 4
    for j in range(start, fours, 4):
        w0, w1, w2, w3 = weight[j], weight[j + 1], weight[j + 2], weight[j + 3]
        r0, r1, r2, r3 = rarer[j], rarer[j + 1], rarer[j + 2], rarer[j + 3]
        u0, u1, u2, u3 = usual[j], usual[j + 1], usual[j + 2], usual[j + 3]
        h0, h1, h2, h3 = h[j], h[j + 1], h[j + 2], h[j + 3]
        c0, c1, c2, c3 = change[j], change[j + 1], change[j + 2], change[j + 3]
        for i in range(log_count.shape[0]):
            a, b = _changes_of(w0, power[i], h0, c0, r0, u0), _changes_of(w1, power[i], h1, c1, r1, u1)
            c, d = _changes_of(w2, power[i], h2, c2, r2, u2), _changes_of(w3, power[i], h3, c3, r3, u3)
            log_count[i] -= (a[0] + b[0]) + (c[0] + d[0])
            to_usual[i] += (a[1] + b[1]) + (c[1] + d[1])
            to_rarer[i] += (a[2] + b[2]) + (c[2] + d[2])
    for j in range(fours, stop):
        w0, r0, u0, h0, c0 = weight[j], rarer[j], usual[j], h[j], change[j]
        for i in range(log_count.shape[0]):
            a = _changes_of(w0, power[i], h0, c0, r0, u0)
            log_count[i] -= a[0]
            to_usual[i] += a[1]
            to_rarer[i] += a[2]


@inlined
def _part_of_change(weight, power, chance, rest, by_rarer, rate, twice, fixed, rarer, h):
    r"""The change of :func:`_part_of_fate`, :math:`c s (L C + C' + l (\mu L + h C + \mu' - h \mu + 2 h \mu l))`."""
    small, large = _fates(weight, power)
    inner = (fixed * chance + rarer * by_rarer) + (h * rate + twice * (chance * large))
    return small * (rest + large * inner)


@inlined_sum
def _fill_changes(law, h, change, start, stop, power, nodes, result):
    weight, rarer, (chance, rest, by_rarer, rate) = law.sides.weight, law.rarer, nodes
    for j in range(start, stop):
        total, w0, r0, h0 = 0.0, weight[j], rarer[j], h[j]
        fixed, twice = change[j] - h0 * r0, 2 * h0 * r0
        for i in range(chance.shape[0]):
            total += _part_of_change(w0, power[i], chance[i], rest[i], by_rarer[i], rate[i], twice, fixed, r0, h0)
        result[j] = total


@inlined
def _fill_products(rate, rate_change, log_count, nodes):
    for i in range(rate.shape[0]):
        nodes.by_rarer[i] = nodes.chance[i] * log_count[i]
        nodes.rate[i] = nodes.chance[i] * rate[i]
        nodes.rest[i] = nodes.chance[i] * (log_count[i] * rate[i] + rate_change[i])


@inlined
def changes_of_rarer_fates(law, ends, depth, space, h, change, result):
    """The derivative of :func:`rarer_fates` along h, along which that of ``law.rarer`` is ``change``."""
    sides, chance = law.sides, _fill_chances(law, ends, depth, space)
    count, rows = chance.shape[0], space.of_nodes
    leaving, arriving, log_count = rows[5, :count], rows[6, :count], rows[7, :count]
    leaving_change, arriving_change = rows[8, :count], rows[9, :count]
    nodes = Nodes(chance, rows[10, :count], rows[11, :count], rows[12, :count])
    _fill_rates(law, leaving, arriving)
    mean = 0.0
    for j in range(sides.end):
        mean += h[j] * law.rarer[j]
    log_count[:], leaving_change[:], arriving_change[:] = mean, 0.0, 0.0
    _add_changes(law, h, change, 0, sides.above, sides.down, log_count, arriving_change, leaving_change)
    _add_changes(law, h, change, sides.above, sides.end, sides.up, log_count, leaving_change, arriving_change)
    _fill_products(arriving, arriving_change, log_count, nodes)
    _fill_changes(law, h, change, 0, sides.above, sides.down, nodes, result)
    _fill_products(leaving, leaving_change, log_count, nodes)
    _fill_changes(law, h, change, sides.above, sides.end, sides.up, nodes, result)
