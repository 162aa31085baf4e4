"""Forward and backward of a mask on one long row, in a process whose memory goes up and down with its tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")]

MOST = 8  # times the scores, which count, and so do all tensors but the cotangent
MOST_ON_THE_EXACT_PATH = 20  # where a user's own link is computed, in float64
ROOT = Path(__file__).parents[2]
SCRIPT = r"""
import gc, json, os, sys, threading
import torch
from tests.maps import RELAXATIONS

torch.set_num_threads(1)
gc.freeze()  # a collection looks at what comes from here on
n, page = 200_000, os.sysconf("SC_PAGE_SIZE")


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * page


def peak(function):
    gc.collect()  # or what goes during the call would be taken off
    seen, stop = [resident()], threading.Event()

    def watch():
        while not stop.wait(2e-4):
            seen.append(resident())

    thread = threading.Thread(target=watch)
    thread.start()
    held = function()
    seen.append(resident())  # with what it returns, however busy the machine keeps the other thread
    stop.set()
    thread.join()
    return max(seen) - seen[0]


found = {}
for case in RELAXATIONS:
    for log in (False, True) if case.log else (False,):
        for gap in (0.0, 500.0):
            x, softness, cotangent = torch.randn(n), torch.ones(()).requires_grad_(), torch.randn(n)
            x[: n // 10] += gap
            leaves = (x.requires_grad_(), softness)

            def step():
                y = (case.log if log else case.map)(x, n // 10, softness)
                return y, torch.autograd.grad(y, leaves, cotangent)

            step()
            found[f"{'log of ' if log else ''}{case.name}, gap {gap}"] = 1 + peak(step) / x.nbytes
print(json.dumps(found))
"""


def test_at_most_eight_times_the_scores():
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back at once
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found and all(times > 2 for times in found.values()), found  # or nothing was measured
    own = {name for name in found if "capped_simplex_map" in name}
    assert own and all(found[name] <= (MOST_ON_THE_EXACT_PATH if name in own else MOST) for name in found), found
