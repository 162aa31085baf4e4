"""The example runs from end to end with the smallest settings, and the second order shows."""

import json
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "polynomial_programming.py"


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    curves = main(["--smoke", "--out", str(tmp_path)])
    assert (tmp_path / "polynomial_programming.png").stat().st_size > 10_000
    assert list(curves) == ["exact gradient", "straight-through", "ReinMax"]
    assert all(curve.loss.shape == (6, 4) and curve.loss.isfinite().all() for curve in curves.values())
    table = (tmp_path / "polynomial_programming.md").read_text()
    assert table in capsys.readouterr().out and table.count("\n") == 5
    rows = json.loads((tmp_path / "polynomial_programming.json").read_text())
    assert [row["estimator"] for row in rows] == list(curves)


@pytest.mark.slow
def test_second_order_converges_where_straight_through_does_not(tmp_path):
    main = runpy.run_path(str(EXAMPLE))["main"]
    settings = ["--n", "20", "--k", "10", "--problems", "4", "--samples", "64", "--steps", "60"]
    curves = main([*settings, "--out", str(tmp_path)])
    assert curves["ReinMax"].correct[-1].min() > 0.9 > 0.7 > curves["straight-through"].correct[-1].max()
