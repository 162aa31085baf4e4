"""Hard masks on a CPU, row by row: the threshold by counting, then a pass that marks what is above and finds NaN."""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..numba_math import Real
from ..numba_rows import REALS_AT, longs_at
from ..numba_tools import kernel, over_rows, per_row, specialised, summed
from ..rows import compute_dtype
from .exact import check_ranked
from .numba_counting import ANYWHERE, cut, guesses_of_sample

BLOCK = 64  # entries that are looked through for ties at a time
SAMPLE_SIZE, LONG = 2**10, 2**16  # entries of a sample, and of rows that are worth one


def topk_mask(x: Tensor, k: Tensor, check: bool) -> Tensor:
    items, n, sizes = x.to(compute_dtype(x)).contiguous(), x.shape[-1], k.reshape(-1)
    y, rows = torch.empty_like(items), items.numel() // n
    loop = _loop(np.float64 if items.dtype == torch.float64 else np.float32)
    arguments = items.data_ptr(), sizes.data_ptr(), sizes.stride(0), y.data_ptr()
    if over_rows(loop, rows, rows * n, n, *arguments) and check:
        check_ranked(x, k)
    return y.to(x.dtype)


@functools.cache
def _loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def rows(first, last, n, x, k, step, y):
        xs, ys, sizes = reals_at(x, last, n), reals_at(y, last, n), longs_at(k, 1, (last - 1) * step + 1)[0]
        sample = np.empty(SAMPLE_SIZE if n >= LONG else 0, real)
        guesses, move, wrong = ANYWHERE, 0.0, 0
        for r in range(first, last):
            row, size = xs[r], sizes[r * step]
            if n >= LONG:
                guesses = guesses_of_sample(row, size, sample)
            t, above = cut(row, size, guesses)
            not_numbers = _mark(row, t, ys[r])
            if above != size:
                _mark_ties(row, t, size - above, ys[r])
            wrong += not_numbers > 0 or size < 0 or size > n
            if math.isfinite(t):  # rows of a batch are often alike, and so is the distance of their thresholds
                move = 0.75 * move + 0.5 * abs(t - guesses[1])
                guesses = t - move, t, t + move
        return wrong

    with specialised(real.__name__):
        return kernel(rows)


@summed
def _mark(x, t, y):
    """Ones for entries above t, zeros for the others; returns how many are NaN."""
    real, count = x.dtype.type, np.int32(0)
    for i in range(x.shape[0]):
        y[i] = real(x[i] > t)
        count = np.int32(count + np.int32(x[i] != x[i]))
    return count


@summed
def _count_equal(x, t):
    count = np.int32(0)
    for i in range(x.shape[0]):
        count = np.int32(count + np.int32(x[i] == t))
    return count


@summed
def _add_equal(x, t, y):
    real = x.dtype.type
    for i in range(x.shape[0]):
        y[i] += real(x[i] == t)


@per_row
def _mark_ties(x, t, number, y):
    """Ones for the first so many entries that are equal to t."""
    for start in range(0, x.shape[0], BLOCK):
        some, out = x[start : start + BLOCK], y[start : start + BLOCK]
        tied = _count_equal(some, t)
        if tied > number:
            for i in range(some.shape[0]):
                if some[i] == t and number > 0:
                    out[i] = 1
                    number -= 1
            return
        _add_equal(some, t, out)
        number -= tied
