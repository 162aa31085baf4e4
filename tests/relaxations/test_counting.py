"""Soft counts and soft quantiles: their definition, each other's inverses, derivatives, limits, excluded entries."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, vmap

from khot import soft_count, soft_quantile, soft_rank, soft_sort
from tests.inputs import normal
from tests.loops import for_each

SCALES = torch.tensor([0.03, 0.7, 20.0], dtype=torch.float64)
LEVELS = torch.tensor([0.02, 0.2, 0.31, 0.5, 0.77, 0.999], dtype=torch.float64)


def laplace(u):
    return torch.where(u < 0, u.clamp(max=0).exp() / 2, 1 - (-u.clamp(min=0)).exp() / 2)


def count(x, points, scale):
    return laplace((points.unsqueeze(-1) - x.unsqueeze(-2)) / scale[:, None, None]).sum(-1)


def test_counts_by_definition():
    x, points = normal(3, 9), normal(3, 20, seed=1, scale=3.0)
    x[1, 3] = x[1, 5]
    points[:, 0] = x[:, 0]
    torch.testing.assert_close(soft_count(x, points, SCALES), count(x, points, SCALES), rtol=0, atol=1e-13)
    torch.testing.assert_close(soft_count(x, x, SCALES) + 0.5, soft_rank(x, SCALES), rtol=0, atol=1e-13)
    torch.testing.assert_close(soft_count(x, points[0], 0.7), soft_count(x, points[:1].expand(3, 20), 0.7))
    hard = soft_count(x, points[:, 1:], 1e-9)
    torch.testing.assert_close(hard, (x.unsqueeze(-2) < points[:, 1:, None]).sum(-1).double())


def test_quantiles_by_definition():
    for n in (1, 2, 9, 10):
        x = normal(3, n)
        t = soft_quantile(x, LEVELS, SCALES)
        torch.testing.assert_close(count(x, t, SCALES), (LEVELS * n).expand(3, 6), rtol=0, atol=1e-12 * n)
        torch.testing.assert_close(soft_count(x, t, SCALES), (LEVELS * n).expand(3, 6), rtol=0, atol=1e-12 * n)
        places = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        torch.testing.assert_close(soft_quantile(x, places, SCALES), soft_sort(x, SCALES), rtol=1e-11, atol=1e-11)


def test_hard_limit():
    """The entry in the place ceil(q n), or the middle between two: also at scales whose exponentials underflow."""
    x = normal(4, 10)
    ordered = x.sort(-1).values
    for scale in (1e-5, 1e-9, 1e-200):
        torch.testing.assert_close(soft_quantile(x, 0.5, scale), ordered[:, 4:6].mean(-1), rtol=0, atol=1e-5)
        q = torch.tensor([0.05, 0.33, 0.98], dtype=torch.float64)
        torch.testing.assert_close(soft_quantile(x, q, scale), ordered[:, [0, 3, 9]], rtol=0, atol=1e-3)


@for_each("scale", [1e-300, 1e-9, 1.0, 1e9, 1e300])
def test_extreme_inputs(scale):
    x = torch.tensor([1e300, -1e300, 0.0, 5.0, 5.0], dtype=torch.float64, requires_grad=True)
    for y in (soft_quantile(x, LEVELS, scale), soft_count(x, x.detach(), scale)):
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert y.isfinite().all() and grad.isfinite().all()
    y = soft_quantile(x, 0.5, scale).sum()
    torch.testing.assert_close(torch.autograd.grad(y, x)[0].sum(), torch.ones_like(y))


@pytest.mark.slow
def test_derivatives():
    x, scale = normal(2, 6), torch.tensor([0.4, 1.3], dtype=torch.float64)
    for function, at in ((soft_count, normal(2, 3, seed=1)), (soft_quantile, LEVELS[1:5].expand(2, 4))):
        inputs = [v.clone().requires_grad_() for v in (x, at, scale)]
        assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_derivatives_where_exponentials_underflow():
    """The median of an even row follows its two middle entries, each by half, and the q-derivative is finite."""
    x, q = normal(6, 1).T.clone().requires_grad_(), torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    t = soft_quantile(x, q, 1e-6)
    by_x, by_q = torch.autograd.grad(t.sum(), (x, q))
    expected = torch.zeros(6, dtype=torch.float64).scatter(0, x[0].argsort()[2:4], 0.5)
    torch.testing.assert_close(by_x[0], expected, rtol=0, atol=1e-6)
    assert by_q.isfinite().all() and by_q.item() > 1e10


def test_excluded_entries():
    """Excluded entries are below every point, and first in sorted order."""
    own, points = normal(4), normal(5, seed=1)
    x = torch.tensor([-torch.inf, *own[:2].tolist(), -torch.inf, *own[2:].tolist()], dtype=torch.float64)
    torch.testing.assert_close(soft_count(x, points), 2 + soft_count(own, points))
    target = LEVELS * 6 - 2
    t, found = soft_quantile(own, (target / 4).clamp(min=0.01)), soft_quantile(x, LEVELS)
    torch.testing.assert_close(found, torch.where(target > 0, t, -torch.inf))
    possible = LEVELS[LEVELS * 6 > 2]
    for function, at in ((soft_count, points), (soft_quantile, possible), (soft_quantile, LEVELS)):

        def loss(x, function=function, at=at):
            y = function(x, at, 0.8)
            return torch.where(y == -torch.inf, 0.0, y).square().sum()

        curvature = hessian(loss)(x)
        assert curvature.isfinite().all() and (curvature[x == -torch.inf] == 0).all()
        leaf = x.clone().requires_grad_()
        assert (torch.autograd.grad(loss(leaf), leaf)[0][x == -torch.inf] == 0).all()
    nothing = torch.full((6,), -torch.inf)
    assert (soft_count(nothing, points) == 6).all() and (soft_quantile(nothing, LEVELS) == -torch.inf).all()


def test_transforms_dims_and_dtypes():
    x, points = normal(3, 4, 5), normal(3, 2, 5, seed=1)
    for function, at in ((soft_count, points), (soft_quantile, points.sigmoid())):
        expected = function(x.movedim(1, -1), at.movedim(1, -1), 0.6)
        for dim in (1, -2):
            torch.testing.assert_close(function(x, at, 0.6, dim=dim), expected.movedim(-1, 1))
        torch.testing.assert_close(vmap(lambda x, at, f=function: f(x, at, 0.6, dim=0))(x, at), expected.movedim(-1, 1))
        torch.testing.assert_close(vmap(lambda x, f=function: f(x, 0.4))(x), function(x, 0.4))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            low = function(x.to(dtype), at.to(dtype), dim=1)
            assert low.dtype == dtype
            exact = function(x.to(dtype).double(), at.to(dtype).double(), dim=1)
            torch.testing.assert_close(low, exact.to(dtype), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("function", [soft_count, soft_quantile])
def test_a_number_drops_the_axis_as_in_torch(function, dim):
    x = normal(2, 3, 5)
    several = function(x, torch.tensor([0.3, 0.5]).double(), 0.1, dim=dim)
    for number in (0.3, np.float64(0.3), torch.tensor(0.3).double()):
        found = function(x, number, 0.1, dim=dim)
        assert found.shape == torch.quantile(x, 0.3, dim=dim).shape
        torch.testing.assert_close(found, several.select(dim, 0))
    level = torch.tensor(0.3).double().requires_grad_()
    assert torch.autograd.grad(function(x, level, 0.1, dim=dim).sum(), level)[0] > 0
    mapped = torch.func.vmap(lambda at: function(x, at, 0.1, dim=dim))(torch.tensor([0.3, 0.5]).double())
    torch.testing.assert_close(mapped.movedim(0, dim), several)
