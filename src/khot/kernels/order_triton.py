"""The order maps of sorted rows in Triton, with their first derivatives: one kernel each for rows that fit on chip.

Each program scans a row for the decayed sums of its items (:mod:`khot.kernels.lapsum`), evaluates what is asked for,
and puts it back into the order of the items before sorting. With f_ij = exp(-|z_i - z_j|) / 2, z = (x - centre) / s:

    ranks       r_i = i + (sum_{j > i} f_ij - sum_{j < i} f_ij),   dL/dz_i = sum_j f_ij (g_i - g_j)
    points      t_j with F(t_j) = j - 1/2 or j,                    dL/dz_i = sum_j omega_ij g_j

The shares omega_ij of the items in dt_j decay from the two neighbours of t_j, so the derivative is a pair of scans over
the points, read off where each item stands among them. Nothing is added up in memory.

Arithmetic in float64, without which long rows and narrow gaps would lose the places of the points. A negative scale
means descending order.

Layout: values, order and results (rows, n), contiguous; values as sorted, ``order`` the places that they came from.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import POINTS, SCANS, Table, plan
from .lapsum_triton import compose, compose_two, decays, load_three, to_double
from .launch_triton import RowNumbers, on_device, per_row, row_numbers, rows_of
from .slices_triton import launch_slice_weights, launch_slice_weights_derivative

BEYOND = tl.constexpr(2**30)  # more than there are points


@triton.jit
def to_dtype(v, DTYPE: tl.constexpr):
    """From float64, to half types by way of float32 as the hardware does."""
    if DTYPE == tl.float64 or DTYPE == tl.float32:
        return v.to(DTYPE)
    else:
        return v.to(tl.float32).to(DTYPE)


@triton.jit
def _centre(values_ptr, n):
    return 0.5 * (to_double(tl.load(values_ptr)) + to_double(tl.load(values_ptr + n - 1)))


@triton.jit
def _items(values_ptr, scale, cols, n):
    """z of a row, its decays from the left and from the right, and the centre."""
    centre, inv_scale = _centre(values_ptr, n), tl.minimum(tl.maximum(1.0 / scale, -1e300), 1e300)
    here, left, right = load_three(values_ptr, cols, n)
    z = (here - centre) * inv_scale
    from_left, from_right = decays(z, (left - centre) * inv_scale, (right - centre) * inv_scale, cols, n)
    return z, from_left, from_right, centre


@triton.jit
def _counted_items(values_ptr, scale, cols, n):
    """The same, with the sums over the left and the right of each item instead of the decays."""
    z, from_left, from_right, centre = _items(values_ptr, scale, cols, n)
    _, before = tl.associative_scan((from_left, from_left), 0, compose)
    _, after = tl.associative_scan((from_right, tl.where(cols < n, from_right, 0.0)), 0, compose, reverse=True)
    return z, before, after, centre


@triton.jit
def _rank_fwd(
    values_ptr, order_ptr, rank_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n,
    SCALE_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    _, before, after, _ = _counted_items(values_ptr + row * n, scale, cols, n)
    rank = (cols + 1) + 0.5 * (after - before)
    place = tl.load(order_ptr + row * n + cols, mask=cols < n, other=0)
    tl.store(rank_ptr + row * n + place, to_dtype(rank, rank_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def _rank_bwd(
    values_ptr, order_ptr, g_ptr, grad_x_ptr, grad_scale_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n,
    SCALE_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    z, from_left, from_right, _ = _items(values_ptr + row * n, scale, cols, n)
    order_ptr += row * n
    g_ptr += row * n
    there, has_left, has_right = cols < n, (cols > 0) & (cols < n), cols < n - 1
    place = tl.load(order_ptr + cols, mask=there, other=0)
    g = to_double(tl.load(g_ptr + place, mask=there, other=0.0))
    beside = tl.load(g_ptr + tl.load(order_ptr + cols - 1, mask=has_left, other=0), mask=has_left, other=0.0)
    _, mass, total = tl.associative_scan(
        (from_left, tl.where(there, from_left, 0.0), from_left * to_double(beside)), 0, compose_two
    )
    grad_z = 0.5 * (g * mass - total)
    beside = tl.load(g_ptr + tl.load(order_ptr + cols + 1, mask=has_right, other=0), mask=has_right, other=0.0)
    _, mass, total = tl.associative_scan(
        (from_right, tl.where(there, from_right, 0.0), from_right * to_double(beside)), 0, compose_two, reverse=True
    )
    grad_z += 0.5 * (g * mass - total)
    tl.store(grad_x_ptr + row * n + place, to_dtype(grad_z / scale, grad_x_ptr.dtype.element_ty), mask=there)
    tl.store(grad_scale_ptr + row, -tl.sum(tl.where(there, grad_z * z, 0.0), 0) / scale)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _first_goals(before, after, cols, n, BETWEEN: tl.constexpr):
    """From which of the points 1, 2, ... on each item lies below them; ascending, whatever ties round to."""
    rank = (cols + 1) + 0.5 * (after - before)
    if BETWEEN:
        rank -= 0.5
    return tl.associative_scan(tl.where(cols < n, tl.ceil(rank).to(tl.int32), BEYOND), 0, larger)


@triton.jit
def _neighbours(z, before, after, first_goal, cols, n, BETWEEN: tl.constexpr, BLOCK: tl.constexpr):
    """Where each point is, with one more than there are if they lie between the items.

    Returns how far above halfway between its two neighbours it counts, how many items lie below, z of the neighbours,
    and their weights with those beyond them.
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
    return excess, below, tl.gather(z, lower, 0), tl.gather(z, upper, 0), weight_left, weight_right


