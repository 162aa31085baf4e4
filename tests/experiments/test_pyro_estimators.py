"""The experiment runs, its problem is the README's, and what it calls the evidence is."""

import json
import re
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro import poutine

import pyro_estimators as experiment
from tests.experiments.saved import read_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def parameters():
    pyro.clear_param_store()
    yield
    pyro.clear_param_store()


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    table = experiment.main(["--smoke", "--out", str(tmp_path)])
    assert (tmp_path / "pyro_estimators.png").stat().st_size > 3_000
    document = json.loads((tmp_path / "pyro_estimators.json").read_text())
    assert list(document["rows"]) == list(experiment.METHODS) and len(document["findings"]) == 6
    early, late, _ = table.columns
    for row in table.scores:
        assert (table.values(row, late) > 0).all() and (table.values(row, late) < table.values(row, early)).all()
    assert read_table(tmp_path / "pyro_estimators.json") in capsys.readouterr().out


def test_the_problem_is_that_of_the_readme():
    (script,) = re.findall(r"^```python\n(import pyro.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.M)
    names: dict[str, Any] = {}
    exec(script.split("guide =")[0], names)
    problem = experiment.make_problem(0)
    assert (names["inputs"] == problem.inputs).all() and (names["output"] == problem.seen).all()
    vectors, log_joint = problem.log_joint()
    assert len(vectors) == 56
    for x, expected in zip(vectors, log_joint, strict=True):
        trace = poutine.trace(poutine.condition(names["model"], {"x": x})).get_trace()
        torch.testing.assert_close(trace.log_prob_sum(), expected.float(), rtol=1e-5, atol=1e-3)


def test_the_gap_is_the_divergence_from_the_posterior():
    problem = experiment.make_problem(1)
    vectors, log_joint = problem.log_joint()
    log_posterior = log_joint.log_softmax(0)
    uniform = -torch.tensor(56.0, dtype=torch.float64).log()
    assert experiment.gap(problem) == pytest.approx((uniform - log_posterior).mean().item(), rel=1e-6)
    pyro.get_param_store()["logits"] = 60 * vectors[log_joint.argmax()] - 30  # as good as certain
    assert experiment.gap(problem) == pytest.approx(-log_posterior.max().item(), abs=1e-6)


@pytest.mark.parametrize("row", experiment.METHODS)
def test_every_estimator_improves_the_guide(row):
    torch.manual_seed(0)
    problem = experiment.make_problem(0)
    before, step = experiment.gap(problem), experiment.METHODS[row](problem)
    for _ in range(20):
        step()
    assert experiment.gap(problem) < 0.8 * before
