r"""The positions, sums, quantiles and slices behind the order maps, as differentiable functions of the sorted items.

Derivatives are written in terms of the two-sided sums of :mod:`khot.kernels.order`. These are linear in their weights
and are each other's transposes, so derivatives of every order are such sums again.

For a quantile t of F the implicit function theorem gives :math:`dt = \sum_i \omega_i\,dz_i` with
:math:`\omega_i \propto e^{-|t - z_i|}`. This is the mean over the items on the left of t and the mean over those on its
right, combined with logistic weights that stay exact where all :math:`e^{-|t - z_i|}` underflow.

Values are computed from gaps and offsets, in which distant items cost no digits. Derivatives are carried by z and t in
one coordinate for the whole row. :func:`carried` joins the two.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot.kernels import order as kernel
from khot.kernels.operators.autograd import move_batch_first, with_derivatives_of, with_forward_mode
from khot.kernels.order import Points
from khot.kernels.order.slices import distances
from khot.kernels.order.sums import FAR


def carried(value: Tensor, carrier: Tensor) -> Tensor:
    """``value`` with the derivatives, of any order, of ``carrier``, which is the same number up to rounding."""
    return with_derivatives_of(value.detach(), carrier)


class _Positions(Function):
    """(values, scale) -> z and the gaps; the gaps carry no derivatives."""

    @staticmethod
    def forward(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return kernel.sorted_positions(values, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[1], *output)
        ctx.save_for_forward(inputs[1], *output)

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        scale, z, gap = ctx.saved_tensors
        # A function of z does not change when all items move together. So -<grad_z, z> is a sum over the gaps, and a
        # gap that nothing crosses contributes exactly 0, without cancellation.
        flow = -grad_z.cumsum(-1)[..., :-1]
        live = (gap < FAR)[..., 1:]
        stretch = carried(gap[..., 1:], z.diff(dim=-1)) * live
        return grad_z / scale, -(flow * stretch).sum(-1, keepdim=True) / scale

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
        return positions(*move_batch_first(info.batch_size, in_dims, args)), (0, 0)


class _DecayedSums(Function):
    """(z, gap, v_left, v_right) -> the sums of v_left over items on the left and of v_right over items on the right."""

    @staticmethod
    def forward(z: Tensor, gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return kernel.decayed_sums(z, gap, left, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad_before: Tensor, grad_after: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        z, gap, left, right, before, after = ctx.saved_tensors
        grad_right, grad_left = decayed_sums(z, gap, grad_after, grad_before)
        grad_z = grad_after * after - grad_before * before + left * grad_left - right * grad_right
        return grad_z, None, grad_left, grad_right

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
        return decayed_sums(*move_batch_first(info.batch_size, in_dims, args)), (0, 0)


class _SoftCountInverse(Function):
    """(z, gap, between) -> t and the :class:`khot.kernels.order.Points`, which carry no derivatives."""

    @staticmethod
    def forward(z: Tensor, gap: Tensor, between: bool) -> tuple[Tensor, ...]:
        offset, anchor, below = kernel.soft_count_inverse(z, gap, between)
        return z.gather(-1, anchor) + offset, offset, anchor, below

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output)
        ctx.save_for_forward(*inputs[:2], *output)

    @staticmethod
    def backward(ctx: Any, grad_t: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        z, gap, t, *points = ctx.saved_tensors
        on = _neighbours(z, gap, t, Points(*points))
        grad_left = torch.zeros_like(z).scatter_add(-1, on.lower, on.left_share * grad_t)
        grad_right = torch.zeros_like(z).scatter_add(-1, on.upper, on.right_share * grad_t)
        before, after = decayed_sums(z, gap, grad_right, grad_left)
        return grad_left + grad_right + before + after, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        z, gap = move_batch_first(info.batch_size, in_dims, args[:2])
        return _apply_inverse(z, gap, args[2]), (0,) * 4


class _Neighbours(NamedTuple):
    """For each t: its neighbouring items, and how strongly dt depends on the sums over either side."""

    lower: Tensor
    upper: Tensor
    left_share: Tensor  # weight of the sum over the items up to and including ``lower``
    right_share: Tensor  # weight of the sum over ``upper`` and the items above it


def _neighbours(z: Tensor, gap: Tensor, t: Tensor, points: Points) -> _Neighbours:
    n, below = z.shape[-1], points.below
    before, after = decayed_sums(z, gap, torch.ones_like(z), torch.ones_like(z))
    lower, upper = (below - 1).clamp(min=0), below.clamp(max=n - 1)
    mass_left, mass_right = 1 + before.gather(-1, lower), 1 + after.gather(-1, upper)
    width = gap.gather(-1, upper)
    farther_left = torch.where(points.anchor < below, width, -width) - 2 * points.offset  # compared with the right
    farther_left = carried(farther_left, z.gather(-1, lower) + z.gather(-1, upper) - 2 * t)
    balance = mass_left.log() - mass_right.log() + farther_left
    balance = balance.masked_fill(below == 0, -torch.inf).masked_fill(below == n, torch.inf)
    return _Neighbours(lower, upper, torch.sigmoid(balance) / mass_left, torch.sigmoid(-balance) / mass_right)


class _SliceWeights(Function):
    """:func:`khot.kernels.order.slice_weights`, with z and t before its arguments to carry the derivatives."""

    @staticmethod
    def forward(
        z: Tensor,
        t: Tensor,
        values: Tensor,
        scale: Tensor,
        order: Tensor,
        cuts: Tensor,
        offset: Tensor,
        below: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:  # not *arguments: in a strict export Dynamo takes t for one of them
        return kernel.slice_weights(values, scale, order, cuts, offset, below, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, t, values, scale, order, cuts, offset, _, ctx.dtype = inputs
        ctx.save_for_backward(z, t, values, scale, order, cuts, offset)
        ctx.save_for_forward(z, t, values, scale, order, cuts, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, t, values, scale, order, cuts, offset = ctx.saved_tensors
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            grads = kernel.slice_weights_derivative(values, scale, order, cuts, offset, grad)
            return *grads, *(None,) * 7
        density = _density(z, t, distances(values, scale, cuts, offset))
        flow = -_sorted_rows(grad.double(), order).diff(dim=-1) * density
        return -flow.sum(-1), flow.sum(-2), *(None,) * 7

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return slice_weights(*move_batch_first(info.batch_size, in_dims, args[:-1]), args[-1]), 0


def _sorted_rows(matrix: Tensor, order: Tensor) -> Tensor:
    return matrix.gather(-2, order.unsqueeze(-1).expand_as(matrix))


def _density(z: Tensor, t: Tensor, distance: Tensor) -> Tensor:
    return 0.5 * (-carried(distance, t.unsqueeze(-2) - z.unsqueeze(-1)).abs()).exp()


def _positions_jvp(ctx: Any, saved: list[Tensor], dvalues: Tensor, dscale: Tensor) -> tuple[Tensor, None]:
    scale, z, _ = saved
    return (dvalues - z * dscale) / scale, None


def _decayed_sums_jvp(
    ctx: Any, saved: list[Tensor], dz: Tensor, _: None, dleft: Tensor, dright: Tensor
) -> tuple[Tensor, Tensor]:
    z, gap, left, right, before, after = saved
    d_before, d_after = decayed_sums(z, gap, dleft + left * dz, dright - right * dz)
    return d_before - before * dz, d_after + after * dz


def _inverse_jvp(ctx: Any, saved: list[Tensor], dz: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    z, gap, t, *points = saved
    on = _neighbours(z, gap, t, Points(*points))
    before, after = decayed_sums(z, gap, dz, dz)
    dt = on.left_share * (dz + before).gather(-1, on.lower) + on.right_share * (dz + after).gather(-1, on.upper)
    return dt, None, None, None


def _slice_weights_jvp(ctx: Any, saved: list[Tensor], dz: Tensor, dt: Tensor, *_: None) -> Tensor:
    z, t, values, scale, order, cuts, offset = saved
    density = _density(z, t, distances(values, scale, cuts, offset))
    flow = density * (dt.unsqueeze(-2) - dz.unsqueeze(-1))
    change = torch.nn.functional.pad(flow, (1, 1)).diff(dim=-1).to(ctx.dtype)
    return torch.zeros_like(change).scatter(-2, order.unsqueeze(-1).expand_as(change), change)


_apply_positions = with_forward_mode(_Positions, _positions_jvp)
_apply_decayed_sums = with_forward_mode(_DecayedSums, _decayed_sums_jvp)
_apply_inverse = with_forward_mode(_SoftCountInverse, _inverse_jvp)
_apply_slice_weights = with_forward_mode(_SliceWeights, _slice_weights_jvp)


def positions(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`khot.kernels.order.sorted_positions`; differentiable in both for functions of the differences of z."""
    return _apply_positions(values, scale)


def decayed_sums(z: Tensor, gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`khot.kernels.order.decayed_sums`, differentiable in z and the weights."""
    return _apply_decayed_sums(z, gap, left, right)


def soft_count_inverse(z: Tensor, gap: Tensor, between: bool) -> tuple[Tensor, Points]:
    """t, differentiable in z, and the points of :func:`khot.kernels.order.soft_count_inverse`."""
    t, *points = _apply_inverse(z, gap, between)
    return t, Points(*points)


def slice_weights(z: Tensor, t: Tensor, *arguments: Any) -> Tensor:
    """:func:`khot.kernels.order.slice_weights` of the arguments after z and t, differentiable in z and t."""
    return _apply_slice_weights(z, t, *arguments)
