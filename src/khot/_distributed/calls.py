"""DTensor in, DTensor out, for functions of rows: maps and losses.

A row leads to one result; its items are the ground set along ``dim``. If rows are whole on every process, the function
runs on the local tensors, without communication:

* rows that are Partial are reduced first, since no map is linear;
* numbers for each row (k, the softness) get the placements of the rows along the batch axes that they have, and are
  replicated along the others, where the gradient of each process is one part of the sum, ``Partial``;
* a plain tensor is assumed to be the same on all processes.

For sharded rows, the function decides: either it uses sums over the processes, see :mod:`khot._distributed.shards`, or
the rows are gathered, every process computes the same, and each keeps its shard.

Shapes and dtypes are checked by a call on tensors without data that have the shapes of the whole tensors, so that every
process raises the same error. The contents of tensors are checked by each process for its own rows.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .placements import (
    as_dtensor,
    check_spread,
    chunks,
    is_dtensor,
    local_part,
    part_beside,
    placed,
    replicated,
    shard_axis,
    whole,
)
from .shards import Shards

if TYPE_CHECKING:
    import torch.distributed.tensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Layout", "ShardedCall", "in_graph", "shards_of"]


class Layout(NamedTuple):
    """How arguments and result of a function belong to the rows of its first argument.

    Attributes:
        signature: The signature of the function.
        rows: Parameters of the shape of the rows or, where that is allowed, broadcasting to it; the first is the lead.
        numbers: Parameters that broadcast to the shape of the batch.
        batch_first: Whether the result begins with the axes of the batch, rather than having those of the rows.
        sharded_form: For these arguments, the function with a first argument ``over`` that handles sharded rows, or
            None.
    """

    signature: inspect.Signature
    rows: tuple[str, ...]
    numbers: tuple[str, ...]
    batch_first: bool
    sharded_form: Callable[[dict[str, Any]], Callable[..., Tensor] | None]


class _Meta(NamedTuple):
    """A tensor without data."""

    shape: torch.Size
    dtype: torch.dtype


def in_graph(
    function: Callable[..., Any],
    names: tuple[str, ...],
    defaults: dict[str, Any],
    rows: tuple[str, ...],
    numbers: tuple[str, ...],
    batch_first: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A call with DTensors, in operations that Dynamo can trace: rows are whole, and gathered if they are not.

    For the parameters see :class:`Layout`; the checks are those of the local call.
    """
    kinds: Any = torch.distributed.tensor
    arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    lead, dim, reduction = arguments[rows[0]], arguments["dim"], arguments.get("reduction")
    if not is_dtensor(lead):
        raise TypeError(f"`{rows[0]}` must be a DTensor, too, if another argument is one: distribute it first")
    ground = [axis % lead.dim() for axis in (dim if isinstance(dim, tuple) else (dim,))]
    batch = [axis for axis in range(lead.dim()) if axis not in ground]
    check_spread(rows[0], lead, rows[0], lead.device_mesh)
    kept = [p if shard_axis(p) in batch or p.is_replicate() else kinds.Replicate() for p in lead.placements]
    lead = lead.redistribute(placements=kept)
    local = {rows[0]: lead.to_local(grad_placements=kept)}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name != rows[0]:
            axes = _axes_beside(value, lead, name in rows, batch if name in numbers else [])
            local[name] = part_beside(as_dtensor(name, value, rows[0], lead.device_mesh), kept, axes, batch)
    if reduction in ("mean", "sum"):
        local["reduction"] = "none"
    given = {name: value for name, value in arguments.items() if name in names}
    y = function(**{**given, **local}).contiguous()
    where = [kinds.Shard(batch.index(p.dim)) if batch_first and p.is_shard() else p for p in kept]
    shape = list(y.shape)
    for before, after in zip(kept, where, strict=True):
        if before.is_shard():
            shape[after.dim] = lead.shape[before.dim]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    result = kinds.DTensor.from_local(
        y, lead.device_mesh, where, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )
    if reduction not in ("mean", "sum"):
        return result
    total = result.sum().redistribute(placements=[kinds.Replicate()] * lead.device_mesh.ndim)
    return total / math.prod(shape) if reduction == "mean" else total


def _axes_beside(value: Tensor, lead: "DTensor", has_rows: bool, batch: Sequence[int]) -> dict[int, int]:
    """Maps axes of the rows to axes of another argument, for those along which it has the same length.

    An argument that has no rows may have axes of the batch, those of the rows that are given.
    """
    if has_rows:
        batch = list(range(lead.dim())) if value.dim() > 1 else []  # a single row is for all rows
    pairs = zip(reversed(batch), reversed(range(value.dim())), strict=False)
    return {axis: own for axis, own in pairs if value.shape[own] == lead.shape[axis]}


