"""How numbers of rows are combined: as they are, or over all processes that hold a part of a row.

The exact path sums over local items, and these few reductions are its only knowledge of sharded rows. Decisions about
the control flow depend on reduced numbers, which are the same on all processes.
"""

import torch
from torch import Tensor

from khot._distributed.shards import Shards, seen_by_parts, sum_of_parts


class Whole:
    """Rows that are whole on this process."""

    shards: Shards | None = None

    def sum(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Sums over all parts, from sums over the local items; differentiable."""
        return numbers

    def max(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Maxima over all parts."""
        return numbers

    def seen(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Numbers of rows as the local items use them; their gradient is the sum over the items of all parts."""
        return numbers

    def logsumexp(self, *items: Tensor) -> tuple[Tensor, ...]:
        """Logarithms of sums of exponentials of items over the last axis; not differentiable."""
        return tuple(v.logsumexp(-1) for v in items)


class InParts(Whole):
    """Rows of which every process holds a part."""

    def __init__(self, shards: Shards) -> None:
        self.shards: Shards = shards

    def sum(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        return sum_of_parts(self.shards, *numbers)

    def max(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.shards.max(*numbers))

    def seen(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        return seen_by_parts(self.shards, *numbers)

    def logsumexp(self, *items: Tensor) -> tuple[Tensor, ...]:
        tops = [torch.where(top > -torch.inf, top, 0.0) for top in self.max(*(v.amax(-1) for v in items))]
        sums = self.sum(*((v - top.unsqueeze(-1)).exp().sum(-1) for v, top in zip(items, tops, strict=True)))
        return tuple(v.log() + top for v, top in zip(sums, tops, strict=True))


WHOLE = Whole()


def reductions(shards: Shards | None) -> Whole:
    """The reductions for whole rows, or for rows of which other processes hold further parts."""
    return WHOLE if shards is None else InParts(shards)
