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


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a function that is not differentiable: registers it as the operator ``khot::name``.

    The result has the methods ``register_fake`` and ``register_vmap`` of the operator.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def without_grad(*args: Any) -> Any:
            with torch.no_grad():
                return function(*args)

        @functools.wraps(function)
        def below_dispatcher(*args: Any) -> Any:
            # Who calls has switched off parts of the dispatcher that transforms of torch.func in the function need.
            with torch._C._ForceDispatchKeyGuard(*EAGER):
                return without_grad(*args)

        definition = torch.library.custom_op(f"khot::{name}", below_dispatcher, mutates_args=())

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return without_grad(*args) if is_eager(*args) else definition(*args)

        vars(call).update(register_fake=definition.register_fake, register_vmap=definition.register_vmap)
        return call

    return decorate
