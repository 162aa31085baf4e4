"""The derivative of the relaxed top-k masks in Triton; the formulas stand in :mod:`khot.kernels.threshold`.

Two passes over x and the cotangent g. With slopes w_i = F'(z_i), W = sum w, D = sum d, and a cotangent a of the row,

    mask        d_i = (g_i - a) w_i,    dL/dx_i = (w_i / s) (g_i - a - D / W),   dL/dk = a + D / W
    logarithm   d_i = g_i w_i / F(z_i), dL/dx_i = (d_i - w_i D / W) / s,         dL/dk = D / W

and dL/ds = -sum_i z_i dL/dx_i, which is found only if somebody asks for it. Differences to a leave nearly equal
cotangents their digits. A row whose slopes all underflow, or whose sums overflow, is flagged, see
:mod:`khot.kernels.threshold.triton_flagged`. Rows that are split take a launch for each of the two passes.
"""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..links.base import Link
from ..links.base_triton import log_derivative, tails_and_slopes, triton_link
from ..triton_tools import add2, add3, on_device, quotient, reciprocal, rows_of
from .triton_flagged import launch_flagged_backward
from .triton_rows import (
    PARTS,
    Tile,
    argument_of,
    chunk_of,
    converted,
    is_split,
    load,
    over,
    partial_sums,
    per_row,
    program_rows,
    smallest_unit,
    starts,
    store,
    sums_of_chunks,
    tile_of,
    tiny_of,
    underflow_of,
)

SUMS = tl.constexpr(8)  # room for the sums of a chunk


