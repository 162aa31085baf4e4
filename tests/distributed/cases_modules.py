"""Cases of modules: on DTensors, over a process group, and trained by DDP and FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import khot
from khot.nn import BatchTopK, ExpertChoice, KHotGate, TopK
from tests.distributed.group import case
from tests.distributed.spread import R, S, compare, mesh_of, spread
from tests.inputs import normal
from tests.modules import MODULES, N

STATEFUL = [case for case in MODULES if case.target is None and case.gradient and case.make().state_dict()]
ROW_BY_ROW = ("topk_learned", "jump_relu_learned")  # rows do not know of each other: a rank needs no more than its own
LOCAL = {0: 3, 1: 2, 2: 0, 3: 1}  # rows of the batch that a rank has


def part(batch):
    start = sum(LOCAL[rank] for rank in range(dist.get_rank()))
    return batch[start : start + LOCAL[dist.get_rank()]]


def rows_in_all():
    return sum(LOCAL[rank] for rank in range(dist.get_world_size()))


@case
def modules_take_dtensors():
    x = normal(6, 5)
    for module in (
        TopK(2),
        TopK(2, softness=0.5),
        TopK(2, softness=0.5, straight_through=True),
        ExpertChoice(2),
        ExpertChoice(2, softness=0.5),
    ):
        for placements in ([S(0)], [S(1)], [S(0), S(1)]):
            compare(module, [x], [placements])
    one, many = TopK(1, n=5), TopK(1, n=5)
    one(x)
    many(spread(x, [S(0)]))
    assert torch.equal(one.idle, many.idle)


@case
def batch_topk_of_the_global_batch():
    batch, weight = normal(rows_in_all(), 7), normal(rows_in_all(), 7, seed=2)
    for options in ({}, {"softness": 0.5}, {"softness": 0.5, "learn_softness": True, "straight_through": True}):
        one, many = (BatchTopK(1.5, **options, n=7, group=group).double() for group in (None, dist.group.WORLD))
        whole, mine = batch.clone().requires_grad_(), part(batch).clone().requires_grad_()
        y, y_mine = one(whole), many(mine)
        torch.testing.assert_close(y_mine, part(y), rtol=1e-9, atol=1e-11)
        assert torch.equal(one.threshold, many.threshold) and torch.equal(one.idle, many.idle)
        (y * weight).sum().backward()
        (y_mine * part(weight)).sum().backward()
        torch.testing.assert_close(mine.grad, part(whole.grad), rtol=1e-9, atol=1e-11)
        if one.log_softness is not None:  # the mean over ranks, which DDP takes, is that of the mean loss
            total = many.log_softness.grad.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, one.log_softness.grad, rtol=1e-8, atol=1e-10)
        assert copy.deepcopy(many).group is None
    one, many = BatchTopK(1.5, n=7), BatchTopK(1.5, n=7)
    y = many(spread(batch, [S(0)]))
    assert isinstance(y, DTensor) and torch.equal(y.full_tensor(), one(batch))
    assert torch.equal(one.threshold, many.threshold) and torch.equal(one.idle, many.idle)


class Selector(nn.Module):
    """Ten of 64 pixels, and a linear classifier of them."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.linear = gate, nn.Linear(64, 10)

    def forward(self, x):
        return self.linear(self.gate(x))


class Relaxed(nn.Module):
    """Pixels times a relaxed mask of learned scores."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(0.01 * normal(64, dtype=torch.float32))

    def forward(self, x):
        return x * khot.sigmoid_topk(self.logits, 10)


def digits():
    data = load_digits()
    return torch.as_tensor(data.data / 16).float(), torch.as_tensor(data.target)


def trained(gate, parallel, steps, lr):
    """The selector after some steps on all digits, of which each rank has its share, in every run of the same start."""
    torch.manual_seed(0)
    model = Selector(gate())
    x, y = digits()
    x, y = x[:1792], y[:1792]  # a multiple of the ranks: the mean of means is the mean
    if parallel is not None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        x, y = x[rank::ranks], y[rank::ranks]
        torch.manual_seed(100 + rank)  # or all ranks would draw the same masks
        model = parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def by_ddp(model):
    return DistributedDataParallel(model)


def by_fsdp(model):
    fully_shard(model, mesh=mesh_of(1))
    return model


def weights(model):
    values = {}
    for name, value in model.named_parameters():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        values[name.removeprefix("module.")] = whole.detach()
    return values


@case
def a_selector_trained_over_ranks_is_that_of_one_process():
    one = weights(trained(Relaxed, None, 20, 0.01))
    for parallel in (by_ddp, by_fsdp):
        many = weights(trained(Relaxed, parallel, 20, 0.01))
        for name, value in one.items():
            torch.testing.assert_close(many[name], value, rtol=1e-4, atol=1e-6)


@case
def a_sampled_selector_trained_over_ranks_is_as_good():
    x, y = digits()
    scores = {}
    for name, parallel in (("one", None), ("ddp", by_ddp), ("fsdp", by_fsdp)):
        model = trained(lambda: KHotGate(64, 10), parallel, 60, 0.05).eval()
        with torch.no_grad():
            scores[name] = (model(x).argmax(-1) == y).float().mean().item()
    assert min(scores.values()) > 0.6 and max(scores.values()) - min(scores.values()) < 0.1, scores


def state_after_two_steps(member, rank=None):
    """Parameters and buffers; of all ranks' rows where no rank is given. Each rank draws in its own way."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(N, N), member.make())
    parallel = model if rank is None else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1 if rank is None else rank)
    for blocks in normal(2 * ranks, 6, N, dtype=torch.float32).split(ranks):
        y = parallel(blocks.flatten(0, 1) if rank is None else blocks[rank])
        optimizer.zero_grad()
        (y * y.detach().cos()).mean().backward()
        optimizer.step()
    return model.state_dict()


@case
def modules_learn_the_same_on_all_ranks():
    for member in STATEFUL:
        state, parameters = state_after_two_steps(member, dist.get_rank()), dict(member.make().named_parameters())
        for name, value in state.items():
            assert value.isfinite().all(), (member.name, name)
            if name.startswith("0.") or name.removeprefix("1.") in parameters:
                first = value.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, value), (member.name, name)
        if member.name in ROW_BY_ROW:
            torch.testing.assert_close(state, state_after_two_steps(member))


@case
def equal_seeds_draw_equal_masks():
    """The trap of plain data parallelism, and its cure in two lines."""
    design = khot.ConditionalPoisson(logits=torch.zeros(4, 20), k=10)

    def drawn(generator):
        mine = design.sample(generator=generator)
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        return [not torch.equal(mine, other) for other in others]

    assert not any(drawn(torch.Generator().manual_seed(1)))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    assert sum(drawn(generator)) == dist.get_world_size() - 1


@case
def a_learned_softness_beside_a_dtensor_must_be_one():
    module = TopK(2, softness=0.5, learn_softness=True)
    with pytest.raises(ValueError, match="is a plain tensor that requires a gradient beside the DTensor"):
        module(spread(normal(4, 6), [S(0)]))
    module.log_softness = nn.Parameter(spread(module.log_softness.detach().double(), [R]))
    module(spread(normal(4, 6), [S(0)])).sum().backward()
    assert module.log_softness.grad.full_tensor().isfinite()
