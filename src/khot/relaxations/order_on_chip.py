"""The order maps of rows that fit on chip: after the sort one Triton kernel forward, and one backward.

For plain tensors in eager mode. Compiled graphs, function transforms and forward mode take the operations of
:mod:`khot.relaxations.laplace`, as other rows do, and so do derivatives of higher order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from khot.kernels.dispatch import sorts_on_chip
from khot.kernels.operator import is_eager


class OrderMap(NamedTuple):
    """A map of rows ``values, order = x.sort(-1)``, in differentiable operations and in kernels.

    Attributes:
        compose: From values and order (..., n) and the scale, a number or of the batch shape (...).
        kernels: Its name among those of :mod:`khot.kernels.order_triton`.
    """

    compose: Callable[[Tensor, Tensor, float | Tensor], Tensor]
    kernels: str

    def launchers(self) -> Any:
        """Its kernels; imports Triton."""
        from khot.kernels.order_triton import LAUNCHERS

        return LAUNCHERS[self.kernels]

    def __call__(self, x: Tensor, values: Tensor, order: Tensor, scale: float | Tensor) -> Tensor:
        """The map of x (..., n), sorted already."""
        if not (is_eager(x, scale) and forward_ad._current_level < 0 and sorts_on_chip(x)):
            return self.compose(values, order, scale)
        device = x.device if isinstance(scale, Tensor) else "cpu"  # a number saves a launch there
        scale = torch.as_tensor(scale, dtype=torch.float64, device=device).expand(x.shape[:-1])
        return _OnChip.apply(x, scale, values.detach(), order, self)


class _OnChip(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, values: Tensor, order: Tensor, order_map: OrderMap) -> Tensor:
        result, *saved = order_map.launchers().forward(values, order, scale)
        ctx.order_map = order_map
        ctx.save_for_backward(x, scale, values, order, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, values, order, *saved = ctx.saved_tensors
        graph = torch.is_grad_enabled()
        if is_eager(grad) and not graph:
            grads = ctx.order_map.launchers().backward(values, order, scale, grad, *saved)
            return *(v if needed else None for v, needed in zip(grads, ctx.needs_input_grad, strict=False)), *[None] * 3
        inputs = [v for v in (x, scale) if v.requires_grad]
        with torch.enable_grad():
            result = ctx.order_map.compose(x.gather(-1, order), order, scale)
        found = iter(torch.autograd.grad(result, inputs, grad, create_graph=graph))
        return *(next(found) if v.requires_grad else None for v in (x, scale)), None, None, None
