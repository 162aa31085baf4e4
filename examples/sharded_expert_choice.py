"""Experts that choose among the tokens of all processes
=====================================================

In expert-choice routing each expert takes the tokens with the largest scores, so that all experts carry the same load.
Here every process holds a part of the tokens, and an expert chooses among all of them. The gates, tokens x experts,
are a DTensor that is sharded along the tokens. The mask finds its thresholds by sums over the processes, which takes a
few numbers for each expert and step of the search. No token leaves its process, and the result does not depend on the
number of processes::

    python sharded_expert_choice.py
    torchrun --nproc-per-node 2 sharded_expert_choice.py

With one GPU for each process, the processes communicate by NCCL, otherwise by gloo.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from khot import sparse_topk

KINDS, INPUTS, TOKENS, STEPS = 4, 8, 512, 100
device = "cuda" if torch.cuda.is_available() else "cpu"
if "WORLD_SIZE" not in os.environ:  # without torchrun: one process
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh(device, (int(os.environ.get("WORLD_SIZE", 1)),))
rank, ranks = dist.get_rank(), dist.get_world_size()

# %%
# There are four kinds of tokens, and each kind has its own linear map from inputs to targets. A process keeps its share
# of the tokens. **Your data goes here:** replace `tokens` and `wanted`, each process's inputs and targets.
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that the order of summation does not show
kind = torch.randint(KINDS, (TOKENS,))
tokens = torch.randn(KINDS, INPUTS)[kind] + 0.3 * torch.randn(TOKENS, INPUTS)
wanted = torch.einsum("ti,tio->to", tokens, torch.randn(KINDS, INPUTS, INPUTS)[kind])
tokens, wanted = (v.chunk(ranks)[rank].to(device) for v in (tokens, wanted))

# %%
# Router and experts are linear maps. They start equal on all processes, and stay equal because their gradients are
# summed.
router = torch.nn.Parameter(0.1 * torch.randn(INPUTS, KINDS).to(device))
experts = torch.nn.Parameter(0.1 * torch.randn(KINDS, INPUTS, INPUTS).to(device))
optimizer = torch.optim.Adam([router, experts], lr=0.05)


def mask_of(scores: torch.Tensor) -> torch.Tensor:
    """The mask of this process's tokens; each expert, a column, takes its share of the tokens of all processes."""
    everywhere = DTensor.from_local(scores, mesh, [Shard(0)], shape=(TOKENS, KINDS), stride=(KINDS, 1))
    return sparse_topk(everywhere, TOKENS / KINDS, 0.5, dim=0).to_local()


# %%
for step in range(STEPS):
    mask = mask_of(tokens @ router)
    routed = torch.einsum("te,ti,eio->to", mask, tokens, experts)
    loss = (routed - wanted).square().sum() / (TOKENS * INPUTS)
    optimizer.zero_grad()
    loss.backward()
    for parameter in (router, experts):
        dist.all_reduce(parameter.grad)
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0 and step % 20 == 19:
        print(f"step {step + 1}: mean squared error {loss:.3f}")

# %%
# Every expert carries the same load in the end.
load = mask.detach().sum(0)
dist.all_reduce(load)
if rank == 0:
    print("load of each expert:", [round(v) for v in load.tolist()])
dist.destroy_process_group()
torch.set_default_dtype(torch.float32)
