"""The experiment runs, and its theory agrees with its simulation."""

import pytest
import torch

import horvitz_thompson as experiment
from khot import capped_softmax

LIMIT = 5.5  # standard errors


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit):
        experiment.main(["--k", "12", "--units", "12"])
    assert "--k must lie between" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        experiment.main(["--draws", "1"])
    assert "--draws must be at least 2" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:horvitz_thompson approximates")
def test_theory_agrees_with_simulation():
    generator = torch.Generator().manual_seed(3)
    population = experiment.make_population(12, generator)
    total = population.y.sum().item()
    designs = experiment.make_designs(capped_softmax(population.size.log(), 4))
    for name, design in designs.items():
        torch.manual_seed(0)
        result = experiment.simulate(design, population.y, 12_000)
        sd, error = experiment.standard_deviation(result.totals)
        assert abs(result.totals.mean().item() - total) <= LIMIT * sd / 12_000**0.5
        if result.variance is not None:
            assert abs(sd - result.variance**0.5) <= LIMIT * error
            pairs, probs = design.pairwise_inclusion, design.mean
            other = experiment.horvitz_thompson_variance(pairs, probs, population.y).item()
            assert other == pytest.approx(result.variance, rel=1e-6)
            bias = result.variances.mean().item() - result.variance
            error = result.variances.std().item() / 12_000**0.5
            assert (abs(bias) <= LIMIT * error) == ("in order" not in name)
