"""The axes of a ground set, one or several: moves them to the end as a single axis, and back."""

import math

import torch
from torch import Tensor


def as_rows(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """x with the ground set along its last axis, as a view where its layout allows one; ``dim`` has been checked."""
    if not isinstance(dim, tuple):
        return x if dim in (-1, x.dim() - 1) else x.movedim(dim, -1)
    axes = _ordered(x, dim)
    rows = x.movedim(axes, tuple(range(-len(axes), 0)))
    return rows.reshape(*rows.shape[: -len(axes)], math.prod(rows.shape[-len(axes) :]))


def as_axes(y: Tensor, x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The inverse of ``as_rows(x, dim)``: rows of that shape, as a view in the shape of x."""
    if not isinstance(dim, tuple):
        return y if dim in (-1, x.dim() - 1) else y.movedim(-1, dim)
    axes = _ordered(x, dim)
    return torch.unflatten(y, -1, [x.shape[axis] for axis in axes]).movedim(tuple(range(-len(axes), 0)), axes)


def _ordered(x: Tensor, dim: tuple[int, ...]) -> tuple[int, ...]:
    """The axes in the order of the memory layout, so that adjacent axes can be merged without a copy."""
    return tuple(sorted(axis % x.dim() for axis in dim))
