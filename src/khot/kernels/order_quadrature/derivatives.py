"""The fused integrals as differentiable functions of the positions.

A plain first derivative goes a short way, of numbers that are there or of one product with the Jacobian; everything else
goes through the ``definition`` that is handed in, a function of the same arguments in differentiable operations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..autograd import has_derivative, with_forward_mode
from . import order_inclusion, order_inclusion_product, order_log_prob

Definition = Callable[..., Tensor]


def is_differentiated(x: Tensor) -> bool:
    """Whether someone asks for a derivative by x."""
    return has_derivative(x, torch.is_grad_enabled())


def fused_log_prob(theta: Tensor, k: Tensor, value: Tensor, noise: str, definition: Definition) -> Tensor:
    """Log-probabilities of ``value``, a constant."""
    of_theta = partial(definition, k=k, value=value, noise=noise)
    log_prob, _ = _apply_log_prob(theta, k, value, noise, is_differentiated(theta), of_theta)
    return cast(Tensor, log_prob)


def fused_inclusion(theta: Tensor, k: Tensor, noise: str, definition: Definition) -> Tensor:
    """Inclusion probabilities."""
    return cast(Tensor, _apply_inclusion(theta, k, noise, partial(definition, k=k, noise=noise)))


class _LogProb(Function):
    @staticmethod
    def forward(
        theta: Tensor, k: Tensor, value: Tensor, noise: str, with_slopes: bool, definition: Definition
    ) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], order_log_prob(theta, k, value, noise, with_slopes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        theta, *_, ctx.definition = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(theta, output[1])
        ctx.save_for_forward(theta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        theta, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            grad_theta = _pull_back(ctx.definition, theta, grad)
        else:
            grad_theta = (grad.unsqueeze(-1) * slopes).sum_to_size(theta.shape).to(theta.dtype)
        return grad_theta, *(None,) * 5


def _log_prob_jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: Any) -> tuple[Tensor, None]:
    return _push_forward(ctx.definition, saved[0], tangent), None


class _Inclusion(Function):
    @staticmethod
    def forward(theta: Tensor, k: Tensor, noise: str, definition: Definition) -> Tensor:
        return cast(Tensor, order_inclusion(theta, k, noise))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        theta, k, ctx.noise, ctx.definition = inputs
        ctx.save_for_backward(theta, k)
        ctx.save_for_forward(theta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        theta, k = ctx.saved_tensors
        if torch.is_grad_enabled():
            grad_theta = _pull_back(ctx.definition, theta, grad)
        else:
            grad_theta = order_inclusion_product(theta, k, grad, ctx.noise).to(theta.dtype)
        return grad_theta, *(None,) * 3


def _inclusion_jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: Any) -> Tensor:
    return _push_forward(ctx.definition, saved[0], tangent)


_apply_log_prob = with_forward_mode(_LogProb, _log_prob_jvp)
_apply_inclusion = with_forward_mode(_Inclusion, _inclusion_jvp)


def _pull_back(definition: Definition, theta: Tensor, grad: Tensor) -> Tensor:
    return cast(Tensor, torch.func.vjp(definition, theta)[1](grad)[0])


def _push_forward(definition: Definition, theta: Tensor, tangent: Tensor) -> Tensor:
    value, pull_back = torch.func.vjp(definition, theta)[:2]
    # The map back is linear, and the map forward its own derivative transposed: torch.func.jvp does not nest everywhere.
    zero = torch.zeros_like(value)
    return cast(Tensor, torch.func.vjp(lambda g: pull_back(g)[0], zero)[1](tangent)[0])
