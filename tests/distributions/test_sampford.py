"""Sampford's design: reference values, extreme probabilities, and that its law is told from those close to it."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from khot import Brewer, ConditionalPoisson, Sampford
from tests import gof
from tests.loops import for_each
from tests.oracle import cases, tensor

CASES = [case for case in cases("exact_pips_designs") if case["design"] == "sampford"]


def k_hot(subsets, n):
    return torch.zeros(len(subsets), n, dtype=torch.float64).scatter_(-1, torch.tensor(subsets), 1)


@pytest.mark.usefixtures("cpu_backend")
@for_each("case", CASES)
def test_oracle(case):
    design, listed = Sampford(probs=tensor(case["pi"])), k_hot(case["subsets"], case["n"])
    expected = tensor(case["log_prob"])
    assert ((design.log_prob(listed) - expected).abs() <= 1e-11 * (1 + expected.abs())).all()
    if "pair" in case:
        pairs = torch.stack([tensor(row) for row in case["pair"]])
        assert (design.pairwise_inclusion - pairs).abs().max() <= 1e-11
    if case["n"] <= 10:
        torch.manual_seed(0)
        gof.check_sampler(design.sample((50_000,)), listed, expected.exp())
        assert torch.equal(design.mode, listed[expected.argmax()])


def test_pairs_of_a_long_row():
    # Its rows are covariances with the fixed sum, and the draws agree with it.
    case = next(case for case in CASES if case["id"] == "sampford-big-0")
    design = Sampford(probs=tensor(case["pi"]))
    covariance = design.covariance_matrix
    assert covariance.sum(-1).abs().max() < 1e-13 and (covariance - torch.diag(design.variance)).max() < 1e-13
    torch.manual_seed(0)
    gof.check_pairs(design.sample((20_000,)), design.pairwise_inclusion)


EXTREMES = [  # exact in binary, rows with an integer sum
    [1 - 2**-40, 2**-40, 0.5, 0.5],
    [1 - 2**-50, 1 - 2**-50, 2**-49, 0.25, 0.75],
    [1 - 2**-52, 2**-53, 2**-53],
    [0.5, 0.5, 2**-30, 1 - 2**-30, 2**-45, 1 - 2**-45],
]


@for_each("probs", EXTREMES)
def test_next_to_0_and_1_against_rational_arithmetic(probs):
    exact, k = [Fraction(p) for p in probs], round(sum(probs))
    weights = {
        subset: math.prod(exact[i] / (1 - exact[i]) for i in subset) * sum(1 - exact[i] for i in subset)
        for subset in itertools.combinations(range(len(probs)), k)
    }
    total = sum(weights.values())
    design = Sampford(probs=tensor(probs))
    expected = torch.tensor([math.log(w / total) for w in weights.values()], dtype=torch.float64)
    log_prob = design.log_prob(k_hot(list(weights), len(probs)))
    assert ((log_prob - expected).abs() <= 1e-14 * (1 + expected.abs())).all()
    torch.manual_seed(0)
    gof.check_inclusion(design.sample((20_000,)), tensor(probs))


@for_each("probs", [[1e-17, 1, 0.5, 0.5], [1, 1e-17, 1, 1], [5e-324, 0.5, 0.5], [1 - 1e-9, 1e-9, 0, 1.0]])
def test_rounded_away(probs):
    design = Sampford(probs=tensor(probs).requires_grad_())
    draws = design.sample((500,))
    gof.check_k_hot(draws, design.k)
    log_prob = design.log_prob(draws)
    assert log_prob.isfinite().all() and torch.autograd.grad(log_prob.sum(), design.probs)[0].isfinite().all()


def test_the_most_probable_vector_has_the_largest_probs():
    probs = torch.rand(300, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs = ConditionalPoisson(logits=8 * probs - 4, k=3).mean
    design = Sampford(probs=probs)
    mode, *others = design.log_prob(torch.stack([design.mode, *design.enumerate_support()]))  # rounded alike
    assert torch.equal(mode, torch.stack(others).amax(0))


def test_two_units_are_brewers():
    probs = ConditionalPoisson(logits=torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double(), k=2).mean
    sampford, brewer = Sampford(probs=probs), Brewer(probs=probs)
    support = sampford.enumerate_support()
    torch.testing.assert_close(sampford.log_prob(support), brewer.log_prob(support), rtol=1e-12, atol=1e-12)


@for_each("n, k", [(40, 35), (600, 590), (3000, 2900)])
def test_zeros_have_the_law_of_ones(n, k):
    torch.manual_seed(0)
    probs = Sampford(logits=3 * torch.randn(n, dtype=torch.float64), k=k).probs
    design, others = Sampford(probs=probs, k=k), Sampford(probs=1 - probs, k=n - k)
    draws = design.sample((20,))
    gof.check_k_hot(draws, k)
    torch.testing.assert_close(design.log_prob(draws), others.log_prob(1 - draws), rtol=1e-11, atol=1e-11)


def test_long_row():
    torch.manual_seed(0)
    design = Sampford(logits=3 * torch.randn(20_000, dtype=torch.float64), k=5000)
    draw = design.sample()
    gof.check_k_hot(draw, 5000)
    assert design.log_prob(draw).isfinite()
    likely = design.probs > 0.5
    assert (draw - design.probs)[likely].sum().abs() < gof.Z_LIMIT * design.variance[likely].sum().sqrt()


@pytest.mark.slow
def test_goodness_of_fit():
    """The designs closest to it, given the same inclusion probabilities, are told apart."""
    case = next(case for case in CASES if case.get("tags") == ["discriminating"])
    design, pmf = Sampford(probs=tensor(case["pi"])), tensor(case["log_prob"]).exp()
    support = design.enumerate_support()
    torch.manual_seed(0)
    gof.check_sampler(design.sample((10**6,)), support, pmf)
    for other in (Brewer, ConditionalPoisson):
        with pytest.raises(AssertionError, match="subsets"):
            gof.check_subsets(other(probs=tensor(case["pi"])).sample((10**6,)), support, pmf)
