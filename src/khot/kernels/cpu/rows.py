"""Moments and ranges of rows in numba."""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from .loops import inlined, per_row, summed


def _rows_at(kind):
    """``(given, rows, n)``: the contiguous numbers of an array, or at an address, as an array of this shape.

    It has no reference count, since views of rows would change that in memory that all threads share.
    """
    found = types.Array(kind, 2, "C")

    @intrinsic
    def rows_at(context, given, rows, n):
        def generate(c, builder, signature, args):
            start, rows, n = args
            pointer, array = c.get_value_type(types.CPointer(kind)), c.make_array(found)(c, builder)
            if isinstance(given, types.Array):
                data = builder.bitcast(c.make_array(given)(c, builder, start).data, pointer)
            else:
                data = builder.inttoptr(start, pointer)
            size = c.get_constant(types.intp, c.get_abi_sizeof(pointer.pointee))
            populate_array(array, data, (rows, n), (builder.mul(n, size), size), size, None)
            return array._getvalue()

        return found(given, types.intp, types.intp), generate

    return rows_at


_singles, doubles_at, longs_at, bytes_at = map(_rows_at, (types.float32, types.float64, types.int64, types.uint8))
REALS_AT = {np.float32: _singles, np.float64: doubles_at}


@inlined
def of_row(numbers, r):
    """The number of a row, in an array of one for each row or of a single one for all."""
    return doubles_at(numbers, 1, r + 1)[0, r if numbers.size > 1 else 0]


class Origin(NamedTuple):
    """A threshold, in the form from which the distances of items are computed."""

    anchor: float
    inverse: float  # one over the scale
    offset: float  # in scales


@inlined
def distance(x, origin):
    """The z of an item, its distance from a threshold in scales."""
    return (x - origin.anchor) * origin.inverse - origin.offset


CHUNK = 2048  # items whose sums use the dtype of the row before they are added up in float64


def _of_two(name: str):
    """A function of two numbers that a compiler can vectorise, unlike ``min`` and ``max``."""

    @intrinsic
    def function(context, a, b):
        def generate(_, builder, __, args):
            kind = args[0].type
            return builder.call(
                builder.module.declare_intrinsic(f"llvm.{name}", [kind], ir.FunctionType(kind, [kind, kind])), args
            )

        return a(a, b), generate

    return function


minimum, _maximum = _of_two("minimum"), _of_two("maximum")  # NaN if one is
smaller, larger = _of_two("minnum"), _of_two("maxnum")  # the other one if one is NaN


@summed
def lowest(x):
    found = x[0]
    for i in range(x.shape[0]):
        found = minimum(found, x[i])
    return found


@summed
def highest(x):
    found = x[0]
    for i in range(x.shape[0]):
        found = _maximum(found, x[i])
    return found


@summed
def total_of(x):
    total = 0.0
    for i in range(x.shape[0]):
        total += x[i]
    return total


@summed
def dot(x, y):
    total = 0.0
    for i in range(x.shape[0]):
        total += x[i] * y[i]
    return total


@inlined
def difference(a, b):
    return a - b  # not inlined, because fastmath sums would reassociate it


@summed
def pull_from(g, slopes, mean):
    """The sum of f (g - mean), which has more digits than the sum of f g if the cotangents g are nearly equal."""
    total = mean - mean
    for i in range(g.shape[0]):
        total += slopes[i] * difference(g[i], mean)
    return total


@summed
def _chunk_moments(x, centre):
    total = squares = x[0] - x[0]
    for i in range(x.shape[0]):
        d = difference(x[i], centre)
        total += d
        squares += d * d
    return total, squares


@per_row
def moments(x, centre):
    """Mean of x - centre, and variance; not finite if the row is not, or almost not."""
    total = squares = 0.0
    n = x.shape[0]
    for i in range(0, n, CHUNK):
        t, s = _chunk_moments(x[i : i + CHUNK], centre)
        total += t
        squares += s
    mean = total / n
    return mean, max(squares / n - mean * mean, 0.0) if math.isfinite(squares) else np.nan


@per_row
def gather_finite(x, kept):
    """Copies the finite items to the start of ``kept``; returns their number and that of +inf, or zeros for a NaN."""
    finite = selected = others = 0
    for v in x:  # without branches, which no processor could predict
        kept[finite] = v
        finite += abs(v) < np.inf
        selected += v == np.inf
        others += v != v
    return (0, 0) if others > 0 else (finite, selected)


@per_row
def scatter(x, finite, ends, y):
    """Moves the first entries of y to where x is finite, in their order; elsewhere writes one of the two ``ends``."""
    place = finite - 1
    for i in range(x.shape[0] - 1, -1, -1):  # from the end, so that no entry is overwritten before it is moved
        is_finite, value = abs(x[i]) < np.inf, y[max(place, 0)]
        y[i] = value if is_finite else ends[1] if x[i] > 0 else ends[0]
        place -= is_finite


@per_row
def pool(constants, slopes, starts):
    """Pools items until quotients of sums descend; returns the number of blocks, and writes their sums and starts.

    Blocks whose quotients are in order are kept on a stack. The next item becomes a block; as long as the block below
    it has a smaller quotient, the two are merged.
    """
    count, before = 0, 0.0  # `before` is the quotient of the last block
    for i in range(constants.shape[0]):
        constant, slope, start = constants[i], slopes[i], i
        mean = constant / slope
        while count > 0 and before < mean:
            count -= 1
            constant += constants[count]
            slope += slopes[count]
            mean, start = constant / slope, starts[count]
            if count > 0:
                before = constants[count - 1] / slopes[count - 1]
        constants[count], slopes[count], starts[count], before = constant, slope, start, mean
        count += 1
    return count
