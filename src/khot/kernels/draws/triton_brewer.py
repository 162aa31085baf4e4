"""Brewer's draws in Triton: one program makes all steps of a draw, with the row on chip.

The unit of a step is the first one whose cumulative weight exceeds a uniform share of the total. The scan adds in its
own order, so rounding may make it fall: units without a weight are excluded from the search.

Layout: probs (rows, n), unit last stride; k (rows,); x (draws, n), the rows of a sample one after another. Arithmetic
is in float64, whatever the dtype of probs.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.random_numbers import place_of, random_words, uniform_double
from ..gpu.tools import store_tile
from .triton_tournament import balance, draw_by_programs


@triton.jit
def _unit_of(weight, lane, share, BLOCK: tl.constexpr):
    """The first unit whose cumulative weight exceeds the share of the total; the last with a weight if none does."""
    cumulative, has_weight = tl.cumsum(weight, 0), weight > 0
    beyond = has_weight & (cumulative > share * tl.sum(weight, 0))
    last = tl.max(tl.where(has_weight, lane, 0), 0)
    return tl.minimum(tl.min(tl.where(beyond, lane, BLOCK), 0), last)


@triton.jit(do_not_specialize=["first_draw", "first_row", "first_unit"])
def _brewer_draw(
    p_ptr, x_ptr, k_ptr, seed_ptr, stride_p, stride_x, stride_k, rows, batch, n, first_draw, first_row, first_unit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    serial = tl.program_id(0)
    draw, number = place_of(serial, batch, first_draw, first_row)
    row = (serial % rows).to(tl.int64)
    x_ptr += serial.to(tl.int64) * stride_x
    lane = tl.arange(0, BLOCK)
    k = tl.load(k_ptr + row * stride_k)
    p = balance(tl.load(p_ptr + row * stride_p + lane, mask=lane < n, other=0.0).to(tl.float64), k)  # (BLOCK,)
    a, b, c, d = random_words(tl.load(seed_ptr), draw, number, first_unit // 2 + tl.arange(0, BLOCK // 2))
    u = uniform_double(tl.interleave(a, c), tl.interleave(b, d))
    drawn = p >= 1
    free, rest = tl.where(drawn, 0.0, p), tl.where(drawn, 1.0, 1.0 - p)
    distance = tl.zeros((), tl.float64)
    left = k.to(tl.int32) - tl.sum(drawn.to(tl.int32), 0)
    while left > 0:
        m = left.to(tl.float64)
        weight = free * (1.0 + (m - 1.0) * (m + distance) / (distance + m * rest))
        unit = _unit_of(weight, lane, tl.sum(tl.where(lane == left - 1, u, 0.0), 0), BLOCK)
        distance += tl.sum(tl.where(lane == unit, rest, 0.0), 0)
        drawn, free = drawn | (lane == unit), tl.where(lane == unit, 0.0, free)
        left -= 1
    store_tile(x_ptr, drawn.to(tl.float32), 0, n, BLOCK)


def brewer_draw(probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype) -> Tensor:
    return draw_by_programs(_brewer_draw, probs, k, seed, first, draws, dtype)
