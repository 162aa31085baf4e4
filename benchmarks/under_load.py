"""What a training step costs on a busy machine: sparse autoencoders with khot's modules and with torch.topk, in turns.

The machine is idle, or six other processes compute all the time. torch has as many threads as it takes by default,
which spin while they wait for each other, or one. The table gives the time of a step and its ratio to the step in plain
torch under the same conditions.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from timing import arguments, interleaved, write_csv
from torch import Tensor, nn

from khot.nn import BatchTopK, TopK

BUSY, ROUNDS = 6, 7  # few rounds: a step with threads that spin takes seconds on a busy machine
ROWS, INPUTS, UNITS, KEPT = 256, 64, 1024, 32
Sparsity = Callable[[Tensor], Tensor]


def compute_for(parent: int) -> None:
    """Until the other process ends this one, or is no more."""
    while os.getppid() == parent:
        sum(range(100_000))


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """So many processes that compute without a pause while the block runs."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=compute_for, args=(os.getpid(),), daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def kept_of_each_row(z: Tensor) -> Tensor:
    values, indices = z.topk(KEPT, -1, sorted=False)
    return torch.zeros_like(z).scatter(-1, indices, values)


def kept_of_all(z: Tensor) -> Tensor:
    values, indices = z.flatten().topk(KEPT * len(z), sorted=False)
    return torch.zeros_like(z).flatten().scatter(0, indices, values).view_as(z)


def step_of(sparsity: Sparsity, batch: Tensor) -> Callable[[], None]:
    """A step of training: forward, backward and the optimizer."""
    encoder, decoder = nn.Linear(INPUTS, UNITS), nn.Linear(UNITS, INPUTS)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (decoder(sparsity(encoder(batch).relu())) - batch).square().mean().backward()
        optimizer.step()

    return step


def compared(name: str, by_hand: Sparsity, module: nn.Module, seconds: float) -> dict[str, object]:
    batch = torch.randn(ROWS, INPUTS)
    timings = interleaved({"torch": step_of(by_hand, batch), "khot": step_of(module, batch)}, seconds, ROUNDS)
    milliseconds = {key: 1e3 * timing.median for key, timing in timings.items()}
    return {
        "module": name,
        "ms in plain torch": f"{milliseconds['torch']:.2f}",
        "ms with khot": f"{milliseconds['khot']:.2f}",
        "over plain torch": f"{milliseconds['khot'] / milliseconds['torch']:.2f}",
    }


def main() -> None:
    options = arguments(__doc__ or "", "under_load.csv")
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    counts = sorted({torch.get_num_threads(), 1}, reverse=True)
    for busy in (0, BUSY):
        with busy_processes(busy):
            for threads in counts:
                torch.set_num_threads(threads)
                for name, by_hand, module in (
                    ("TopK", kept_of_each_row, TopK(KEPT)),
                    ("BatchTopK", kept_of_all, BatchTopK(KEPT)),
                ):
                    place: dict[str, object] = {"busy processes": busy, "threads": threads}
                    rows.append(place | compared(name, by_hand, module, options.seconds))
                    print(*rows[-1].values(), sep="   ", flush=True)
    torch.set_num_threads(counts[0])
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
