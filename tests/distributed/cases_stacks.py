"""Modules in DistributedDataParallel: two ranks with half of the rows each learn what one process learns."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from khot.nn import BatchTopK, JumpReLU, TokenChoice, TopK, TopKMask
from tests.distributed.group import case
from tests.inputs import normal

N, SEQUENCES = 8, 4
MODULES = [
    partial(TopK, 1, n=N),
    partial(TopK, 2, softness=0.5, learn_softness=True, n=N),
    partial(TopKMask, 1, softness=0.5, straight_through=True, n=N),
    partial(BatchTopK, 0.5, n=N),
    partial(BatchTopK, 1.5, softness=0.5, learn_softness=True, n=N, momentum=None),
    partial(JumpReLU, 0.1, learn_threshold=True, bandwidth=1.0),
    partial(TokenChoice, 2, softness=0.5, learn_softness=True, capacity=1.25),
    partial(TokenChoice, 2, scores="sigmoid", bias=N),
]


def network(make):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N, N), make(), nn.Linear(N, 1)).double()


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches:
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        if isinstance(model, DistributedDataParallel):
            update_bias(model.module[1], dist.group.WORLD)
        else:
            update_bias(model[1], None)
        optimizer.step()


def update_bias(module, group):
    if getattr(module, "bias", None) is not None:
        module.update_bias(0.1, group=group)
        assert module.bias.any()


@case
def modules_in_distributed_data_parallel():
    """With units that only one rank keeps, and padding on one of them."""
    batches = normal(3, SEQUENCES, 5, N)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for make in MODULES:
        plain = network(make)
        counts = hasattr(plain[1], "idle")
        shared = network(partial(make, group=dist.group.WORLD) if counts else make)
        train(plain, batches)
        train(DistributedDataParallel(shared), batches[:, mine])
        torch.testing.assert_close(shared.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-9, msg=str(make))


@case
def padding_in_distributed_batches():
    x = normal(SEQUENCES, 5, N)
    padded = x.clone()
    padded[0, 2:] = padded[1, :1] = -torch.inf
    real = padded[(padded > -torch.inf).all(-1)]
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for make in (partial(BatchTopK, 2, n=N), partial(BatchTopK, 1.5, softness=0.5, n=N)):
        plain, shared = make(), make(group=dist.group.WORLD)
        y, found = plain(real), shared(padded[mine])
        expected = torch.zeros_like(padded)
        expected[(padded > -torch.inf).all(-1)] = y
        torch.testing.assert_close(found, expected[mine])
        torch.testing.assert_close(shared.state_dict(), plain.state_dict())
