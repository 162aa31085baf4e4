r"""Inclusion probabilities of short rows for noise of any law, and products with their Jacobian, by recursions.

The formulas are those of :mod:`.numba_arrivals`. What is counted is the rarer of two fates of the units, to have
arrived by a time or not, of probability :math:`b_i`; the other one has :math:`a_i = 1 - b_i`. Unit i makes the
difference if T of the others have it, with probability :math:`u_i`. The probability that m of the units before i have
it, and that those from i on have it so often that there are T in all, are

.. math:: P_{i+1}(m) = a_i P_i(m) + b_i P_i(m - 1), \qquad G_i(m) = a_i G_{i+1}(m) + b_i G_{i+1}(m + 1), \qquad
    u_i = \sum_m P_i(m) G_{i+1}(m).

For the Jacobian, the tables :math:`P^h` and :math:`G^h` are sums over the units j before i, or from i on, of
:math:`f_j h_j` times such a probability without unit j:

.. math:: P^h_{i+1}(m) = a_i P^h_i(m) + b_i P^h_i(m - 1) + f_i h_i P_i(m), \qquad
    (J g)_i = \int f_i \sum_m \big(g_i P^1_i - P^g_i\big) G_{i+1} + P_i \big(g_i G^1_{i+1} - G^g_{i+1}\big) \, ds.

The lanes of vectors are nodes of the quadrature. All terms of the probabilities are positive.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"

from typing import NamedTuple

import numpy as np

from ..cpu.lanes import LANES, at, every, put
from ..cpu.loops import by_lanes, inlined, per_row
from ..cpu.maths import EXP
from .numba_range import MOST_NODES, Array, range_by_chernoff

exp = EXP[np.float64]


class Tables(NamedTuple):
    """Nodes, and vectors of eight of them."""

    node: Array
    width: Array
    of_nodes: Array
    of_units: Array  # F, 1 - F, f, u, and sums over the nodes: one vector of each for every unit
    table: Array  # G, G for h = 1 and h = g, P, P for h = 1 and h = g; counts of P begin one vector later, after a zero


RATE, FEWER, SUM = 2, 3, 4  # places in ``of_units``, in multiples of the number of units


@inlined
def tables_for(n, k, has_vector):
    """Arrays for rows of n units, of which any of k are drawn."""
    last = 0
    for size in k:
        last = max(last, min(size, n - size))
    nodes, size = np.empty((3, MOST_NODES)), (last + 3) * (3 + (3 if has_vector else 1) * (n + 1))
    return Tables(nodes[0], nodes[1], nodes[2:], np.empty(5 * n * LANES), np.empty(size * LANES))


@inlined
def _first(i, n, last):
    """The smallest count of the units before i from which ``last`` can be reached."""
    return max(0, last - (n - i))


@inlined
def _begin(table, last):
    """Writes P and G of no units."""
    width = last + 3
    for m in range(width):
        put(table, m, every(0.0))
    for m in range(3):
        put(table, 3 * width + m, every(0.0))
    put(table, last, every(1.0))
    put(table, 3 * width + 1, every(1.0))


@per_row
def _fill_fewer(zero, one, n, last, units, table):
    """Writes the u, where T is ``last``; a and b begin at ``zero`` and ``one``."""
    width = last + 3
    _begin(table, last)
    for i in range(n - 1):
        a, b, here = at(units, zero + i), at(units, one + i), (3 + i) * width + 1
        there, first, end = here + width, _first(i + 1, n, last), min(i + 1, last)
        before = at(table, here + first - 1)
        for m in range(first, end + 1):
            now = at(table, here + m)
            put(table, there + m, a * now + b * before)
            before = now
        put(table, there - 1, every(0.0))
        put(table, there + end + 1, every(0.0))
    for i in range(n - 1, -1, -1):
        a, b, here, total = at(units, zero + i), at(units, one + i), (3 + i) * width + 1, every(0.0)
        first = _first(i, n, last)
        now = at(table, first)
        for m in range(first, min(i, last) + 1):
            more = at(table, m + 1)
            total = total + at(table, here + m) * now
            put(table, m, a * now + b * more)
            now = more
        put(units, FEWER * n + i, total)


@per_row
def _add_inclusion(zero, one, n, last, width, units, table):
    """Adds the contributions of some nodes to the probabilities."""
    _fill_fewer(zero, one, n, last, units, table)
    total = every(0.0)
    for i in range(n):
        flow = at(units, RATE * n + i) * at(units, FEWER * n + i) * width
        put(units, FEWER * n + i, flow)
        total = total + flow
    for i in range(n):
        put(units, SUM * n + i, at(units, SUM * n + i) + at(units, i) * (total + at(units, FEWER * n + i)))


@per_row
def _climb_with(zero, one, n, last, vector, units, table):
    """Writes P and both P^h."""
    width, nothing = last + 3, every(0.0)
    to_ones, to_vector = (n + 1) * width, 2 * (n + 1) * width
    for m in range(3):
        put(table, 3 * width + to_ones + m, nothing)
        put(table, 3 * width + to_vector + m, nothing)
    for i in range(n - 1):
        a, b, here = at(units, zero + i), at(units, one + i), (3 + i) * width + 1
        f, g, first, end = at(units, RATE * n + i), every(vector[i]), _first(i + 1, n, last), min(i + 1, last)
        before, there = here + first - 1, here + width
        p, q, r = at(table, before), at(table, to_ones + before), at(table, to_vector + before)
        for m in range(here + first, here + end + 1):
            p_now, q_now, r_now = at(table, m), at(table, to_ones + m), at(table, to_vector + m)
            flow = f * p_now
            put(table, width + m, a * p_now + b * p)
            put(table, width + to_ones + m, a * q_now + b * q + flow)
            put(table, width + to_vector + m, a * r_now + b * r + g * flow)
            p, q, r = p_now, q_now, r_now
        for edge in (there - 1, there + end + 1):
            put(table, edge, nothing)
            put(table, to_ones + edge, nothing)
            put(table, to_vector + edge, nothing)


@per_row
def _add_product(zero, one, n, last, nodes_width, vector, units, table):
    """Adds the contributions of some nodes to the product of the Jacobian with a vector."""
    width = last + 3
    to_ones, to_vector = (n + 1) * width, 2 * (n + 1) * width
    _begin(table, last)
    _climb_with(zero, one, n, last, vector, units, table)
    for m in range(width, 3 * width):
        put(table, m, every(0.0))
    for i in range(n - 1, -1, -1):
        a, b, here, first = at(units, zero + i), at(units, one + i), (3 + i) * width + 1, _first(i, n, last)
        f, g, of_ones, of_vector = at(units, RATE * n + i), every(vector[i]), every(0.0), every(0.0)
        p, q, r = at(table, first), at(table, width + first), at(table, 2 * width + first)
        for m in range(first, min(i, last) + 1):
            before, flow = at(table, here + m), f * p
            of_ones = of_ones + at(table, to_ones + here + m) * p + before * q
            of_vector = of_vector + at(table, to_vector + here + m) * p + before * r
            p_next, q_next, r_next = at(table, m + 1), at(table, width + m + 1), at(table, 2 * width + m + 1)
            put(table, m, a * p + b * p_next)
            put(table, width + m, a * q + b * q_next + flow)
            put(table, 2 * width + m, a * r + b * r_next + g * flow)
            p, q, r = p_next, q_next, r_next
        put(units, SUM * n + i, at(units, SUM * n + i) + (g * of_ones - of_vector) * (f * nodes_width))


def of_short_rows(law):
    """As :func:`.of_rows_by_nodes`."""

    @by_lanes
    def fill_fates(came, missing, rate):
        """For the x in the place of the rates."""
        for i in range(rate.shape[0]):
            at_x = law(rate[i])
            came[i], missing[i], rate[i] = at_x.came, at_x.missing, at_x.rate

    @inlined
    def fill(weight, up, units):
        n, count = weight.shape[0], weight.shape[0] * LANES
        for i in range(n):
            put(units, RATE * n + i, every(weight[i]) * up)
        fill_fates(units[:count], units[count : 2 * count], units[RATE * count : FEWER * count])

    @inlined
    def begin(room, n, nodes):
        for i in range(SUM * n, (SUM + 1) * n):
            put(room.of_units, i, every(0.0))
        for i in range(nodes):
            room.of_nodes[0, i] = exp(room.node[i])

    @inlined
    def finish(units, result):
        n = result.shape[0]
        for i in range(n):
            result[i] = 0.0
            for lane in range(LANES):
                result[i] += units[(SUM * n + i) * LANES + lane]

    @inlined
    def inclusion(room, weight, k, nodes, when, depth, given, result):
        n, units, up = weight.shape[0], room.of_units, room.of_nodes[0]
        zero, one = (0, n) if 2 * k > n else (n, 0)
        begin(room, n, nodes)
        for block in range(nodes // LANES):
            fill(weight, at(up, block), units)
            _add_inclusion(zero, one, n, min(k - 1, n - k), at(room.width, block), units, room.table)
        finish(units, result)

    @inlined
    def product(room, weight, k, nodes, when, depth, given, vector, result):
        n, units, up = weight.shape[0], room.of_units, room.of_nodes[0]
        zero, one = (0, n) if 2 * k > n else (n, 0)
        begin(room, n, nodes)
        for block in range(nodes // LANES):
            fill(weight, at(up, block), units)
            _add_product(zero, one, n, min(k, n - k) - 1, at(room.width, block), vector, units, room.table)
        finish(units, result)

    return tables_for, range_by_chernoff(law), inclusion, product