class ShardedCall:
    """A call with DTensors, outside of graphs."""

    def __init__(self, function: Callable[..., Any], layout: Layout, bound: inspect.BoundArguments) -> None:
        bound.apply_defaults()
        self.function, self.layout, self.arguments = function, layout, dict(bound.arguments)
        name = layout.rows[0]
        lead: Any = self.arguments[name]
        if not is_dtensor(lead):
            others = (other for other, value in self.arguments.items() if is_dtensor(value))
            raise TypeError(f"`{name}` must be a DTensor, too, if `{next(others)}` is one: distribute it first")
        check_spread(name, lead, name, lead.device_mesh)
        self.lead_name, self.mesh = name, lead.device_mesh
        for other, value in self.arguments.items():
            if isinstance(value, Tensor):
                self.arguments[other] = as_dtensor(other, value, name, self.mesh)
        self.reduction = self.arguments.get("reduction")
        self.shape, self.stride = self._judge()

    def run(self) -> "DTensor":
        """The result, as a DTensor."""
        lead: DTensor = self.arguments[self.lead_name]
        ground = self._ground_axes(lead.dim())
        cut = [at for at, placement in enumerate(lead.placements) if shard_axis(placement) in ground]
        sharded_form = self.layout.sharded_form(self.arguments) if cut else None
        one = torch.distributed.tensor.Replicate()
        gone = {at for at, p in enumerate(lead.placements) if p.is_partial()} | set(() if sharded_form else cut)
        self.lead = placed(lead, [one if at in gone else p for at, p in enumerate(lead.placements)])
        self.batch = [axis for axis in range(lead.dim()) if axis not in ground]
        arguments = {name: self._localised(name, value) for name, value in self.arguments.items()}
        if sharded_form:
            local = sharded_form(shards_of(self.lead, ground, cut), **arguments)
        else:
            local = self.function(**arguments)
        result = whole(local, self.lead, [self._of_result(p) for p in self.lead.placements], self.shape, self.stride)
        if self.reduction in ("mean", "sum"):
            return self._reduced(result)
        if self.layout.batch_first:
            return result
        return placed(result, [lead.placements[at] if at in cut else p for at, p in enumerate(result.placements)])

    def _judge(self) -> tuple[torch.Size, tuple[int, ...]]:
        """Shape and stride of the whole result, before any reduction; raises the function's errors about shapes."""
        found = self._tried()
        if self.reduction not in ("mean", "sum"):
            return found
        self.arguments["reduction"] = "none"
        return self._tried()

    def _tried(self) -> tuple[torch.Size, tuple[int, ...]]:
        described = {
            name: _Meta(value.shape, value.dtype) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        call = self.function, tuple(described), *described.values()
        return (_dry_run if _is_hashable(call) else _dry_run.__wrapped__)(*call)

    def _ground_axes(self, axes: int) -> set[int]:
        dim = self.arguments.get("dim", -1)
        return {axis % axes for axis in (dim if isinstance(dim, tuple) else (dim,))}

    def _localised(self, name: str, value: Any) -> Any:
        """The local part of an argument, aligned with the local rows."""
        if not isinstance(value, Tensor):
            return value
        dtensor: Any = value
        if name == self.lead_name:
            return local_part(self.lead, self.lead.placements)
        numbered = self.batch if name in self.layout.numbers else []
        axes = _axes_beside(value, self.lead, name in self.layout.rows, numbered)
        return part_beside(dtensor, self.lead.placements, axes, self.batch)

    def _of_result(self, placement: "Placement") -> "Placement":
        """The placement of the result for a placement of the rows."""
        axis = shard_axis(placement)
        if axis is None or not self.layout.batch_first:
            return placement
        if axis not in self.batch:  # one number for all parts of a row
            return torch.distributed.tensor.Replicate()
        return torch.distributed.tensor.Shard(self.batch.index(axis))

    def _reduced(self, losses: "DTensor") -> "DTensor":
        """Their sum or mean, the same on all processes."""
        dtype = losses.dtype
        total: Any = (losses.float() if dtype.itemsize < 4 else losses).sum()
        total = placed(total, replicated(self.mesh))
        return (total / losses.numel() if self.reduction == "mean" else total).to(dtype)


def shards_of(rows: "DTensor", ground: set[int], cut: Sequence[int]) -> Shards:
    """The processes that hold the items of rows with these ground-set axes, sharded along these mesh axes."""
    mesh, lengths = rows.device_mesh, [{axis: rows.shape[axis] for axis in ground}]
    for at in cut:
        axis, parts = shard_axis(rows.placements[at]), mesh.size(at)
        assert axis is not None
        lengths = [held | {axis: part} for held in lengths for part in chunks(held[axis], parts)]
    items = tuple(math.prod(held.values()) for held in lengths)
    return Shards(tuple(mesh.get_group(at) for at in cut), sum(items), items)


@functools.lru_cache(maxsize=512, typed=True)
def _dry_run(function: Callable[..., Tensor], names: Sequence[str], *values: Any) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and stride of the result for arguments without data."""
    arguments = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Meta) else value
        for name, value in zip(names, values, strict=True)
    }
    with torch.no_grad():
        result = function(**arguments)
    return result.shape, result.stride()


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:  # a list, for example
        return False
    return True
