"""ReinMax against its definition, Liu et al.'s algorithm, and the exact gradient where it is exact."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from khot import (
    Brewer,
    ConditionalPoisson,
    PhantomUnit,
    Pivotal,
    ReinMax,
    Sampford,
    StraightThrough,
    Systematic,
    lapsum_topk,
    reinmax,
    sigmoid_topk,
    sparse_topk,
)
from khot.relaxations import Link, capped_simplex_map
from tests import gof
from tests.loops import for_each
from tests.maps import RELAXATIONS, Cauchy

LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1, -0.3], dtype=torch.float64)
WITH_SLOPE = [case for case in RELAXATIONS if not case.compact]


class Exponential(Link):
    """What makes softmax the map of a link: exp(x - t) sums to 1."""

    def value(self, z):
        return z.exp()

    def complement(self, z):
        return 1 - z.exp()

    def slope(self, z):
        return z.exp()

    def inverse(self, p):
        return p.log()


def softmax(x, k, temperature):
    return torch.softmax(x / temperature, -1)


softmax.link = Exponential()


def gradient_of_expectation(draws: Tensor, f, support: Tensor, pmf: Tensor, logits: Tensor) -> Tensor:
    """The expected estimate, by enumeration: ``draws`` are the rows of the support with a gradient."""
    return torch.autograd.grad((pmf.detach() * f(draws)).sum(), logits, retain_graph=True)[0]


@for_each(
    "make, relaxation",
    [
        (lambda logits: Pivotal(logits=logits, k=1, temperature=0.7), None),
        (lambda logits: Pivotal(probs=sigmoid_topk(logits, 1, 0.7)), sigmoid_topk),
        (lambda logits: Pivotal(logits=logits, k=1, relaxation=softmax, temperature=0.7), None),
        (lambda logits: ConditionalPoisson(logits=logits, k=1), None),
        (lambda logits: ConditionalPoisson(probs=sigmoid_topk(logits, 1, 0.7)), None),
        (lambda logits: Pivotal(logits=logits, k=1, relaxation=lapsum_topk), sigmoid_topk),
        (lambda logits: Pivotal(logits=logits, k=1, relaxation=sparse_topk, temperature=3.0), sigmoid_topk),
    ],
)
def test_is_exact_for_quadratic_functions_of_two_units(make, relaxation):
    logits = torch.tensor([0.4, -0.7], dtype=torch.float64, requires_grad=True)
    matrix = torch.tensor([[0.3, -1.0], [2.0, 3.7]], dtype=torch.float64)

    def f(x):
        return ((x @ matrix) * x).sum(-1) + 1.3 * x[..., 0]

    design, support = make(logits), torch.eye(2, dtype=torch.float64)
    (exact,) = torch.autograd.grad((design.mean * f(support)).sum(), logits, retain_graph=True)
    arguments = (f, support, design.mean, logits)
    estimate = gradient_of_expectation(ReinMax(design, relaxation=relaxation).attach_gradient(support), *arguments)
    torch.testing.assert_close(estimate, exact, rtol=0, atol=1e-10)
    straight_through = gradient_of_expectation(StraightThrough(design).attach_gradient(support), *arguments)
    assert (straight_through - exact).abs().max() > 0.1


def liu_et_al(logits: Tensor, value: Tensor, temperature: float) -> Tensor:
    """ReinMax as published for one-hot samples, with stop-gradients."""
    pi_0 = torch.softmax(logits, -1)
    pi_1 = (value + torch.softmax(logits / temperature, -1)) / 2
    pi_1 = torch.softmax((pi_1.log() - logits).detach() + logits, -1)
    pi_2 = 2 * pi_1 - pi_0 / 2
    return pi_2 - pi_2.detach() + value


@for_each("temperature", [1.0, 1.7])
def test_is_the_algorithm_of_liu_et_al_on_softmax(temperature):
    logits = torch.stack((LOGITS, 2 * LOGITS.flip(0))).requires_grad_()
    design = Pivotal(logits=logits, k=1, relaxation=softmax)
    torch.manual_seed(0)
    x = ReinMax(design, temperature).rsample((20,))
    cotangent = torch.randn(x.shape, dtype=torch.float64)
    (ours,) = torch.autograd.grad(x, logits, cotangent)
    (theirs,) = torch.autograd.grad(liu_et_al(logits, x.detach(), temperature), logits, cotangent)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def covariance_at(probs: Tensor) -> Tensor:
    return ConditionalPoisson(probs=probs).covariance_matrix


def relaxed_jacobian_at(probs: Tensor, relaxation, softness: float) -> Tensor:
    """The Jacobian of a relaxation at logits that it takes to ``probs``; these by Newton's method."""

    def excess(logits):
        return relaxation(logits, probs.sum().item(), softness) - probs

    logits = torch.zeros_like(probs)
    for _ in range(100):
        jacobian = torch.func.jacrev(excess)(logits)  # singular along constants
        if excess(logits).abs().max() < 1e-11:
            return jacobian
        step = torch.linalg.pinv(jacobian, rtol=1e-9) @ excess(logits)
        logits = logits - step.clamp(-softness / 2, softness / 2)
    raise AssertionError("no convergence")


