"""It runs from end to end; its rows draw and differentiate as it says."""

import json

import pyro
import pytest
import torch

import simple_slopes
from khot import ConditionalPoisson
from tests.experiments.saved import read_table


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    table = simple_slopes.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    assert (tmp_path / "simple_slopes.png").stat().st_size > 3_000
    document = json.loads((tmp_path / "simple_slopes.json").read_text())
    assert document["rows"].keys() == table.scores.keys() == simple_slopes.METHODS.keys() and document["findings"]
    assert read_table(tmp_path / "simple_slopes.json") in capsys.readouterr().out


@pytest.mark.parametrize("row", simple_slopes.METHODS)
def test_draws_are_k_hot_with_the_slopes_of_a_law(row):
    pyro.set_rng_seed(0)
    scores = torch.linspace(-3, -1, 12).expand(20_000, 12).clone().requires_grad_()
    law = simple_slopes.METHODS[row].posterior(scores, 10, 1.0)
    value = law.rsample()
    assert value.detach().sum(-1).eq(10).all()
    exact = ConditionalPoisson(logits=scores[0].detach(), k=10)
    draws_exactly = (value.mean(0) - exact.mean).abs().max() < 5 * (0.25 / 20_000) ** 0.5
    assert draws_exactly == (row not in (simple_slopes.DRAWS, simple_slopes.PUBLISHED))
    gradient = torch.autograd.grad(value[0, 0], scores)[0][0]
    p = scores[0].detach().exp()
    published = row in (simple_slopes.SLOPES, simple_slopes.PUBLISHED)
    slopes = ConditionalPoisson(logits=(p / (1 - p)).log(), k=10) if published else exact
    covariance = slopes.pairwise_inclusion[0] - slopes.mean[0] * slopes.mean
    torch.testing.assert_close(gradient, covariance, atol=1e-5, rtol=1e-4)


def test_steeper_is_the_same_with_twice_the_scores():
    images, encoded = torch.rand(3, 64), {}
    for row in (simple_slopes.EXACT, simple_slopes.STEEPER):
        pyro.set_rng_seed(0)
        encoded[row] = simple_slopes.autoencoder(row, 64, simple_slopes.THE_PAPERS).encoder(images)
    assert torch.equal(encoded[simple_slopes.STEEPER], 2 * encoded[simple_slopes.EXACT])


def test_the_best_rate_is_chosen_by_validation_seed_by_seed():
    losses = {"exact, 0.003": (2.0, 3.0, 2.0), "exact, 0.001": (3.0, 2.0, 3.0), "exact, 0.0003": (4.0, 4.0, 1.0)}
    results = {run: [{"losses": [9.0, last], "test": 0.0} for last in of_seeds] for run, of_seeds in losses.items()}
    chosen = [simple_slopes.best_rate(of_seed) for of_seed in simple_slopes.by_seed(results, "exact")]
    assert chosen == [3e-3, 1e-3, 3e-4]
