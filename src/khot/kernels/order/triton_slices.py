"""The soft permutation of :mod:`khot.kernels.order` in Triton, tile by tile, and its derivative.

A program computes tiles, one below the other, from the z of their rows and the cuts around their columns, all in sorted
order, and writes or reads each row at the original position of its item. What belongs to a column is computed once, and
sums over its rows are added up at the end. Arithmetic is in float32, or in float64 for float64. Only the
distances between items and cuts are computed in float64, since far from 0 they would otherwise have no digits. Where
all items of a tile are on the same side of all cuts, which two numbers of a row and of a column show, an entry is a
product of numbers of its row and its column, and takes a single distance.

Layout: items, order (rows, n), cuts as items and offsets (rows, n - 1) in float64, P (rows, n, n), all contiguous. The
derivative stores the sums of each program over its columns and over its rows, (rows, programs, n), which are added up
at the end.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import PROGRAMS
from ..gpu.tools import RowNumbers, arithmetic, on_device, per_row, row_numbers, rows_of

ROWS = {torch.float32: 16, torch.float64: 4}  # of a tile, by the dtype of the arithmetic
COLUMNS, DERIVATIVE_COLUMNS = 128, 64  # of a tile, at most
MAX_SPAN, WARPS = 8, 4
ENOUGH = 8 * PROGRAMS  # programs; if there would be more, each takes several tiles


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
def _tiles_of_program(n, span, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row of the batch, and span of rows and tile of columns of this program, with the numbers of spans and tiles."""
    spans, tiles = tl.cdiv(n, span * ROWS), tl.cdiv(n, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    part = (program % (spans * tiles)).to(tl.int32)
    return program // (spans * tiles), part // tiles, part % tiles, spans, tiles


@triton.jit
def _apart(to, start, inverse, offset, DTYPE: tl.constexpr):
    """A distance in scales."""
    return ((to - start) * inverse + offset).to(DTYPE)


@triton.jit
def _length(n, ALIGNED: tl.constexpr):
    """n, written so that the compiler knows if it is a multiple of 4, and accesses four entries at a time."""
    return n // 4 * 4 if ALIGNED else n


@triton.jit
def _slice_weights_fwd(
    x_ptr, order_ptr, cuts_ptr, offset_ptr, p_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n, span,
    SCALE_TENSOR: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    n = _length(n, ALIGNED)
    batch, down, across, _, _ = _tiles_of_program(n, span, ROWS, COLUMNS)
    inverse = 1.0 / per_row(scale_ptr, scale_number, batch, stride_scale, SCALE_TENSOR)
    x_ptr += batch * n
    order_ptr += batch * n
    cuts_ptr += batch * (n - 1)
    offset_ptr += batch * (n - 1)
    j = (across * COLUMNS + tl.arange(0, COLUMNS))[None, :]  # (1, COLUMNS)
    has_lower, has_upper = (j > 0) & (j < n), j < n - 1
    lower = tl.load(cuts_ptr + j - 1, mask=has_lower, other=0.0)
    upper = tl.load(cuts_ptr + j, mask=has_upper, other=0.0)
    lower_offset = tl.load(offset_ptr + j - 1, mask=has_lower, other=-float("inf"))
    upper_offset = tl.load(offset_ptr + j, mask=has_upper, other=float("inf"))
    width = tl.where(has_lower & has_upper, (upper - lower) * inverse, 0.0) + (upper_offset - lower_offset)
    half = (0.5 * one_minus_exp(width)).to(DTYPE)
    # Where there is no cut, the offset alone counts.
    from_lower, to_upper = tl.where(has_lower, inverse, 0.0), tl.where(has_upper, inverse, 0.0)

    begin, end = across * COLUMNS, tl.minimum(across * COLUMNS + COLUMNS, n)
    start = tl.load(cuts_ptr + begin - 1, mask=begin > 0, other=0.0)
    stop = tl.load(cuts_ptr + end - 1, mask=end < n, other=0.0)
    start_offset = tl.load(offset_ptr + begin - 1, mask=begin > 0, other=0.0)
    stop_offset = tl.load(offset_ptr + end - 1, mask=end < n, other=0.0)
    for row in range(down * span * ROWS, tl.minimum((down + 1) * span * ROWS, n), ROWS):
        i = (row + tl.arange(0, ROWS))[:, None]  # (ROWS, 1)
        x, place = tl.load(x_ptr + i, mask=i < n, other=0.0), tl.load(order_ptr + i, mask=i < n, other=0)
        first, last = tl.load(x_ptr + row), tl.load(x_ptr + tl.minimum(row + ROWS, n) - 1)
        if (begin > 0) & ((last - start) * inverse <= start_offset):  # all items are below all cuts
            p = tl.exp(tl.minimum(_apart(x, lower, from_lower, -lower_offset, DTYPE), 0.0)) * half  # (ROWS, COLUMNS)
        elif (end < n) & ((stop - first) * inverse <= -stop_offset):
            p = tl.exp(tl.minimum(_apart(upper, x, to_upper, upper_offset, DTYPE), 0.0)) * half
        else:
            above = _apart(x, lower, from_lower, -lower_offset, DTYPE)
            below = _apart(upper, x, to_upper, upper_offset, DTYPE)
            p = tl.exp(tl.minimum(tl.minimum(above, below), 0.0)) * half
            around = 0.5 * (one_minus_exp(tl.maximum(above, 0.0)) + one_minus_exp(tl.maximum(below, 0.0)))
            p = tl.where((above > 0) & (below > 0), around, p)
        entries = p_ptr + (batch * n + place) * n + j
        tl.store(entries, p.to(p_ptr.dtype.element_ty), mask=(i < n) & (j < n))


@triton.jit
def _slice_weights_bwd(
    x_ptr, order_ptr, cuts_ptr, offset_ptr, g_ptr, grad_z_ptr, grad_t_ptr,
    scale_ptr, scale_number: tl.float64, stride_scale, n, span,
    SCALE_TENSOR: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    n = _length(n, ALIGNED)
    batch, down, across, spans, tiles = _tiles_of_program(n, span, ROWS, COLUMNS)
    inverse = 1.0 / per_row(scale_ptr, scale_number, batch, stride_scale, SCALE_TENSOR)
    x_ptr += batch * n
    order_ptr += batch * n
    grad_z_ptr += (batch * tiles + across) * n
    j = (across * COLUMNS + tl.arange(0, COLUMNS))[None, :]  # (1, COLUMNS)
    cut = tl.load(cuts_ptr + batch * (n - 1) + j, mask=j < n - 1, other=0.0)
    offset = tl.load(offset_ptr + batch * (n - 1) + j, mask=j < n - 1, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), DTYPE)
    for row in range(down * span * ROWS, tl.minimum((down + 1) * span * ROWS, n), ROWS):
        i = (row + tl.arange(0, ROWS))[:, None]  # (ROWS, 1)
        x, place = tl.load(x_ptr + i, mask=i < n, other=0.0), tl.load(order_ptr + i, mask=i < n, other=0)
        entries, there = g_ptr + (batch * n + place) * n + j, (i < n) & (j < n - 1)
        change = tl.load(entries, mask=there, other=0.0).to(DTYPE)
        change -= tl.load(entries + 1, mask=there, other=0.0).to(DTYPE)
        flow = 0.5 * tl.exp(-tl.abs(_apart(cut, x, inverse, offset, DTYPE))) * change  # (ROWS, COLUMNS)
        total += flow
        tl.store(grad_z_ptr + i, -tl.sum(flow, 1, keep_dims=True), mask=i < n)
    tl.store(grad_t_ptr + (batch * spans + down) * n + j, tl.sum(total, 0, keep_dims=True), mask=j < n)


class _Tiles(NamedTuple):
    """How programs share the entries of matrices.

    Attributes:
        rows, columns: Of a tile.
        span: Tiles of a program, one below the other.
        down, across: Programs for a matrix.
    """

    rows: int
    columns: int
    span: int
    down: int
    across: int

    @classmethod
    def of(cls, matrices: int, n: int, rows: int, columns: int) -> "_Tiles":
        """For tiles of so many rows, and at most so many columns; a program takes several if there are many."""
        columns = min(columns, max(16, triton.next_power_of_2(n)))
        down, across = triton.cdiv(n, rows), triton.cdiv(n, columns)
        span = min(MAX_SPAN, max(1, matrices * down * across // ENOUGH))
        return cls(rows, columns, span, triton.cdiv(down, span), across)

    def options(self, n: int, scale: RowNumbers, dtype: tl.dtype) -> dict[str, Any]:
        """The options with which a kernel is compiled."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DTYPE": dtype, "num_warps": WARPS}
        return {"SCALE_TENSOR": scale.tensor is not None, "ALIGNED": n % 4 == 0, **sizes}


def slice_weights(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, below: Tensor | None, dtype: torch.dtype
) -> Tensor:
    n = values.shape[-1]
    rows, places = (rows_of(v).contiguous() for v in (values, order))
    p = torch.empty(len(rows), n, n, dtype=dtype, device=values.device)
    kind, triton_kind = arithmetic(p)
    tiles, numbers = _Tiles.of(len(rows), n, ROWS[kind], COLUMNS), row_numbers(scale, values.device)
    with on_device(values):
        _slice_weights_fwd[(len(rows) * tiles.down * tiles.across,)](
            rows, places, cuts.contiguous(), offset.contiguous(), p, *numbers.arguments(rows), n, tiles.span,
            **tiles.options(n, numbers, triton_kind),
        )  # fmt: skip
    return p.reshape(*values.shape, n)


def slice_weights_derivative(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    n = values.shape[-1]
    rows, places = (rows_of(v).contiguous() for v in (values, order))
    kind, triton_kind = arithmetic(grad)
    tiles, numbers = _Tiles.of(len(rows), n, ROWS[kind], DERIVATIVE_COLUMNS), row_numbers(scale, values.device)
    grad_z = torch.empty(len(rows), tiles.across, n, dtype=kind, device=values.device)
    grad_t = torch.empty(len(rows), tiles.down, n, dtype=kind, device=values.device)
    with on_device(values):
        _slice_weights_bwd[(len(rows) * tiles.down * tiles.across,)](
            rows, places, cuts.contiguous(), offset.contiguous(), grad.contiguous(), grad_z, grad_t,
            *numbers.arguments(rows), n, tiles.span, **tiles.options(n, numbers, triton_kind),
        )  # fmt: skip
    grad_z, grad_t = grad_z.sum(1, dtype=torch.float64), grad_t[..., : n - 1].sum(1, dtype=torch.float64)
    return grad_z.reshape(values.shape), grad_t.reshape(offset.shape)
