"""The kind of a call, which decides how it is computed: determined once, where the arguments come in.

Most calls are *plain*: they run eagerly, on data, with no tracer, transform or mode. Then kernels may read the memory
of tensors, and a Function is nothing but its forward and, perhaps, a node in an autograd graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._torch_internals import has_memory, in_forward_mode, is_exporting, is_transformed, runs_unwatched, writes_onnx

from .exact.reductions import WHOLE, Whole


class Call(NamedTuple):
    """What determines how a call is computed.

    Attributes:
        is_compiling: Whether Dynamo or ``torch.export`` traces it.
        is_exporting: Whether it becomes part of a program that runs without this library, for ONNX or otherwise.
        writes_onnx: Whether that is for ONNX.
        is_plain: Whether it runs eagerly, on data, and no transform, tracer, dispatch mode or forward mode is active.
        over: Sums over the items of its rows, including those that other processes hold.
    """

    is_compiling: bool
    is_exporting: bool
    writes_onnx: bool
    is_plain: bool
    over: Whole


PLAIN, WATCHED = (Call(False, False, False, is_plain, WHOLE) for is_plain in (True, False))  # shared by all calls


def call_of(*arguments: Any) -> Call:
    """The kind of a call with these arguments."""
    if torch.compiler.is_compiling():
        onnx = writes_onnx()
        return Call(True, onnx or is_exporting(), onnx, False, WHOLE)
    call = PLAIN if runs_unwatched() else WATCHED
    for x in arguments:
        if isinstance(x, Tensor) and not has_memory(x):
            return WATCHED
    return call


def is_direct(*tensors: Tensor) -> bool:
    """Whether a call runs on data, without compiler, transform or forward mode; dispatch modes may watch it."""
    if torch.compiler.is_compiling() or is_transformed() or in_forward_mode():
        return False
    return all(map(has_memory, tensors))


def runs_on_cpu(*tensors: Tensor) -> bool:
    """Whether a call runs eagerly, on data on a CPU, and at most forward mode is active."""
    if torch.compiler.is_compiling() or not runs_unwatched(forward_mode=True):
        return False
    return all(has_memory(x) and x.device.type == "cpu" for x in tensors)


def is_first_derivative(*tensors: Tensor) -> bool:
    """Whether a derivative of these is plain, and will not be differentiated again."""
    return not torch.is_grad_enabled() and call_of(*tensors).is_plain


def is_differentiated_again(call: Call) -> bool:
    """Whether the derivative in this call will be differentiated itself, in either mode; not for graphs."""
    return not call.is_compiling and (torch.is_grad_enabled() or in_forward_mode())
