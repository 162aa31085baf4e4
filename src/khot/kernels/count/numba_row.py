"""Results for a row of units given its count, and products with their covariance, in numba, by nodes or by recursion.

A row uses the nodes of :mod:`.numba_nodes` if these keep all digits, and :mod:`.numba_recursion` otherwise.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined, per_row
from . import numba_series
from .numba_nodes import covariance_times, given_count, law_of_count, room
from .numba_recursion import WHOLE_TABLE, U, climb_along, descend, descend_along, plan


@inlined
def _table_size(n):
    """The size of the largest table that a row of n units may need."""
    return min((n + 1) * (n + 3), WHOLE_TABLE + (int(math.sqrt(n)) + 3) * (n + 3))


@per_row
def workplace(n):
    """Arrays for rows of up to n units; memory that no row needs is never touched."""
    ends, tables, rests = np.empty((2, n + 1), np.int64), np.empty((4, _table_size(n))), np.empty((2, 2 * (n + 3)))
    by_nodes = room(), numba_series.room()
    by_recursion = ends[0], ends[1], tables[0], tables[1], rests[0]
    along = tables[2], tables[3], rests[1], np.empty(n)
    return by_nodes, by_recursion, along


@per_row
def count_law(p, q, k, work):
    """The law of the count of units with these probabilities, of which about k are expected to be ones.

    Returns: P(B = k); the numbers of nodes and of terms, 0 in rows that the recursion takes; and for these the number
        of units of a block of its table, and its width.
    """
    nodes, terms, chance = law_of_count(p, q, k, *work[0])
    if nodes:
        return chance, nodes, terms, 0, U(0)
    first, last, table, marks, _ = work[1]
    chance, length, stride, _, _ = plan(p, q, k, first, last, table, marks)
    return chance, 0, 0, length, stride


@per_row
def probabilities(p, q, law, work, complement, inclusion):
    """Writes the probabilities of units given the count."""
    _, nodes, terms, length, stride = law
    if nodes:
        given_count(p, q, nodes, terms, *work[0], complement, inclusion)
        return
    first, last, table, marks, rest = work[1]
    descend(p, q, first, last, length, stride, table, marks, rest, complement, inclusion)


@per_row
def times_covariance(p, q, t, k, law, work, result):
    """Writes C v for the v with ``pq v = t``, C the covariance given the count."""
    _, nodes, terms, length, stride = law
    if nodes:
        covariance_times(p, q, t, nodes, terms, *work[0], result)
        return
    (first, last, table, marks, rest), (bent, bent_marks, bent_rest, space) = work[1], work[2]
    minus_t = space[: t.shape[0]]
    for i in range(t.shape[0]):
        minus_t[i] = -t[i]
    climb_along(p, q, t, minus_t, k, first, last, length, stride, table, bent, marks, bent_marks)
    descend_along(
        p, q, t, minus_t, first, last, length, stride, table, bent, marks, bent_marks, rest, bent_rest, result
    )
