"""The fused integrals as differentiable functions of the positions.

Plain first derivatives are cheap: they use numbers that are already there, or one product with the Jacobian. Everything
else uses the ``definition`` that is passed in, the same function of the positions in differentiable operations.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from khot._torch_internals import no_view

from ..call import is_first_derivative
from ..operators.autograd import has_derivative, with_forward_mode
from . import order_inclusion, order_inclusion_product, order_log_prob
from .noises import NOISES

Definition = Callable[[Tensor], Tensor]
Exact = Callable[[Tensor, Tensor], Tensor]


def fused_log_prob(theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, definition: Definition) -> Tensor:
    """Log-probabilities ``(*sample, *batch)`` of ``value``, a constant."""
    with_slopes = has_derivative(theta, torch.is_grad_enabled())
    found = cast(Tensor, _apply_log_prob(theta, k, value, noise, depth, with_slopes, definition)[0])
    if not NOISES[noise].smooth and bool(found.isnan().any()):  # a row has more kinks than a loop has room for
        return definition(theta)
    return found


def fused_inclusion(theta: Tensor, k: Tensor, noise: str, depth: float, exact: Exact) -> Tensor:
    """Inclusion probabilities ``(*batch, n)``; ``exact`` takes any rows and their sizes."""
    return cast(Tensor, _apply_inclusion(theta, k, noise, depth, exact)[0])


class _LogProb(Function):
    @staticmethod
    def forward(
        theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, with_slopes: bool, definition: Definition
    ) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], order_log_prob(theta, k, value, noise, depth, with_slopes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        theta, *_, ctx.definition = inputs
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


def _log_prob_jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: Any) -> tuple[Tensor, None]:
    return _push_forward(ctx.definition, saved[0], tangent), None


class _Inclusion(Function):
    @staticmethod
    def forward(theta: Tensor, k: Tensor, noise: str, depth: float, exact: Exact) -> tuple[Tensor, ...]:
        rows, sizes = _rows(theta), k.expand(theta.shape[:-1]).reshape(-1).contiguous()
        probs, *law = order_inclusion(rows, sizes, noise, depth)
        flagged = _flagged(law)
        if flagged is not None:
            probs[flagged] = exact(rows[flagged], sizes[flagged])
        return no_view(probs.view(theta.shape)), sizes, *law

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


def _flagged(law: Sequence[Tensor]) -> Tensor | None:
    """The rows that a loop has left, if there are any."""
    missed = law[-1][:, 0].isnan()
    return missed.nonzero().squeeze(-1) if missed.any() else None


def _product(ctx: Any, theta: Tensor, grad: Tensor, k: Tensor, *law: Tensor) -> Tensor:
    rows, vectors = _rows(theta), _rows(grad)
    product = order_inclusion_product(rows, k, *law, vectors, ctx.noise, ctx.depth)
    flagged = _flagged(law)
    if flagged is not None:
        product[flagged] = _pull_back(lambda t: ctx.exact(t, k[flagged]), rows[flagged], vectors[flagged])
    return cast(Tensor, product.view(theta.shape).to(theta.dtype))


def _rows(x: Tensor) -> Tensor:
    return x.detach().double().reshape(-1, x.shape[-1]).contiguous()


def _inclusion_jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return _push_forward(lambda t: ctx.exact(t, ctx.k), saved[0], tangent), *(None,) * 6


_apply_log_prob = with_forward_mode(_LogProb, _log_prob_jvp)
_apply_inclusion = with_forward_mode(_Inclusion, _inclusion_jvp)


def _pull_back(definition: Definition, theta: Tensor, grad: Tensor) -> Tensor:
    return cast(Tensor, torch.func.vjp(definition, theta)[1](grad)[0])


def _push_forward(definition: Definition, theta: Tensor, tangent: Tensor) -> Tensor:
    value, pull_back = torch.func.vjp(definition, theta)[:2]
    # The backward map is linear, and forward mode its transposed derivative: torch.func.jvp does not nest everywhere.
    zero = torch.zeros_like(value)
    return cast(Tensor, torch.func.vjp(lambda g: pull_back(g)[0], zero)[1](tangent)[0])
