r"""The sparse maps by absolute value as differentiable functions of x, k and the strength.

Values and formulas are those of :mod:`khot.kernels.magnitude`. They are written in differentiable operations of abs(x),
the strength and the offset of the threshold, which is an output of the function, while its anchor is a constant: so
derivatives of every order follow as in :mod:`khot.relaxations.engine`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._distributed.placements import is_dtensor
from khot._distributed.shards import shards_of_rows
from khot._torch_internals import is_eager_everywhere, is_plain
from khot._validation import check_k, check_scores, check_softness, checks_contents
from khot.kernels.autograd import move_batch_first, with_forward_mode
from khot.kernels.links.clipped_power import ClippedPower
from khot.kernels.magnitude import odd_map, odd_map_derivative
from khot.kernels.magnitude.derivative import derivative
from khot.kernels.magnitude.local_shape import local_shape, over, times_square
from khot.kernels.rows import Threshold, compute_dtype

from .axes import as_axes, as_rows
from .engine import row_scalar
from .in_graphs import odd_map_in_graph
from .in_parts import odd_map_of_parts


class _OddFunction(Function):
    """(x, k, strength) -> (y, A, c) for x of shape (..., n), float64 k and strength of shape (...)."""

    @staticmethod
    def forward(
        x: Tensor, k: Tensor, strength: Tensor, link: ClippedPower, magnitude: bool, check: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return odd_map(x, k, strength, link.key, magnitude, check)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, _, strength, ctx.link, ctx.magnitude, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, strength, *output[1:])
        ctx.save_for_forward(x, strength, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, _: None, grad_offset: Tensor | None) -> tuple[Tensor | None, ...]:
        x, strength, anchor, offset = ctx.saved_tensors
        if (
            grad_y is not None
            and grad_offset is None
            and (torch.compiler.is_compiling() or not torch.is_grad_enabled())
        ):
            options = ctx.link.key, ctx.magnitude, ctx.needs_input_grad[2]
            return *odd_map_derivative(x, strength, anchor, offset, grad_y, *options), *(None,) * 3
        at = Threshold(anchor, offset)
        return *derivative(x, strength, at, grad_y, grad_offset, ctx.link, ctx.magnitude, None), *(None,) * 3

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        x, k, strength = move_batch_first(info.batch_size, in_dims, args[:3])
        return _apply(x, k, strength, *args[3:5], False), (0, 0, 0)


def _jvp(
    ctx: Any, saved: list[Tensor], dx: Tensor | None, dk: Tensor | None, ds: Tensor | None, *_: Any
) -> tuple[Tensor, None, Tensor]:
    x, strength, anchor, offset = saved
    wide = x.to(compute_dtype(x))
    sign = wide.sign()
    shape = local_shape(wide.abs(), Threshold(anchor, offset), strength, ctx.link, ctx.magnitude)
    da = torch.zeros_like(wide) if dx is None else dx.to(wide.dtype) * sign
    mean = over(shape.weight, (shape.slope * da).sum(-1).double())
    dy = times_square(shape.slope * (da - mean.to(wide.dtype).unsqueeze(-1)), shape.root_rate)
    shift = mean / shape.scale  # tau
    if shape.own_slope is not None:
        dy = dy + shape.own_slope * da
    if ds is not None:
        stretch = ds / strength
        mean = over(shape.weight, (shape.slope * shape.z).sum(-1).double())
        away = shape.slope * (shape.z - mean.to(wide.dtype).unsqueeze(-1))
        dy = dy - away * (shape.gain * stretch).to(wide.dtype).unsqueeze(-1)
        shift = shift - mean * stretch
        if shape.own_slope is not None and shape.own_lever is not None:
            dy = dy - shape.own_slope * shape.own_lever * ds.to(wide.dtype).unsqueeze(-1)
    if dk is not None:
        move = over(shape.weight, dk)
        dy = dy + shape.slope * (shape.gain * move).to(wide.dtype).unsqueeze(-1)
        shift = shift - move
    shift = shape.stretch * shift
    return (sign * dy).to(x.dtype), None, shift if ds is None else shift - offset * (ds / strength)


_apply = with_forward_mode(_OddFunction, _jvp)


class _OfScores(Function):
    """The map as a function of x alone, k and the strength being numbers, which they nearly always are: at less cost.

    Derivatives of its derivative are those of :class:`_OddFunction`, which solves for the threshold again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, strength: Tensor, link: ClippedPower, magnitude: bool) -> Tensor:
        y, anchor, offset = odd_map(x, k, strength, link.key, magnitude, checks_contents(x))
        ctx.save_for_backward(x, k, strength, anchor, offset)
        ctx.link, ctx.magnitude = link, magnitude
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, strength, anchor, offset = ctx.saved_tensors
        if torch.is_grad_enabled():
            y, _, _ = _apply(x, k, strength, ctx.link, ctx.magnitude, False)
            return torch.autograd.grad(y, x, grad, create_graph=True)[0], *(None,) * 4
        options = ctx.link.key, ctx.magnitude, False
        return odd_map_derivative(x, strength, anchor, offset, grad, *options)[0], *(None,) * 4


def _is_plain_call(x: Tensor, *numbers: Any) -> bool:
    """Whether this is a call on data, outside of all transforms, with numbers for all but x."""
    if torch.compiler.is_compiling() or any(isinstance(value, Tensor) for value in numbers):
        return False
    return is_plain(x) and is_eager_everywhere()


def apply_odd_map(
    x: Tensor,
    k: float | Tensor,
    strength: float | Tensor,
    dim: int | tuple[int, ...],
    link: ClippedPower,
    magnitude: bool,
) -> Tensor:
    """Checks the arguments and applies the map along ``dim``."""
    check_scores(x, dim, joint=True)
    if dim != -1:
        return as_axes(apply_odd_map(as_rows(x, dim), k, strength, -1, link, magnitude), x, dim)
    if not torch.compiler.is_compiling() and (shards := shards_of_rows()) is not None:
        return odd_map_of_parts(x, k, strength, link, magnitude, shards)
    batch, n = x.shape[:-1], x.shape[-1]
    check_k(k, x, batch, n)
    check_softness("strength", strength, x, batch)
    is_plain_call = _is_plain_call(x, k, strength)
    k, strength = (row_scalar(value, x, batch, on_host=False) for value in (k, strength))
    if is_plain_call and x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _OfScores.apply(x, k, strength, link, magnitude)
        return result
    if torch.compiler.is_compiling() and is_dtensor(x):
        return odd_map_in_graph(x, k, strength, link, magnitude)
    y, _, _ = _apply(x, k, strength, link, magnitude, checks_contents(x))
    return y
