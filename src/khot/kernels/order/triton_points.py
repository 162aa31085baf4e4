"""The points where the soft count F of sorted items passes 1/2, 3/2, ... or 1, 2, ..., with derivatives, in Triton.

One program per row, which stays on chip. The points t_j follow from the sums over both sides of their neighbours, see
:mod:`khot.kernels.order`; a search among the items finds these neighbours. The shares omega_ij of the items in dt_j
decay from there to both sides, so dL/dz_i = sum_j omega_ij g_j is a pair of scans over the points, read off at each
item's position among them, without additions in memory.

Arithmetic is in float64, without which long rows and narrow gaps would lose the positions of the points. A point is
stored as an offset in scales from an item near it, so that distant items cost no digits. A negative scale means
descending order.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import DOUBLE, Table
from ..gpu.tools import on_device, per_row, row_numbers
from . import RowMap
from .triton_rows import FAR, contiguous_rows, coordinates, counted_items, row_results, scan_options
from .triton_scans import compose, to_double, to_dtype
from .triton_slices import slice_weights, slice_weights_derivative

POINTS: Table = {torch.float64: DOUBLE[:-1]}
BEYOND = tl.constexpr(2**30)  # more than there are points


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _first_goals(before, after, cols, n, BETWEEN: tl.constexpr):
    """For each item the first of the points 1, 2, ... above it; ascending, however ties are rounded."""
    rank = (cols + 1) + 0.5 * (after - before)
    if BETWEEN:
        rank -= 0.5
    return tl.associative_scan(tl.where(cols < n, tl.ceil(rank).to(tl.int32), BEYOND), 0, larger)


@triton.jit
def _neighbours(items, before, after, first_goal, cols, n, BETWEEN: tl.constexpr, BLOCK: tl.constexpr):
    """The neighbours of each point, with one extra point if the points lie between the items.

    Returns how far above halfway between its two neighbours it counts, how many items lie below, the neighbours, and
    their weights including the items beyond them.
    """
    goal = cols + 1
    below = tl.zeros_like(cols)
    step = tl.full((), BLOCK, tl.int32)
    while step > 0:  # binary search
        probe = below + step - 1
        reached = tl.gather(first_goal, tl.minimum(probe, BLOCK - 1), 0) <= goal
        below = tl.where((probe < BLOCK) & reached, below + step, below)
        step = step // 2
    lower, upper = tl.maximum(below - 1, 0), tl.minimum(below, n - 1)
    weight_left = tl.where(below > 0, 1.0 + tl.gather(before, lower, 0), 0.0)
    weight_right = tl.where(below < n, 1.0 + tl.gather(after, upper, 0), 0.0)
    excess = (goal - below).to(tl.float64)
    if not BETWEEN:
        excess -= 0.5
    return excess, below, tl.gather(items, lower, 0), tl.gather(items, upper, 0), weight_left, weight_right


@triton.jit
def _pulls(excess, width, weight_left, weight_right):
    """The weights with which the nearer side and the other side act on a point, up to a common factor.

    They are q and its complement, whose product is A B exp(-h_{p+1}), see :mod:`khot.kernels.order`.
    """
    product = weight_left * weight_right * tl.exp(-width)
    size = tl.abs(excess)
    pull = size + tl.sqrt(size * size + product)
    return pull, product / pull


@triton.jit
def _offsets(excess, width, weight_left, weight_right, BETWEEN: tl.constexpr):
    """Offsets of the points: from the upper neighbour if excess > 0, else from the lower one; see the reference."""
    pull, _ = _pulls(excess, width, weight_left, weight_right)
    distance = tl.maximum(tl.log(tl.where(excess > 0, weight_right, weight_left) / pull), 0.0)
    offset = tl.where(excess > 0, -distance, distance)
    if BETWEEN:
        offset = tl.where(excess == 0, 0.5 * (tl.minimum(width, FAR) + tl.log(weight_left / weight_right)), offset)
    return offset


@triton.jit
def _points_fwd(
    values_ptr, t_ptr, cuts_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n, points,
    SCALE_TENSOR: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The points of a row; for points between the items, the offsets and half of the items that these start from."""
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    here, _, before, after = counted_items(values_ptr + row * n, scale, cols, n)
    first_goal = _first_goals(before, after, cols, n, BETWEEN)
    excess, _, lower, upper, weight_left, weight_right = _neighbours(
        here, before, after, first_goal, cols, n, BETWEEN, BLOCK
    )
    t = _offsets(excess, (upper - lower) * (1.0 / (0.5 * scale)), weight_left, weight_right, BETWEEN)
    anchor = tl.where(excess > 0, upper, lower)
    if BETWEEN:
        tl.store(cuts_ptr + row * points + cols, anchor, mask=cols < points)
    else:
        t = 2.0 * (anchor + 0.5 * scale * t)
    tl.store(t_ptr + row * points + cols, to_dtype(t, t_ptr.dtype.element_ty), mask=cols < points)


