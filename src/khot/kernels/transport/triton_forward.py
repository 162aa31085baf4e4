"""Sorted optimal transport in Triton: the solver and the plan of :mod:`khot.kernels.transport` in one kernel.

One program per row. It finds the largest entries, then makes Newton steps for the thresholds, each of which is a pass
over the row, see the module ``triton_tile``; a last pass writes y. The row is read from memory again in every pass,
because caches deliver it faster than its tiles are processed.

The differences of the sums over the items from 1 keep their digits where all of P is nearly 0 or 1: 1 - P_ai, for i the
(a+1)-th largest item, is the sum of the item's other places. So float32 is enough for float32 scores, with thresholds
of twice the digits; float64 scores take float32 steps to about 1e-7, then one or two in float64.

Layout: x (rows, n), half the epsilon (rows,) and t (rows, places - 1) in float64, y (rows, k, n); all contiguous.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._torch_internals import is_recorded

from ..gpu.tools import arithmetic, inverse_scale, on_device, per_row, row_numbers, rows_of
from .solver import check_contents, warn_of_errors
from .triton_tile import (
    add_weights,
    all_weights,
    epsilon,
    load_thresholds,
    rounding_error,
    solve_laplacian,
    tile_scores,
    transport_plan,
)

FAR_OFF = tl.constexpr(1.0)  # error of a sum above which the first step is Sinkhorn's
OVERSHOOT = tl.constexpr(0.1)  # largest slope after a step, relative to the slope before it
ROUGH_STEPS = tl.constexpr(20)
ROUGH_TOLERANCE = tl.constexpr(1e-9)


@triton.jit
def _start(x_ptr, t_ptr, n, places, PLACES: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Sets thresholds halfway between the largest entries; returns which items these are."""
    place, own = tl.arange(0, PLACES), tl.full((PLACES,), -1, tl.int32)
    value, item = tl.full((), float("inf"), DTYPE), tl.full((), -1, tl.int32)
    for rank in range(0, places):
        best, best_item = tl.full((TILE,), -float("inf"), DTYPE), tl.zeros((TILE,), tl.int32)
        for start in range(0, n, TILE):
            cols = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + cols, mask=cols < n, other=-float("inf")).to(DTYPE)
            better = (x > best) & ((x < value) | ((x == value) & (cols > item)))
            best, best_item = tl.where(better, x, best), tl.where(better, cols, best_item)
        before = value
        value = tl.max(best, 0)
        item = tl.min(tl.where(best == value, best_item, n), 0)
        if rank > 0:
            tl.store(t_ptr + rank - 1, 0.5 * before.to(tl.float64) + 0.5 * value.to(tl.float64))
        own = tl.where((place == rank) & (rank < places - 1), item, own)
    return own


