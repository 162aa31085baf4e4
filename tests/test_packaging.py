"""Metadata in step with each other, and a Makefile that refuses what it cannot use."""

import re
import shutil
import subprocess
import sys
from importlib import metadata, resources
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import khot
from tests.loops import for_each

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings along

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].values()
REQUIREMENTS = [Requirement(line) for line in (*PROJECT["dependencies"], *chain.from_iterable(EXTRAS))]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
PINS = [Requirement(line.partition("#")[0]) for line in CONSTRAINTS if line[:1].isalpha()]


def pinned_version(name: str) -> str:
    (pin,) = (pin for pin in PINS if pin.name == name)
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return specifier.version


@for_each("requirement", [r for r in REQUIREMENTS if r.name != "khot"])
def test_tested_versions_satisfy_the_ranges(requirement):
    assert requirement.specifier.contains(pinned_version(requirement.name))


def test_version_has_one_source():
    assert khot.__version__ == PROJECT["version"] == metadata.version("khot")
    assert not re.search("^version:", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert resources.files("khot").joinpath("py.typed").is_file()


def test_changelog_has_a_section_for_the_version():
    section = "Unreleased" if ".dev" in PROJECT["version"] else re.escape(PROJECT["version"])
    assert re.search(rf"^## \[{section}\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


def test_the_conda_recipe_asks_for_what_the_project_asks_for():
    recipe = (ROOT / "recipe" / "meta.yaml").read_text()
    assert f'version = "{PROJECT["version"]}"' in recipe
    run = recipe.split("  run:\n")[1].split("\n\n")[0]
    named = dict(re.findall(r"- ([\w-]+) (>=[\d.]+)", run))
    named["torch"] = named.pop("pytorch")
    assert named == {r.name: str(r.specifier) for r in map(Requirement, PROJECT["dependencies"])}


def test_the_address_of_the_repository_is_written_nowhere_else():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.py"), *ROOT.glob("src/**/*.py")]
    address = PROJECT.get("urls", {}).get("Repository")
    assert address is None or [f.name for f in files if address in f.read_text(encoding="utf-8")] == []


def test_contributing_names_files_that_are_there():
    paths = re.findall(r"`(\w+/[\w/]+(?:\.\w+)?)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 5
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "src/khot"))] == []


@pytest.fixture
def make(tmp_path):
    """Runs make in a folder that holds only what set-up reads."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_runs_every_file_with_such_tests():
    command = ["make", "--silent", "--eval", "list-gpu-tests: ; @echo $(GPU_TESTS)", "list-gpu-tests"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sign = re.compile(r"^pytestmark = (kernel_marks\(\)|pytest\.mark\.gpu)|^@pytest\.mark\.gpu", flags=re.MULTILINE)
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if sign.search(file.read_text())]
    assert sorted(listed) == sorted(file.relative_to(ROOT).as_posix() for file in marked)


def python_stand_in(body: str, folder: Path) -> Path:
    script = folder / "python-stand-in"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return script


def test_make_refuses_an_old_python(make, tmp_path):
    # Answers as an old Python does: fails the comparison of versions, prints its own.
    old = python_stand_in('case "$2" in *print*) echo "Python 3.10.13";; *) exit 1;; esac', tmp_path)
    result = make("demo", f"PYTHON={old}")
    assert result.returncode != 0
    assert "The development environment needs Python 3.11 or newer, though khot itself runs on 3.10" in result.stderr
    assert f"{old} is Python 3.10.13." in result.stderr
    assert "Run: make demo PYTHON=" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_says_which_python_is_missing(make, tmp_path):
    result = make("demo", "PYTHON=/no/such/python")
    assert result.returncode != 0
    assert "/no/such/python is not found" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_interrupted_setup_is_done_again(make, tmp_path):
    # Makes an environment whose Python, and so its pip, fails.
    failing = 'mkdir "$3/bin" && ln -s "$(command -v false)" "$3/bin/python"'
    python = python_stand_in(f'[ "$2" != venv ] || {{ {failing}; }}', tmp_path)
    for _ in range(2):
        result = make("lint", f"PYTHON={python}")
        assert result.returncode != 0
        assert "making .venv" in result.stdout and "Downloads what constraints.txt names" in result.stdout
        assert not (tmp_path / ".venv" / ".khot-ready").exists()


def test_torch_comes_from_its_own_index(make):
    result = make("--dry-run", "demo", "TORCH_INDEX=https://torch.example/cpu")
    assert "--index-url https://torch.example/cpu torch;" in result.stdout.replace("\\\n", "").replace("\t", "")
    assert "--index-url" not in make("--dry-run", "demo").stdout
