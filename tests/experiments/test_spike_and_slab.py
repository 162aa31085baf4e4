"""The experiment runs from end to end, and what it calls exact is."""

import json

import pyro
import pytest
import torch
from torch.distributions import MultivariateNormal

import spike_and_slab
from spike_and_slab import ESTIMATORS, EXACT, GAP, SLAB, Problem, best_guide, fit, load_problem
from tests.experiments.saved import read_table


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    table = spike_and_slab.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    assert (tmp_path / "spike_and_slab.png").stat().st_size > 3_000
    document = json.loads((tmp_path / "spike_and_slab.json").read_text())
    assert list(document["rows"]) == [*ESTIMATORS, "best guide"] and len(document["findings"]) == 3
    assert all((table.values(row, GAP) > -1e-6).all() for row in table.scores)
    assert read_table(tmp_path / "spike_and_slab.json") in capsys.readouterr().out


@pytest.fixture
def small():
    """Four variables, twenty patients, noise of variance 1/2."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    y = z @ torch.tensor([0.3, -0.2, 0.1, 0.0], dtype=torch.float64) + torch.randn(20, generator=generator) / 2
    constant = MultivariateNormal(torch.zeros_like(y), 0.5 * torch.eye(20, dtype=y.dtype)).log_prob(y).item()
    return z, y, Problem(2 * z.T @ z, 2 * z.T @ y, constant, 2.0)


def test_evidence_is_the_density_with_the_coefficients_integrated_out(small):
    z, y, problem = small
    x = problem.prior().enumerate_support()
    assert len(x) == 6
    for value in x:
        covariance = 0.5 * torch.eye(20, dtype=y.dtype) + SLAB**2 * (z * value) @ z.T
        dense = MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
        assert problem.log_evidence(value).item() == pytest.approx(dense.item(), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("k", [2.0, 2.5])
def test_no_guide_exceeds_the_best_nor_the_best_the_evidence(k, small):
    problem = small[2]._replace(k=k)
    x = problem.prior().enumerate_support()
    evidence = torch.logsumexp(problem.log_evidence(x) + problem.prior().log_prob(x), 0).item()
    highest = problem.elbo(best_guide(problem)).item() + 1e-4  # its ridge
    assert problem.prior().log_prob(x).exp().sum().item() == pytest.approx(1)
    assert problem.elbo(problem.prior()).item() < highest <= evidence + 1e-4
    for nudge in torch.eye(4, dtype=torch.float64) / 10:
        logits = problem.first_parameters()["logits"] + nudge
        assert problem.elbo(problem.posterior(logits, problem.first_parameters()["extra"])).item() < highest


@pytest.mark.slow
@pytest.mark.parametrize("row", ESTIMATORS)
def test_every_estimator_improves_the_guide(row):
    pyro.set_rng_seed(0)
    problem = load_problem(0, 4.0)
    fitted = fit(problem, ESTIMATORS[row], 60, lambda: None)
    assert fitted.curve[-1][1] > fitted.curve[0][1] + 1
    if row == EXACT:
        assert problem.elbo(best_guide(problem)).item() - fitted.curve[-1][1] < 1


@pytest.mark.slow
@pytest.mark.parametrize("row", ESTIMATORS)
def test_two_sizes(row):
    pyro.set_rng_seed(0)
    fitted = fit(load_problem(0, 4.5), ESTIMATORS[row], 3, lambda: None)
    assert fitted.design.largest_k == fitted.design.k + 1 == 5
    assert len(fitted.curve) == 4 and fitted.curve[-1][1] != fitted.curve[0][1]
    assert all(torch.tensor(elbo).isfinite() for _, elbo in fitted.curve)


@pytest.mark.parametrize("k", ["0", "9.5", "many"])
def test_bad_k(k, capsys):
    with pytest.raises(SystemExit):
        spike_and_slab.main(["--k", k])
    assert "argument --k" in capsys.readouterr().err
