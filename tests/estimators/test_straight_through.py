"""Straight-through against what is known of it: SIMPLE's definition, its bias, the exact gradient of the entropy."""

from functools import partial

import pyro
import pytest
import torch
from torch.distributions import OneHotCategoricalStraightThrough, kl_divergence

from khot import ConditionalPoisson, Pivotal, StraightThrough
from tests.loops import for_each


def softmax(x, k, temperature):
    return torch.softmax(x / temperature, -1)


LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1], dtype=torch.float64)


def test_is_simple_on_conditional_poisson():
    """SIMPLE: value k-hot, backward the Jacobian of the exact marginals, which is the covariance."""
    logits = LOGITS.clone().requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2)
    cotangent = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(StraightThrough(design).rsample() @ cotangent, logits)
    support = design.enumerate_support()
    weight = design.log_prob(support).exp().detach()
    mean = weight @ support
    covariance = support.T @ (weight[:, None] * support) - torch.outer(mean, mean)
    torch.testing.assert_close(gradient, covariance @ cotangent)


@for_each("design_class", [ConditionalPoisson, partial(Pivotal, relaxation=softmax)])
def test_is_categorical_straight_through_for_one_unit(design_class):
    logits, cotangent = LOGITS.clone().requires_grad_(), torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    gradients = [
        torch.autograd.grad(estimator.rsample() @ cotangent, logits)[0]
        for estimator in (
            StraightThrough(design_class(logits=logits, k=1)),
            OneHotCategoricalStraightThrough(logits=logits),
        )
    ]
    torch.testing.assert_close(*gradients)


@for_each("make", [ConditionalPoisson, Pivotal])
def test_is_first_order(make):
    """f at the draws, E[f'(x)]ᵀJ: exact for linear f, off by the curvature otherwise. All subsets, no sampling."""
    design = make(logits=LOGITS, k=2)
    jacobian = torch.func.jacrev(lambda logits: make(logits=logits, k=2, validate_args=False).mean)(LOGITS)
    scores = torch.tensor([0.3, 1.0, -0.5, 2.0], dtype=torch.float64)
    estimates = {}
    for curvature in (0.0, 0.1):
        mean_slope = (
            scores + 2 * curvature * design.mean
        )  # of f(x) = <scores, x> + curvature |x - 1/2|^2, up to constants
        estimates[curvature] = mean_slope @ jacobian
    exact = scores @ jacobian  # |x - 1/2|^2 is n/4 for every binary x: f is linear on the k-hot vectors
    torch.testing.assert_close(estimates[0.0], exact)
    assert (estimates[0.1] - exact).abs().max() > 1e-3


def test_entropy_has_its_exact_gradient():
    """log_prob of conditional Poisson is linear in its value, so its straight-through gradient is the entropy's."""
    logits = LOGITS.clone().requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2)
    support = design.enumerate_support()
    weight = design.log_prob(support).exp().detach()
    (exact,) = torch.autograd.grad(design.entropy(), logits, retain_graph=True)
    mean = design.mean
    estimator = StraightThrough(design)
    surrogate = -(weight * estimator.log_prob(support + (mean - mean.detach()))).sum()
    torch.testing.assert_close(torch.autograd.grad(surrogate, logits)[0], exact)


def test_divergence_is_that_of_the_scoring_design():
    p, q = ConditionalPoisson(logits=LOGITS, k=2), ConditionalPoisson(logits=torch.zeros(4).double(), k=2)
    expected = kl_divergence(p, q)
    torch.testing.assert_close(kl_divergence(StraightThrough(p), q), expected)
    pivotal = Pivotal(probs=p.mean)
    torch.testing.assert_close(
        kl_divergence(StraightThrough(pivotal, log_prob=ConditionalPoisson(probs=p.mean)), q), expected
    )
    with pytest.raises(NotImplementedError, match="drops the entropy"):
        kl_divergence(StraightThrough(pivotal, log_prob="none"), q)
    with pytest.raises(NotImplementedError, match="drops the entropy"):
        StraightThrough(pivotal, log_prob="none").entropy()


def test_is_a_pyro_site():
    def model():
        with pyro.plate("rows", 3):
            return pyro.sample(
                "x", StraightThrough(ConditionalPoisson(logits=LOGITS, k=2)).mask(torch.tensor([True, False, True]))
            )

    trace = pyro.poutine.trace(model).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["x"]["value"].shape == (3, 4) and trace.nodes["x"]["log_prob"][1] == 0


def test_checks_values_where_the_design_does():
    for validate_args in (True, False):
        design = ConditionalPoisson(logits=LOGITS, k=2, validate_args=validate_args)
        assert StraightThrough(design)._validate_args is validate_args
        assert StraightThrough(design, validate_args=not validate_args)._validate_args is not validate_args


def test_enumeration_is_refused_with_a_reason():
    with pytest.raises(NotImplementedError, match="use the design without the estimator.*subset_categorical"):
        StraightThrough(ConditionalPoisson(logits=LOGITS, k=2)).enumerate_support()
