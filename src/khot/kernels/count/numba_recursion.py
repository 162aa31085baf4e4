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
zeros, one before the window and one after it. In a long table only some rows are kept, and those in between are
computed again on the way back, so that the data of a row of logits fit into a processor's cache. Indices are unsigned;
with signed ones, every access would test whether it counts from the end.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined, inlined_sum, per_row, summed
from ..cpu.maths import EXP

LIKELY = 1e-6  # P(B = k) exceeds this if the expected number is k, up to 10^11 units
LOG_TAIL, RARE = 46.0, 1e-20  # -log of 1e-20, and 1e-20
ALIKE = 8  # units whose windows have the same radius
SHORT = 32  # units of a row whose windows leave out nothing
FACTORS = 512  # this many numbers of at least a half have a product that is a normal number
WHOLE_TABLE = 2**16  # entries of a table that is kept whole

U = np.uint64
ONE, TWO = U(1), U(2)
_exp = EXP[np.float64]


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
def block_length(n, width):
    """Units whose rows of a table are computed at a time."""
    return n if n * (width + 2) <= WHOLE_TABLE else int(math.sqrt(n)) + 1


@inlined
def mixed(source, at, target, to, a, b, width):
    """Writes ``a source[j] + b source[j + 1]``: adds one unit to the first or to the others, with zeros around it."""
    for j in range(width):
        target[to + j] = a * source[at + j] + b * source[at + j + ONE]
    target[to - ONE] = target[to + width] = 0.0


@inlined
def mixed_along(source, bent, at, target, to, a, b, s, t, width):
    """:func:`mixed` of ``bent``, plus that of the source with s and t in place of a and b.

    With s = -t this is the derivative of :func:`mixed` when a grows and b falls by s, and ``bent`` changes the source.
    """
    for j in range(width):
        here, next_ = at + j, at + j + ONE
        target[to + j] = a * bent[here] + b * bent[next_] + s * source[here] + t * source[next_]
    target[to - ONE] = target[to + width] = 0.0


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


@per_row
def fill(table, stride, p, q, first, last, start, stop):
    """Computes the rows of units start + 1, ..., stop of a table whose first row is that of ``start``."""
    at = ONE
    for i in range(start, stop):
        mixed(table, at + shift_of(first, i) - ONE, table, at + stride, p[i], q[i], width_of(first, last, i + 1))
        at += stride


@per_row
def fill_along(table, bent, stride, p, q, s, t, first, last, start, stop):
    """:func:`fill` of ``bent`` beside a table that is already filled, as in :func:`mixed_along`."""
    at = ONE
    for i in range(start, stop):
        source, width = at + shift_of(first, i) - ONE, width_of(first, last, i + 1)
        mixed_along(table, bent, source, bent, at + stride, p[i], q[i], s[i], t[i], width)
        at += stride


@inlined
def begin(row, at, chance):
    """The law of no units, or its derivative."""
    row[at] = row[at + TWO] = 0.0
    row[at + ONE] = chance


@inlined
def copy_row(source, at, target, to, stride):
    for j in range(stride):
        target[to * stride + j] = source[at * stride + j]


