"""Duels in the given order on a CPU, one after the other."""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import kernel, over_rows
from ..cpu.random_numbers import empty_draws, fill_uniform
from ..random_numbers.philox import even_place
from .reference_duels import CERTAIN, CROSSING, EMPTY

STEPS = 8  # of work for a unit, approximately


@kernel
def _duels(first, last, take, total, kind, seed, first_draw, first_row, first_unit, x):
    rows, n = take.shape
    u = np.empty(n)
    for task in range(first, last):
        draw, row = task // rows, task % rows
        fill_uniform(seed[0], first_draw + draw, first_row + row, first_unit, u)
        sitting = -1
        for i in range(n):
            x[task, i] = kind[row, i] & CERTAIN > 0
            takes = u[i] * total[row, i] < take[row, i] or kind[row, i] & EMPTY > 0
            chosen = sitting if takes else i
            if kind[row, i] & CROSSING > 0:
                x[task, chosen] = 1
            sitting = i if takes else sitting
    return 0


def ordered_duels_draw(
    take: Tensor,
    total: Tensor,
    kind: Tensor,
    seed: Tensor,
    first: Sequence[int],
    draws: int,
    dtype: torch.dtype,
) -> Tensor:
    *batch, n = take.shape
    arguments = [v.detach().reshape(-1, n).contiguous() for v in (take, total, kind)]
    x = empty_draws(take, (draws * len(arguments[0]), n), dtype)
    place = even_place(first)
    over_rows(_duels, len(x), STEPS * x.numel(), *(v.numpy() for v in (*arguments, seed)), *place, x.numpy())
    return x.view(draws, *batch, n).to(dtype)
