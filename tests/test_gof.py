"""The goodness-of-fit tests accept exact samples and reject wrong ones."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from tests import gof
from tests.loops import for_each

SUPPORT = torch.tensor(
    [[float(i in s) for i in range(5)] for s in itertools.combinations(range(5), 2)], dtype=torch.float64
)
PMF = torch.tensor([0.3, 0.0, 0.2, 0.05, 0.1, 0.05, 0.1, 0.002, 0.098, 0.1], dtype=torch.float64)


def draw(pmf, size, seed):
    generator = torch.Generator().manual_seed(seed)
    return SUPPORT[torch.multinomial(pmf, size, replacement=True, generator=generator)]


@for_each("seed", range(10))
def test_accepts_exact_samples(seed):
    gof.check_sampler(draw(PMF, 20_000, seed), SUPPORT, PMF)


def test_p_values_are_uniform():
    # Chi-square with merged cells over 400 samples: the level is what it says. Kolmogorov-Smirnov at 1e-6.
    p_values = []
    for seed in range(400):
        counts = np.random.default_rng(seed).multinomial(2000, PMF.numpy())
        observed, expected = gof._merge(counts[PMF > 0], 2000 * PMF.numpy()[PMF > 0])
        assert (expected >= gof.MIN_EXPECTED).all() and math.isclose(expected.sum(), 2000)
        p_values.append(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1))
    assert stats.kstest(p_values, "uniform").pvalue > 1e-6


def test_rejects_another_law():
    other = PMF.clone()
    other[0], other[2] = 0.28, 0.22
    with pytest.raises(AssertionError, match="subsets"):
        gof.check_subsets(draw(other, 50_000, 0), SUPPORT, PMF)
    with pytest.raises(AssertionError, match="units"):
        gof.check_inclusion(draw(other, 50_000, 0), PMF @ SUPPORT)


def test_rejects_the_right_inclusion_with_the_wrong_pairs():
    # {0,1}, {2,3} -> {0,2}, {1,3}: the same units, other pairs.
    other = PMF.clone()
    other[[0, 7]] -= 0.002
    other[[1, 5]] += 0.002
    draws = draw(other, 200_000, 0)
    with pytest.raises(AssertionError, match="pairs"):
        gof.check_pairs(draws, SUPPORT.mT @ (PMF[:, None] * SUPPORT))


def test_rejects_impossible_draws():
    with pytest.raises(AssertionError, match="probability 0"):
        gof.check_subsets(SUPPORT[[0, 1]], SUPPORT, PMF)
    with pytest.raises(AssertionError, match="outside"):
        gof.check_subsets(1 - SUPPORT, SUPPORT, PMF)
    with pytest.raises(AssertionError, match="neither"):
        gof.check_k_hot(SUPPORT * 0.5, 1)
    with pytest.raises(AssertionError, match="ones"):
        gof.check_k_hot(SUPPORT, 3)


def test_rejects_a_wrong_entropy():
    log_prob = PMF[PMF > 0].log()[torch.multinomial(PMF[PMF > 0], 20_000, replacement=True)]
    with pytest.raises(AssertionError, match="log_prob"):
        gof.check_mean_log_prob(log_prob, 1.05 * -(torch.xlogy(PMF, PMF)).sum().item())


@for_each("what", ["neighbours", "distant rows"])
def test_rejects_dependent_rows(what):
    draws = draw(PMF, 20_000, 0)
    half = len(draws) // 2
    copied = torch.arange(half)[: half // 20]  # 1 pair in 20 is equal by construction
    if what == "neighbours":
        draws[2 * copied + 1] = draws[2 * copied]
    else:
        draws[half + copied] = draws[copied]
    with pytest.raises(AssertionError, match=what):
        gof.check_independence(draws, PMF @ SUPPORT, PMF.square().sum().item())


def test_num_draws_fills_every_cell():
    assert gof.num_draws(PMF) == 20_000
    assert gof.num_draws(torch.tensor([0.75, 0.25 / 2**12, 0.0])) == 409_600
    assert gof.num_draws(torch.tensor([1.0, 1e-9])) == 1_000_000
