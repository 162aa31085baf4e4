"""The boundary of a public function of rows, such as a map or a loss: what happens before its own code.

Arguments are counted, and the kind of the call is determined once. Most calls are plain and go on at once. Others are
handed over: calls with DTensors to :mod:`.calls`, with tensors that Pyro tracks to Pyro, and on a device without
float64 to the host; tensors of other subclasses are refused.
"""

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from torch import Tensor
from torch.overrides import handle_torch_function

from khot._host import is_moved_to_host, on_host
from khot._refusals import refuse_subclass, refuse_trace, tracks_dependencies
from khot._validation import DIM_IS_A_KEYWORD, refuse_layout
from khot.kernels.call import Call, call_of
from khot.kernels.exact.reductions import Whole

from .calls import Layout, ShardedCall, in_graph
from .placements import has_dtensor

__all__ = ["has_sharded_form", "of_rows", "sharded_form"]

P = ParamSpec("P")
R = TypeVar("R")

NUMBERS = ("k", "temperature", "scale", "strength", "epsilon", "softness", "starts", "lengths")
HIDDEN = "_call"


class _Decorator(Protocol):
    @overload
    def __call__(self, function: Callable[Concatenate[Call, P], R]) -> Callable[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R]: ...


def of_rows(
    *,
    rows: tuple[str, ...] = ("x",),
    numbers: tuple[str, ...] = (),
    batch_first: bool = False,
    sharded: bool | Callable[[dict[str, Any]], bool] = False,
    needs_float64: bool = True,
) -> _Decorator:
    """Decorator for a public function of rows.

    Its first visible argument, if a tensor, contains the rows. Their axes are named by ``dim``; without that, the last
    axis is the ground set. ``reduction``, if there is one, says how it reduces its results for rows. A parameter
    ``_call`` before all others gets the kind of the call, and is hidden from users.

    Args:
        rows: Names of the arguments with the axes of the rows.
        numbers: Names of those with the axes of the batch, in addition to k and the softness.
        batch_first: Whether the result begins with the axes of the batch, and does not have those of the rows.
        sharded: Whether it handles sharded rows, with the reductions in ``_call.over``, or a function of its arguments
            that says so. Otherwise rows are gathered. See :func:`sharded_form`.
        needs_float64: Whether it runs on the host if the device of its tensors has no float64.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        parameters = signature.parameters
        takes_call = HIDDEN in parameters
        shown = signature.replace(parameters=[p for name, p in parameters.items() if name != HIDDEN])
        known, names = tuple(name for name in (*NUMBERS, *numbers) if name in parameters), tuple(shown.parameters)
        most = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in shown.parameters.values())
        defaults = {"dim": -1} | {name: p.default for name, p in parameters.items() if p.default is not p.empty}

        def for_shards(over: Whole, *args: Any, **kwargs: Any) -> Any:
            return function(call_of(*args, *kwargs.values())._replace(over=over), *args, **kwargs)

        def by_itself(*args: Any, **kwargs: Any) -> Any:
            return function(call_of(*args, *kwargs.values()), *args, **kwargs)

        def find_sharded_form(arguments: dict[str, Any]) -> Any:
            return for_shards if (sharded(arguments) if callable(sharded) else sharded) else None

        local: Callable[..., Any] = _with_own_code(by_itself, function.__name__) if takes_call else function
        layout = Layout(shown, rows, known, batch_first, find_sharded_form)

        def elsewhere(*args: Any, **kwargs: Any) -> Any:
            refuse_trace()
            values = (*args, *kwargs.values())
            if has_dtensor(values):
                return ShardedCall(local, layout, shown.bind(*args, **kwargs)).run()
            if tracked := [value for value in values if tracks_dependencies(value)]:
                return handle_torch_function(elsewhere, tracked, *args, **kwargs)
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                if isinstance(value, Tensor):
                    refuse_subclass(name, value)
                    refuse_layout(name, value, are_scores=name == "x")
            if needs_float64 and is_moved_to_host(args, kwargs):
                return on_host(local, args, kwargs)
            return local(*args, **kwargs)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > most:
                advice = DIM_IS_A_KEYWORD if "dim" in names else ""
                taken = f"{function.__name__} takes only ({', '.join(names[:most])}) by position"
                raise TypeError(f"{taken}, but got {len(args)} values{advice}")
            kind = call_of(*args, *kwargs.values())
            if kind.is_compiling:
                if has_dtensor((*args, *kwargs.values())):
                    return in_graph(local, names, defaults, rows, known, batch_first, args, kwargs)
            elif not kind.is_plain:
                return elsewhere(*args, **kwargs)
            return function(kind, *args, **kwargs) if takes_call else function(*args, **kwargs)

        if takes_call:
            call.__signature__ = shown  # type: ignore[attr-defined]
            call.__annotations__ = {name: kind for name, kind in function.__annotations__.items() if name != HIDDEN}
        if sharded:
            call.sharded_form = for_shards  # type: ignore[attr-defined]
        return _with_own_code(call, function.__name__)

    return decorate


def _with_own_code(call: Callable[P, R], name: str) -> Callable[P, R]:
    """The same function with its own code object.

    Dynamo distinguishes functions that it has compiled by their code, not by their closures.
    """
    call.__code__ = call.__code__.replace(co_name=name)
    return call


def has_sharded_form(function: Callable[..., Any]) -> bool:
    """Whether a map, perhaps with settings in a partial, handles sharded rows."""
    return hasattr(function.func if isinstance(function, partial) else function, "sharded_form")


def sharded_form(function: Callable[..., Tensor], over: Whole) -> Callable[..., Tensor]:
    """The map, perhaps with settings in a partial, of rows whose parts are combined by these reductions."""
    if over.is_whole:
        return function
    if isinstance(function, partial):
        return partial(sharded_form(function.func, over), *function.args, **function.keywords)
    return partial(function.sharded_form, over)  # type: ignore[attr-defined]
