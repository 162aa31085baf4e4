"""Parameters at the ends of the floating-point range: everything that a design computes is finite, gradients too."""

import math

import pytest
import torch

from khot import ConditionalPoisson, PhantomUnit, Sampford, StraightThrough, sigmoid_topk
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS

float64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=float64)


# Scores and k.
LOGITS = {
    "signs": (tensor(1e3, -1e3, 1e3, -1e3, -1e3), 2),
    "tie_across_k": (tensor(1e3, 1e3, 1e3, -1e3), 2),
    "lone_unit_between": (tensor(1e3, -1e3, 0.0, 5.0), 2),
    "smallest_normal_numbers": (tensor(700.0, -700.0, 0.0, 0.0, 1.0, 690.0), 3),
    "subnormal_numbers": (tensor(0.0, -708.0, -709.0, -740.0, -30.0), 1),
    "far_apart": (tensor(0.0, 40.0, 80.0, 120.0, 160.0), 3),
    "random": (1e3 * normal(7), 4),
    "all_equal_but_one": (tensor(0.0, 0.0, 0.0, -1e6), 2),
}
PROBS = {
    "tiny": tensor(1e-300, 0.3, 0.7, 1e-300),
    "tiny_and_nearly_certain": tensor(1e-300, 1 - 2**-53, 1.0, 0.5, 0.5),
    "nearly_certain": tensor(1 - 2**-53, 1 - 2**-53, 2**-52),
    "all_nearly_certain": tensor(1 - 2**-53, 1 - 2**-52, 1 - 2**-53),
    "nearly_one_vector": tensor(1e-12, 1e-12, 1 - 2e-12),
    "nearly_one_vector_of_three": tensor(1e-14, 1 - 1e-14, 1e-14, 1 - 1e-14, 0.5, 0.5),
    "next_to_nothing_beside_one": tensor(1e-160, 1e-160, 1.0),
    "subnormal": tensor(5e-324, 1e-310, 0.5, 0.5),
    "many_scales": tensor(1e-200, 1e-100, 1e-30, 1e-16, 1 - 1e-16, 0.5, 0.5),
    "certain": tensor(0.0, 1.0, 1.0, 0.0),
    "one_choice": tensor(1.0, 1.0, 0.5, 0.5, 0.0),
}


every_design = pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)


def scores(design):
    """Log-probabilities of all vectors, with 0 for the impossible ones."""
    try:
        value = design.enumerate_support()
    except NotImplementedError:
        value = design.sample((20,))
    log_prob = design.log_prob(value)
    assert not log_prob.isnan().any()
    return log_prob.masked_fill(log_prob == -math.inf, 0.0)


OUTPUTS = {
    "mean": lambda design: design.mean,
    "log_prob": scores,
    "entropy": lambda design: design.entropy(),
    "pairwise_inclusion": lambda design: design.pairwise_inclusion,
    "covariance_matrix": lambda design: design.covariance_matrix,
    "straight_through": lambda design: StraightThrough(design, log_prob="none").rsample((3,)),
}


