"""The soft permutation of :mod:`khot.kernels.order` in Triton, tile by tile, and its derivative.

A program computes a tile from the z of its rows and the cuts around its columns, all in sorted order, and writes or
reads each row at the original position of its item. Arithmetic is in float32, or in float64 for float64. Only the
distances between items and cuts are computed in float64, since far from 0 they would otherwise have no digits. Only
tiles that the items cross have entries that are not products; two numbers of a row or column, sorted, show which.

Layout: items, order (rows, n), cuts as items and offsets (rows, n - 1) in float64, P (rows, n, n), all contiguous. The
derivative stores the sums of each tile over its rows and over its columns, (rows, tiles, n), which are added up at the
end.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.tools import arithmetic, on_device, per_row, row_numbers, rows_of

ROWS = {torch.float32: 16, torch.float64: 8}  # of a tile, by the dtype of the arithmetic; twice this in the derivative
MAX_COLUMNS, WARPS = 128, 8


@triton.jit
def one_minus_exp(h):
    """1 - exp(-h) for h >= 0, accurate near 0."""
    series = h * 0.0 + 1.0
    if h.dtype == tl.float64:
        for k in tl.static_range(13, 1, -1):
            series = 1.0 - h * series * (1.0 / k)
    else:
        for k in tl.static_range(7, 1, -1):
            series = 1.0 - h * series * (1.0 / k)
    return tl.where(h < 0.25, h * series, 1.0 - tl.exp(-h))


@triton.jit
def _tile(n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row of the batch, row and column of tiles of this program, and the numbers of rows and columns of tiles."""
    row_tiles, column_tiles = tl.cdiv(n, ROWS), tl.cdiv(n, COLUMNS)
    program, tiles = tl.program_id(0).to(tl.int64), row_tiles * column_tiles
    tile = (program % tiles).to(tl.int32)
    return program // tiles, tile // column_tiles, tile % column_tiles, row_tiles, column_tiles


@triton.jit
def _slice_weights_fwd(
    x_ptr, order_ptr, cuts_ptr, offset_ptr, p_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n,
    SCALE_TENSOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    batch, down, across, _, _ = _tile(n, ROWS, COLUMNS)
    inverse = 1.0 / per_row(scale_ptr, scale_number, batch, stride_scale, SCALE_TENSOR)
    x_ptr += batch * n
    cuts_ptr += batch * (n - 1)
    offset_ptr += batch * (n - 1)
    i, j = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)[:, None]  # (ROWS, 1)
    has_lower, has_upper = (j > 0) & (j < n), j < n - 1
    lower = tl.load(cuts_ptr + j - 1, mask=has_lower, other=0.0)[None, :]  # (1, COLUMNS)
    upper = tl.load(cuts_ptr + j, mask=has_upper, other=0.0)[None, :]
    lower_offset = tl.load(offset_ptr + j - 1, mask=has_lower, other=-float("inf"))[None, :]
    upper_offset = tl.load(offset_ptr + j, mask=has_upper, other=float("inf"))[None, :]
    width = tl.where((has_lower & has_upper)[None, :], (upper - lower) * inverse, 0.0) + (upper_offset - lower_offset)
    above = tl.where(has_lower[None, :], (x - lower) * inverse, 0.0) - lower_offset  # (ROWS, COLUMNS)
    below = tl.where(has_upper[None, :], (upper - x) * inverse, 0.0) + upper_offset
    above, below = above.to(DTYPE), below.to(DTYPE)
    p = tl.exp(tl.minimum(tl.minimum(above, below), 0.0)) * (0.5 * one_minus_exp(width)).to(DTYPE)

    first, last = tl.load(x_ptr + down * ROWS), tl.load(x_ptr + tl.minimum(down * ROWS + ROWS, n) - 1)
    begin, end = across * COLUMNS, tl.minimum(across * COLUMNS + COLUMNS, n)
    start = tl.load(cuts_ptr + begin - 1, mask=begin > 0, other=0.0)
    stop = tl.load(cuts_ptr + end - 1, mask=end < n, other=0.0)
    start_offset = tl.load(offset_ptr + begin - 1, mask=begin > 0, other=0.0)
    stop_offset = tl.load(offset_ptr + end - 1, mask=end < n, other=0.0)
    after_start = (begin == 0) | ((last - start) * inverse > start_offset)
    if after_start & ((end == n) | ((stop - first) * inverse > -stop_offset)):
        around = 0.5 * (one_minus_exp(tl.maximum(above, 0.0)) + one_minus_exp(tl.maximum(below, 0.0)))
        p = tl.where((above > 0) & (below > 0), around, p)
    place = tl.load(order_ptr + batch * n + i, mask=i < n, other=0)[:, None]
    entries = p_ptr + (batch * n + place) * n + j[None, :]
    tl.store(entries, p.to(p_ptr.dtype.element_ty), mask=(i < n)[:, None] & (j < n)[None, :])


