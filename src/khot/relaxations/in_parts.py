"""Masks of rows of which each process holds a part of the items: thresholds and derivatives by sums over all parts.

The root finder is that of :mod:`khot.kernels.threshold.search`: one collective finds the range of the rows, one
their counts and moments, and each step adds four float64 numbers a row. What a process finds of its items between two
collectives, it finds in one loop where a backend has one. Derivatives, of every order, are those of
:mod:`khot.kernels.threshold.parts`: one collective for the first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from khot._distributed.differentiable import seen_by_parts
from khot._distributed.shards import Shards
from khot._validation import checks_contents
from khot.kernels import magnitude, threshold
from khot.kernels.links.base import Link
from khot.kernels.links.clipped_power import ClippedPower
from khot.kernels.magnitude import parts as odd_parts
from khot.kernels.magnitude.derivative import derivative as differentiable_odd_derivative
from khot.kernels.rows import Threshold, compute_dtype, distances
from khot.kernels.threshold import parts


def _row_numbers(value: float | Tensor, x: Tensor) -> Tensor:
    """In float64, one for each row."""
    if isinstance(value, Tensor):
        return value.to(x.device, torch.float64).expand(x.shape[:-1])
    return torch.full(x.shape[:-1], value, dtype=torch.float64, device=x.device)


def _with_items(x: Tensor, masked: float) -> Tensor:
    """x (..., n), where there are no items with one that is masked: nothing takes the maximum of nothing."""
    return x if x.shape[-1] else pad(x, (0, 1), value=masked)


class _MaskOfParts(Function):
    """(x, k, s) -> (y or log y, a, c) for parts x (..., m) of rows; k, s, a, c (...) are the same on all processes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, scale: Tensor, link: Link, log: bool, softness: str, shards: Shards
    ) -> tuple[Tensor, Tensor, Tensor]:
        check, loops = checks_contents(x), threshold.shard_loops.find(x, link, log)
        y, anchor, offset = parts.mask_of_parts(x, k, scale, link, log, softness, check, shards, loops)
        ctx.save_for_backward(x, scale, anchor, offset)
        ctx.mark_non_differentiable(anchor)
        ctx.set_materialize_grads(False)
        ctx.link, ctx.log, ctx.shards, ctx.loops = link, log, shards, loops
        return y, anchor, offset

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, _: None, grad_offset: Tensor | None) -> tuple[Tensor | None, ...]:
        x, scale, *at = ctx.saved_tensors
        link, log, shards, loops = ctx.link, ctx.log, ctx.shards, ctx.loops
        place, with_scale = Threshold(*at), ctx.needs_input_grad[2]
        found = None
        if loops is not None and grad_y is not None and not torch.is_grad_enabled():
            found = parts.short_derivative(x, scale, place, grad_y, grad_offset, link, log, with_scale, shards, loops)
        if found is None:
            found = parts.derivative_of_parts(x, scale, place, grad_y, grad_offset, link, log, with_scale, shards)
        return *found, *(None,) * 4


