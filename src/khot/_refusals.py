"""Calls and tensors that khot does not take, each with the reason and what to do instead."""

import sys
from typing import Any

from torch import Tensor

from ._torch_internals import is_tracing, overrides_torch_functions

__all__ = ["refuse_subclass", "refuse_trace", "tracks_dependencies"]


def refuse_trace() -> None:
    """Raises a NotImplementedError inside of ``torch.jit.trace``."""
    if is_tracing():
        raise NotImplementedError(
            "khot does not run inside of torch.jit.trace, which is deprecated and would repeat the steps for one input "
            "on all other inputs: use torch.compile, or torch.export for a program of a map or module. In "
            "Pyro, use Trace_ELBO in place of JitTrace_ELBO, and NUTS and HMC without jit_compile"
        )


def tracks_dependencies(value: Any) -> bool:
    """Whether this is a tensor by which Pyro's TraceGraph_ELBO tracks what depends on what: the one exception."""
    module = sys.modules.get("pyro.ops.provenance")
    return module is not None and isinstance(value, module.ProvenanceTensor)


def refuse_subclass(name: str, value: Any) -> None:
    """Raises a TypeError for a tensor of a subclass that replaces torch's functions with its own.

    Nested tensors are left to the checks of arguments, which say how to pad them.
    """
    if not isinstance(value, Tensor) or type(value) is Tensor or value.is_nested:
        return
    if overrides_torch_functions(type(value)):
        plain = f"{name}.as_subclass(torch.Tensor)"
        if type(value).__torch_dispatch__ != Tensor.__torch_dispatch__:  # a wrapper, which has no numbers of its own
            plain = f"the tensor that it wraps, such as {name}.to_tensor(-torch.inf) of a MaskedTensor"
        raise TypeError(
            f"`{name}` must be a torch.Tensor, but got the subclass {type(value).__name__}, whose own functions khot's "
            f"operators would bypass: pass {plain}"
        )
