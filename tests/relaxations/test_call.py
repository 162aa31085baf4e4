"""A threshold map asks once forward and once backward what kind of call it is, and chooses backends only once."""

import gc
import inspect
import sys
import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from khot import topk_mask, topk_threshold
from khot._distributed.boundary import of_rows
from khot.kernels.call import call_of, is_first_derivative
from khot.kernels.registry import Operation
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import ODD_MAPS, RELAXATIONS

MAPS = {case.name: case.map for case in (*RELAXATIONS, *ODD_MAPS)}
MAPS |= {f"log_{case.name}": case.log for case in RELAXATIONS if case.log}
MAPS["topk_threshold"] = topk_threshold
# These differ from others in their links, which the engine does not look at.
SAME = ("log_lapsum_topk", "normal_topk", "transport_topk", "capped_softmax")
SAME += ("sparse_topk_magnitude_any_p", "sparse_topk_signed_four_thirds")
X, K = normal(3, 7), torch.tensor([1.0, 2.5, 4.0])


@pytest.fixture
def questions(monkeypatch):
    """Those of khot: whether a compiler is at work, and which backend is to be chosen for an operation."""
    asked = []
    is_compiling, choose = torch.compiler.is_compiling, Operation.choose

    def counted():
        if sys._getframe(1).f_globals["__name__"].startswith("khot"):
            asked.append("is_compiling")
        return is_compiling()

    monkeypatch.setattr(torch.compiler, "is_compiling", counted)
    monkeypatch.setattr(Operation, "choose", lambda self, *args: (asked.append("backend"), choose(self, *args))[1])
    return asked


CALLS = {
    "numbers": lambda f, x: f(x, 3),
    "keywords": lambda f, x: f(x=x, k=3, dim=-1),
    "sizes": lambda f, x: f(x, K),
    "sizes with gradient": lambda f, x: f(x, K.clone().requires_grad_()),
    "softness": lambda f, x: f(x, 3, torch.tensor(0.5)),
    "flagged": lambda f, x: f(1e30 * x, 3),
    "half": lambda f, x: f(x.half(), 3),
    "other axis": lambda f, x: f(x, 2, dim=0),
    "joint axes": lambda f, x: f(x, 2, dim=(0, 1)),
    "strided": lambda f, x: f(x.repeat_interleave(2, -1)[:, ::2], 3),
}


@for_each("name", [name for name in MAPS if name not in SAME])
@for_each("call", CALLS)
def test_once_forward_and_once_backward(name, call, questions):
    x = X.float().requires_grad_()
    for _ in range(2):  # the first call chooses
        questions.clear()
        y = CALLS[call](MAPS[name], x)
        forward = list(questions)
        questions.clear()
        (gradient,) = torch.autograd.grad(y.sum() if call == "flagged" else y.flatten()[0], x)
    assert gradient.isfinite().all()
    assert forward == questions == ["is_compiling"]


def test_without_a_gradient(questions):
    for function in MAPS.values():
        function(X, 3)
        questions.clear()
        function(X, 3)
        assert questions == ["is_compiling"]


def test_of_a_hard_mask(questions):
    for k in (3, torch.tensor([1, 2, 3])):
        topk_mask(X, k)
        questions.clear()
        topk_mask(X, k)
        assert questions == ["is_compiling"]


def test_users_do_not_see_the_call():
    @of_rows()
    def function(_call, x: int, y: int = 2) -> tuple:
        """Of x."""
        return _call.is_plain, x, y

    assert str(inspect.signature(function)) == "(x: int, y: int = 2) -> tuple"
    assert function.__annotations__ == {"x": int, "y": int, "return": tuple}
    assert (function.__name__, function.__doc__) == ("function", "Of x.")
    assert function(1) == (True, 1, 2) and function(x=1, y=3) == (True, 1, 3)


# ---- What is plain


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_plain_arguments():
    negative = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    ragged = torch.nested.nested_tensor([X], layout=torch.strided)
    for odd in (negative, torch.zeros(2, device="meta"), torch.zeros(2).to_sparse(), ragged):
        assert not call_of(odd).is_plain
    call = call_of(X, torch.nn.Parameter(X), 2, "a", None)
    assert call.is_plain and call is call_of(X)


def test_plain_surroundings():
    seen = []

    def look(x):
        seen.append((call_of().is_plain, call_of(x).is_plain, is_first_derivative(x)))
        return x

    torch.vmap(look)(X)
    torch.func.jvp(look, (X,), (X,))
    with torch.autograd.forward_ad.dual_level():
        look(X)
    with FlopCounterMode(display=False):
        look(X)
    assert set(seen) == {(False, False, False)}
    look(X)
    with torch.no_grad():
        look(X)
    assert seen[-2:] == [(True, True, False), (True, True, True)]


@for_each("name", ["sigmoid_topk", "sparse_topk_signed_two"])
@for_each("k", [3, K])
def test_a_gradient_that_nobody_records_has_tangents(name, k):
    """Forward mode over a backward pass without a graph of its own."""
    function = MAPS[name]
    x, direction, cotangent = X.clone(), normal(3, 7, seed=1), normal(3, 7, seed=2)

    def gradient(x):
        return torch.autograd.grad(function(x, k), x, cotangent)[0]

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.requires_grad_(), direction)
        found = torch.autograd.forward_ad.unpack_dual(gradient(dual)).tangent
    step = 1e-6 * direction
    expected = (gradient((x + step).detach().requires_grad_()) - gradient((x - step).detach().requires_grad_())) / 2e-6
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_result_keeps_nothing_but_the_scores():
    """And no circle keeps it alive."""

    gc.disable()
    try:
        x = X.clone().requires_grad_()
        y = MAPS["sigmoid_topk"](x, 3)
        alive = weakref.ref(y)
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_numbers_written_into_before_the_gradient_are_an_error():
    x, softness = X.clone().requires_grad_(), torch.full((3,), 2.0, dtype=torch.float64)
    y = MAPS["sigmoid_topk"](x, 3, softness)
    softness.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
