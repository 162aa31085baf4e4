"""The example over ranks runs in one process and under torchrun, with the same results."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.distributed.group import ROOT

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"),
]
SCRIPT = str(ROOT / "examples" / "sharded_expert_choice.py")
# A process runs the example and leaves without Python's finalization: DTensor's caches keep the process group beyond
# destroy_process_group, and a worker thread of gloo that lets go of its last tensor during finalization asks for the
# interpreter's lock, is ended for it, and takes the process with it (SIGABRT, seen on a busy machine).
RUN = [
    sys.executable,
    "-c",
    "import os, runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); sys.stdout.flush(); os._exit(0)",
    SCRIPT,
]


def printed(*launcher: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run([*launcher, *RUN], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"exit code {ended.returncode}: {ended.stderr}"
    return ended.stdout


def test_any_number_of_processes_learns_the_same():
    one = printed()
    assert "load of each expert: [128, 128, 128, 128]" in one and one.count("mean squared error") == 5
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    assert printed(*torchrun) == one
