"""The derivative of the sparse maps by absolute value in differentiable operations, as often as one likes."""

import torch
from torch import Tensor

from khot._distributed.differentiable import seen_by_parts, sum_of_parts
from khot._distributed.shards import Shards

from ..links.clipped_power import ClippedPower
from ..rows import Threshold, compute_dtype
from .local_shape import local_shape, over, pullback


def derivative(
    x: Tensor,
    strength: Tensor,
    at: Threshold,
    grad_y: Tensor | None,
    grad_offset: Tensor | None,
    link: ClippedPower,
    magnitude: bool,
    shards: Shards | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in x's dtype, dL/dk and dL/d strength from dL/dy and dL/d offset.

    Where other processes have parts of the rows, x (..., m) is that of this one, and the numbers of rows are the same
    on all: two collectives. Such a number as the items see it has another derivative.
    """
    wide, here, offset = x.to(compute_dtype(x)), strength, at.offset
    if shards is not None:
        here, offset = seen_by_parts(shards, strength, at.offset)
    sign = wide.sign()
    shape = local_shape(wide.abs(), Threshold(at.anchor, offset), here, link, magnitude)
    rows = shape if shards is None else local_shape(wide[..., :0], at, strength, link, magnitude)
    inward = torch.zeros_like(wide) if grad_y is None else grad_y.to(wide.dtype) * sign
    sums = [shape.weight, (inward * shape.slope).sum(-1).double(), (shape.slope * shape.z).sum(-1).double()]
    weight, pull, lever = sums if shards is None else sum_of_parts(shards, *sums)
    mean = over(weight, pull)
    push = torch.zeros_like(mean) if grad_offset is None else over(weight, rows.stretch * grad_offset)
    pulled, pushed = mean, push / rows.scale
    if shards is not None:
        pulled, pushed = seen_by_parts(shards, pulled, pushed)
    grad_a, grad_strength = pullback(shape, inward, pulled, here, True)
    if shards is not None:
        (grad_strength,) = sum_of_parts(shards, grad_strength)
    grad_k = rows.gain * mean
    if grad_offset is not None:
        grad_a = grad_a + shape.slope * pushed.to(wide.dtype).unsqueeze(-1)
        grad_k = grad_k - push
        grad_strength = grad_strength - (push * lever + grad_offset * at.offset) / strength
    return (grad_a * sign).to(x.dtype), grad_k, grad_strength
