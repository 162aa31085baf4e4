"""The example runs from end to end with the smallest settings, for both designs."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "feature_selection.py"


@pytest.mark.slow
@pytest.mark.parametrize("design", ["conditional_poisson", "pivotal"])
def test_runs(design, tmp_path, capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    runs = main(["--k", "5", "--design", design, "--epochs", "1", "--seeds", "2", "--out", str(tmp_path)])
    assert (tmp_path / "feature_selection.png").stat().st_size > 10_000
    table = capsys.readouterr().out
    for row, size in {"learned mask": 5, "random pixels": 5, "mutual information": 5, "all 64 pixels": 64}.items():
        assert row in table
        assert all(run.masks[row].sum() == size for run in runs)
    for run in runs:
        assert run.probabilities.sum(-1).tolist() == pytest.approx([5.0, 5.0])
        assert not run.probabilities[0].equal(run.probabilities[1])
