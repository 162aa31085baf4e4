"""The comparison runs from end to end with the smallest settings, and its formulas agree with each other."""

import json
from itertools import combinations, product

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_t

import variable_selection_methods as experiment
from tests.experiments.saved import read_table


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    tables = experiment.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert list(tables) == list(experiment.DATA)
    assert (tmp_path / "variable_selection_methods.png").stat().st_size > 3_000
    for name, table in tables.items():
        document = json.loads((tmp_path / f"variable_selection_methods_{name}.json").read_text())
        assert list(document["rows"]) == list(table.scores) and document["findings"]
        assert read_table(tmp_path / f"variable_selection_methods_{name}.json") in printed
        assert all(0 <= table.values(row, experiment.ERROR).min() <= 1 for row in table.scores)


def toy(rows: int, n: int = 6, k: int = 2) -> experiment.Problem:
    generator = np.random.default_rng(0)
    z = generator.standard_normal((2 * rows, n))
    y = z[:, 0] - z[:, 1] + 2 * generator.standard_normal(2 * rows)
    return experiment.Problem(z[:rows], y[:rows], z[rows:], y[rows:], k)


def log_density(z: np.ndarray, y: np.ndarray) -> float:
    """Of y, a multivariate t, given the covariates with a coefficient."""
    covariance = np.eye(len(y)) + experiment.SLAB**2 * z @ z.T
    return multivariate_t(shape=covariance, df=2 * experiment.SHAPE).logpdf(y)


@pytest.mark.parametrize("rows", [5, 12], ids=["fewer rows than covariates", "more rows"])
def test_evidence(rows):
    problem = toy(rows)
    x = problem.prior().enumerate_support()
    expected = np.array([log_density(problem.z[:, chosen], problem.y) for chosen in x.bool().numpy()])
    found = problem.log_evidence(x).double().numpy()
    np.testing.assert_allclose(found - found[0], expected - expected[0], rtol=0, atol=1e-5 if rows == 5 else 1e-9)


def test_predictive_density_is_a_ratio_of_evidences():
    problem, chosen = toy(8), np.array([0, 3])
    before = log_density(problem.z[:, chosen], problem.y)
    for row, found in enumerate(problem.log_predictive(chosen)):
        z, y = np.vstack([problem.z, problem.test_z[row]]), np.append(problem.y, problem.test_y[row])
        assert found == pytest.approx(log_density(z[:, chosen], y) - before, abs=1e-9)


def exact_inclusion(problem: experiment.Problem) -> np.ndarray:
    x = problem.prior().enumerate_support()
    return (torch.softmax(problem.log_evidence(x).double(), 0) @ x.double()).numpy()


def test_enumeration():
    problem = toy(20)
    answer = experiment.enumerate_all(problem)
    np.testing.assert_allclose(answer.inclusion, exact_inclusion(problem), atol=1e-9)
    subsets = np.array(list(combinations(range(problem.n), problem.k)))
    scores = np.array([log_density(problem.z[:, chosen], problem.y) for chosen in subsets])
    expected = logsumexp(
        [problem.log_predictive(chosen) for chosen in subsets], axis=0, b=np.exp(scores - logsumexp(scores))[:, None]
    )
    assert answer.held_out == pytest.approx(expected.mean(), abs=1e-3)


def test_gibbs_by_hand_has_the_posterior():
    problem = toy(20)
    draws = experiment.k_hot(experiment.gibbs(problem, 20_000, np.random.default_rng(0)), problem.n)
    # Near 4 standard errors of 5000 draws, which the chain is worth at least; the wrong law errs by 0.1 and more.
    np.testing.assert_allclose(draws.mean(0), exact_inclusion(problem), atol=0.03)


def test_mean_field_of_orthogonal_covariates_is_nearly_exact():
    generator = np.random.default_rng(0)
    z = 10 * np.linalg.qr(generator.standard_normal((100, 5)))[0]
    y = 0.25 * z[:, 0] + generator.standard_normal(100)
    problem = experiment.Problem(z, y, z, y, 2)
    x = np.array(list(product([False, True], repeat=5)))
    scores = np.array([log_density(problem.z[:, chosen], problem.y) for chosen in x]) + np.log(2 / 3) * x.sum(1)
    found = experiment.run_mean_field(problem, experiment.SMOKE_SIZES, generator).inclusion
    np.testing.assert_allclose(found, np.exp(scores - logsumexp(scores)) @ x, atol=0.02)


def test_effective_sample_size():
    draws = np.random.default_rng(0).random((2000, 2, 3)) < 0.5
    stuck = draws.copy()
    stuck[..., 1:] = True
    uncertain = np.ones(3, dtype=bool)
    assert experiment.effective(draws, uncertain) == pytest.approx(4000, rel=0.2)
    assert experiment.effective(stuck, uncertain) == 0
