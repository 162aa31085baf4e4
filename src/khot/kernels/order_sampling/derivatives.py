"""The fused integrals as differentiable functions of the positions.

Plain first derivatives are cheap: they use numbers that are already there, or one product with the Jacobian. Everything
else, and rows that a loop leaves, use the ``exact`` function that is passed in, which consists of differentiable
operations.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from khot._shapes import broadcast_shapes
from khot._torch_internals import for_transforms, no_view

from ..call import is_first_derivative
from ..operators.autograd import has_derivative, with_forward_mode
from . import integrals

Exact = Callable[..., Tensor]


def fused_log_prob(theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, exact: Exact) -> Tensor:
    """Log-probabilities ``(*sample, *batch)`` of ``value``, a constant; ``exact`` takes any rows, sizes and values."""
    with_slopes = has_derivative(theta, torch.is_grad_enabled())
    return cast(Tensor, _apply_log_prob(theta, k, value, noise, depth, with_slopes, exact)[0])


def fused_inclusion(theta: Tensor, k: Tensor, noise: str, depth: float, exact: Exact) -> Tensor:
    """Inclusion probabilities ``(*batch, n)``; ``exact`` takes any rows and their sizes."""
    return cast(Tensor, _apply_inclusion(theta, k, noise, depth, exact)[0])


class _LogProb(Function):
    @staticmethod
    def forward(
        theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, with_slopes: bool, exact: Exact
    ) -> tuple[Tensor, Tensor]:
        found, slopes = integrals.find(theta).log_prob(theta, k, value, noise, depth, with_slopes)
        left = found == torch.inf
        if left.any():
            shape = broadcast_shapes(theta.shape, value.shape)
            few = (x.detach().expand(shape[: len(shape) - less])[left] for x, less in ((theta, 0), (k, 1), (value, 0)))
            found[left], of_few = _value_and_slopes(exact, *few)
            if with_slopes:
                slopes[left] = of_few
        return no_view(found), slopes

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        theta, k, value, *_, exact = inputs
        ctx.definition = lambda t: exact(t, k, value)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(theta, output[1])
        ctx.save_for_forward(theta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        theta, slopes = ctx.saved_tensors
        grad_theta = None
        if grad is not None and is_first_derivative(theta, grad):
            grad_theta = (grad.unsqueeze(-1) * slopes).sum_to_size(theta.shape).to(theta.dtype)
        elif grad is not None:
            grad_theta = _pull_back(ctx.definition, theta, grad)
        return grad_theta, *(None,) * 6


def _value_and_slopes(exact: Exact, theta: Tensor, k: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    with for_transforms():
        found, pull_back = torch.func.vjp(lambda t: exact(t, k, value), theta.double())[:2]
        return found, pull_back(torch.ones_like(found))[0]


def _log_prob_jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: Any) -> tuple[Tensor, None]:
    return _push_forward(ctx.definition, saved[0], tangent), None


class _Inclusion(Function):
    @staticmethod
    def forward(theta: Tensor, k: Tensor, noise: str, depth: float, exact: Exact) -> tuple[Tensor, ...]:
        rows, sizes = _rows(theta), k.expand(theta.shape[:-1]).reshape(-1).contiguous()
        probs, when, given = integrals.find(rows).inclusion(rows, sizes, noise, depth)
        left = when[:, 0].isnan()
        if left.any():
            probs[left] = exact(rows[left], sizes[left])
        return no_view(probs.view(theta.shape)), sizes, when, given

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        theta, ctx.k, ctx.noise, ctx.depth, ctx.exact = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(theta, *output[1:])
        ctx.save_for_forward(theta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        theta, *law = ctx.saved_tensors
        grad_theta = None
        if grad is not None and is_first_derivative(theta, grad):
            grad_theta = _product(ctx, theta, grad, *law)
        elif grad is not None:
            grad_theta = _pull_back(lambda t: ctx.exact(t, ctx.k), theta, grad)
        return grad_theta, *(None,) * 4


def _product(ctx: Any, theta: Tensor, grad: Tensor, k: Tensor, when: Tensor, given: Tensor) -> Tensor:
    rows, vectors = _rows(theta), _rows(grad)
    product = integrals.find(rows).product(rows, k, when, given, vectors, ctx.noise, ctx.depth)
    left = when[:, 0].isnan()
    if left.any():
        product[left] = _pull_back(lambda t: ctx.exact(t, k[left]), rows[left], vectors[left])
    return cast(Tensor, product.view(theta.shape).to(theta.dtype))


def _rows(x: Tensor) -> Tensor:
    return x.detach().double().reshape(-1, x.shape[-1]).contiguous()


def _inclusion_jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return _push_forward(lambda t: ctx.exact(t, ctx.k), saved[0], tangent), None, None, None


_apply_log_prob = with_forward_mode(_LogProb, _log_prob_jvp)
_apply_inclusion = with_forward_mode(_Inclusion, _inclusion_jvp)


def _pull_back(definition: Callable[[Tensor], Tensor], theta: Tensor, grad: Tensor) -> Tensor:
    with for_transforms():
        return cast(Tensor, torch.func.vjp(definition, theta)[1](grad)[0])


def _push_forward(definition: Callable[[Tensor], Tensor], theta: Tensor, tangent: Tensor) -> Tensor:
    with for_transforms():
        value, pull_back = torch.func.vjp(definition, theta)[:2]
        # The backward map is linear, and forward mode its transposed derivative: torch.func.jvp does not nest
        # everywhere.
        zero = torch.zeros_like(value)
        return cast(Tensor, torch.func.vjp(lambda g: pull_back(g)[0], zero)[1](tangent)[0])
