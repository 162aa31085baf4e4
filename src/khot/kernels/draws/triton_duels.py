"""The duels of :mod:`khot.kernels.draws` in Triton: one program goes through a draw, a tile at a time.

The unit in the seat is the last one that took it, found by a running maximum; between tiles it is one number.

Layout: take, total, kind (rows, n), unit last stride; x (draws, n), the rows of a sample one after another.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import DOUBLE, Table, plan
from ..gpu.random_numbers import place_of, random_words, uniform_double
from ..gpu.tools import on_device, rows_of, store_tile
from . import reference_duels as reference

DUELS: Table = {torch.float64: DOUBLE}
CROSSING, EMPTY = tl.constexpr(reference.CROSSING), tl.constexpr(reference.EMPTY)
CERTAIN = tl.constexpr(reference.CERTAIN)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["first_draw", "first_row", "first_unit"])
def _ordered_duels(
    take_ptr, total_ptr, kind_ptr, x_ptr, seed_ptr, stride_take, stride_total, stride_kind, stride_x, rows, n,
    first_draw, first_row, first_unit, BLOCK: tl.constexpr,
):  # fmt: skip
    serial = tl.program_id(0)
    draw, number = place_of(serial, rows, first_draw, first_row)
    row = (serial % rows).to(tl.int64)
    x_ptr += serial.to(tl.int64) * stride_x
    seed = tl.load(seed_ptr)
    lane = tl.arange(0, BLOCK)
    sitting = tl.full((), -1, tl.int32)
    for start in range(0, n, BLOCK):
        unit = start + lane  # (BLOCK,)
        there = unit < n
        take = tl.load(take_ptr + row * stride_take + unit, mask=there, other=0.0)
        total = tl.load(total_ptr + row * stride_total + unit, mask=there, other=0.0)
        kind = tl.load(kind_ptr + row * stride_kind + unit, mask=there, other=0).to(tl.int32)
        a, b, c, d = random_words(seed, draw, number, (start + first_unit) // 2 + tl.arange(0, BLOCK // 2))
        u = uniform_double(tl.interleave(a, c), tl.interleave(b, d))
        takes = (u * total < take) | ((kind & EMPTY) > 0)
        seat = tl.maximum(tl.associative_scan(tl.where(takes, unit, -1), 0, _larger), sitting)
        carrier = tl.where(lane > 0, tl.gather(seat, tl.maximum(lane - 1, 0), 0), sitting)
        chosen = tl.where(takes, carrier, unit)
        store_tile(x_ptr, tl.where((kind & CERTAIN) > 0, 1.0, 0.0), start, n, BLOCK)
        tl.debug_barrier()  # the next store overwrites this one
        one = tl.full((BLOCK,), 1.0, tl.float32).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + chosen, one, mask=there & ((kind & CROSSING) > 0) & (chosen >= 0))
        sitting = tl.max(seat, 0)


def ordered_duels_draw(
    take: Tensor,
    total: Tensor,
    kind: Tensor,
    seed: Tensor,
    first: Sequence[int],
    draws: int,
    dtype: torch.dtype,
) -> Tensor:
    take, total, kind, shape = rows_of(take), rows_of(total), rows_of(kind), take.shape
    rows, n = take.shape
    how = plan(rows, n, torch.float64, DUELS)
    x = torch.empty(draws * rows, n, dtype=dtype, device=take.device)
    with on_device(take):
        _ordered_duels[(draws * rows,)](
            take, total, kind, x, seed, take.stride(0), total.stride(0), kind.stride(0), x.stride(0), rows, n, *first,
            BLOCK=how.block, num_warps=how.warps,
        )  # fmt: skip
    return x.reshape(draws, *shape)
