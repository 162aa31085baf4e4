"""Placements of DTensors: checking them, changing them, and converting to and from local tensors.

``torch.distributed.tensor`` is imported by the code that makes the first DTensor, never by khot, and used by name here.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed.tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_dtensor(value: Any) -> bool:
    """Whether this is a DTensor; False at once if nobody has imported them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_dtensor(values: Iterable[Any]) -> bool:
    """Whether one of the values is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    kind = module.DTensor
    for value in values:  # noqa: SIM110 - `any` of a generator takes several times as long
        if isinstance(value, kind):
            return True
    return False


def refuse_dtensor(name: str, value: Any) -> None:
    """Raises a TypeError for a DTensor, which designs do not take."""
    if is_dtensor(value):
        raise TypeError(
            f"`{name}` must be a plain tensor, but got a DTensor: pass {name}.full_tensor() if its rows are sharded; "
            f"if its batch is, pass {name}.to_local(), and give each process a generator of its own"
        )


def replicated(mesh: "DeviceMesh") -> "list[Placement]":
    """The placements of a tensor that is whole on every process."""
    return [torch.distributed.tensor.Replicate()] * mesh.ndim


def shard_axis(placement: "Placement") -> int | None:
    """The axis that is sharded, if one is."""
    return placement.dim if isinstance(placement, torch.distributed.tensor.Shard) else None


def check_spread(name: str, value: "DTensor", lead: str, mesh: "DeviceMesh") -> None:
    """Raises a ValueError unless the tensor is on this mesh, with contiguous shards, replicas or partial sums."""
    if value.device_mesh != mesh:
        raise ValueError(f"`{name}` must be on the device mesh of `{lead}`, {mesh}, but is on {value.device_mesh}")
    kinds = torch.distributed.tensor
    for placement in value.placements:
        plain = type(placement) is kinds.Shard or isinstance(placement, (kinds.Replicate, kinds.Partial))
        if not plain:
            raise ValueError(
                f"`{name}` must be placed by Shard, Replicate or Partial, but got {placement}; redistribute it first"
            )


def as_dtensor(name: str, value: Tensor, lead: str, mesh: "DeviceMesh") -> "DTensor":
    """A DTensor as it is, after checks, or a plain tensor, which is assumed to be the same on all processes.

    Raises:
        ValueError: For a DTensor on another mesh or with strided shards, and for a plain tensor that requires a
            gradient, because each process would find only its own part of it.
    """
    if is_dtensor(value):
        dtensor: Any = value
        check_spread(name, dtensor, lead, mesh)
        return dtensor
    if value.requires_grad:
        raise ValueError(
            f"`{name}` is a plain tensor that requires a gradient beside the DTensor `{lead}`, so every process would "
            f"get only a part of its gradient: make it a DTensor with torch.distributed.tensor.distribute_tensor("
            f"{name}, "
            f"mesh), or detach it"
        )
    return torch.distributed.tensor.DTensor.from_local(value, mesh, replicated(mesh), run_check=False)


def placed(value: "DTensor", placements: "Sequence[Placement]") -> "DTensor":
    """The tensor with these placements, with whatever communication that takes."""
    if tuple(value.placements) == tuple(placements):
        return value
    return value.redistribute(placements=list(placements))


def local_part(value: "DTensor", grad_placements: "Sequence[Placement]") -> Tensor:
    """The local part of the tensor, whose gradient has these placements."""
    local = value.to_local(grad_placements=list(grad_placements))
    if hasattr(local, "trigger_wait"):  # not yet complete: some operations of torch are asynchronous
        return local.clone()
    return local


def part_beside(value: "DTensor", rows: "Sequence[Placement]", axes: dict[int, int], batch: Sequence[int]) -> Tensor:
    """The part of a tensor that this process needs for rows with these placements.

    Args:
        value: One number for each row, or for several.
        rows: Placements of the rows.
        axes: Maps axes of the rows to axes of the tensor.
        batch: Axes of the rows that number the rows, not their items.
    """
    placements: list[Any] = []
    grad_placements: list[Any] = []
    for placement in rows:
        axis = shard_axis(placement)
        own = None if axis is None else axes.get(axis)
        if own is not None:
            placements.append(torch.distributed.tensor.Shard(own))
            grad_placements.append(placements[-1])
            continue
        placements.append(torch.distributed.tensor.Replicate())
        is_own = axis in batch  # every process has the gradient of its own rows
        grad_placements.append(torch.distributed.tensor.Partial() if is_own else placements[-1])
    return local_part(placed(value, placements), grad_placements)


def chunks(length: int, parts: int) -> list[int]:
    """Lengths of shards, as ``torch.chunk`` cuts them, with empty ones at the end."""
    size = -(-length // parts)
    return [max(0, min(size, length - part * size)) for part in range(parts)]


def whole(
    local: Tensor, like: "DTensor", placements: "Sequence[Placement]", shape: torch.Size, stride: tuple[int, ...]
) -> "DTensor":
    """The DTensor of this shape that consists of the local parts of all processes, on the mesh of another one."""
    kind = torch.distributed.tensor.DTensor
    return kind.from_local(local, like.device_mesh, list(placements), run_check=False, shape=shape, stride=stride)
