"""Sorted transport on a CPU, row by row, for few places; rows that the loops have left go to the torch backend."""

import math

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import over_rows
from ..exact.rows import compute_dtype
from . import torch_backend
from .numba_loops import Loops, loops_of
from .reference import places
from .solver import check_contents


def sorted_transport(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    batch, n = x.shape[:-1], x.shape[-1]
    items, halves, count = _rows(x, x), half.reshape(-1).contiguous(), places(k, n)
    rows = len(items)
    y, t = items.new_empty(rows, k, n), halves.new_empty(rows, count - 1)
    left = halves.new_empty(rows, dtype=torch.bool)
    addresses = (v.data_ptr() for v in (items, halves, y, t, left))
    if over_rows(_loops(items).forward, rows, rows * n * count, n, *addresses, k, count, tol, max_iter):
        if check:  # of all rows, whose numbers the errors tell
            check_contents(items, 2 * halves)
        y[left], t[left] = torch_backend.sorted_transport(items[left], halves[left], k, tol, max_iter, False)
    return y.view(*batch, k, n).to(x.dtype), t.view(*batch, count - 1)


def sorted_transport_derivative(
    x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool
) -> tuple[Tensor, Tensor]:
    batch, n, k = x.shape[:-1], x.shape[-1], grad_y.shape[-2]
    items, halves, count = _rows(x, x), half.reshape(-1).contiguous(), places(k, n)
    rows = len(items)
    thresholds, cotangents = t.reshape(rows, count - 1).contiguous(), _rows(grad_y, x)
    grad_x, grad_half = torch.empty_like(items), torch.empty_like(halves) if with_half else torch.zeros_like(halves)
    left = halves.new_empty(rows, dtype=torch.bool)
    addresses = (v.data_ptr() for v in (items, halves, thresholds, cotangents, grad_x))
    after = grad_half.data_ptr() if with_half else 0, left.data_ptr(), k, count
    if over_rows(_loops(items).derivative, rows, rows * n * count, n, *addresses, *after):
        some = items[left], halves[left], thresholds[left], cotangents.view(rows, k, n)[left]
        grad_x[left], grad_half[left] = torch_backend.sorted_transport_derivative(*some, with_half)
    return grad_x.view(x.shape).to(x.dtype), grad_half.view(batch)


def _loops(items: Tensor) -> Loops:
    return loops_of(np.float64 if items.dtype == torch.float64 else np.float32)


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """As contiguous rows of the computing dtype of a tensor."""
    return x.to(compute_dtype(like)).reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
