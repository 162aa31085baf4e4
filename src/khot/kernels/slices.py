r"""The soft permutation of sorted items: how much of each item's Laplace law lies between each two neighbouring cuts.

.. math:: P_{ij} = \mathrm{Lap}(t_j - z_i) - \mathrm{Lap}(t_{j-1} - z_i), \qquad t_0 = -\infty,\ t_n = \infty

The slice around an item, one per row, is :math:`1 - \tfrac12 e^{z_i - t_j} - \tfrac12 e^{t_{j-1} - z_i}`. For the other
slices, of width :math:`h_j = t_j - t_{j-1}`, the difference of two tails is a product,

.. math:: P_{ij} = \tfrac12 (1 - e^{-h_j})\, e^{-\max(t_{j-1} - z_i,\; z_i - t_j)},

from which nothing cancels: with everything of length n in float64, entries in float32 keep all their digits, and rows
and columns their sums. While the items spread over few scales, the exponential too is a product of one of the row and
one of the column.

Layout: z, t (..., n), (..., n - 1) ascending in float64; ``order`` (..., n) is the place of each item in the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .capped_simplex import move_batch_first
from .dispatch import triton_runs
from .operator import operator

# Up to which distance from 0 the exponentials of items and cuts, and their products that count, are normal numbers.
_SAFE_EXPONENTS = {torch.float32: 60.0, torch.float64: 600.0}


@operator("slice_weights")
def slice_weights(z: Tensor, order: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    """P (..., n, n) of the module's docstring in ``dtype``, with the items as rows in the order they came in."""
    n, arithmetic = z.shape[-1], _arithmetic(dtype)
    if n == 0 or z.numel() == 0:
        return z.new_empty((*z.shape, n), dtype=dtype)
    if triton_runs(z):
        from .slices_triton import launch_slice_weights

        return launch_slice_weights(z, order, t, dtype)
    rows = z.new_empty(z.shape).scatter_(-1, order, z)
    lower, upper = pad(t, (1, 0), value=-torch.inf), pad(t, (0, 1), value=torch.inf)
    weight = (lower - upper).expm1().mul_(-0.5)
    if _spreads_little(z, t, arithmetic):
        rise, fall = rows.exp().to(arithmetic).unsqueeze(-1), rows.neg().exp().to(arithmetic).unsqueeze(-1)
        above, below = (-lower).exp().mul_(weight), upper.exp().mul_(weight)
        entries = rise * above.to(arithmetic).unsqueeze(-2)
        torch.minimum(entries, fall * below.to(arithmetic).unsqueeze(-2), out=entries)
    else:
        column, lower_row, upper_row = rows.unsqueeze(-1), lower.unsqueeze(-2), upper.unsqueeze(-2)
        entries = column - lower_row  # in float64, or far from 0 the difference had no digits
        torch.minimum(entries, upper_row - column, out=entries)
        entries = _exp_(entries.to(arithmetic)).mul_(weight.to(arithmetic).unsqueeze(-2))
    around = torch.searchsorted(t.contiguous(), rows)
    own = (rows - upper.gather(-1, around)).expm1_() + (lower.gather(-1, around) - rows).expm1_()
    entries.scatter_(-1, around.unsqueeze(-1), own.mul_(-0.5).to(arithmetic).unsqueeze(-1))
    return entries.to(dtype)


@slice_weights.register_fake
def _(z: Tensor, order: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    return z.new_empty((*z.shape, z.shape[-1]), dtype=dtype)


@slice_weights.register_vmap
def _(info: Any, in_dims: Any, z: Tensor, order: Tensor, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    z, order, t = move_batch_first(info.batch_size, in_dims, (z, order, t))
    return slice_weights(z, order, t, dtype), 0


@operator("slice_weights_derivative")
def slice_weights_derivative(z: Tensor, order: Tensor, t: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dz and dL/dt in float64 from dL/dP; the rows of ``grad`` are as those of P."""
    if z.numel() == 0:
        return torch.zeros_like(z), torch.zeros_like(t)
    if triton_runs(z):
        from .slices_triton import launch_slice_weights_derivative

        return launch_slice_weights_derivative(z, order, t, grad)
    arithmetic, rows = _arithmetic(grad.dtype), z.new_empty(z.shape).scatter_(-1, order, z)
    if _spreads_little(z, t, arithmetic):
        rise, fall, up, down = (v.exp().to(arithmetic) for v in (rows, -rows, t, -t))
        density = rise.unsqueeze(-1) * down.unsqueeze(-2)
        torch.minimum(density, fall.unsqueeze(-1) * up.unsqueeze(-2), out=density)
    else:
        density = _exp_((rows.unsqueeze(-1) - t.unsqueeze(-2)).to(arithmetic).abs_().neg_())
    grad = grad.to(arithmetic)
    flow = (grad[..., :-1] - grad[..., 1:]).mul_(density)  # (..., n, n - 1), twice the flow
    return flow.sum(-1).double().mul_(-0.5).gather(-1, order), flow.sum(-2).double().mul_(0.5)


@slice_weights_derivative.register_fake
def _(z: Tensor, order: Tensor, t: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), t.new_empty(t.shape)


@slice_weights_derivative.register_vmap
def _(info: Any, in_dims: Any, *args: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return slice_weights_derivative(*move_batch_first(info.batch_size, in_dims, args)), (0, 0)


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _exp_(v: Tensor) -> Tensor:
    """In place; exp takes a CPU ten times as long where it underflows, a square does not."""
    return v.mul_(0.5).clamp_(min=-_SAFE_EXPONENTS[v.dtype]).exp_().square_()


def _spreads_little(z: Tensor, t: Tensor, dtype: torch.dtype) -> bool:
    """Whether exponentials of items and cuts fit ``dtype``; not looked for where that would stall."""
    if z.is_cuda or t.numel() == 0:
        return False
    ends = torch.cat([z[..., [0, -1]], t[..., [0, -1]]], -1)
    return bool(ends.abs().max() <= _SAFE_EXPONENTS[dtype])
