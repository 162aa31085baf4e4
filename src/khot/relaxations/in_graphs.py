"""Maps of DTensors in compiled graphs: operators that DTensors know how to place, forward and backward.

A graph has the first derivative alone, and hands a function of several results zeros for those nobody used, which are
plain tensors beside DTensors. So these functions have one result, what the operator found with it coming in as a
constant.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._validation import checks_contents
from khot.kernels import capped_simplex, magnitude
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
        return *capped_simplex.mask_derivative(*ctx.saved_tensors, grad, *options), *(None,) * 5


def mask_in_graph(x: Tensor, k: Tensor, scale: Tensor, link: Link, log: bool, softness: str) -> Tensor:
    """The mask, or its logarithm, of rows (..., n) of a DTensor, with float64 k and scale (...)."""
    arguments = x.detach(), k.detach(), scale.detach()
    y, anchor, offset = capped_simplex.mask(*arguments, link.key, log, softness, checks_contents(x))
    result: Tensor = _Mask.apply(x, k, scale, y, anchor, offset, link, log)
    return result


def threshold_in_graph(x: Tensor, k: Tensor, scale: Tensor, link: Link, softness: str) -> Tensor:
    """The float64 threshold of rows of a DTensor.

    Raises:
        NotImplementedError: If somebody may ask for its gradient, for which there is no operator.
    """
    if torch.is_grad_enabled() and (x.requires_grad or k.requires_grad or scale.requires_grad):
        raise NotImplementedError(
            "a threshold has no gradient in a compiled graph of DTensors: call topk_threshold outside of torch.compile "
            "or under torch.no_grad(), or detach its arguments"
        )
    anchor, offset = capped_simplex.threshold(x, k, scale, link.key, softness, checks_contents(x))
    return anchor + offset * scale


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
