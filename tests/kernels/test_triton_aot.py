"""Every kernel compiled ahead of time for devices that are not here, in a process that interprets nothing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers come for Linux"),
]
# The longest formulas at the largest size, and all sizes of one link; `python -m tests.kernels.aot` takes all.
LARGEST = "_(normal|clip_power|exp)$"
ALL_SIZES = "_(logistic|normal|clip_power|exp)$"
ORDER = "^(decayed_sums|order_gradient_(sort|permutation))$"


def compile_for(target: str, cases: str, cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.kernels.aot", "--targets", target, "--cases", cases]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    sys.stdout.write(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert target in result.stdout, "nothing was compiled"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "cases"),
    [
        ("sm_80", f"{LARGEST}|duels"),
        ("sm_90", f"{ALL_SIZES}|exponential_draw|tournament"),
        ("sm_100", f"{LARGEST}|duels"),
        ("gfx942", f"{ALL_SIZES}|exponential_draw"),
        ("sm_90", ORDER),
        ("gfx942", ORDER),
    ],
)
def test_no_kernel_spills(target, cases, tmp_path):
    compile_for(target, cases, tmp_path)
