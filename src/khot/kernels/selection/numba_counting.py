"""Counting in numba: finds a threshold with exactly k entries of a row above it, and the entries next to it.

A count takes one comparison and one addition per entry, and compilers vectorise it: counts at three thresholds cost
0.08 ns per entry in a cache. Numbers are ordered like the integers with the same bits, so three thresholds cut their
range in four: each pass settles two bits, and there are at most 16 passes for float32 and 32 for float64, whatever the
row. A row of 1000 normal scores takes about 8 passes, or 4 with good guesses.
"""

# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..cpu.loops import inlined, per_row, summed
from ..cpu.rows import smaller

ANYWHERE = -2.0, 0.0, 2.0  # guesses that cut the range of float32 in four
BLOCK = 64  # entries that are searched for ties at a time
SUSPECT = 8  # after this many passes, look for ties: without that they would take the most passes


# ---- The place of a number in the order of its dtype


def _flipped(builder, bits):
    """Converts the bits of a number to its place, and back; both zeros have the place 0."""
    sign = ir.Constant(bits.type, -(2 ** (bits.type.width - 1)))
    return builder.select(builder.icmp_signed("<", bits, sign.type(0)), builder.sub(sign, bits), bits)


@intrinsic
def place(context, x):
    """An int64; larger numbers have larger places, neighbours neighbouring ones, and infinities come last."""

    def build(_, builder, __, args):
        found = _flipped(builder, builder.bitcast(args[0], ir.IntType(x.bitwidth)))
        return builder.sext(found, ir.IntType(64)) if x.bitwidth < 64 else found

    return types.int64(x), build


@intrinsic
def number(context, at, like):
    """The number at a place, of the dtype of another number."""

    def build(context, builder, __, args):
        kind = ir.IntType(like.bitwidth)
        bits = builder.trunc(args[0], kind) if like.bitwidth < 64 else args[0]
        return builder.bitcast(_flipped(builder, bits), context.get_value_type(like))

    return like(types.int64, like), build


def _bits(compare):
    """A function of a block and a number: the bits of the entries that compare with the number in this way."""

    @intrinsic
    def bits(context, block, t):
        def build(context, builder, _, args):
            real = context.get_value_type(t)
            vector = ir.VectorType(real, BLOCK)
            data = context.make_array(block)(context, builder, args[0]).data
            entries = builder.load(builder.bitcast(data, vector.as_pointer()), align=t.bitwidth // 8)
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), args[1], ir.Constant(ir.IntType(32), 0))
            all_equal = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), None))
            return builder.bitcast(compare(builder, entries, all_equal), ir.IntType(BLOCK))

        return types.uint64(block, t), build

    return bits


_above = _bits(lambda builder, x, t: builder.fcmp_ordered(">", x, t))
_equal = _bits(lambda builder, x, t: builder.fcmp_ordered("==", x, t))
_not_at_most = _bits(lambda builder, x, t: builder.fcmp_unordered(">", x, t))  # above, or NaN


@intrinsic
def _lowest_bit(context, bits):
    return types.int64(bits), lambda _, builder, __, args: builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))


@inlined
def _mean(a, b):
    return (a >> 1) + (b >> 1) + (a & b & 1)  # their sum may overflow


# ---- Passes over a row


@summed
def count_above(x, t):
    """How many entries of a row, which has fewer than 2^31, are above t; NaN does not count."""
    count = np.int32(0)
    for i in range(x.shape[0]):
        count = np.int32(count + np.int32(x[i] > t))
    return np.int64(count)


@summed
def _count_above_three(x, a, b, c):
    above_a = above_b = above_c = np.int32(0)
    for i in range(x.shape[0]):
        above_a = np.int32(above_a + np.int32(x[i] > a))
        above_b = np.int32(above_b + np.int32(x[i] > b))
        above_c = np.int32(above_c + np.int32(x[i] > c))
    return np.int64(above_a), np.int64(above_b), np.int64(above_c)


@summed
def neighbours(x, t):
    """The largest entry that is not above t, and the smallest that is; infinite if there is none."""
    infinity = x.dtype.type(np.inf)
    below = above = infinity
    for i in range(x.shape[0]):
        is_above = x[i] > t
        below = smaller(below, infinity if is_above else -x[i])  # two minima with the same selection are fastest
        above = smaller(above, x[i] if is_above else infinity)
    return -below, above


# ---- Thresholds


