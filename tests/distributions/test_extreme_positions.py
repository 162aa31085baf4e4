"""Order sampling of positions of any size: laws that sum to 1, means that sum to k, and gradients that are those."""

import itertools
import math

import pytest
import torch

from khot import GumbelTopK, sigmoid_topk
from khot.kernels.order_sampling import noises
from khot.laws import order_sampling
from tests.loops import for_each
from tests.registry import DESIGNS

ORDER_SAMPLING = [case for case in DESIGNS if case.name.startswith(("pareto", "seq", "gumbel"))]
SIZES = {
    torch.float64: [1.7e308, -1.7e308, 1e300, -1e300, 1e100, -1e17, 1e17, 1e3, -1e3, 700.0, 0.0, 1.0, -2.0],
    torch.float32: [3e38, -3.4e38, 1e38, -1e38, 1e20, -1e20, 1e3, -1e3, 100.0, 0.0, 1.0, -2.0],
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-6}


def extreme_rows(dtype, count, n=5):
    """Rows of sizes drawn at random, some of them nearly equal."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(SIZES[dtype], dtype=dtype)
    x = sizes[torch.randint(len(sizes), (count, n), generator=generator)]
    nudge = 1 - 1e-3 * torch.rand(count, n, generator=generator).to(dtype)
    return torch.where(torch.rand(count, n, generator=generator) < 0.5, x, x * nudge)


def check_law(make, k, tolerance):
    """Of a batch of rows; ``make`` makes the design from nothing."""
    design = make()
    support = design.enumerate_support()
    log_prob = design.log_prob(support).double()
    assert not log_prob.isnan().any() and (log_prob <= tolerance).all()
    close = {"rtol": 0.0, "atol": tolerance}
    pmf = log_prob.exp()
    torch.testing.assert_close(pmf.sum(0), torch.ones_like(pmf[0]), **close)
    torch.testing.assert_close(design.mean.double().sum(-1), torch.full_like(pmf[0], k), rtol=0, atol=5 * tolerance)
    torch.testing.assert_close((pmf[..., None] * support).sum(0), design.mean.double(), rtol=0, atol=5 * tolerance)


@for_each("dtype", SIZES)
@for_each("case", ORDER_SAMPLING)
def test_logits(case, dtype):
    x = extreme_rows(dtype, 10 if case.slow else 20)
    for k in (1, 2, 4):
        check_law(lambda k=k: case.make(logits=x, k=k), k, TOLERANCE[dtype])
        point = x.clone().requires_grad_()
        design = case.make(logits=point, k=k)
        weight = torch.linspace(0.5, 2.0, x.numel(), dtype=dtype).view(x.shape)
        for output in ((design.mean * weight).sum(), design.log_prob(design.mode.detach()).sum()):
            (gradient,) = torch.autograd.grad(output, point, retain_graph=True)
            assert gradient.isfinite().all()


@for_each("case", ORDER_SAMPLING)
def test_given_probabilities(case):
    for p, dtype in itertools.product(
        (
            [1e-300, 0.5, 0.5, 1 - 1e-16],
            [1e-12, 1e-12, 1 - 2e-12, 1.0],
            [5e-324, 1e-100, 0.25, 0.75],
            [0.0, 1.0, 1e-30, 1 - 1e-30],
            [1 - 1e-16, 1e-16, 1 - 1e-12, 1e-12],
        ),
        SIZES,
    ):
        probs = torch.tensor(p, dtype=dtype).requires_grad_()
        k = round(sum(p))
        check_law(lambda probs=probs: case.make(probs=probs), k, 5 * TOLERANCE[dtype])
        (gradient,) = torch.autograd.grad((case.make(probs=probs).mean * torch.arange(4)).sum(), probs)
        assert gradient.isfinite().all()


@for_each(
    "logits", [[0.0, -1e5], [700.0, -2000.0, -2e3, 1e3], [1e300, -1e300, 5.0], [0.0, 1e17, 1e17], [3.0, 2.0, 1.0]]
)
def test_one_of_n_is_the_categorical_law(logits):
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    expected = torch.log_softmax(logits, -1)
    found = GumbelTopK(logits=logits, k=1).log_prob(torch.eye(len(logits), dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    for a, b in zip(found, expected, strict=True):
        gradients = (torch.autograd.grad(y, logits, retain_graph=True)[0] for y in (a, b))
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@for_each("far", [-1e4, -700.0, -300.0, -140.0, 5.0, 140.0, 700.0, 1e4])
def test_curvature_of_the_inclusion_probabilities(far):
    """One of n: that of softmax; all but one: finite, to third order, and that of a sum which is k."""
    logits = torch.tensor([0.0, 1.0, 2.0, far], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, -0.5, 2.0, 0.7], dtype=torch.float64)
    hessian = torch.autograd.functional.hessian
    found = hessian(lambda t: GumbelTopK(logits=t, k=1).mean @ weight, logits)
    torch.testing.assert_close(found, hessian(lambda t: t.softmax(-1) @ weight, logits), rtol=1e-9, atol=1e-11)
    found = hessian(lambda t: GumbelTopK(logits=t, k=3).mean @ weight, logits, create_graph=True)
    torch.testing.assert_close(found.sum(0), torch.zeros_like(found[0]), rtol=0, atol=1e-10)
    (third,) = torch.autograd.grad((found * weight).sum(), logits)
    assert third.isfinite().all()


@for_each("gap", [1.0, 30.0, 999.0, 1001.0, 1500.0, 1e5, 1e300])
def test_two_logistic_units_in_closed_form(gap):
    r"""P(the far one comes first) is :math:`e^{-d} (d - 1 + e^{-d}) / (1 - e^{-d})^2` at a distance d."""
    theta = torch.tensor([gap, 0.0], dtype=torch.float64, requires_grad=True)
    near, far = order_sampling.log_prob(noises.LOGISTIC, theta, 1, torch.eye(2, dtype=torch.float64))
    expected = math.log(gap + math.expm1(-gap)) - 2 * math.log(-math.expm1(-gap)) - gap
    assert far.item() == pytest.approx(expected, rel=1e-13)
    assert near.item() == pytest.approx(math.log1p(-math.exp(expected)), rel=1e-11, abs=1e-15)
    (gradient,) = torch.autograd.grad(far, theta)
    slope = -math.expm1(-gap) / (gap + math.expm1(-gap)) - 1 - 2 * math.exp(-gap) / -math.expm1(-gap)
    torch.testing.assert_close(gradient, torch.tensor([slope, -slope], dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_positions_move_together():
    """A constant added to the positions changes nothing, nor does a distance that decides."""
    theta = torch.tensor([0.3, -1.0, 0.7, 2.0], dtype=torch.float64)
    support = GumbelTopK(logits=theta, k=2).enumerate_support()
    for noise in (noises.LOGISTIC, noises.LOG_EXPONENTIAL):
        expected = order_sampling.log_prob(noise, theta, 2, support)
        found = order_sampling.log_prob(noise, theta + 1024.0, 2, support)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
        wide = torch.cat((theta + 2.0**40, theta[:1] - 2.0**60))
        value = torch.cat((support, torch.zeros(len(support), 1)), -1)
        exact = order_sampling.log_prob(noise, theta + 2.0**40 - 2.0**40, 2, support)
        torch.testing.assert_close(order_sampling.log_prob(noise, wide, 2, value), exact, rtol=1e-11, atol=1e-12)


def test_float32_logits_of_the_relaxation():
    assert torch.equal(sigmoid_topk(torch.tensor([1e38, -1e38, 1e38]), 2), torch.tensor([1.0, 0.0, 1.0]))
