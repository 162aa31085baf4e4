"""The tests themselves: none ends before its assertions, none passes because it was given nothing."""

import ast
import os
from pathlib import Path

import pytest
import torch

from khot.kernels import threshold
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.threshold.kinds import MASK
from tests.backends import USUAL
from tests.loops import for_each
from tests.maps import members, only_for
from tests.mutations import FAULTS, occurrences

FILES = sorted(Path(__file__).parent.rglob("test_*.py"))


def early_returns(source: str) -> list[str]:
    """Tests and checks of contracts that can end before their last line; a check may end with a result."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name.startswith(("test_", "check_")):
            own = list(function.body)
            for node in own:  # grows: everything inside that is not in a function of its own
                if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
                    own += ast.iter_child_nodes(node)
            allowed = function.body[-1] if function.name.startswith("check_") else None
            if any(isinstance(node, ast.Return) and node is not allowed for node in own):
                found.append(function.name)
    return found


def test_no_test_returns_early():
    """Members and cases that a test is not about are left out where its parameters are listed."""
    assert [(file.name, found) for file in FILES if (found := early_returns(file.read_text()))] == []


@for_each(
    "source, found",
    [
        ("def test_a(case):\n    if case:\n        return\n    assert case", ["test_a"]),
        ("def check_a(case):\n    for i in case:\n        return i\n    assert case", ["check_a"]),
        ("class TestA:\n    def test_a(self):\n        with b:\n            return\n        assert case", ["test_a"]),
        ("def test_a(case):\n    def f():\n        return 1\n    assert f() == case", []),
        ("def check_a(case):\n    assert case\n    return case", []),
    ],
)
def test_what_counts_as_an_early_return(source, found):
    assert early_returns(source) == found


class Case:
    name, interpreted = "case", False


def test_members_leaves_out_what_a_check_is_not_about():
    @only_for(lambda case: case.name == "other")
    def check_other(case):
        raise AssertionError

    case, other = Case(), Case()
    other.name = "other"
    assert [cell.id for cell in members([case, other], [check_other])] == ["other-other"]
    with pytest.raises(AssertionError, match="check_other applies to no member"):
        members([case], [check_other])


def test_no_parameters_are_an_error(pytestconfig):
    assert pytestconfig.getini("empty_parameter_set_mark") == "fail_at_collect"


def backend_here():
    found = threshold.mask.find(torch.zeros(2, 5), *LOGISTIC.key, MASK.name)
    return found.__module__.rpartition(".")[2].partition("_")[0] if found else "torch"


def test_tests_run_what_a_user_runs():
    assert backend_here() == os.environ.get("KHOT_BACKEND", USUAL)


def test_nothing_is_compiled_while_tests_are_collected():
    assert COLLECTED_WITH == "torch"


COLLECTED_WITH = backend_here()


def test_each_planted_fault_has_one_place():
    """Those of tests/mutations.py, which nothing but a person runs."""
    assert [fault for fault in FAULTS if occurrences(fault) != 1] == []
    named = {word for fault in FAULTS for word in fault.tests.split() if word.endswith(".py")}
    assert [name for name in sorted(named) if not (Path(__file__).parent / name).exists()] == []