def mask_of_parts(
    x: Tensor, k: float | Tensor, softness: float | Tensor, link: Link, name: str, log: bool, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The mask of the items x (..., m) that this process holds, or its logarithm, and the threshold in float64."""
    items = _with_items(x, -torch.inf)
    numbers = [_row_numbers(value, x) for value in (k, softness)]
    y, anchor, offset = _MaskOfParts.apply(items, *numbers, link, log, name, shards)
    return y[..., : x.shape[-1]], anchor + offset * numbers[1]


def distances_of_parts(
    x: Tensor, k: float | Tensor, softness: float | Tensor, link: Link, name: str, shards: Shards
) -> Tensor:
    """The z of the mask F(z) of the items x (..., m) that this process holds."""
    items = _with_items(x, -torch.inf)
    numbers = [_row_numbers(value, x) for value in (k, softness)]
    _, anchor, offset = _MaskOfParts.apply(items, *numbers, link, False, name, shards)
    offset, scale = seen_by_parts(shards, offset, numbers[1])
    return distances(x, Threshold(anchor, offset), scale)


class _OddMapOfParts(Function):
    """(x, k, strength) -> (y, A, c) for parts x (..., m) of rows; see :mod:`khot.kernels.magnitude`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, strength: Tensor, link: ClippedPower, magnitudes: bool, shards: Shards
    ) -> tuple[Tensor, Tensor, Tensor]:
        check, loops = checks_contents(x), magnitude.shard_loops[magnitudes].find(x)
        y, anchor, offset = odd_parts.odd_map_of_parts(x, k, strength, link, magnitudes, check, shards, loops)
        ctx.save_for_backward(x, strength, anchor, offset)
        ctx.mark_non_differentiable(anchor)
        ctx.set_materialize_grads(False)
        ctx.link, ctx.magnitudes, ctx.shards, ctx.loops = link, magnitudes, shards, loops
        return y, anchor, offset

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, _: None, grad_offset: Tensor | None) -> tuple[Tensor | None, ...]:
        x, strength, *at_row = ctx.saved_tensors
        at = Threshold(*at_row)
        if grad_y is not None and grad_offset is None and not torch.is_grad_enabled():
            options = ctx.link, ctx.magnitudes, ctx.needs_input_grad[2], ctx.shards, ctx.loops
            grads = odd_parts.odd_map_derivative_of_parts(x, strength, at, grad_y, *options)
        else:
            grads = differentiable_odd_derivative(
                x, strength, at, grad_y, grad_offset, ctx.link, ctx.magnitudes, ctx.shards
            )
        return *grads, *(None,) * 3


def odd_map_of_parts(
    x: Tensor, k: float | Tensor, strength: float | Tensor, link: ClippedPower, magnitudes: bool, shards: Shards
) -> Tensor:
    """The map by absolute value of the items x (..., m) that this process holds."""
    numbers = (_row_numbers(value, x) for value in (k, strength))
    y, _, _ = _OddMapOfParts.apply(_with_items(x, 0.0), *numbers, link, magnitudes, shards)
    return y[..., : x.shape[-1]]


def topk_mask_of_parts(x: Tensor, k: int | Tensor, shards: Shards) -> Tensor:
    """The hard mask of the items x (..., m) that this process holds; of tied items those of the first processes.

    Every process sends its k largest items, or all if it has less: one collective.
    """
    size = _row_numbers(k, x).long()
    if size.numel() == 0:  # no rows, on any of these processes
        return torch.zeros_like(x)
    items = _with_items(x.detach().to(compute_dtype(x)), -torch.inf)
    sent = max(1, min(int(size.amax()), max(shards.lengths)))
    best = items.topk(min(sent, items.shape[-1]), -1).values
    candidates = shards.gather(pad(best, (0, sent - best.shape[-1]), value=-torch.inf))
    ordered = candidates.movedim(0, -1).flatten(-2)
    if checks_contents(x) and bool(ordered.isnan().any()):  # which counts as the largest
        raise ValueError("`x` must not contain NaN")
    ordered = ordered.sort(-1, descending=True).values
    last = ordered.gather(-1, (size - 1).clamp(0, ordered.shape[-1] - 1).unsqueeze(-1))
    real = torch.arange(sent, device=x.device) < torch.tensor(shards.lengths, device=x.device).unsqueeze(-1)
    real = real.view(-1, *(1,) * size.dim(), sent)  # and no padding
    tied = ((candidates == last) & real).sum(-1)
    left = size - (ordered > last).sum(-1) - tied[: shards.own].sum(0)  # for the ties here and on later processes
    ties = items == last
    mask = (items > last) | (ties & (ties.cumsum(-1) <= left.unsqueeze(-1)))
    mask &= (size > 0).unsqueeze(-1)
    return mask[..., : x.shape[-1]].to(x.dtype)
