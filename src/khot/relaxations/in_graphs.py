"""Maps of DTensors in compiled graphs: operators that DTensors know how to place, forward and backward.

A graph has the first derivative alone, and hands a function of several results zeros for those nobody used, which are
plain tensors beside DTensors. So these functions have one result, what the operator found with it coming in as a
constant.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from khot._validation import checks_contents
from khot.kernels import magnitude, threshold
from khot.kernels.links.base import Link
from khot.kernels.links.clipped_power import ClippedPower


class _Mask(Function):
    """(x, k, s, y, a, c) -> y, the mask of x and its threshold being constants."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, scale: Tensor, y: Tensor, anchor: Tensor, offset: Tensor, link: Link, log: bool
    ) -> Tensor:
        ctx.save_for_backward(x, scale, anchor, offset)
        ctx.link, ctx.log = link, log
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        options = ctx.link.key, ctx.log, ctx.needs_input_grad[2]
        return *threshold.mask_derivative(*ctx.saved_tensors, grad, *options), *(None,) * 5


def mask_in_graph(x: Tensor, k: Tensor, scale: Tensor, link: Link, log: bool, softness: str) -> Tensor:
    """The mask, or its logarithm, of rows (..., n) of a DTensor, with float64 k and scale (...)."""
    arguments = x.detach(), k.detach(), scale.detach()
    y, anchor, offset = threshold.mask(*arguments, link.key, log, softness, checks_contents(x))
    result: Tensor = _Mask.apply(x, k, scale, y, anchor, offset, link, log)
    return result


class _Threshold(Function):
    """(x, k, s, a, c) -> t, likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, link: Link) -> Tensor:
        ctx.save_for_backward(x, scale, anchor, offset)
        ctx.link = link
        return anchor + offset * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *threshold.threshold_derivative(*ctx.saved_tensors, grad, ctx.link.key), *(None,) * 3


def threshold_in_graph(x: Tensor, k: Tensor, scale: Tensor, link: Link, softness: str) -> Tensor:
    """The float64 threshold (...) of rows (..., n) of a DTensor, with float64 k and scale (...)."""
    arguments = x.detach(), k.detach(), scale.detach()
    at = threshold.threshold(*arguments, link.key, softness, checks_contents(x))
    result: Tensor = _Threshold.apply(x, k, scale, *at, link)
    return result


class _OddMap(Function):
    """(x, k, strength, y, A, c) -> y, likewise."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        k: Tensor,
        strength: Tensor,
        y: Tensor,
        anchor: Tensor,
        offset: Tensor,
        link: ClippedPower,
        magnitudes: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, strength, anchor, offset)
        ctx.link, ctx.magnitudes = link, magnitudes
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        options = ctx.link.key, ctx.magnitudes, ctx.needs_input_grad[2]
        return *magnitude.odd_map_derivative(*ctx.saved_tensors, grad, *options), *(None,) * 5


def odd_map_in_graph(x: Tensor, k: Tensor, strength: Tensor, link: ClippedPower, magnitudes: bool) -> Tensor:
    """The map by absolute value of rows (..., n) of a DTensor, with float64 k and strength (...)."""
    arguments = x.detach(), k.detach(), strength.detach()
    y, anchor, offset = magnitude.odd_map(*arguments, link.key, magnitudes, checks_contents(x))
    result: Tensor = _OddMap.apply(x, k, strength, y, anchor, offset, link, magnitudes)
    return result
