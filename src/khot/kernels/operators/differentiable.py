"""Differentiable functions whose steps depend on contents: called directly on data, one operator each in graphs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._contents import has_contents

from ..registry import define


def differentiable_operator(name: str) -> Callable[[Callable[..., Tensor]], Any]:
    """Decorator for a function of tensors and constants, in differentiable operations that depend on the contents.

    On data it is the function itself. Graphs contain the operators ``khot::name`` and, for the first derivative in all
    floating-point tensors, ``khot::name_derivative``, which calls the function again. A vmap inside a graph calls them
    once for each element of the batch.

    The result has the method ``register_fake`` of the operator.
    """

    def decorate(function: Callable[..., Tensor]) -> Any:
        @functools.wraps(function)
        def in_order(*args: Any) -> Tensor:
            return function(*args).contiguous()  # as fakes are; strides of products differ between devices

        def derivative(grad: Tensor, *args: Any) -> list[Tensor]:
            with torch.enable_grad():
                args = tuple(x.detach().requires_grad_() if _is_real(x) else x for x in args)
                found = torch.autograd.grad(function(*args), list(filter(_is_real, args)), grad, materialize_grads=True)
            return [x.clone(memory_format=torch.contiguous_format) for x in found]

        schema = torch.library.infer_schema(function, mutates_args=())
        of_derivative = schema.replace("(", "(Tensor grad, ", 1).replace("-> Tensor", "-> Tensor[]")
        value, slope = define(name, in_order), define(f"{name}_derivative", derivative, schema=of_derivative)

        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            tensors = iter(ctx.saved_tensors)
            args = [next(tensors) if constant is None else constant for constant in ctx.constants]
            found = iter(slope(grad, *args))
            return tuple(next(found) if _is_real(x) else None for x in args)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
            ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]

        value.register_autograd(backward, setup_context=setup_context)
        value.register_vmap(
            lambda info, in_dims, *args: (torch.stack([value(*x) for x in _each(info, in_dims, args)]), 0)
        )

        @slope.register_fake
        def _(grad: Tensor, *args: Any) -> list[Tensor]:
            return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in filter(_is_real, args)]

        @slope.register_vmap
        def _(info: Any, in_dims: Any, *args: Any) -> tuple[list[Tensor], list[int]]:
            found = zip(*(slope(*x) for x in _each(info, in_dims, args)), strict=True)
            stacked = [torch.stack(parts) for parts in found]
            return stacked, [0] * len(stacked)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            tensors = (x for x in args if isinstance(x, Tensor))
            return function(*args) if has_contents(*tensors) else value(*args)

        vars(call).update(register_fake=value.register_fake)
        return call

    return decorate


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _each(info: Any, in_dims: Any, args: tuple[Any, ...]) -> list[list[Any]]:
    """The arguments of each call under a vmap."""
    return [
        [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)]
        for i in range(info.batch_size)
    ]
