"""DTensors in a group of one process: quick, and without processes of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torch.distributed.tensor", reason="torch was built without distributed tensors")

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import khot
from khot.kernels.operators.platforms import HAS_NUMBA
from khot.nn import topk_attention
from tests.every_map import MAPS
from tests.inputs import normal
from tests.modules import MODULES


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("member", MAPS[::6], ids=lambda member: member.name)
def test_some_maps(mesh, member):
    """On rows that could be cut; groups of more processes take every map, and also share batches."""
    x = normal(3, 7)
    y = member.call(distribute_tensor(x, mesh, [Shard(1)]), 0.7)
    assert isinstance(y, DTensor)
    torch.testing.assert_close(y.full_tensor(), member.call(x, 0.7), rtol=1e-9, atol=1e-11)


NOT_ON_DTENSORS = {
    "topk_learned": "a plain tensor that requires a gradient",
    "mask_relaxed": "a plain tensor that requires a gradient",
    "batch_topk_relaxed": "a plain tensor that requires a gradient",
    "expert_choice_softmax": "a plain tensor that requires a gradient",
    "token_choice_relaxed": "a plain tensor that requires a gradient",
    "batch_topk_cap": "`cap` must be None if processes share a batch",
    "jump_relu_learned": "mixed torch.Tensor and DTensor",  # torch's own error for a parameter of the module
    "one_of_eight_scores": "mixed torch.Tensor and DTensor",
}


OF_SCORES = {member.name: member for member in MODULES if not member.random and member.target is None}


@pytest.mark.parametrize("name", NOT_ON_DTENSORS)
def test_modules_that_refuse_dtensors(mesh, name):
    part = distribute_tensor(normal(6, 8), mesh, [Shard(0)])
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=NOT_ON_DTENSORS[name]):
        OF_SCORES[name].make().double()(part)


@pytest.mark.parametrize(
    "member", [v for v in OF_SCORES.values() if v.name not in NOT_ON_DTENSORS], ids=lambda v: v.name
)
def test_every_module(mesh, member):
    """On a sharded batch: values, gradients and buffers."""
    plain, module = member.make().double(), member.make().double()
    x = normal(6, 8).requires_grad_(member.gradient)
    part = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_(member.gradient)
    y, found = plain(x), module(part)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), y)
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))
    if member.gradient:
        y.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(part.grad.full_tensor(), x.grad)


@pytest.mark.parametrize("axis", [0, 1])
def test_attention(mesh, axis):
    """Sharded by sequences or by heads."""
    inputs = normal(3, 2, 3, 5, 4).unbind()
    parts = [distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_() for x in inputs]
    try:
        _ = parts[0] @ parts[1].mT
    except RuntimeError:
        if not torch.__version__.startswith(("2.8.", "2.9.", "2.10.", "2.11.")):
            raise
        pytest.skip("torch 2.8 to 2.11 cannot multiply matrices that are sharded by heads")
    whole = [x.clone().requires_grad_() for x in inputs]
    for some in (parts, whole):
        topk_attention(*some, 2).square().sum().backward()
    for part, x in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), x.grad)


def test_gradients(mesh):
    whole = normal(3, 7).requires_grad_()
    part = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    for x in (whole, part):
        khot.sigmoid_topk(x, 2.5).square().sum().backward()
    torch.testing.assert_close(part.grad.full_tensor(), whole.grad)


def test_plain_and_spread_tensors_do_not_mix(mesh):
    x = distribute_tensor(normal(3, 7), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="`k` is a plain tensor that requires a gradient beside the DTensor `x`"):
        khot.sigmoid_topk(x, torch.tensor(2.0, requires_grad=True))
    with pytest.raises(TypeError, match="`x` must be a DTensor, too, if `k` is one"):
        khot.sigmoid_topk(normal(3, 7), distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]))


def test_gradients_of_thresholds_in_and_out_of_graphs(mesh):
    """In scores, sums and softness; of a row without an entry between 0 and 1, whose threshold is free, they are 0."""
    free = torch.tensor([False, True, False])
    x, k, softness = normal(3, 7), torch.tensor([2.5, 1.0, 3.5]).double(), torch.full((3,), 0.7).double()
    x[1, 0] += 9.0
    torch.compiler.reset()
    compiled = torch.compile(khot.topk_threshold, backend="aot_eager", fullgraph=True)
    for relaxation, placement in ((khot.sigmoid_topk, Shard(0)), (khot.sparse_topk, Shard(1))):
        beside = placement if placement == Shard(0) else Replicate()
        found = []
        for threshold, spread in ((khot.topk_threshold, False), (khot.topk_threshold, True), (compiled, True)):
            leaves = [v.clone().requires_grad_() for v in (x, k, softness)]
            if spread:
                where = (placement, beside, beside)
                leaves = [distribute_tensor(v.detach(), mesh, [p]) for v, p in zip(leaves, where, strict=True)]
                leaves = [v.requires_grad_() for v in leaves]
            t = threshold(*leaves, relaxation=relaxation)
            t.sin().sum().backward()
            value, *grads = (v.full_tensor() if spread else v for v in (t.detach(), *(leaf.grad for leaf in leaves)))
            found.append([value.masked_fill(free & (relaxation is khot.sparse_topk), 0.0), *grads])
        for several in found[1:]:
            torch.testing.assert_close(several, found[0], rtol=1e-9, atol=1e-11)
    assert not any(grad[1].any() for grad in found[0][1:])


def test_reductions_of_losses_in_graphs(mesh):
    x, target = normal(3, 7), khot.topk_mask(normal(3, 7, seed=1), 2)
    parts = [distribute_tensor(v, mesh, [Shard(0)]) for v in (x, target)]
    for reduction in ("mean", "none"):
        torch.compiler.reset()
        compiled = torch.compile(khot.fenchel_young_topk_loss, backend="aot_eager", fullgraph=True)
        found = compiled(*parts, 2, reduction=reduction)
        torch.testing.assert_close(found.full_tensor(), khot.fenchel_young_topk_loss(x, target, 2, reduction=reduction))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NUMBA, reason="plain torch has no loops")
@pytest.mark.parametrize(
    ("function", "dtype", "rtol"),
    [(khot.sigmoid_topk, torch.float32, 1e-5), (khot.sparse_topk_magnitude, torch.float64, 1e-12)],
)
def test_loops_over_pieces_of_a_row(mesh, function, dtype, rtol):
    """They find what loops over whole rows find, with any number of threads the same."""
    whole = normal(2, 100_000, dtype=dtype).requires_grad_()
    parts = [distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_() for _ in range(2)]
    values = [function(whole, 1000, 0.5)]
    for x, threads in zip(parts, (1, 3), strict=True):
        with torch_threads(threads):
            values.append(function(x, 1000, 0.5).to_local())
            (values[-1] * whole.detach()).sum().backward()
    (values[0] * whole.detach()).sum().backward()
    grads = [whole.grad, *(x.grad.to_local() for x in parts)]
    for one, several, again in (values, grads):
        torch.testing.assert_close(several, one, rtol=rtol, atol=1e-8 if dtype == torch.float32 else 1e-12)
        assert torch.equal(several, again)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)
