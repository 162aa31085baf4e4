"""The example runs, and its theory agrees with its simulation."""

import runpy
from pathlib import Path

import pytest
import torch

from khot import capped_softmax

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "horvitz_thompson.py"))
LIMIT = 5.5  # standard errors


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    results = EXAMPLE["main"](["--smoke", "--units", "12", "--k", "4", "--out", str(tmp_path)])
    assert (tmp_path / "horvitz_thompson.png").stat().st_size > 10_000
    table = capsys.readouterr().out
    assert all(name in table for name in results) and len(results) == 8
    with pytest.raises(SystemExit):
        EXAMPLE["main"](["--k", "12", "--units", "12"])
    assert "--k must lie between" in capsys.readouterr().err


def test_theory_agrees_with_simulation():
    generator = torch.Generator().manual_seed(3)
    population = EXAMPLE["make_population"](20, generator)
    total = population.y.sum().item()
    designs = EXAMPLE["make_designs"](capped_softmax(population.size.log(), 6))
    for name, design in designs.items():
        torch.manual_seed(0)
        result = EXAMPLE["simulate"](design, population.y, 12_000)
        sd, error = EXAMPLE["standard_deviation"](result.totals)
        assert abs(result.totals.mean().item() - total) <= LIMIT * sd / 12_000**0.5
        if result.variance is not None:
            assert abs(sd - result.variance**0.5) <= LIMIT * error
            pairs, probs = design.pairwise_inclusion, design.mean
            other = EXAMPLE["horvitz_thompson_variance"](pairs, probs, population.y).item()
            assert other == pytest.approx(result.variance, rel=1e-6)
            bias = result.variances.mean().item() - result.variance
            error = result.variances.std().item() / 12_000**0.5
            assert (abs(bias) <= LIMIT * error) == ("in order" not in name)
