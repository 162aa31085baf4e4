"""Hard masks on a CPU, row by row."""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import kernel, over_rows, specialised
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, longs_at
from ..exact.rows import compute_dtype
from .exact import check_ranked
from .numba_counting import ANYWHERE, SUSPECT, guesses_of_sample, mark_largest

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
        guesses, move, has_ties, wrong = ANYWHERE, 0.0, False, 0
        for r in range(first, last):
            row, size = xs[r], sizes[r * step]
            if n >= LONG:
                guesses = guesses_of_sample(row, size, sample)
            t, has_ties, not_numbers = mark_largest(row, size, guesses, 2 if has_ties else SUSPECT, ys[r])
            wrong += not_numbers > 0 or size < 0 or size > n
            if math.isfinite(t):  # the rows of a batch are often alike
                move = 0.75 * move + 0.5 * abs(t - guesses[1])
                guesses = t - move, t, t + move
        return wrong

    with specialised(real.__name__):
        return kernel(rows)
