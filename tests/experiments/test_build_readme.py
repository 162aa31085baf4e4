"""The pages about the experiments, built from made-up ones and their made-up results."""

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
    rows = {"a": {"paper": paper or {}, "loss": {"mean": 12.6}}}
    document = {"settings": {"data": data, "seeds": 2}, "rows": rows, "findings": findings}
    document["markdown"] = f"table of {name}\n"
    (folder / f"{name}.json").write_text(json.dumps(document))
    (folder / f"{name}.png").write_bytes(b"")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()
    script(tmp_path, "vae", "Codes of images.", "python experiments/vae.py     scikit-learn's digits")
    script(tmp_path, "vae_two", "A second one.")
    (tmp_path / "common.py").write_text('"""A helper."""\n')
    return tmp_path


def readme(folder):
    build_readme.main(["--folder", str(folder), "--results", str(folder / "results")])
    return (folder / "README.md").read_text(encoding="utf-8")


def page(folder):
    return build_readme.page(folder, folder / "results", folder / "site")


def test_results_go_to_the_experiment_with_the_longest_fitting_name(folder):
    for name in ("vae_ten", "vae_two", "vae_two_more", "other"):
        result(folder / "results", name)
    _, first, second = page(folder).split("\n## ")
    assert "table of vae_ten" in first and "](../results/vae_ten.png)" in first and "vae_two" not in first
    assert "table of vae_two\n" in second and "table of vae_two_more" in second and "other" not in second
    assert first.startswith("vae\n\n[vae.py](../vae.py): Codes of images.\n\n    python experiments/vae.py\n\n")


def test_lines_of_the_readme(folder):
    result(folder / "results", "vae_ten", paper={"paper": "12.3"}, data="mnist")
    result(folder / "results", "vae_single", verdict="open")
    text = readme(folder)
    differs = build_readme.DIFFERENCES["vae"]
    assert f"| [vae_ten](vae.py) | mnist; 2 seeds | a 12.3 | a 12.6 | {differs} | holds: 1 |" in text
    assert "| [vae_single](vae.py) | digits; 2 seeds | table 4 of the k-hot paper: no number |  |  | open: 1 |" in text
    assert "| [vae_two](vae_two.py) | not run yet |" in text and "helper" not in text
    assert len(text.splitlines()) <= 150 and "Not run yet." in page(folder)


def test_where_data_differ_is_said(folder):
    result(folder / "results", "vae_ten")
    text = page(folder)
    assert "Based on table 4 of" in text
    assert "**The data differ from the paper's**: scikit-learn's digits here, MNIST in the paper" in text
    assert "does not repeat the numbers of the paper" in text
    result(folder / "results", "vae_ten", data="mnist", paper={"paper": "12.3"})
    text = page(folder)
    assert "Data: MNIST, as in the paper." in text
    assert "The data differ" not in text and "numbers of the paper" not in text


def test_results_on_another_data_set_come_after_the_others_in_a_folder_of_its_name(folder):
    (folder / "results" / "mnist").mkdir()
    result(folder / "results", "vae_ten")
    result(folder / "results" / "mnist", "vae_ten", data="mnist", verdict="open", paper={"paper": "12.3"})
    _, section, _ = page(folder).split("\n## ")
    assert "as in the paper. **The data of the other tables differ**: scikit-learn's digits here, MNIST" in section
    first, second = section.split("\n\n### vae: MNIST\n\n")
    assert "](../results/vae_ten.png)" in first and "](../results/mnist/vae_ten.png)" not in first
    assert "](../results/mnist/vae_ten.png)\n\ntable of vae_ten" in second


def test_sources_are_of_experiments_that_exist():
    names = build_readme.experiment_names(EXPERIMENTS)
    assert set(build_readme.SOURCES) <= set(names)
    helpers = {"build_readme", "common", "generated_language", "image_data", "runs", "text_data", "translator"}
    assert not (helpers | {"translator_training"}) & set(names)
