"""The threshold of a mask: against the mask itself and SciPy's root finder, with its derivatives and its limits."""

import math
from functools import partial

import pytest
import scipy.optimize
import torch
from torch.autograd import gradcheck, gradgradcheck

import khot
from khot import capped_simplex_map, lapsum_topk, normal_topk, sigmoid_topk, sparse_topk, topk_mask, topk_threshold
from khot.relaxations.linked import link_of, scale_of
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import RELAXATIONS

every_mask = for_each("case", RELAXATIONS)
INF = torch.inf


@every_mask
def test_solves_the_equation(case):
    """By SciPy's law and root finder."""
    x = normal(3, 8)
    for row, t in zip(x.numpy(), topk_threshold(x, 2.5, 0.7, relaxation=case.map), strict=True):
        root = scipy.optimize.brentq(lambda t, row=row: case.cdf((row - t) / 0.7).sum() - 2.5, -50, 50, xtol=1e-15)
        assert t.item() == pytest.approx(root, rel=1e-12, abs=1e-12)


@every_mask
@for_each("dtype, far", [(torch.float32, 1e6), (torch.float64, 1e6), (torch.float16, 1e4)])
def test_makes_the_mask(case, dtype, far):
    x = (normal(4, 9) + torch.tensor([[0.0], [1.0], [-0.3], [1.0]]) * far).to(dtype)
    k, softness = torch.tensor([2.5, 1.0, 4.0, 8.0]), 1.0
    t = topk_threshold(x, k, softness, relaxation=case.map)
    assert t.dtype == torch.float64 and t.shape == (4,)
    y = link_of(case.map).value((x.double() - t.unsqueeze(-1)) / scale_of(case.map, softness))
    mask = case.map(x, k, softness)
    rounding = torch.finfo(mask.dtype).eps + 1e-9
    torch.testing.assert_close(y, mask.double(), rtol=10 * rounding, atol=10 * rounding)


@every_mask
def test_derivatives(case):
    x = normal(2, 5).requires_grad_()
    k = torch.tensor([2.3, 1.7], dtype=torch.float64, requires_grad=True)
    softness = torch.tensor([1.5, 2.0], dtype=torch.float64, requires_grad=True)
    function = partial(topk_threshold, relaxation=case.map)
    assert gradcheck(function, (x, k, softness), check_forward_ad=True, check_batched_grad=True)
    if case.smooth:
        assert gradgradcheck(function, (x, k, softness))


@for_each("mask", [sparse_topk, partial(sparse_topk, p=1.5)])
def test_a_free_threshold_has_no_derivatives(mask):
    """Where no entry is strictly between 0 and 1; forwards, backwards and twice."""
    leaves = torch.tensor([0.0, 1.0, 5.0, 9.0]).double(), torch.tensor(2.0).double(), torch.tensor(0.5).double()
    function = partial(topk_threshold, relaxation=mask)
    _, tangent = torch.func.jvp(function, leaves, tuple(map(torch.ones_like, leaves)))
    first = torch.func.grad(function, argnums=(0, 1, 2))
    twice = torch.func.jacrev(first, argnums=(0, 1, 2))(*leaves)
    for number in (tangent, *first(*leaves), *(v for row in twice for v in row)):
        assert not number.any(), number


@every_mask
def test_certain_sums(case):
    """At k = 0 and n the threshold is finite, and gives the constant mask."""
    x = normal(2, 5)
    for k in (0, 5):
        t = topk_threshold(x, k, relaxation=case.map)
        y = link_of(case.map).value((x - t.unsqueeze(-1)) / scale_of(case.map, 1.0))
        assert t.isfinite().all()
        torch.testing.assert_close(y, case.map(x, k, 1.0))


def test_infinite_scores():
    x = torch.tensor([INF, 0.3, -1.0, 0.4, -INF])
    y = sigmoid_topk(x, 2)
    torch.testing.assert_close(torch.sigmoid(x - topk_threshold(x, 2)), y.double(), check_dtype=False)


@for_each("as_tensor", [False, True])
def test_middle_of_the_gap(as_tensor):
    x = torch.tensor([[3.0, 0.5, 1.0, -2.0], [0.0, 0.0, 1.0, 1.0]])
    for k, expected in {0: [INF, INF], 1: [2, 1], 2: [0.75, 0.5], 3: [-0.75, 0], 4: [-INF, -INF]}.items():
        t = topk_threshold(x, torch.tensor([k, k]) if as_tensor else k, relaxation=topk_mask)
        torch.testing.assert_close(t, torch.tensor(expected, dtype=torch.float64))


