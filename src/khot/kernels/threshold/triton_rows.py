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

from ..triton_tools import LARGEST_32, LARGEST_64, add2, row_numbers

_SINGLE, _DOUBLE = torch.finfo(torch.float32), torch.finfo(torch.float64)
EPS_32, EPS_64 = tl.constexpr(_SINGLE.eps), tl.constexpr(_DOUBLE.eps)
TINY_32, TINY_64 = tl.constexpr(_SINGLE.tiny), tl.constexpr(_DOUBLE.tiny)
UNDERFLOW_32, UNDERFLOW_64 = tl.constexpr(_SINGLE.tiny / _SINGLE.eps), tl.constexpr(_DOUBLE.tiny / _DOUBLE.eps)
SMALLEST_32, SMALLEST_64 = tl.constexpr(2.0**-64), tl.constexpr(2.0**-500)

SHORT, IN_A_WARP = 256, 1024  # entries of the longest rows of which several share a warp, and of those in one warp
SPLIT_ABOVE = 2**16  # shorter rows take about as long as the launches that splitting costs
PROGRAMS = 264  # that a split aims at: two for each multiprocessor of a large device
PARTS = tl.constexpr(triton.next_power_of_2(PROGRAMS))


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
        stage: "rows" if a program takes whole rows; of split rows, what it does with its chunk of one: "sums" or
            "write".
    """

    rows: int
    unroll: int
    width: int
    warps: int
    aligned: bool
    dtype: tl.dtype
    stage: str = "rows"

    @property
    def size(self) -> int:
        """Columns."""
        return self.unroll * self.width

    def splits(self, rows: int, n: int) -> int:
        """Programs for each of few rows, with a whole number of tiles each."""
        programs = max(1, min(PROGRAMS // rows, -(-n // self.size)))
        return -(-n // (-(-n // (programs * self.size)) * self.size))


def is_split(rows: int, n: int) -> bool:
    """Whether so few rows are so long that several programs take one."""
    return n > SPLIT_ABOVE and rows <= PROGRAMS // 2


def tile_of(*rows: Tensor, double: bool) -> Tile:
    """The tile for tensors ``(rows, n)`` that are read or written together."""
    (number, n), dtype = rows[0].shape, tl.float64 if double else tl.float32
    if is_split(number, n):
        return Tile(1, 8, 256, 8, False, dtype, "sums")
    if n <= SHORT:
        return Tile(4, 8, 8, 1, False, dtype)
    if n <= IN_A_WARP:
        return Tile(1, 8, 32, 1, False, dtype)
    aligned = n % 4 == 0 and all((v.stride(0) * v.element_size()) % 16 == v.data_ptr() % 16 == 0 for v in rows)
    return Tile(1, 2, 256, 2, True, dtype) if aligned else Tile(1, 8, 64, 2, False, dtype)


@triton.jit
def eps_of(dtype: tl.constexpr):
    return EPS_64 if dtype == tl.float64 else EPS_32


@triton.jit
def tiny_of(dtype: tl.constexpr):
    return TINY_64 if dtype == tl.float64 else TINY_32


@triton.jit
def smallest_unit(dtype: tl.constexpr):
    """1 / scale, below which differences of scores may overflow that are not many scales."""
    return SMALLEST_64 if dtype == tl.float64 else SMALLEST_32


@triton.jit
def is_normal(scale, dtype: tl.constexpr):
    """Whether a scale is a normal number of the dtype that scores of this dtype are computed in."""
    if dtype == tl.float64:
        return (scale >= TINY_64) & (scale <= LARGEST_64)
    else:
        return (scale >= TINY_32) & (scale <= LARGEST_32)


@triton.jit
def underflow_of(dtype: tl.constexpr):
    """A sum of tails or slopes of which some have lost digits."""
    return UNDERFLOW_64 if dtype == tl.float64 else UNDERFLOW_32


@triton.jit
def program_rows(rows, TILE: tl.constexpr):
    """The rows of this program, (rows,); beyond the last one the last again, of which all write the same."""
    ROWS: tl.constexpr = TILE.rows
    if TILE.stage == "rows":
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    else:
        row = tl.program_id(1) + tl.arange(0, ROWS)
    return tl.minimum(row, rows - 1).to(tl.int64)


@triton.jit
def chunk_of(n, TILE: tl.constexpr):
    """Where the columns of this program begin, and their number: all, or whole tiles but for the last program."""
    if TILE.stage == "rows":
        begin, length = 0, n
    else:
        length = tl.cdiv(n, tl.num_programs(0) * TILE.size) * TILE.size
        begin = tl.program_id(0) * length
        length = tl.maximum(tl.minimum(n - begin, length), 0)
    return begin, length


@triton.jit
def sums_of_chunks(partial_ptr, row, SUMS: tl.constexpr):
    """The two sums over each row from those of its chunks, of each of which there are ``SUMS`` numbers."""
    part = tl.arange(0, PARTS)[None, :]
    here, there = partial_ptr + (row[:, None] * PARTS + part) * SUMS, part < tl.num_programs(0)
    return tl.reduce((tl.load(here, mask=there, other=0.0), tl.load(here + 1, mask=there, other=0.0)), 1, add2)


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
def converted(x, dtype: tl.constexpr):
    """x in another dtype; float64 and half types meet in float32, which not every compiler can do by itself."""
    if (x.dtype == tl.float64) or (dtype == tl.float64):
        x = x if (x.dtype == tl.float64) and (dtype == tl.float64) else x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def load(x_rows, start, n, other, TILE: tl.constexpr):
    """A tile, and ``other`` beyond the row."""
    here = over(x_rows + start) + columns(TILE)
    if start + TILE.size <= n:
        x = converted(tl.load(here), TILE.dtype)
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
    return tl.where(there, converted(tl.load(here, mask=there), TILE.dtype), other)


@triton.jit
def store(y_rows, y, start, n, TILE: tl.constexpr):
    """Writes what there is of a tile."""
    here = over(y_rows + start) + columns(TILE)
    y = converted(y, y_rows.dtype.element_ty)
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

    tensors: tuple[Tensor | int, Tensor | int]
    k: float
    scale: float
    stride_k: int
    stride_scale: int

    @classmethod
    def of(cls, k: Tensor, scale: Tensor, device: torch.device) -> "Numbers":
        """From tensors of the batch shape."""
        (first, number, stride), (second, other, step) = (argument_of(v, device) for v in (k, scale))
        return cls((first, second), number, other, stride, step)


def argument_of(values: Tensor, device: torch.device) -> tuple[Tensor | int, float, int]:
    """What :func:`per_row` takes of k or a scale, from a tensor of the batch shape: tensor or 0, number and stride."""
    found = row_numbers(values, device)
    return (0, found.number, 0) if found.tensor is None else (found.tensor, 1.0, found.stride)


@triton.jit
def per_row(row, pointer, number, stride):
    """k or scale of rows, in float64: a number, or times one what a tensor has."""
    if pointer.dtype.is_ptr():
        return tl.load(pointer + row * stride) * number
    else:
        return tl.full(row.shape, number, tl.float64)
