"""Which backend a call takes, and why it does not take the others."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import registry
from ..registry import OPERATORS, Backends


@dataclass(frozen=True, repr=False)
class Explanation:
    """The backend that a call takes, as found by :func:`explain`; prints one line for each backend.

    Attributes:
        operation: The name of the operation; for an operator its name in ``torch.ops.khot``.
        chosen: The name of the backend that computes the call.
        refused: For each other backend of the operation the reason why it does not.
    """

    operation: str
    chosen: str
    refused: dict[str, str]

    def __repr__(self) -> str:
        lines = [f"{self.operation} runs on {self.chosen}"]
        return "\n  ".join([*lines, *(f"not on {name}: {reason}" for name, reason in self.refused.items())])


def explain(operation: str | Callable[..., Any] | Backends, *args: Any, **kwargs: Any) -> Explanation:
    """Tells which backend a call takes, and why it does not take the others.

    No backend is called. A function runs up to its first choice of a backend: by then a mask has checked its arguments,
    and an order map has sorted.

    Args:
        operation: A function of the library, such as ``khot.sigmoid_topk``; an operator, or its name in
            ``torch.ops.khot``.
        *args: Arguments of the call, as the operation takes them.
        **kwargs: Keyword arguments of the call.

    Returns:
        An object with the attributes ``operation``, ``chosen`` and ``refused``, a dict of names and reasons.

    Raises:
        ValueError: If there is no operator of this name, or the function chooses no backend for these arguments.
        RuntimeError: Like the call itself, if the requested backend cannot run here.

    Example:
        >>> import khot.kernels
        >>> with khot.kernels.backend("torch"):
        ...     print(khot.kernels.explain(sigmoid_topk, torch.zeros(4), 2))
        threshold_mask runs on torch
          not on triton: the requested backend is torch
          not on numba: the requested backend is torch
    """
    if isinstance(operation, str):
        operation = _operator(operation)
    with _lock:  # since choices are recorded in one global place
        registry.on_choice = _stop_in(threading.get_ident())
        try:
            if isinstance(operation, registry.Operator):
                operation.implementation(*args, **kwargs)
            elif isinstance(operation, Backends):
                operation.choose(*args, **kwargs)
            else:
                operation(*args, **kwargs)
        except _AtChoice as stopped:
            choosing, asked = stopped.choosing, stopped.asked
        else:
            raise ValueError(f"{operation!r} chooses no backend for these arguments")
        finally:
            registry.on_choice = None
    return _explanation(choosing, asked)


_lock = threading.Lock()


class _AtChoice(Exception):
    def __init__(self, choosing: Backends, asked: tuple[Any, ...]) -> None:
        self.choosing, self.asked = choosing, asked


def _stop_in(thread: int) -> Callable[[Backends, tuple[Any, ...]], None]:
    def stop(choosing: Backends, asked: tuple[Any, ...]) -> None:
        if threading.get_ident() == thread:
            raise _AtChoice(choosing, asked)

    return stop


def _operator(name: str) -> Backends:
    found = OPERATORS.get(name.removeprefix("khot::"))
    if found is None:
        raise ValueError(f"`operation` must be one of {', '.join(sorted(OPERATORS))}, but got {name!r}")
    return found


def _explanation(choosing: Backends, asked: tuple[Any, ...]) -> Explanation:
    choice = choosing.choose(*asked)
    chosen = "torch" if choice is None else choice.name  # if all backends refuse, plain torch computes
    others = (other for other in choosing.registered if other.name != chosen)
    refused = {other.name: other.refusal(*asked) or f"{chosen} takes the call before it" for other in others}
    return Explanation(choosing.name, chosen, refused)
