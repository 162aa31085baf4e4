"""Hard masks, and the entries that they keep, on a CPU, row by row."""

# mypy: disable-error-code="no-untyped-def"

import ctypes
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import inlined, kernel_for_dtype, over_rows, per_row, summed
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, bytes_at, longs_at, smaller
from ..exact.rows import compute_dtype
from .exact import NOT_A_NUMBER, check_ranked
from .numba_counting import ANYWHERE, BLOCK, SUSPECT, cut, guesses_of_sample, mark_largest, write_largest

SAMPLE_SIZE, LONG = 2**10, 2**16  # entries of a sample, and of rows for which a sample pays
SHORT = 8  # entries of rows in which all pairs are compared


def topk_mask(x: Tensor, k: Tensor, check: bool) -> Tensor:
    items, n, sizes = x.to(compute_dtype(x)).contiguous(), x.shape[-1], k.reshape(-1)
    y, rows = torch.empty_like(items), items.numel() // n
    arguments = items.data_ptr(), sizes.data_ptr(), sizes.stride(0), y.data_ptr()
    if over_rows(_loop(items), rows, rows * n, n, *arguments) and check:
        check_ranked(x, k)
    return y.to(x.dtype)


@kernel_for_dtype
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
            if math.isfinite(t):  # the rows of a batch are often similar
                move = 0.75 * move + 0.5 * abs(t - guesses[1])
                guesses = t - move, t, t + move
        return wrong

    return rows


def topk_indices(x: Tensor, k: int, begins: Tensor, ends: Tensor, skips: bool, fill: int, check: bool) -> Tensor:
    items, n = x.to(compute_dtype(x)).contiguous(), x.shape[-1]
    rows, begins, ends = items.numel() // n, begins.reshape(-1), ends.reshape(-1)
    found = x.new_empty((*x.shape[:-1], k), dtype=torch.int64)
    bounds = begins.data_ptr(), begins.stride(0), ends.data_ptr(), ends.stride(0)
    arguments = items.data_ptr(), k, bounds, found.data_ptr(), (skips, fill)
    if over_rows(_index_loop(items), rows, rows * n, n, *arguments) and check:
        raise ValueError(NOT_A_NUMBER)
    return found


@kernel_for_dtype
def _index_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def rows(first, last, n, x, k, bounds, places, how):
        (begin_at, begin_step, end_at, end_step), (skips, fill) = bounds, how
        xs, found = reals_at(x, last, n), longs_at(places, last, k)
        begins = longs_at(begin_at, 1, (last - 1) * begin_step + 1)[0]
        ends = longs_at(end_at, 1, (last - 1) * end_step + 1)[0]
        sample, room = np.empty(SAMPLE_SIZE if n >= LONG else 0, real), np.empty(BLOCK, real)
        guesses, move, has_ties, wrong = ANYWHERE, 0.0, False, 0
        for r in range(first, last):
            begin, none = begins[r * begin_step], real(-np.inf)
            row = xs[r, begin : ends[r * end_step]]
            t, above = none, np.int64(0)
            if k < row.shape[0]:
                if row.shape[0] >= LONG:
                    guesses = guesses_of_sample(row, k, sample)
                t, above = cut(row, k, guesses, 2 if has_ties else SUSPECT)
                has_ties = above != k
                if math.isfinite(t):
                    move = 0.75 * move + 0.5 * abs(t - guesses[1])
                    guesses = t - move, t, t + move
            rest = np.int64(0) if skips and t == none else k - above
            written, not_numbers = write_largest(row, t, rest, begin, room, found[r])
            for i in range(written, k):
                found[r, i] = fill
            wrong += not_numbers > 0
        return wrong

    return rows