@triton.jit
def _points_bwd(
    values_ptr, order_ptr, g_ptr, direct_ptr, grad_x_ptr, grad_scale_ptr,
    scale_ptr, scale_number: tl.float64, stride_scale, n, points,
    SCALE_TENSOR: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dx and dL/dscale from dL/dt, and from a separate dL/dz if the points lie between the items."""
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    here, to_left, before, after = counted_items(values_ptr + row * n, scale, cols, n)
    first_goal = _first_goals(before, after, cols, n, BETWEEN)
    excess, below, lower, upper, weight_left, weight_right = _neighbours(
        here, before, after, first_goal, cols, n, BETWEEN, BLOCK
    )
    inverse = 1.0 / (0.5 * scale)
    width = (upper - lower) * inverse
    there = cols < points
    g = to_double(tl.load(g_ptr + row * points + cols, mask=there, other=0.0))
    if not BETWEEN:
        anchor = tl.minimum(tl.maximum(tl.where(excess > 0, below, below - 1), 0), BLOCK - 1)
        t = _offsets(excess, width, weight_left, weight_right, BETWEEN)
        t += tl.gather(coordinates(to_left, cols, n), anchor, 0)
        lever = tl.sum(tl.where(there, g * t, 0.0), 0)
    near, far = _pulls(excess, width, weight_left, weight_right)
    near, far = near / (near + far), far / (near + far)
    if BETWEEN:
        near, far = tl.where(excess == 0, 0.5, near), tl.where(excess == 0, 0.5, far)
    on_left = tl.where(there & (below > 0), g * tl.where(excess > 0, far, near) / weight_left, 0.0)
    on_right = tl.where(there & (below < n), g * tl.where(excess > 0, near, far) / weight_right, 0.0)
    first_above = tl.minimum(first_goal - 1, points)
    above, under = tl.minimum(first_above, BLOCK - 1), tl.maximum(first_above - 1, 0)

    decay = tl.exp((lower - tl.gather(lower, tl.minimum(cols + 1, BLOCK - 1), 0)) * inverse)
    _, to_lower = tl.associative_scan((decay, on_left), 0, compose, reverse=True)
    distance = tl.minimum((here - tl.gather(lower, above, 0)) * inverse, 0.0)
    grad_z = tl.where(first_above < points, tl.exp(distance) * tl.gather(to_lower, above, 0), 0.0)

    decay = tl.exp((tl.gather(upper, tl.maximum(cols - 1, 0), 0) - upper) * inverse)
    _, to_upper = tl.associative_scan((decay, on_right), 0, compose)
    distance = tl.minimum((tl.gather(upper, under, 0) - here) * inverse, 0.0)
    grad_z += tl.where(first_above > 0, tl.exp(distance) * tl.gather(to_upper, under, 0), 0.0)
    grad_z = tl.where(cols < n, grad_z, 0.0)

    to_left = (here - tl.gather(here, tl.maximum(cols - 1, 0), 0)) * inverse  # computed again to save a register
    z = coordinates(to_left, cols, n)
    if BETWEEN:
        grad_z += tl.load(direct_ptr + row * n + cols, mask=cols < n, other=0.0)
        grad_x, grad_scale = grad_z / scale, -tl.sum(grad_z * z, 0) / scale
    else:
        grad_x, grad_scale = grad_z, lever - tl.sum(grad_z * z, 0)
    place = tl.load(order_ptr + row * n + cols, mask=cols < n, other=0)
    tl.store(grad_x_ptr + row * n + place, to_dtype(grad_x, grad_x_ptr.dtype.element_ty), mask=cols < n)
    tl.store(grad_scale_ptr + row, grad_scale)


def _points(values: Tensor, scale: Tensor, between: bool) -> tuple[Tensor, Tensor]:
    """The points like ``values``, and nothing; for points between the items, the offsets and half of their items."""
    (rows,), n = contiguous_rows(values), values.shape[-1]
    points, dtype = (n - 1, torch.float64) if between else (n, values.dtype)
    t = torch.empty(len(rows), points, dtype=dtype, device=rows.device)
    cuts = torch.empty(len(rows), points if between else 0, dtype=torch.float64, device=rows.device)
    numbers = row_numbers(scale, values.device)
    with on_device(values):
        _points_fwd[(len(rows),)](
            rows, t, cuts, *numbers.arguments(rows), n, points, BETWEEN=between, **scan_options(rows, numbers, POINTS)
        )
    batch = values.shape[:-1]
    return t.reshape(*batch, points), cuts.reshape(*batch, cuts.shape[-1])


def _points_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad_t: Tensor, grad_z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dL/dx and dL/dscale from dL/dt; if the points lie between the items, also from dL/dz in float64."""
    (rows, places), n = contiguous_rows(values, order), values.shape[-1]
    g = grad_t.reshape(len(rows), -1).contiguous()
    between = grad_z is not None
    direct = g if grad_z is None else contiguous_rows(grad_z)[0]
    grad_x, grad_scale, numbers = torch.empty_like(rows), row_results(rows), row_numbers(scale, values.device)
    with on_device(values):
        _points_bwd[(len(rows),)](
            rows, places, g, direct, grad_x, grad_scale, *numbers.arguments(rows), n, g.shape[1],
            BETWEEN=between, **scan_options(rows, numbers),
        )  # fmt: skip
    return grad_x.reshape(values.shape), grad_scale.reshape(values.shape[:-1])


def _soft_sort(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor]:
    return _points(values, scale, False)[:1]


def _sort_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool
) -> tuple[Tensor, Tensor]:
    return _points_derivative(values, order, scale, grad, None)


def _soft_permutation(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    offset, cuts = _points(values, scale, True)
    half, column = 0.5 * values.double(), 0.5 * scale.unsqueeze(-1)
    return slice_weights(half, column, order, cuts, offset, None, values.dtype), cuts, offset


def _permutation_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool, cuts: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    half, column = 0.5 * values.double(), 0.5 * scale.unsqueeze(-1)
    grad_z, grad_t = slice_weights_derivative(half, column, order, cuts, offset, grad)
    return _points_derivative(values, order, scale, grad_t, grad_z)


SOFT_SORT = RowMap(_soft_sort, _sort_derivative)
SOFT_PERMUTATION = RowMap(_soft_permutation, _permutation_derivative)
