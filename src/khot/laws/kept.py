"""Intermediate values that the methods of one design share, computed at the first call that needs them.

Only numbers without a gradient are kept, never a graph of autograd: a backward pass frees nothing that is kept, and
values computed under ``torch.no_grad`` also serve calls that are differentiated.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from khot._torch_internals import has_memory, version_of
from khot.kernels.call import is_plain, runs_on_cpu
from khot.kernels.operators.autograd import has_derivative

R = TypeVar("R")


class Kept:
    """The latest result of each of several functions.

    A result is used again for arguments that are equal, entry by entry, to those that it was computed from. So after
    any change of a parameter, by an optimizer or by an assignment to its ``data``, results belong to the new contents;
    and sharing this object with another design is harmless.

    Results are kept only on a CPU, where comparing is almost free, and only in eager code: a tracer or a transform of
    torch.func must not see the numbers of other calls.
    """

    def __init__(self) -> None:
        self._results: dict[Callable[..., Any], tuple[tuple[Any, ...], bool, Any]] = {}

    def result(self, make: Callable[..., R], *args: Any) -> R:
        """``make(*args)`` for tensors and constants, without gradient; must not be written to."""
        args_now = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
        if not runs_on_cpu(*_tensors(args_now)):
            return _without_grad(make, *args_now)
        return self.of_plain(make, *args_now)

    def of_plain(self, make: Callable[..., R], *args: Any) -> R:
        """Like :meth:`result`, for tensors for which :func:`runs_on_cpu` holds and of which none has a derivative."""
        found = self._results.get(make)
        if found is not None:
            args_then, inference, result = found
            if inference == torch.is_inference_mode_enabled() and all(map(_equal, args, args_then)):
                return result
        self._results.pop(make, None)  # so that there are not two of them in memory
        result = _without_grad(make, *args)
        copies = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
        self._results[make] = copies, torch.is_inference_mode_enabled(), result
        return result


class Snapshot:
    """The state of some tensors and numbers, to find out later whether they have changed.

    On a CPU entries are compared, so that every change is seen, by an optimizer or by an assignment to ``data``.
    Elsewhere this would have to wait for the device, so the address and torch's count of writes are compared, which
    misses only writes into ``data``.
    """

    __slots__ = ("_inference", "_states")

    def __init__(self, values: Iterable[Any]) -> None:
        self._states = tuple((value, *_marks(value), _copy(value)) for value in values)
        self._inference = torch.is_inference_mode_enabled()

    def holds(self, values: Iterable[Any]) -> bool:
        """Whether these are the values of the snapshot, unchanged and with the same ``requires_grad``."""
        return self._inference == torch.is_inference_mode_enabled() and all(map(_is_unchanged, values, self._states))


def _is_unchanged(value: Any, state: tuple[Any, ...]) -> bool:
    then, *marks, copy = state
    if not isinstance(value, Tensor):
        return type(value) is type(then) and bool(value == then)
    if value is not then or marks != _marks(value):
        return False
    return copy is None or not is_plain() or torch.equal(without_repeats(value.detach(), value.dim()), copy)


def _marks(value: Any) -> list[Any]:
    if not isinstance(value, Tensor):
        return []
    address = value.data_ptr() if value.device.type != "cpu" and has_memory(value) else None
    return [version_of(value), value.requires_grad, address]


def _copy(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or not runs_on_cpu(value):
        return None
    return without_repeats(value.detach(), value.dim()).clone()


def without_repeats(x: Tensor, dims: int) -> Tensor:
    """The tensor without the repetitions along its first dimensions that an ``expand``, as of a plate, has made."""
    for dim, stride in enumerate(x.stride()[:dims]):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def kept_if_constant(kept: Kept | None, make: Callable[..., R], *args: Any) -> R:
    """``make(*args)``: kept if no derivative is needed, otherwise computed again in differentiable operations."""
    recorded, tensors = torch.is_grad_enabled(), _tensors(args)
    if kept is None or not runs_on_cpu(*tensors) or any(has_derivative(x, recorded) for x in tensors):
        return make(*args)
    return kept.of_plain(make, *args)


def _tensors(args: Iterable[Any]) -> list[Tensor]:
    return [x for x in args if isinstance(x, Tensor)]


@torch.no_grad()
def _without_grad(make: Callable[..., R], *args: Any) -> R:
    return make(*args)


def _equal(now: Any, then: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.dtype == then.dtype and torch.equal(now, then)
    return type(now) is type(then) and bool(now == then)
