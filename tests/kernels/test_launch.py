"""A compilation is remembered for arguments of the same kind, and for no others."""

from importlib import import_module

import pytest
import torch

from tests.backends import skip_without_triton

skip_without_triton()
launches = import_module("khot.kernels.gpu.launch")
GRID = (3, 1, 1)


class Kernel:
    """Stands in for a function with ``@triton.jit``, and for its compilations."""

    def __init__(self):
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **options):
            self.compiled += 1
            return _Compilation(self)

        return compile_and_launch


class _Compilation:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launches, "compiles_for_cuda", lambda: True)
    monkeypatch.setattr(launches, "_compiled", {})
    monkeypatch.setattr(launches, "_remembers", True)
    return Kernel()


X = torch.zeros(64)
ARGUMENTS = X, 1.5, 7, (X[4:], 0, 2.0)


def test_launched_again(kernel):
    for _ in range(3):
        launches.launch(kernel, GRID, ARGUMENTS, ("mask", 8), num_warps=4)
    assert kernel.compiled == 1 and kernel.launched == [(GRID, (*ARGUMENTS, "mask", 8))] * 2


def test_a_kind_is_given_for_several_launches(kernel):
    kind = launches.kind_of(ARGUMENTS)
    for constants in (("mask", 8), ("mask", 8), ("log_mask", 8)):
        launches.launch(kernel, GRID, ARGUMENTS, constants, kind, num_warps=4)
    launches.launch(kernel, GRID, ARGUMENTS, ("mask", 8), num_warps=4)
    assert kernel.compiled == 2 and len(kernel.launched) == 2


def test_other_numbers_of_the_same_kind(kernel):
    launches.launch(kernel, GRID, ARGUMENTS, ("mask", 8), num_warps=4)
    launches.launch(kernel, (5, 1, 1), (X[8:], -2.5, 9, (X, 16, 0.0)), ("mask", 8), num_warps=4)
    assert kernel.compiled == 1 and kernel.launched[0][0] == (5, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "constants", "warps"),
    [
        pytest.param((X.double(), *ARGUMENTS[1:]), ("mask", 8), 4, id="dtype"),
        pytest.param((X[1:], *ARGUMENTS[1:]), ("mask", 8), 4, id="alignment"),
        pytest.param((X, 1.5, 1, ARGUMENTS[3]), ("mask", 8), 4, id="one"),
        pytest.param((X, 1.5, 48, ARGUMENTS[3]), ("mask", 8), 4, id="divisible"),
        pytest.param((X, 1.5, 2**31 + 1, ARGUMENTS[3]), ("mask", 8), 4, id="64_bits"),
        pytest.param((X, 1.5, 7, (X[1:], 0, 2.0)), ("mask", 8), 4, id="alignment_in_a_tuple"),
        pytest.param((X, 1.5, 7, (0, 0, 2.0)), ("mask", 8), 4, id="no_tensor"),
        pytest.param((X.to("meta"), *ARGUMENTS[1:]), ("mask", 8), 4, id="device"),
        pytest.param(ARGUMENTS, ("log_mask", 8), 4, id="constant"),
        pytest.param(ARGUMENTS, ("mask", 8), 2, id="option"),
    ],
)
def test_another_kind_is_compiled(kernel, arguments, constants, warps):
    launches.launch(kernel, GRID, ARGUMENTS, ("mask", 8), num_warps=4)
    launches.launch(kernel, GRID, arguments, constants, num_warps=warps)
    assert kernel.compiled == 2 and kernel.launched == []


def test_forgotten(kernel):
    launches.launch(kernel, GRID, ARGUMENTS, ("mask", 8), num_warps=4)
    launches.forget_launches()
    for _ in range(2):
        launches.launch(kernel, GRID, ARGUMENTS, ("mask", 8), num_warps=4)
    assert kernel.compiled == 3 and kernel.launched == []


def test_nothing_is_remembered_on_other_devices(kernel, monkeypatch):
    monkeypatch.setattr(launches, "compiles_for_cuda", lambda: False)
    for _ in range(2):
        launches.launch(kernel, GRID, ARGUMENTS, ("mask", 8), num_warps=4)
    assert kernel.compiled == 2 and kernel.launched == []


NUMBERS = [True, False, 1, 0, 7, 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 1.5, 2.5]
VALUES = [*NUMBERS, X, X[1:], X[4:], X.double(), (X, 0), (X[1:], 0), (X, 1)]


def test_equal_kinds_are_equal_to_triton():
    libtriton = pytest.importorskip("triton._C.libtriton")
    if not hasattr(libtriton, "native_specialize_impl"):
        pytest.skip("this Triton specialises in Python")
    backend = import_module("triton.backends.nvidia.compiler").CUDABackend
    known = [(launches.kind_of(v), libtriton.native_specialize_impl(backend, v, False, True, True)) for v in VALUES]
    for kind, special in known:
        assert all(special == other for same, other in known if same == kind)
