"""A batch of rows spread over processes: which rows are local, what belongs to them, and how results are assembled."""

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
    """Local rows ``start`` to ``stop`` that are also consecutive in the whole batch, where they start at ``first``."""

    start: int
    stop: int
    first: int


class SpreadBatch(NamedTuple):
    """Where the rows of a batch are, for code that works on whole rows or on parts of them.

    Attributes:
        lead: A DTensor ``(*batch, n)``, which is not Partial.
        placements: Placements of the rows for that code: those of the lead, or with whole rows.
        given: The original placements.
    """

    lead: "DTensor"
    placements: "tuple[Placement, ...]"
    given: "tuple[Placement, ...]"

    @classmethod
    def of(cls, name: str, rows: Tensor) -> "SpreadBatch":
        """For a DTensor ``(*batch, n)``, reduced if it is Partial, and for work on whole rows.

        Raises:
            ValueError: If its shards are strided.
        """
        lead: Any = rows
        check_spread(name, lead, name, lead.device_mesh)
        one, last = torch.distributed.tensor.Replicate(), lead.dim() - 1
        reduced = placed(lead, [one if p.is_partial() else p for p in lead.placements])
        wanted = tuple(one if shard_axis(p) == last else p for p in reduced.placements)
        return cls(reduced, wanted, tuple(lead.placements))

    def expanded(self, batch_shape: torch.Size) -> "SpreadBatch":
        """The same rows, repeated as in a batch of this shape."""
        lead: Any = self.lead.expand(*batch_shape, -1)
        new, last = SpreadBatch.of("rows", lead), len(self.shape)
        units = torch.distributed.tensor.Shard(len(batch_shape))
        cut = [shard_axis(p) == last for p in self.given]
        return new._replace(given=tuple(units if c else p for c, p in zip(cut, new.given, strict=True)))

    @property
    def whole_rows(self) -> "DTensor":
        """The lead, with its rows gathered if they are sharded."""
        return placed(self.lead, self.placements)

    @property
    def is_cut(self) -> bool:
        """Whether the rows of the lead are sharded."""
        return any(shard_axis(p) == len(self.shape) for p in self.lead.placements)

    def in_parts(self) -> "SpreadBatch":
        """The same, for work on the parts of the rows that the lead has."""
        return self._replace(placements=tuple(self.lead.placements))

    @property
    def shards(self) -> Shards:
        """The processes that hold the parts of the local rows."""
        last = len(self.shape)
        cut = [at for at, placement in enumerate(self.lead.placements) if shard_axis(placement) == last]
        return shards_of(self.lead, {last}, cut)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole batch."""
        return self.lead.shape[:-1]

    def here(self, name: str, value: Tensor, axes_before: int = 0) -> Tensor:
        """The part of a tensor ``(*before, *batch, ...)`` for the local rows or parts; axes of length 1 broadcast.

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
        """The DTensor made of local tensors ``(*before, *batch, *after)``; the last axis is sharded as in the rows."""
        before, last = local.dim() - axes_after - len(self.shape), len(self.shape)
        own = local.shape[local.dim() - axes_after :]
        if any(shard_axis(p) == last for p in self.placements):  # the axis of units, which occurs only once in results
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
        """A value that is the same on all processes."""
        return as_dtensor("value", value, "value", self.lead.device_mesh)

    def runs(self) -> Iterator[Run]:
        """The local rows, in runs of rows that are consecutive in the whole batch."""
        starts, lengths = self._block()
        if not self.shape:
            yield Run(0, 1, 0)
            return
        if math.prod(lengths) == 0:
            return
        # Along the last sharded axis and all axes after it, rows are consecutive.
        cut = max((axis for axis, length in enumerate(self.shape) if lengths[axis] != length), default=0)
        inner, count = math.prod(self.shape[cut + 1 :]), math.prod(lengths[cut:])
        outer = (range(starts[axis], starts[axis] + lengths[axis]) for axis in range(cut))
        for run, place in enumerate(itertools.product(*outer)):
            number = 0
            for axis, index in enumerate((*place, starts[cut])):
                number = number * self.shape[axis] + index
            yield Run(run * count, (run + 1) * count, number * inner)

    def _block(self) -> tuple[list[int], list[int]]:
        """For each axis of the batch, where the local rows start, and how many there are."""
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
        """The seed of the first process, on all processes."""
        mesh = self.lead.device_mesh
        for at in range(mesh.ndim):
            group = mesh.get_group(at)
            dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
        return seed

    def draw(
        self, seed: Tensor, sample_shape: torch.Size, draw_rows: Callable[[int, int], Tensor], unit: int = 0
    ) -> Tensor:
        """Draws ``(*sample_shape, *local batch, ...)`` of the local rows, each from its place in the whole batch.

        Args:
            seed: The same on all processes.
            sample_shape: Shape of the draws of a row.
            draw_rows: Draws some rows, ``(*sample_shape, rows, ...)``, given their start and end.
            unit: Number of the first local unit, if it draws parts of rows.
        """
        drawn = []
        for run in self.runs():
            with drawing(RowsOfMany(seed, run.first, run.stop - run.start, unit)):
                drawn.append(draw_rows(run.start, run.stop))
        axis = len(sample_shape)
        together = torch.cat(drawn, axis) if drawn else draw_rows(0, 0)
        return torch.unflatten(together, axis, self._block()[1]) if self.shape else together.squeeze(axis)
