"""How the items of a row are summed up: where they lie, or over all processes that hold a part of the row.

The exact path is written with these few reductions, which is all that it knows of rows cut over processes. Decisions
that change what happens next are made from reduced numbers, which are the same on all processes.
"""

import torch
from torch import Tensor

from khot._distributed.differentiable import seen_by_parts, sum_of_parts
from khot._distributed.shards import Shards


class Whole:
    """Rows that are here as a whole."""

    shards: Shards | None = None

    def length(self, x: Tensor) -> int:
        """The number of items of a row, of which x (..., m) are here."""
        return x.shape[-1]

    def sum(self, *items: Tensor) -> tuple[Tensor, ...]:
        """Sums over the last axis, differentiable."""
        return tuple(v.sum(-1) for v in items)

    def max(self, *items: Tensor) -> tuple[Tensor, ...]:
        """Maxima over the last axis."""
        return tuple(v.amax(-1) for v in items)

    def seen(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Numbers of rows as the items here see them, whose gradient is the sum over all items."""
        return numbers

    def logsumexp(self, *items: Tensor) -> tuple[Tensor, ...]:
        """Logarithms of sums of exponentials over the last axis; not differentiable."""
        return tuple(v.logsumexp(-1) for v in items)


class InParts(Whole):
    """Rows of which every process holds a part."""

    def __init__(self, shards: Shards) -> None:
        self.shards: Shards = shards

    def length(self, x: Tensor) -> int:
        return self.shards.n

    def sum(self, *items: Tensor) -> tuple[Tensor, ...]:
        return sum_of_parts(self.shards, *(v.sum(-1) for v in items))

    def max(self, *items: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.shards.max(*(v.amax(-1) for v in items)))

    def seen(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        return seen_by_parts(self.shards, *numbers)

    def logsumexp(self, *items: Tensor) -> tuple[Tensor, ...]:
        tops = [torch.where(top > -torch.inf, top, 0.0) for top in self.max(*items)]
        sums = self.sum(*((v - top.unsqueeze(-1)).exp() for v, top in zip(items, tops, strict=True)))
        return tuple(v.log() + top for v, top in zip(sums, tops, strict=True))


WHOLE = Whole()


def reductions(shards: Shards | None) -> Whole:
    """Those of whole rows, or of rows of which other processes hold further parts."""
    return WHOLE if shards is None else InParts(shards)
