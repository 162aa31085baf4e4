"""Brewer's design: reference values, sizes, and extreme probabilities."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from khot import Brewer, Sampford
from tests import gof
from tests.loops import for_each
from tests.oracle import cases, tensor

CASES = [case for case in cases("exact_pips_designs") if case["design"] == "brewer"]


def k_hot(subsets, n):
    return torch.zeros(len(subsets), n, dtype=torch.float64).scatter_(-1, torch.tensor(subsets), 1)


@pytest.mark.usefixtures("cpu_backend")
@for_each("case", CASES)
def test_oracle(case):
    design, listed = Brewer(probs=tensor(case["pi"])), k_hot(case["subsets"], case["n"])
    expected = tensor(case["log_prob"])
    assert (design.log_prob(listed) - expected).abs().max() <= 1e-11
    torch.manual_seed(0)
    draws = design.sample((50_000,))
    gof.check_pairs(draws, torch.stack([tensor(row) for row in case["pair"]]))
    if case["full"]:
        gof.check_sampler(draws, listed, expected.exp())


def exact_probability(probs, subset):
    total = Fraction(0)
    for order in itertools.permutations(subset):
        probability = Fraction(1)
        for r, unit in enumerate(order):
            rest, m = len(order) - sum(probs[i] for i in order[:r]), len(order) - r
            weights = {j: p * (rest - p) / (rest - p * m) for j, p in enumerate(probs) if j not in order[:r]}
            probability *= weights[unit] / sum(weights.values())
        total += probability
    return total


@for_each(
    "probs",
    [
        [1 - 2**-40, 2**-40, 0.5, 0.5],
        [1 - 2**-50, 1 - 2**-50, 2**-49, 0.25, 0.75],
        [1 - 2**-52, 2**-53, 2**-53],
        [0.5, 0.75, 0.75, 2**-80],
    ],
)
def test_next_to_0_and_1_against_rational_arithmetic(probs):
    design, exact = Brewer(probs=tensor(probs)), [Fraction(p) for p in probs]
    support = design.enumerate_support()
    expected = [exact_probability(exact, row.nonzero().flatten().tolist()) for row in support]
    expected = torch.tensor([math.log(p) for p in expected], dtype=torch.float64)
    assert ((design.log_prob(support) - expected).abs() <= 1e-14 * (1 + expected.abs())).all()


def test_rows_of_different_size_with_certain_units():
    # A certain unit, or a slot that another row's larger k makes, changes nothing for the rest.
    probs = torch.zeros(3, 7, dtype=torch.float64)
    probs[0], probs[1] = tensor([1, 0.3, 0, 0.7, 1, 0.5, 0.5]), tensor([0.5, 0.25, 0, 0.25, 0.25, 0.5, 0.25])
    value = torch.zeros(3, 7, dtype=torch.float64)
    value[0, [0, 1, 4, 5]] = value[1, [0, 3]] = 1
    batch = Brewer(probs=probs)
    rest = Brewer(probs=tensor([0.3, 0.7, 0.5, 0.5])).log_prob(tensor([1, 0, 1, 0]))
    single = Brewer(probs=probs[1]).log_prob(value[1])
    torch.testing.assert_close(batch.log_prob(value), torch.stack((rest, single, torch.zeros_like(rest))))
    draws = batch.sample((1000,))
    gof.check_k_hot(draws, batch.k)
    assert (draws[:, 0, [0, 4]] == 1).all() and (draws[..., 2] == 0).all()


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_size_is_exact_whatever_the_rounding(dtype):
    for probs in ([1 / 3] * 3, [1 / 3] * 30, [0.1] * 10 + [1.0], [1 - 1e-9, 1e-9, 0.0, 1.0], [1.0, 1e-17, 1.0]):
        probs = tensor(probs, dtype)
        gof.check_k_hot(Brewer(probs=probs).sample((1000,)), round(probs.double().sum().item()))


def test_long_row():
    torch.manual_seed(0)
    design = Brewer(logits=3 * torch.randn(2000, dtype=torch.float64), k=700)
    draw = design.sample((20,))
    gof.check_k_hot(draw, 700)
    likely = design.probs > 0.5
    deviation = (draw - design.probs)[:, likely].sum() / (20 * design.variance[likely].sum()).sqrt()
    assert deviation.abs() < gof.Z_LIMIT
    with pytest.raises(NotImplementedError, match=r"k <= 10 only.*k=700.*Sampford"):
        design.log_prob(draw)


def test_largest_scored_size():
    design = Brewer(logits=torch.linspace(-2, 2, 12, dtype=torch.float64), k=10)
    assert design.log_prob(design.enumerate_support()).exp().sum().item() == pytest.approx(1, rel=1e-12)


@pytest.mark.slow
def test_goodness_of_fit():
    case = next(case for case in CASES if case.get("tags") == ["discriminating"])
    design, pmf = Brewer(probs=tensor(case["pi"])), tensor(case["log_prob"]).exp()
    support = design.enumerate_support()
    torch.manual_seed(0)
    gof.check_sampler(design.sample((10**6,)), support, pmf)
    with pytest.raises(AssertionError, match="subsets"):
        gof.check_subsets(Sampford(probs=tensor(case["pi"])).sample((10**6,)), support, pmf)
