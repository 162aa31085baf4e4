"""Sharded rows, of which each process holds some items: sums, maxima and gathers over the processes.

A function that handles such rows gets the processes that hold the other parts from :func:`shards_of_rows`. Its control
flow must depend only on reduced numbers, which are the same on all processes; otherwise it would deadlock.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Shards", "seen_by_parts", "shards_of_rows", "spread_over", "sum_of_parts"]


class Shards(NamedTuple):
    """The processes that hold the items of the rows in this call, and the numbers of items.

    Attributes:
        groups: The groups of processes over which the items are spread, one for each mesh axis that shards rows.
        n: Number of items of a row, on all processes.
        lengths: Number of items of each part, in the order of :meth:`gather`.
    """

    groups: "tuple[ProcessGroup, ...]"
    n: int
    lengths: tuple[int, ...]

    @classmethod
    def of_parts(cls, group: "ProcessGroup", items: int, device: torch.device) -> "Shards":
        """For a group in which each process has this many items, unknown to the others: one collective."""
        lengths = torch.zeros(dist.get_world_size(group), dtype=torch.long, device=device)
        lengths[dist.get_rank(group)] = items
        dist.all_reduce(lengths, group=group)
        counts = tuple(lengths.tolist())
        return cls((group,), sum(counts), counts)

    def sum(self, *values: Tensor) -> list[Tensor]:
        """Sums over the parts, in float64: one collective for all of the values, which have one shape."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, *values: Tensor) -> list[Tensor]:
        """Maxima over the parts, in float64: one collective for all of the values, of which none is NaN."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[Tensor], operation: "dist.ReduceOp.RedOpType") -> list[Tensor]:
        together = torch.stack([value.double() for value in values])
        for group in self.groups:
            dist.all_reduce(together, operation, group=group)
        return list(together.unbind())

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


class _State(threading.local):
    current: Shards | None = None


_state = _State()


def shards_of_rows() -> Shards | None:
    """The processes that hold the other parts of the rows that this thread handles; None if rows are whole."""
    return _state.current


@contextmanager
def spread_over(shards: Shards) -> Iterator[None]:
    """In this context rows are parts, which only functions that use :func:`shards_of_rows` handle correctly."""
    _state.current, before = shards, _state.current
    try:
        yield
    finally:
        _state.current = before


# A number that belongs to a row is the same on all processes, and so is its gradient. Two functions lead from items to
# such numbers and back. Each is the derivative of the other, so derivatives of every order follow.


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
    """:meth:`Shards.sum`, differentiable: every process already has the gradient of a sum over all parts."""
    together: Tensor = _Sum.apply(torch.stack([value.double() for value in values]), shards)
    return together.unbind()


def seen_by_parts(shards: Shards, *values: Tensor) -> tuple[Tensor, ...]:
    """Float64 numbers of rows as the local items use them; their derivative takes one collective for all of them."""
    together: Tensor = _Seen.apply(torch.stack(values), shards)
    return together.unbind()
