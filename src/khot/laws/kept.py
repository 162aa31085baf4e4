"""What the methods of one design have in common, made at the first call that needs it and kept for the others.

Kept are numbers without a gradient, never a graph of autograd: a backward pass frees nothing that is kept, and what is
made under ``torch.no_grad`` serves calls that are differentiated as well.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from khot._torch_internals import is_transformed
from khot.kernels.autograd import has_derivative
from khot.kernels.row_slabs import runs_now

R = TypeVar("R")


class Kept:
    """The latest result of each of some functions.

    It is used again for arguments that are equal, entry by entry, to those that it was made of. So whatever changes a
    parameter, an optimizer or an assignment to its ``data``, gets what belongs to the new contents; and a copy of this
    object that comes to another design does no harm.

    Results are kept on a CPU only, where to compare costs next to nothing; and only of code that runs now, as a tracer
    or a transform of torch.func is not to see the numbers of other calls.
    """

    def __init__(self) -> None:
        self._results: dict[Callable[..., Any], tuple[tuple[Any, ...], bool, Any]] = {}

    def result(self, make: Callable[..., R], *args: Any) -> R:
        """``make(*args)`` of tensors and constants, without gradient; not to be written into."""
        args_now = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
        if not is_plain(*_tensors(args_now)):
            return _without_grad(make, *args_now)
        return self.of_plain(make, *args_now)

    def of_plain(self, make: Callable[..., R], *args: Any) -> R:
        """:meth:`result` of tensors for which :func:`is_plain` holds, none of which has a derivative."""
        found = self._results.get(make)
        if found is not None:
            args_then, inference, result = found
            if inference == torch.is_inference_mode_enabled() and all(map(_equal, args, args_then)):
                return result
        self._results.pop(make, None)  # rather than two of them in memory
        result = _without_grad(make, *args)
        copies = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
        self._results[make] = copies, torch.is_inference_mode_enabled(), result
        return result


def is_plain(*tensors: Tensor) -> bool:
    """Whether functions of these run now, on a CPU, and no transform of torch.func is under way."""
    return not torch.compiler.is_compiling() and not is_transformed() and runs_now(*tensors)


def kept_if_constant(kept: Kept | None, make: Callable[..., R], *args: Any) -> R:
    """``make(*args)``: kept where no derivative is asked for, else made anew in differentiable operations."""
    recorded, tensors = torch.is_grad_enabled(), _tensors(args)
    if kept is None or not is_plain(*tensors) or any(has_derivative(x, recorded) for x in tensors):
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
