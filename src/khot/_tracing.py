"""Functions whose steps depend on the contents of tensors, as single operations to tracers.

``torch.jit.trace``, on which Pyro's JitTrace losses are based, records operations on tensors and treats everything else
as constant: the number of steps of a search, the nodes that a rule chose, the result of a comparison. Therefore
anything that searches, draws or checks is recorded as one operation. It runs the Python function again whenever the
trace runs, on the new contents, with fresh random numbers and with its gradients. Such a trace cannot be saved, as
torch then reports; ``torch.export`` makes programs that can.

Tensor subclasses that override torch's functions, such as those by which Pyro's TraceGraph_ELBO tracks dependencies,
also receive whole calls, which run on plain tensors: a Function that is given the subclass itself loses the gradient.

The same calls run on the host if a device, such as Apple's, has no float64, which thresholds need.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributions import Distribution, Transform
from torch.overrides import handle_torch_function, has_torch_function
from torch.types import _size as SizeLike

from ._torch_internals import is_tracing, leave_graph, outside_trace, overrides_torch_functions, traced_transforms

__all__ = [
    "broadcast_shapes",
    "has_float64",
    "is_moved_to_host",
    "is_one_operation",
    "one_operation",
    "overrides_functions",
    "shape_of",
    "untraced",
]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for checks: a trace neither records the contents that they read nor warns about it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_tracing():
            return function(*args, **kwargs)
        with outside_trace():
            return function(*args, **kwargs)

    return call


def shape_of(x: Tensor) -> torch.Size:
    """The shape as integers, which are constants for a trace: it is valid for inputs of the same shape."""
    if not is_tracing():
        return x.shape
    with outside_trace():
        return x.shape


@untraced
def broadcast_shapes(*shapes: SizeLike) -> torch.Size:
    """Like torch's function, but for shapes of integers, and faster.

    A call of torch's function takes as long as ten operations on small tensors, and the first one in a process imports
    SymPy. It is used only for shapes with symbols.
    """
    if torch.compiler.is_compiling():
        return torch.broadcast_shapes(*shapes)
    lengths = [length for shape in shapes for length in shape]
    if any(isinstance(length, Tensor) for length in lengths):  # lengths of a tensor that torch.jit traces
        shapes = tuple(torch.Size(map(int, shape)) for shape in shapes)
    elif not all(type(length) is int for length in lengths):
        return torch.broadcast_shapes(*shapes)
    first = torch.Size(shapes[0])
    return first if all(shape == first for shape in shapes) else _broadcast_integers(shapes)


def _broadcast_integers(shapes: tuple[SizeLike, ...]) -> torch.Size:
    found = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, length in enumerate(shape, len(found) - len(shape)):
            if length != 1 and found[i] not in (1, length):
                raise RuntimeError(f"shapes {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast")
            found[i] = length if found[i] == 1 else found[i]
    return torch.Size(found)


WITHOUT_FLOAT64 = {"mps"}  # device types


def has_float64(x: Tensor) -> bool:
    """Whether the device of a tensor has float64."""
    return x.device.type not in WITHOUT_FLOAT64


@overload
def one_operation(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def one_operation(*, needs_float64: bool) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def one_operation(function: Callable[..., Any] | None = None, *, needs_float64: bool = True) -> Callable[..., Any]:
    """Decorator: a trace records a call as one operation, which calls the function again whenever the trace runs.

    Tensors are found among the arguments, in containers, partial functions and distributions; every other argument is
    a constant. The result is a tensor or a tuple of tensors; random ones must have no gradient.

    Tensors on a device without float64 are moved to the host and the result back, unless the function does not need it.
    """
    if function is None:
        return functools.partial(one_operation, needs_float64=needs_float64)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if not {"Grad", "Jvp"}.isdisjoint(traced_transforms()):  # whose derivatives would silently be zero
                leave_graph()
            return function(*args, **kwargs)
        if not is_one_operation(args, kwargs, needs_float64):
            return function(*args, **kwargs)
        tensors: list[Tensor] = []
        operation = _Call(function, _without_tensors((args, kwargs), tensors))
        device = _device_without_float64(args, kwargs) if needs_float64 else None
        return _run(operation, *tensors) if device is None else _on_host(operation, device, tensors)

    return call


def is_one_operation(args: tuple[Any, ...], kwargs: dict[str, Any], needs_float64: bool = True) -> bool:
    """Whether :func:`one_operation` does anything more than run a call; must not be called under Dynamo.

    This is so in a trace, for tensor subclasses that override torch's functions, and on devices without float64.
    """
    return (needs_float64 and is_moved_to_host(args, kwargs)) or is_tracing() or _overridden(args, kwargs)


def is_moved_to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that needs float64 runs on the host because its device has none."""
    return _device_without_float64(args, kwargs) is not None


def _device_without_float64(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device without float64 of the first tensor that is on one."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor) and not has_float64(value):
            return value.device
    return None


def _on_host(call: Callable[..., Any], device: torch.device, tensors: list[Tensor]) -> Any:
    """The call on the host, with its result back on the device, where double precision becomes single."""
    result = call(*(x.cpu() for x in tensors))
    back = tuple((y.float() if y.dtype == torch.float64 else y).to(device) for y in _as_tuple(result))
    return back if isinstance(result, tuple) else back[0]


def _overridden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values()) if kwargs else args
    return overrides_functions(*values) or any(getattr(value, "overridden", False) for value in values)


