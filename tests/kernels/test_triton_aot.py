"""Every kernel is compiled ahead of time for absent devices, in a process without the interpreter."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from tests.backends import skip_without_triton

ROOT = Path(__file__).parents[2]
skip_without_triton()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers come for Linux")


def masks(*links: str) -> list[str]:
    return [f"{kind}_{link}" for kind in ("mask", "gradient") for link in links]


# All families on one target, the longest formulas at all sizes; some of them everywhere. `python -m tests.kernels.aot`
# takes all kernels at all sizes.
ALL_SIZES = [
    *masks("logistic", "clip_power", "logistic_log"),
    *("order_log_exponential_draw", "topk_mask"),
]

ON_TARGETS = {
    "sm_80": ["gradient_logistic", "forest"],
    "sm_90": ALL_SIZES,
    "sm_100": ["gradient_clip_power", "pairs"],
    "gfx942": ["mask_logistic", "tree", "topk_mask"],
}
# The longest formulas in float32 and in float64, and every other kernel.
ONE_SIZE = [*masks("logistic_log", "clip_power"), "order_logistic_draw", "tournament", "topk_mask", "tree", "pairs"]
LOGARITHMS = ("log_value ", "log_derivative ")


def run_compiler(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def run_aot(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_compiler(cache, "-m", "tests.kernels.aot", *arguments)


@pytest.mark.slow
def test_every_link_compiles_as_itself(tmp_path):
    """All that kernels ask of it; only the logarithms are missing of some links, and then say so."""
    from khot.kernels.links.base_triton import triton_link  # imports Triton
    from tests.kernels.kernel_links import LINKS

    result = run_compiler(tmp_path, "-m", "tests.kernels.link_functions")
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    found = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    pieces = {repr(triton_link(link)): link.has_kernel(log=True) for link in LINKS}  # named as in another process
    functions = {name.rsplit(" ", 1)[0] for name in found}
    assert len(functions) == 6 and found.keys() == {f"{name} {piece}" for name in functions for piece in pieces}
    compiled = {name: outcome for name, outcome in found.items() if re.fullmatch("[0-9a-f]{64}", outcome)}
    assert len(set(compiled.values())) == len(compiled), "two links have a kernel in common"
    without = {
        f"{name} {piece}" for name in functions for piece in pieces if name.startswith(LOGARITHMS) and not pieces[piece]
    }
    assert {name: found[name] for name in without} == dict.fromkeys(without, "no logarithm of this link")
    assert found.keys() - compiled.keys() == without


# The assembler of Triton 3.6 spills two registers of a few kernels.
SPILLS = ["--spills", "8"] if Version(metadata.version("triton")) < Version("3.7") else []


@pytest.mark.exhaustive
def test_no_kernel_spills_at_any_size(tmp_path):
    on = [word for target, cases in ON_TARGETS.items() for word in ("--on", target, *cases)]
    result = run_aot(tmp_path, *SPILLS, *on)
    sys.stdout.write(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    asked = [f"{target:7} {case} " for target, cases in ON_TARGETS.items() for case in cases]
    assert [line for line in asked if line not in result.stdout] == [], "not all were compiled"


@pytest.mark.slow
def test_no_kernel_spills(tmp_path):
    result = run_aot(tmp_path, *SPILLS, "--one-size", "--on", "sm_90", *ONE_SIZE)
    sys.stdout.write(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert "sm_90 " in result.stdout, "nothing was compiled"


SHORT_ROWS = """
import re
from benchmarks.gpu_static import launches_of, of_a_row
from khot.kernels.links.logistic import LOGISTIC
for backward in (False, True):
    usual, flagged = launches_of(LOGISTIC, 64, backward, "sm_90")
    print(of_a_row(usual, 64).total(0 if backward else 2)["all"])
    print(*set(re.findall(r"threadsPerWarp = \\[(\\d+, \\d+, \\d+)\\]", usual.kernel.asm["ttgir"])))
"""


@pytest.mark.slow
def test_short_rows_share_a_warp(tmp_path):
    """Each of four rows has eight threads: if all threads had all rows, each would compute the numbers of all of them.

    Triton 3.6 needs a hint for this, and 3.7 does not. The table of static counts is made in this way; a derivative has
    no search, and so fewer instructions.
    """
    result = run_compiler(tmp_path, "-c", SHORT_ROWS)
    assert result.returncode == 0, result.stderr[-4000:]
    mask, of_mask, derivative, of_derivative = result.stdout.splitlines()
    assert of_mask == of_derivative == "1, 4, 8"  # unrolled columns, rows, columns
    assert 0 < float(derivative) < float(mask) < 300


@pytest.mark.slow
def test_a_case_that_is_not_there_is_refused():
    from tests.kernels.aot import selected  # imports Triton

    with pytest.raises(SystemExit, match="no such case: mask_gone"):
        selected(["mask_logistic", "mask_gone"], [])