@per_row
def climb(p, q, k, first, last, length, stride, table, marks):
    """Computes the table, block by block, and keeps the first row of each block; returns P(B = k)."""
    n = p.shape[0]
    begin(table, U(0), 1.0)
    for start in range(0, n, length):
        stop = min(start + length, n)
        copy_row(table, U(0), marks, U(start // length), stride)
        fill(table, stride, p, q, first, last, start, stop)
        if stop < n:
            copy_row(table, U(stop - start), table, U(0), stride)
    if not first[n] <= k <= last[n]:
        return 0.0
    return table[U(n - (n - 1) // length * length) * stride + U(1 + k - first[n])]


@per_row
def climb_along(p, q, s, t, k, first, last, length, stride, table, bent, marks, bent_marks):
    """:func:`climb` of ``bent`` beside the table that is computed, as in :func:`mixed_along`."""
    n = p.shape[0]
    begin(bent, U(0), 0.0)
    for start in range(0, n, length):
        stop = min(start + length, n)
        if n > length:
            copy_row(marks, U(start // length), table, U(0), stride)
            fill(table, stride, p, q, first, last, start, stop)
        copy_row(bent, U(0), bent_marks, U(start // length), stride)
        fill_along(table, bent, stride, p, q, s, t, first, last, start, stop)
        if stop < n:
            copy_row(bent, U(stop - start), bent, U(0), stride)
    return bent[U(n - (n - 1) // length * length) * stride + U(1 + k - first[n])]


@inlined
def with_rows(x, rows, stride):
    """The array, or a larger one if it has too few rows."""
    return x if x.size >= rows * np.int64(stride) else np.empty(rows * np.int64(stride))


@per_row
def plan(p, q, k, first, last, table, marks):
    """Computes the windows of a row and its table; both arrays are replaced if they are too small.

    Returns:
        P(B = k), the number of units of a block, the width of a row of the table, and the two arrays.
    """
    n = p.shape[0]
    chance, length, stride = 0.0, n, U(0)
    for whole in (n <= SHORT, True):
        widest = windows(p, q, k, whole, first, last)
        length, stride = block_length(n, widest), U(widest + 2)
        table = with_rows(table, length + 1, stride)
        marks = with_rows(marks, (n - 1) // length + 1, stride)
        chance = climb(p, q, k, first, last, length, stride, table, marks)
        if whole or chance > LIKELY:
            break
    return chance, length, stride, table, marks


@per_row
def descend(p, q, first, last, length, stride, table, marks, rest, complement, inclusion):
    """Writes the probabilities, unit by unit from the last one, with the law of the rest for the units behind it."""
    n = p.shape[0]
    above, below = U(0), stride
    begin(rest, above, 1.0)
    for start in range((n - 1) // length * length, -1, -length):
        stop = min(start + length, n)
        if stop < n:
            copy_row(marks, U(start // length), table, U(0), stride)
            fill(table, stride, p, q, first, last, start, stop - 1)
        for i in range(stop - 1, start - 1, -1):
            width, source = width_of(first, last, i), above + ONE - shift_of(first, i)
            zero, one = products(table, U(i - start) * stride + ONE, rest, source, width)
            mixed(rest, source, rest, below + ONE, q[i], p[i], width)
            out, included = q[i] * zero, p[i] * one
            complement[i], inclusion[i] = out / (out + included), included / (out + included)
            above, below = below, above


@per_row
def descend_along(
    p, q, t, minus_t, first, last, length, stride, table, bent, marks, bent_marks, rest, bent_rest, result
):
    """Writes the derivative of <x, v> given B = k, with those of the tables and of the rest."""
    n = p.shape[0]
    above, below = U(0), stride
    begin(rest, above, 1.0)
    begin(bent_rest, above, 0.0)
    for start in range((n - 1) // length * length, -1, -length):
        stop = min(start + length, n)
        if stop < n:
            copy_row(marks, U(start // length), table, U(0), stride)
            copy_row(bent_marks, U(start // length), bent, U(0), stride)
            fill(table, stride, p, q, first, last, start, stop - 1)
            fill_along(table, bent, stride, p, q, t, minus_t, first, last, start, stop - 1)
        for i in range(stop - 1, start - 1, -1):
            width, source, at = width_of(first, last, i), above + ONE - shift_of(first, i), U(i - start) * stride + ONE
            zero, one = products(table, at, rest, source, width)
            zero_left, one_left = products(bent, at, rest, source, width)
            zero_right, one_right = products(table, at, bent_rest, source, width)
            mixed(rest, source, rest, below + ONE, q[i], p[i], width)
            mixed_along(rest, bent_rest, source, bent_rest, below + ONE, q[i], p[i], minus_t[i], t[i], width)
            each = 1 / (q[i] * zero + p[i] * one)
            zero, one = zero * each, one * each
            zero_change, one_change = (zero_left + zero_right) * each, (one_left + one_right) * each
            result[i] = t[i] * zero * one + p[i] * q[i] * (one_change * zero - one * zero_change)
            above, below = below, above
