"""What kind of call this is, which decides how it is computed: asked once, where the arguments come in."""

from typing import Any, NamedTuple

import torch

from khot._distributed.shards import Shards, shards_of_rows
from khot._torch_internals import is_eager_everywhere, is_plain, writes_onnx


class Call(NamedTuple):
    """What is asked about a call.

    Attributes:
        is_compiling: Whether Dynamo or ``torch.export`` traces it.
        writes_onnx: Whether it becomes part of a program for ONNX.
        is_plain: Whether it runs now, on data, outside of all transforms, tracers and modes.
        shards: Who holds the other parts of its rows; None where rows are whole.
    """

    is_compiling: bool
    writes_onnx: bool
    is_plain: bool
    shards: Shards | None


def call_of(*arguments: Any) -> Call:
    """The kind of a call of these arguments."""
    if torch.compiler.is_compiling():
        return Call(True, writes_onnx(), False, None)
    return Call(False, False, is_eager_everywhere() and all(map(is_plain, arguments)), shards_of_rows())
