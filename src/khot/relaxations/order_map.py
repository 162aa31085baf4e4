"""The order maps in eager mode: after the sort one function forward, and one backward.

On accelerators, for rows that fit on chip, these are Triton kernels. On a CPU they take rows tile by tile, which keeps
a few numbers of each item where operations with derivatives of their own keep dozens. Compiled graphs, function
transforms and forward mode take the operations of :mod:`khot.relaxations.laplace`, and so do derivatives of higher
order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._torch_internals import in_forward_mode
from khot.kernels.order import tiles as order_tiles
from khot.kernels.registry import is_eager, sorts_on_chip, triton_runs


class InTiles(NamedTuple):
    """A map and its derivative in :mod:`khot.kernels.order.tiles`."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


RANK = InTiles(order_tiles.soft_rank, order_tiles.soft_rank_derivative)
SORT = InTiles(order_tiles.soft_sort, order_tiles.soft_sort_derivative)


class OrderMap(NamedTuple):
    """A map of rows ``values, order = x.sort(-1)``, in differentiable operations and in others that are faster.

    Attributes:
        compose: From values and order (..., n) and the scale, a number or of the batch shape (...).
        kernels: Its name among those of :mod:`khot.kernels.order.triton_maps`.
        tiles: How a CPU does it, if there is a way.
    """

    compose: Callable[[Tensor, Tensor, float | Tensor], Tensor]
    kernels: str
    tiles: InTiles | None = None

    def launchers(self) -> Any:
        """Its kernels; imports Triton."""
        from khot.kernels.order.triton_maps import LAUNCHERS

        return LAUNCHERS[self.kernels]

    def __call__(self, x: Tensor, values: Tensor, order: Tensor, scale: float | Tensor) -> Tensor:
        """The map of x (..., n), sorted already."""
        if not is_eager(x, scale) or in_forward_mode() or x.numel() == 0:
            return self.compose(values, order, scale)
        on_chip = sorts_on_chip(x)
        if not on_chip and (self.tiles is None or x.device.type != "cpu" or triton_runs(x)):
            return self.compose(values, order, scale)
        device = x.device if isinstance(scale, Tensor) else "cpu"  # a number saves a launch there
        scale = torch.as_tensor(scale, dtype=torch.float64, device=device).expand(x.shape[:-1])
        return (_OnChip if on_chip else _InTiles).apply(x, scale, values.detach(), order, self)


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, _, order, *_ = ctx.saved_tensors
    inputs = [v for v in (x, scale) if v.requires_grad]
    with torch.enable_grad():
        result = ctx.order_map.compose(x.gather(-1, order), order, scale)
    found = iter(torch.autograd.grad(result, inputs, grad, create_graph=torch.is_grad_enabled()))
    return *(next(found) if v.requires_grad else None for v in (x, scale)), None, None, None


class _OnChip(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, values: Tensor, order: Tensor, order_map: OrderMap) -> Tensor:
        result, *saved = order_map.launchers().forward(values, order, scale)
        ctx.order_map = order_map
        ctx.save_for_backward(x, scale, values, order, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not is_eager(grad):
            return _differentiable_backward(ctx, grad)
        _, scale, values, order, *saved = ctx.saved_tensors
        grads = ctx.order_map.launchers().backward(values, order, scale, grad, *saved)
        return *(v if needed else None for v, needed in zip(grads, ctx.needs_input_grad, strict=False)), *[None] * 3


class _InTiles(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, values: Tensor, order: Tensor, order_map: OrderMap) -> Tensor:
        ctx.order_map = order_map
        ctx.save_for_backward(x, scale, values, order)
        assert order_map.tiles is not None
        rows, places = _rows(values, order)
        return order_map.tiles.forward(rows, places, scale.reshape(-1)).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not is_eager(grad):
            return _differentiable_backward(ctx, grad)
        x, scale, values, order = ctx.saved_tensors
        rows, with_scale = _rows(values, order, grad), ctx.needs_input_grad[1]
        grad_x, grad_scale = ctx.order_map.tiles.backward(*rows[:2], scale.reshape(-1), rows[2], with_scale)
        return grad_x.reshape(x.shape), grad_scale.reshape(scale.shape) if with_scale else None, None, None, None


def _rows(*tensors: Tensor) -> list[Tensor]:
    return [v.reshape(-1, v.shape[-1]) for v in tensors]