def keep_largest(
    x: Tensor, k: int | Tensor, by_magnitude: bool, otherwise: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The k largest entries of each row, with a number for the others; which; and the smallest positive one kept.

    k is an int, or int64 of the batch shape. With ``by_magnitude``, the largest and smallest in absolute value. Entries
    of ``-inf``, which are excluded, count as smaller than all others, and are never kept. If a row keeps no positive
    entry, the smallest one is infinite. None if a row has NaN or too few entries.
    """
    items, n, rows = x.to(compute_dtype(x)).contiguous(), x.shape[-1], x.numel() // x.shape[-1]
    if isinstance(k, Tensor):
        sizes = k.reshape(-1)
        at, step = sizes.data_ptr(), sizes.stride(0)
    else:
        number = ctypes.c_int64(int(min(max(k, -1), n + 1)))
        at, step = ctypes.addressof(number), 0
    y, kept, smallest = (
        torch.empty_like(items),
        torch.empty_like(items, dtype=torch.bool),
        items.new_empty(x.shape[:-1]),
    )
    results, how = (y.data_ptr(), kept.data_ptr(), smallest.data_ptr()), (by_magnitude, float(otherwise))
    if over_rows(_keeping_loop(items), rows, rows * n, n, items.data_ptr(), at, step, *results, how):
        return None
    return y.to(x.dtype), kept, smallest.to(x.dtype)


@per_row
def _mark_of_short(x, k, kept):
    """Marks, in a short row, the entries that come after fewer than k others; returns how many are NaN."""
    not_numbers = 0
    for i in range(x.shape[0]):
        before = 0
        for j in range(x.shape[0]):
            before += (x[j] > x[i]) | ((x[j] == x[i]) & (j < i))
        kept[i] = before < k
        not_numbers += x[i] != x[i]
    return not_numbers


@inlined
def _later_first(a, b):
    """1 if the later of two entries comes first."""
    return np.int32(b > a)


@inlined
def _positive(score, is_kept, otherwise):
    return score if (score > 0) & is_kept else otherwise


@per_row
def _keep_of_four(x, k, by_magnitude, kept, y):
    """Processes a row of four, the usual group size of sparse weights, with zeros for entries that are not kept.

    Returns the smallest positive score that is kept, and whether the result is right: not if an entry is NaN or
    infinite.
    """
    a, b, c, d = x[0], x[1], x[2], x[3]
    if by_magnitude:
        a, b, c, d = abs(a), abs(b), abs(c), abs(d)
    ab, ac, ad = _later_first(a, b), _later_first(a, c), _later_first(a, d)
    bc, bd, cd = _later_first(b, c), _later_first(b, d), _later_first(c, d)
    keeps_a, keeps_b = ab + ac + ad < k, 1 - ab + bc + bd < k
    keeps_c, keeps_d = 2 - ac - bc + cd < k, 3 - ad - bd - cd < k
    kept[0], kept[1], kept[2], kept[3] = keeps_a, keeps_b, keeps_c, keeps_d
    zero = x.dtype.type(0)
    y[0], y[1], y[2], y[3] = x[0] * keeps_a, x[1] * keeps_b, x[2] * keeps_c, x[3] * keeps_d
    infinity = x.dtype.type(np.inf)
    least = smaller(_positive(a, keeps_a, infinity), _positive(b, keeps_b, infinity))
    least = smaller(least, smaller(_positive(c, keeps_c, infinity), _positive(d, keeps_d, infinity)))
    total = x[0] + x[1] + x[2] + x[3]
    return least, total - total == zero  # False if one is NaN or infinite, or if the sum overflows


@summed
def _take(x, kept, otherwise, y):
    for i in range(x.shape[0]):
        y[i] = x[i] if kept[i] != 0 else otherwise


@summed
def _smallest_positive(scores, kept):
    infinity = scores.dtype.type(np.inf)
    smallest = infinity
    for i in range(scores.shape[0]):
        smallest = smaller(smallest, scores[i] if (kept[i] != 0) & (scores[i] > 0) else infinity)
    return smallest


@per_row
def _exclude(scores, kept):
    """Unmarks excluded entries; returns whether any was marked."""
    found = False
    for i in range(scores.shape[0]):
        if scores[i] == -np.inf:
            found |= kept[i] != 0
            kept[i] = 0
    return found


@kernel_for_dtype
def _keeping_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def rows(first, last, n, x, k, step, y, kept, smallest, how):
        by_magnitude, otherwise = how
        xs, ys, marks = reals_at(x, last, n), reals_at(y, last, n), bytes_at(kept, last, n)
        sizes, least = longs_at(k, 1, (last - 1) * step + 1)[0], reals_at(smallest, 1, last)[0]
        sample, room = np.empty(SAMPLE_SIZE if n >= LONG else 0, real), np.empty(n if by_magnitude else 0, real)
        guesses, move, has_ties, wrong = ANYWHERE, 0.0, False, 0
        for r in range(first, last):
            row, scores, size = xs[r], xs[r], sizes[r * step]
            if n == 4 and otherwise == 0:
                found, is_right = _keep_of_four(row, size, by_magnitude, marks[r], ys[r])
                if is_right:
                    wrong += size < 0 or size > n
                    least[r] = found
                    continue
            if by_magnitude:
                scores = room
                for i in range(n):
                    scores[i] = -np.inf if row[i] == -np.inf else abs(row[i])
            t = -np.inf
            if n <= SHORT:
                not_numbers = _mark_of_short(scores, size, marks[r])
            else:
                if n >= LONG:
                    guesses = guesses_of_sample(scores, size, sample)
                t, has_ties, not_numbers = mark_largest(scores, size, guesses, 2 if has_ties else SUSPECT, marks[r])
                if math.isfinite(t):
                    move = 0.75 * move + 0.5 * abs(t - guesses[1])
                    guesses = t - move, t, t + move
            is_wrong = not_numbers > 0 or size < 0 or size > n
            if t == -np.inf:
                is_wrong |= _exclude(scores, marks[r])
            wrong += is_wrong
            _take(row, marks[r], real(otherwise), ys[r])
            least[r] = _smallest_positive(scores, marks[r])
        return wrong

    return rows
