"""Devices without float64, such as Apple's: maps are computed on the host, and no float64 tensor is made there."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch knows no devices that are written in Python",
)
def test_maps_make_no_float64_there():
    command = [sys.executable, "-m", "tests.without_float64"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
