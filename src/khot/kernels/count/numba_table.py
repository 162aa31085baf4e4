r"""The law of the number of ones of the units of short rows, by recursions over the units, in numba.

With odds :math:`e^{z_i}`, :math:`z_i = \theta_i - t`, a unit has the weights :math:`a_i = \min(1, e^{-z_i})` of a zero
and :math:`b_i = \min(1, e^{z_i})` of a one, the larger of which is 1. The weights of m ones among the first i units,
and of the possible ones among the others, are

.. math:: F_{i+1}(m) = a_i F_i(m) + b_i F_i(m - 1), \qquad G_i(m) = a_i G_{i+1}(m) + b_i G_{i+1}(m + 1).

:math:`F_0` is 1 for no ones, and :math:`G_n(m)` is the weight of a size: for a range of sizes :math:`e^{t (m - k)}`
with k the end towards which t shifts the units, so that no weight exceeds 1. All terms are positive: every entry keeps
its relative accuracy. If t lies between the k largest logits and the others, the likeliest draw has the weight 1, and
any t near it will do, as no result depends on it. Rows whose total underflows even so are left to other code.

The lanes of vectors are rows, see :mod:`khot.kernels.cpu.lanes`. Rows with more ones than zeros count the zeros.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.lanes import LANES, at, every, put
from ..cpu.loops import inlined, per_row, summed
from ..cpu.maths import EXP, FLUSHED_EXP

Array = np.ndarray[Any, Any]

LEAST = 1e-30  # a smaller total may have lost digits of small probabilities
BISECTIONS = 100

_exp, _flushed_exp = EXP[np.float64], FLUSHED_EXP[np.float64]


class Block(NamedTuple):
    """Eight rows: vectors of the units, tables of the counts, and numbers of the rows."""

    z: Array  # log-odds of what is counted
    zero: Array  # weights a and b
    one: Array
    out: Array  # weights of all draws in which a unit is not counted, and is counted
    included: Array
    table: Array  # F; counts begin one vector later, after a zero
    rest: Array  # G
    bent_table: Array  # their derivatives
    bent_rest: Array
    low: Array  # sizes of what is counted
    high: Array
    shift: Array  # t
    sign: Array  # -1 in rows that count zeros
    total: Array


@per_row
def empty_block(n, width, bends):
    """Arrays for rows of n units and at most ``width`` counts, with derivatives of the tables if there are any."""
    units, table = np.empty((5, n * LANES)), (n + 1) * (width + 3) * LANES
    rest, numbers, sizes = np.empty((2, (width + 3) * LANES)), np.empty((3, LANES)), np.empty((2, LANES), np.int64)
    return Block(
        units[0], units[1], units[2], units[3], units[4], np.empty(table), rest[0],
        np.empty(table if bends else 0), rest[1], sizes[0], sizes[1], numbers[0], numbers[1], numbers[2],
    )  # fmt: skip


@inlined
def counts_zeros(low, high, n):
    return low + high > n


@per_row
def widest_of(low, high, n):
    """The largest count of what is counted, in any row."""
    found = 0
    for r in range(low.shape[0]):
        found = max(found, min(high[r], n - low[r]))
    return min(found, n)


@inlined
def row_of(block, lane, rows):
    """The number of the row in a lane of a block; the last block repeats the last row."""
    return min(block * LANES + lane, rows - 1)


@inlined
def lanes_of(block, rows):
    return min(LANES, rows - block * LANES)


@per_row
def _moments(theta):
    """Mean and variance of finite logits, their number, and that of infinite ones."""
    total, squares, free, certain = 0.0, 0.0, 0, 0
    for x in theta:
        is_free = abs(x) < np.inf
        total += x if is_free else 0.0
        free += is_free
        certain += x == np.inf
    mean = total / max(free, 1)
    for x in theta:
        squares += (x - mean) * (x - mean) if abs(x) < np.inf else 0.0
    return mean, math.sqrt(squares / max(free, 1)), free, certain


@per_row
def _likely_tilt(theta, k):
    """A t that about k of the logits exceed, if these are nearly normal; infinite for rows without a choice."""
    mean, deviation, free, certain = _moments(theta)
    k -= certain
    if not 0 < k < free:
        return np.inf if k == 0 else -np.inf if k == free else np.nan
    share = (k - 0.375) / (free + 0.25)
    return mean - deviation * 4.91 * (math.exp(0.14 * math.log(share)) - math.exp(0.14 * math.log(1 - share)))


@per_row
def _certain_tilt(theta, k):
    """A t below the k largest logits and above the others, by counting; equal to the k-th one if others are, too."""
    low, high, t = np.inf, -np.inf, 0.0
    for x in theta:
        if abs(x) < np.inf:
            low, high = min(low, x), max(high, x)
    for _ in range(BISECTIONS):
        t = low + (high - low) / 2
        above = 0
        for x in theta:
            above += x > t
        if above == k:
            return t
        if above > k:
            low = t
        else:
            high = t
    nearest = np.inf
    for x in theta:
        if abs(x - t) < abs(nearest - t):
            nearest = x
    return nearest


@per_row
def _size_to_expect(theta, low, high):
    """The size in the range that is nearest to the expected one without a tilt, and whether a tilt is needed."""
    if low == high:
        return low, True
    positive = 0
    for x in theta:
        positive += x > 0
    return min(max(positive, low), high), not low <= positive <= high


@per_row
def _tilt(theta, low, high, is_likely):
    """The t of a row; NaN if it cannot have such sizes."""
    if not 0 <= low <= high <= theta.shape[0]:
        return np.nan
    for x in theta:
        if x != x:
            return np.nan
    k, is_needed = _size_to_expect(theta, low, high)
    if not is_needed:
        return 0.0
    t = _likely_tilt(theta, k) if is_likely else _certain_tilt(theta, k)
    return t if low == high else min(t, 0.0) if k == low else max(t, 0.0)


@per_row
def _place(block, lane, theta, low, high):
    """Writes the sizes of a row, and its log-odds at the shift of the lane."""
    n, t = theta.shape[0], block.shift[lane]
    sign = -1.0 if counts_zeros(low, high, n) else 1.0
    few, many = (n - high, n - low) if sign < 0 else (low, high)
    is_possible = 0 <= few <= many <= n
    block.sign[lane], block.low[lane], block.high[lane] = sign, few if is_possible else 0, many if is_possible else 0
    for i in range(n):
        block.z[i * LANES + lane] = sign * (theta[i] - t if abs(theta[i]) < np.inf else theta[i])


@summed
def weigh(z, zero, one):
    """Writes a and b."""
    for i in range(z.shape[0]):
        e = _flushed_exp(-abs(z[i]))
        zero[i] = e if z[i] > 0 else 1.0
        one[i] = 1.0 if z[i] > 0 else e


@inlined
def ends(block):
    """The smallest and the largest size of the rows."""
    low, high = block.low[0], block.high[0]
    for lane in range(1, LANES):
        low, high = min(low, block.low[lane]), max(high, block.high[lane])
    return low, high


@inlined
def first_count(i, n, low):
    """The smallest count of the first i units with which the size can be reached."""
    return max(0, low - (n - i))


@per_row
def climb(block, n):
    """Computes F."""
    (low, high), table, zero = ends(block), block.table, every(0.0)
    width = high + 3
    put(table, 0, zero)
    put(table, 1, every(1.0))
    put(table, 2, zero)
    for i in range(n):
        a, b, here, there = at(block.zero, i), at(block.one, i), i * width + 1, (i + 1) * width + 1
        first, last = first_count(i + 1, n, low), min(i + 1, high)
        before = at(table, here + first - 1)
        for m in range(first, last + 1):
            now = at(table, here + m)
            put(table, there + m, a * now + b * before)
            before = now
        put(table, there - 1, zero)
        put(table, there + last + 1, zero)


@per_row
def weigh_sizes(block, n):
    """Writes the weights of the sizes, and their total with those of the draws."""
    high = ends(block)[1]
    for m in range(high + 2):
        put(block.rest, m, every(0.0))
    last = n * (high + 3) + 1
    for lane in range(LANES):
        tilt = block.sign[lane] * block.shift[lane]
        least, most, total = block.low[lane], block.high[lane], 0.0
        end = least if tilt < 0 else most
        for m in range(least, most + 1):
            weight = _exp(tilt * (m - end)) if m != end else 1.0
            block.rest[m * LANES + lane] = weight
            total += weight * block.table[(last + m) * LANES + lane]
        block.total[lane] = total if tilt == tilt else np.nan


@inlined
def is_sound(total):
    return LEAST <= total < np.inf


@per_row
def tabulate(block, number, logits, low, high, tilts):
    """Places the rows of a block and computes F and the total, with given tilts or, if there are none, others."""
    rows, n = logits.shape
    for attempt in range(1 if tilts.shape[0] else 2):
        left = 0
        for lane in range(LANES):
            r = row_of(number, lane, rows)
            if tilts.shape[0]:
                block.shift[lane] = tilts[r]
            elif attempt == 0 or not is_sound(block.total[lane]):
                block.shift[lane] = _tilt(logits[r], low[r], high[r], attempt == 0)
            _place(block, lane, logits[r], low[r], high[r])
        weigh(block.z, block.zero, block.one)
        climb(block, n)
        weigh_sizes(block, n)
        for lane in range(LANES):
            left += not is_sound(block.total[lane])
        if left == 0:
            break


@per_row
def descend(block, n):
    """Writes the weights of draws without a unit and with it, from the last unit on; G takes the place of its sizes."""
    (low, high), table, rest = ends(block), block.table, block.rest
    for i in range(n - 1, -1, -1):
        a, b, here = at(block.zero, i), at(block.one, i), i * (high + 3) + 1
        out = included = every(0.0)
        first, last = first_count(i, n, low), min(i, high)
        now = at(rest, first)
        for m in range(first, last + 1):
            f, more = at(table, here + m), at(rest, m + 1)
            out = out + f * now
            included = included + f * more
            put(rest, m, a * now + b * more)
            now = more
        put(block.out, i, a * out)
        put(block.included, i, b * included)


@per_row
def bend(block, n):
    """Replaces vectors v of the units, in z, by the product of the covariance with v.

    The tables are derived along v, with E[x_i] v_i subtracted from x_i v_i, so that no sum of the weights changes. In
    ``out`` and ``included`` are the probabilities of zeros and ones among what is counted.
    """
    (low, high), table, rest, bent, bent_rest = ends(block), block.table, block.rest, block.bent_table, block.bent_rest
    width, none = high + 3, every(0.0)
    for m in range(3):
        put(bent, m, none)
    for i in range(n):
        a, b, v, here, there = at(block.zero, i), at(block.one, i), at(block.z, i), i * width + 1, (i + 1) * width + 1
        fall, rise = a * at(block.included, i) * v, b * at(block.out, i) * v
        first, last = first_count(i + 1, n, low), min(i + 1, high)
        before, bent_before = at(table, here + first - 1), at(bent, here + first - 1)
        for m in range(first, last + 1):
            now, bent_now = at(table, here + m), at(bent, here + m)
            put(bent, there + m, a * bent_now + b * bent_before + rise * before - fall * now)
            before, bent_before = now, bent_now
        put(bent, there - 1, none)
        put(bent, there + last + 1, none)
    for m in range(high + 2):
        put(bent_rest, m, none)
    for i in range(n - 1, -1, -1):
        a, b, v, here = at(block.zero, i), at(block.one, i), at(block.z, i), i * width + 1
        out, included = at(block.out, i), at(block.included, i)
        fall, rise = a * included * v, b * out * v
        zero = one = bent_zero = bent_one = every(0.0)
        first, last = first_count(i, n, low), min(i, high)
        now, bent_now = at(rest, first), at(bent_rest, first)
        for m in range(first, last + 1):
            f, g, more, bent_more = at(table, here + m), at(bent, here + m), at(rest, m + 1), at(bent_rest, m + 1)
            zero = zero + f * now
            one = one + f * more
            bent_zero = bent_zero + f * bent_now + g * now
            bent_one = bent_one + f * bent_more + g * more
            put(rest, m, a * now + b * more)
            put(bent_rest, m, a * bent_now + b * bent_more + rise * more - fall * now)
            now, bent_now = more, bent_more
        change = out * b * bent_one - included * a * bent_zero
        put(block.z, i, included * out * v + change / (a * zero + b * one))