@triton.jit
def _slice_weights_bwd(
    x_ptr, order_ptr, cuts_ptr, offset_ptr, g_ptr, grad_z_ptr, grad_t_ptr,
    scale_ptr, scale_number: tl.float64, stride_scale, n,
    SCALE_TENSOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    batch, down, across, row_tiles, column_tiles = _tile(n, ROWS, COLUMNS)
    inverse = 1.0 / per_row(scale_ptr, scale_number, batch, stride_scale, SCALE_TENSOR)
    i, j = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + batch * n + i, mask=i < n, other=0.0)[:, None]  # (ROWS, 1)
    cut = tl.load(cuts_ptr + batch * (n - 1) + j, mask=j < n - 1, other=0.0)[None, :]  # (1, COLUMNS)
    offset = tl.load(offset_ptr + batch * (n - 1) + j, mask=j < n - 1, other=0.0)[None, :]
    place = tl.load(order_ptr + batch * n + i, mask=i < n, other=0)[:, None]
    entries = g_ptr + (batch * n + place) * n + j[None, :]
    there = (i < n)[:, None] & (j < n - 1)[None, :]
    change = tl.load(entries, mask=there, other=0.0).to(DTYPE) - tl.load(entries + 1, mask=there, other=0.0).to(DTYPE)
    flow = 0.5 * tl.exp(-tl.abs(((cut - x) * inverse + offset).to(DTYPE))) * change  # (ROWS, COLUMNS)
    tl.store(grad_z_ptr + (batch * column_tiles + across) * n + i, -tl.sum(flow, 1), mask=i < n)
    tl.store(grad_t_ptr + (batch * row_tiles + down) * n + j, tl.sum(flow, 0), mask=j < n)


def _tiles(n: int, rows: int) -> tuple[int, int, int]:
    """Columns of a tile, and the numbers of rows and columns of tiles."""
    columns = min(MAX_COLUMNS, max(16, triton.next_power_of_2(n)))
    return columns, triton.cdiv(n, rows), triton.cdiv(n, columns)


def slice_weights(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, below: Tensor | None, dtype: torch.dtype
) -> Tensor:
    n = values.shape[-1]
    rows, places = (rows_of(v).contiguous() for v in (values, order))
    p = torch.empty(len(rows), n, n, dtype=dtype, device=values.device)
    kind, triton_kind = arithmetic(p)
    columns, down, across = _tiles(n, tile := ROWS[kind])
    numbers = row_numbers(scale, values.device)
    with on_device(values):
        _slice_weights_fwd[(len(rows) * down * across,)](
            rows, places, cuts.contiguous(), offset.contiguous(), p, *numbers.arguments(rows), n,
            SCALE_TENSOR=numbers.tensor is not None, ROWS=tile, COLUMNS=columns, DTYPE=triton_kind, num_warps=WARPS,
        )  # fmt: skip
    return p.reshape(*values.shape, n)


def slice_weights_derivative(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    n = values.shape[-1]
    rows, places = (rows_of(v).contiguous() for v in (values, order))
    kind, triton_kind = arithmetic(grad)
    columns, down, across = _tiles(n, tile := 2 * ROWS[kind])
    grad_z = torch.empty(len(rows), across, n, dtype=kind, device=values.device)
    grad_t = torch.empty(len(rows), down, n, dtype=kind, device=values.device)
    numbers = row_numbers(scale, values.device)
    with on_device(values):
        _slice_weights_bwd[(len(rows) * down * across,)](
            rows, places, cuts.contiguous(), offset.contiguous(), grad.contiguous(), grad_z, grad_t,
            *numbers.arguments(rows), n,
            SCALE_TENSOR=numbers.tensor is not None, ROWS=tile, COLUMNS=columns, DTYPE=triton_kind, num_warps=WARPS,
        )  # fmt: skip
    grad_z, grad_t = grad_z.sum(1, dtype=torch.float64), grad_t[..., : n - 1].sum(1, dtype=torch.float64)
    return grad_z.reshape(values.shape), grad_t.reshape(offset.shape)
