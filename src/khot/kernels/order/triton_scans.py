"""The decayed sums of :mod:`khot.kernels.order` in Triton, as scans of affine maps.

To the right, the sum s at an item follows from that at its neighbour by s -> a s + a v, with the decay a <= 1 over the
gap between them and the neighbour's weight v; likewise to the left. Such maps compose associatively, for any gaps.

A row that fits on chip is scanned by one program. For longer rows, each tile is scanned by itself for the single map
that it amounts to; one program per row composes these maps; then the tiles are scanned again from their initial values.
This reads the row twice and takes three launches, whether there are many long rows or one.

Layout: gaps, weights and sums (rows, n), contiguous, all in float64.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import DOUBLE, Plan, Table, plan
from ..gpu.tools import on_device, rows_of

SCANS: Table = {torch.float64: DOUBLE}
CARRIES = 1024  # tiles that are composed at a time


@triton.jit
def compose(a0, b0, a1, b1):
    """s -> a1 (a0 s + b0) + b1."""
    return a0 * a1, a1 * b0 + b1


@triton.jit
def compose_two(a0, b0, c0, a1, b1, c1):
    """Two maps with the same decay."""
    return a0 * a1, a1 * b0 + b1, a1 * c0 + c1


@triton.jit
def decays(to_left, to_right, cols, n):
    """The factor of weight that reaches each item from neighbours at these distances; 1 (neutral) beyond the row."""
    from_left = tl.where(cols > 0, tl.exp(-tl.maximum(to_left, 0.0)), 0.0)
    from_right = tl.where(cols < n - 1, tl.exp(-tl.maximum(to_right, 0.0)), 0.0)
    return tl.where(cols < n, from_left, 1.0), tl.where(cols < n, from_right, 1.0)


@triton.jit
def to_double(v):
    """The number in float64; half types are converted by way of float32, as in hardware."""
    if v.dtype == tl.float64:
        return v
    else:
        return v.to(tl.float32).to(tl.float64)


@triton.jit
def to_dtype(v, DTYPE: tl.constexpr):
    """From float64 to DTYPE; to half types by way of float32, as in hardware."""
    if DTYPE == tl.float64 or DTYPE == tl.float32:
        return v.to(DTYPE)
    else:
        return v.to(tl.float32).to(DTYPE)


@triton.jit
def load_three(ptr, cols, n):
    """The entries at cols, and those of their left and right neighbours; 0 beyond the row."""
    here = tl.load(ptr + cols, mask=cols < n, other=0.0)
    left = tl.load(ptr + cols - 1, mask=(cols > 0) & (cols < n), other=0.0)
    right = tl.load(ptr + cols + 1, mask=cols < n - 1, other=0.0)
    return to_double(here), to_double(left), to_double(right)


@triton.jit
def _at(v, cols, col):
    return tl.sum(tl.where(cols == col, v, 0.0), 0)


@triton.jit
def _tile_maps(gap_ptr, left_ptr, right_ptr, row, n, cols):
    """The maps that lead to each item from the left and the right end of its tile."""
    to_left, _, to_right = load_three(gap_ptr + row * n, cols, n)
    from_left, from_right = decays(to_left, to_right, cols, n)
    _, left, _ = load_three(left_ptr + row * n, cols, n)
    _, _, right = load_three(right_ptr + row * n, cols, n)
    a_left, b_left = tl.associative_scan((from_left, from_left * left), 0, compose)
    a_right, b_right = tl.associative_scan((from_right, from_right * right), 0, compose, reverse=True)
    return a_left, b_left, a_right, b_right


@triton.jit
def _tile_totals(gap_ptr, left_ptr, right_ptr, totals_ptr, n, tiles, BLOCK: tl.constexpr):
    """The maps of a whole tile: totals (4, rows, tiles)."""
    program, stride = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    row, start = program // tiles, (program % tiles).to(tl.int32) * BLOCK
    lanes = tl.arange(0, BLOCK)
    a_left, b_left, a_right, b_right = _tile_maps(gap_ptr, left_ptr, right_ptr, row, n, start + lanes)
    tl.store(totals_ptr + program, _at(a_left, lanes, BLOCK - 1))
    tl.store(totals_ptr + stride + program, _at(b_left, lanes, BLOCK - 1))
    tl.store(totals_ptr + 2 * stride + program, _at(a_right, lanes, 0))
    tl.store(totals_ptr + 3 * stride + program, _at(b_right, lanes, 0))


@triton.jit
def _tile_carries(totals_ptr, carries_ptr, tiles, BLOCK: tl.constexpr):
    """The sums with which each tile of one row starts: carries (2, rows, tiles)."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    lanes, stride = tl.arange(0, BLOCK), rows * tiles
    totals_ptr += row * tiles
    carries_ptr += row * tiles
    carry = tl.zeros((), tl.float64)
    for start in range(0, tiles, BLOCK):
        tile = start + lanes
        there = (tile > 0) & (tile < tiles)  # a tile starts with the result of those before it
        a = tl.load(totals_ptr + tile - 1, mask=there, other=1.0)
        b = tl.load(totals_ptr + stride + tile - 1, mask=there, other=0.0)
        a, b = tl.associative_scan((a, b), 0, compose)
        sums = a * carry + b
        tl.store(carries_ptr + tile, sums, mask=tile < tiles)
        carry = _at(sums, lanes, BLOCK - 1)
    carry = tl.zeros((), tl.float64)
    for start in range(0, tiles, BLOCK):
        tile = tiles - 1 - start - lanes  # from the right
        there = (tile >= 0) & (tile < tiles - 1)
        a = tl.load(totals_ptr + 2 * stride + tile + 1, mask=there, other=1.0)
        b = tl.load(totals_ptr + 3 * stride + tile + 1, mask=there, other=0.0)
        a, b = tl.associative_scan((a, b), 0, compose)
        sums = a * carry + b
        tl.store(carries_ptr + stride + tile, sums, mask=tile >= 0)
        carry = _at(sums, lanes, BLOCK - 1)


