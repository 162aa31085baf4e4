"""Tiles of the mask kernels on an accelerator: the times of a mask and its derivative over those of softmax.

``python benchmarks/gpu_tiles.py`` times both kernels of :mod:`khot.kernels.threshold`, with all that they launch, as
replayed CUDA graphs, for N(0, 1) scores in float32, k = n / 10 and softness 1. The tables of
:mod:`khot.kernels.threshold.triton_rows` are made from this one. It stops with a message if torch finds no accelerator.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from gpu import Pace, copy_bandwidth, device_seconds
from timing import arguments, write_csv
from torch import Tensor

from khot.kernels.links.logistic import LOGISTIC

SHAPES = [(8192, 64), (8192, 128), (8192, 256), (128, 1000), (8192, 1000), (8192, 2048), (8192, 4096), (8192, 8192)]
SHAPES += [(1024, 16_384)]
# Rows of a program, unroll, width and warps; whether rows are read 16 bytes at a time.
SHORT = [(4, 8, 8, 1), (8, 8, 4, 1), (2, 8, 16, 1), (2, 4, 16, 1), (4, 4, 8, 1), (8, 4, 8, 2), (16, 4, 8, 4)]
UNALIGNED = [(1, 2, 32, 1), (1, 4, 32, 1), (1, 8, 32, 1), (1, 4, 64, 2), (1, 8, 64, 2), (1, 4, 128, 4), (1, 8, 128, 4)]
UNALIGNED += [(1, 4, 256, 8), (1, 8, 256, 8)]
ALIGNED = [(1, 2, 128, 1), (1, 4, 128, 1), (1, 8, 128, 1), (1, 2, 256, 2), (1, 4, 256, 2), (1, 8, 256, 2)]
ALIGNED += [(1, 2, 512, 4), (1, 4, 512, 4), (1, 8, 512, 4), (1, 2, 1024, 8), (1, 4, 1024, 8), (1, 2, 2048, 16)]
WHAT = ("forward", "backward")


def tiles(n: int) -> Iterator[tuple[tuple[int, int, int, int], bool]]:
    """Those that do not hold many more columns than a row has."""
    for aligned, sizes in ((False, SHORT if n <= 256 else []), (False, UNALIGNED), (True, ALIGNED)):
        yield from ((size, aligned) for size in sizes if size[1] * size[2] <= 2 * n)


def seconds(x: Tensor, k: float, tile: Any) -> tuple[float, float]:
    """Of a mask, and of its derivative."""
    from khot.kernels.threshold import triton_backward, triton_forward  # import Triton

    g, pace = torch.randn_like(x), Pace(rounds=5, repeats=10)
    with (
        patch.object(triton_forward, "tile_of", lambda *rows, **options: tile),
        patch.object(triton_backward, "tile_of", lambda *rows, **options: tile),
    ):
        _, anchor, offset, _ = triton_forward.launch_forward(x, k, 1.0, LOGISTIC)
        forward = device_seconds(lambda: triton_forward.launch_forward(x, k, 1.0, LOGISTIC), pace)
        given = x, 1.0, anchor, offset, g, LOGISTIC, "mask", False
        return forward, device_seconds(lambda: triton_backward.launch_backward(*given), pace)


def main() -> None:
    options = arguments("Tiles of the mask kernels on an accelerator.", "gpu_tiles.csv")
    if not torch.cuda.is_available():
        print("torch finds no accelerator here: nothing measured")
        return
    import triton

    from khot.kernels.threshold.triton_rows import Tile

    table: list[dict[str, object]] = []
    print(f"{torch.cuda.get_device_name()}: a copy moves {1e-9 * copy_bandwidth():.0f} GB/s")
    for rows, n in SHAPES:
        x, pace = torch.randn(rows, n, device="cuda"), Pace(rounds=5, repeats=10)
        y, g = torch.softmax(x, -1), torch.randn_like(x)
        softmax = [
            device_seconds(lambda x=x: torch.softmax(x, -1), pace),
            device_seconds(lambda y=y, g=g: torch._softmax_backward_data(g, y, -1, torch.float32), pace),
        ]
        for size, aligned in tiles(n):
            times = seconds(x, max(1.0, n // 10), Tile(*size, single=True, double=False, aligned=aligned))
            names = "rows_of_a_program", "unroll", "width", "warps"
            table.append({"rows": rows, "n": n, **dict(zip(names, size, strict=True)), "aligned": aligned})
            for name, pair in (("", times), ("softmax_", softmax)):
                table[-1] |= {f"{name}{what}_us": round(1e6 * t, 1) for what, t in zip(WHAT, pair, strict=True)}
            table[-1] |= {"over_softmax": round(sum(times) / sum(softmax), 2)}
            table[-1] |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
            print(*table[-1].values(), flush=True)
        write_csv(options.csv, table)


if __name__ == "__main__":
    main()
