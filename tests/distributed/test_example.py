"""The example over ranks runs in one process and under torchrun, with the same results."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.distributed.group import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"),
]
SCRIPT = str(ROOT / "examples" / "sharded_expert_choice.py")


def printed(*launcher: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, SCRIPT]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100).stdout


def test_any_number_of_processes_learns_the_same():
    one = printed()
    assert "load of each expert: [128, 128, 128, 128]" in one and one.count("mean squared error") == 5
    assert printed("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") == one
