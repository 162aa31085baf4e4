"""Soft ranks, sorting and permutations of sorted rows as loops over rows on a CPU.

The arithmetic is in float64, except for what is read and written and for the exponentials of permutations. A number in
place of the scales is the scale of all rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..cpu.loops import over_rows
from ..exact.rows import compute_dtype
from . import RowMap
from .numba_permutahedron import projection_derivative_loop, projection_loop
from .numba_permutation import permutation_derivative_loop, permutation_loop
from .numba_rows import rank_derivative_loop, rank_loop, sort_derivative_loop, sort_loop
from .numba_scans import Compiled


def _map_of(
    loop: Callable[[Tensor], Compiled],
    derivative_loop: Callable[[Tensor], Compiled],
    *options: bool,
    is_matrix: bool = False,
) -> RowMap:
    """The map of these loops with options; its result has one number, or n of them, for each item."""

    def forward(values: Tensor, order: Tensor, scale: Tensor | float) -> Tensor:
        items, places, n = _rows(values), order.contiguous(), values.shape[-1]
        y = items.new_empty((*values.shape, n) if is_matrix else values.shape)
        _over(loop(items), options, items, places, scale, y)
        return y.to(values.dtype)

    def backward(
        values: Tensor, order: Tensor, scale: Tensor | float, grad: Tensor, with_scale: bool
    ) -> tuple[Tensor, Tensor | None]:
        items, places, cotangents = _rows(values), order.contiguous(), _rows(grad)
        grad_x = torch.empty_like(items)
        grad_scale = values.new_empty(values.shape[:-1], dtype=torch.float64) if with_scale else None
        _over(derivative_loop(items), options, items, places, scale, cotangents, grad_x, grad_scale)
        return grad_x.to(values.dtype), grad_scale

    return RowMap(forward, backward)


def _rows(x: Tensor) -> Tensor:
    """The tensor as contiguous rows in a dtype that loops read."""
    return x.to(compute_dtype(x)).contiguous()


def _over(
    loop: Compiled,
    options: tuple[bool, ...],
    items: Tensor,
    places: Tensor,
    scale: Tensor | float,
    largest: Tensor,
    *others: Tensor | None,
) -> None:
    """Runs a loop on these tensors; the number of entries of the ``largest`` is the amount of work."""
    n, rows = items.shape[-1], items.numel() // items.shape[-1]
    column, one = (scale.contiguous(), 0.0) if isinstance(scale, Tensor) else (None, float(scale))
    address, *results = (0 if v is None else v.data_ptr() for v in (column, largest, *others))
    over_rows(loop, rows, largest.numel(), n, items.data_ptr(), places.data_ptr(), (address, one), *results, *options)


SOFT_RANK = _map_of(rank_loop, rank_derivative_loop)
SOFT_SORT = _map_of(sort_loop, sort_derivative_loop)
SOFT_PERMUTATION = _map_of(permutation_loop, permutation_derivative_loop, is_matrix=True)
PERMUTAHEDRON_RANK = _map_of(projection_loop, projection_derivative_loop, True)
PERMUTAHEDRON_SORT = _map_of(projection_loop, projection_derivative_loop, False)
