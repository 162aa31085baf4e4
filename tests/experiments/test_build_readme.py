"""The page about the experiments, built from made-up ones and their made-up results."""

import json
from pathlib import Path

import pytest

import build_readme

EXPERIMENTS = Path(build_readme.__file__).parent


def script(folder, name, summary, usage=""):
    text = f'"""{summary}\n\n    {usage}\n\nMore.\n"""\n\nif __name__ == "__main__":\n    pass\n'
    (folder / f"{name}.py").write_text(text)


def result(folder, name, data="digits", verdict="holds", paper=None):
    findings = [{"claim": "a beats b", "verdict": verdict}]
    document = {"settings": {"data": data}, "rows": {"a": {"paper": paper or {}}}, "findings": findings}
    (folder / f"{name}.json").write_text(json.dumps(document))
    (folder / f"{name}.md").write_text(f"table of {name}\n")
    (folder / f"{name}.png").write_bytes(b"")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()
    script(tmp_path, "vae", "Codes of images.", "python experiments/vae.py     scikit-learn's digits")
    script(tmp_path, "vae_two", "A second one.")
    (tmp_path / "common.py").write_text('"""A helper."""\n')
    return tmp_path


def build(folder):
    build_readme.main(["--folder", str(folder), "--results", str(folder / "results")])
    return (folder / "README.md").read_text(encoding="utf-8")


def test_results_go_to_the_experiment_with_the_longest_fitting_name(folder):
    for name in ("vae_ten", "vae_two", "vae_two_more", "other"):
        result(folder / "results", name)
    _, first, second, _ = build(folder).split("\n## ")
    assert "table of vae_ten" in first and "](results/vae_ten.png)" in first and "vae_two" not in first
    assert "table of vae_two\n" in second and "table of vae_two_more" in second and "other" not in second


def test_sections_and_overview(folder):
    result(folder / "results", "vae_ten")
    result(folder / "results", "vae_single", verdict="open")
    overview, first, second, papers = build(folder).split("\n## ")
    assert "| [vae](#vaepy) | Codes of images. | holds: 1, open: 1 |" in overview and "helper" not in overview
    assert first.startswith("[vae.py](vae.py)\n\nCodes of images.\n\n    python experiments/vae.py\n\n")
    assert "Not run yet." in second and "Not run yet." not in first
    assert papers.startswith("Papers\n\n- the k-hot paper: ")


def test_where_data_differ_is_said(folder):
    result(folder / "results", "vae_ten")
    page = build(folder)
    assert "Based on table 4 of" in page
    assert "**The data differ from the paper's**: scikit-learn's digits here, MNIST in the paper" in page
    assert "does not repeat the numbers of the paper" in page
    result(folder / "results", "vae_ten", data="mnist", paper={"paper": "12.3"})
    page = build(folder)
    assert "Data: MNIST, as in the paper." in page
    assert "The data differ" not in page and "numbers of the paper" not in page


def test_results_on_another_data_set_come_after_the_others_in_a_folder_of_its_name(folder):
    (folder / "results" / "mnist").mkdir()
    result(folder / "results", "vae_ten")
    result(folder / "results" / "mnist", "vae_ten", data="mnist", verdict="open", paper={"paper": "12.3"})
    overview, section, _, _ = build(folder).split("\n## ")
    assert "holds: 1, open: 1" in overview
    assert "as in the paper. **The data of the other tables differ**: scikit-learn's digits here, MNIST" in section
    first, second = section.split("\n\n### MNIST\n\n")
    assert "](results/vae_ten.png)" in first and "](results/mnist/vae_ten.png)" not in first
    assert "](results/mnist/vae_ten.png)\n\ntable of vae_ten" in second


def test_sources_are_of_experiments_that_exist():
    names = build_readme.experiment_names(EXPERIMENTS)
    assert set(build_readme.SOURCES) <= set(names)
    helpers = {"build_readme", "common", "generated_language", "image_data", "runs", "text_data", "translator"}
    assert not (helpers | {"translator_training"}) & set(names)
