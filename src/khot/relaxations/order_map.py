"""The order maps in eager mode: after the sort, one function for the forward pass and one for the backward pass.

These are loops in numba on a CPU, which keep a few numbers per item where a chain of differentiable operations keeps
dozens. Other devices, compiled graphs, function transforms, forward mode and derivatives of higher order use the
operations of :mod:`khot.relaxations.laplace` instead, as does an environment without numba.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._torch_internals import no_view
from khot.kernels.call import is_first_derivative, is_plain
from khot.kernels.order import RowMap
from khot.kernels.registry import Operation


@dataclass(frozen=True)  # as a constant tuple, Dynamo of torch 2.6 would have to write down its contents
class OrderMap:
    """A map of sorted rows, in differentiable operations and in faster ones.

    Attributes:
        compose: The map as a function of values and order (..., n) and the scale, a number or of the batch shape (...).
        whole: The faster backends, each a :class:`khot.kernels.order.RowMap`.
    """

    compose: Callable[[Tensor, Tensor, float | Tensor], Tensor]
    whole: Operation

    def __call__(self, x: Tensor, values: Tensor, order: Tensor, scale: float | Tensor) -> Tensor:
        """The map of x (..., n), which is already sorted."""
        found = self.whole.find(x) if is_plain(x, scale) else None
        if found is None:
            return self.compose(x.gather(-1, order), order, scale)
        if isinstance(scale, Tensor):
            scale = scale.to(x.device, torch.float64).expand(x.shape[:-1])
        if torch.is_grad_enabled() and (x.requires_grad or (isinstance(scale, Tensor) and scale.requires_grad)):
            result: Tensor = _Whole.apply(x, scale, values, order, found, self.compose)
            return result
        with torch.no_grad():
            return found.forward(values, order, scale)


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scales, _, order = ctx.saved_tensors
    scale = ctx.number if scales is None else scales
    inputs = [v for v, needed in zip((x, scale), ctx.needs_input_grad, strict=False) if needed]
    with torch.enable_grad():
        result = ctx.compose(x.gather(-1, order), order, scale)
    found = iter(torch.autograd.grad(result, inputs, grad, create_graph=torch.is_grad_enabled()))
    return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None, None, None


class _Whole(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | float,
        values: Tensor,
        order: Tensor,
        rows: RowMap,
        compose: Callable[..., Tensor],
    ) -> Tensor:
        result = rows.forward(values, order, scale)
        ctx.rows, ctx.compose = rows, compose
        scales, ctx.number = (scale, None) if isinstance(scale, Tensor) else (None, scale)
        ctx.save_for_backward(x, scales, values, order)
        return no_view(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not is_first_derivative(grad):
            return _differentiable_backward(ctx, grad)
        _, scales, values, order = ctx.saved_tensors
        scale = ctx.number if scales is None else scales
        grads = ctx.rows.backward(values, order, scale, grad, ctx.needs_input_grad[1])
        return *(v if needed else None for v, needed in zip(grads, ctx.needs_input_grad, strict=False)), *[None] * 4
