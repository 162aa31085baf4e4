"""A compilation is remembered for arguments of the same kind, and for no others."""

from importlib import import_module
from itertools import product

import pytest
import torch

from khot.kernels.links.logistic import LOGISTIC
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
    monkeypatch.setattr(launches, "_series", {})
    monkeypatch.setattr(launches, "_remembers", True)
    return Kernel()


X = torch.zeros(64)
ARGUMENTS = X, 1.5, 7, (X[4:], 0, 2.0)


def test_launched_again(kernel):
    for _ in range(3):
        launches.launch(kernel, GRID, ARGUMENTS, ("mask", 8), num_warps=4)
    assert kernel.compiled == 1 and kernel.launched == [(GRID, (*ARGUMENTS, "mask", 8))] * 2


PARTS = [(GRID, ("mask", 8), {"num_warps": 4}), ((5, 1, 1), ("mask", 16), {"num_warps": 8})]


def test_several_launches_are_remembered(kernel):
    others = X[8:], -2.5, 9, (X, 16, 0.0)
    for arguments in (ARGUMENTS, others):
        launches.launch_each(kernel, arguments, "key", lambda: PARTS)
    assert kernel.compiled == 2
    assert kernel.launched == [(grid, (*others, *constants)) for grid, constants, _ in PARTS]


def test_several_launches_of_another_key_are_others(kernel):
    launches.launch_each(kernel, ARGUMENTS, "key", lambda: PARTS[:1])
    launches.launch_each(kernel, ARGUMENTS, "another", lambda: PARTS[1:])
    assert kernel.compiled == 2 and kernel.launched == []


def test_few_series_are_kept(kernel, monkeypatch):
    monkeypatch.setattr(launches, "MOST_SERIES", 2)
    for key in range(5):
        launches.launch_each(kernel, ARGUMENTS, key, lambda: PARTS)
        assert len(launches._series) <= 2
    assert kernel.compiled == 2


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
        launches.launch_each(kernel, ARGUMENTS, "key", lambda: PARTS[:1])
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


def kinds_of(arguments):
    """What Triton looks at in arguments, numbers left aside, which the kernels of masks do not specialise."""
    kinds = [kinds_of(v) if isinstance(v, tuple) else launches.kind_of(v) for v in arguments]
    return [kind if isinstance(v, (torch.Tensor, tuple)) else type(v) for v, kind in zip(arguments, kinds, strict=True)]


def beginning_at(start, *shape):
    """A tensor that begins so many entries after an aligned address."""
    dtype = torch.float64 if len(shape) == 1 else torch.float32
    return torch.zeros(start + torch.Size(shape).numel(), dtype=dtype)[start:].view(shape)


def test_repeated_launches_of_masks_have_arguments_of_the_same_kinds(monkeypatch):
    forward, backward = (import_module(f"khot.kernels.threshold.triton_{name}") for name in ("forward", "backward"))
    sizes, pairs = (2.0, beginning_at(0, 5), beginning_at(1, 5), torch.zeros(1).double().expand(5)), []

    def launch(kernel, grid, arguments, constants, **options):
        return lambda *others: pairs.append((kinds_of(arguments), kinds_of(others[: len(arguments)])))

    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(launches, "_series", {})
    for _ in range(2):
        for start, k, scale, kind in product((0, 1), sizes, sizes, ("mask", "threshold")):
            forward.launch_forward(beginning_at(start, 5, 64), k, scale, LOGISTIC, kind)
        for starts, scale, with_scale in product(product((0, 1), repeat=4), sizes, (False, True)):
            x, g = (beginning_at(start, 5, 64) for start in starts[:2])
            at = [beginning_at(start, 5) for start in starts[2:]]
            backward.launch_backward(x, scale, *at, g, LOGISTIC, "mask", with_scale)
    assert len(pairs) >= 2 * (2 * 16 * 2 + 16 * 4 * 2)
    assert all(first == again for first, again in pairs)
