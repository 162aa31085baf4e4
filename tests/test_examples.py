"""Every example and tutorial runs and arrives where it says; each is a page of the site."""

import ast
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pyro
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"
LESSONS = FOLDER.parent / "tutorials"
OWN_TESTS = {"sharded_expert_choice"}  # with several processes
ARRIVED: dict[str, Callable[[dict[str, Any]], bool]] = {  # by the names that a script leaves
    "pyro_feature_selector": lambda left: left["accuracy"] > 0.8,
    "khot_vae": lambda left: left["losses"][-1] < 0.75 * left["losses"][0],
    "custom_loop": lambda left: max(left["left_out"].values()) < 0.1,
    "variable_selection_mcmc": lambda left: left["inclusion"][:, left["names"].index("s5")].min() > 0.9,
    "sparse_autoencoder": lambda left: left["explained"] > 0.8 and abs(left["active"].mean() / left["K"] - 1) < 0.1,
    "survey_sample": lambda left: left["covered"] > 0.88 and abs(left["estimate"] / left["total"] - 1) < 0.1,
    "sklearn_pipeline": lambda left: left["searches"]["KHotSelector"].score(left["X_test"], left["y_test"]) > 0.9,
}
TUTORIALS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "1_k_hot_from_scratch": lambda left: left["loss"](left["chosen"]) == 0 and left["bias"]["khot.reinmax"] < 0.1,
    "2_sparse_autoencoder": lambda left: max(left["numbers"]) > 40 and left["numbers"][-1] < 30,
    "3_bayesian_variable_selection": lambda left: (left["draws"].mean(0) - left["inclusion"]).abs().max() < 0.1,
    "4_sampling_in_your_own_loop": lambda left: left["loss"](left["chosen"]) < 0.7 * left["by_chance"].mean(),
}
SCRIPTS = {file.stem: file for file in sorted(FOLDER.glob("*.py"))}


def test_every_script_is_run():
    assert ARRIVED.keys() | OWN_TESTS >= SCRIPTS.keys() >= ARRIVED.keys()
    assert {file.stem for file in LESSONS.glob("*.py")} == TUTORIALS.keys()


@pytest.mark.parametrize("file", SCRIPTS.values(), ids=SCRIPTS)
def test_is_short_and_a_page(file):
    source = file.read_text(encoding="utf-8")
    title, underline, *_ = ast.get_docstring(ast.parse(source)).splitlines()
    assert set(underline) == {"="} and len(underline) == len(title)
    assert "\n# %%\n" in source and len(source.splitlines()) <= 80
    assert len(re.findall(r"\*\*Your\s+(?:# )?data\s+(?:# )?goes\s+(?:# )?here:\*\*", source)) == 1


@pytest.mark.exhaustive  # `make docs` runs it, too
@pytest.mark.parametrize("name", ARRIVED)
def test_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyro.clear_param_store()
    left = runpy.run_path(str(SCRIPTS[name]))
    plt.close("all")
    pyro.clear_param_store()
    assert ARRIVED[name](left)
    assert (tmp_path / f"{name}.png").stat().st_size > 3_000


@pytest.mark.exhaustive  # `make docs` runs it, too
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")  # torch before numpy 2
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning")
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyro.clear_param_store()
    try:
        left = runpy.run_path(str(LESSONS / f"{name}.py"))
        assert TUTORIALS[name](left)
    finally:
        torch.set_default_dtype(torch.float32)
        plt.close("all")
        pyro.clear_param_store()
