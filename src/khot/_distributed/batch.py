"""A batch of rows spread over processes: which of them are here, what lies beside them, and what they are made into."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .draws import RowsOfMany, drawing
from .placements import as_dtensor, check_spread, chunks, part_beside, placed, shard_axis, whole

if TYPE_CHECKING:
    import torch.distributed.tensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Run", "SpreadBatch"]


class Run(NamedTuple):
    """Rows here that follow each other among all rows, too: from ``start`` to ``stop`` here, from ``first`` of all."""

    start: int
    stop: int
    first: int


class SpreadBatch(NamedTuple):
    """Where the rows of a batch are.

    Attributes:
        lead: A DTensor ``(*batch, n)`` whose rows are whole.
        given: Placements that it had before its rows were made whole.
    """

    lead: "DTensor"
    given: "tuple[Placement, ...]"

    @classmethod
    def of(cls, name: str, rows: Tensor) -> "SpreadBatch":
        """Of a DTensor ``(*batch, n)``, reduced where it is Partial, and gathered where its rows are cut.

        Raises:
            ValueError: If it lies on strided shards.
        """
        lead: Any = rows
        check_spread(name, lead, name, lead.device_mesh)
        one, last = torch.distributed.tensor.Replicate(), lead.dim() - 1
        wanted = [one if p.is_partial() or shard_axis(p) == last else p for p in lead.placements]
        return cls(placed(lead, wanted), tuple(lead.placements))

    @property
    def shape(self) -> torch.Size:
        """Of the whole batch."""
        return self.lead.shape[:-1]

    def here(self, name: str, value: Tensor, axes_before: int = 0) -> Tensor:
        """The part of a tensor ``(*before, *batch, ...)`` that belongs to the rows here; axes of length 1 broadcast."""
        dtensor = as_dtensor(name, value, "the parameter", self.lead.device_mesh)
        axes = {
            axis: axis + axes_before
            for axis in range(len(self.shape))
            if 0 <= axis + axes_before < value.dim() and value.shape[axis + axes_before] == self.shape[axis]
        }
        return part_beside(dtensor, self.lead.placements, axes, range(len(self.shape)))

    def together(self, local: Tensor, axes_after: int) -> "DTensor":
        """The whole of tensors ``(*before, *batch, *after)``; the last axis is cut again where that of the rows was."""
        before = local.dim() - axes_after - len(self.shape)
        shape = torch.Size((*local.shape[:before], *self.shape, *local.shape[local.dim() - axes_after :]))
        shards = [shard_axis(p) for p in self.lead.placements]
        placements = [
            p if axis is None else torch.distributed.tensor.Shard(before + axis)
            for p, axis in zip(self.lead.placements, shards, strict=True)
        ]
        stride = torch.empty(shape, device="meta").stride()
        result = whole(local.contiguous(), self.lead, placements, shape, stride)
        if axes_after == 0:
            return result
        cut = [shard_axis(p) == len(self.shape) for p in self.given]
        last = torch.distributed.tensor.Shard(result.dim() - 1)
        return placed(result, [last if again else p for again, p in zip(cut, result.placements, strict=True)])

    def replicated(self, value: Tensor) -> "DTensor":
        """What all processes have alike."""
        return as_dtensor("value", value, "value", self.lead.device_mesh)

    def runs(self) -> Iterator[Run]:
        """The rows here, in runs of rows that follow each other in the whole batch."""
        starts, lengths = self._block()
        if not self.shape:
            yield Run(0, 1, 0)
            return
        if math.prod(lengths) == 0:
            return
        # Along the last axis that is cut, and those behind it, rows follow each other.
        cut = max((axis for axis, length in enumerate(self.shape) if lengths[axis] != length), default=0)
        inner, count = math.prod(self.shape[cut + 1 :]), math.prod(lengths[cut:])
        outer = (range(starts[axis], starts[axis] + lengths[axis]) for axis in range(cut))
        for run, place in enumerate(itertools.product(*outer)):
            number = 0
            for axis, index in enumerate((*place, starts[cut])):
                number = number * self.shape[axis] + index
            yield Run(run * count, (run + 1) * count, number * inner)

    def _block(self) -> tuple[list[int], list[int]]:
        """Where along each axis of the batch the rows here start, and how many there are."""
        starts, lengths, mesh = [0] * len(self.shape), list(self.shape), self.lead.device_mesh
        for at, placement in enumerate(self.lead.placements):
            axis = shard_axis(placement)
            if axis is None:
                continue
            parts, own = chunks(lengths[axis], mesh.size(at)), mesh.get_local_rank(at)
            starts[axis] += sum(parts[:own])
            lengths[axis] = parts[own]
        return starts, lengths

    def same_everywhere(self, seed: Tensor) -> Tensor:
        """The seed that the first process has, on all."""
        mesh = self.lead.device_mesh
        for at in range(mesh.ndim):
            group = mesh.get_group(at)
            dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
        return seed

    def draw(self, seed: Tensor, sample_shape: torch.Size, draw_rows: Callable[[int, int], Tensor]) -> Tensor:
        """Draws ``(*sample_shape, *batch here, ...)`` of the rows here, each from its place in the whole batch.

        Args:
            seed: The same on all processes.
            sample_shape: Of the draws of a row.
            draw_rows: Makes those of some rows ``(*sample_shape, rows, ...)``, from where to where.
        """
        drawn = []
        for run in self.runs():
            with drawing(RowsOfMany(seed, run.first, run.stop - run.start)):
                drawn.append(draw_rows(run.start, run.stop))
        axis = len(sample_shape)
        together = torch.cat(drawn, axis) if drawn else draw_rows(0, 0)
        return together.unflatten(axis, self._block()[1]) if self.shape else together.squeeze(axis)