@for_each("case", [*WITH_SLOPE, None])
def test_expected_gradient_of_a_cubic_function(case, temperature=1.6):
    """By enumeration: sum of p(x) [2 J(pi_1) - J(pi_0) / 2] f'(x), with Jacobians from elsewhere."""
    logits = LOGITS[:4].clone().requires_grad_()
    if case is None:
        design, jacobian_at = ConditionalPoisson(logits=logits, k=2), covariance_at
        softened = ConditionalPoisson(logits=logits / temperature, k=2).mean
    else:
        design = Systematic(logits=logits, k=2, relaxation=case.map, temperature=0.8)
        softened = case.map(logits, 2, 0.8 * temperature)
        jacobian_at = partial(relaxed_jacobian_at, relaxation=case.map, softness=0.8)
    weight = torch.tensor([0.3, 1.0, -0.5, 2.0], dtype=torch.float64)

    def f(x):
        return (x @ weight) ** 3 + x[..., 0] * x[..., 1]

    support = design.enumerate_support()
    pmf = design.log_prob(support).exp()
    x = ReinMax(design, temperature).attach_gradient(support)
    estimate = gradient_of_expectation(x, f, support, pmf, logits)

    slopes = torch.func.vmap(torch.func.grad(f))(support)
    expected = -jacobian_at(design.mean.detach()) @ (pmf @ slopes) / 2
    for p, value, slope in zip(pmf, support, slopes, strict=True):
        if p > 0:
            expected = expected + 2 * p * jacobian_at((value + softened).detach() / 2) @ slope
    torch.testing.assert_close(estimate, expected.detach(), rtol=1e-8, atol=1e-9)