@triton.jit
def _sums(
    x_ptr, n, t, own, inv_scale,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """The excess over 1 of each place's sum, the sum itself for the last place, and W."""
    above = tl.zeros((PLACES, BLOCK), WORK)
    weights = tl.zeros((BLOCK // 32, PLACES, PLACES), tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(DTYPE)
        plan = tl.exp(tile_scores(x, t, inv_scale, WORK))
        plan *= tl.where(cols < n, 1.0 / tl.sum(plan, 0), 0.0)[None, :]
        mine = own[:, None] == cols[None, :]
        above += tl.where(mine, -tl.sum(tl.where(mine, 0.0, plan), 0)[None, :], plan)
        weights = add_weights(weights, plan, PLACES, BLOCK)
    return tl.sum(above, 1).to(tl.float32), all_weights(weights)


@triton.jit
def _descend(
    x_ptr, t_ptr, n, own, places, scale, tol, max_iter,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """``_descend`` of the reference, for one row: moves the thresholds; returns success and the error."""
    place = tl.arange(0, PLACES)
    inside, below_one = place < places - 1, (place > 0) & (place < places)
    one_before = place[:, None] == place[None, :] - 1
    inv_scale = inverse_scale(scale, DTYPE)
    slack = 1e-6 + 1e-8 * n.to(tl.float32)  # a bound on the relative error of W
    infinite = tl.full((), float("inf"), tl.float32)
    step, descent, error = tl.zeros((PLACES,), tl.float32), infinite, infinite
    found, going, steps = tl.full((), 0, tl.int1), tl.full((), 1, tl.int1), tl.zeros((), tl.int32)
    while going:
        tl.debug_barrier()  # the thresholds go through memory, since every thread needs those of all its places
        t = load_thresholds(t_ptr, places, PLACES, DTYPE)
        above, weights = _sums(x_ptr, n, t, own, inv_scale, PLACES, BLOCK, DTYPE, WORK)
        residual, last = tl.where(inside, -above, 0.0), error
        error = tl.max(tl.abs(residual), 0)
        move = solve_laplacian(weights, residual, places, 2.0 * epsilon(WORK), PLACES)
        size = tl.max(tl.abs(move), 0)
        close = size * (2.0 * size + slack) <= tol  # the error that a small step leaves
        tl.debug_barrier()  # otherwise t would stay in registers all the time
        t = tl.load(t_ptr + place - 1, mask=below_one, other=0.0)
        rounding = rounding_error(t, scale, DTYPE, WORK)
        there = (error <= tol) | ((error <= rounding) & (error >= 0.5 * last))
        if (steps == 0) & (error > FAR_OFF):
            rest = tl.sum(tl.where(place == places - 1, above, 0.0), 0) / (n - places + 1).to(tl.float32)
            move = tl.where(inside, tl.log(rest / (1.0 + above)), 0.0)
        slope = -tl.sum(residual * step, 0)
        too_far = (slope > descent * OVERSHOOT) & (~close)
        share = tl.minimum(tl.maximum(descent / (descent + slope), 0.1), 0.7)
        ahead = tl.where(too_far, share * step, move)
        descent = tl.where(too_far, share * descent, tl.sum(residual * move, 0))
        move = tl.where(there, 0.0, tl.where(too_far, ahead - step, move))
        step = ahead
        change = move - tl.sum(tl.where(one_before, move[:, None], 0.0), 0)
        tl.debug_barrier()  # all warps decide in the same way, so they need the same t
        tl.store(t_ptr + place - 1, t + scale * change.to(tl.float64), mask=below_one)
        steps += 1
        found = there | close
        going = (~found) & (steps < max_iter) & (error < infinite)
    return found, error


@triton.jit(do_not_specialize=["k", "max_iter"])
def _sorted_transport_fwd(
    x_ptr, y_ptr, t_ptr, error_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n, k, tol: tl.float64, max_iter,
    SCALE_TENSOR: tl.constexpr, CHECK: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row, places = tl.program_id(0).to(tl.int64), tl.minimum(k + 1, n)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    x_ptr += row * n
    t_ptr += row * (places - 1)
    tol = tl.full((), tol, tl.float64).to(tl.float32)
    sound, found, error = tl.full((), 1, tl.int1), tl.full((), 0, tl.int1), tl.full((), float("nan"), tl.float32)
    if CHECK:
        sound = (scale > 0) & (scale < float("inf")) & _all_finite(x_ptr, n, 4 * BLOCK, DTYPE)
    if sound:
        own = _start(x_ptr, t_ptr, n, places, PLACES, 4 * BLOCK, DTYPE)
        if DTYPE == tl.float64:
            rough, few = tl.maximum(tol, ROUGH_TOLERANCE), tl.minimum(max_iter, ROUGH_STEPS)
            _descend(x_ptr, t_ptr, n, own, places, scale, rough, few, PLACES, BLOCK, DTYPE, tl.float32)
        found, error = _descend(x_ptr, t_ptr, n, own, places, scale, tol, max_iter, PLACES, BLOCK, DTYPE, DTYPE)
        _write_plan(x_ptr, y_ptr + row * k * n, t_ptr, n, places, k, scale, PLACES, BLOCK, DTYPE)
    if CHECK:
        tl.store(error_ptr + row, tl.where(found, 0.0, error))


@triton.jit
def _write_plan(
    x_ptr, y_ptr, t_ptr, n, places, k, scale, PLACES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    tl.debug_barrier()
    t, inv_scale = load_thresholds(t_ptr, places, PLACES, DTYPE), inverse_scale(scale, DTYPE)
    place = tl.arange(0, PLACES)[:, None]
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(DTYPE)
        plan = tl.exp(tile_scores(x, t, inv_scale, DTYPE))
        y = plan * (1.0 / tl.sum(plan, 0))[None, :]
        at = y_ptr + (place * n + cols[None, :])
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(place < k) & (cols[None, :] < n))


@triton.jit
def _all_finite(x_ptr, n, TILE: tl.constexpr, DTYPE: tl.constexpr):
    finite = tl.zeros((TILE,), tl.int32)
    for start in range(0, n, TILE):
        cols = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + cols, mask=cols < n, other=float("inf")).to(DTYPE)
        finite += tl.where(tl.abs(x) < float("inf"), 1, 0)
    return tl.sum(finite, 0) == n


def launch_forward(
    x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y (..., k, n) like x (..., n), the float64 thresholds, and with ``check`` a status for each row.

    The status is 0 for success, the error of sums that are not within ``tol``, and NaN for invalid contents.
    """
    rows = rows_of(x).contiguous()
    n, (_, dtype) = rows.shape[1], arithmetic(x)
    how = transport_plan(len(rows), n, k)
    y = torch.empty(len(rows), k, n, dtype=x.dtype, device=x.device)
    t = torch.empty(len(rows), how.places - 1, dtype=torch.float64, device=x.device)
    error = torch.empty(len(rows), dtype=torch.float32, device=x.device) if check else None
    scale = row_numbers(half, x.device)
    with on_device(x):
        _sorted_transport_fwd[(len(rows),)](
            rows, y, t, t if error is None else error, *scale.arguments(t), n, k, tol, max_iter,
            SCALE_TENSOR=scale.tensor is not None, CHECK=check, PLACES=how.block_places, BLOCK=how.block, DTYPE=dtype,
            num_warps=how.warps, num_stages=1,
        )  # fmt: skip
    batch = x.shape[:-1]
    return y.reshape(*batch, k, n), t.reshape(*batch, how.places - 1), error


def sorted_transport(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    y, t, error = launch_forward(x, half, k, tol, max_iter, check and not is_recorded(x))
    if error is not None and bool((error != 0).any()):
        check_contents(x.double().reshape(-1, x.shape[-1]), 2 * half.to(x.device).reshape(-1))
        warn_of_errors(int((error != 0).sum()), len(error), error.max().item(), max_iter, tol)
    return y, t
