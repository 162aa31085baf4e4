"""The derivative of the relaxed top-k masks in Triton; :mod:`khot.kernels.threshold` has the formulas.

There are two passes over x and the cotangent g. With slopes w_i = F'(z_i), W = sum w, D = sum d, and a cotangent a:

    mask        d_i = (g_i - a) w_i,    dL/dx_i = (w_i / s) (g_i - a - D / W),   dL/dk = a + D / W
    logarithm   d_i = g_i w_i / F(z_i), dL/dx_i = (d_i - w_i D / W) / s,         dL/dk = D / W

and dL/ds = -sum_i z_i dL/dx_i, which is computed only on request. Subtracting a preserves the digits of nearly equal
cotangents. Split rows take a launch for each of the two passes.

A row whose slopes all underflow, or whose sums overflow, is flagged, and a second launch of the same kernel processes
it in float64. If the slopes underflow there, too, t lies in a gap in which z has lost digits of x, and shares of slopes
come from :mod:`khot.kernels.threshold.triton_gaps`.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._contents import checks_contents

from ..gpu.launch import kind_of
from ..gpu.plans import is_split
from ..gpu.tools import FARTHEST_64, add2, add3, in_shape, on_device, quotient, reciprocal, rows_of
from ..links.base import Link
from ..links.base_triton import log_derivative, tails_and_slopes, triton_link
from .kinds import Kind, Recipe, Solved
from .triton_forward import has_invalid, launch_forward
from .triton_gaps import neighbours, relative_slopes, weigh_sides
from .triton_rows import (
    PARTS,
    Argument,
    Tile,
    any_row,
    chunk_of,
    converted,
    distances,
    flagged_tile,
    launch_tiles,
    load,
    look_at_flags,
    over,
    partial_sums,
    per_row,
    program_rows,
    scores,
    starts,
    store,
    store_numbers,
    sums_of_chunks,
    tile_of,
)

SUMS = tl.constexpr(8)  # numbers stored for the sums of a chunk
FAR = tl.constexpr(2.0**-100)  # a sum of slopes in float64 below which z has lost digits
SHRUNK, GROWN = tl.constexpr(2.0**-32), tl.constexpr(2.0**32)


@triton.jit
def _terms(x, g, anchor, off, inverse, q, LINK: tl.constexpr, LOG: tl.constexpr):
    """z in the link's unit, F', and g times the derivative of the result, for a tile."""
    z = distances(x, anchor, off, inverse)
    tail, w = tails_and_slopes(z, q, LINK)
    if LOG:
        d = tl.where(x > -float("inf"), g * log_derivative(z, w, tail, LINK), 0.0)
    else:
        d = g * w
    return z, w, d


@triton.jit
def _sums(x_rows, g_rows, n, anchor, off, inverse, a, q, LINK: tl.constexpr, LOG: tl.constexpr, TILE: tl.constexpr):
    """W and D of n entries of each row and, for flagged rows, D of those below t only."""
    weight, direct, below = partial_sums(TILE), partial_sums(TILE), partial_sums(TILE)
    for start in range(0, n, TILE.size):
        x, g = scores(x_rows, start, n, TILE), load(g_rows, start, n, over(a), TILE)
        z, w, d = _terms(x, g - over(a), anchor, off, inverse, q, LINK, LOG)
        weight += tl.sum(w, 0)
        direct += tl.sum(d, 0)
        if TILE.stage == "flagged":
            below += tl.sum(tl.where(z > 0, 0.0, d), 0)
    if TILE.stage == "flagged":
        return tl.reduce((weight, direct, below), 1, add3)
    else:
        weight, direct = tl.reduce((weight, direct), 1, add2)
        return weight, direct, direct


@triton.jit
def _gap(x_rows, g_rows, n, anchor, off, scale, LINK: tl.constexpr, TILE: tl.constexpr):
    """The gap that contains t, as for :func:`relative_slopes`, factors of the slopes, and sums of share * g."""
    inverse, cut = reciprocal(scale), LINK.cap * LINK.unit if LINK.compact else 0.0
    left, right, _ = neighbours(x_rows, n, anchor, off, inverse * LINK.unit, cut, TILE)
    of_above, of_below, above, below = weigh_sides(x_rows, g_rows, n, left, right, inverse, LINK, TILE)
    return left, right, inverse, of_above, of_below, above, below


@triton.jit
def _write(
    x_rows, g_rows, out_rows, n, anchor, off, inverse, unit, a, mean, q, gap,
    LINK: tl.constexpr, LOG: tl.constexpr, WITH_SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes dL/dx of n entries of each row; returns the sums of -z dL/dx, dL/dx and z F', the first two times s."""
    lever, left, reach = partial_sums(TILE), partial_sums(TILE), partial_sums(TILE)
    for start in range(0, n, TILE.size):
        x, g = scores(x_rows, start, n, TILE), load(g_rows, start, n, over(a), TILE)
        z, w, d = _terms(x, g - over(a), anchor, off, inverse, q, LINK, LOG)
        if LOG:
            if TILE.stage == "flagged":
                slope, above = relative_slopes(x, gap[1], gap[2], gap[3], LINK)
                w = tl.where(over(gap[0]), slope * tl.where(above, over(gap[4]), over(gap[5])), w)
            pull = d - w * over(mean)
        else:
            pull = w * (g - over(a + mean))
        store(out_rows, pull * over(unit), start, n, TILE)
        if WITH_SCALE:  # z may be infinite
            z = z * (1.0 / LINK.unit)
            if TILE.stage == "flagged":
                z = tl.minimum(tl.maximum(z, -FARTHEST_64), FARTHEST_64) * SHRUNK
            lever -= tl.sum(tl.where(pull == 0, 0.0, pull * z), 0)
            left += tl.sum(pull, 0)
            reach += tl.sum(tl.where(w == 0, 0.0, w * z), 0)
    if WITH_SCALE:
        lever, left, reach = tl.reduce((lever, left, reach), 1, add3)
    else:
        lever, left, reach = 0.0 * mean, 0.0 * mean, 0.0 * mean
    return lever, left, reach


