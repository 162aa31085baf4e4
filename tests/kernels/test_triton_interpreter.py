"""The kernel tests and others marked ``interpreted`` in Triton's interpreter, on a machine without an accelerator.

In a process of its own: interpreted or compiled is decided once, when Triton is imported. A run fails unless a test
passes in every file that it names.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.backends import skip_without_triton

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
skip_without_triton()
OF_EVERY_BACKEND = ["kernels/test_operators.py"]
OF_KERNELS = [
    "kernels/test_triton.py",
    "kernels/test_triton_draws.py",
    "kernels/test_triton_tree.py",
]
MARKED = [
    "distributions/test_order_sampling.py",
    "distributions/test_pivotal.py",
    "kernels/test_selection.py",
    "relaxations/test_capped_softmax.py",
    "relaxations/test_contract.py",
    "relaxations/test_lapsum.py",
    "relaxations/test_sigmoid.py",
    "relaxations/test_sparse.py",
]


def check_passes(*arguments: str) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "KHOT_BACKEND": "triton",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.interpreter", "-p", "no:cacheprovider"]
    command += ["--each-file-runs", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


@pytest.mark.slow
def test_kernels():
    check_passes(*(f"tests/{file}" for file in OF_KERNELS + OF_EVERY_BACKEND))


@pytest.mark.slow
def test_marked():
    check_passes(*(f"tests/{file}" for file in MARKED), "-m", "interpreted and not slow and not gpu")


@pytest.mark.parametrize(
    ("files", "sign"),
    [
        (OF_KERNELS, r"^pytestmark = kernel_marks\(\)"),
        (MARKED, r"mark\.interpreted\b|interpreted_cases\(|^INTERPRETED = "),
    ],
    ids=["of_kernels", "marked"],
)
def test_every_file_with_such_tests_is_run(files, sign):
    texts = {file.relative_to(TESTS).as_posix(): file.read_text() for file in TESTS.rglob("test_*.py")}
    found = {name for name, text in texts.items() if re.search(sign, text, flags=re.MULTILINE)}
    assert sorted(found - {"kernels/test_triton_interpreter.py"}) == files


def test_a_run_of_nothing_in_one_of_two_files_fails(pytestconfig):
    files = ["tests/kernels/test_triton.py::test_gap_and_kink", "tests/kernels/test_forest.py"]
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    plugin = conftest.EachFileRuns(
        SimpleNamespace(rootpath=ROOT, invocation_params=SimpleNamespace(dir=ROOT), args=files)
    )
    for file, expected in zip(files, (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK), strict=True):
        name = file.partition("::")[0]
        plugin.pytest_runtest_logreport(SimpleNamespace(when="call", passed=True, skipped=False, location=(name,)))
        session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
        plugin.pytest_sessionfinish(session)
        assert session.exitstatus == expected
