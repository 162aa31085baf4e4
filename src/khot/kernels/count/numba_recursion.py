r"""Laws of the number of ones among the first units, and among the rest, one unit after the other, in numba.

With probabilities :math:`p_i = \sigma(z_i)`, :math:`q_i = \sigma(-z_i)` and k ones in all,

.. math:: F_{i+1}(m) = q_i F_i(m) + p_i F_i(m - 1), \qquad B_i(m) = q_i B_{i+1}(m) + p_i B_{i+1}(m + 1),

:math:`F_i(m)` is the probability of m ones among the first i units, and :math:`B_i(m)` that of the remaining k - m ones
among the others. All terms are positive: every entry keeps its relative accuracy.

Only a window of counts is kept. A count is left out if k - m ones among the others, or m among the first, lie beyond
``TAIL``: by Bernstein's inequality with the smaller of the two variances, compared with P(B = k), which is about one
over the standard deviation of the sum if its mean is k. A row for which this does not hold, because no tilt was found,
has windows that leave out nothing.

A table has a row for every number of units, all of them in one array. Each row is as wide as the widest window and two
zeros, one before the window and one after it; some tables have a second law of this width beside the first, its
derivative or that with a mark. In a long table only some rows are kept, and those in between are
computed again on the way back, so that the data of a row of logits fit into a processor's cache. Indices are unsigned;
with signed ones, every access would test whether it counts from the end.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum, per_row, summed
from ..cpu.maths import EXP
from ..cpu.random_numbers import uniform_pair

Array = np.ndarray[Any, Any]

LIKELY = 1e-6  # P(B = k) exceeds this if the expected number is k, up to 10^11 units
LOG_TAIL, RARE = 46.0, 1e-20  # -log of 1e-20, and 1e-20
ALIKE = 8  # units whose windows have the same radius
SHORT = 32  # units of a row whose windows leave out nothing
FACTORS = 512  # this many numbers of at least a half have a product that is a normal number
ROW_TASKS = 16  # rows that keep all threads busy; with fewer rows their draws are distributed
DRAWS_A_TASK = 64
WHOLE_TABLE = 2**16  # entries of a table, or of each half of it, that is kept whole

U = np.uint64
ONE, TWO = U(1), U(2)
_exp = EXP[np.float64]


class Table(NamedTuple):
    """The laws of the numbers of ones among the first units of a row, as far as they are kept."""

    first: Array  # the smallest and the largest count that is kept for the first 0, ..., n units
    last: Array
    length: int  # units of a block
    stride: np.uint64  # width of a row
    bent: np.uint64  # where the second law begins in a row
    rows: Array  # of one block; the first row is that of the units before it
    marks: Array  # the first rows of all blocks


@inlined
def tilted(theta, anchor, offset):
    return (theta - anchor) + offset  # must not be reordered


@summed
def _fates(theta, anchor, offset, p, q):
    """Writes the probabilities of one and of zero; returns the product of the larger ones."""
    product = 1.0
    for i in range(theta.shape[0]):
        e = _exp(-abs(tilted(theta[i], anchor, offset)))
        s = 1.0 / (1.0 + e)
        few = e * s
        above = tilted(theta[i], anchor, offset) > 0
        p[i] = s if above else few
        q[i] = few if above else s
        product *= s
    return product


@per_row
def chances(theta, anchor, offset, p, q):
    """Writes the probabilities of one and of zero; returns the sum of ``log(1 + e^-|z|)``."""
    total = 0.0
    for start in range(0, theta.shape[0], FACTORS):
        stop = min(start + FACTORS, theta.shape[0])
        total -= math.log(_fates(theta[start:stop], anchor, offset, p[start:stop], q[start:stop]))
    return total


@per_row
def clip_rare(p, q):
    """Makes nearly certain units certain, since their powers are subnormal numbers, which are slow on a processor."""
    for i in range(p.shape[0]):
        if p[i] < RARE:
            p[i], q[i] = 0.0, 1.0
        elif q[i] < RARE:
            p[i], q[i] = 1.0, 0.0


@per_row
def windows(p, q, k, whole, first, last):
    """Writes the smallest and the largest kept count of the first 0, ..., n units; returns the largest width.

    Both grow by 0 or 1 from unit to unit.
    """
    n = p.shape[0]
    variance = 0.0
    for i in range(n):
        variance += p[i] * q[i]
    mean = spread = radius = 0.0
    third = LOG_TAIL / 3
    first[0] = last[0] = 0
    widest = 1
    for i in range(n):
        low, high = max(0, k - (n - 1 - i)), min(i + 1, k)
        if not whole:
            if i % ALIKE == 0:
                smaller = max(min(spread + ALIKE / 4, variance - spread - p[i] * q[i]), 0.0)  # of all units up to next
                radius = third + math.sqrt(third * third + 2 * LOG_TAIL * smaller)
            mean += p[i]
            spread += p[i] * q[i]
            low, high = max(low, int(mean - radius)), min(high, int(mean + radius) + 1)
        first[i + 1] = min(max(low, first[i]), first[i] + 1)
        last[i + 1] = min(max(high, last[i]), last[i] + 1)
        widest = max(widest, last[i + 1] - first[i + 1] + 1)
    return widest


@inlined
def _block_length(n, width):
    """Units whose rows of a table are computed at a time."""
    return n if n * np.int64(width) <= WHOLE_TABLE else int(math.sqrt(n)) + 1


@inlined
def mixed(source, at, target, to, a, b, width):
    """Writes ``a source[j] + b source[j + 1]``: adds one unit to the first or to the others, with zeros around it."""
    for j in range(width):
        target[to + j] = a * source[at + j] + b * source[at + j + ONE]
    target[to - ONE] = target[to + width] = 0.0


@inlined
def mixed_along(source, at, target, to, bent, a, b, s, t, width):
    """:func:`mixed` of the second law, which begins ``bent`` later, plus that of the first with s and t for a and b.

    With s = -t this is the derivative of :func:`mixed` when a grows and b falls by s.
    """
    for j in range(width):
        here, next_ = at + j, at + j + ONE
        second = a * source[here + bent] + b * source[next_ + bent]
        target[to + bent + j] = second + s * source[here] + t * source[next_]
    target[to + bent - ONE] = target[to + bent + width] = 0.0


@inlined_sum
def products(f, at, b, from_, width):
    """The sums of ``f[j] b[j]`` and of ``f[j] b[j + 1]``."""
    zero = one = 0.0
    for j in range(width):
        zero += f[at + j] * b[from_ + j]
        one += f[at + j] * b[from_ + j + ONE]
    return zero, one


@inlined
def width_of(first, last, i):
    return U(last[i] - first[i] + 1)


@inlined
def shift_of(first, i):
    """By how much the window of one more unit begins later, 0 or 1."""
    return U(first[i + 1] - first[i])


@inlined
def _fill(table, p, q, s, t, start, stop):
    """Computes the rows of units start + 1, ..., stop of a table whose first row is that of ``start``.

    The second laws are computed if there are s and t, see :func:`mixed_along`.
    """
    first, last, rows, at = table.first, table.last, table.rows, ONE
    for i in range(start, stop):
        source, width = at + shift_of(first, i) - ONE, width_of(first, last, i + 1)
        at += table.stride
        mixed(rows, source, rows, at, p[i], q[i], width)
        if s.shape[0]:
            mixed_along(rows, source, rows, at, table.bent, p[i], q[i], s[i], t[i], width)


@inlined
def begin(row, at, chance):
    """The law of no units, or its derivative."""
    row[at] = row[at + TWO] = 0.0
    row[at + ONE] = chance


@inlined
def _copy_row(source, at, target, to, stride):
    for j in range(stride):
        target[to * stride + j] = source[at * stride + j]


@per_row
def climb(table, p, q, s, t, k):
    """Computes the table, block by block, and keeps the first row of each block; returns the entries of k ones."""
    n, length, stride, rows = p.shape[0], table.length, table.stride, table.rows
    begin(rows, table.bent, 0.0)
    begin(rows, U(0), 1.0)
    for start in range(0, n, length):
        stop = min(start + length, n)
        _copy_row(rows, U(0), table.marks, U(start // length), stride)
        _fill(table, p, q, s, t, start, stop)
        if stop < n:
            _copy_row(rows, U(stop - start), rows, U(0), stride)
    if not table.first[n] <= k <= table.last[n]:
        return 0.0, 0.0
    place = U(n - (n - 1) // length * length) * stride + U(1 + k - table.first[n])
    return rows[place], rows[place + table.bent]


@per_row
def restore(table, p, q, s, t, start, stop):
    """Computes the rows of a block again on the way back; the rows of the last block are still there."""
    if stop < p.shape[0]:
        _copy_row(table.marks, U(start // table.length), table.rows, U(0), table.stride)
        _fill(table, p, q, s, t, start, stop - 1)


@inlined
def _with_rows(x, rows, stride):
    """The array, or a larger one if it has too few rows."""
    return x if x.size >= rows * np.int64(stride) else np.empty(rows * np.int64(stride))


@per_row
def empty_table(n):
    """A table for :func:`plan` of rows of n units."""
    return Table(np.empty(n + 1, np.int64), np.empty(n + 1, np.int64), n, U(0), U(0), np.empty(0), np.empty(0))


@inlined
def with_room(table, n, width, is_bent):
    """The table for windows of this width, zeros included, with new arrays for its rows if the old ones are small."""
    bent = width if is_bent else U(0)
    stride = width + bent
    length = _block_length(n, width)
    rows = _with_rows(table.rows, length + 1, stride)
    marks = _with_rows(table.marks, (n - 1) // length + 1, stride)
    return Table(table.first, table.last, length, stride, bent, rows, marks)


@per_row
def plan(p, q, s, t, k, table):
    """Computes the windows of a row and its table, with second laws if there are s and t.

    Returns:
        P(B = k), the same entry of the second law, and the table.
    """
    n, chance, second = p.shape[0], 0.0, 0.0
    for whole in (n <= SHORT, True):
        widest = windows(p, q, k, whole, table.first, table.last)
        table = with_room(table, n, U(widest + 2), s.shape[0] > 0)
        chance, second = climb(table, p, q, s, t, k)
        if whole or chance > LIKELY:
            break
    return chance, second, table


@per_row
def descend(table, p, q, rest, complement, inclusion):
    """Writes the probabilities, unit by unit from the last one, with the law of the rest for the units behind it."""
    n, first, last, length, stride = p.shape[0], table.first, table.last, table.length, table.stride
    above, below = U(0), stride
    begin(rest, above, 1.0)
    for start in range((n - 1) // length * length, -1, -length):
        stop = min(start + length, n)
        restore(table, p, q, p[:0], q[:0], start, stop)
        for i in range(stop - 1, start - 1, -1):
            width, source = width_of(first, last, i), above + ONE - shift_of(first, i)
            zero, one = products(table.rows, U(i - start) * stride + ONE, rest, source, width)
            mixed(rest, source, rest, below + ONE, q[i], p[i], width)
            out, included = q[i] * zero, p[i] * one
            complement[i], inclusion[i] = out / (out + included), included / (out + included)
            above, below = below, above


@per_row
def descend_along(table, p, q, t, minus_t, rest, result):
    """Writes the derivative of <x, v> given B = k, with those of the table and of the rest."""
    n, first, last, length, stride = p.shape[0], table.first, table.last, table.length, table.stride
    above, below, bent = U(0), stride, table.bent
    begin(rest, above, 1.0)
    begin(rest, above + bent, 0.0)
    for start in range((n - 1) // length * length, -1, -length):
        stop = min(start + length, n)
        restore(table, p, q, t, minus_t, start, stop)
        for i in range(stop - 1, start - 1, -1):
            width, source, at = width_of(first, last, i), above + ONE - shift_of(first, i), U(i - start) * stride + ONE
            zero, one = products(table.rows, at, rest, source, width)
            zero_left, one_left = products(table.rows, at + bent, rest, source, width)
            zero_right, one_right = products(table.rows, at, rest, source + bent, width)
            mixed(rest, source, rest, below + ONE, q[i], p[i], width)
            mixed_along(rest, source, rest, below + ONE, bent, q[i], p[i], minus_t[i], t[i], width)
            each = 1 / (q[i] * zero + p[i] * one)
            zero, one = zero * each, one * each
            zero_change, one_change = (zero_left + zero_right) * each, (one_left + one_right) * each
            result[i] = t[i] * zero * one + p[i] * q[i] * (one_change * zero - one * zero_change)
            above, below = below, above


@per_row
def _draw_block(table, p, q, weight, start, stop, states, seed, draw, row, out):
    """Draws units ``stop - 1``, ..., ``start`` of many draws.

    ``states`` are twice the numbers of ones among the units up to there, plus 1 if a mark is among them. ``draw`` is
    the number of the first of them.
    """
    rows, bent = table.rows, table.bent
    for d in range(states.shape[0]):
        m, is_open = states[d] // 2, states[d] % 2 == 1
        even = odd = 0.0
        for i in range(stop - 1, start - 1, -1):
            if i % 2 or i == stop - 1:
                even, odd = uniform_pair(seed, draw + d, row, i // 2)
            at = U(i - start) * table.stride + U(m - table.first[i])
            stays, grows, here, there = q[i] * rows[at + ONE], p[i] * rows[at], 0.0, 0.0
            zero, one = stays, grows
            if is_open:
                stays, grows = q[i] * rows[at + bent + ONE], p[i] * rows[at + bent]
                here, there = weight[i] * rows[at + ONE], weight[i] * rows[at]
                zero, one = stays + here, grows + there
            u = (odd if i % 2 else even) * (zero + one)
            is_one = m > 0 and (zero == 0 or u < one)
            if is_open and is_one:
                is_open = there == 0 or u < grows
            elif is_open:
                is_open = here == 0 or u < one + stays
            out[d, i] = is_one
            m -= is_one
        states[d] = 2 * m + is_open


@inlined
def draw_row(table, p, q, weight, k, is_marked, seed, draw, row, out):
    """Draws k ones from the last unit to the first and, if the row ``is_marked``, a mark with its ``weight``."""
    draws, n = out.shape
    states = np.full(draws, 2 * k + is_marked)
    for start in range((n - 1) // table.length * table.length, -1, -table.length):
        stop = min(start + table.length, n)
        restore(table, p, q, weight, weight, start, stop)
        _draw_block(table, p, q, weight, start, stop, states, seed, draw, row, out)


def draw_parts(rows: int, draws: int) -> int:
    """The number of parts into which the draws of a row are split; each part builds the table of the row."""
    return 1 if rows >= ROW_TASKS else max(1, min(ROW_TASKS, draws // DRAWS_A_TASK))
