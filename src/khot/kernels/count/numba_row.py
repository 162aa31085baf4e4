"""Results for a row of units given its count, and products with their covariance, in numba, by nodes or by recursion.

A row uses the nodes of :mod:`.numba_nodes` if these keep all digits, and :mod:`.numba_recursion` otherwise.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, per_row
from . import numba_series
from .numba_nodes import covariance_times, given_count, law_of_count, room
from .numba_recursion import WHOLE_TABLE, Table, U, climb, descend, descend_along, plan, with_room

Array = np.ndarray[Any, Any]


class Law(NamedTuple):
    """The law of the count of the units of a row."""

    p: Array  # the probabilities of ones and of zeros
    q: Array
    k: int  # a count close to the expected one
    chance: float  # P(B = k)
    nodes: int  # numbers of nodes and of terms; 0 in rows that the recursion computes
    terms: int
    table: Table  # of rows that the recursion computes


class Workplace(NamedTuple):
    """Arrays for rows of up to a length; memory that no row needs is never touched."""

    by_nodes: tuple[Array, Any]
    table: Table
    rest: Array
    minus: Array


@inlined
def _table_size(n):
    """The size of the largest table that a row of n units may need."""
    return 2 * min((n + 1) * (n + 3), WHOLE_TABLE + (int(math.sqrt(n)) + 3) * (n + 3))


@per_row
def workplace(n):
    """The :class:`Workplace` of rows of up to n units."""
    ends, tables = np.empty((2, n + 1), np.int64), np.empty((2, _table_size(n)))
    table = Table(ends[0], ends[1], n, U(0), U(0), tables[0], tables[1])
    return Workplace((room(), numba_series.room()), table, np.empty(4 * (n + 3)), np.empty(n))


@per_row
def count_law(p, q, k, work):
    """The :class:`Law` of the count of units with these probabilities, of which about k are expected to be ones."""
    nodes, terms, chance = law_of_count(p, q, k, *work.by_nodes)
    if nodes:
        return Law(p, q, k, chance, nodes, terms, work.table)
    chance, _, table = plan(p, q, p[:0], q[:0], k, work.table)
    return Law(p, q, k, chance, 0, 0, table)


@per_row
def probabilities(law, work, complement, inclusion):
    """Writes the probabilities of units given the count."""
    if law.nodes:
        given_count(law.p, law.q, law.nodes, law.terms, *work.by_nodes, complement, inclusion)
    else:
        descend(law.table, law.p, law.q, work.rest, complement, inclusion)


@per_row
def times_covariance(law, work, t, result):
    """Writes C v for the v with ``pq v = t``, C the covariance given the count."""
    p, q = law.p, law.q
    if law.nodes:
        covariance_times(p, q, t, law.nodes, law.terms, *work.by_nodes, result)
        return
    minus_t = work.minus[: t.shape[0]]
    for i in range(t.shape[0]):
        minus_t[i] = -t[i]
    table = with_room(law.table, p.shape[0], law.table.stride, True)  # which takes the place of that of the law
    climb(table, p, q, t, minus_t, law.k)
    descend_along(table, p, q, t, minus_t, work.rest, result)
