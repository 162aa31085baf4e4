"""What the mask kernels cost on a GPU, counted in their machine code: no device is needed.

``python -m benchmarks.gpu_static`` compiles the kernels that a mask and its derivative launch for devices that are not
here, and counts the instructions of a usual row: before the search for the threshold, of one of its steps, and after
it. The number of steps on N(0, 1) scores with softness 1 and k = n / 10 was counted in Triton's interpreter. The last
tile of a row counts as a full one. Counts are left out where the compiler has moved code so that the search cannot be
distinguished from the rest. A predicted time is the longest of four: issuing instructions, special functions,
float64 instructions, and moving bytes; each launch adds a fixed time. Softmax is predicted by its bytes and launches.
"""

import argparse
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.sass import Counts, blocks_of, count, resources
from khot.kernels.gpu.launch import forget_launches
from khot.kernels.threshold.triton_backward import launch_backward
from khot.kernels.threshold.triton_forward import launch_forward
from tests.kernels.aot import TARGETS, NoDevice
from tests.kernels.kernel_links import LINKS

RESULTS = Path(__file__).parent / "results"
ROWS = 8192
SIZES = (64, 1000, 4096, 4097, 8192)
OTHER_SIZES = (64, 4096)  # of all links but the first
COLD = {  # functions that a usual row does not enter
    "triton_rows._load_part",
    "triton_rows._store_part",
    "triton_search._moments_of_unmasked",
    "triton_gaps.settle",
    "triton_forward._total",
    "triton_forward._growth",
}
SEARCH = {"triton_search.advance"}
STEPS = {"logistic": 2, "laplace": 2, "clip": 3, "clip_power": 3, "exp": 2.5}
LAUNCH = 2e-6  # seconds that a launch takes however little it does


class Device(NamedTuple):
    """What a prediction needs to know about a device.

    Attributes:
        name: An example.
        cycles: Of all multiprocessors, a second.
        issued: Warp instructions that a multiprocessor issues in a cycle in practice.
        special: Of its special functions.
        double: Of its float64 instructions.
        bandwidth: Bytes a second, achieved.
    """

    name: str
    cycles: float
    issued: float
    special: float
    double: float
    bandwidth: float

    def seconds(self, warp_instructions: dict[str, float], moved: float) -> float:
        """Of warp instructions by unit, and of bytes."""
        issue = warp_instructions["all"] / self.issued
        units = warp_instructions["special"] / self.special, warp_instructions["float64"] / self.double
        return max(max(issue, *units) / self.cycles, moved / self.bandwidth)


DEVICES = {
    "sm_90": Device("H100", 132 * 1.75e9, 2.4, 0.5, 2.0, 3e12),
    "sm_89": Device("RTX 4090", 128 * 2.5e9, 2.4, 0.5, 1 / 16, 0.9e12),
}


class Launch(NamedTuple):
    """One kernel of a call.

    Attributes:
        kernel: As compiled.
        tile: Its tile.
        programs: Their number.
    """

    kernel: Any
    tile: Any
    programs: int


def launches_of(link: Any, n: int, backward: bool, target: str) -> list[Launch]:
    """What a mask of (8192, n) float32 scores, or its derivative without one of the softness, launches."""
    found: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(Launch(kernel, args[-1], grid[0]))
        return kernel

    driver.set_active(NoDevice(TARGETS.get(target) or triton.backends.compiler.GPUTarget("cuda", int(target[3:]), 32)))
    JITFunction.run = compile_only
    forget_launches()
    x, row = torch.empty(ROWS, n), torch.empty(ROWS, dtype=torch.float64)
    try:
        if backward:
            launch_backward(x, row, row, row, x, link, with_scale=False)
        else:
            launch_forward(x, row, row, link)
    finally:
        JITFunction.run = run
    return found


def of_a_row(launch: Launch, n: int) -> Counts:
    """Warp instructions of a row, by unit."""
    tile = launch.tile
    blocks = blocks_of(launch.kernel)
    counts = count(blocks, COLD, SEARCH, lambda: -(-n // tile.size))
    if counts.step and not counts.step["memory"]:  # whole and partial tiles share a block: the latter counts, too
        counts = count(blocks, COLD - {"triton_rows._load_part"}, SEARCH, lambda: -(-n // tile.size))
    factor = tile.warps / tile.rows
    for part in counts:
        for unit in part:
            part[unit] *= factor  # type: ignore[assignment]
    return counts


def until_it_ends(launch: Launch) -> int:
    """Warp instructions of a program that finds no flag: up to the first exit."""
    total = 0
    for block in blocks_of(launch.kernel):
        total += len(block.instructions)
        if block.instructions[-1].name.startswith("EXIT"):
            break
    return total * launch.tile.warps


def table(targets: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each target, link, size and direction."""
    for target in targets:
        device = DEVICES[target]
        for link in LINKS:
            for n in SIZES if link is LINKS[0] else OTHER_SIZES:
                for backward in (False, True):
                    usual, flagged = launches_of(link, n, backward, target)
                    counts, steps = of_a_row(usual, n), 0 if backward else STEPS[str(link.kernel)]
                    total = counts.total(steps)
                    of_call = {unit: ROWS * total[unit] for unit in ("all", "special", "float64")}
                    of_call["all"] += flagged.programs * until_it_ends(flagged)
                    moved = ROWS * n * 4 * (3 if backward else 2)
                    softmax = moved / device.bandwidth + LAUNCH
                    seen = backward or counts.step["memory"] > 0  # whether the search has been told from the rest
                    need, rare = resources(usual.kernel), resources(flagged.kernel)
                    yield {
                        "target": target,
                        "device": device.name,
                        "link": link.kernel,
                        "n": n,
                        "kernel": usual.kernel.metadata.name,
                        "registers": need.registers,
                        "spills": need.spills,
                        "registers_flagged": rare.registers,
                        "spills_flagged": rare.spills,
                        "prologue": round(counts.prologue["all"]) if seen else "",
                        "step": round(counts.step["all"]) if seen else "",
                        "steps": steps,
                        "epilogue": round(counts.epilogue["all"]) if seen else "",
                        "row": round(total["all"]) if seen else "",
                        "float64_row": round(total["float64"], 1),
                        "float64_step": round(counts.step["float64"], 1),
                        "launches": 2,
                        "synchronisations": 0 if backward else 1,  # the flag of contents, while validation is on
                        "over_softmax": round((device.seconds(of_call, moved) + 2 * LAUNCH) / softmax, 2)
                        if seen
                        else "",
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", nargs="+", default=list(DEVICES), choices=list(DEVICES), metavar="TARGET")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_static.csv")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with options.output.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] | None = None
        for row in table(options.on):
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
