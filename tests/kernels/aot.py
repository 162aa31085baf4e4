"""Compiles Triton kernels for devices that are not there: ``python -m tests.kernels.aot``.

The launchers run as they are, on CPU tensors of the sizes that dispatch uses; a driver that only knows the name of the
target makes Triton compile for it, and nothing is launched. Prints registers, spilled bytes and shared memory of each
kernel, and exits with 1 if one spills more than ``--spills`` bytes.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from khot.kernels.gpu.launch import forget_launches
from tests.kernels.kernel_case import KernelCase

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class NoDevice:
    """Stands in for a driver."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target.arch)  # what compiled kernels are cached by

    def get_current_stream(self, device: str) -> int:
        return 0


class Resources(NamedTuple):
    """For one compiled kernel: registers per thread, bytes of stack or spilled registers, bytes of shared memory."""

    registers: int
    spills: int
    shared: int


def resources(kernel: Any) -> Resources:
    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [CUOBJDUMP, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        return Resources(found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared)
    found = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)", kernel.asm["amdgcn"])}
    spills = found["vgpr_spill_count"] + found["private_segment_fixed_size"]  # scalar registers spill into vector ones
    return Resources(found["vgpr_count"], spills, kernel.metadata.shared)


def selected(names: list[str], others: list[str]) -> list[KernelCase]:
    """The cases named, all by default, without those in ``others``; a name that no case with sizes has is an error."""
    from tests.kernels.kernel_cases import KERNELS  # imports Triton's kernels

    cases = {case.name: case for case in KERNELS if case.compiled}
    if missing := sorted({*names, *others} - set(cases)):
        raise SystemExit(f"no such case: {', '.join(missing)}")
    return [case for name, case in cases.items() if name not in others and (not names or name in names)]


def compiled(cases_of: dict[str, list[KernelCase]], one_size: bool) -> Iterator[tuple[str, str, Any, int]]:
    """Target, case, kernel and warps, each once; an error where a case launches nothing."""
    launched: list[tuple[Any, int]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launched.append((run(self, *args, grid=grid, warmup=True, **options), options["num_warps"]))
        return launched[-1][0]

    JITFunction.run = compile_only
    forget_launches()
    for name, cases in cases_of.items():
        driver.set_active(NoDevice(TARGETS[name]))
        seen = set()
        for case in cases:
            for shape, dtype in case.compiled[:1] if one_size else case.compiled:
                launched.clear()
                row = torch.empty(shape[:-1], dtype=torch.float64)
                case.compile(torch.empty(shape, dtype=dtype), row, row)
                if not launched:
                    raise SystemExit(f"{case.name} launches no kernel at {shape}")
                for kernel, warps in launched:
                    if kernel.hash not in seen:
                        seen.add(kernel.hash)
                        yield name, f"{case.name} {shape[-1]} {str(dtype).removeprefix('torch.')}", kernel, warps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", nargs="+", action="append", metavar=("TARGET", "CASE"), help="a target, cases (all)")
    parser.add_argument("--others", nargs="*", default=[], help="names of cases to leave out where all are taken")
    parser.add_argument("--one-size", action="store_true", help="the first size of each case only")
    parser.add_argument("--spills", type=int, default=0, help="bytes that a kernel may spill (default: %(default)s)")
    options = parser.parse_args()
    on = options.on or [[target] for target in TARGETS]
    if unknown := sorted({target for target, *_ in on} - set(TARGETS)):
        raise SystemExit(f"no such target: {', '.join(unknown)}")
    cases_of = {target: selected(names, [] if names else options.others) for target, *names in on}
    print(f"triton {triton.__version__}")
    print(f"{'target':7} {'case, n, dtype':36} {'kernel':20} warps registers spills shared")
    spilling = 0
    for target, case, kernel, warps in compiled(cases_of, options.one_size):
        need = resources(kernel)
        spilling += need.spills > options.spills
        numbers = f"{warps:5} {need.registers:9} {need.spills:6} {need.shared:6}"
        print(f"{target:7} {case:36} {kernel.metadata.name:20} {numbers}")
    print(f"{spilling} kernels spill more than {options.spills} bytes of registers")
    return int(spilling > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