@triton.jit
def _pulls(excess, z_lower, z_upper, weight_left, weight_right):
    """The weights with which the nearer side and the other act on a point, up to a factor.

    They are q and what it has to be multiplied by to make A B exp(z_p - z_{p+1}), see :mod:`khot.kernels.lapsum`.
    """
    product = weight_left * weight_right * tl.exp(z_lower - z_upper)
    size = tl.abs(excess)
    pull = size + tl.sqrt(size * size + product)
    return pull, product / pull


@triton.jit
def _points(excess, z_lower, z_upper, weight_left, weight_right, BETWEEN: tl.constexpr):
    """The points, see ``soft_count_inverse`` of the reference."""
    pull, _ = _pulls(excess, z_lower, z_upper, weight_left, weight_right)
    distance = tl.maximum(tl.log(tl.where(excess > 0, weight_right, weight_left) / pull), 0.0)
    t = tl.where(excess > 0, z_upper - distance, z_lower + distance)
    if BETWEEN:
        t = tl.where(excess == 0, 0.5 * (z_lower + z_upper + tl.log(weight_left / weight_right)), t)
    return t


@triton.jit
def _points_fwd(
    values_ptr, t_ptr, z_ptr, scale_ptr, scale_number: tl.float64, stride_scale, n, points,
    SCALE_TENSOR: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The points of a row, in the units of x; or those between the items, in the units of z, and z."""
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    z, before, after, centre = _counted_items(values_ptr + row * n, scale, cols, n)
    first_goal = _first_goals(before, after, cols, n, BETWEEN)
    excess, _, z_lower, z_upper, weight_left, weight_right = _neighbours(
        z, before, after, first_goal, cols, n, BETWEEN, BLOCK
    )
    t = _points(excess, z_lower, z_upper, weight_left, weight_right, BETWEEN)
    if BETWEEN:
        tl.store(z_ptr + row * n + cols, z, mask=cols < n)
    else:
        t = t * scale + centre
    tl.store(t_ptr + row * points + cols, to_dtype(t, t_ptr.dtype.element_ty), mask=cols < points)


@triton.jit
def _points_bwd(
    values_ptr, order_ptr, g_ptr, direct_ptr, grad_x_ptr, grad_scale_ptr,
    scale_ptr, scale_number: tl.float64, stride_scale, n, points,
    SCALE_TENSOR: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dx and dL/dscale from dL/dt, and dL/dz that goes another way if the points lie between the items."""
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = per_row(scale_ptr, scale_number, row, stride_scale, SCALE_TENSOR)
    z, before, after, _ = _counted_items(values_ptr + row * n, scale, cols, n)
    first_goal = _first_goals(before, after, cols, n, BETWEEN)
    excess, below, z_lower, z_upper, weight_left, weight_right = _neighbours(
        z, before, after, first_goal, cols, n, BETWEEN, BLOCK
    )
    there = cols < points
    g = to_double(tl.load(g_ptr + row * points + cols, mask=there, other=0.0))
    if not BETWEEN:
        lever = tl.sum(
            tl.where(there, g * _points(excess, z_lower, z_upper, weight_left, weight_right, BETWEEN), 0.0), 0
        )
    near, far = _pulls(excess, z_lower, z_upper, weight_left, weight_right)
    near, far = near / (near + far), far / (near + far)
    if BETWEEN:
        near, far = tl.where(excess == 0, 0.5, near), tl.where(excess == 0, 0.5, far)
    on_left = tl.where(there & (below > 0), g * tl.where(excess > 0, far, near) / weight_left, 0.0)
    on_right = tl.where(there & (below < n), g * tl.where(excess > 0, near, far) / weight_right, 0.0)
    first_above = tl.minimum(first_goal - 1, points)
    above, under = tl.minimum(first_above, BLOCK - 1), tl.maximum(first_above - 1, 0)

    decay = tl.exp(z_lower - tl.gather(z_lower, tl.minimum(cols + 1, BLOCK - 1), 0))
    _, to_lower = tl.associative_scan((decay, on_left), 0, compose, reverse=True)
    distance = tl.minimum(z - tl.gather(z_lower, above, 0), 0.0)
    grad_z = tl.where(first_above < points, tl.exp(distance) * tl.gather(to_lower, above, 0), 0.0)

    decay = tl.exp(tl.gather(z_upper, tl.maximum(cols - 1, 0), 0) - z_upper)
    _, to_upper = tl.associative_scan((decay, on_right), 0, compose)
    distance = tl.minimum(tl.gather(z_upper, under, 0) - z, 0.0)
    grad_z += tl.where(first_above > 0, tl.exp(distance) * tl.gather(to_upper, under, 0), 0.0)
    grad_z = tl.where(cols < n, grad_z, 0.0)

    if BETWEEN:
        grad_z += tl.load(direct_ptr + row * n + cols, mask=cols < n, other=0.0)
        grad_x, grad_scale = grad_z / scale, -tl.sum(grad_z * z, 0) / scale
    else:
        grad_x, grad_scale = grad_z, lever - tl.sum(grad_z * z, 0)
    place = tl.load(order_ptr + row * n + cols, mask=cols < n, other=0)
    tl.store(grad_x_ptr + row * n + place, to_dtype(grad_x, grad_x_ptr.dtype.element_ty), mask=cols < n)
    tl.store(grad_scale_ptr + row, grad_scale)


def _contiguous_rows(*tensors: Tensor) -> list[Tensor]:
    return [rows_of(v).contiguous() for v in tensors]


def _options(rows: Tensor, scale: RowNumbers, table: Table = SCANS) -> dict[str, Any]:
    how = plan(len(rows), rows.shape[1], torch.float64, table)
    return {"SCALE_TENSOR": scale.tensor is not None, "BLOCK": how.block, "num_warps": how.warps}


def _launch_rank(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor]:
    rows, places = _contiguous_rows(values, order)
    rank, numbers = torch.empty_like(rows), row_numbers(scale, values.device)
    with on_device(values):
        _rank_fwd[(len(rows),)](rows, places, rank, *numbers.arguments(rows), rows.shape[1], **_options(rows, numbers))
    return (rank.reshape(values.shape),)


def _launch_rank_derivative(values: Tensor, order: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    rows, places, g = _contiguous_rows(values, order, grad)
    grad_x, grad_scale, numbers = torch.empty_like(rows), _row_results(rows), row_numbers(scale, values.device)
    with on_device(values):
        _rank_bwd[(len(rows),)](
            rows, places, g, grad_x, grad_scale, *numbers.arguments(rows), rows.shape[1], **_options(rows, numbers)
        )
    return grad_x.reshape(values.shape), grad_scale.reshape(values.shape[:-1])


def _row_results(rows: Tensor) -> Tensor:
    return torch.empty(len(rows), dtype=torch.float64, device=rows.device)


def _launch_points(values: Tensor, scale: Tensor, between: bool) -> tuple[Tensor, Tensor]:
    """The points like ``values``, and nothing; or those between the items, and z, in float64."""
    (rows,), n = _contiguous_rows(values), values.shape[-1]
    points, dtype = (n - 1, torch.float64) if between else (n, values.dtype)
    t = torch.empty(len(rows), points, dtype=dtype, device=rows.device)
    z = torch.empty(len(rows), n if between else 0, dtype=torch.float64, device=rows.device)
    numbers = row_numbers(scale, values.device)
    with on_device(values):
        _points_fwd[(len(rows),)](
            rows, t, z, *numbers.arguments(rows), n, points, BETWEEN=between, **_options(rows, numbers, POINTS)
        )
    batch = values.shape[:-1]
    return t.reshape(*batch, points), z.reshape(*batch, z.shape[-1])


def _launch_points_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad_t: Tensor, grad_z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dL/dx and dL/dscale from dL/dt; if the points lie between the items, also from dL/dz in float64."""
    (rows, places), n = _contiguous_rows(values, order), values.shape[-1]
    g = grad_t.reshape(len(rows), -1).contiguous()
    between = grad_z is not None
    direct = g if grad_z is None else _contiguous_rows(grad_z)[0]
    grad_x, grad_scale, numbers = torch.empty_like(rows), _row_results(rows), row_numbers(scale, values.device)
    with on_device(values):
        _points_bwd[(len(rows),)](
            rows, places, g, direct, grad_x, grad_scale, *numbers.arguments(rows), n, g.shape[1],
            BETWEEN=between, **_options(rows, numbers),
        )  # fmt: skip
    return grad_x.reshape(values.shape), grad_scale.reshape(values.shape[:-1])


def _launch_sort(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor]:
    return _launch_points(values, scale, False)[:1]


def _launch_sort_derivative(values: Tensor, order: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _launch_points_derivative(values, order, scale, grad, None)


def _launch_permutation(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t, z = _launch_points(values, scale, True)
    return launch_slice_weights(z, order, t, values.dtype), z, t


def _launch_permutation_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, z: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    grad_z, grad_t = launch_slice_weights_derivative(z, order, t, grad)
    return _launch_points_derivative(values, order, scale, grad_t, grad_z)


class Launchers(NamedTuple):
    """Of a map of sorted values, the places (..., n) they came from, and the scale in float64 (...).

    Attributes:
        forward: From these to the result and what the derivative needs.
        backward: From these, dL/d result and what the derivative needs to dL/dx, and dL/dscale in float64.
    """

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, Tensor]]


LAUNCHERS = {
    "rank": Launchers(_launch_rank, _launch_rank_derivative),
    "sort": Launchers(_launch_sort, _launch_sort_derivative),
    "permutation": Launchers(_launch_permutation, _launch_permutation_derivative),
}
