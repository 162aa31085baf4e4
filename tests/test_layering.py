"""Imports run one way: each room imports only from those below it, and nobody from khot itself."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.maps import RELAXATIONS

SOURCE = Path(__file__).parents[1] / "src"
LEVELS = {
    "_tracing": -1,
    "_validation": 0,
    "kernels": 1,
    "relaxations": 2,
    "constraints": 3,
    "distributions": 4,
    "estimators": 5,
    "infer": 6,
    "losses": 6,
    "diagnostics": 6,
}
FILES = sorted((SOURCE / "khot").rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file) for file in FILES}


def room(module: str) -> str:
    """The part of a module's name that has a level; "" for khot itself."""
    return [*module.split("."), ""][1]


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, str, int]]:
    """Yields (module, imported name or "", line) for every import below ``tree``; relative ones are made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")
            above = above[: len(above) - node.level + is_package] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                if f"{source}.{alias.name}" in MODULES:
                    yield f"{source}.{alias.name}", "", node.lineno
                else:
                    yield source, alias.name, node.lineno


def local_imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, module, is_package)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What ``module`` imports against the rules, one line each."""
    tree = ast.parse(source)
    here, found = room(module), []
    for target, name, line in imports(tree, module, is_package):
        where = f"{module}:{line} imports {target} {name}".rstrip()
        if target.split(".")[0] == "triton" and not module.endswith("_triton"):
            found.append(f"{where}: only *_triton modules import Triton")
        if target.split(".")[0] != "khot" or module == "khot":
            continue
        there = room(target)
        if not there:
            found.append(f"{where}: khot itself only re-exports")
            continue
        if there != here and LEVELS[there] >= LEVELS[here]:
            found.append(f"{where}: {there} is not below {here}")
        inside = [*target.split(".")[2:], name]
        if there != here and any(part.startswith("_") for part in inside):
            found.append(f"{where}: a private name of another package")
    local = set(local_imports(tree, module, is_package))
    for target, name, line in imports(tree, module, is_package):
        if target.split(".")[0] != "khot":
            continue
        is_local, is_launcher = (target, name, line) in local, target.endswith("_triton")
        if is_local and not is_launcher:
            found.append(f"{module}:{line} imports {target} inside a function")
        if is_launcher and not is_local and not module.endswith("_triton"):
            found.append(f"{module}:{line} imports {target} before its first call")
    return found


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_run_one_way(file):
    assert violations(file.read_text(), module_name(file), is_package=file.name == "__init__.py") == []


def test_every_room_has_a_level():
    assert {room(module) for module in MODULES} - {""} <= set(LEVELS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("khot.kernels.a", "from khot.relaxations import sigmoid_topk"),
        ("khot.relaxations.a", "from khot.constraints import k_hot"),
        ("khot.relaxations.a", "from .. import constraints"),
        ("khot.constraints", "import khot.distributions"),
        ("khot.losses", "from khot import infer"),
        ("khot.distributions.a", "from khot import sigmoid_topk"),
        ("khot.distributions.a", "from khot.relaxations.sigmoid import _solve"),
        ("khot.distributions.a", "from khot.kernels._tree import build"),
        ("khot.distributions.a", "def f():\n    from khot.relaxations import sigmoid_topk"),
        ("khot.kernels.a", "import triton"),
        ("khot.kernels.a", "from .a_triton import launch"),
    ],
)
def test_violations_are_found(module, source):
    assert violations(source, module) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("khot.estimators.a", "from khot.distributions import Pivotal\nfrom khot._validation import check_size"),
        ("khot.distributions.a", "from ._b import c\nfrom khot.distributions._b import _d"),
        ("khot.kernels.a", "def f():\n    from .a_triton import launch"),
        ("khot.kernels.a_triton", "import triton"),
    ],
)
def test_allowed_imports_pass(module, source):
    assert violations(source, module) == []


def run_python(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_tests_of_relaxations_run_without_pyro():
    """By their ids, so that pytest refuses one that is not there."""
    ids = [f"tests/relaxations/test_contract.py::test_contract[{case.name}-value]" for case in RELAXATIONS]
    run_python(f"""
        import os, sys

        sys.modules["pyro"] = None  # what an import then finds missing
        os.chdir({str(SOURCE.parent)!r})

        import pytest
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--each-file-runs", *{ids!r}]))
    """)


@pytest.mark.slow
def test_docstrings_of_relaxations_run_without_pyro():
    modules = [name for name in sorted(MODULES) if room(name) in ("relaxations", "losses")]
    run_python(f"""
        import doctest, importlib, sys

        sys.modules["pyro"] = None

        import torch, khot, khot.losses, khot.relaxations
        public = {{name: getattr(khot, name) for name in (*khot.relaxations.__all__, *khot.losses.__all__)}}
        flags, ran = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS, 0
        for name in {modules!r}:
            module = importlib.import_module(name)
            failed, attempted = doctest.testmod(module, extraglobs={{**public, "torch": torch}}, optionflags=flags)
            assert not failed, name
            ran += attempted
        assert ran > len(public), ran
    """)


def test_relaxations_work_without_pyro_and_triton():
    run_python("""
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name in ("pyro", "triton"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())

        import torch, khot, khot.kernels, khot.relaxations
        x = torch.zeros(4, requires_grad=True)
        y = khot.sigmoid_topk(x, 2)
        assert y.tolist() == [0.5] * 4
        y.sum().backward()
        try:
            with khot.kernels.backend("triton"):
                khot.sigmoid_topk(x, 2)
        except RuntimeError as error:
            assert "Triton is not installed" in str(error), error
        else:
            raise AssertionError("the backend 'triton' ran without Triton")
        assert "sigmoid_topk" in dir(khot) and all(hasattr(khot, name) for name in dir(khot))

        for name in ("ConditionalPoisson", "StraightThrough", "distributions"):
            try:
                getattr(khot, name)
            except ModuleNotFoundError as error:
                assert "pip install pyro-ppl" in str(error), error
            else:
                raise AssertionError(f"khot.{name} came without Pyro")
    """)


def test_first_calls_on_a_cpu_import_nothing_large():
    """Neither pyro, nor torch's compiler, which takes seconds and brings Triton."""
    run_python("""
        import sys, torch
        before = set(sys.modules)
        import khot, khot.kernels, khot.relaxations
        x = torch.randn(3, 5, requires_grad=True)
        khot.sigmoid_topk(x, 2).square().sum().backward()
        khot.log_lapsum_topk(x, torch.tensor(2.5), torch.tensor(0.3, requires_grad=True)).sum().backward()
        khot.sparse_topk_magnitude(x, 2).sum().backward()
        khot.soft_rank(x).square().sum().backward()
        khot.sorted_transport_topk(x, 2).square().sum().backward()
        loaded = set(sys.modules) - before
        assert not {name.partition(".")[0] for name in loaded} & {"pyro", "triton", "scipy", "matplotlib", "sympy"}
        assert not [name for name in loaded if name.startswith("torch._dynamo") or name.endswith("_triton")]
    """)
