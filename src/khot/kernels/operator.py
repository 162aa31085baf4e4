"""Operators of ``torch.ops.khot``: compiled graphs keep them whole, and eager mode does without the dispatcher.

Through the dispatcher a call costs tens of microseconds, and the first one the import of torch's compiler and Triton.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from khot._validation import has_contents

# What is on and off in torch's dispatcher for code that nobody traces or transforms.
EAGER = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _is_plain(argument: Any) -> bool:
    """Whether a function can look at it: no tensor, or one with data, no subclass and under no function transform."""
    if not isinstance(argument, Tensor):
        return True
    transformed = functorch.is_functorch_wrapped_tensor(argument) or functorch.is_legacy_batchedtensor(argument)
    return type(argument) in (Tensor, Parameter) and not transformed and not argument.is_meta


def is_eager(*arguments: Any) -> bool:
    """Whether a function of these arguments runs now, on data, rather than being traced or transformed."""
    return not (torch.compiler.is_compiling() or _get_current_dispatch_mode()) and all(map(_is_plain, arguments))


def _define(name: str, function: Callable[..., Any], **options: Any) -> Any:
    @functools.wraps(function)
    def below_dispatcher(*args: Any) -> Any:
        # Who calls has switched off parts of the dispatcher that transforms of torch.func in the function need.
        with torch._C._ForceDispatchKeyGuard(*EAGER), torch.no_grad():
            return function(*args)

    return torch.library.custom_op(f"khot::{name}", below_dispatcher, mutates_args=(), **options)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a function that is not differentiable: registers it as the operator ``khot::name``.

    The result has the methods ``register_fake`` and ``register_vmap`` of the operator.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def without_grad(*args: Any) -> Any:
            with torch.no_grad():
                return function(*args)

        definition = _define(name, function)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return without_grad(*args) if is_eager(*args) else definition(*args)

        vars(call).update(register_fake=definition.register_fake, register_vmap=definition.register_vmap)
        return call

    return decorate


def differentiable_operator(name: str) -> Callable[[Callable[..., Tensor]], Any]:
    """Decorator for a function of tensors and constants, in differentiable operations that the contents decide on.

    On data it is the function itself. Graphs hold the operators ``khot::name`` and, for the first derivative in all
    floating-point tensors, ``khot::name_derivative``, which calls the function again. A vmap inside of a graph goes
    through them one by one.

    The result has the method ``register_fake`` of the operator.
    """

    def decorate(function: Callable[..., Tensor]) -> Any:
        def derivative(grad: Tensor, *args: Any) -> list[Tensor]:
            with torch.enable_grad():
                args = tuple(x.detach().requires_grad_() if _is_real(x) else x for x in args)
                found = torch.autograd.grad(function(*args), list(filter(_is_real, args)), grad, materialize_grads=True)
            return [x.clone(memory_format=torch.contiguous_format) for x in found]

        schema = torch.library.infer_schema(function, mutates_args=())
        of_derivative = schema.replace("(", "(Tensor grad, ", 1).replace("-> Tensor", "-> Tensor[]")
        value, slope = _define(name, function), _define(f"{name}_derivative", derivative, schema=of_derivative)

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
    """The arguments of a vmap for each of its calls."""
    return [
        [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)]
        for i in range(info.batch_size)
    ]