def test_middle_of_the_gap_between_infinities():
    """Whatever the row: the scores above are those of the mask, if no tie decides."""
    x = torch.tensor([INF, 2.0, -1.0, -INF])
    for k in range(4):  # nothing lies below the last
        assert torch.equal((x > topk_threshold(x, k, relaxation=topk_mask)).float(), topk_mask(x, k))
    x = torch.tensor([-INF, INF])
    assert torch.equal((x > topk_threshold(x, 1, relaxation=topk_mask)).float(), topk_mask(x, 1))


def test_gradient_of_the_middle():
    x = torch.tensor([3.0, 0.5, 1.0, -2.0], requires_grad=True)
    for k, expected in {0: [0.0] * 4, 2: [0, 0.5, 0.5, 0], 4: [0.0] * 4}.items():
        (grad,) = torch.autograd.grad(topk_threshold(x, k, relaxation=topk_mask), x)
        torch.testing.assert_close(grad, torch.tensor(expected))


@for_each("relaxation", [sigmoid_topk, topk_mask])
def test_shapes(relaxation):
    x = normal(2, 3, 4)
    function = partial(topk_threshold, relaxation=relaxation)
    assert function(x, 1, dim=0).shape == (3, 4)
    torch.testing.assert_close(function(x, 5, dim=(0, 2)), function(x.movedim(1, 0).reshape(3, 8), 5))
    assert function(normal(0, 4), 2).shape == (0,)
    assert function(normal(2, 0), 0).shape == (2,)
    torch.testing.assert_close(torch.vmap(lambda row: function(row, 2))(x), function(x, 2))


@for_each(
    "relaxation",
    [
        khot.successive_softmax_topk,
        khot.sparse_topk_magnitude,
        khot.sorted_transport_topk,
        khot.log_sigmoid_topk,
        capped_simplex_map,
        lambda x, k, softness: x,
    ],
)
def test_maps_without_one_threshold(relaxation):
    with pytest.raises(TypeError, match="with one threshold"):
        topk_threshold(normal(3), 1, relaxation=relaxation)


def test_errors():
    with pytest.raises(TypeError, match="`k` must be an int"):
        topk_threshold(normal(3), 1.5, relaxation=topk_mask)
    with pytest.raises(ValueError, match="`k` must satisfy"):
        topk_threshold(normal(3), 4, relaxation=topk_mask)
    with pytest.raises(ValueError, match="NaN"):
        topk_threshold(torch.tensor([1.0, math.nan]), 1, relaxation=topk_mask)
    with pytest.raises(ValueError, match="1 < p <= 2"):
        topk_threshold(normal(3), 1, relaxation=partial(sparse_topk, p=3.0))


@for_each("others", [(lapsum_topk, normal_topk), (topk_mask, sigmoid_topk)])
def test_a_graph_is_made_for_each_relaxation(others):
    x, now = normal(3, 7), {"relaxation": sigmoid_topk}
    compiled = torch.compile(lambda x: topk_threshold(x, 3, relaxation=now["relaxation"]), backend="eager")
    for relaxation in (sigmoid_topk, *others):
        now["relaxation"] = relaxation
        torch.testing.assert_close(compiled(x), topk_threshold(x, 3, relaxation=relaxation))


@for_each("relaxation", [khot.sigmoid_topk, khot.lapsum_topk, khot.normal_topk])
def test_rows_beside_one_with_a_wide_gap(relaxation):
    """How t depends on the softness does not depend on the other rows: here t is at two equal scores."""
    tied, gap = [2.0, 2.0, 1.0, 0.0], [9.0, 0.0, -1.0, -2.0]
    softness = torch.full((2,), 1e-3, dtype=torch.float64, requires_grad=True)
    t = khot.topk_threshold(torch.tensor([tied, gap], dtype=torch.float64), 1, softness, relaxation=relaxation)
    (slope,) = torch.autograd.grad(t.sum(), softness)
    alone = torch.full((1,), 1e-3, dtype=torch.float64, requires_grad=True)
    expected = khot.topk_threshold(torch.tensor([tied], dtype=torch.float64), 1, alone, relaxation=relaxation)
    torch.testing.assert_close(slope[:1], torch.autograd.grad(expected.sum(), alone)[0])
    assert abs(slope[0]) < 1e-9  # by symmetry