def overrides_functions(*values: Any) -> bool:
    """Whether one of the values is a tensor of a subclass that overrides torch's functions.

    The attribute ``overridden`` of a design says whether one of its parameters is.
    """
    if not has_torch_function(values):  # modes, such as that of a default device, make this true for all
        return False
    special = (type(x) for x in values if isinstance(x, Tensor) and type(x) is not Tensor)
    return any(map(overrides_torch_functions, special))


def _run(call: Callable[..., Any], *tensors: Tensor) -> Any:
    if overrides_functions(*tensors):
        return handle_torch_function(_run, tensors, call, *tensors)
    return _Operation.apply(call, *tensors)


class _Slot(NamedTuple):
    """A placeholder for a tensor."""

    at: int


class _State(NamedTuple):
    """An object, represented by its class and by templates of its attributes."""

    kind: type
    attributes: dict[str, Any]


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """The value with slots for its tensors, which are appended to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if isinstance(value, (Distribution, Transform)):
        return _State(type(value), _without_tensors(vars(value), tensors))
    if isinstance(value, functools.partial):
        parts = _without_tensors((value.func, value.args, value.keywords), tensors)
        return _State(functools.partial, {"parts": parts})
    if isinstance(value, dict):
        return {name: _without_tensors(part, tensors) for name, part in value.items()}
    if type(value) in (tuple, list) or hasattr(value, "_fields"):
        return _sequence(type(value), [_without_tensors(part, tensors) for part in value])
    if not callable(value) and any(isinstance(part, Tensor) for part in getattr(value, "__dict__", {}).values()):
        raise RuntimeError(f"a trace would treat the tensors in {value!r} as constants: pass them as arguments")
    return value


def _sequence(kind: Any, parts: list[Any]) -> Any:
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _with_tensors(template: Any, tensors: tuple[Tensor, ...]) -> Any:
    """The inverse of :func:`_without_tensors`."""
    if isinstance(template, _Slot):
        return tensors[template.at]
    if isinstance(template, _State):
        attributes = _with_tensors(template.attributes, tensors)
        if template.kind is functools.partial:
            function, args, kwargs = attributes["parts"]
            return functools.partial(function, *args, **kwargs)
        new: Any = object.__new__(template.kind)
        vars(new).update(attributes)
        return new
    if isinstance(template, dict):
        return {name: _with_tensors(part, tensors) for name, part in template.items()}
    if type(template) in (tuple, list) or hasattr(template, "_fields"):
        return _sequence(type(template), [_with_tensors(part, tensors) for part in template])
    return template


class _Call:
    """A call of a function that still lacks its tensors."""

    def __init__(self, function: Callable[..., Any], template: Any) -> None:
        self.function, self.template = function, template

    def __call__(self, *tensors: Tensor) -> Any:
        args, kwargs = _with_tensors(self.template, tensors)
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.function.__qualname__  # traces of one function are compared by their printed form


class _Derivative:
    """The derivative of a call: maps its tensors and the cotangents of its result to cotangents of the tensors."""

    def __init__(self, call: Callable[..., Any], wanted: list[int], given: list[int], count: int) -> None:
        self.call, self.wanted, self.given, self.count = call, wanted, given, count

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        tensors, cotangents = list(values[: self.count]), values[self.count :]
        with torch.enable_grad():
            for i in self.wanted:
                x = tensors[i]  # a view, because one of the tensors may have been computed from another
                tensors[i] = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            outputs = _as_tuple(self.call(*tensors))
            return torch.autograd.grad(
                [outputs[i] for i in self.given],
                [tensors[i] for i in self.wanted],
                cotangents,
                create_graph=True,
                materialize_grads=True,
            )

    def __repr__(self) -> str:
        return f"derivative of {self.call}"


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _generator_states(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The states of torch's own generators, which show whether numbers were drawn."""
    devices = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in devices)]


class _Operation(Function):
    """Calls a function of tensors. In a trace, a Function is one operation, which runs by ``apply``."""

    @classmethod
    def apply(cls, call: Callable[..., Any], *tensors: Tensor) -> Any:
        return super().apply(call, *tensors) if is_tracing() else call(*tensors)

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], *tensors: Tensor) -> Any:
        with outside_trace():
            before = _generator_states(tensors)
            with torch.enable_grad():
                outputs = call(*tensors)
            ctx.draws = not all(map(torch.equal, before, _generator_states(tensors)))
            ctx.call, ctx.given = call, [i for i, y in enumerate(_as_tuple(outputs)) if y.requires_grad]
            values = [y.detach() for y in _as_tuple(outputs)]
        ctx.save_for_backward(*tensors)
        values = [y.clone() for y in values]  # the trace must see where outputs come from
        ctx.mark_non_differentiable(*(y for i, y in enumerate(values) if i not in ctx.given))
        return tuple(values) if isinstance(outputs, tuple) else values[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.draws:
            raise RuntimeError(f"{ctx.call} draws random numbers: take its gradient outside the traced function")
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        tensors = ctx.saved_tensors
        derivative = _Derivative(ctx.call, wanted, ctx.given, len(tensors))
        found = _run(derivative, *tensors, *(grads[i] for i in ctx.given))
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i + 1] = gradient
        return tuple(gradients)
