"""The map for numbers k and scale in Triton, and its gradient: without tensors for them, and without the operators."""

from torch import Tensor

from khot._contents import checks_contents

from ..links.base import Link
from .kinds import Kind, Plain, Solved
from .triton_backward import launch_backward
from .triton_forward import has_invalid, launch_forward


def _mask(x: Tensor, k: float, scale: float, link: Link, kind: Kind) -> Solved | None:
    y, anchor, offset, flags = launch_forward(x, k, scale, link, kind.name)
    assert y is not None
    return None if checks_contents(x) and has_invalid(flags) else (y, anchor, offset)


def _gradient(x: Tensor, scale: float, anchor: Tensor, offset: Tensor, grad: Tensor, link: Link, kind: Kind) -> Tensor:
    return launch_backward(x, scale, anchor, offset, grad, link, kind.name, with_scale=False)[0]


PLAIN = Plain(_mask, _gradient)