def test_feels_the_curvature_that_straight_through_leaves_out():
    """Bias of quadratic f on four units, by enumeration; that of straight-through grows with the curvature."""
    logits = LOGITS[:4].clone().requires_grad_()
    design = Sampford(logits=logits, k=2)
    matrix = torch.tensor([[0, 1.0, -2, 0], [1, 0, 0.5, 3], [-2, 0.5, 0, -1], [0, 3, -1, 0]], dtype=torch.float64)
    support = design.enumerate_support()
    pmf = design.log_prob(support).exp()

    def bias(wrapper, curvature):
        def f(x):
            return x[..., 0] - x[..., 3] + curvature * ((x @ matrix) * x).sum(-1)

        (exact,) = torch.autograd.grad((pmf * f(support)).sum(), logits, retain_graph=True)
        return gradient_of_expectation(wrapper(design).attach_gradient(support), f, support, pmf, logits) - exact

    torch.testing.assert_close(bias(StraightThrough, 0.0), torch.zeros(4).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(bias(StraightThrough, 0.2), 2 * bias(StraightThrough, 0.1))
    assert bias(StraightThrough, 1.0).norm() > 0.2
    assert bias(ReinMax, 1.0).norm() < 0.6 * bias(StraightThrough, 1.0).norm()


def test_given_probabilities_are_traced_back_through_the_relaxation():
    temperature = torch.tensor([0.7, 1.3], dtype=torch.float64)
    logits = torch.stack((LOGITS, 2 * LOGITS.flip(0))).requires_grad_()
    cotangent = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
    designs = (
        Brewer(logits=logits, k=2, relaxation=lapsum_topk, temperature=temperature),
        Brewer(probs=lapsum_topk(logits, 2, temperature)),
    )
    gradients = []
    for design, relaxation in zip(designs, (None, lapsum_topk), strict=True):
        torch.manual_seed(1)
        x = ReinMax(design, torch.tensor([1.0, 1.5]).double(), relaxation=relaxation).rsample((3,))
        gradients.append(torch.autograd.grad((x * cotangent).sum(), logits)[0])
    torch.testing.assert_close(*gradients)


@for_each("relaxation", [sigmoid_topk, lapsum_topk, partial(capped_simplex_map, link=Cauchy())])
def test_units_of_probability_zero_and_one_get_no_gradient(relaxation):
    probs = torch.tensor([0.0, 0.5, 1.0, 0.25, 0.25], requires_grad=True)
    x = ReinMax(Pivotal(probs=probs), 1.5, relaxation=relaxation).rsample((50,))
    (gradient,) = torch.autograd.grad((x * torch.arange(5.0)).square().sum(), probs)
    assert gradient.isfinite().all() and gradient[0] == 0 and gradient[2] == 0 and gradient[1] != 0
    logits = torch.tensor([-torch.inf, 0.3, torch.inf, 1.0, -2.0], requires_grad=True)
    temperature = torch.tensor(0.8, requires_grad=True)
    x = ReinMax(Pivotal(logits=logits, k=2, relaxation=relaxation, temperature=temperature)).rsample((50,))
    gradients = torch.autograd.grad((x * torch.arange(5.0)).square().sum(), (logits, temperature))
    assert all(g.isfinite().all() for g in gradients) and gradients[0][0] == 0 and gradients[0][2] == 0


def test_phantom_unit():
    """By the definition, with the phantom among the units: from its log-odds to those of the others."""
    logits = LOGITS[:4].clone().requires_grad_()
    design = PhantomUnit(Pivotal, logits=logits)
    probs = torch.sigmoid(logits.detach())
    probs = torch.cat((probs, 1 + probs.sum().floor() - probs.sum(-1, keepdim=True)))
    value, cotangent = torch.tensor([1.0, 0, 1, 0]).double(), torch.tensor([0.7, -1.1, 0.2, 2.0]).double()
    assert probs.sum() == 3  # so that a value of two ones is one with the phantom
    x = ReinMax(design, 1.5).attach_gradient(value)
    with_phantom = torch.cat((value, torch.ones(1, dtype=torch.float64)))
    shifted = (with_phantom + sigmoid_topk(probs.logit(), 3, 1.5)) / 2
    jacobians = [relaxed_jacobian_at(p, sigmoid_topk, 1.0) for p in (shifted, probs)]
    of_log_odds = (2 * jacobians[0] - jacobians[1] / 2) @ torch.nn.functional.pad(cotangent, (0, 1))
    slope = probs * (1 - probs)
    of_probs = of_log_odds / slope
    expected = slope[:-1] * (of_probs[:-1] - of_probs[-1])  # the phantom's probability falls as the others rise
    torch.testing.assert_close(torch.autograd.grad(x @ cotangent, logits)[0], expected)


def test_phantom_unit_learns_its_size():
    """The loss is the size, whose gradient straight-through has without error, and ReinMax in every direction."""
    torch.manual_seed(0)
    for design_class, shift in itertools.product((Pivotal, ConditionalPoisson), (0.1, 0.0)):  # sums 3.15 and 3
        logits = torch.full((2000, 6), shift, dtype=torch.float64, requires_grad=True)
        x = ReinMax(PhantomUnit(design_class, logits=logits)).rsample()
        (gradient,) = torch.autograd.grad(x.sum(), logits)
        slope = torch.sigmoid(logits[0]) * torch.sigmoid(-logits[0])
        error = gradient.std(0) / math.sqrt(len(gradient))
        assert ((gradient.mean(0) - slope).abs() <= gof.Z_LIMIT * error).all() and (error < 0.05 * slope).all()


def test_temperature_of_the_design_gets_the_gradient_of_the_scale():
    logits, temperature = LOGITS.clone().requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    x = ReinMax(Pivotal(logits=logits, k=2, temperature=temperature)).rsample()
    for_logits, for_temperature = torch.autograd.grad((x * LOGITS).square().sum(), (logits, temperature))
    torch.testing.assert_close(for_temperature, -(for_logits @ LOGITS) / 0.7)


@pytest.mark.parametrize("design_class", [Pivotal, pytest.param(ConditionalPoisson, marks=pytest.mark.slow)])
def test_second_derivatives_are_those_of_the_estimate(design_class):
    value = torch.tensor([1.0, 0, 1, 0, 0], dtype=torch.float64)
    cotangent = torch.tensor([0.7, -1.1, 0.2, 2.0, 0.4], dtype=torch.float64)

    def estimate(logits):
        return ReinMax(design_class(logits=logits, k=2, validate_args=False), 1.3).attach_gradient(value) @ cotangent

    gradient = torch.func.grad(estimate)
    step = 1e-5 * torch.eye(5, dtype=torch.float64)
    differences = torch.stack([(gradient(LOGITS + e) - gradient(LOGITS - e)) / 2e-5 for e in step], -1)
    torch.testing.assert_close(torch.func.jacrev(gradient)(LOGITS), differences, rtol=1e-6, atol=1e-8)
    batch = torch.stack((LOGITS, 2 * LOGITS.flip(0)))
    torch.testing.assert_close(torch.func.vmap(gradient)(batch), torch.stack([gradient(row) for row in batch]))


def test_function_form():
    logits = LOGITS.clone().requires_grad_()

    def f(x):
        return (x * LOGITS).sum(-1) ** 2

    torch.manual_seed(0)
    surrogate = reinmax(Pivotal(probs=sigmoid_topk(logits, 2)), f, 3, temperature=1.2, relaxation=sigmoid_topk)
    torch.manual_seed(0)
    x = ReinMax(Pivotal(logits=logits, k=2), 1.2).rsample((3,))
    torch.testing.assert_close(surrogate, f(x).mean(0))
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (surrogate, f(x).mean(0))]
    torch.testing.assert_close(*gradients)


def test_errors_name_what_would_do():
    design = Pivotal(logits=LOGITS, k=2)
    with pytest.raises(NotImplementedError, match=r"ReinMax\(design, relaxation=sigmoid_topk\)"):
        ReinMax(Pivotal(probs=design.probs))
    for relaxation in (sparse_topk, lambda x, k, t: sigmoid_topk(x, k, t)):
        with pytest.raises(NotImplementedError, match="normal_topk.*sparse links vanishes at the cap"):
            ReinMax(Pivotal(logits=LOGITS, k=2, relaxation=relaxation))
    for temperature, error in ((0.0, ValueError), (torch.ones(3), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="`temperature` must"):
            ReinMax(design, temperature)
    sizes = ConditionalPoisson(logits=LOGITS, k=(1, 3))
    for use in (ReinMax, lambda design, relaxation: reinmax(design, torch.sum, relaxation=relaxation)):
        with pytest.raises(NotImplementedError, match="`relaxation` must be None for a ConditionalPoisson"):
            use(sizes, relaxation=sigmoid_topk)
