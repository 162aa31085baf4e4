"""The map for numbers k and scale in Triton, and its gradient: without tensors for them, and without the operators."""

import torch
from torch import Tensor

from khot._contents import checks_contents

from ..links.base import Link
from .kinds import Kind, Recipe, Solved
from .triton_backward import launch_backward
from .triton_forward import has_invalid, launch_forward


def recipe(link: Link, kind: Kind, dtype: torch.dtype) -> Recipe:
    def mask(x: Tensor, k: float, scale: float) -> Solved | None:
        y, anchor, offset, flags = launch_forward(x, k, scale, link, kind.name)
        assert y is not None
        return None if checks_contents(x) and has_invalid(flags) else (y, (anchor, offset))

    def gradient(x: Tensor, scale: float, at: tuple[Tensor, Tensor], grad: Tensor) -> Tensor:
        anchor, offset = at
        return launch_backward(x, scale, anchor, offset, grad, link, kind.name, with_scale=False)[0]

    return Recipe(mask, gradient)