@per_row
def cut(x, k, guesses, suspect):
    """The smallest threshold with at most k entries above it, up to equivalent ones; and the number of these entries.

    This number is k, unless ties prevent it: then the threshold is the k-th largest entry, and the next one is equal.

    Args:
        x: A row, in which infinities are ordinary numbers and NaN is ignored.
        k: From 0 to its length; beyond these, nothing or everything is above.
        guesses: Three increasing thresholds at which the entries are counted first, such as ``ANYWHERE``. If the result
            lies between the outer two, this saves half of the passes; otherwise it costs one.
        suspect: Number of passes after which to test for ties, such as ``SUSPECT``.
    """
    zero = x.dtype.type(0)
    high, above = place(x.dtype.type(np.inf)), np.int64(0)
    low, passes = -high - 1, 0
    b = min(max(place(x.dtype.type(guesses[1])), low + 2), high - 2)
    a = max(min(place(x.dtype.type(guesses[0])), b - 1), low + 1)
    c = min(max(place(x.dtype.type(guesses[2])), b + 1), high - 1)
    while above != k and low + 1 < high:
        above_a, above_b, above_c = _count_above_three(x, number(a, zero), number(b, zero), number(c, zero))
        if above_c > k:
            low = c
        elif above_b > k:
            low, high, above = b, c, above_c
        elif above_a > k:
            low, high, above = a, b, above_b
        else:
            high, above = a, above_a
        passes += 1
        if passes == suspect and above != k:  # the next pass tells whether the reason is ties at the largest entry left
            high = max(place(neighbours(x, number(high, zero))[0]), low + 1)
        b = _mean(low, high)
        a, c = max(_mean(low, b), low + 1), high - 1 if passes == suspect else _mean(b, high)
    return number(high, zero), above


@per_row
def guesses_of_sample(x, k, sample):
    """Guesses for :func:`cut` of a long row, from equally spaced entries; ``sample`` is an array for them."""
    size, share = sample.shape[0], min(max(k / x.shape[0], 0.0), 1.0)
    step, middle, room = x.shape[0] // size, share * size, 1 + 2 * math.sqrt(share * (1 - share) * size)
    for i in range(size):
        sample[i] = x[i * step]
    low, _ = cut(sample, min(np.int64(middle + room), size), ANYWHERE, SUSPECT)
    high, _ = cut(sample, max(np.int64(middle - room), 0), ANYWHERE, SUSPECT)
    return low, cut(sample, np.int64(middle), (low, low, high), SUSPECT)[0], high


# ---- Masks


@summed
def _mark_above(x, t, y):
    """Marks the entries above t; returns how many entries are NaN."""
    count = np.int32(0)
    for i in range(x.shape[0]):
        y[i] = x[i] > t
        count = np.int32(count + np.int32(x[i] != x[i]))
    return count


@summed
def _mark_from(x, t, y):
    for i in range(x.shape[0]):
        y[i] = x[i] >= t


@summed
def _count_equal(x, t):
    count = np.int32(0)
    for i in range(x.shape[0]):
        count = np.int32(count + np.int32(x[i] == t))
    return count


@per_row
def _mark_ties(x, t, rest, y):
    """Marks the first ``rest`` entries equal to t; those above t are already marked."""
    for start in range(0, x.shape[0], BLOCK):
        some, out = x[start : start + BLOCK], y[start : start + BLOCK]
        tied = _count_equal(some, t)
        if tied > rest:
            for i in range(some.shape[0]):
                if some[i] == t and rest > 0:
                    out[i] = 1
                    rest -= 1
            return
        _mark_from(some, t, out)
        rest -= tied


@per_row
def write_largest(x, t, rest, first, room, out):
    """Writes the places of the entries above t, and of the first ``rest`` equal to it; that of x[0] is ``first``.

    ``room`` is an array of a block, for the end of the row. Returns how many places there are, and in how many blocks
    there is NaN.
    """
    written = not_numbers = np.int64(0)
    for start in range(0, x.shape[0], BLOCK):
        some, within = x[start : start + BLOCK], ~np.uint64(0)
        if some.shape[0] < BLOCK:
            room[: some.shape[0]] = some
            some, within = room, (np.uint64(1) << np.uint64(some.shape[0])) - np.uint64(1)
        bits = _not_at_most(some, t) & within
        if bits != 0:
            above = _above(some, t) & within
            not_numbers += bits != above
            bits = above
        if rest > 0:
            tied = _equal(some, t) & within
            while tied != 0 and rest > 0:
                others = tied & (tied - np.uint64(1))
                bits |= tied ^ others
                tied, rest = others, rest - 1
        while bits != 0:
            out[written] = first + start + _lowest_bit(bits)
            written += 1
            bits &= bits - np.uint64(1)
    return written, not_numbers


@per_row
def mark_largest(x, k, guesses, suspect, y):
    """Ones for the k largest entries, where ties go to the first, and zeros for the others, in y of any dtype.

    The arguments are those of :func:`cut`. Returns the threshold, whether ties are at it, and how many entries are NaN.
    """
    t, above = cut(x, k, guesses, suspect)
    not_numbers = _mark_above(x, t, y)
    if above != k:
        _mark_ties(x, t, k - above, y)
    return t, above != k, not_numbers
