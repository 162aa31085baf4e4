"""Tiles of the mask kernels on an accelerator: the times of a mask and its derivative over those of softmax.

``python benchmarks/gpu_tiles.py`` times both kernels of :mod:`khot.kernels.threshold`, with all that they launch, as
replayed CUDA graphs, for N(0, 1) scores in float32 and float64, k = n / 10, softness 1. The tables of
:mod:`khot.kernels.threshold.triton_rows` are made from this one. It stops with a message if torch finds no accelerator.
Kernels are compiled in several processes before anything is timed.
"""

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from gpu import Pace, copy_bandwidth, device_seconds
from timing import arguments, write_csv

from khot.kernels.links.logistic import LOGISTIC

SHAPES = [(8192, n) for n in (64, 128, 256, 512, 1000, 2048, 4096, 8192)] + [(128, 1000), (1024, 16_384)]
DOUBLE_SHAPES = [(8192, 64), (128, 1000), (8192, 1000), (8192, 4096)]
# Rows of a program, unroll, width and warps; whether rows are read 16 bytes at a time.
SHORT = [(4, 8, 8, 1), (8, 8, 4, 1), (2, 8, 16, 1), (2, 4, 16, 1), (4, 4, 8, 1), (8, 4, 8, 2), (16, 4, 8, 4)]
UNALIGNED = [(1, 2, 32, 1), (1, 4, 32, 1), (1, 8, 32, 1), (1, 4, 64, 2), (1, 8, 64, 2), (1, 4, 128, 4), (1, 8, 128, 4)]
UNALIGNED += [(1, 4, 256, 8), (1, 8, 256, 8)]
ALIGNED = [(1, 2, 128, 1), (1, 4, 128, 1), (1, 8, 128, 1), (1, 2, 256, 2), (1, 4, 256, 2), (1, 8, 256, 2)]
ALIGNED += [(1, 2, 512, 4), (1, 4, 512, 4), (1, 8, 512, 4), (1, 2, 1024, 8), (1, 4, 1024, 8), (1, 2, 2048, 16)]
DOUBLE = [(1, 8, 32, 1), (1, 4, 32, 1), (1, 4, 64, 2), (1, 8, 64, 2), (1, 2, 128, 4), (1, 4, 128, 4), (1, 2, 256, 8)]
WHAT = ("forward", "backward")


class Job(NamedTuple):
    """A tile for rows of a length."""

    rows: int
    n: int
    size: tuple[int, int, int, int]
    aligned: bool
    dtype: torch.dtype = torch.float32

    @property
    def tile(self) -> Any:
        from khot.kernels.threshold.triton_rows import Tile  # imports Triton

        single = self.dtype != torch.float64
        return Tile(*self.size, single=single, double=not single, aligned=self.aligned)


def jobs() -> Iterator[Job]:
    """Those with tiles that do not hold many more columns than a row has."""
    for rows, n in SHAPES:
        for aligned, sizes in ((False, SHORT if n <= 512 else []), (False, UNALIGNED), (True, ALIGNED)):
            yield from (Job(rows, n, size, aligned) for size in sizes if size[1] * size[2] <= 2 * n)
    for rows, n in DOUBLE_SHAPES:
        for size in (*(SHORT if n <= 512 else []), *DOUBLE):
            if size[1] * size[2] <= 2 * n:
                yield Job(rows, n, size, aligned=size[0] == 1, dtype=torch.float64)


def calls(job: Job, rows: int) -> tuple[Any, Any]:
    """A mask, and its derivative, without what else a call of khot does."""
    from khot.kernels.threshold import triton_backward, triton_forward  # import Triton

    x = torch.randn(rows, job.n, device="cuda", dtype=job.dtype)
    k, g = max(1.0, job.n // 10), torch.randn_like(x)

    def forward() -> Any:
        with patch.object(triton_forward, "tile_of", lambda *rows, **options: job.tile):
            return triton_forward.launch_forward(x, k, 1.0, LOGISTIC)

    _, anchor, offset, _ = forward()

    def backward() -> Any:
        with patch.object(triton_backward, "tile_of", lambda *rows, **options: job.tile):
            return triton_backward.launch_backward(x, 1.0, anchor, offset, g, LOGISTIC, "mask", False)

    return forward, backward


def compile_tile(job: Job) -> None:
    """Runs the kernels on a few rows."""
    calls(job, 8)[1]()


def softmax_calls(job: Job) -> tuple[Any, Any]:
    x = torch.randn(job.rows, job.n, device="cuda", dtype=job.dtype)
    y, g = torch.softmax(x, -1), torch.randn_like(x)
    return lambda: torch.softmax(x, -1), lambda: torch._softmax_backward_data(g, y, -1, job.dtype)


def main() -> None:
    options = arguments("Tiles of the mask kernels on an accelerator.", "gpu_tiles.csv")
    if not torch.cuda.is_available():
        print("torch finds no accelerator here: nothing measured")
        return
    import triton

    print(f"{torch.cuda.get_device_name()}: a copy moves {1e-9 * copy_bandwidth():.0f} GB/s")
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        pool.map(compile_tile, {(*job[2:],): job for job in jobs()}.values(), chunksize=1)  # one for each tile
    table: list[dict[str, object]] = []
    pace, softmax = Pace(rounds=5, repeats=10), {}
    for job in jobs():
        shape = job.rows, job.n, job.dtype
        if shape not in softmax:
            softmax[shape] = [device_seconds(call, pace) for call in softmax_calls(job)]
        times = [device_seconds(call, pace) for call in calls(job, job.rows)]
        names = "rows_of_a_program", "unroll", "width", "warps"
        row = {"rows": job.rows, "n": job.n, "dtype": str(job.dtype).removeprefix("torch.")}
        row |= {**dict(zip(names, job.size, strict=True)), "aligned": job.aligned}
        for name, pair in (("", times), ("softmax_", softmax[shape])):
            row |= {f"{name}{what}_us": round(1e6 * t, 1) for what, t in zip(WHAT, pair, strict=True)}
        row |= {"over_softmax": round(sum(times) / sum(softmax[shape]), 2)}
        table.append(row | {"device": torch.cuda.get_device_name(), "triton": triton.__version__})
        print(*table[-1].values(), flush=True)
        write_csv(options.csv, table)


if __name__ == "__main__":
    main()
