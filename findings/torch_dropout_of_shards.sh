#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: Dropout of a DTensor that is sharded over processes on CPUs uses equal masks on all shards if the
#            processes have equal seeds.
# expected: The masks of a single process: DTensor keeps offsets so that shards draw different numbers.
# seen: Two processes with seed 0 and four rows each drop the same entries of their rows. DTensor keeps offsets on
#       accelerators only.
# why: A test on CPUs sees correlated masks, half as many random numbers as rows need, and other results than the same
#      code on accelerators.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def work(rank, address):
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    torch.manual_seed(0)
    x = distribute_tensor(torch.ones(8, 50), init_device_mesh("cpu", (2,)), [Shard(0)])
    y = torch.nn.functional.dropout(x, 0.5)
    mine, parts = y.to_local(), [torch.empty(4, 50) for _ in range(2)]
    dist.all_gather(parts, mine)
    equal = bool((parts[0] == parts[1]).all())
    assert equal and 0.3 < (mine == 0).float().mean() < 0.7, (equal, mine)
    if rank == 0:
        print("masks of both shards are equal:", equal)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (os.path.abspath("store"),), nprocs=2)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
