"""Soft ranks, sorting and permutations of sorted rows as loops over rows on a CPU.

The arithmetic is in float64, except for what is read and written and for the exponentials of permutations. A number in
place of the scales is the scale of all rows.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import over_rows, specialised
from ..cpu.maths import Real
from . import RowMap
from .numba_permutation import permutation_derivative_loop, permutation_loop
from .numba_rows import rank_derivative_loop, rank_loop, sort_derivative_loop, sort_loop
from .numba_scans import Compiled

READ = torch.float32, torch.float64


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.cpu.loops.kernel`."""

    rank: Compiled
    rank_derivative: Compiled
    sort: Compiled
    sort_derivative: Compiled
    permutation: Compiled
    permutation_derivative: Compiled


@functools.cache
def loops_of(real: Real) -> Loops:
    """The loops for values of this dtype."""
    with specialised(real.__name__):
        return Loops(
            rank_loop(real),
            rank_derivative_loop(real),
            sort_loop(real),
            sort_derivative_loop(real),
            permutation_loop(real),
            permutation_derivative_loop(real),
        )


def _soft_rank(values: Tensor, order: Tensor, scale: Tensor | float) -> tuple[Tensor]:
    items, places, y = _rows(values), order.contiguous(), _result(values)
    _over(_loops(items).rank, items, (items, places), scale, (y,))
    return (y if y.dtype == values.dtype else y.to(values.dtype),)


def _soft_sort(values: Tensor, order: Tensor, scale: Tensor | float) -> tuple[Tensor]:
    items, y = _rows(values), _result(values)
    _over(_loops(items).sort, items, (items,), scale, (y,))
    return (y if y.dtype == values.dtype else y.to(values.dtype),)


def _soft_permutation(values: Tensor, order: Tensor, scale: Tensor | float) -> tuple[Tensor]:
    items, places, n = _rows(values), order.contiguous(), values.shape[-1]
    y = items.new_empty(*values.shape, n)
    _over(_loops(items).permutation, items, (items, places), scale, (y,), n)
    return (y if y.dtype == values.dtype else y.to(values.dtype),)


def _derivative(
    loop: Callable[[Loops], Compiled],
) -> Callable[[Tensor, Tensor, Tensor | float, Tensor, bool], tuple[Tensor, Tensor | None]]:
    def derivative(
        values: Tensor, order: Tensor, scale: Tensor | float, grad: Tensor, with_scale: bool
    ) -> tuple[Tensor, Tensor | None]:
        items, places, cotangents, grad_x = _rows(values), order.contiguous(), _rows(grad), _result(values)
        grad_scale = values.new_empty(values.shape[:-1], dtype=torch.float64) if with_scale else None
        work = cotangents.numel() // items.numel()
        _over(loop(_loops(items)), items, (items, places), scale, (cotangents, grad_x, grad_scale), work)
        return grad_x.to(values.dtype), grad_scale

    return derivative


def _loops(items: Tensor) -> Loops:
    return loops_of(np.float64 if items.dtype == torch.float64 else np.float32)


def _rows(x: Tensor) -> Tensor:
    """The tensor as contiguous rows in a dtype that loops read."""
    return x.contiguous() if x.dtype in READ else x.float().contiguous()


def _result(values: Tensor) -> Tensor:
    if values.dtype in READ:
        return torch.empty_like(values, memory_format=torch.contiguous_format)
    return values.new_empty(values.shape, dtype=torch.float32)


def _over(
    loop: Compiled,
    items: Tensor,
    before: tuple[Tensor, ...],
    scale: Tensor | float,
    after: tuple[Tensor | None, ...],
    work: int = 1,
) -> None:
    """Runs a loop on these tensors, with the scale in between; ``steps`` is the work for each item."""
    n, size = items.shape[-1], items.numel()
    column, one = (scale.contiguous(), 0.0) if isinstance(scale, Tensor) else (None, float(scale))
    address, *results = (0 if v is None else v.data_ptr() for v in (column, *after))
    over_rows(loop, size // n, size * work, n, *(v.data_ptr() for v in before), address, one, *results)


SOFT_RANK = RowMap(_soft_rank, _derivative(lambda loops: loops.rank_derivative), True)
SOFT_SORT = RowMap(_soft_sort, _derivative(lambda loops: loops.sort_derivative), True)
SOFT_PERMUTATION = RowMap(_soft_permutation, _derivative(lambda loops: loops.permutation_derivative), True)
