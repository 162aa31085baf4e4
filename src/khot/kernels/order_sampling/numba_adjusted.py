"""The adjusted log-odds of :mod:`khot.laws.pareto` from scores, and their gradient, as loops over rows on a CPU.

Functions of single items run over many rows at once, as short rows do not fill vectors.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import array_of, by_lanes, kernel, over_rows, per_row, specialised
from ..cpu.maths import FLUSHED_EXP
from . import LEAST_SPREAD, Adjusted

ITEMS = 2**10  # of the rows that are processed at a time, if there are several
STEPS = 20  # approximate work for an item
MOST_STEPS, SETTLED = 4, 1e-7  # of Newton's method: the error that a step leaves is less than the square of the step
exp = FLUSHED_EXP[np.float64]


@by_lanes
def _fill_slopes(z, slope, excess):
    """p (1 - p) and 2 p - 1 for log-odds z."""
    for i in range(z.shape[0]):
        e = exp(-abs(z[i]))
        inverse = 1.0 / (1.0 + e)
        slope[i] = e * inverse * inverse
        excess[i] = (1.0 - e) * inverse * (1.0 if z[i] > 0 else -1.0)


@per_row
def _correct(z, slope, excess, shift, step, k, n):
    """A step of Newton's method for the threshold of each row whose last step was large; the largest step."""
    largest = 0.0
    for r in range(shift.shape[0]):
        if step[r] <= SETTLED:
            continue
        total, spread = n - 2.0 * k, 0.0
        for i in range(r * n, (r + 1) * n):
            total += excess[i]
            spread += slope[i]
        move = 0.5 * total / spread if spread > 0 else 0.0
        shift[r] += move
        for i in range(r * n, (r + 1) * n):
            z[i] -= move
        step[r] = abs(move)
        largest = max(largest, step[r])
    return largest


@per_row
def _adjust(z, slope, excess, d, n):
    for r in range(d.shape[0]):
        spread = 0.0
        for i in range(r * n, (r + 1) * n):
            spread += slope[i]
        d[r] = max(spread, LEAST_SPREAD)
        for i in range(r * n, (r + 1) * n):
            z[i] -= 0.5 * slope[i] * excess[i] / (d[r] * d[r])


@per_row
def _pull_back(z, slope, excess, grad, scale, n, result):
    """The gradient in the scores, from that in the adjusted log-odds."""
    for r in range(z.shape[0] // n):
        spread = of_spread = total = 0.0
        for i in range(r * n, (r + 1) * n):
            spread += slope[i]
            of_spread += grad[i] * slope[i] * excess[i]
        d = max(spread, LEAST_SPREAD)
        of_spread = of_spread / (d * d * d) if spread >= LEAST_SPREAD else 0.0
        for i in range(r * n, (r + 1) * n):
            f, e = slope[i], excess[i]
            own = grad[i] * (1.0 - f * (f - 0.5 * e * e) / (d * d)) - of_spread * f * e
            result[i] = own if abs(z[i]) < np.inf else 0.0
            total += result[i]
        share = total / spread if spread > 0 else 0.0
        for i in range(r * n, (r + 1) * n):
            result[i] = (result[i] - slope[i] * share) / scale


@per_row
def _place(x, anchor, shift, scale, n, z, copy):
    for r in range(anchor.shape[0]):
        for i in range(r * n, (r + 1) * n):
            z[i] = copy[i] = (x[i] - anchor[r]) / scale - shift[r]


def _value_loop(first, last, x, anchor, shift, k, scale, result):
    n = x.shape[0] // anchor.shape[0]
    chunk = max(1, ITEMS // n)
    slopes, excesses, moved, of_row = np.empty(chunk * n), np.empty(chunk * n), np.empty(chunk * n), np.empty(chunk)
    for begin in range(first, last, chunk):
        end = min(begin + chunk, last)
        count, items = (end - begin) * n, x[begin * n : end * n]
        z, slope, excess, here = moved[:count], slopes[:count], excesses[:count], shift[begin:end]
        _place(items, anchor[begin:end], here, scale, n, z, result[begin * n : end * n])
        for r in range(end - begin):
            of_row[r] = np.inf
        for _ in range(MOST_STEPS):
            _fill_slopes(z, slope, excess)
            if _correct(z, slope, excess, here, of_row, k, n) <= SETTLED:
                break
        _fill_slopes(z, slope, excess)
        _adjust(result[begin * n : end * n], slope, excess, of_row[: end - begin], n)
    return 0


def _gradient_loop(first, last, x, anchor, shift, grad, scale, result):
    n = x.shape[0] // anchor.shape[0]
    chunk = max(1, ITEMS // n)
    slopes, excesses, moved = np.empty(chunk * n), np.empty(chunk * n), np.empty(chunk * n)
    for begin in range(first, last, chunk):
        end = min(begin + chunk, last)
        count, a, b = (end - begin) * n, begin * n, end * n
        z, slope, excess = moved[:count], slopes[:count], excesses[:count]
        _place(x[a:b], anchor[begin:end], shift[begin:end], scale, n, z, z)
        _fill_slopes(z, slope, excess)
        _pull_back(z, slope, excess, grad[a:b], scale, n, result[a:b])
    return 0


@functools.cache
def _loops(dtype: torch.dtype) -> Any:
    with specialised(str(dtype)):
        return kernel(_value_loop), kernel(_gradient_loop)


def value(x: Tensor, anchor: Tensor, offset: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    x, shift = x.detach().contiguous(), offset.clone()
    result = torch.empty_like(x, dtype=torch.float64)
    arrays = array_of(x), array_of(anchor), array_of(shift), k, scale, array_of(result)
    over_rows(_loops(x.dtype)[0], len(anchor), STEPS * x.numel(), *arrays)
    return result, shift


def gradient(x: Tensor, anchor: Tensor, shift: Tensor, scale: float, grad: Tensor) -> Tensor:
    x, grad = x.detach().contiguous(), grad.detach().double().contiguous()
    result = torch.empty_like(x)
    arrays = array_of(x), array_of(anchor), array_of(shift), array_of(grad), scale, array_of(result)
    over_rows(_loops(x.dtype)[1], len(anchor), STEPS * x.numel(), *arrays)
    return result


ADJUSTED = Adjusted(value, gradient)
