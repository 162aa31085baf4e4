"""Scripts in experiments/, benchmarks/ and docs/ start; every experiment is run by a test; the gallery is drawn."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import khot
from khot.kernels.operators.platforms import lacks_triton
from tests.experiments.test_smoke import NAMES

ROOT = Path(__file__).parents[1]
MAIN = re.compile(r'^if __name__ == "__main__":\n    main\(\)', flags=re.MULTILINE)
OWN_TESTS = {  # of the experiments that test_smoke.py does not run
    "batch_topk": "test_batch_topk.py",
    "beam_search": "test_beam_search.py",
    "compare_estimators": "test_compare_estimators.py",
    "feature_selection_methods": "test_feature_selection_methods.py",
    "feature_selector_comparison": "test_feature_selector_comparison.py",
    "learned_k": "test_feature_selection_methods.py",
    "moe_router": "test_moe_router.py",
    "permutation_peers": "test_permutation_peers.py",
    "pyro_estimators": "test_pyro_estimators.py",
    "simple_slopes": "test_simple_slopes.py",
    "sparse_autoencoder": "test_sparse_autoencoder.py",
    "spike_and_slab": "test_spike_and_slab.py",
    "topk_attention": "test_topk_attention.py",
    "vae": "test_vae.py",
    "variable_selection": "test_variable_selection.py",
    "variable_selection_methods": "test_variable_selection_methods.py",
    "vit_experts": "test_vit_experts.py",
}
UNTIMED = {  # public names that are no map, design or estimator of their own
    "AdaptiveStep", "Link", "Logistic", "MovingAverage", "SamplingDesign", "capped_simplex_map",
    "horvitz_thompson", "straight_through_value", "topk_indices",
}  # fmt: skip
HELPERS = {
    "build_readme",
    "common",
    "generated_language",
    "image_data",
    "runs",
    "text_data",
    "translator",
    "translator_training",
}  # tested by what they return


def scripts(folder: str) -> list[Path]:
    return [file for file in sorted((ROOT / folder).glob("*.py")) if MAIN.search(file.read_text())]


def modules(folder: str) -> set[str]:
    return {file.stem for file in (ROOT / folder).glob("*.py")}


@pytest.fixture
def load(monkeypatch):
    """Imports a script by its path, with what lies beside it."""
    before = set(sys.modules)

    def load(file: Path):
        monkeypatch.syspath_prepend(file.parent)
        spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [str(file), "--help"])
        return module

    yield load
    for name in set(sys.modules) - before:
        if "benchmarks" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_every_experiment_is_run_by_a_test():
    assert modules("experiments") == {*NAMES, *OWN_TESTS, *HELPERS}
    assert not set(NAMES) & OWN_TESTS.keys()


@pytest.mark.parametrize("name", OWN_TESTS)
def test_own_test_runs_the_experiment(name):
    assert smoke_tests(name, (ROOT / "tests" / "experiments" / OWN_TESTS[name]).read_text())


def smoke_tests(name: str, source: str) -> list[str]:
    """The tests of a file that call ``main`` of a module with ``--smoke``, directly or by a parameter."""
    tree = ast.parse(source)
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    own = {alias.asname or alias.name for alias in aliases if alias.name == name}
    found = []
    for test in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
        nodes = list(ast.walk(test))
        mains = [
            node.func.value for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func)[-5:] == ".main"
        ]
        called = {node.id for node in mains if isinstance(node, ast.Name)}
        given = {node.id for part in test.decorator_list for node in ast.walk(part) if isinstance(node, ast.Name)}
        by_parameter = called & {argument.arg for argument in test.args.args} and own & given
        smoke = any(isinstance(node, ast.Constant) and node.value == "--smoke" for node in nodes)
        asserts = any(isinstance(node, ast.Assert) for node in nodes)
        if smoke and asserts and (called & own or by_parameter):
            found.append(test.name)
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vae as v\ndef test_a():\n    assert v.main(['--smoke'])", ["test_a"]),
        ("import vae\ndef test_a():\n    assert vae.main(['--help'])", []),
        ("import vae\ndef test_a():\n    vae.main(['--smoke'])", []),
        ("import vae\nimport knn\ndef test_a():\n    assert knn.main(['--smoke'])", []),
        ("import vae\n@each('e', [vae])\ndef test_a(e):\n    assert e.main(['--smoke'])", ["test_a"]),
        ("import vae\n@each('e', [knn])\ndef test_a(e):\n    assert e.main(['--smoke'])", []),
    ],
)
def test_what_counts_as_a_run(source, found):
    assert smoke_tests("vae", source) == found


@pytest.mark.parametrize("name", [*NAMES, *OWN_TESTS])
def test_help_of_experiments(name, capsys):
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "--seeds" in shown and module.__doc__.strip() in shown


def test_benchmarks_are_scripts_or_their_helper():
    assert {file.stem for file in scripts("benchmarks")} | {"timing", "sass"} == modules("benchmarks")


NEEDS_TRITON = pytest.mark.skipif(lacks_triton() is not None, reason=lacks_triton() or "")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=NEEDS_TRITON if file.stem == "gpu_static" else ())
        for file in scripts("benchmarks")
    ],
)
def test_help_of_benchmarks(file, load, capsys):
    module = load(file)
    with pytest.raises(SystemExit) as ended:
        module.main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "--help" in shown and module.__doc__.split()[0] in shown


def test_operations_timed_on_an_accelerator_agree_with_their_references(load):
    module = load(ROOT / "benchmarks" / "gpu.py")
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    with khot.kernels.backend("torch"):  # which is timed, too, and is what runs where a kernel does not
        wrong = [name for name, operation in module.OPERATIONS.items() if not module.agrees(operation, x, 4)]
    assert wrong == []


def test_regimes_are_timed_of_every_map_design_and_estimator(load):
    module = load(ROOT / "benchmarks" / "regimes.py")
    timed = {
        word for family in (module.MAPS, module.DESIGNS, module.ESTIMATORS) for name in family for word in name.split()
    }
    packages = (khot.relaxations, khot.distributions, khot.estimators)
    assert {name for package in packages for name in package.__all__} - timed == UNTIMED


@pytest.mark.slow
def test_gallery(load, monkeypatch, tmp_path):
    (file,) = (file for file in scripts("docs") if file.stem == "gallery")
    module = load(file)
    monkeypatch.setattr(sys, "argv", [str(file), "--out", str(tmp_path)])
    module.main()
    kept = {figure.name for figure in (file.parent / "gallery").glob("*.png")}
    assert {figure.name for figure in tmp_path.glob("*.png")} == kept and len(kept) == 5
    assert all(figure.stat().st_size > 3_000 for figure in tmp_path.glob("*.png"))


def test_every_row_of_a_package_for_python_is_checked(load):
    module = load(ROOT / "benchmarks" / "peer_behaviour.py")
    rows = module.rows()
    assert len(rows) > 30
    assert {row.package for row in rows if module.the_check(row) is None} == module.IN_R
    assert len(module.CHECKS) == len([row for row in rows if row.package not in module.IN_R])


def test_findings_have_the_form_that_contributing_asks_for():
    files = sorted((ROOT / "findings").glob("*.sh"))
    assert len(files) > 8
    for file in files:
        text = file.read_text()
        fields = re.findall(r"^# (\w+): ", text.split("set -euo pipefail")[0], flags=re.MULTILINE)
        assert fields == ["package", "version", "date", "behaviour", "expected", "seen", "why"], file
        assert file.stat().st_mode & 0o111 and "mktemp -d" in text and "khot" not in text, file
        assert "==" in text and "assert " in text and "print(" in text, file
