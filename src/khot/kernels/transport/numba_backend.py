"""Sorted transport on a CPU, row by row, for few places; rows that the loops do not solve go to the torch backend."""

import math

import torch
from torch import Tensor

from ..cpu.loops import over_rows
from ..exact.rows import compute_dtype
from . import torch_backend
from .numba_backward import derivative_loop
from .numba_forward import forward_loop
from .reference import places
from .solver import check_contents


def sorted_transport(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    batch, n = x.shape[:-1], x.shape[-1]
    items, halves, count = _rows(x, x), half.reshape(-1).contiguous(), places(k, n)
    rows = len(items)
    y, t = items.new_empty(rows, k, n), halves.new_empty(rows, count - 1)
    left = halves.new_empty(rows, dtype=torch.bool)
    addresses = _addresses(items, halves, y, t, left)
    if over_rows(forward_loop(items), rows, rows * n * count, addresses, n, k, count, tol, max_iter):
        if check:  # for all rows, because errors contain row numbers
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
    of_half = grad_half if with_half else None
    addresses = _addresses(items, halves, thresholds, cotangents, grad_x, of_half, left)
    if over_rows(derivative_loop(items), rows, rows * n * count, addresses, n, k, count):
        some = items[left], halves[left], thresholds[left], cotangents.view(rows, k, n)[left]
        grad_x[left], grad_half[left] = torch_backend.sorted_transport_derivative(*some, with_half)
    return grad_x.view(x.shape).to(x.dtype), grad_half.view(batch)


def _addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    """The addresses of contiguous tensors; 0 for None."""
    return tuple(0 if v is None else v.data_ptr() for v in tensors)


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """x as contiguous rows, in the computing dtype of a tensor."""
    return x.to(compute_dtype(like)).reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