@triton.jit
def _is_solved(weight, mean, lever, scale, LINK: tl.constexpr, TILE: tl.constexpr):
    """Whether nothing overflows, and slopes have not underflowed; for a compact link all may be 0."""
    finite = (tl.abs(mean) < float("inf")) & (tl.abs(lever) < float("inf")) & (scale <= TILE.largest_scale)
    if LINK.compact and LINK.reaches_zero:
        return finite
    else:
        return finite & (weight >= TILE.underflow)


@triton.jit(do_not_specialize=["stride_scale", "stride_x", "stride_g", "rows", "n"])
def _mask_bwd(
    x_ptr, g_ptr, out_ptr, at, scale_ptr, scale_number: tl.float64, stride_scale, stride_x, stride_g, rows, n,
    q_number: tl.float64, LINK: tl.constexpr, KIND: tl.constexpr, WITH_SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The rows of a program, or those of some rows that are flagged."""
    pointers, scales, strides = (x_ptr, g_ptr, out_ptr), (scale_ptr, scale_number, stride_scale), (stride_x, stride_g)
    if TILE.stage == "flagged":
        begin, end, some = look_at_flags(at[4], rows)
        if some:
            for row in range(begin, end):
                if tl.load(at[4] + row) != 0:
                    _differentiate_rows(
                        row + tl.arange(0, 1), pointers, at, scales, strides, n, q_number, LINK, KIND, WITH_SCALE, TILE
                    )
    else:
        _differentiate_rows(
            program_rows(rows, TILE), pointers, at, scales, strides, n, q_number, LINK, KIND, WITH_SCALE, TILE
        )


@triton.jit
def _differentiate_rows(
    row, pointers, at, scales, strides, n, q_number,
    LINK: tl.constexpr, KIND: tl.constexpr, WITH_SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dL/dx, dL/dk and dL/ds of rows; for split rows the sums of a chunk, or its dL/dx from all sums."""
    FLAGGED: tl.constexpr = TILE.stage == "flagged"
    HAS_GAPS: tl.constexpr = FLAGGED and not (LINK.compact and LINK.reaches_zero)
    LOG: tl.constexpr = KIND == "log_mask"
    row = row.to(tl.int64)
    scale = (per_row(row, scales[0], scales[1], scales[2]) * TILE.factor).to(TILE.dtype)
    unit, q = reciprocal(scale), tl.full((), q_number, tl.float64).to(TILE.dtype)
    anchor, off = tl.load(at[0] + row) * TILE.factor, tl.load(at[1] + row) * LINK.unit
    anchor, off, inverse, unit = anchor.to(TILE.dtype), off.to(TILE.dtype), unit * LINK.unit, unit * TILE.factor
    x_rows, g_rows = starts(pointers[0], row, strides[0], TILE), starts(pointers[1], row, strides[1], TILE)
    a = 0.0 * off if LOG or FLAGGED else converted(tl.load(g_rows), TILE.dtype)
    begin, length = chunk_of(n, TILE)
    x_rows, g_rows, out_rows = x_rows + begin, g_rows + begin, starts(pointers[2], row, n, TILE) + begin
    here = at[5] + (row * PARTS + tl.program_id(0)) * SUMS
    if TILE.stage == "end":
        weight, direct = sums_of_chunks(at[5], row, SUMS)
    else:
        weight, direct, direct_below = _sums(x_rows, g_rows, length, anchor, off, inverse, a, q, LINK, LOG, TILE)
    if TILE.stage == "step":
        store_numbers(here, (weight, direct))
    else:
        held = tl.maximum(weight, TILE.tiny)
        mean = quotient(direct, held)
        grad_k = tl.where(weight > 0, a + mean, 0.0)
        gap = (weight < 0, off, off, off, off, off)  # no row has its threshold in a gap
        if HAS_GAPS and any_row(weight < FAR):
            left, right, plain, of_above, of_below, above, below = _gap(
                x_rows, g_rows, n, anchor, off, scale, LINK, TILE
            )
            gap = (weight < FAR, left, right, plain, of_above, of_below)
            mean = direct if LOG else above + below
            grad_k = above + direct_below / held if LOG else mean
        tl.store(at[2] + row, grad_k.to(tl.float64))
        lever, left, reach = _write(
            x_rows, g_rows, out_rows, length, anchor, off, inverse, unit, a, mean, q, gap, LINK, LOG, WITH_SCALE, TILE
        )
        left = quotient(left, held)  # the remainder that rounding of the mean leaves of a zero
        if TILE.stage == "end":
            store_numbers(here + 2, (lever * unit, left * unit, reach))
            lever = 0.0 * lever
        elif FLAGGED:  # arranged so that neither z nor the scale makes a product overflow
            root = tl.sqrt(scale * (1.0 / TILE.factor))
            lever = lever / root * GROWN / root
        else:
            lever = (lever + left * reach) * unit
        if WITH_SCALE and TILE.stage != "end":
            tl.store(at[3] + row, lever.to(tl.float64))
        if not FLAGGED:
            tl.store(at[4] + row, 1 - _is_solved(weight, mean, lever, scale, LINK, TILE).to(tl.int32))


def launch_backward(
    x: Tensor, scale: Tensor | float, anchor: Tensor, offset: Tensor, grad: Tensor, link: Link,
    kind: str = "mask", with_scale: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dL/dx like x, dL/dk and dL/dscale in float64 of the batch shape, from dL/dy (or dL/d log y) = ``grad``.

    Without ``with_scale``, dL/dk stands for dL/dscale, too.
    """
    items, g = rows_of(x), rows_of(grad)
    rows, n = items.shape
    grad_x = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    grad_k = torch.empty(rows, dtype=torch.float64, device=x.device)
    grad_scale = torch.empty_like(grad_k) if with_scale else grad_k
    flags = torch.empty(rows, dtype=torch.int32, device=x.device)
    anchor, offset = (in_shape(v, (rows,)).contiguous() for v in (anchor, offset))
    tile, number, partial = tile_of(items, g, grad_x, pairs=True), Argument.of(scale, x.device), flags
    tiles: tuple[Tile, ...] = tile, flagged_tile(items)
    split, constants = is_split(rows, n), (triton_link(link), kind, with_scale)
    if split:
        tiles = tile, tile.at_stage("end")
        partial = torch.empty((rows, PARTS.value, SUMS.value), dtype=tile.torch_dtype, device=x.device)
    numbers, at = (*number, items.stride(0), g.stride(0)), (anchor, offset, grad_k, grad_scale, flags, partial)
    arguments = (items, g, grad_x, at, *numbers, rows, n, float(link.q))
    kinds = kind_of((items, g, anchor, offset, number.tensor)), numbers[2:]  # new tensors are aligned
    with on_device(x):
        launch_tiles(_mask_bwd, arguments, constants, tiles, items.shape, kinds)
        if split:
            if with_scale:
                parts = partial[:, : tile.splits(rows, n), 2:5]
                torch.addcmul(*parts.sum(1, dtype=torch.float64).unbind(-1), out=grad_scale)
            launch_tiles(_mask_bwd, arguments, constants, (flagged_tile(items),), items.shape, kinds)
    batch = x.shape[:-1]
    return in_shape(grad_x, x.shape), in_shape(grad_k, batch), in_shape(grad_scale, batch)


def recipe(link: Link, kind: Kind, dtype: torch.dtype) -> Recipe:
    """The map for numbers k and scale, and its gradient, without tensors for them, and without the operators."""

    def mask(x: Tensor, k: float, scale: float) -> Solved | None:
        y, anchor, offset, flags = launch_forward(x, k, scale, link, kind.name)
        assert y is not None
        return None if checks_contents(x) and has_invalid(flags) else (y, (anchor, offset))

    def gradient(x: Tensor, scale: float, at: tuple[Tensor, Tensor], grad: Tensor) -> Tensor:
        anchor, offset = at
        return launch_backward(x, scale, anchor, offset, grad, link, kind.name, with_scale=False)[0]

    return Recipe(mask, gradient)


def mask_derivative(
    x: Tensor,
    scale: Tensor,
    anchor: Tensor,
    offset: Tensor,
    grad: Tensor,
    link: int,
    q: float,
    kind: str,
    with_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_k, grad_scale = launch_backward(x, scale, anchor, offset, grad, Link.find(link, q), kind, with_scale)
    return grad_x, grad_k, grad_scale if with_scale else torch.zeros_like(grad_k)
