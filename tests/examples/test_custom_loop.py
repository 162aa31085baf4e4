"""The example finds a better choice than chance within a few steps, and its smoke setting runs."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loop.py"


def test_runs(capsys):
    covered = runpy.run_path(str(EXAMPLE))["main"](["--smoke"])
    assert set(covered) == {"learned", "greedy", "random"} and "covered on average" in capsys.readouterr().out


@pytest.mark.slow
def test_learns():
    covered = runpy.run_path(str(EXAMPLE))["main"](["--steps", "150"])
    assert covered["learned"] > 0.95 * covered["greedy"] > 1.1 * covered["random"]