@triton.jit
def _decayed_sums(
    gap_ptr, left_ptr, right_ptr, before_ptr, after_ptr, carries_ptr, n, tiles,
    HAS_CARRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of a tile."""
    program, stride = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    row, start = program // tiles, (program % tiles).to(tl.int32) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    a_left, before, a_right, after = _tile_maps(gap_ptr, left_ptr, right_ptr, row, n, cols)
    if HAS_CARRIES:
        before += a_left * tl.load(carries_ptr + program)
        after += a_right * tl.load(carries_ptr + stride + program)
    tl.store(before_ptr + row * n + cols, before, mask=cols < n)
    tl.store(after_ptr + row * n + cols, after, mask=cols < n)


def decayed_sums(z: Tensor | None, gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    rows, left, right = (rows_of(v).contiguous() for v in (gap, left, right))
    before, after = torch.empty_like(rows), torch.empty_like(rows)
    n, how = rows.shape[1], plan(len(rows), rows.shape[1], torch.float64, SCANS)
    with on_device(gap):
        if how.resident:
            _decayed_sums[(len(rows),)](
                rows, left, right, before, after, rows, n, 1, HAS_CARRIES=False, BLOCK=how.block, num_warps=how.warps
            )
        else:
            _launch_tiles(rows, left, right, before, after, how)
    return before.reshape(gap.shape), after.reshape(gap.shape)


def _launch_tiles(gap: Tensor, left: Tensor, right: Tensor, before: Tensor, after: Tensor, how: Plan) -> None:
    (rows, n), tiles = gap.shape, triton.cdiv(gap.shape[1], how.block)
    totals, carries = gap.new_empty(4, rows, tiles), gap.new_empty(2, rows, tiles)
    options = {"BLOCK": how.block, "num_warps": how.warps}
    _tile_totals[(rows * tiles,)](gap, left, right, totals, n, tiles, **options)
    _tile_carries[(rows,)](totals, carries, tiles, BLOCK=CARRIES, num_warps=how.warps)
    _decayed_sums[(rows * tiles,)](gap, left, right, before, after, carries, n, tiles, HAS_CARRIES=True, **options)
