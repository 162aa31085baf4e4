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

import math
from typing import NamedTuple

import numpy as np

from ..cpu.lanes import LANES, at, every, put
from ..cpu.loops import by_lanes, inlined, per_row
from ..cpu.maths import EXP
from .numba_arrivals import range_by_chernoff
from .numba_range import MOST_NODES, Array

exp = EXP[np.float64]


class Tables(NamedTuple):
    """Nodes, and vectors of eight of them: one for each unit, for each unit and count, and for each count."""

    node: Array
    width: Array
    of_nodes: Array
    came: Array  # F
    missing: Array  # 1 - F
    rate: Array  # f
    fewer: Array  # u
    total: Array  # of the result
    table: Array  # P; counts begin one vector later, after a zero
    of_ones: Array  # P for h = 1
    of_vector: Array  # and h = g
    rest: Array  # G
    rest_of_ones: Array
    rest_of_vector: Array


@inlined
def tables_for(n, k, has_vector):
    """Arrays for rows of n units, of which any of k are drawn."""
    last = 0
    for size in k:
        last = max(last, min(size, n - size))
    nodes, units, rest = np.empty((3, MOST_NODES)), np.empty((5, n * LANES)), np.empty((3, (last + 3) * LANES))
    tables = np.empty((3 if has_vector else 1, (n + 1) * (last + 3) * LANES))
    return Tables(
        nodes[0], nodes[1], nodes[2:], units[0], units[1], units[2], units[3], units[4],
        tables[0], tables[-2], tables[-1], rest[0], rest[1], rest[2],
    )  # fmt: skip


@inlined
def _first(i, n, last):
    """The smallest count of the units before i from which ``last`` can be reached."""
    return max(0, last - (n - i))


@inlined
def _begin(room, last):
    """The tables of no units."""
    nothing = every(0.0)
    for m in range(3):
        put(room.table, m, nothing)
    for m in range(last + 2):
        put(room.rest, m, nothing)
    put(room.table, 1, every(1.0))
    put(room.rest, last, every(1.0))


@inlined
def _fates(room, n, k):
    """The probabilities a and b; without a unit, k - 1 have arrived or n - k are missing, the fewer of which count."""
    return (room.came, room.missing) if 2 * k > n else (room.missing, room.came)


@per_row
def _fill_fewer(zero, one, n, last, room):
    """Writes the u, where T is ``last``."""
    table, rest, width = room.table, room.rest, last + 3
    _begin(room, last)
    for i in range(n - 1):
        a, b, here, there = at(zero, i), at(one, i), i * width + 1, (i + 1) * width + 1
        first, end = _first(i + 1, n, last), min(i + 1, last)
        before = at(table, here + first - 1)
        for m in range(first, end + 1):
            now = at(table, here + m)
            put(table, there + m, a * now + b * before)
            before = now
        put(table, there - 1, every(0.0))
        put(table, there + end + 1, every(0.0))
    for i in range(n - 1, -1, -1):
        a, b, here, total = at(zero, i), at(one, i), i * width + 1, every(0.0)
        first = _first(i, n, last)
        now = at(rest, first)
        for m in range(first, min(i, last) + 1):
            more = at(rest, m + 1)
            total = total + at(table, here + m) * now
            put(rest, m, a * now + b * more)
            now = more
        put(room.fewer, i, total)


@per_row
def _add_inclusion(zero, one, n, last, width, room):
    """Adds the contributions of some nodes to the probabilities."""
    _fill_fewer(zero, one, n, last, room)
    total = every(0.0)
    for i in range(n):
        flow = at(room.rate, i) * at(room.fewer, i) * width
        put(room.fewer, i, flow)
        total = total + flow
    for i in range(n):
        put(room.total, i, at(room.total, i) + at(room.came, i) * (total + at(room.fewer, i)))


