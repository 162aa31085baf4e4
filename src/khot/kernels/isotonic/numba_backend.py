"""Isotonic regression of rows by the stack algorithm (PAV) on a CPU, for p = 2."""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import kernel_for_dtype, over_rows, per_row
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, doubles_at, longs_at, pool
from .exact import check_contents


def isotonic(
    s: Tensor, w: Tensor, strength: Tensor, p: float, magnitude: bool, dual: bool, max_iter: int, names: str
) -> tuple[Tensor, Tensor]:
    n, rows = s.shape[-1], strength.numel()
    targets, weights, strength = s.contiguous(), w.to(s.dtype).contiguous(), strength.double().contiguous()
    v, blocks = (s.new_empty(s.shape, dtype=dtype) for dtype in (torch.float64, torch.long))
    inputs, results = ((x.data_ptr() for x in part) for part in ((targets, weights, strength), (v, blocks)))
    if over_rows(_loop(s), rows, s.numel(), n, *inputs, magnitude, *results) and names:
        check_contents(s, w, names.split(","), strength, magnitude)
    return v, blocks


@kernel_for_dtype
def _loop(real: Real) -> Any:
    reals_at, tiny = REALS_AT[real], float(np.finfo(real).tiny)

    def isotonic(first, last, n, s, w, strength, magnitude, v, blocks):
        """Returns the number of rows whose contents are out of range."""
        targets, weights, strengths = reals_at(s, last, n), reals_at(w, last, n), doubles_at(strength, 1, last)[0]
        values, numbers = doubles_at(v, last, n), longs_at(blocks, last, n)
        constants, slopes, odd = np.empty(n), np.empty(n), 0
        for r in range(first, last):
            strength_here = strengths[r]
            in_range = _prepare(targets[r], weights[r], strength_here, magnitude, constants, slopes)
            count = pool(constants, slopes, numbers[r])
            odd += not (in_range and tiny <= strength_here < np.inf)
            _spread(constants, slopes, count, values[r], numbers[r])
        return odd

    return isotonic


@per_row
def _prepare(s, w, strength, magnitude, constants, slopes):
    """Writes lambda h'(v) of each item as its slope times v minus its constant; returns whether all are in range."""
    in_range = True
    for i in range(s.shape[0]):
        target, weight = np.float64(s[i]), np.float64(w[i])
        constants[i] = constant = target if magnitude else target - strength * weight
        slopes[i] = slope = 1 + strength * weight if magnitude else 1.0
        in_range &= math.isfinite(constant) and 1 <= slope < np.inf
    return in_range


@per_row
def _spread(constants, slopes, count, v, blocks):
    """Writes the value and number of each item's block; the starts of the blocks are passed in place of the numbers."""
    stop = v.shape[0]
    for block in range(count - 1, -1, -1):  # block b starts at b or later, and overwrites no start before its own
        start, value = blocks[block], constants[block] / slopes[block]
        for i in range(start, stop):
            v[i], blocks[i] = value, block
        stop = start
