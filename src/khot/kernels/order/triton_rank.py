"""Soft ranks of sorted rows in Triton, and their derivative: one program per row, which stays on chip.

With f_ij = exp(-|z_i - z_j|) / 2, z = x / s, in float64,

    r_i = i + (sum_{j > i} f_ij - sum_{j < i} f_ij),   dL/dz_i = sum_j f_ij (g_i - g_j),

which takes two scans, and in the derivative two scans of three numbers. A negative scale means descending order.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import Table
from ..gpu.tools import on_device, per_row, row_numbers
from . import RowMap
from .triton_rows import contiguous_rows, coordinates, counted_items, items, row_results, scan_options
from .triton_scans import compose_two, to_double, to_dtype

RANK: Table = {torch.float64: ((128, 1), (1024, 8))}
RANK_BACKWARD: Table = {torch.float64: ((128, 2), (1024, 8))}


@triton.jit
def _rank_fwd(
    values_ptr, order_ptr, rank_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n,
    SCALE_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    _, _, before, after = counted_items(values_ptr + row * n, scale, cols, n)
    rank = (cols + 1) + 0.5 * (after - before)
    place = tl.load(order_ptr + row * n + cols, mask=cols < n, other=0)
    tl.store(rank_ptr + row * n + place, to_dtype(rank, rank_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def _rank_bwd(
    values_ptr, order_ptr, g_ptr, grad_x_ptr, grad_scale_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n,
    SCALE_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    _, to_left, from_left, from_right = items(values_ptr + row * n, scale, cols, n)
    order_ptr += row * n
    g_ptr += row * n
    there, has_left, has_right = cols < n, (cols > 0) & (cols < n), cols < n - 1
    place = tl.load(order_ptr + cols, mask=there, other=0)
    g = to_double(tl.load(g_ptr + place, mask=there, other=0.0))
    beside = tl.load(g_ptr + tl.load(order_ptr + cols - 1, mask=has_left, other=0), mask=has_left, other=0.0)
    _, mass, total = tl.associative_scan(
        (from_left, tl.where(there, from_left, 0.0), from_left * to_double(beside)), 0, compose_two
    )
    grad_z = 0.5 * (g * mass - total)
    beside = tl.load(g_ptr + tl.load(order_ptr + cols + 1, mask=has_right, other=0), mask=has_right, other=0.0)
    _, mass, total = tl.associative_scan(
        (from_right, tl.where(there, from_right, 0.0), from_right * to_double(beside)), 0, compose_two, reverse=True
    )
    grad_z += 0.5 * (g * mass - total)
    tl.store(grad_x_ptr + row * n + place, to_dtype(grad_z / scale, grad_x_ptr.dtype.element_ty), mask=there)
    z = coordinates(to_left, cols, n)
    tl.store(grad_scale_ptr + row, -tl.sum(tl.where(there, grad_z * z, 0.0), 0) / scale)


def _soft_rank(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor]:
    rows, places = contiguous_rows(values, order)
    rank, numbers = torch.empty_like(rows), row_numbers(scale, values.device)
    with on_device(values):
        _rank_fwd[(len(rows),)](
            rows, places, rank, *numbers.arguments(rows), rows.shape[1], **scan_options(rows, numbers, RANK)
        )
    return (rank.reshape(values.shape),)


def _derivative(values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool) -> tuple[Tensor, Tensor]:
    rows, places, g = contiguous_rows(values, order, grad)
    grad_x, grad_scale, numbers = torch.empty_like(rows), row_results(rows), row_numbers(scale, values.device)
    options = scan_options(rows, numbers, RANK_BACKWARD)
    with on_device(values):
        _rank_bwd[(len(rows),)](rows, places, g, grad_x, grad_scale, *numbers.arguments(rows), rows.shape[1], **options)
    return grad_x.reshape(values.shape), grad_scale.reshape(values.shape[:-1])


SOFT_RANK = RowMap(_soft_rank, _derivative)
