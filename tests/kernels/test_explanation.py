"""Why a call takes one backend and not the others."""

import threading

import pytest
import torch

import khot
from khot.kernels import backend, explain, registry, threshold
from khot.kernels.isotonic import isotonic
from khot.kernels.operators import platforms
from khot.kernels.operators.platforms import HAS_NUMBA
from khot.kernels.order import soft_rank
from khot.kernels.order_sampling import order_draw
from khot.kernels.random_numbers.philox import Place
from khot.kernels.threshold import exact
from khot.kernels.transport import sorted_transport
from khot.relaxations import Link
from tests.backends import USUAL
from tests.maps import Cauchy

X = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
ROW = torch.ones(1, dtype=torch.float64)
MASK = X, ROW, ROW, "logistic", "mask", "scale", False


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("threshold_mask", MASK),
        ("khot::threshold_mask", MASK),
        (threshold.mask, MASK),
        (torch.ops.khot.threshold_mask, MASK),
        (khot.sigmoid_topk, (X, 2)),
        (khot.sigmoid_topk, (X, torch.tensor([2.0]))),
        (khot.sigmoid_topk, (X.half().T, 2, 1.0, 0)),
    ],
    ids=["name", "qualified", "operator", "torch's", "function", "sizes", "other axis"],
)
def test_whatever_names_the_operation(operation, arguments):
    found = explain(operation, *arguments)
    assert found.operation == "threshold_mask" and found.chosen == USUAL
    assert found.refused["triton"] == "Triton's kernels run on CUDA and ROCm devices"
    if HAS_NUMBA:
        assert list(found.refused) == ["triton"]


def test_a_line_for_each_backend():
    with backend("torch"):
        found = explain("threshold_mask", *MASK)
    assert found.chosen == "torch"  # though it was not asked for by an operator that has it in another place
    lines = str(found).splitlines()
    assert lines[0] == "threshold_mask runs on torch"
    assert lines[1:] == [f"  not on {name}: the requested backend is torch" for name in ("triton", "numba")]


def test_keyword_arguments_and_records_of_functions():
    assert explain(khot.sigmoid_topk, X, k=2, temperature=0.5).operation == "threshold_mask"
    with backend("torch"):
        assert explain(soft_rank, X) == explain(khot.soft_rank, X)
        assert explain(soft_rank, X).operation == "soft_rank"


def test_a_backend_that_comes_second_says_first_what_it_refuses():
    with backend("triton"):
        assert explain(order_draw, *draw_arguments(X, 0)).refused["numba"] == "the requested backend is triton"
    assert explain(order_draw, *draw_arguments(X, 0)).refused["triton"] == platforms.PLATFORMS["triton"].elsewhere


def draw_arguments(theta, draws):
    row = torch.ones(theta.shape[:-1], dtype=torch.long)
    return theta, row, row.double(), torch.tensor(0), Place(), draws, torch.float64, "logistic"


needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="its reason would be that it is not installed")


@needs_numba
@pytest.mark.parametrize(
    ("operation", "arguments", "reason"),
    [
        (
            threshold.mask,
            (X, ROW, ROW, Cauchy().key, "mask", "scale", False),
            "the link Cauchy has no pieces for loops",
        ),
        ("threshold_mask", (X, ROW, ROW, "normal", "log_mask", "scale", False), "no pieces for loops of logarithms"),
        (threshold.mask, (X[:0], *MASK[1:]), "there is nothing to compute"),
        (order_draw, draw_arguments(X, 0), "there is nothing to draw"),
        (isotonic, (X, X, ROW, 1.5, False, False, 0, ""), "it only pools, and only for p = 2"),
        (sorted_transport, (torch.zeros(1, 500), ROW, 300, 1e-9, 100, False), "more than 200 places"),
        (sorted_transport, (X[:, :1], ROW, 1, 1e-9, 100, False), "there is one place"),
    ],
    ids=["link", "logarithm", "shape", "draws", "exponent", "places", "place"],
)
def test_the_reasons_of_an_operation(operation, arguments, reason):
    found = explain(operation, *arguments)
    assert found.chosen != "numba" and reason in found.refused["numba"]


def test_what_is_in_the_way_is_a_reason(monkeypatch):
    missing = platforms.PLATFORMS["triton"]._replace(devices=("cpu",), obstacle=lambda device: "it is at home")
    monkeypatch.setitem(platforms.PLATFORMS, "triton", missing)
    assert explain(khot.sigmoid_topk, X, 2).refused["triton"] == "it is at home"
    with backend("triton"), pytest.raises(RuntimeError, match="backend 'triton' is forced, but it is at home"):
        explain(khot.sigmoid_topk, X, 2)


def test_nothing_is_computed(monkeypatch):
    for name in ("mask", "threshold", "solve"):
        monkeypatch.setattr(exact, name, lambda *args: pytest.fail("computes"))
    loads = [option._replace(load=lambda: pytest.fail("loads")) for option in threshold.mask.registered]
    monkeypatch.setattr(threshold.mask, "registered", loads)
    assert explain(khot.sigmoid_topk, X, 2).chosen == USUAL
    assert registry.on_choice is None


def test_other_threads_go_on(monkeypatch):
    results = []

    def call():
        results.append(khot.sigmoid_topk(X, 2))

    def function(x):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return khot.sigmoid_topk(x, 2)

    assert explain(function, X).operation == "threshold_mask"
    assert torch.equal(results[0], khot.sigmoid_topk(X, 2))


def test_the_arguments_are_checked():
    with pytest.raises(ValueError, match="`k` must satisfy 0 <= k <= n"):
        explain(khot.sigmoid_topk, X, 5)
    assert registry.on_choice is None
    with pytest.raises(ValueError, match="`operation` must be one of .*threshold_mask.*, but got 'mask'"):
        explain("mask", X)
    with pytest.raises(ValueError, match="chooses no backend for these arguments"):
        explain(torch.sum, X)


def test_a_users_link():
    class Own(Cauchy):
        pass

    assert isinstance(Own(), Link)
    found = explain(khot.capped_simplex_map, X, 2, link=Own())
    assert found.chosen == "torch"
    if HAS_NUMBA:
        assert found.refused["numba"] == "the link Own has no pieces for loops"
