"""Sharded rows: sums or candidates, compared with gathering the row as DTensor's softmax and topk do.

Processes of this machine talk through gloo over the loopback address, each on one thread. The table gives the median
time of a step, the collectives in it and the bytes that a process hands to them. A step is a call, forward and backward
where the result has a gradient: of a relaxed mask and of a hard one. The table also has the terms of the guide's model:
one all-reduce, a call on next to no entries, and masks that all processes compute at once of their own parts.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from timing import arguments, write_csv
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from khot import sigmoid_topk, topk_mask

RANKS, SHARE = (1, 2, 4), 100  # k is n / SHARE
LENGTHS, FEW = (10**5, 10**6, 10**7), 100


class CountedCollectives(TorchDispatchMode):
    """How many collectives there are, and the bytes of the tensors that this process gives to them."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.bytes = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        collective = function.namespace in ("c10d", "_c10d_functional") and "wait" not in function.name()
        if collective:
            self.count += 1
            given = args[1] if "allgather" in function.name() else args[0]  # its first argument is the result
            self.bytes += sum(v.numel() * v.element_size() for v in tensors_in(given))
        return function(*args, **(kwargs or {}))


def tensors_in(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


def gathered(function: Callable[..., Tensor]) -> Callable[..., DTensor]:
    """The function of the whole row on every process; if its result has an entry per unit, each keeps its own part."""

    def of_whole(x: DTensor, k: int) -> DTensor:
        y = function(x.redistribute(placements=[Replicate()]), k)
        return y.redistribute(placements=[Shard(1)]) if y.dim() == x.dim() else y

    return of_whole


def of_own_part(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of the part of each process, as if it were a row."""

    def of_part(x: DTensor, k: int) -> Tensor:
        return function(x.to_local().detach().requires_grad_(), k // x.device_mesh.size())

    return of_part


def step(function: Callable[..., Tensor], x: DTensor, k: int) -> None:
    y = function(x, k)
    if y.requires_grad:
        (y.to_local() if isinstance(y, DTensor) else y).sum().backward()


def measure(function: Callable[..., Tensor], x: DTensor, k: int, seconds: float) -> tuple[float, int, int]:
    """Median seconds of a step, its collectives and their bytes; the number of steps is the same everywhere."""
    step(function, x, k)
    with CountedCollectives() as counted:
        step(function, x, k)
    started = time.perf_counter()
    step(function, x, k)
    repeats = torch.tensor(min(100.0, max(3.0, seconds / (time.perf_counter() - started))))
    dist.all_reduce(repeats, dist.ReduceOp.MIN)
    times = []
    for _ in range(int(repeats)):
        dist.barrier()
        started = time.perf_counter()
        step(function, x, k)
        times.append(time.perf_counter() - started)
    return torch.tensor(times).median().item(), counted.count, counted.bytes


def work(rank: int, ranks: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    mesh, rows = init_device_mesh("cpu", (ranks,)), [latency(ranks)]
    rows += rows_of([(sigmoid_topk, "sums")], FEW, mesh, seconds)
    for n in LENGTHS:
        rows += rows_of([(sigmoid_topk, "sums"), (topk_mask, "candidates")], n, mesh, seconds)
    if rank == 0:
        torch.save(rows, f"{folder}/rows{ranks}")
    dist.destroy_process_group()


def latency(ranks: int) -> dict[str, object]:
    """What a collective of four numbers takes, as each step of a root finder has one."""
    numbers = torch.zeros(4, dtype=torch.float64)
    times = []
    for _ in range(200):
        started = time.perf_counter()
        dist.all_reduce(numbers)
        times.append(time.perf_counter() - started)
    milliseconds = 1e3 * torch.tensor(times).median().item()
    found = {"call": "none", "by": "one all-reduce", "ranks": ranks, "n": 4, "milliseconds": round(milliseconds, 3)}
    return found | {"collectives": 1, "bytes": 32}


def rows_of(
    calls: Iterable[tuple[Callable[..., Tensor], str]], n: int, mesh: DeviceMesh, seconds: float
) -> list[dict[str, object]]:
    """Each function of the sharded row, and of the gathered row."""
    scores = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    x = distribute_tensor(scores, mesh, [Shard(1)]).requires_grad_()
    rows = []
    for call, by in calls:
        ways = [(by, call), ("gathered row", gathered(call))]
        if call is sigmoid_topk:
            ways.append(("own part alone", of_own_part(call)))
        for how, function in ways:
            median, collectives, count = measure(function, x, n // SHARE, seconds)
            rows.append(
                {"call": call.__name__, "by": how, "ranks": mesh.size(), "n": n, "milliseconds": round(1e3 * median, 2)}
                | {"collectives": collectives, "bytes": count}
            )
    return rows


def main() -> None:
    options = arguments(__doc__, "distributed_cpu.csv")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            spawn(work, (ranks, folder, options.seconds), nprocs=ranks)
            rows += torch.load(f"{folder}/rows{ranks}")
    write_csv(options.csv, rows)
    for row in rows:
        print("  ".join(f"{value!s:>12}" for value in row.values()))


if __name__ == "__main__":
    main()