@per_row
def _climb_with(zero, one, n, last, vector, room):
    """Writes P and both P^h."""
    table, ones, more, width, nothing = room.table, room.of_ones, room.of_vector, last + 3, every(0.0)
    for m in range(3):
        put(ones, m, nothing)
        put(more, m, nothing)
    for i in range(n - 1):
        a, b, here, there = at(zero, i), at(one, i), i * width + 1, (i + 1) * width + 1
        f, g, first, end = at(room.rate, i), every(vector[i]), _first(i + 1, n, last), min(i + 1, last)
        before = here + first - 1
        p, q, r = at(table, before), at(ones, before), at(more, before)
        for m in range(first, end + 1):
            p_now, q_now, r_now = at(table, here + m), at(ones, here + m), at(more, here + m)
            flow = f * p_now
            put(table, there + m, a * p_now + b * p)
            put(ones, there + m, a * q_now + b * q + flow)
            put(more, there + m, a * r_now + b * r + g * flow)
            p, q, r = p_now, q_now, r_now
        for edge in (there - 1, there + end + 1):
            put(table, edge, nothing)
            put(ones, edge, nothing)
            put(more, edge, nothing)


@per_row
def _add_product(zero, one, n, last, width, vector, room):
    """Adds the contributions of some nodes to the product of the Jacobian with a vector."""
    _begin(room, last)
    _climb_with(zero, one, n, last, vector, room)
    for m in range(last + 2):
        put(room.rest_of_ones, m, every(0.0))
        put(room.rest_of_vector, m, every(0.0))
    for i in range(n - 1, -1, -1):
        a, b, here, first = at(zero, i), at(one, i), i * (last + 3) + 1, _first(i, n, last)
        f, g, of_ones, of_vector = at(room.rate, i), every(vector[i]), every(0.0), every(0.0)
        p, q, r = at(room.rest, first), at(room.rest_of_ones, first), at(room.rest_of_vector, first)
        for m in range(first, min(i, last) + 1):
            table = at(room.table, here + m)
            of_ones = of_ones + at(room.of_ones, here + m) * p + table * q
            of_vector = of_vector + at(room.of_vector, here + m) * p + table * r
            flow = f * p
            p_next, q_next, r_next = at(room.rest, m + 1), at(room.rest_of_ones, m + 1), at(room.rest_of_vector, m + 1)
            put(room.rest, m, a * p + b * p_next)
            put(room.rest_of_ones, m, a * q + b * q_next + flow)
            put(room.rest_of_vector, m, a * r + b * r_next + g * flow)
            p, q, r = p_next, q_next, r_next
        put(room.total, i, at(room.total, i) + (g * of_ones - of_vector) * (f * width))


def _bend_of(tilted):
    @inlined
    def bend(row, low, peak, high):
        r"""A bound of :math:`\sum_i f_i^2 / F_i (1 - F_i)`, whose terms are at most F_i, and at most 0.65."""
        return min(row.k + 3.0 * math.sqrt(row.k), 0.65 * row.weight.shape[0])

    return bend


def of_short_rows(noise):
    """As :func:`.of_rows_by_nodes`."""
    law = noise.law

    @by_lanes
    def fill_fates(came, missing, rate):
        """For the x in the place of the rates."""
        for i in range(rate.shape[0]):
            at_x = law(rate[i])
            came[i], missing[i], rate[i] = at_x.came, at_x.missing, at_x.rate

    @inlined
    def begin(room, n, nodes):
        room.total[: n * LANES] = 0.0
        up = room.of_nodes[0]
        for i in range(nodes):
            up[i] = exp(room.node[i])

    @inlined
    def fill(room, weight, block):
        up = at(room.of_nodes[0], block)
        for i in range(weight.shape[0]):
            put(room.rate, i, every(weight[i]) * up)
        count = weight.shape[0] * LANES
        fill_fates(room.came[:count], room.missing[:count], room.rate[:count])

    @inlined
    def finish(room, result):
        for i in range(result.shape[0]):
            total = 0.0
            for lane in range(LANES):
                total += room.total[i * LANES + lane]
            result[i] = total

    @inlined
    def inclusion(room, weight, k, nodes, when, depth, given, result):
        n = weight.shape[0]
        begin(room, n, nodes)
        for block in range(nodes // LANES):
            fill(room, weight, block)
            _add_inclusion(*_fates(room, n, k), n, min(k - 1, n - k), at(room.width, block), room)
        finish(room, result)

    @inlined
    def product(room, weight, k, nodes, when, depth, given, vector, result):
        n = weight.shape[0]
        begin(room, n, nodes)
        for block in range(nodes // LANES):
            fill(room, weight, block)
            _add_product(*_fates(room, n, k), n, min(k, n - k) - 1, at(room.width, block), vector, room)
        finish(room, result)

    return tables_for, range_by_chernoff(noise, _bend_of), inclusion, product
