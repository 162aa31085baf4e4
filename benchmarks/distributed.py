"""Rows that are cut over processes: masks by sums, draws by candidates, against gathering the row as DTensor's maps do.

Processes of this machine talk by gloo over the loopback address. A table has the median time of a step, of masks
forward and backward, the collectives and the bytes that a process hands to them. A draw is that of a design of its own,
made of the logits each time, as in training.
"""

import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from timing import arguments, write_csv
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from khot import GumbelTopK, sigmoid_topk, topk_mask

RANKS, LENGTHS, SHARE = (1, 2, 4), (10**5, 10**6, 10**7), 100  # k is n / SHARE


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


def gathered(mask: Callable[..., Tensor]) -> Callable[..., DTensor]:
    """The mask of the whole row on every process, of which each keeps its part."""

    def of_whole(x: DTensor, k: int) -> DTensor:
        return mask(x.redistribute(placements=[Replicate()]), k).redistribute(placements=[Shard(1)])

    return of_whole


def gumbel_topk_draw(logits: Tensor, k: int) -> Tensor:
    """A draw of order sampling."""
    return GumbelTopK(logits=logits.detach(), k=k).sample()


def step(mask: Callable[..., DTensor], x: DTensor, k: int) -> None:
    y = mask(x, k)
    if y.requires_grad:
        y.to_local().sum().backward()


def measure(mask: Callable[..., DTensor], x: DTensor, k: int, seconds: float) -> tuple[float, int, int]:
    """Median seconds of a step, its collectives and their bytes; the number of steps is the same everywhere."""
    step(mask, x, k)
    with CountedCollectives() as counted:
        step(mask, x, k)
    started = time.perf_counter()
    step(mask, x, k)
    repeats = torch.tensor(min(100.0, max(3.0, seconds / (time.perf_counter() - started))))
    dist.all_reduce(repeats, dist.ReduceOp.MIN)
    times = []
    for _ in range(int(repeats)):
        dist.barrier()
        started = time.perf_counter()
        step(mask, x, k)
        times.append(time.perf_counter() - started)
    return torch.tensor(times).median().item(), counted.count, counted.bytes


def work(rank: int, ranks: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    mesh, rows = init_device_mesh("cpu", (ranks,)), [latency(ranks)]
    for n in LENGTHS:
        rows += rows_of(n, mesh, seconds)
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
    found = {"mask": "none", "by": "one all-reduce", "ranks": ranks, "n": 4, "milliseconds": round(milliseconds, 3)}
    return found | {"collectives": 1, "bytes": 32}


def rows_of(n: int, mesh: DeviceMesh, seconds: float) -> list[dict[str, object]]:
    scores = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    x = distribute_tensor(scores, mesh, [Shard(1)]).requires_grad_()
    rows = []
    for mask, by in ((sigmoid_topk, "sums"), (topk_mask, "sums"), (gumbel_topk_draw, "candidates")):
        for how, function in ((by, mask), ("gathered row", gathered(mask))):
            median, collectives, count = measure(function, x, n // SHARE, seconds)
            rows.append(
                {"mask": mask.__name__, "by": how, "ranks": mesh.size(), "n": n, "milliseconds": round(1e3 * median, 2)}
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
