"""The boundary of a public map: the kind of a call is determined once here and passed on to the map."""

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from khot._distributed.boundary import is_handed_over, of_rows, with_own_code
from khot._validation import places, too_many
from khot.kernels.call import Call, call_of
from khot.kernels.exact.reductions import Whole

P = ParamSpec("P")
R = TypeVar("R")
OfCall = Callable[Concatenate[Call, P], R]


def with_call(
    *,
    in_parts: bool | Callable[[dict[str, Any]], bool] = False,
    batch_first: bool = False,
    needs_float64: bool = True,
) -> Callable[[OfCall[P, R]], Callable[P, R]]:
    """Decorator: :func:`of_rows` for a function whose first parameter, the kind of the call, is hidden from users.

    Args:
        in_parts: Whether it handles sharded rows, with the reductions in ``call.over``, or a function of its arguments
            that says so. Otherwise rows are gathered. See :func:`over_parts`.
        batch_first: See :func:`khot._distributed.boundary.of_rows`.
        needs_float64: See there.
    """

    def decorate(function: OfCall[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        hidden, *others = signature.parameters.values()
        shown = signature.replace(parameters=others)
        most = places(shown)

        def publish(call: Callable[P, R]) -> Callable[P, R]:
            functools.update_wrapper(call, function)
            call.__signature__ = shown  # type: ignore[attr-defined]
            call.__annotations__ = {k: v for k, v in function.__annotations__.items() if k != hidden.name}
            return with_own_code(call, function.__name__)

        def by_itself(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(call_of(*args, *kwargs.values()), *args, **kwargs)

        def for_parts(over: Whole, *args: P.args, **kwargs: P.kwargs) -> R:
            return function(call_of(*args, *kwargs.values())._replace(over=over), *args, **kwargs)

        def handles_parts(arguments: dict[str, Any]) -> Any:
            return for_parts if (in_parts(arguments) if callable(in_parts) else in_parts) else None

        decorator = of_rows(in_parts=handles_parts, batch_first=batch_first, needs_float64=needs_float64)
        elsewhere = decorator(publish(by_itself))

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > most:
                raise too_many(function.__name__, shown, len(args))
            kind = call_of(*args, *kwargs.values())
            if kind.is_plain or not (kind.is_compiling or is_handed_over(args, kwargs, needs_float64)):
                return function(kind, *args, **kwargs)
            return elsewhere(*args, **kwargs)

        if in_parts:
            call.for_parts = for_parts  # type: ignore[attr-defined]
        return publish(call)

    return decorate


def has_sharded_form(function: Callable[..., Any]) -> bool:
    """Whether a map, perhaps with settings in a partial, handles sharded rows."""
    return hasattr(function.func if isinstance(function, partial) else function, "for_parts")


def over_parts(function: Callable[..., Tensor], over: Whole) -> Callable[..., Tensor]:
    """The map, perhaps with settings in a partial, of rows that are combined by these reductions."""
    if over.is_whole:
        return function
    if isinstance(function, partial):
        return partial(over_parts(function.func, over), *function.args, **function.keywords)
    for_parts: Callable[..., Tensor] = function.for_parts  # type: ignore[attr-defined]
    return partial(for_parts, over)
