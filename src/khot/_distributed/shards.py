"""Sharded rows: sums, maxima and gathers over the processes, each of which holds some items of a row.

A function that handles such rows gets these reductions as its argument ``over``. Its control flow must depend only on
reduced numbers, which are the same on all processes; otherwise it would deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from khot.kernels.exact.reductions import Whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Shards"]


@dataclass(frozen=True, eq=False)
class Shards(Whole):
    """Rows that are sharded over processes: the processes, and their numbers of items.

    Attributes:
        groups: The groups of processes over which the items are spread, one for each mesh axis that shards rows.
        n: Number of items of a row, on all processes.
        lengths: Number of items of each part, in the order of :meth:`gather`.
    """

    groups: "tuple[ProcessGroup, ...]"
    n: int
    lengths: tuple[int, ...]

    is_whole = False

    @classmethod
    def of_parts(cls, group: "ProcessGroup", items: int, device: torch.device) -> "Shards":
        """The shards of a group in which a process knows only its own number of items: one collective."""
        lengths = torch.zeros(dist.get_world_size(group), dtype=torch.long, device=device)
        lengths[dist.get_rank(group)] = items
        dist.all_reduce(lengths, group=group)
        counts = tuple(lengths.tolist())
        return cls((group,), sum(counts), counts)

    def length(self, x: Tensor) -> int:
        return self.n

    def sum(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Sums over the parts, in float64: one collective for all of the numbers, which have one shape.

        Differentiable, without a collective: every process already has the gradient of a sum over all parts.
        """
        together: Tensor = _Sum.apply(_stacked(numbers), self)
        return together.unbind()

    def max(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Maxima over the parts, in float64: one collective for all of the numbers; none may be NaN."""
        return self.reduced(_stacked(numbers), dist.ReduceOp.MAX).unbind()

    def seen(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Float64 numbers of rows as the local items use them; their derivative takes one collective for all."""
        together: Tensor = _Seen.apply(torch.stack(numbers), self)
        return together.unbind()

    def logsumexp(self, *items: Tensor) -> tuple[Tensor, ...]:
        tops = [torch.where(top > -torch.inf, top, 0.0) for top in self.max(*(v.amax(-1) for v in items))]
        sums = self.sum(*((v - top.unsqueeze(-1)).exp().sum(-1) for v, top in zip(items, tops, strict=True)))
        return tuple(v.log() + top for v, top in zip(sums, tops, strict=True))

    def reduced(self, values: Tensor, operation: "dist.ReduceOp.RedOpType") -> Tensor:
        """The tensor, overwritten with its reduction over all parts."""
        for group in self.groups:
            dist.all_reduce(values, operation, group=group)
        return values

    def gather(self, value: Tensor) -> Tensor:
        """``(parts, *value.shape)`` of values of the same shape on all processes, in the order of the parts."""
        together = value.unsqueeze(0).contiguous()
        for group in reversed(self.groups):
            parts = [torch.empty_like(together) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, together, group=group)
            together = torch.cat(parts)
        return together

    @property
    def own(self) -> int:
        """The number of this process's part among the gathered parts."""
        number = 0
        for group in self.groups:
            number = number * dist.get_world_size(group) + dist.get_rank(group)
        return number


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack([number.double() for number in numbers])


# A number that belongs to a row is the same on all processes, and so is its gradient. Two functions lead from items to
# such numbers and back. Each is the derivative of the other, so derivatives of every order follow.


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return shards.reduced(values.clone(), dist.ReduceOp.SUM)

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
