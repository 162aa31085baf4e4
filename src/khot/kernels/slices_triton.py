"""The soft permutation of :mod:`khot.kernels.slices` in Triton, tile by tile, and its derivative.

A program computes a tile from the z of its rows and the cuts around its columns, all in sorted order, and writes or
reads each row where the item came from. Arithmetic in float32, in float64 for float64; only the distances between items
and cuts are subtracted in float64, or far from 0 they would have no digits. Only tiles that the items cross have
entries that are no product; their rows and columns being sorted, two numbers of each tell.

Layout: z, order (rows, n), t (rows, n - 1) in float64, P (rows, n, n), all contiguous. The derivative leaves the sums
of each tile over its rows and over its columns, (rows, tiles, n), which are added up at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import arithmetic, on_device, rows_of

ROWS = {torch.float32: 16, torch.float64: 8}  # of a tile, by the dtype of the arithmetic; twice that of the derivative
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
def _tile(row_tiles, column_tiles):
    """Row of the batch, and the row and column of tiles, of this program."""
    program, tiles = tl.program_id(0).to(tl.int64), row_tiles * column_tiles
    tile = (program % tiles).to(tl.int32)
    return program // tiles, tile // column_tiles, tile % column_tiles


@triton.jit
def _slice_weights_fwd(
    z_ptr, order_ptr, t_ptr, p_ptr, n, row_tiles, column_tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    batch, down, across = _tile(row_tiles, column_tiles)
    z_ptr += batch * n
    t_ptr += batch * (n - 1)
    i, j = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    z = tl.load(z_ptr + i, mask=i < n, other=0.0)[:, None]  # (ROWS, 1)
    lower = tl.load(t_ptr + j - 1, mask=(j > 0) & (j < n), other=-float("inf"))[None, :]  # (1, COLUMNS)
    upper = tl.load(t_ptr + j, mask=j < n - 1, other=float("inf"))[None, :]
    above, below = (z - lower).to(DTYPE), (upper - z).to(DTYPE)  # (ROWS, COLUMNS)
    p = tl.exp(tl.minimum(tl.minimum(above, below), 0.0)) * (0.5 * one_minus_exp(upper - lower)).to(DTYPE)

    first, last = tl.load(z_ptr + down * ROWS), tl.load(z_ptr + tl.minimum(down * ROWS + ROWS, n) - 1)
    begin, end = across * COLUMNS, tl.minimum(across * COLUMNS + COLUMNS, n)
    start = tl.load(t_ptr + begin - 1, mask=begin > 0, other=-float("inf"))
    stop = tl.load(t_ptr + end - 1, mask=end < n, other=float("inf"))
    if (last > start) & (first < stop):
        around = 0.5 * (one_minus_exp(tl.maximum(above, 0.0)) + one_minus_exp(tl.maximum(below, 0.0)))
        p = tl.where((above > 0) & (below > 0), around, p)
    place = tl.load(order_ptr + batch * n + i, mask=i < n, other=0)[:, None]
    entries = p_ptr + (batch * n + place) * n + j[None, :]
    tl.store(entries, p.to(p_ptr.dtype.element_ty), mask=(i < n)[:, None] & (j < n)[None, :])


@triton.jit
def _slice_weights_bwd(
    z_ptr, order_ptr, t_ptr, g_ptr, grad_z_ptr, grad_t_ptr, n, row_tiles, column_tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    batch, down, across = _tile(row_tiles, column_tiles)
    i, j = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    z = tl.load(z_ptr + batch * n + i, mask=i < n, other=0.0)[:, None]  # (ROWS, 1)
    t = tl.load(t_ptr + batch * (n - 1) + j, mask=j < n - 1, other=0.0)[None, :]  # (1, COLUMNS)
    place = tl.load(order_ptr + batch * n + i, mask=i < n, other=0)[:, None]
    entries = g_ptr + (batch * n + place) * n + j[None, :]
    there = (i < n)[:, None] & (j < n - 1)[None, :]
    change = tl.load(entries, mask=there, other=0.0).to(DTYPE) - tl.load(entries + 1, mask=there, other=0.0).to(DTYPE)
    flow = 0.5 * tl.exp(-tl.abs((z - t).to(DTYPE))) * change  # (ROWS, COLUMNS)
    tl.store(grad_z_ptr + (batch * column_tiles + across) * n + i, -tl.sum(flow, 1), mask=i < n)
    tl.store(grad_t_ptr + (batch * row_tiles + down) * n + j, tl.sum(flow, 0), mask=j < n)


def _tiles(n: int, rows: int) -> tuple[int, int, int]:
    """Columns of a tile, and rows and columns of tiles."""
    columns = min(MAX_COLUMNS, max(16, triton.next_power_of_2(n)))
    return columns, triton.cdiv(n, rows), triton.cdiv(n, columns)


def launch_slice_weights(z: Tensor, order: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    """P (..., n, n) in ``dtype`` for z, order (..., n) and t (..., n - 1)."""
    n = z.shape[-1]
    z_rows, places = (rows_of(v).contiguous() for v in (z, order))
    p = torch.empty(len(z_rows), n, n, dtype=dtype, device=z.device)
    kind, triton_kind = arithmetic(p)
    columns, down, across = _tiles(n, rows := ROWS[kind])
    with on_device(z):
        _slice_weights_fwd[(len(z_rows) * down * across,)](
            z_rows, places, t.contiguous(), p, n, down, across,
            ROWS=rows, COLUMNS=columns, DTYPE=triton_kind, num_warps=WARPS,
        )  # fmt: skip
    return p.reshape(*z.shape, n)


def launch_slice_weights_derivative(z: Tensor, order: Tensor, t: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dz (..., n) and dL/dt (..., n - 1) in float64, in sorted order."""
    n = z.shape[-1]
    z_rows, places = (rows_of(v).contiguous() for v in (z, order))
    kind, triton_kind = arithmetic(grad)
    columns, down, across = _tiles(n, rows := 2 * ROWS[kind])
    grad_z = torch.empty(len(z_rows), across, n, dtype=kind, device=z.device)
    grad_t = torch.empty(len(z_rows), down, n, dtype=kind, device=z.device)
    with on_device(z):
        _slice_weights_bwd[(len(z_rows) * down * across,)](
            z_rows, places, t.contiguous(), grad.contiguous(), grad_z, grad_t, n, down, across,
            ROWS=rows, COLUMNS=columns, DTYPE=triton_kind, num_warps=WARPS,
        )  # fmt: skip
    grad_z, grad_t = grad_z.sum(1, dtype=torch.float64), grad_t[..., : n - 1].sum(1, dtype=torch.float64)
    return grad_z.reshape(z.shape), grad_t.reshape(t.shape)
