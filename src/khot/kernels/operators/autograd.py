"""Forward-mode derivatives for autograd Functions, avoiding problems of torch.

Dynamo refuses to trace a Function that has a ``jvp``. Of the transforms of torch.func it traces only ``grad`` and
``vjp`` correctly, and these only if the Function does not get the argument of the differentiated function itself; other
derivatives would silently be zero. So would forward-over-forward derivatives, because torch switches forward mode off
inside a ``jvp``.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from khot._torch_internals import (
    apply_untransformed,
    in_forward_mode,
    leave_graph,
    nested_forward_mode,
    traced_transforms,
)

from ..call import Call, call_of, is_direct


def move_batch_first(size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a vmap rule with the batch as the first axis, expanded for tensors without it."""
    return [
        v if not isinstance(v, Tensor) else v.expand(size, *v.shape) if dim is None else v.movedim(dim, 0)
        for dim, v in zip(in_dims, arguments, strict=False)
    ]


def with_derivatives_of(value: Tensor, carrier: Tensor) -> Tensor:
    """``value``, with the derivatives of ``carrier``, of any order, added to its own: straight-through."""
    return value + (carrier - carrier.detach())


def move_batch_last(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The arguments of a vmap rule with the batch as the last axis."""
    return [x.movedim(0, -1) for x in move_batch_first(size, in_dims, tensors)]


class SavingFunction(Function):
    """A Function that saves its tensors for derivatives in both modes; ``ctx.plan`` has its other arguments."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.plan = [x for x in inputs if not isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


def with_forward_mode(function: type[Function], jvp: Callable[..., Any]) -> Callable[..., Any]:
    """The Function's ``apply``, with forward-mode derivatives of any order, and fit for ``torch.compile``.

    Args:
        function: A Function without ``jvp``, which saves what the rule needs.
        jvp: Rule ``jvp(ctx, saved, *tangents)`` in differentiable operations. It uses ``saved`` in place of
            ``ctx.saved_tensors``, which inside a rule still carry the tangents of its own level.

    Returns:
        ``apply(*args, call=None)``, where ``call`` is the kind of the call if it is known already.
    """

    def nestable(ctx: Any, *tangents: Any) -> Any:
        with nested_forward_mode():
            saved = [forward_ad.unpack_dual(v, level=0).primal for v in ctx.saved_tensors]
            return jvp(ctx, saved, *tangents)

    in_both_modes: Any = types.new_class(
        f"{function.__name__}ForwardMode", (function,), exec_body=lambda body: body.update(jvp=staticmethod(nestable))
    )

    def apply(*args: Any, call: Call | None = None) -> Any:
        call = call_of(*args) if call is None else call
        if call.is_compiling:
            return function.apply(*_for_traced_transforms(args))
        if not call.is_plain:
            return in_both_modes.apply(*args)
        if wants_gradient(*args):
            return apply_untransformed(in_both_modes, *args)
        with torch.no_grad():
            return function.forward(*args)  # at a tenth of the cost of `apply`

    return apply


def _for_traced_transforms(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a Function that Dynamo traces, changed so that no transform of torch.func loses its derivatives.

    Transforms for which this does not help end the graph.
    """
    transforms = traced_transforms()
    if transforms == ("Grad",):
        return tuple(v.view_as(v) if isinstance(v, Tensor) else v for v in args)
    if "Grad" in transforms or "Jvp" in transforms:
        leave_graph()
    return args


class _ByFormula(Function):
    @staticmethod
    def forward(ctx: Any, definition: Any, value: Any, slope: Any, *arguments: Tensor) -> Tensor:
        result, *kept = value(*arguments)
        ctx.definition, ctx.slope, ctx.count = definition, slope, len(arguments)
        ctx.save_for_backward(*arguments, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # only once: a checkpoint does not allow a second read
        x, *constants = tensors[: ctx.count]
        further, nothing = torch.is_grad_enabled(), [None] * len(constants)
        if not further and is_direct(g):
            return None, None, None, ctx.slope(g, *tensors), *nothing
        with torch.enable_grad():  # x becomes a view, because a constant may have been computed from it
            x = x.view_as(x) if further else x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.definition(x, *constants), x, g, create_graph=further)
        return None, None, None, *found, *nothing


def by_formula(
    definition: Callable[..., Tensor],
    value: Callable[..., Sequence[Tensor]],
    slope: Callable[..., Tensor],
    x: Tensor,
    *constants: Tensor,
) -> Tensor:
    """A function whose first derivative is a formula in eager code.

    Compilers, transforms and derivatives of higher order see the definition, as do derivatives in the constants.

    Args:
        definition: The function in differentiable operations.
        value: The function; its result is followed by further tensors that the formula needs.
        slope: The formula: dL/dx from dL/dresult, the arguments and these tensors.
        x: The argument in which the function is differentiated.
        *constants: Its other arguments.
    """
    if not is_direct(x, *constants) or wants_gradient(*constants):
        return definition(x, *constants)
    if wants_gradient(x):
        return apply_untransformed(_ByFormula, definition, value, slope, x, *constants)
    return value(x, *constants)[0]


def wants_gradient(*args: Any) -> bool:
    """Whether autograd should record a call with these arguments."""
    if torch.is_grad_enabled():
        for x in args:  # `any` of a generator takes several times as long
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def has_derivative(x: Tensor, recorded: bool) -> bool:
    """Whether x carries a tangent or, if graphs are ``recorded``, requires a gradient."""
    return (recorded and x.requires_grad) or (in_forward_mode() and forward_ad.unpack_dual(x).tangent is not None)
