"""Relaxations with designs and estimators: k-hot draws, right means, finite gradients or a stated error."""

import pytest
import torch

from khot import (
    ConditionalPoisson,
    ReinMax,
    StraightThrough,
    sigmoid_topk,
)
from tests import gof
from tests.maps import RELAXATIONS
from tests.registry import DESIGNS

MAPS = {case.name: case.map for case in RELAXATIONS}
HAVE_SLOPE = {case.name for case in RELAXATIONS if not case.compact}
SCORES = torch.tensor([[2.0, 0.3, -1.0, 0.5, 1.1, -0.2], [0.1, 0.0, 0.2, -0.1, 3.0, 0.05]], dtype=torch.float64)


def pairs(designs):
    """All maps with one design, and all designs with one map: a design sees only the probabilities."""
    found = [(case, name) for case in designs for name in MAPS if case is designs[0] or MAPS[name] is sigmoid_topk]
    return pytest.mark.parametrize(("case", "name"), found, ids=lambda value: getattr(value, "name", value))


@pairs(DESIGNS)
def test_relaxation_design_estimator(case, name):
    torch.manual_seed(0)
    relaxation = MAPS[name]
    scores = SCORES.clone().requires_grad_()
    probs = relaxation(scores, 3, 0.8)
    designs = [case.make(probs=probs)]
    if case.takes_relaxation:
        designs.append(case.make(logits=scores, k=3, relaxation=relaxation, temperature=0.8))
    for design in designs:
        if case.exact_probs:
            torch.testing.assert_close(design.mean, probs, rtol=0, atol=1e-9)
        value = StraightThrough(design, log_prob="none").rsample((50,))
        gof.check_k_hot(value.detach(), 3)
        (gradient,) = torch.autograd.grad((value.mean(0) ** 2).sum(), scores, retain_graph=True)
        assert gradient.isfinite().all() and gradient.abs().sum() > 0
        if case.has_log_prob:
            log_prob = design.log_prob(value.detach())
            (gradient,) = torch.autograd.grad(log_prob.mean(), scores, retain_graph=True)
            assert log_prob.isfinite().all() and gradient.isfinite().all()


def check_gradient(estimator, scores):
    value = estimator.rsample((50,))
    gof.check_k_hot(value.detach(), 3)
    (gradient,) = torch.autograd.grad((value.mean(0) ** 2).sum(), scores, retain_graph=True)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0


@pairs(DESIGNS)
def test_reinmax_of_given_probabilities(case, name):
    """The estimator needs the derivative of a named relaxation; conditional Poisson has its own."""
    torch.manual_seed(0)
    scores = SCORES.clone().requires_grad_()
    given = case.make(probs=MAPS[name](scores, 3, 0.8))
    check_gradient(ReinMax(given, relaxation=sigmoid_topk), scores)
    if isinstance(given, ConditionalPoisson):
        check_gradient(ReinMax(given), scores)
    else:
        with pytest.raises(NotImplementedError, match="pass it, as in ReinMax"):
            ReinMax(given)
        if name in HAVE_SLOPE:
            check_gradient(ReinMax(given, relaxation=MAPS[name]), scores)


@pairs([case for case in DESIGNS if case.takes_relaxation])
def test_reinmax_of_a_relaxation(case, name):
    """The estimator needs the derivative of the relaxation, or of another map in its place."""
    torch.manual_seed(0)
    scores = SCORES.clone().requires_grad_()
    made = case.make(logits=scores, k=3, relaxation=MAPS[name], temperature=0.8)
    check_gradient(ReinMax(made, relaxation=sigmoid_topk), scores)
    if name in HAVE_SLOPE:
        check_gradient(ReinMax(made), scores)
    else:
        with pytest.raises(NotImplementedError, match="needs the slope"):
            ReinMax(made)


def test_reinmax_of_a_design_without_relaxation():
    (case,) = (case for case in DESIGNS if not case.takes_relaxation and case.name != "conditional_poisson")
    with pytest.raises(NotImplementedError, match="pass it, as in ReinMax"):
        ReinMax(case.make(logits=SCORES, k=3))
