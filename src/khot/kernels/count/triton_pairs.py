"""Convolution of pairs in Triton, in one launch, where ``torch_pairs.py`` takes a launch per entry of a child.

A program computes a tile of outputs, entries by columns, where columns are all nodes of all rows: a sum over the
entries of one child of shifted tiles of the other. Layout: contiguous ``x (width, 2, columns)``,
``m, g (length, columns)``.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.tools import on_device

TILE, WARPS, MAX_COLUMNS = 512, 4, 64


@triton.jit
def _tile(columns, COUNTS: tl.constexpr, COLUMNS: tl.constexpr):
    """First entry and the columns of this program's tile."""
    column_tiles = (columns + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    column = (tile % column_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return tile // column_tiles * COUNTS, column[None, :]


@triton.jit(do_not_specialize=["width", "start", "length", "columns"])
def _pair_merge(x_ptr, out_ptr, width, start, length, columns, COUNTS: tl.constexpr, COLUMNS: tl.constexpr):
    c_0, column = _tile(columns, COUNTS, COLUMNS)
    there = column < columns
    c = c_0 + tl.arange(0, COUNTS)[:, None]
    stride = 2 * columns.to(tl.int64)
    x_ptr += column
    total = tl.zeros((COUNTS, COLUMNS), tl.float64)
    first = tl.maximum(0, start + c_0 - width + 1)
    for i in range(first, tl.minimum(width, start + c_0 + COUNTS)):
        j = start + c - i
        a = tl.load(x_ptr + i * stride, mask=there, other=0.0)
        total += a * tl.load(x_ptr + j * stride + columns, mask=there & (j >= 0) & (j < width), other=0.0)
    tl.store(out_ptr + c.to(tl.int64) * columns + column, total, mask=there & (c < length))


@triton.jit(do_not_specialize=["width", "start", "length", "columns"])
def _pair_split(g_ptr, x_ptr, out_ptr, width, start, length, columns, COUNTS: tl.constexpr, COLUMNS: tl.constexpr):
    i_0, column = _tile(columns, COUNTS, COLUMNS)
    there = column < columns
    i = i_0 + tl.arange(0, COUNTS)[:, None]
    stride = 2 * columns.to(tl.int64)
    x_ptr += column
    left, right = tl.zeros((COUNTS, COLUMNS), tl.float64), tl.zeros((COUNTS, COLUMNS), tl.float64)
    first = tl.maximum(0, start - i_0 - COUNTS + 1)
    for j in range(first, tl.minimum(width, start + length - i_0)):
        c = i + j - start
        g = tl.load(g_ptr + c.to(tl.int64) * columns + column, mask=there & (c >= 0) & (c < length), other=0.0)
        left += g * tl.load(x_ptr + j * stride + columns, mask=there, other=0.0)
        right += g * tl.load(x_ptr + j * stride, mask=there, other=0.0)
    here = out_ptr + i * stride + column
    tl.store(here, left, mask=there & (i < width))
    tl.store(here + columns, right, mask=there & (i < width))


def _tiles(entries: int, columns: int) -> tuple[int, dict[str, int]]:
    """Number of programs, and the shape of their tiles."""
    across = min(MAX_COLUMNS, triton.next_power_of_2(columns))
    down = TILE // across
    programs = triton.cdiv(entries, down) * triton.cdiv(columns, across)
    return programs, {"COUNTS": down, "COLUMNS": across, "num_warps": WARPS}


def pair_merge(x: Tensor, start: int, length: int) -> Tensor:
    x, width = x.contiguous(), x.shape[0]
    columns = x[0, 0].numel()
    out = torch.empty(length, *x.shape[2:], dtype=x.dtype, device=x.device)
    programs, tile = _tiles(length, columns)
    with on_device(x):
        _pair_merge[(programs,)](x, out, width, start, length, columns, **tile)
    return out


def pair_split(g: Tensor, x: Tensor, start: int) -> Tensor:
    g, x, width = g.contiguous(), x.contiguous(), x.shape[0]
    columns = x[0, 0].numel()
    out = torch.empty_like(x)
    programs, tile = _tiles(width, columns)
    with on_device(x):
        _pair_split[(programs,)](g, x, out, width, start, len(g), columns, **tile)
    return out
