"""The example runs with the smallest settings and says of straight-through what is known."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "compare_estimators.py"


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    comparisons = runpy.run_path(str(EXAMPLE))["main"](["--smoke", "--out", str(tmp_path)])
    assert set(comparisons) == {"linear", "distance", "quadratic"}
    table = capsys.readouterr().out
    for name, comparison in comparisons.items():
        assert (tmp_path / f"compare_estimators_{name}.png").stat().st_size > 10_000
        assert f"{name} loss" in table and "straight_through" in table
        straight_through = next(row for row in comparison.rows if row.estimator == "straight_through")
        assert (straight_through.variance < 1e-10) == (name == "linear")