@triton.jit
def _row_numbers(
    row, anchor_ptr, offset_ptr, scale_ptr, scale_number, stride_scale, LINK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Anchor, offset in the link's unit, and the inverses of the scale, in that unit and as it is."""
    inverse = reciprocal(per_row(row, scale_ptr, scale_number, stride_scale).to(TILE.dtype))
    anchor, off = tl.load(anchor_ptr + row).to(TILE.dtype), tl.load(offset_ptr + row).to(TILE.dtype)
    return anchor, off * LINK.unit, inverse * LINK.unit, inverse


@triton.jit
def _terms(x, g, anchor, off, inverse, q, LINK: tl.constexpr, LOG: tl.constexpr):
    """z in the link's unit, F', and g times the derivative of the result, of a tile."""
    z = (x - over(anchor)) * over(inverse) - over(off)
    tail, w = tails_and_slopes(z, q, LINK)
    if LOG:
        d = tl.where(x > -float("inf"), g * log_derivative(z, w, tail, LINK), 0.0)
    else:
        d = g * w
    return z, w, d


@triton.jit
def _sums(x_rows, g_rows, n, anchor, off, inverse, a, q, LINK: tl.constexpr, LOG: tl.constexpr, TILE: tl.constexpr):
    """W and D of n entries of each row."""
    weight, direct = partial_sums(TILE), partial_sums(TILE)
    for start in range(0, n, TILE.size):
        x, g = load(x_rows, start, n, -float("inf"), TILE), load(g_rows, start, n, over(a), TILE)
        _, w, d = _terms(x, g - over(a), anchor, off, inverse, q, LINK, LOG)
        weight += tl.sum(w, 0)
        direct += tl.sum(d, 0)
    return tl.reduce((weight, direct), 1, add2)


@triton.jit
def _write(
    x_rows, g_rows, out_rows, n, anchor, off, inverse, unit, a, mean, q,
    LINK: tl.constexpr, LOG: tl.constexpr, WITH_SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes dL/dx of n entries of each row; returns the sums of -z dL/dx, dL/dx and z F', or zeros."""
    lever, left, reach = partial_sums(TILE), partial_sums(TILE), partial_sums(TILE)
    for start in range(0, n, TILE.size):
        x, g = load(x_rows, start, n, -float("inf"), TILE), load(g_rows, start, n, over(a), TILE)
        z, w, d = _terms(x, g - over(a), anchor, off, inverse, q, LINK, LOG)
        if LOG:
            grad = (d - w * over(mean)) * over(unit)
        else:
            grad = w * over(unit) * (g - over(a + mean))
        store(out_rows, grad, start, n, TILE)
        if WITH_SCALE:
            z = z * (1.0 / LINK.unit)
            lever -= tl.sum(tl.where(grad == 0, 0.0, grad * z), 0)  # z may be infinite
            left += tl.sum(grad, 0)
            reach += tl.sum(tl.where(w == 0, 0.0, w * z), 0)
    if WITH_SCALE:
        lever, left, reach = tl.reduce((lever, left, reach), 1, add3)
    else:
        lever, left, reach = 0.0 * a, 0.0 * a, 0.0 * a
    return lever, left, reach


@triton.jit
def _is_solved(weight, mean, lever, unit, LINK: tl.constexpr):
    """Whether nothing overflows, and slopes have not underflowed; those of a compact link may all be 0."""
    finite = (tl.abs(mean) < float("inf")) & (tl.abs(lever) < float("inf")) & (unit >= smallest_unit(unit.dtype))
    if LINK.compact and LINK.reaches_zero:
        return finite
    else:
        return finite & (weight >= underflow_of(weight.dtype))


@triton.jit(do_not_specialize=["stride_scale", "stride_x", "stride_g", "rows", "n"])
def _mask_bwd(
    x_ptr, g_ptr, out_ptr, at, scale_ptr, scale_number: tl.float64, stride_scale, stride_x, stride_g, rows, n,
    q_number: tl.float64, LINK: tl.constexpr, KIND: tl.constexpr, WITH_SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The rows of a program; of split rows the sums of a chunk, or its dL/dx from all sums, by ``TILE.stage``."""
    LOG: tl.constexpr = KIND == "log_mask"
    anchor_ptr, offset_ptr, grad_k_ptr, grad_scale_ptr, flag_ptr, partial_ptr = at
    row = program_rows(rows, TILE)
    anchor, off, inverse, unit = _row_numbers(
        row, anchor_ptr, offset_ptr, scale_ptr, scale_number, stride_scale, LINK, TILE
    )  # fmt: skip
    q = tl.full((), q_number, tl.float64).to(TILE.dtype)
    x_rows, g_rows = starts(x_ptr, row, stride_x, TILE), starts(g_ptr, row, stride_g, TILE)
    out_rows = starts(out_ptr, row, n, TILE)
    a = 0.0 * off if LOG else converted(tl.load(g_rows), TILE.dtype)
    begin, length = chunk_of(n, TILE)
    x_rows, g_rows, out_rows = x_rows + begin, g_rows + begin, out_rows + begin
    if TILE.stage == "write":
        weight, direct = sums_of_chunks(partial_ptr, row, SUMS)
    else:
        weight, direct = _sums(x_rows, g_rows, length, anchor, off, inverse, a, q, LINK, LOG, TILE)
    here = partial_ptr + (row * PARTS + tl.program_id(0)) * SUMS
    if TILE.stage == "sums":
        tl.store(here, weight)
        tl.store(here + 1, direct)
    else:
        mean = quotient(direct, tl.maximum(weight, tiny_of(TILE.dtype)))
        lever, left, reach = _write(
            x_rows, g_rows, out_rows, length, anchor, off, inverse, unit, a, mean, q, LINK, LOG, WITH_SCALE, TILE
        )
        left = quotient(left, tl.maximum(weight, tiny_of(TILE.dtype)))  # what rounding of the mean leaves of a zero
        if TILE.stage == "write":
            tl.store(here + 2, lever)
            tl.store(here + 3, left)
            tl.store(here + 4, reach)
            lever = 0.0 * left
        else:
            lever += left * reach
            tl.store(grad_scale_ptr + row, lever.to(tl.float64))
        tl.store(grad_k_ptr + row, tl.where(weight > 0, a + mean, 0.0).to(tl.float64))
        tl.store(flag_ptr + row, 1 - _is_solved(weight, mean, lever, unit, LINK).to(tl.int32))


def launch_backward(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: Link,
    kind: str = "mask", with_scale: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dL/dx like x, dL/dk and dL/dscale in float64 of the batch shape, from dL/dy (or dL/d log y) = ``grad``.

    dL/dscale is not asked for without ``with_scale``, and no more than a number then.
    """
    items, g = rows_of(x), rows_of(grad)
    rows, n = items.shape
    grad_x = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    grad_k, grad_scale = (torch.empty(rows, dtype=torch.float64, device=x.device) for _ in range(2))
    flags = torch.empty(rows, dtype=torch.int32, device=x.device)
    at = (anchor.reshape(-1).contiguous(), offset.reshape(-1).contiguous(), grad_k, grad_scale, flags)
    numbers = argument_of(scale, x.device)
    tile = tile_of(items, g, grad_x, double=x.dtype == torch.float64)
    numbers_of_all = *numbers, items.stride(0), g.stride(0), rows, n, float(link.q)
    options = {"LINK": triton_link(link), "KIND": kind, "num_warps": tile.warps}
    with on_device(x):
        if is_split(rows, n):
            _launch_split(items, g, grad_x, at, numbers_of_all, with_scale, tile, options)
        else:
            grid = (triton.cdiv(rows, tile.rows),)
            _mask_bwd[grid](items, g, grad_x, (*at, flags), *numbers_of_all, WITH_SCALE=with_scale, TILE=tile, **options)
        launch_flagged_backward(items, g, grad_x, at, numbers, link, kind)
    batch = x.shape[:-1]
    return grad_x.reshape(x.shape), grad_k.reshape(batch), grad_scale.reshape(batch)


def _launch_split(
    x: Tensor, g: Tensor, grad_x: Tensor, at: tuple[Tensor, ...], numbers: tuple[Any, ...], with_scale: bool,
    tile: Tile, options: dict[str, Any],
) -> None:  # fmt: skip
    rows, n = x.shape
    dtype = torch.float64 if tile.dtype == tl.float64 else torch.float32
    grid = tile.splits(rows, n), rows
    partial = torch.empty((rows, PARTS.value, SUMS.value), dtype=dtype, device=x.device)
    for stage in ("sums", "write"):
        part = replace(tile, stage=stage)
        _mask_bwd[grid](x, g, grad_x, (*at, partial), *numbers, WITH_SCALE=with_scale, TILE=part, **options)
    if with_scale:
        lever, left, reach = partial[:, : grid[0], 2:5].sum(1, dtype=torch.float64).unbind(-1)
        torch.addcmul(lever, left, reach, out=at[3])


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, kind: str, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_backward(x, scale, anchor, offset, grad, Link.find(link), kind, with_scale)
