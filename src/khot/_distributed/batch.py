"""A batch of rows spread over processes: which of them are here, what lies beside them, and what they are made into."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .boundary import shards_of
from .draws import RowsOfMany, drawing
from .placements import as_dtensor, check_spread, chunks, part_beside, placed, shard_axis, whole
from .shards import Shards

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
    """Where the rows of a batch are, for who works on whole rows or on parts of them.

    Attributes:
        lead: A DTensor ``(*batch, n)``, which is not Partial.
        placements: How the rows lie for who works on them: as the lead does, or with whole rows.
        given: Placements that it had at first.
    """

    lead: "DTensor"
    placements: "tuple[Placement, ...]"
    given: "tuple[Placement, ...]"

    @classmethod
    def of(cls, name: str, rows: Tensor) -> "SpreadBatch":
        """Of a DTensor ``(*batch, n)``, reduced where it is Partial, for work on whole rows.

        Raises:
            ValueError: If it lies on strided shards.
        """
        lead: Any = rows
        check_spread(name, lead, name, lead.device_mesh)
        one, last = torch.distributed.tensor.Replicate(), lead.dim() - 1
        reduced = placed(lead, [one if p.is_partial() else p for p in lead.placements])
        wanted = tuple(one if shard_axis(p) == last else p for p in reduced.placements)
        return cls(reduced, wanted, tuple(lead.placements))

    @property
    def whole_rows(self) -> "DTensor":
        """The lead, its rows gathered where they are cut."""
        return placed(self.lead, self.placements)

    @property
    def is_cut(self) -> bool:
        """Whether the lead's rows are cut."""
        return any(shard_axis(p) == len(self.shape) for p in self.lead.placements)

    def in_parts(self) -> "SpreadBatch":
        """The same for work on parts of the rows, as the lead has them."""
        return self._replace(placements=tuple(self.lead.placements))

    @property
    def shards(self) -> Shards:
        """Who has the parts of the rows that are here."""
        last = len(self.shape)
        cut = [at for at, placement in enumerate(self.lead.placements) if shard_axis(placement) == last]
        return shards_of(self.lead, {last}, cut)

    @property
    def shape(self) -> torch.Size:
        """Of the whole batch."""
        return self.lead.shape[:-1]

    def here(self, name: str, value: Tensor, axes_before: int = 0) -> Tensor:
        """What of a tensor ``(*before, *batch, ...)`` belongs to the rows or parts here; axes of length 1 broadcast.

        An axis of units comes right after the batch.
        """
        dtensor = as_dtensor(name, value, "the parameter", self.lead.device_mesh)
        axes = {
            axis: axis + axes_before
            for axis, length in enumerate(self.lead.shape)
            if 0 <= axis + axes_before < value.dim() and value.shape[axis + axes_before] == length
        }
        return part_beside(dtensor, self.placements, axes, range(len(self.shape)))

    def together(self, local: Tensor, axes_after: int) -> "DTensor":
        """The whole of tensors ``(*before, *batch, *after)``; the last axis is cut again where that of the rows was."""
        before, last = local.dim() - axes_after - len(self.shape), len(self.shape)
        own = local.shape[local.dim() - axes_after :]
        if any(shard_axis(p) == last for p in self.placements):  # of units, which results have no other axis of
            own = self.lead.shape[-1:] if axes_after else own
        shape = torch.Size((*local.shape[:before], *self.shape, *own))
        kinds = torch.distributed.tensor
        placements = list[Any]()
        for placement in self.placements:
            axis = shard_axis(placement)
            if axis is None:
                placements.append(placement)
            elif axis == last and axes_after == 0:  # one number for all parts of a row
                placements.append(kinds.Replicate())
            else:
                placements.append(kinds.Shard(before + axis))
        stride = torch.empty(shape, device="meta").stride()
        result = whole(local.contiguous(), self.lead, placements, shape, stride)
        if axes_after == 0:
            return result
        cut = [shard_axis(p) == last for p in self.given]
        units = kinds.Shard(result.dim() - 1)
        return placed(result, [units if again else p for again, p in zip(cut, result.placements, strict=True)])

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
        for at, placement in enumerate(self.placements):
            axis = shard_axis(placement)
            if axis is None or axis == len(self.shape):
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

    def draw(
        self, seed: Tensor, sample_shape: torch.Size, draw_rows: Callable[[int, int], Tensor], unit: int = 0
    ) -> Tensor:
        """Draws ``(*sample_shape, *batch here, ...)`` of the rows here, each from its place in the whole batch.

        Args:
            seed: The same on all processes.
            sample_shape: Of the draws of a row.
            draw_rows: Makes those of some rows ``(*sample_shape, rows, ...)``, from where to where.
            unit: Number of the first unit that is here, where it draws parts of rows.
        """
        drawn = []
        for run in self.runs():
            with drawing(RowsOfMany(seed, run.first, run.stop - run.start, unit)):
                drawn.append(draw_rows(run.start, run.stop))
        axis = len(sample_shape)
        together = torch.cat(drawn, axis) if drawn else draw_rows(0, 0)
        return together.unflatten(axis, self._block()[1]) if self.shape else together.squeeze(axis)