def check_finite(case, given, x, **kwargs):
    leaf = x.clone().requires_grad_()
    design = case.make(**{given: leaf}, **kwargs)
    for name, output in OUTPUTS.items():
        try:
            y = output(design)
        except NotImplementedError:
            continue
        weight = normal(*y.shape).to(y.dtype)
        (gradient,) = torch.autograd.grad(
            (y * weight).sum(), leaf, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        assert y.isfinite().all() and gradient.isfinite().all(), name


@every_design
def test_logits(case):
    for logits, k in LOGITS.values():
        check_finite(case, "logits", logits, k=k)
        check_finite(case, "logits", logits.float(), k=k)


NEARLY_CERTAIN = {
    "one": (tensor(-12.0, 3.0, -17.0), 2),
    "two": (tensor(2.7, -3.1, -13.7, -8.7, 17.4, 8.2, -28.0), 4),
    "scores_of_odds_beyond_float32": (tensor(0.0, 0.5, -100.0, 30.0), 2),
}


CLOSE = {"rtol": 1e-4, "atol": 1e-6, "check_dtype": False}


def in_both_precisions(case, row):
    logits, k = NEARLY_CERTAIN[row]
    return case.make(logits=logits, k=k), case.make(logits=logits.float(), k=k)


@for_each("row", NEARLY_CERTAIN)
@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_draws_in_single_precision_have_the_law_of_double_precision(case, row):
    """Also where a probability rounds to 1: in some designs a unit that is almost certain is not like a certain one."""
    exact, design = in_both_precisions(case, row)
    torch.testing.assert_close(design.mean, exact.mean, **CLOSE)
    torch.testing.assert_close(design.sample((20_000,)).mean(0), exact.mean, rtol=0, atol=0.02, check_dtype=False)


@for_each("row", NEARLY_CERTAIN)
@pytest.mark.parametrize("case", [c for c in DESIGNS if c.has_log_prob], ids=lambda case: case.name)
def test_scores_in_single_precision_have_the_law_of_double_precision(case, row):
    exact, design = in_both_precisions(case, row)
    support = exact.enumerate_support()
    log_prob = design.log_prob(support.float()).double()
    torch.testing.assert_close(log_prob.exp(), exact.log_prob(support).exp(), **CLOSE)
    entropy = -(log_prob.exp() * log_prob.masked_fill(log_prob == -math.inf, 0.0)).sum()
    torch.testing.assert_close(design.entropy(), entropy, **CLOSE)
    torch.testing.assert_close(design.pairwise_inclusion.diagonal(), design.mean, **CLOSE)


@every_design
def test_probs(case):
    for probs in PROBS.values():
        check_finite(case, "probs", probs)


@for_each("row", [name for name in PROBS if name != "subnormal"])
def test_logits_of_a_phantom_unit(row):
    probs = PROBS[row].clone().requires_grad_()
    logits = PhantomUnit(Sampford, probs=probs).logits
    certain = (probs == 0) | (probs == 1)
    torch.testing.assert_close(logits, probs.logit())
    (gradient,) = torch.autograd.grad(logits.masked_fill(certain, 0.0).sum(), probs)
    torch.testing.assert_close(gradient, torch.where(certain, 0.0, 1 / (probs * (1 - probs))).detach())


@for_each("row", ["tiny", "nearly_one_vector", "nearly_one_vector_of_three", "many_scales"])
def test_pairs_of_sampford_have_the_gradient_of_the_enumerated_ones(row):
    """Along directions that keep the sum and are in proportion to the entries' distance from 0 and 1."""
    probs = PROBS[row].clone().requires_grad_()
    design = Sampford(probs=probs)
    support = design.enumerate_support()
    enumerated = torch.einsum("s,si,sj->ij", design.log_prob(support).exp(), support, support)
    torch.testing.assert_close(design.pairwise_inclusion, enumerated, rtol=1e-9, atol=1e-14)
    spread = probs.detach() * (1 - probs.detach())
    direction = spread * normal(*probs.shape)
    direction = direction - spread * direction.sum() / spread.sum()
    weight = normal(*enumerated.shape)
    slopes = [
        (torch.autograd.grad((pairs * weight).sum(), probs, retain_graph=True)[0] * direction).sum()
        for pairs in (design.pairwise_inclusion, enumerated)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-14)


def test_conditional_poisson_solves_for_noise():
    """Where the exact derivative is 0, what rounding leaves of it has no solution, and needs none."""
    torch.manual_seed(0)
    rows = [PROBS[name] for name in ("nearly_one_vector", "tiny", "one_choice", "certain")]
    for row in (*rows, *(sigmoid_topk(10**s * torch.randn(6, dtype=float64), 3) for s in (0, 1))):
        probs = row.clone().requires_grad_()
        design = ConditionalPoisson(probs=probs)
        (gradient,) = torch.autograd.grad(design.pairwise_inclusion.sum(), probs)  # of k times the sum of probs
        interior = (probs > 0) & (probs < 1)
        torch.testing.assert_close(gradient[interior], design.k.double().expand(int(interior.sum())))
