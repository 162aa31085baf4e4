"""Values that the methods of one design share: each is made at the first call that needs it.

Only numbers without a gradient are remembered, never a graph of autograd: a backward pass frees nothing that is
remembered, and values made under ``torch.no_grad`` also serve calls that are differentiated.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from khot._torch_internals import runs_unwatched
from khot.kernels.operators.autograd import has_derivative

R = TypeVar("R")


class Once(dict[str, Any]):
    """Values that were made from the parameters of a design, which do not change, by name.

    Values are remembered only in eager code: a tracer or a transform of torch.func must not see the numbers of other
    calls, nor others its own.
    """

    def made(self, name: str, make: Callable[..., R], *args: Any) -> R:
        """``make(*args)``, which is the same at every call; without gradient, and must not be written to."""
        found: R | None = self.get(name)
        if found is None:
            constants = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    found = make(*constants)
            else:
                found = make(*constants)
            if not torch.compiler.is_compiling() and runs_unwatched():
                self[name] = found
        return found

    def made_if_constant(self, name: str, make: Callable[..., R], *args: Any) -> R:
        """:meth:`made`, except that ``make(*args)`` runs again if a tensor among the arguments has a derivative."""
        recorded = torch.is_grad_enabled()
        if any(isinstance(x, torch.Tensor) and has_derivative(x, recorded) for x in args):
            return make(*args)
        return self.made(name, make, *args)


def or_new(kept: Once | None) -> Once:
    """What was already made; an empty one is falsy, but not to be replaced."""
    return Once() if kept is None else kept
