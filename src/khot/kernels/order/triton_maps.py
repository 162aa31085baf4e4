"""Triton kernels for order maps of sorted rows that fit on chip, and for their first derivatives."""

from torch import Tensor

from . import RowMap
from .triton_points import launch_points, launch_points_derivative
from .triton_rank import launch_rank, launch_rank_derivative
from .triton_slices import launch_slice_weights, launch_slice_weights_derivative


def _launch_rank(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor]:
    return (launch_rank(values, order, scale),)


def _launch_rank_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool
) -> tuple[Tensor, Tensor]:
    return launch_rank_derivative(values, order, scale, grad)


def _launch_sort(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor]:
    return launch_points(values, scale, False)[:1]


def _launch_sort_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool
) -> tuple[Tensor, Tensor]:
    return launch_points_derivative(values, order, scale, grad, None)


def _launch_permutation(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    offset, cuts = launch_points(values, scale, True)
    half, column = 0.5 * values.double(), 0.5 * scale.unsqueeze(-1)
    return launch_slice_weights(half, column, order, cuts, offset, values.dtype), cuts, offset


def _launch_permutation_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool, cuts: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    half, column = 0.5 * values.double(), 0.5 * scale.unsqueeze(-1)
    grad_z, grad_t = launch_slice_weights_derivative(half, column, order, cuts, offset, grad)
    return launch_points_derivative(values, order, scale, grad_t, grad_z)


SOFT_RANK = RowMap(_launch_rank, _launch_rank_derivative)
SOFT_SORT = RowMap(_launch_sort, _launch_sort_derivative)
SOFT_PERMUTATION = RowMap(_launch_permutation, _launch_permutation_derivative)
