"""Every kernel compiled ahead of time for devices that are not here, in a process that interprets nothing."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers come for Linux"),
]
# The longest formulas at the largest size everywhere, all families on one target; `python -m tests.kernels.aot` takes
# all kernels at all sizes.
LARGEST = "_(normal|clip_power|k10)$"
ALL_SIZES = "_(logistic|normal|clip_power|exp|k10)$|exponential_draw"
OTHERS = "tournament|duels|^(decayed_sums|order_gradient_(sort|permutation)|tree|pairs)$"


def run_compiler(cache: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    sys.stdout.write(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    return result.stdout


def compile_for(target: str, cases: str, cache: Path) -> None:
    output = run_compiler(cache, "tests.kernels.aot", "--targets", target, "--cases", cases)
    assert target in output, "nothing was compiled"


@pytest.mark.slow
def test_links_and_noises_that_a_kernel_does_not_know_do_not_compile(tmp_path):
    lines = run_compiler(tmp_path, "tests.kernels.ladders").splitlines()
    compiled = [line for line in lines if line.endswith(": known, compiled")]
    why = ": unknown, .*(unknown (link|noise)|no logarithm of this link)$"
    refused = [line for line in lines if re.search(why, line)]
    assert len(compiled) > 60 and len(refused) > 50
    assert [line for line in lines if line not in compiled + refused] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "cases"),
    [
        ("sm_80", f"{LARGEST}|^forest"),
        ("sm_90", ALL_SIZES),
        ("sm_90", OTHERS),
        ("sm_100", f"{LARGEST}|_exp$|^pairs"),
        ("gfx942", f"{LARGEST}|exponential_draw|^tree$"),
    ],
)
def test_no_kernel_spills(target, cases, tmp_path):
    compile_for(target, cases, tmp_path)
