"""Tensors spread over the ranks of a group, and calls on them compared with the same calls on whole tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from khot.kernels import backend

S, R, P = Shard, Replicate(), Partial()


@cache
def mesh_of(axes: int) -> DeviceMesh:
    """All ranks along one axis of a mesh, or in two halves along two."""
    ranks = dist.get_world_size()
    shape = (ranks,) if axes == 1 else (2, ranks // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[:axes])


def spread(value: Tensor, placements: Sequence[Placement], requires_grad: bool = False) -> DTensor:
    """A leaf; of Partial placements one whose parts are equal."""
    mesh = mesh_of(len(placements))
    shards = [R if p.is_partial() else p for p in placements]
    dtensor = distribute_tensor(value.detach(), mesh, shards)
    if any(p.is_partial() for p in placements):
        parts = 1
        for axis, placement in enumerate(placements):
            parts *= mesh.size(axis) if placement.is_partial() else 1
        local = dtensor.to_local() / parts
        dtensor = DTensor.from_local(local, mesh, placements, shape=value.shape, stride=value.stride())
    return dtensor.detach().requires_grad_(requires_grad)


@contextmanager
def first_rank_first() -> Iterator[None]:
    """The first rank runs this block before the others do: what it compiles they find on disk."""
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


def assert_same(actual: Any, expected: Tensor, what: str, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert isinstance(actual, DTensor), f"{what} is a {type(actual).__name__}"
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    whole = actual.detach().full_tensor()
    torch.testing.assert_close(whole, expected.detach(), rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")


def compare(
    function: Callable[..., Tensor],
    arguments: Sequence[Any],
    placements: Sequence[Sequence[Placement] | None],
    differentiable: bool = True,
    backends: tuple[str, str] = ("auto", "auto"),
    **tolerance: float,
) -> tuple[DTensor, list[DTensor]]:
    """The function of spread tensors, compared with that of whole ones; its result and its leaves.

    Args:
        function: Of the arguments.
        arguments: Tensors, or anything else.
        placements: Of each argument, None for one that is given as it is.
        differentiable: Whether gradients are compared.
        backends: That of whole tensors and that of spread ones.
        tolerance: Of the comparison.
    """
    leaves = differentiable and [isinstance(v, Tensor) and v.is_floating_point() for v in arguments]
    wholes = [
        v.detach().clone().requires_grad_(bool(leaves and leaves[i]) and placements[i] is not None)
        if isinstance(v, Tensor)
        else v
        for i, v in enumerate(arguments)
    ]
    parts = [
        v if where is None or not isinstance(v, Tensor) else spread(v, where, v.requires_grad)
        for v, where in zip(wholes, placements, strict=True)
    ]
    spread_leaves = [v for v in parts if isinstance(v, DTensor) and v.requires_grad]
    with first_rank_first(), backend(backends[0]):
        expected = function(*wholes)
        cotangent = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        cotangent = cotangent.to(expected.dtype)
        if spread_leaves:
            (expected * cotangent).sum().backward()
    with backend(backends[1]):
        actual = function(*parts)
        if spread_leaves:
            (actual * spread(cotangent, [R] * actual.device_mesh.ndim)).sum().backward()
    assert_same(actual, expected, "the value", **tolerance)
    if spread_leaves:
        for i, (part, one) in enumerate(zip(parts, wholes, strict=True)):
            if not isinstance(part, DTensor) or not part.requires_grad:
                continue
            if one.grad is None:
                assert part.grad is None or not part.grad.full_tensor().any()
            else:
                assert_same(part.grad, one.grad, f"the gradient of argument {i}", **tolerance)
    return actual, spread_leaves
