"""When the contents of tensors may be read: not by a tracer, and on an accelerator only if validation is on."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from ._torch_internals import has_memory, is_mapped, is_recorded, is_shape_only, is_traced_by_mode, writes_program


def has_contents(*tensors: Tensor) -> bool:
    """Whether these tensors contain numbers, rather than only a shape, as under a compiler and ``FakeTensorMode``.

    True also for a tensor wrapped by a transform of torch.func, although Python cannot always read it.
    """
    if torch.compiler.is_compiling() or is_traced_by_mode():
        return False
    return not any(map(is_shape_only, tensors))


def is_dry_run(*tensors: Tensor) -> bool:
    """Whether only the shape of a result is needed: for meta or fake tensors, when nothing records the operations."""
    if torch.compiler.is_compiling() or writes_program():
        return False
    return any(map(is_shape_only, tensors))


def can_look(*tensors: Tensor) -> bool:
    """Whether plain Python code may depend on the contents: not under a tracer, a vmap and in CUDA graphs.

    Transforms of torch.func that only differentiate, such as grad and jvp, compute with numbers that may be read.
    """
    if torch.compiler.is_compiling() or (torch._C._len_torch_dispatch_stack() and is_traced_by_mode()):
        return False  # Dynamo knows only the first
    for x in tensors:
        if (x.is_cuda and is_recorded(x)) or not (has_memory(x) or not (is_mapped(x) or is_shape_only(x))):
            return False
    return True


def checks_contents(tensor: Tensor) -> bool:
    """Whether to check the contents of this tensor.

    Always on a CPU; elsewhere, where reading contents stalls the device, only while validation is on
    (``torch.distributions.Distribution.set_default_validate_args``).
    """
    return tensor.is_cpu or (Distribution._validate_args and not tensor.is_meta)


def looks_at_contents(*values: Any) -> bool:
    """:func:`checks_contents` for plain Python code, which can read contents only where it :func:`can_look`.

    Of values that are not tensors there is nothing to ask.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    return can_look(*tensors) and all(map(checks_contents, tensors))


def is_finite(x: Tensor) -> bool:
    """Whether the contents of a tensor are certainly finite, by one reduction; a sum that overflows proves nothing."""
    return math.isfinite(x.detach().sum().item())
