"""The comparison runs from end to end with the smallest settings."""

import json

import pytest

import feature_selector_comparison as experiment
from tests.experiments.saved import read_table


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    tables = experiment.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert list(tables) == ["breast_cancer"]
    assert (tmp_path / "feature_selector_comparison.png").stat().st_size > 3_000
    for name, table in tables.items():
        document = json.loads((tmp_path / f"feature_selector_comparison_{name}.json").read_text())
        assert list(document["rows"]) == list(table.scores) and document["findings"]
        assert read_table(tmp_path / f"feature_selector_comparison_{name}.json") in printed
        assert all(table.values(row, experiment.SCORE).min() > 80 for row in table.scores)
