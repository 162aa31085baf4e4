"""The unordered set estimator by full enumeration of the sets, which it draws with the probabilities it assumes."""

import itertools
import math
from functools import partial

import pytest
import scipy.stats
import torch

from khot import ConditionalPoisson, PhantomUnit, Pivotal, unordered_set
from khot.estimators._score_function import _surrogate as score_function_surrogate
from khot.estimators._unordered_set import _draw, _log_set_probabilities, _surrogate
from tests.estimators.enumeration import (
    LOGITS,
    SCORED,
    WEIGHT,
    assert_same,
    derivatives,
    exact,
    leaves,
    loss,
    possible,
)
from tests.loops import for_each

tensor = partial(torch.tensor, dtype=torch.float64)


def set_probability(weights, rest):
    """The probability of drawing all of ``weights`` first: the sum over their orders; ``rest`` is not drawn."""
    total = 0.0
    for order in itertools.permutations(weights):
        left, probability = sum(weights) + rest, 1.0
        for weight in order:
            probability *= weight / left
            left -= weight
        total += probability
    return total


def sets(design, num_samples):
    """All sets of vectors (S, T, n), their probabilities (T,), the log-probabilities (T,) of all other vectors."""
    support, probability = possible(design)
    chosen = list(itertools.combinations(range(len(support)), num_samples))
    rest = [sum(p for i, p in enumerate(probability.tolist()) if i not in indices) for indices in chosen]
    weight = [set_probability(probability[list(c)].tolist(), r) for c, r in zip(chosen, rest, strict=True)]
    return support[torch.tensor(chosen).T], tensor(weight), tensor(rest).log()


def check_unbiased(make, num_samples, surrogate):
    logits, weight = leaves()
    design, f = make(logits), loss(weight)
    values, probability, log_rest = sets(design, num_samples)
    torch.testing.assert_close(probability.sum(), tensor(1.0))
    expected = (probability * surrogate(design.expand((len(probability),)), values, f(values), log_rest)).sum()
    truth = exact(design, f)
    torch.testing.assert_close(expected, truth, rtol=0, atol=1e-10)
    assert_same(derivatives(expected, (logits, weight)), derivatives(truth, (logits, weight)))


@for_each("baseline", ["built_in", "none"])
@for_each("num_samples", [1, 2, 3])
@for_each("make", SCORED.values())
def test_unbiased(make, num_samples, baseline):
    check_unbiased(make, num_samples, lambda *draws: _surrogate(*draws, baseline))


def test_weights_of_independent_draws_are_found_out():
    with pytest.raises(AssertionError):
        check_unbiased(
            SCORED["conditional_poisson"], 2, lambda *draws: score_function_surrogate(*draws[:3], "leave_one_out")
        )


@for_each("make", SCORED.values())
def test_is_exact_with_the_whole_support(make):
    logits, weight = leaves()
    design, f = make(logits), loss(weight)
    surrogate = unordered_set(design, f, num_samples=len(possible(design)[0]))
    truth = exact(design, f)
    torch.testing.assert_close(surrogate, truth)
    assert_same(derivatives(surrogate, (logits, weight)), derivatives(truth, (logits, weight)))


def test_is_the_score_function_for_one_draw():
    logits = LOGITS.clone().requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2)
    values, _ = possible(design)
    log_rest = torch.log1p(-design.log_prob(values).detach().exp())
    losses = loss(WEIGHT)(values)
    ours = _surrogate(design.expand((6,)), values[None], losses[None], log_rest)
    score = score_function_surrogate(design.expand((6,)), values[None], losses[None], "none")
    torch.testing.assert_close(ours, score)
    for i in range(6):
        torch.testing.assert_close(
            torch.autograd.grad(ours[i], logits, retain_graph=True)[0],
            torch.autograd.grad(score[i], logits, retain_graph=True)[0],
        )


@for_each("size", [1, 2, 4, 7])
@for_each("spread", [0.1, 3.0, 20.0])
@for_each("rest", [1e-9, 1.0, 1e9])
def test_set_probabilities(size, spread, rest):
    """Against the subset recursion g(C) = Σ_x w_x g(C without x) / (rest + Σ w), which has positive terms only."""
    weight = (spread * torch.linspace(-1, 1, size, dtype=torch.float64).sin()).exp().tolist()
    known = {frozenset(): 1.0}
    for m in range(1, size + 1):
        for c in map(frozenset, itertools.combinations(range(size), m)):
            known[c] = sum(weight[x] * known[c - {x}] for x in c) / (rest + sum(weight[x] for x in c))
    every, but_one, but_two = _log_set_probabilities((tensor(weight) / rest).log())
    b = frozenset(range(size))
    assert every.item() == pytest.approx(math.log(known[b]), rel=1e-12, abs=1e-12)
    for x in b:
        assert but_one[x].item() == pytest.approx(math.log(known[b - {x}]), rel=1e-12, abs=1e-12)
        for y in b:
            assert but_two[x, y].item() == pytest.approx(math.log(known[b - {x, y}]), rel=1e-12, abs=1e-12)


def test_large_sets_and_small_rests():
    """Probabilities over hundreds of orders of magnitude: weights in [0, 1/p], which sum to 1 for the whole support."""
    design = ConditionalPoisson(logits=60 * torch.linspace(-1, 1, 7).double(), k=3)
    for num_samples in (20, 34, 35):
        values, log_rest = _draw(design, num_samples)
        value = _surrogate(design, values, torch.ones(num_samples).double(), log_rest)
        assert value.item() == pytest.approx(1, abs=1e-9)


def test_draws_are_distinct_and_successive():
    torch.manual_seed(0)
    design, count = ConditionalPoisson(logits=LOGITS, k=2), 20_000
    values, log_rest = _draw(design.expand((count,)), 2)
    outcomes, probability, rest = sets(design, 2)
    code = tensor([1.0, 2.0, 4.0, 8.0])

    def codes(x):
        pair = (x @ code).sort(0).values
        return 100 * pair[0] + pair[1]

    cell = (codes(values)[:, None] == codes(outcomes)).long()
    assert (cell.sum(-1) == 1).all()
    torch.testing.assert_close(log_rest, rest[cell.argmax(-1)])
    observed, expected = cell.sum(0).numpy(), count * probability.numpy()
    assert expected.min() > 25 and scipy.stats.chisquare(observed, expected).pvalue > 1e-6


def test_errors():
    design = ConditionalPoisson(logits=torch.tensor([torch.inf, 0.0, 0.0, -torch.inf]), k=2)
    assert unordered_set(design, lambda x: x[..., 0], 2).item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"number of vectors of positive probability, 2, but got 3"):
        unordered_set(design, lambda x: x[..., 0], 3)
    with pytest.raises(ValueError, match=r"at most 1000000 k-hot vectors, but C\(30, 15\)"):
        unordered_set(ConditionalPoisson(logits=torch.zeros(30), k=15), lambda x: x[..., 0])
    with pytest.raises(ValueError, match="`baseline` must be 'built_in' or 'none', but got 'leave_one_out'"):
        unordered_set(design, lambda x: x[..., 0], baseline="leave_one_out")
    with pytest.raises(NotImplementedError, match="Pivotal has no log_prob"):
        unordered_set(Pivotal(logits=LOGITS, k=2), lambda x: x[..., 0])


def test_both_sizes_of_a_phantom_unit_are_drawn():
    torch.manual_seed(0)
    design = PhantomUnit(ConditionalPoisson, probs=torch.full((50, 3), 0.5))
    values, _ = _draw(design, 4)
    assert set(values.sum(-1).unique().tolist()) == {1.0, 2.0}
