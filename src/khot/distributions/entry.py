"""Where users enter designs, relaxed laws and estimators, and what holds for every member that they call.

* A graph of ``torch.compile`` ends before the call: designs choose their steps by the contents of tensors, which
  a graph does not know. With ``fullgraph=True`` torch raises an error that gives this reason. A new graph begins after
  the call, but torch runs the rest of a function eagerly if no tensor is left in it, and the whole of a function that
  reads a property such as ``design.mean``.
* Calls inside of ``torch.jit.trace`` and DTensors are refused.
* Tensors by which Pyro's TraceGraph_ELBO tracks dependencies are unwrapped, and the results depend on what they did.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pyro.ops.provenance import detach_provenance, get_provenance, track_provenance
from torch.distributions.utils import lazy_property
from torch.overrides import has_torch_function

from khot._distributed.placements import has_dtensor, refuse_dtensor
from khot._refusals import refuse_subclass, refuse_trace
from khot._torch_internals import is_tracing, is_watched_by_dynamo, mark_as_outside_graphs, outside_graphs

F = TypeVar("F", bound=Callable[..., Any])

REASON = "a khot design chooses its steps by the contents of tensors, which a graph does not know"


def unwatched(function: F) -> F:
    """Decorator: Dynamo does not trace what a member does that lies behind those that users enter."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return outside_graphs(function, *args) if is_watched_by_dynamo() else function(*args)

    return cast(F, mark_as_outside_graphs(call, REASON))


class _State(threading.local):
    is_inside = False  # whether an outer call tracks the dependencies of its result


_state = _State()


def entry(function: F) -> F:
    """Decorator for a member of a law, or for a function whose first argument is a law."""
    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args:
            if first not in kwargs:
                return function(**kwargs)  # which says what is missing
            args = (kwargs.pop(first),)
        law, args = args[0], args[1:]
        values = (*args, *kwargs.values()) if kwargs else args
        unusual = is_watched_by_dynamo() or is_tracing() or has_torch_function(values) or has_dtensor(values)
        if not (unusual or getattr(law, "provenance", None)):
            return function(law, *args, **kwargs)
        return _enter(function, law, args, kwargs)

    return cast(F, mark_as_outside_graphs(call, REASON))


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
    origins = get_provenance([args, kwargs]).union(*(getattr(value, "provenance", ()) for value in arguments.values()))
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
        law.provenance = origins
    return track_provenance(result, origins)


def with_function(member: Any, change: Callable[..., Any]) -> Any:
    """A method or property with its function replaced by ``change(function)``."""
    if isinstance(member, lazy_property):
        return type(member)(change(member.wrapped))
    if isinstance(member, property):
        return property(change(cast(Any, member.fget)), doc=member.__doc__)
    return change(member)
