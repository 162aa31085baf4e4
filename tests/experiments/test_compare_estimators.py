"""The experiment runs with the smallest settings and says of straight-through what is known."""

import json

import pytest
import torch

import compare_estimators
from tests.experiments.saved import read_table
from variable_selection import FORMS, row_name


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    tables = compare_estimators.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    assert list(tables) == ["linear", "distance", "quadratic", "evidence"]
    printed = capsys.readouterr().out
    in_forms = tables.pop("evidence")
    for loss, table in tables.items():
        name = f"compare_estimators_{loss}"
        assert (tmp_path / f"{name}.png").stat().st_size > 3_000 and read_table(tmp_path / f"{name}.json") in printed
        assert list(json.loads((tmp_path / f"{name}.json").read_text())["rows"]) == list(compare_estimators.ESTIMATORS)
        variance = table.values(compare_estimators.FIRST, compare_estimators.VARIANCE)
        assert ((variance < 1e-10) == (loss == "linear")).all()
    assert in_forms.scores.keys() == {row_name(name, form) for name in compare_estimators.ESTIMATORS for form in FORMS}
    for form in FORMS:
        assert (tmp_path / f"compare_estimators_evidence_{form}.png").stat().st_size > 3_000


def test_forms_agree_on_k_hot_vectors_alone():
    squared, linear = compare_estimators.make_losses(0)["evidence"].values()
    inside = torch.full((compare_estimators.N,), 0.5)
    k_hot = (torch.arange(compare_estimators.N) < compare_estimators.K).float()
    torch.testing.assert_close(squared(k_hot), linear(k_hot))
    assert abs(squared(inside) - linear(inside)) > 0.1
