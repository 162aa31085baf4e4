"""The kernel tests and the oracles in Triton's interpreter, on a machine without an accelerator.

In a process of its own: interpreted or compiled is decided once, when Triton is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(*arguments: str) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "KHOT_BACKEND": "triton",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.interpreter", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def test_some_kernels():
    some = (
        "mask_logistic-2x33",
        "gradient_clip-1x20000",
        "gap_and_kink",
        "tournament-3x1",
        "order_gradient_sort-2x33",
    )
    run_interpreted("tests/kernels/test_triton.py", "-k", " or ".join(some))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["", "_draws", "_order", "_tree"])
def test_kernels(family):
    run_interpreted(f"tests/kernels/test_triton{family}.py")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_oracles(dtype):
    names = ("sigmoid", "lapsum", "sparse", *(["order"] if dtype == "float64" else []))  # order is float64 in any case
    files = (f"tests/relaxations/test_{name}.py" for name in names)
    run_interpreted(*files, "-k", f"oracle and {dtype}")


@pytest.mark.slow
def test_order_maps_with_outliers():
    run_interpreted("tests/relaxations/test_order_far.py", "-k", "several or among_many or 1e+17 or largest")


@pytest.mark.slow
def test_transport():
    run_interpreted("tests/relaxations/test_sorted_transport.py", "-k", "oracle and sorted-00 or tied_items")


@pytest.mark.slow
def test_contract():
    checks = ("range_and_sum", "half_types", "offset", "wide_gap", "exact_zeros", "masked", "first_derivative")
    maps = "sigmoid_topk or sparse_topk_any_p-"
    run_interpreted(
        "tests/relaxations/test_contract.py", "-k", f"({' or '.join(checks)}) and ({maps}) and not odd_maps"
    )


@pytest.mark.slow
def test_capped_softmax():
    run_interpreted("tests/relaxations/test_capped_softmax.py", "-k", "all_units or extreme_gaps")


@pytest.mark.slow
def test_designs():
    draws = "sample_indices_are_those or single_units or (half_precision_logits and random)"
    run_interpreted("tests/distributions/test_order_sampling.py", "tests/distributions/test_pivotal.py", "-k", draws)
