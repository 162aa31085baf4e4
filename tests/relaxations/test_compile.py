"""Maps in one compiled graph, forward and backward, for any shape, and a few of them through Inductor's C++.

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
AS_OPERATORS = ("isotonic_l2", "isotonic_lp", "soft_rank", "soft_permutation", "soft_count", "successive_softmax_topk")
AS_OPERATORS += ("sorted_transport_topk", "straight_through_topk", "topk_mask")  # one of each kind of code
FAMILIES = ("isotonic", "permutahedron", "soft_", "sorted_transport", "straight_through", "successive", "topk_mask")
INDUCED = ("sigmoid_topk", "soft_rank")  # the second shows the same of another operator


def check_compiled(case, compiled, x, softness, tolerance):
    """Values and gradients equal those without a compiler."""
    y, expected = compiled(x, softness), case.call(x, softness)
    torch.testing.assert_close(y, expected, **tolerance)
    if case.differentiable:
        check_gradients(y, expected, [v for v in (x, softness) if isinstance(v, torch.Tensor)], tolerance)


def check_gradients(y, expected, leaves, tolerance):
    g = torch.rand_like(expected)
    grads, others = (torch.autograd.grad(v, leaves, g, allow_unused=True) for v in (y, expected))
    assert [v is None for v in grads] == [v is None for v in others]
    for grad, other in zip(grads, others, strict=True):
        if grad is not None:
            torch.testing.assert_close(grad, other, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MAPS if case.name.startswith(FAMILIES)], ids=lambda case: case.name)
def test_compiles_into_one_graph(case):
    torch._dynamo.reset()
    backend = "aot_eager" if case.name in AS_OPERATORS else "eager"  # of others only whether all can be traced
    compiled = torch.compile(case.call, backend=backend, fullgraph=True, dynamic=True)
    for shape in ((3, 6), (2, 9)):
        x, softness = normal(*shape).requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        check_compiled(case, compiled, x, softness, {"rtol": 1e-10, "atol": 1e-12})


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
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.exhaustive] if case.name == INDUCED[1] else [])
        for case in MAPS
        if case.name in INDUCED
    ],
)
def test_inductor(case):
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):  # in this process
        compiled = torch.compile(case.call, fullgraph=True)
        x = normal(4, 40, dtype=torch.float32).requires_grad_()
        softness = torch.tensor(0.3, requires_grad=True)
        check_compiled(case, compiled, x, softness, {"rtol": 1e-5, "atol": 1e-6})


def test_the_names_here_are_those_of_maps():
    names = {case.name for case in MAPS}
    assert {*INDUCED, *AS_OPERATORS} <= names
    assert all(any(name.startswith(family) for name in names) for family in FAMILIES)
