"""How the Triton kernels of :mod:`khot.kernels.threshold` process rows of scores.

A program takes ``TILE.rows`` rows and reads them again in every pass, ``TILE.size`` columns at a time. Rows of up to
some 10^4 entries stay in the first-level cache, so nothing has to be held in registers. There are few kinds of tiles,
and Triton specialises none of a kernel's integers, so few kernels are compiled:

    short rows  4 rows in a warp, 8 threads per row: scalars of a row cost a quarter of an instruction
    rows        a row in 1 to 8 warps, the more the longer it is; aligned rows are read 16 bytes at a time
    split rows  several programs of 8 warps for a row, each with a chunk of its columns
    flagged     a row in 4 warps, in float64; a program looks at the flags of several rows

A tile is ``(unroll, rows, width)``. A thread has all ``unroll`` entries of a column and reduces them by itself; only
the remaining ``width`` at the end of a pass is reduced across threads.

Numbers of a row are tensors ``(rows,)`` in the dtype of the arithmetic. Distances from the threshold are
z = (x - anchor) / scale - offset, in the link's unit; lanes beyond a row have -inf.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.launch import Grid, launch_each
from ..gpu.plans import PROGRAMS, is_split
from ..gpu.target import compiles_for_cuda
from ..gpu.tools import add2
from ..operators.platforms import MAX_N

SHORT = 128  # entries of the longest rows of which several share a warp
# For rows of up to so many entries: unroll, width and warps. The fastest on an H100 of those that spill no registers on
# any device (benchmarks/README.md).
Sizes = tuple[tuple[int, tuple[int, int, int]], ...]
ALIGNED: Sizes = (
    (512, (2, 128, 1)), (1024, (2, 256, 2)), (2048, (4, 256, 2)), (8192, (4, 512, 4)), (MAX_N, (2, 1024, 8)),
)  # fmt: skip
ALIGNED_PAIRS: Sizes = ((512, (2, 128, 1)), (1024, (2, 256, 2)), (2048, (4, 512, 4)), (MAX_N, (4, 1024, 8)))
UNALIGNED: Sizes = ((512, (8, 32, 1)), (1024, (4, 64, 2)), (4096, (8, 128, 4)), (MAX_N, (8, 256, 8)))
DOUBLE: Sizes = ((4096, (8, 32, 1)), (MAX_N, (2, 256, 2)))
DOUBLE_PAIRS: Sizes = ((512, (8, 32, 1)), (MAX_N, (8, 64, 2)))
FEW_DOUBLE: Sizes = ((512, (8, 32, 1)), (MAX_N, (4, 128, 4)))
REGISTERS = 128  # at most so many for a thread; the assembler on its own would spill some at about a hundred
PARTS = tl.constexpr(triton.next_power_of_2(PROGRAMS))
FLAGS = tl.constexpr(16)  # a program looks at no more flags than these
FLAGGED_PROGRAMS = 2 * PROGRAMS  # programs for flagged rows; so many fit on a large device at the same time


@dataclass(frozen=True)
class Tile:
    """The part of its rows that a program holds at a time, and its arithmetic.

    Attributes:
        rows: Rows of a program.
        unroll: Entries of a row that a thread has, or groups of ``width / threads``.
        width: Columns between two of them.
        warps: Warps of a program.
        single: Whether the computing dtype of the scores is float32; anchors are numbers of this dtype. The arithmetic
            may still be in float64.
        double: Whether the arithmetic is in float64.
        aligned: Whether rows start at multiples of 16 bytes and have a multiple of 4 entries.
        stage: The task of a kernel: all for whole "rows", or for those that are "flagged"; for split rows the
            "start", a "step" or the "end".
    """

    rows: int
    unroll: int
    width: int
    warps: int
    single: bool
    double: bool
    aligned: bool = False
    stage: str = "rows"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a launch."""
        bounded = compiles_for_cuda() and (self.stage == "flagged" or not self.double)
        registers = {"maxnreg": REGISTERS} if bounded else {}
        return {"num_warps": self.warps, **registers}

    @property
    def dtype(self) -> tl.dtype:
        return tl.float64 if self.double else tl.float32

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def size(self) -> int:
        """The number of columns."""
        return self.unroll * self.width

    @property
    def factor(self) -> float:
        """The factor of scores and scales: differences of halves do not overflow."""
        return 0.5 if self.stage == "flagged" else 1.0

    @property
    def eps(self) -> float:
        return torch.finfo(self.torch_dtype).eps

    @property
    def tiny(self) -> float:
        return torch.finfo(self.torch_dtype).tiny

    @property
    def underflow(self) -> float:
        """A sum of tails or slopes below which some have lost digits."""
        return self.tiny / self.eps

    @property
    def tolerance(self) -> float:
        """A last step, in scales, after which quadratic convergence leaves about eps."""
        return 0.5 * self.eps**0.5

    @property
    def largest_scale(self) -> float:
        """A scale above which differences of scores may overflow without being many scales."""
        return 2.0**500 if self.double else 2.0**64

    @property
    def scales(self) -> tuple[float, float]:
        """The normal numbers of the computing dtype of the scores."""
        limits = torch.finfo(torch.float32 if self.single else torch.float64)
        return limits.tiny, limits.max

    def at_stage(self, stage: str) -> "Tile":
        """The same tile at another stage."""
        return _tile(*astuple(self)[:-1], stage)

    def grid(self, rows: int, n: int) -> Grid:
        """The numbers of programs for a tensor ``(rows, n)``."""
        if self.stage == "flagged":
            return max(min(rows, FLAGGED_PROGRAMS), -(-rows // FLAGS.value)), 1, 1
        if self.stage == "start":
            return rows, 1, 1
        return (-(-rows // self.rows), 1, 1) if self.stage == "rows" else (self.splits(rows, n), rows, 1)

    def splits(self, rows: int, n: int) -> int:
        """The number of programs for each of a few rows, with a whole number of tiles each."""
        programs = max(1, min(PROGRAMS // rows, -(-n // self.size)))
        return -(-n // (-(-n // (programs * self.size)) * self.size))


_tile = functools.cache(Tile)  # which is compared faster if it is the same object


def tile_of(*rows: Tensor, double: bool = False, pairs: bool = False) -> Tile:
    """The tile for tensors ``(rows, n)`` that are read or written together; in float64 if they are, or ``double``.

    With ``pairs``, a thread holds scores and cotangents.
    """
    (number, n), single = rows[0].shape, rows[0].dtype != torch.float64
    double = double or not single
    if is_split(number, n):
        return _tile(1, 8, 256, 8, single, double, False, "step")
    if n <= SHORT:
        return _tile(4, 4 if double else 8, 8, 1, single, double, False, "rows")
    aligned = n % 4 == 0 and all((v.stride(0) * v.element_size()) % 16 == v.data_ptr() % 16 == 0 for v in rows)
    if double:
        table = FEW_DOUBLE if number <= PROGRAMS else DOUBLE_PAIRS if pairs else DOUBLE
    elif aligned:
        table = ALIGNED_PAIRS if pairs else ALIGNED
    else:
        table = UNALIGNED
    sizes = next(sizes for longest, sizes in table if n <= longest)
    return _tile(1, *sizes, single, double, aligned, "rows")


def flagged_tile(x: Tensor) -> Tile:
    """The tile for flagged rows of a tensor ``(rows, n)``."""
    return _tile(1, 2, 128, 4, x.dtype != torch.float64, True, False, "flagged")


def launch_tiles(
    kernel: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...], tiles: tuple[Tile, ...], shape: torch.Size,
    kinds: Any,
) -> None:  # fmt: skip
    """Launches a kernel for rows of this shape, once with each tile.

    Args:
        kernel: A kernel whose last constexpr is a tile.
        arguments: Its arguments.
        constants: Its other constexprs.
        tiles: The tiles.
        shape: That of the rows.
        kinds: The :func:`~khot.kernels.gpu.launch.kind_of` arguments that do not follow from the others.
    """

    def parts() -> Iterator[tuple[Grid, tuple[Any, ...], dict[str, Any]]]:
        for tile in tiles:
            yield tile.grid(*shape), (*constants, tile), tile.options

    launch_each(kernel, arguments, (arguments[0].device, constants, tiles, shape, kinds), parts)


@triton.jit
def look_at_flags(flag_ptr, rows):
    """Where the rows of a program for flagged rows begin and end, and whether one of them is flagged."""
    number = tl.cdiv(rows, tl.num_programs(0))
    begin = tl.program_id(0) * number
    end = tl.minimum(begin + number, rows)
    row = begin + tl.arange(0, FLAGS)
    return begin, end, tl.max(tl.load(flag_ptr + row, mask=row < end, other=0), 0) > 0


@triton.jit
def program_rows(rows, TILE: tl.constexpr):
    """The rows of this program, (rows,); beyond the last row this row is repeated, with the same result."""
    ROWS: tl.constexpr = TILE.rows
    if (TILE.stage == "step") or (TILE.stage == "end"):
        row = tl.program_id(1) + tl.arange(0, ROWS)
    else:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return tl.minimum(row, rows - 1).to(tl.int64)


@triton.jit
def chunk_of(n, TILE: tl.constexpr):
    """Where the columns of this program begin, and their number: all, or whole tiles except for the last program."""
    if (TILE.stage == "step") or (TILE.stage == "end"):
        length = tl.cdiv(n, tl.num_programs(0) * TILE.size) * TILE.size
        begin = tl.program_id(0) * length
        return begin, tl.maximum(tl.minimum(n - begin, length), 0)
    else:
        return 0, n


@triton.jit
def sums_of_chunks(partial_ptr, row, SUMS: tl.constexpr):
    """The two sums over each row, added up from its chunks; each chunk stores ``SUMS`` numbers."""
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
    """The columns of a tile, (unroll, 1, width)."""
    UNROLL: tl.constexpr = TILE.unroll
    WIDTH: tl.constexpr = TILE.width
    return (tl.arange(0, UNROLL) * WIDTH)[:, None, None] + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def converted(x, dtype: tl.constexpr):
    """x in another dtype; float64 and half types are converted through float32, which not every compiler does."""
    if (x.dtype == tl.float64) != (dtype == tl.float64):
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def _places(begins, TILE: tl.constexpr):
    """Pointers to the entries of a tile.

    If rows share a warp, each must have threads of its own. Triton distributes the threads of a warp over the axis of
    columns, and then over the next most contiguous one. Of two such axes, releases before 3.7 take the unrolled one.
    This hint avoids the tie. It has no other effect: accesses are widened along columns only.
    """
    WIDTH: tl.constexpr = TILE.width
    places = over(begins) + columns(TILE)
    return tl.max_contiguous(places, [1, 2, WIDTH]) if TILE.rows > 1 else places


@triton.jit
def load(x_rows, start, n, other, TILE: tl.constexpr):
    """A tile, with ``other`` beyond the row."""
    here = _places(x_rows + start, TILE)
    if start + TILE.size <= n:
        x = converted(tl.load(here), TILE.dtype)
    else:
        x = _load_part(here, left_of(start, n, TILE), other, TILE)
    return x


@triton.jit
def scores(x_rows, start, n, TILE: tl.constexpr):
    """A tile of scores, halved if differences might overflow; -inf beyond the row."""
    x = load(x_rows, start, n, -float("inf"), TILE)
    return x * TILE.factor if TILE.factor != 1.0 else x


@triton.jit
def _load_part(here, left, other, TILE: tl.constexpr):
    there = columns(TILE) < left
    return tl.where(there, converted(tl.load(here, mask=there), TILE.dtype), other)


@triton.jit
def store(y_rows, y, start, n, TILE: tl.constexpr):
    """Writes the part of a tile that lies in the row."""
    here = _places(y_rows + start, TILE)
    y = converted(y, y_rows.dtype.element_ty)
    if start + TILE.size <= n:
        tl.store(here, y)
    else:
        _store_part(here, y, left_of(start, n, TILE), TILE)


@triton.jit
def _store_part(here, y, left, TILE: tl.constexpr):
    tl.store(here, y, mask=columns(TILE) < left)


@triton.jit
def store_numbers(at, numbers):
    """Writes several numbers of a row one after another."""
    for i in tl.static_range(len(numbers)):
        tl.store(at + i, numbers[i])


@triton.jit
def left_of(start, n, TILE: tl.constexpr):
    """The number of columns that are left, this one included."""
    return tl.multiple_of(n - start, 4) if TILE.aligned else n - start


@triton.jit
def partial_sums(TILE: tl.constexpr):
    """Zeros, one for each row and each column of a tile's width."""
    ROWS: tl.constexpr = TILE.rows
    WIDTH: tl.constexpr = TILE.width
    return tl.zeros((ROWS, WIDTH), TILE.dtype)


@triton.jit
def over(numbers):
    """Numbers of rows as (1, rows, 1)."""
    return numbers[None, :, None]


@triton.jit
def distances(x, anchor, off, inverse):
    """z of a tile, in the link's unit if the offset and the inverse of the scale are."""
    return (x - over(anchor)) * over(inverse) - over(off)


@triton.jit
def any_row(flags):
    """Whether the flag of one of the rows is set."""
    return tl.max(flags.to(tl.int32), 0) > 0


@triton.jit
def per_row(row, pointer, number, stride):
    """k or scale of rows, in float64: a number times the entry of a tensor, which is 1 if there is only a number."""
    if pointer.dtype.is_ptr():
        return tl.load(pointer + row * stride) * number
    else:
        return tl.full(row.shape, number, tl.float64)


class Argument(NamedTuple):
    """k or a scale as arguments of a kernel for :func:`per_row`; the tensor is 0 if there is none."""

    tensor: Tensor | int
    number: float
    stride: int

    @classmethod
    def of(cls, values: Tensor | float, device: torch.device) -> "Argument":
        """The arguments for one number for all rows, which may be a tensor on a CPU, or for one number for each."""
        if not isinstance(values, Tensor):
            return cls(0, float(values), 0)
        if values.device != device:
            return cls(0, values.flatten()[0].item(), 0)
        values = values.reshape(-1)
        return cls(values, 1.0, values.stride(0))
