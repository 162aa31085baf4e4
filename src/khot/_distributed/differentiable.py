"""Differentiable sums over the processes that hold the parts of a row.

A number that belongs to a row is the same on all processes, and so is its gradient. Two functions lead from items to
such numbers and back. Each is the derivative of the other, so derivatives of every order follow:

* the sum over all parts, whose gradient every process already has;
* the number as the local items use it, whose gradient is the sum over all processes, one collective.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .shards import Shards

__all__ = ["seen_by_parts", "sum_of_parts"]


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return torch.stack(shards.sum(*values.unbind()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Seen.apply(grad, ctx.shards), None


class _Seen(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.shards), None


def sum_of_parts(shards: Shards, *values: Tensor) -> tuple[Tensor, ...]:
    """Sums over the parts, in float64: one collective for all of the values, which have one shape."""
    together: Tensor = _Sum.apply(torch.stack([value.double() for value in values]), shards)
    return together.unbind()


def seen_by_parts(shards: Shards, *values: Tensor) -> tuple[Tensor, ...]:
    """Float64 numbers of rows as the local items use them; their derivative takes one collective for all of them."""
    together: Tensor = _Seen.apply(torch.stack(values), shards)
    return together.unbind()
