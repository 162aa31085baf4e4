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

from khot.kernels import lapsum, slices
from khot.kernels.capped_simplex import move_batch_first
from khot.kernels.forward_mode import with_forward_mode


class _DecayedSums(Function):
    """(z, v_left, v_right) -> the sums over the left of v_left and over the right of v_right."""

    @staticmethod
    def forward(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return lapsum.decayed_sums(z, left, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad_before: Tensor, grad_after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, left, right, before, after = ctx.saved_tensors
        grad_right, grad_left = decayed_sums(z, grad_after, grad_before)
        grad_z = grad_after * after - grad_before * before + left * grad_left - right * grad_right
        return grad_z, grad_left, grad_right

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
        return decayed_sums(*move_batch_first(info.batch_size, in_dims, args)), (0, 0)


class _SoftCountInverse(Function):
    """(z, between) -> the points of :func:`khot.kernels.lapsum.soft_count_inverse` and the numbers of items below."""

    @staticmethod
    def forward(z: Tensor, between: bool) -> tuple[Tensor, Tensor]:
        return lapsum.soft_count_inverse(z, between)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], *output)
        ctx.save_for_forward(inputs[0], *output)

    @staticmethod
    def backward(ctx: Any, grad_t: Tensor, _: Tensor) -> tuple[Tensor, None]:
        z, t, below = ctx.saved_tensors
        lower, upper, on_left, on_right = _inverse_shares(z, t, below)
        grad_left = torch.zeros_like(z).scatter_add(-1, lower, on_left * grad_t)
        grad_right = torch.zeros_like(z).scatter_add(-1, upper, on_right * grad_t)
        before, after = decayed_sums(z, grad_right, grad_left)
        return grad_left + grad_right + before + after, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        (z,) = move_batch_first(info.batch_size, in_dims, args[:1])
        return soft_count_inverse(z, args[1]), (0, 0)


def _inverse_shares(z: Tensor, t: Tensor, below: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The neighbours of each t, and by how much dt follows the sums over the left of the one and right of the other."""
    n = z.shape[-1]
    before, after = decayed_sums(z, torch.ones_like(z), torch.ones_like(z))
    lower, upper = (below - 1).clamp(min=0), below.clamp(max=n - 1)
    mass_left, mass_right = 1 + before.gather(-1, lower), 1 + after.gather(-1, upper)
    balance = mass_left.log() - mass_right.log() + z.gather(-1, lower) + z.gather(-1, upper) - 2 * t
    balance = balance.masked_fill(below == 0, -torch.inf).masked_fill(below == n, torch.inf)
    return lower, upper, torch.sigmoid(balance) / mass_left, torch.sigmoid(-balance) / mass_right


class _SliceWeights(Function):
    """(z, order, t, dtype) -> :func:`khot.kernels.slices.slice_weights`; saves z, order and t."""

    @staticmethod
    def forward(z: Tensor, order: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
        return slices.slice_weights(z, order, t, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])
        ctx.dtype = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        z, order, t = ctx.saved_tensors
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            grad_z, grad_t = slices.slice_weights_derivative(z, order, t, grad)
            return grad_z, None, grad_t, None
        flow = -_sorted_rows(grad.double(), order).diff(dim=-1) * _density(z, t)
        return -flow.sum(-1), None, flow.sum(-2), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        z, order, t = move_batch_first(info.batch_size, in_dims, args[:3])
        return slice_weights(z, order, t, args[3]), 0


def _sorted_rows(matrix: Tensor, order: Tensor) -> Tensor:
    return matrix.gather(-2, order.unsqueeze(-1).expand_as(matrix))


def _density(z: Tensor, t: Tensor) -> Tensor:
    return 0.5 * (-(t.unsqueeze(-2) - z.unsqueeze(-1)).abs()).exp()


def _decayed_sums_jvp(
    ctx: Any, saved: list[Tensor], dz: Tensor, dleft: Tensor, dright: Tensor
) -> tuple[Tensor, Tensor]:
    z, left, right, before, after = saved
    d_before, d_after = decayed_sums(z, dleft + left * dz, dright - right * dz)
    return d_before - before * dz, d_after + after * dz


def _inverse_jvp(ctx: Any, saved: list[Tensor], dz: Tensor, _: None) -> tuple[Tensor, None]:
    z, t, below = saved
    lower, upper, on_left, on_right = _inverse_shares(z, t, below)
    before, after = decayed_sums(z, dz, dz)
    return on_left * (dz + before).gather(-1, lower) + on_right * (dz + after).gather(-1, upper), None


def _slice_weights_jvp(ctx: Any, saved: list[Tensor], dz: Tensor, _: None, dt: Tensor, __: None) -> Tensor:
    z, order, t = saved
    flow = _density(z, t) * (dt.unsqueeze(-2) - dz.unsqueeze(-1))
    change = torch.nn.functional.pad(flow, (1, 1)).diff(dim=-1).to(ctx.dtype)
    return torch.zeros_like(change).scatter(-2, order.unsqueeze(-1).expand_as(change), change)


_apply_decayed_sums = with_forward_mode(_DecayedSums, _decayed_sums_jvp)
_apply_inverse = with_forward_mode(_SoftCountInverse, _inverse_jvp)
_apply_slice_weights = with_forward_mode(_SliceWeights, _slice_weights_jvp)


def decayed_sums(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`khot.kernels.lapsum.decayed_sums`, differentiable in z and the weights."""
    return _apply_decayed_sums(z, left, right)


def soft_count_inverse(z: Tensor, between: bool) -> tuple[Tensor, Tensor]:
    """:func:`khot.kernels.lapsum.soft_count_inverse`, differentiable in z."""
    return _apply_inverse(z, between)


def slice_weights(z: Tensor, order: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`khot.kernels.slices.slice_weights`, differentiable in z and t."""
    return _apply_slice_weights(z, order, t, dtype)
