"""A step of the pivotal method on one long row, in processes whose memory goes up and down with their tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends import USUAL

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")]

# Times the logits, which count, and so do all tensors but the cotangent. The exact path computes in float64.
MOST = {"torch": 22, "numba": 8}[USUAL]
ROOT = Path(__file__).parents[2]
SCRIPT = r"""
import sys
import torch
from khot import Pivotal, StraightThrough

torch.set_num_threads(1)


def resident(what):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(what))


def step(n):
    logits, weight = torch.randn(n), torch.randn(n)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = resident("VmRSS")
    x = StraightThrough(Pivotal(logits=logits.requires_grad_(), k=n // 10), log_prob="none").rsample()
    torch.autograd.grad(x, logits, weight)
    return 1 + (resident("VmHWM") - before) / logits.nbytes


step(200_000)  # which compiles the loops
print(step(int(sys.argv[1])))
"""


def test_pivotal():
    n = 2**21 + 1  # of the first round almost all units wait for the second
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back at once
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(n)], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert 4 < float(result.stdout) <= MOST, result.stdout  # 4 at least, or nothing was measured
