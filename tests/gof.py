"""Goodness of fit of k-hot samplers, each test at level 1e-6 (the procedure of oracles/README.md).

Every function takes draws ``(N, n)`` of 0 and 1 and raises AssertionError where they contradict the law. With fixed
seeds the outcome is reproducible; a hundred of these tests give a false alarm in one of ten thousand suites. What
they detect is measured in test_gof.py.
"""

import math

import numpy as np
import torch
from scipy import stats
from torch import Tensor

LEVEL = 1e-6
Z_LIMIT = 5.5  # two-sided 4e-8: leaves room for the skewness of the means it is applied to
MIN_EXPECTED = 25.0  # draws per cell, where the chi-square tail is right to a factor of 1.5 at these levels


def check_sampler(draws: Tensor, support: Tensor, pmf: Tensor) -> None:
    """All tests that a law given by enumeration allows: ``pmf`` (C,) over the rows of ``support`` (C, n)."""
    draws, support, pmf = draws.double(), support.double(), pmf.double()
    check_subsets(draws, support, pmf)
    check_inclusion(draws, pmf @ support)
    check_pairs(draws, support.mT @ (pmf[:, None] * support))
    check_independence(draws, pmf @ support, pmf.square().sum().item())
    possible = pmf > 0
    cell = _cells(draws, support)
    log_prob = torch.where(possible, pmf, 1).log()
    check_mean_log_prob(log_prob[cell], -(pmf * log_prob).sum().item())


def num_draws(pmf: Tensor) -> int:
    """Enough draws for a chi-square test that merges no cell, up to a limit."""
    smallest = pmf[pmf > 0].min().item()
    return min(max(20_000, math.ceil(MIN_EXPECTED / smallest)), 1_000_000)


def check_k_hot(draws: Tensor, k: int | Tensor) -> None:
    assert ((draws == 0) | (draws == 1)).all(), "an entry is neither 0 nor 1"
    assert (draws.sum(-1) == k).all(), f"a draw has not k={k} ones"


def check_subsets(draws: Tensor, support: Tensor, pmf: Tensor) -> None:
    """Chi-square test of the subsets, rare ones merged; a draw of probability 0 or outside the support fails."""
    counts = torch.bincount(_cells(draws, support), minlength=len(pmf)).numpy()
    prob = pmf.numpy()
    assert not counts[prob == 0].any(), "drew a subset of probability 0"
    observed, expected = _merge(counts[prob > 0], len(draws) * prob[prob > 0])
    if len(observed) > 1:
        chi2 = ((observed - expected) ** 2 / expected).sum()
        p_value = stats.chi2.sf(chi2, len(observed) - 1)
        assert p_value >= LEVEL, f"subsets: chi2 = {chi2:.1f} for {len(observed)} cells, p = {p_value:.1e}"


def check_inclusion(draws: Tensor, probs: Tensor) -> None:
    """Exact binomial tests of how often each unit is drawn."""
    _check_counts(draws.sum(0), probs, len(draws), "units")


def check_pairs(draws: Tensor, pairs: Tensor) -> None:
    """Exact binomial tests of how often each pair of units is drawn together."""
    i, j = torch.triu_indices(*pairs.shape, offset=1)
    draws = draws.double()
    _check_counts((draws.mT @ draws)[i, j], pairs[i, j], len(draws), "pairs")


def check_mean_log_prob(log_prob: Tensor, entropy: float) -> None:
    """The mean of ``log_prob`` over the draws is minus the entropy; sees dependence of any order, for any n."""
    deviation = log_prob.double().mean().item() + entropy
    error = log_prob.double().std().item() / math.sqrt(len(log_prob))
    assert abs(deviation) <= Z_LIMIT * error + 1e-9 * (1 + abs(entropy)), (
        f"mean log_prob is off by {deviation / error:.1f} s.e."
    )


def check_independence(draws: Tensor, probs: Tensor, collision: float) -> None:
    """Consecutive rows, and rows half the sample apart, are as often equal, and overlap as much, as independent ones.

    Args:
        draws: Draws of one law, in the order in which they lie in the batch.
        probs: Inclusion probabilities.
        collision: Probability that two independent draws are equal, the sum of the squared probabilities.
    """
    half = len(draws) // 2
    for what, first, second in (
        ("neighbours", draws[0 : 2 * half : 2], draws[1 : 2 * half : 2]),
        ("distant rows", draws[:half], draws[half : 2 * half]),
    ):
        equal = (first == second).all(-1).sum()
        _check_counts(equal[None], torch.tensor([collision]), half, f"equal {what}")
        overlap = (first * second).sum(-1).double()
        deviation = overlap.mean().item() - probs.square().sum().item()
        error = overlap.std().item() / math.sqrt(half)
        assert abs(deviation) <= Z_LIMIT * error + 1e-9, f"overlap of {what} is off by {deviation / error:.1f} s.e."


def _cells(draws: Tensor, support: Tensor) -> Tensor:
    """Row of ``support`` for each draw."""
    weight = 2.0 ** torch.arange(support.shape[-1], dtype=torch.float64)  # a code for each subset, exact up to n = 52
    codes, order = (support.double() @ weight).sort()
    drawn = draws.double() @ weight
    at = torch.searchsorted(codes, drawn).clamp(max=len(codes) - 1)
    assert (codes[at] == drawn).all(), "drew a vector outside the support"
    return order[at]


def _merge(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Joins cells from the rarest up until each expects ``MIN_EXPECTED`` draws; the last one takes what is left."""
    cells: list[list[float]] = []
    room = 0.0
    for i in np.argsort(expected):
        if room == 0.0:
            cells.append([0.0, 0.0])
        cells[-1][0] += counts[i]
        cells[-1][1] += expected[i]
        room = 0.0 if cells[-1][1] >= MIN_EXPECTED else 1.0
    if room and len(cells) > 1:
        rest = cells.pop()
        cells[-1] = [cells[-1][0] + rest[0], cells[-1][1] + rest[1]]
    merged = np.array(cells)
    return merged[:, 0], merged[:, 1]


def _check_counts(counts: Tensor, probs: Tensor, trials: int, what: str) -> None:
    """Exact two-sided binomial tests with a Bonferroni correction."""
    count, prob = counts.numpy().round(), probs.double().clamp(0, 1).numpy()
    p_values = 2 * np.minimum(stats.binom.cdf(count, trials, prob), stats.binom.sf(count - 1, trials, prob))
    worst = p_values.argmin()
    message = f"{what}: {count[worst]:.0f} of {trials} at probability {prob[worst]:.6g}, p = {p_values[worst]:.1e}"
    assert p_values[worst] * len(p_values) >= LEVEL, message
