"""What a row of units is given its count, and products with their covariance, in numba: by nodes or by the recursion.

A row is done by the nodes of :mod:`.numba_nodes` if these keep all digits, and by :mod:`.numba_recursion` else.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..numba_tools import inlined, per_row
from .numba_backend import descend_along
from .numba_nodes import covariance_times, given_count, law_of_count, room
from .numba_recursion import WHOLE_TABLE, U, climb_along, descend, plan


@inlined
def _table_size(n):
    """Numbers of the largest table that a row of n units may need."""
    return min((n + 1) * (n + 3), WHOLE_TABLE + (int(math.sqrt(n)) + 3) * (n + 3))


@per_row
def workplace(n):
    """Arrays for rows of up to n units; memory that no row needs is never touched."""
    size = _table_size(n)
    ends = np.empty((2, n + 1), np.int64)
    tables, rests, minus_t = np.empty((4, size)), np.empty((2, 2 * (n + 3))), np.empty(n)
    return room(), ends[0], ends[1], tables[0], tables[1], rests[0], tables[2], tables[3], rests[1], minus_t


@per_row
def count_law(p, q, k, work):
    """The law of the count of units of these chances, k of which are about what is expected.

    Returns:
        Nodes, 0 in rows that the recursion takes; units of a block and width of a row of its table, and P(B = k).
    """
    at, first, last, table, marks = work[0], work[1], work[2], work[3], work[4]
    nodes, chance = law_of_count(p, q, k, at)
    if nodes:
        return nodes, 0, U(0), chance
    chance, length, stride, _, _ = plan(p, q, k, first, last, table, marks)
    return 0, length, stride, chance


@per_row
def probabilities(p, q, law, work, complement, inclusion):
    """Writes what the chances of units are given the count."""
    nodes, length, stride, _ = law
    if nodes:
        given_count(p, q, nodes, work[0], complement, inclusion)
    else:
        descend(p, q, work[1], work[2], length, stride, work[3], work[4], work[5], complement, inclusion)


@per_row
def times_covariance(p, q, t, k, law, work, result):
    """Writes C v for the v with ``pq v = t``, C the covariance given the count."""
    nodes, length, stride, _ = law
    if nodes:
        covariance_times(p, q, t, nodes, work[0], result)
        return
    _, first, last, table, marks, rest, bent, bent_marks, bent_rest, space = work
    minus_t = space[: t.shape[0]]
    for i in range(t.shape[0]):
        minus_t[i] = -t[i]
    climb_along(p, q, t, minus_t, k, first, last, length, stride, table, bent, marks, bent_marks)
    descend_along(
        p, q, t, minus_t, first, last, length, stride, table, bent, marks, bent_marks, rest, bent_rest, result
    )
