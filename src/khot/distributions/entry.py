"""Where users enter designs, relaxed laws and estimators, and what holds for every member that they call.

* A graph of ``torch.compile`` ends before the call: designs choose their steps by the contents of tensors, which
  a graph does not know. With ``fullgraph=True`` torch raises an error that gives this reason. A new graph begins after
  the call, but torch runs the rest of a function eagerly if no tensor is left in it, and the whole of a function that
  reads a property such as ``design.mean``.
* A design whose tensors were written to since it was made is refused, by torch's count of the writes to each tensor.
* Calls inside of ``torch.jit.trace`` and DTensors are refused.
* Tensors by which Pyro's TraceGraph_ELBO tracks dependencies are unwrapped, and the results depend on what they did.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from pyro.ops.provenance import detach_provenance, get_provenance, track_provenance
from torch import Generator, Size, Tensor
from torch.nn import Parameter
from torch.overrides import has_torch_function

from khot._distributed.placements import has_dtensor, refuse_dtensor
from khot._refusals import refuse_subclass, refuse_trace
from khot._torch_internals import is_watched_by_dynamo, mark_as_outside_graphs, outside_graphs

from ._arguments import refuse_unknown

F = TypeVar("F", bound=Callable[..., Any])

# Types of arguments that are neither DTensors nor tensors with functions of their own.
USUAL = {Tensor, Parameter, int, float, bool, type(None), tuple, Size, Generator, FunctionType}

REASON = "a khot design chooses its steps by the contents of tensors, which a graph does not know"


class _State(threading.local):
    is_inside = False  # whether an outer call tracks the dependencies of its result


_state = _State()
count_of_writes = attrgetter("_version")


def entry(function: F) -> F:
    """Decorator for a member of a law, or for a function whose first argument is a law.

    Classes of laws apply it to their ``__init__`` themselves. Only that of the law's own class counts as an entry.
    """
    parameters, is_init = inspect.signature(function).parameters, function.__name__ == "__init__"
    first, takes_any = next(iter(parameters)), any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = frozenset(parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args:
            if first not in kwargs:
                return function(**kwargs)  # which raises the error about the missing argument
            args = (kwargs.pop(first),)
        law, args = args[0], args[1:]
        if is_init:
            if type(law).__init__ is not call:
                return function(law, *args, **kwargs)
            if not (takes_any or known.issuperset(kwargs)):
                refuse_unknown(type(law), kwargs.keys() - known)
        counted = getattr(law, "_counted", ())
        if counted and sum(map(count_of_writes, counted)) != law._writes:
            raise _changed(law)
        values = (*args, *kwargs.values()) if kwargs else args
        is_unusual = (
            torch._C._get_tracing_state() is not None
            or ("torch._dynamo" in sys.modules and is_watched_by_dynamo())
            or (not USUAL.issuperset(map(type, values)) and (has_torch_function(values) or has_dtensor(values)))
        )
        if is_unusual or getattr(law, "_provenance", None):
            return _enter(function, law, args, kwargs)
        return function(law, *args, **kwargs)

    return cast(F, mark_as_outside_graphs(call, REASON))


def _changed(law: Any) -> RuntimeError:
    return RuntimeError(
        f"a tensor that this {type(law).__name__} was made from has been changed in place, as by an optimizer's step: "
        "a design reads its parameters when it is made, so make it inside the step, from the new parameters"
    )


def _enter(function: Callable[..., Any], law: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call in which something is unusual: a tracer, a compiler, or a tensor of a subclass."""
    refuse_trace()
    if is_watched_by_dynamo():
        return outside_graphs(_enter, function, law, args, kwargs)
    arguments = inspect.signature(function).bind(law, *args, **kwargs).arguments
    for name, value in arguments.items():
        refuse_dtensor(name, value)
    if _state.is_inside:
        return function(law, *args, **kwargs)
    origins = get_provenance([args, kwargs]).union(*(getattr(value, "_provenance", ()) for value in arguments.values()))
    plain: Any = detach_provenance
    args, kwargs = plain([args, kwargs])
    for name, value in arguments.items():
        refuse_subclass(name, detach_provenance(value))
    _state.is_inside = True
    try:
        result = function(law, *args, **kwargs)
    finally:
        _state.is_inside = False
    if function.__name__ == "__init__" and origins:
        law._provenance = origins
    return track_provenance(result, origins)
