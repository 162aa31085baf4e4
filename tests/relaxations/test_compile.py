"""Maps in one compiled graph, forward and backward, for any shape, and one of them through Inductor's C++.

The masks have a test of their own of the first.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.every_map import MAPS
from tests.inputs import normal

COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
# One of each kind. Of the others, only whether all can be traced.
AS_OPERATORS = ("isotonic_l2", "soft_permutation", "soft_count", "sorted_transport_topk", "topk_mask")
FAMILIES = ("isotonic", "permutahedron", "soft_", "sorted_transport", "straight_through", "successive", "topk_mask")
SAME = ("permutahedron_sort", "permutahedron_projection", "straight_through_topk_lapsum")  # but for a part of another


def check_compiled(function, compiled, x, softness, tolerance):
    """Values and gradients equal those without a compiler."""
    y, expected = compiled(x, softness), function(x, softness)
    torch.testing.assert_close(y, expected, **tolerance)
    if expected.requires_grad:
        g = torch.rand_like(expected)
        grads = (torch.autograd.grad(v, (x, softness), g, materialize_grads=True) for v in (y, expected))
        torch.testing.assert_close(*grads, **tolerance)


COMPILED = [case for case in MAPS if case.name.startswith(FAMILIES) and case.name not in SAME]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_compiles_into_one_graph(case):
    torch._dynamo.reset()
    backend = "aot_eager" if case.name in AS_OPERATORS else "eager"

    def twice(x, softness):
        return case.call(x, softness) + case.call(2 * x, softness)

    compiled = torch.compile(twice, backend=backend, fullgraph=True, dynamic=True)
    for shape in ((3, 6), (2, 9)):
        x, softness = normal(*shape).requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        check_compiled(twice, compiled, x, softness, {"rtol": 1e-10, "atol": 1e-12})


def without_compiler():
    """Why Inductor cannot compile for a CPU here."""
    if shutil.which(COMPILER) is None:
        return f"Inductor needs a C++ compiler, and there is no {COMPILER}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Inductor needs the headers of Python, which are not installed"
    return ""


@pytest.mark.slow
@pytest.mark.skipif(bool(without_compiler()), reason=without_compiler())
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch about itself
def test_inductor():
    torch._dynamo.reset()
    case = next(case for case in MAPS if case.name == "sigmoid_topk")
    quick = {"compile_threads": 1, "cpp_cache_precompile_headers": False}  # what pays for many kernels does not for two
    with torch._inductor.config.patch({key: v for key, v in quick.items() if hasattr(torch._inductor.config, key)}):
        compiled = torch.compile(case.call, fullgraph=True)
        x = normal(4, 40, dtype=torch.float32).requires_grad_()
        softness = torch.tensor(0.3, requires_grad=True)
        check_compiled(case.call, compiled, x, softness, {"rtol": 1e-5, "atol": 1e-6})


def test_the_names_here_are_those_of_maps():
    names = {case.name for case in MAPS}
    assert {*AS_OPERATORS, *SAME} <= names
    assert all(any(name.startswith(family) for name in names) for family in FAMILIES)
