"""Sorted rows on a CPU by NumPy, whose sorts use the processor's vectors, in the threads that run the loops.

NumPy's fast sorts are not stable. So a key of 64 bits, made of the rank of an item's value and its position, is sorted.
The bits of a number of 32 bits or fewer are its rank; for float64 it is counted after a sort that leaves ties in any
order.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import array_of, inlined, kernel_for_dtype, over_rows
from ..cpu.maths import BITS, Real
from ..cpu.rows import REALS_AT, longs_at
from ..exact.rows import compute_dtype

WORK = 8  # an item takes as long as so many items of other loops
BLOCK = 2**15  # items whose keys stay in a cache between the steps

_bits_of, _LARGEST = BITS[np.float32][1], np.int32(2**31 - 1)
_POSITION = 2**32 - 1


def sort_rows(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    n, items = x.shape[-1], x.to(compute_dtype(x)).contiguous()
    values, order = torch.empty_like(items), torch.empty_like(items, dtype=torch.long)
    write_keys, read_keys, rows = _write_keys(items), _read_keys(items), items.numel() // n
    addresses, step = [v.data_ptr() for v in (items, order, values)], max(BLOCK // n, 1)
    numbers, keys = (array_of(v).reshape(rows, n) for v in (items, order))

    def sort(first: int, last: int) -> int:
        for start in range(first, last, step):
            stop = min(start + step, last)
            if items.dtype == torch.float64:
                part = numbers[start:stop]
                keys[start:stop] = np.argsort(-part if descending else part, -1)
            write_keys(start, stop, n, descending, *addresses)
            keys[start:stop].sort(-1)
            read_keys(start, stop, n, *addresses)
        return 0

    over_rows(sort, rows, WORK * items.numel())
    return values.to(x.dtype), order


@inlined
def _rank_of_bits(v):
    """An integer that ascends with the number; both zeros have the same, and NaN the largest whatever its sign."""
    bits = _bits_of(v + np.float32(0))
    return bits ^ ((bits >> np.int32(31)) & _LARGEST) if v == v else _LARGEST


@kernel_for_dtype
def _write_keys(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def of_singles(first, last, n, descending, items, keys, values):
        xs, found, flip = reals_at(items, last, n), longs_at(keys, last, n), np.int32(-1 if descending else 0)
        for r in range(first, last):
            for i in range(n):
                found[r, i] = np.int64(_rank_of_bits(xs[r, i]) ^ flip) << 32 | i
        return 0

    def of_doubles(first, last, n, descending, items, keys, values):
        """The keys contain positions of ascending numbers; NaN, which comes after them, is first if they descend."""
        xs, found, of_nan = reals_at(items, last, n), longs_at(keys, last, n), -1 if descending else n
        for r in range(first, last):
            rank, before = 0, xs[r, found[r, 0]]
            for i in range(n):
                v = xs[r, found[r, i]]
                rank += v != before
                found[r, i] |= (rank if v == v else of_nan) << 32
                before = v
        return 0

    return of_doubles if real is np.float64 else of_singles


@kernel_for_dtype
def _read_keys(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def read(first, last, n, items, keys, values):
        xs, order, ys = reals_at(items, last, n), longs_at(keys, last, n), reals_at(values, last, n)
        for r in range(first, last):
            for i in range(n):
                order[r, i] &= _POSITION
                ys[r, i] = xs[r, order[r, i]]
        return 0

    return read
