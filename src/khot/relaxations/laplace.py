r"""The sums, quantiles and slices behind the order maps, as differentiable functions of the sorted items.

Derivatives are written in the two-sided sums of :mod:`khot.kernels.lapsum`, which are linear in their weights and one
another's transposes, so the derivatives of every order are such sums again. For a quantile t of F the implicit function
theorem gives :math:`dt = \sum_i \omega_i\,dz_i`, :math:`\omega_i \propto e^{-|t - z_i|}`: the mean over the items on
the left of t and the mean over those on its right, weighted by a logistic function that stays exact where all
:math:`e^{-|t - z_i|}` underflow.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot.kernels.capped_simplex import move_batch_first
from khot.kernels.forward_mode import with_forward_mode
from khot.kernels.lapsum import laplace_quantiles, laplace_sums


class _Sums(Function):
    """(z, v_left, v_right) -> the sums over the left of v_left and over the right of v_right."""

    @staticmethod
    def forward(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return laplace_sums(z, left, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad_before: Tensor, grad_after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, left, right, before, after = ctx.saved_tensors
        grad_right, grad_left = sums(z, grad_after, grad_before)
        grad_z = grad_after * after - grad_before * before + left * grad_left - right * grad_right
        return grad_z, grad_left, grad_right

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
        return sums(*move_batch_first(info.batch_size, in_dims, args)), (0, 0)


class _Quantiles(Function):
    """(z, between) -> the quantiles of :func:`khot.kernels.lapsum.laplace_quantiles` and the numbers of items below."""

    @staticmethod
    def forward(z: Tensor, between: bool) -> tuple[Tensor, Tensor]:
        return laplace_quantiles(z, between)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], *output)
        ctx.save_for_forward(inputs[0], *output)

    @staticmethod
    def backward(ctx: Any, grad_t: Tensor, _: Tensor) -> tuple[Tensor, None]:
        z, t, below = ctx.saved_tensors
        lower, upper, on_left, on_right = _quantile_shares(z, t, below)
        grad_left = torch.zeros_like(z).scatter_add(-1, lower, on_left * grad_t)
        grad_right = torch.zeros_like(z).scatter_add(-1, upper, on_right * grad_t)
        before, after = sums(z, grad_right, grad_left)
        return grad_left + grad_right + before + after, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        (z,) = move_batch_first(info.batch_size, in_dims, args[:1])
        return quantiles(z, args[1]), (0, 0)


def _quantile_shares(z: Tensor, t: Tensor, below: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The neighbours of each t, and by how much dt follows the sums over the left of the one and right of the other."""
    n = z.shape[-1]
    before, after = sums(z, torch.ones_like(z), torch.ones_like(z))
    lower, upper = (below - 1).clamp(min=0), below.clamp(max=n - 1)
    mass_left, mass_right = 1 + before.gather(-1, lower), 1 + after.gather(-1, upper)
    balance = mass_left.log() - mass_right.log() + z.gather(-1, lower) + z.gather(-1, upper) - 2 * t
    balance = balance.masked_fill(below == 0, -torch.inf).masked_fill(below == n, torch.inf)
    return lower, upper, torch.sigmoid(balance) / mass_left, torch.sigmoid(-balance) / mass_right


class _Slices(Function):
    r"""(z, t) -> P[i, j] = Lap(t_j - z_i) - Lap(t_{j-1} - z_i), with t_0 = -inf and t_n = inf added; saves z and t."""

    @staticmethod
    def forward(z: Tensor, t: Tensor) -> Tensor:
        # Each difference between the shorter tails, so that small entries keep their digits.
        distance = t.unsqueeze(-2) - z.unsqueeze(-1)  # (..., n, n - 1)
        tail = distance.abs().neg_().exp_().mul_(0.5).copysign_(distance)  # negative below the item
        left = torch.nn.functional.pad(tail, (1, 0), value=-0.0)
        right = torch.nn.functional.pad(tail, (0, 1), value=0.0)
        return (left - right).add_(left.signbit().logical_and_(~right.signbit()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        flow = -grad.diff(dim=-1) * _density(*ctx.saved_tensors)
        return -flow.sum(-1), flow.sum(-2)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
        return slices(*move_batch_first(info.batch_size, in_dims, args)), 0


def _density(z: Tensor, t: Tensor) -> Tensor:
    return 0.5 * (-(t.unsqueeze(-2) - z.unsqueeze(-1)).abs()).exp()


def _sums_jvp(ctx: Any, saved: list[Tensor], dz: Tensor, dleft: Tensor, dright: Tensor) -> tuple[Tensor, Tensor]:
    z, left, right, before, after = saved
    d_before, d_after = sums(z, dleft + left * dz, dright - right * dz)
    return d_before - before * dz, d_after + after * dz


def _quantiles_jvp(ctx: Any, saved: list[Tensor], dz: Tensor, _: None) -> tuple[Tensor, None]:
    z, t, below = saved
    lower, upper, on_left, on_right = _quantile_shares(z, t, below)
    before, after = sums(z, dz, dz)
    return on_left * (dz + before).gather(-1, lower) + on_right * (dz + after).gather(-1, upper), None


def _slices_jvp(ctx: Any, saved: list[Tensor], dz: Tensor, dt: Tensor) -> Tensor:
    flow = _density(*saved) * (dt.unsqueeze(-2) - dz.unsqueeze(-1))
    return torch.nn.functional.pad(flow, (1, 1)).diff(dim=-1)


_apply_sums = with_forward_mode(_Sums, _sums_jvp)
_apply_quantiles = with_forward_mode(_Quantiles, _quantiles_jvp)
_apply_slices = with_forward_mode(_Slices, _slices_jvp)


def sums(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`khot.kernels.lapsum.laplace_sums`, differentiable in z and the weights."""
    return _apply_sums(z, left, right)


def quantiles(z: Tensor, between: bool) -> tuple[Tensor, Tensor]:
    """:func:`khot.kernels.lapsum.laplace_quantiles`, differentiable in z."""
    return _apply_quantiles(z, between)


def slices(z: Tensor, t: Tensor) -> Tensor:
    """P[i, j] = Lap(t_j - z_i) - Lap(t_{j-1} - z_i), with t_0 = -inf and t_n = inf: (..., n, n); z in any order."""
    return _apply_slices(z, t)
