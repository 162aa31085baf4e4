"""The order maps in eager mode: a sort, then one function for the forward pass and one for the backward pass.

The functions are loops in numba on a CPU, which keep a few numbers per item where a chain of differentiable operations
keeps dozens. Other devices, compiled graphs, function transforms, forward mode and derivatives of higher order use such
operations instead, as does an environment without numba.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._contents import looks_at_contents
from khot._torch_internals import no_view
from khot._validation import check_flag, check_rows, check_softness, check_softness_contents
from khot.kernels.call import Call, is_first_derivative
from khot.kernels.exact.rows import in_rows_of
from khot.kernels.operators.autograd import wants_gradient
from khot.kernels.order import RowMap, sorted_rows
from khot.kernels.order.sums import FAR
from khot.kernels.registry import Operation

from .excluded import Filled, filled_below


class _Sorted(NamedTuple):
    """The arguments of an :class:`OrderMap`."""

    x: Tensor  # with the axis moved to the end
    values: Tensor  # sorted, as constants
    order: Tensor  # their positions in x
    scale: float | Tensor  # negative for descending order, so that z = x/s still ascends


def sorted_scores(
    call: Call, x: Tensor, scale: float | Tensor, descending: bool, dim: int, name: str = "scale"
) -> tuple[_Sorted, Filled | None]:
    """Checked and sorted scores, filled if some may have been -inf; the softness has this ``name``."""
    check_rows(x, dim)
    if dim != -1:
        x = x.movedim(dim, -1)
    check_softness(name, scale, x, x.shape[:-1])
    check_flag("descending", descending)
    filled, looks = None, looks_at_contents(x) or x.numel() == 0
    if looks:
        values, order = sorted_rows(call, x, descending)
    if not looks or has_excluded(values, scale, name):
        # Neither densities nor blocks of ranks reach so far. A tensor, as exported programs multiply no number by n.
        filled = filled_below(x, 4 * (FAR + x.shape[-1]) * in_rows_of(x, scale).unsqueeze(-1))
        x = filled.x
        values, order = sorted_rows(call, x, descending)
    if descending:
        scale = -scale.double() if isinstance(scale, Tensor) else -scale
    return _Sorted(x, values, order, scale), filled


def has_excluded(ordered: Tensor, scale: float | Tensor, name: str) -> bool:
    """Whether entries are -inf. Checks the contents."""
    if ordered.numel() == 0:
        return False
    if isinstance(scale, Tensor) and looks_at_contents(scale):
        check_softness_contents(name, scale, ordered.dtype)
    widths = ordered.select(-1, 0) - ordered.select(-1, -1)  # NaN is sorted last, or first
    if math.isfinite(widths.sum().item()):  # may also fail if entries are so far apart that this overflows
        return False
    ends = ordered[..., [0, -1]]
    wrong = ends[~(ends < torch.inf)]
    if wrong.numel():
        raise ValueError(f"`x` must be finite or -inf, but contains {wrong[0].item()}")
    return bool((ends == -torch.inf).any())


@dataclass(frozen=True)  # as a constant tuple, Dynamo of torch 2.6 would have to write down its contents
class OrderMap:
    """A map of sorted rows, in differentiable operations and in faster ones.

    Attributes:
        compose: The map as a function of values and order (..., n) and the scale, a number or of the batch shape (...).
        whole: The faster backends, each a :class:`khot.kernels.order.RowMap`.
    """

    compose: Callable[[Tensor, Tensor, float | Tensor], Tensor]
    whole: Operation

    def __call__(self, call: Call, x: Tensor, values: Tensor, order: Tensor, scale: float | Tensor) -> Tensor:
        """The map of x (..., n), which is already sorted, in a call of this kind."""
        found = self.whole.find(x) if call.is_plain else None
        if found is None:
            return self.compose(x.gather(-1, order), order, scale)
        if isinstance(scale, Tensor):
            scale = scale.to(x.device, torch.float64).expand(x.shape[:-1])
        if wants_gradient(x, scale):
            result: Tensor = _Whole.apply(x, scale, values, order, found, self.compose)
            return result
        with torch.no_grad():
            return found.forward(values, order, scale)


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scales, _, order = ctx.saved_tensors
    scale = ctx.number if scales is None else scales
    inputs = [v for v, needed in zip((x, scale), ctx.needs_input_grad[:2], strict=True) if needed]
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
        return *(v if needed else None for v, needed in zip(grads, ctx.needs_input_grad[:2], strict=True)), *[None] * 4
