"""The definition: draw by draw, all rows at once, in plain torch."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from khot._contents import can_look

from ..random_numbers.philox import uniform_rows
from .reference_tournament import balance


def drawing_ratio(rest: Tensor, m: int, c: Tensor) -> Tensor:
    """The weight of units with 1 - pi = ``rest`` > 0 for the next of m draws, divided by pi.

    c is the sum of 1 - pi over the units drawn so far.
    """
    return (1 + (m - 1) * (m + c) / (c + m * rest)) / m


def draw_by_draw(probs: Tensor, k: Tensor, size: int, number: Callable[[int], Tensor]) -> Tensor:
    """One k-hot vector for each row: bool like ``probs``.

    Args:
        probs: Inclusion probabilities ``(..., n)``, balanced.
        k: Number of ones ``(...)``.
        size: At least the largest k of any row; the number of steps if ``k`` cannot be read.
        number: Given how many units, including certain ones, are left to draw, uniform numbers ``(..., 1)`` for the
            next one.
    """
    probs = probs.contiguous()
    drawn = probs >= 1
    left = (k - drawn.sum(-1)).unsqueeze(-1)
    if left.numel() and can_look(left):
        size = int(left.max())
    free, rest = probs.masked_fill(drawn, 0.0), (1 - probs).masked_fill(drawn, 1.0)
    c = torch.zeros_like(probs[..., :1])
    for m in range(size, 0, -1):
        active = left >= m  # rows with fewer units to draw join later
        cumulative = (free * drawing_ratio(rest, m, c)).cumsum(-1)
        target = number(m) * cumulative[..., -1:]
        if can_look(target):
            unit, put = torch.searchsorted(cumulative, target, right=True), Tensor.scatter_
        else:  # in a vmap, which cannot write to tensors that all rows share, and where the search needs another layout
            unit, put = (cumulative <= target).sum(-1, keepdim=True), Tensor.scatter
        unit = unit.clamp(max=probs.shape[-1] - 1)
        drawn = put(drawn, -1, unit, drawn.gather(-1, unit) | active)
        free = put(free, -1, unit, free.gather(-1, unit) * ~active)
        c = c + rest.gather(-1, unit) * active
    return drawn


def brewer_draw(probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype) -> Tensor:
    """k-hot draws ``(draws, *batch, n)``, a function of the seed.

    Args:
        probs: Inclusion probabilities ``(*batch, n)``, which are balanced here.
        k: Number of ones, integers ``(*batch)``.
        seed: From :func:`khot.kernels.random_numbers.philox.draw_seed`.
        first: The :class:`~khot.kernels.random_numbers.philox.Place` of the first draw, row and unit among all of the
            seed.
        draws: Number of draws for each row.
        dtype: Dtype of the result.
    """
    *batch, n = probs.shape
    rows = math.prod(batch)
    u = uniform_rows(seed, draws, [rows], n, first)
    probs, k = (x.reshape(rows, *rest).expand(draws, rows, *rest) for x, rest in ((balance(probs, k), (n,)), (k, ())))
    return draw_by_draw(probs, k, n, lambda m: u[..., m - 1 : m]).view(draws, *batch, n).to(dtype)
