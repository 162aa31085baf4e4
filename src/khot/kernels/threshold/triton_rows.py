"""How the Triton kernels of :mod:`khot.kernels.threshold` go through rows of scores.

A program takes ``TILE.rows`` rows and reads them again for every pass, ``TILE.size`` columns at a time: rows of up to
some 10^4 entries stay in the first-level cache, and nothing has to be held in registers. There are few tiles, and none
of a kernel's integers is specialised, so that few kernels are compiled:

    short rows  4 rows in a warp, 8 threads a row: scalars of a row cost a quarter of an instruction
    rows        a row in a warp, which needs no barrier
    long rows   a row in 4 warps; aligned ones are read 16 bytes at a time

A tile is ``(unroll, rows, width)``: a thread has all its ``unroll`` entries of a row and reduces them by itself, and
only the ``width`` that is left at the end of a pass goes from thread to thread.

Numbers of a row are tensors ``(rows,)`` in the arithmetic's dtype: float32, or float64 for float64 scores. Distances
from the threshold are z = (x - anchor) / scale - offset, in the link's unit; lanes beyond a row hold -inf.
"""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_tools import row_numbers

_SINGLE, _DOUBLE = torch.finfo(torch.float32), torch.finfo(torch.float64)
EPS_32, EPS_64 = tl.constexpr(_SINGLE.eps), tl.constexpr(_DOUBLE.eps)
TINY_32, TINY_64 = tl.constexpr(_SINGLE.tiny), tl.constexpr(_DOUBLE.tiny)

SHORT, IN_A_WARP = 256, 1024  # entries of the longest rows of which several share a warp, and of those in one warp
SPLIT_ABOVE = 2**16  # shorter rows take about as long as the launches that splitting costs
PROGRAMS = 264  # that a split aims at: two for each multiprocessor of a large device


@dataclass(frozen=True)
class Tile:
    """What a program holds of its rows at a time.

    Attributes:
        rows: Rows of a program.
        unroll: Entries of a row that a thread has, or groups of ``width / threads``.
        width: Columns between two of them.
        warps: Warps of a program.
        aligned: Whether rows start at multiples of 16 bytes and have a multiple of 4 entries.
        dtype: Of the arithmetic.
    """

    rows: int
    unroll: int
    width: int
    warps: int
    aligned: bool
    dtype: tl.dtype

    @property
    def size(self) -> int:
        """Columns."""
        return self.unroll * self.width

    def chunks(self, rows: int, n: int) -> tuple[int, int]:
        """Programs for each row, and the columns that each but the last takes: whole tiles."""
        programs = max(1, min(PROGRAMS // rows, -(-n // self.size)))
        length = -(-n // (programs * self.size)) * self.size
        return -(-n // length), length


def tile_of(*rows: Tensor, double: bool) -> Tile:
    """The tile for tensors ``(rows, n)`` that are read or written together."""
    n, dtype = rows[0].shape[1], tl.float64 if double else tl.float32
    if n <= SHORT:
        return Tile(4, 8, 8, 1, False, dtype)
    if n <= IN_A_WARP:
        return Tile(1, 8, 32, 1, False, dtype)
    aligned = n % 4 == 0 and all((v.stride(0) * v.element_size()) % 16 == v.data_ptr() % 16 == 0 for v in rows)
    return Tile(1, 4, 256, 2, True, dtype) if aligned else Tile(1, 16, 64, 2, False, dtype)


@triton.jit
def program_rows(rows, TILE: tl.constexpr):
    """The rows of this program, (rows,); beyond the last one the last again, of which all write the same."""
    first = tl.program_id(0) * TILE.rows
    return tl.minimum(first + tl.arange(0, TILE.rows), rows - 1).to(tl.int64)


@triton.jit
def starts(x_ptr, row, stride, TILE: tl.constexpr):
    """Pointers to the starts of rows, (rows,)."""
    x_rows = x_ptr + row * stride
    return tl.multiple_of(x_rows, [16]) if TILE.aligned else x_rows


@triton.jit
def columns(TILE: tl.constexpr):
    """Those of a tile, (unroll, 1, width)."""
    return (tl.arange(0, TILE.unroll) * TILE.width)[:, None, None] + tl.arange(0, TILE.width)[None, None, :]


@triton.jit
def load(x_rows, start, n, other, TILE: tl.constexpr):
    """A tile, and ``other`` beyond the row."""
    here = over(x_rows + start) + columns(TILE)
    if start + TILE.size <= n:
        x = tl.load(here).to(TILE.dtype)
    else:
        x = _load_part(here, left_of(start, n, TILE), other, TILE)
    return x


@triton.jit
def left_of(start, n, TILE: tl.constexpr):
    """Columns from one on."""
    return tl.multiple_of(n - start, 4) if TILE.aligned else n - start


@triton.jit
def _load_part(here, left, other, TILE: tl.constexpr):
    there = columns(TILE) < left
    return tl.where(there, tl.load(here, mask=there).to(TILE.dtype), other)


@triton.jit
def store(y_rows, y, start, n, TILE: tl.constexpr):
    """Writes what there is of a tile."""
    here = over(y_rows + start) + columns(TILE)
    y = y.to(y_rows.dtype.element_ty)
    if start + TILE.size <= n:
        tl.store(here, y)
    else:
        _store_part(here, y, left_of(start, n, TILE), TILE)


@triton.jit
def _store_part(here, y, left, TILE: tl.constexpr):
    tl.store(here, y, mask=columns(TILE) < left)


@triton.jit
def partial_sums(TILE: tl.constexpr):
    """Zeros, one of each row for each column of a tile's width."""
    ROWS: tl.constexpr = TILE.rows
    WIDTH: tl.constexpr = TILE.width
    return tl.zeros((ROWS, WIDTH), TILE.dtype)


@triton.jit
def over(numbers):
    """Numbers of rows as (1, rows, 1)."""
    return numbers[None, :, None]


@triton.jit
def any_row(flags):
    """Whether a flag of one of the rows is set."""
    return tl.max(flags.to(tl.int32), 0) > 0


class Numbers(NamedTuple):
    """k and scale as arguments of a kernel, each one number for all rows, or a float64 tensor with one for each."""

    tensors: tuple[Tensor | None, Tensor | None]
    k: float
    scale: float
    stride_k: int
    stride_scale: int

    @classmethod
    def of(cls, k: Tensor, scale: Tensor, device: torch.device) -> "Numbers":
        """From tensors of the batch shape."""
        first, second = row_numbers(k, device), row_numbers(scale, device)
        return cls((first.tensor, second.tensor), first.number, second.number, first.stride, second.stride)


@triton.jit
def per_row(row, tensors, k_number, scale_number, stride_k, stride_scale):
    """k and scale of rows, in float64."""
    if tensors[0] is None:
        k = tl.full(row.shape, k_number, tl.float64)
    else:
        k = tl.load(tensors[0] + row * stride_k)
    if tensors[1] is None:
        scale = tl.full(row.shape, scale_number, tl.float64)
    else:
        scale = tl.load(tensors[1] + row * stride_scale)
    return k, scale
