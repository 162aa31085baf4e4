"""It runs from end to end; its rows draw and differentiate as it says."""

import json

import pyro
import pytest
import torch

import simple_slopes
from khot import ConditionalPoisson


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    table = simple_slopes.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    assert (tmp_path / "simple_slopes.png").stat().st_size > 3_000
    document = json.loads((tmp_path / "simple_slopes.json").read_text())
    assert document["rows"].keys() == table.scores.keys() == simple_slopes.METHODS.keys() and document["findings"]
    assert (tmp_path / "simple_slopes.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("row", simple_slopes.METHODS)
def test_draws_are_k_hot_with_the_slopes_of_a_law(row):
    pyro.set_rng_seed(0)
    scores = torch.linspace(-3, -1, 12).expand(20_000, 12).clone().requires_grad_()
    law = simple_slopes.METHODS[row].posterior(scores, 10, 1.0)
    value = law.rsample()
    assert value.detach().sum(-1).eq(10).all()
    steeper = 2 if row == simple_slopes.STEEPER else 1
    exact = ConditionalPoisson(logits=steeper * scores[0].detach(), k=10)
    draws_exactly = (value.mean(0) - exact.mean).abs().max() < 5 * (0.25 / 20_000) ** 0.5
    assert draws_exactly == (row not in (simple_slopes.DRAWS, simple_slopes.PUBLISHED))
    gradient = torch.autograd.grad(value[0, 0], scores)[0][0]
    p = scores[0].detach().exp()
    published = row in (simple_slopes.SLOPES, simple_slopes.PUBLISHED)
    slopes = ConditionalPoisson(logits=(p / (1 - p)).log(), k=10) if published else exact
    covariance = slopes.pairwise_inclusion[0] - slopes.mean[0] * slopes.mean
    torch.testing.assert_close(gradient, steeper * covariance, atol=1e-5, rtol=1e-4)


def test_the_better_rate_is_chosen_by_validation_seed_by_seed():
    first, second = ({"losses": [9.0, loss], "test": 0.0} for loss in (2.0, 1.0))
    results = {"exact, 0.001": [first, second], "exact, 0.0003": [second, first]}
    assert [rate for rate, _ in simple_slopes.better_rates(results, "exact")] == [3e-4, 1e-3]
