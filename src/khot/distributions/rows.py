"""Many rows of a design are processed slab by slab."""

import math
from collections.abc import Callable
from typing import Any

from torch import Size, Tensor

from khot.kernels.exact.row_slabs import MOST_SLABS
from khot.kernels.exact.row_slabs import by_rows as in_slabs_of

WHOLE = 2**17  # units of rows that are processed as a whole, so that nothing is computed twice
SLAB = 2**14  # beyond that, units that are scored or drawn at a time: about 2 MB


def in_slabs(
    function: Callable[..., Tensor], k: Tensor, *arguments: Tensor, largest: int, most: int | None = None
) -> Tensor:
    """``function(first, k, *others)`` for tensors ``(..., n)``, in slabs of ``largest`` units, at most ``most``."""

    def of_rows(first: Tensor, *others_and_k: Tensor) -> tuple[Tensor]:
        *others, k = others_and_k
        return (function(first, k.squeeze(-1), *others),)

    return in_slabs_of(of_rows, largest, *arguments, k.unsqueeze(-1), most=most)[0]


def by_rows(design: Any, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """``function(probs, k, *others, kept=...)`` for tensors ``(..., n)``; many rows go slab by slab."""
    probs, *others = arguments
    if probs.numel() <= WHOLE:
        return function(probs, design._k, *others, kept=design._kept)
    return in_slabs(function, design._k, *arguments, largest=SLAB, most=MOST_SLABS)


def draw_by_rows(design: Any, function: Callable[..., Tensor], shape: Size, *options: Any) -> Tensor:
    """Draws ``function(probs, k, draws, *options)``, ``(draws, *probs.shape)``, as ``sample`` returns them."""
    probs = design._probs.detach()

    def of_rows(probs: Tensor, k: Tensor, kept: Any = None) -> Tensor:
        return function(probs, k, math.prod(shape), *options, kept=kept).movedim(0, -2)

    return by_rows(design, of_rows, probs).movedim(-2, 0).reshape(*shape, *probs.shape)
