"""Brewer's draws in numba, one draw of a row after the other."""

# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import kernel, over_rows, per_row
from ..cpu.random_numbers import uniform_pair
from .reference_tournament import balance


@per_row
def _weights(probs, drawn, m, c, cumulative):
    """Writes the sums of the weights up to each unit; units drawn already have weight 0."""
    total = 0.0
    for i in range(probs.shape[0]):
        if not drawn[i]:
            total += probs[i] * (1.0 + (m - 1) * (m + c) / (c + m * (1.0 - probs[i]))) / m
        cumulative[i] = total


@per_row
def _search(cumulative, target):
    """The first unit whose sum is above the target; if rounding leaves none, the last one that has a weight."""
    low, high = 0, cumulative.shape[0] - 1
    while low < high and cumulative[high - 1] == cumulative[high]:
        high -= 1
    while low < high:
        middle = (low + high) // 2
        if cumulative[middle] > target:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def _draw_tasks(from_task, to_task, probs, k, seed, first_draw, first_row, first_unit, out):
    rows, n = probs.shape
    cumulative = np.empty(n)
    for task in range(from_task, to_task):
        d, r = task // rows, task % rows
        drawn, left = out[d, r], k[r]
        for i in range(n):
            drawn[i] = probs[r, i] >= 1
            left -= drawn[i]
        c = 0.0
        for m in range(min(left, n), 0, -1):
            _weights(probs[r], drawn, m, c, cumulative)
            place = first_unit + m - 1
            even, odd = uniform_pair(seed[0], first_draw + d, first_row + r, place // 2)
            unit = _search(cumulative, (odd if place % 2 else even) * cumulative[n - 1])
            drawn[unit] = True
            c += 1.0 - probs[r, unit]
    return 0


def brewer_draw(probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype) -> Tensor:
    *batch, n = probs.shape
    rows = math.prod(batch)
    out = torch.empty(draws, rows, n, dtype=torch.bool, device=probs.device)
    arguments = (x.contiguous().numpy() for x in (balance(probs, k).reshape(rows, n), k.reshape(rows), seed))
    over_rows(_draw_tasks, draws * rows, out.numel() * int(k.max()), *arguments, *first, out.numpy())
    return out.view(draws, *batch, n).to(dtype)
