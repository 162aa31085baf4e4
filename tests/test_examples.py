"""Every script in examples/ runs, draws its figure and arrives where it says; each is short and a page of the site."""

import ast
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pyro
import pytest

FOLDER = Path(__file__).parents[1] / "examples"
OWN_TESTS = {"sharded_expert_choice"}  # of several processes
ARRIVED: dict[str, Callable[[dict[str, Any]], bool]] = {  # by the names that a script leaves
    "pyro_feature_selector": lambda left: left["accuracy"] > 0.8,
    "khot_vae": lambda left: left["losses"][-1] < 0.75 * left["losses"][0],
    "custom_loop": lambda left: max(left["left_out"].values()) < 0.1,
    "variable_selection_mcmc": lambda left: left["inclusion"][:, left["names"].index("s5")].min() > 0.9,
    "sparse_autoencoder": lambda left: left["explained"] > 0.8 and abs(left["active"].mean() / left["K"] - 1) < 0.1,
    "survey_sample": lambda left: left["covered"] > 0.88 and abs(left["estimate"] / left["total"] - 1) < 0.1,
    "sklearn_pipeline": lambda left: left["searches"]["KHotSelector"].score(left["X_test"], left["y_test"]) > 0.9,
}
SCRIPTS = {file.stem: file for file in sorted(FOLDER.glob("*.py"))}


def test_every_script_is_run():
    assert ARRIVED.keys() | OWN_TESTS >= SCRIPTS.keys() >= ARRIVED.keys()


@pytest.mark.parametrize("file", SCRIPTS.values(), ids=SCRIPTS)
def test_is_short_and_a_page(file):
    source = file.read_text(encoding="utf-8")
    title, underline, *_ = ast.get_docstring(ast.parse(source)).splitlines()
    assert set(underline) == {"="} and len(underline) == len(title)
    assert "\n# %%\n" in source and len(source.splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRIVED)
def test_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyro.clear_param_store()
    left = runpy.run_path(str(SCRIPTS[name]))
    plt.close("all")
    pyro.clear_param_store()
    assert ARRIVED[name](left)
    assert (tmp_path / f"{name}.png").stat().st_size > 3_000
