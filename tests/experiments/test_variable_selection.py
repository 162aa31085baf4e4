"""The experiment runs with the smallest settings; its two forms are one law, and what it calls exact is."""

import json

import pytest
import torch

import variable_selection as experiment
from khot import ConditionalPoisson
from tests.experiments.saved import read_table


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    table = experiment.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    assert (tmp_path / "variable_selection.png").stat().st_size > 3_000
    document = json.loads((tmp_path / "variable_selection.json").read_text())
    assert list(document["rows"]) == list(table.scores) and len(document["findings"]) == 4
    gaps = {row: table.values(row, experiment.GAP).item() for row in table.scores}
    assert gaps.pop(experiment.POSTERIOR) == 0 < gaps.pop(experiment.BEST) < min(gaps.values())
    for name in experiment.METHODS:  # only pathwise estimators know which form they are given
        pathwise = name in (experiment.FIRST, experiment.SECOND)
        squared, linear = (gaps[experiment.row_name(name, form)] for form in experiment.FORMS)
        assert (squared != pytest.approx(linear, rel=1e-6)) == pathwise
    assert read_table(tmp_path / "variable_selection.json") in capsys.readouterr().out


def test_forms_agree_on_k_hot_vectors_alone():
    problem = experiment.make_problem(0)
    x, log_posterior, log_evidence = problem.posterior()
    by_form = [problem.log_evidence(x, form) for form in experiment.FORMS.values()]
    torch.testing.assert_close(*by_form, rtol=0, atol=1e-10)
    expected = by_form[0].logsumexp(0) - torch.tensor(220.0).log()
    torch.testing.assert_close(log_evidence, expected.double(), rtol=0, atol=1e-6)
    slopes = []
    for form in experiment.FORMS.values():
        value = x[0].clone().requires_grad_()
        slopes.append(torch.autograd.grad(problem.log_evidence(value, form), value)[0])
    squared, linear = slopes
    assert (squared[x[0] == 0] == 0).all() and (linear[x[0] == 0] != 0).all()  # no signal to what is left out
    assert experiment.gap(experiment.uniform(experiment.N, experiment.K), problem) == pytest.approx(
        (-log_posterior - torch.tensor(220.0).log()).mean().item(), abs=1e-6
    )


def test_no_guide_is_nearer_than_the_best():
    problem = experiment.make_problem(1)
    best = experiment.best_guide(problem)
    smallest = experiment.gap(best, problem)
    for nudge in 0.1 * torch.eye(experiment.N, dtype=torch.float64):
        other = ConditionalPoisson(logits=best.logits + nudge, k=experiment.K)
        assert experiment.gap(other, problem) > smallest - 1e-6
