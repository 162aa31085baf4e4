"""What numba's loops that draw have in common: tensors to draw into, and random numbers for the units of a row."""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import torch
from torch import Tensor

from .numba_tools import per_row
from .philox_numba import uniform_pair


def empty_draws(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of a dtype that loops are compiled for: this one, or bool, from which the draws are to be converted."""
    return like.new_empty(shape, dtype=dtype if dtype in (torch.float32, torch.float64) else torch.bool)


@per_row
def fill_uniform(seed, draw, row, first_unit, u):
    """Numbers uniform on [0, 1) for the units of a row from an even one on, as ``uniform_rows`` has them."""
    n = u.shape[0]
    for place in range(n // 2):
        u[2 * place], u[2 * place + 1] = uniform_pair(seed, draw, row, first_unit // 2 + place)
    if n % 2 > 0:
        u[n - 1] = uniform_pair(seed, draw, row, first_unit // 2 + n // 2)[0]
