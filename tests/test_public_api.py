"""The public names: listed once in each subpackage, sorted, documented, and all reachable from khot."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import khot

PACKAGES = ("relaxations", "losses", "distributions", "estimators", "diagnostics", "infer")
MODULES = {name: importlib.import_module(f"khot.{name}") for name in (*PACKAGES, "constraints")}
PUBLIC = [(package, name) for package, module in MODULES.items() for name in module.__all__]


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_all_is_sorted_and_without_doubles(module):
    assert list(module.__all__) == sorted(set(module.__all__))


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_public_name_is_documented(package, name):
    public = getattr(MODULES[package], name)
    assert not name.startswith("_")
    assert inspect.getdoc(public), f"{package}.{name} has no docstring"
    if inspect.isclass(public):
        bases = [inspect.getdoc(base) for base in public.__mro__[1:]]
        assert inspect.getdoc(public) not in bases, f"{package}.{name} only inherits its docstring"


@pytest.mark.parametrize("package", PACKAGES)
def test_khot_reexports_what_the_subpackages_list(package):
    assert getattr(khot, package) is MODULES[package]
    for name in MODULES[package].__all__:
        assert getattr(khot, name) is getattr(MODULES[package], name)


def test_khot_lists_its_names_once():
    meaning = {}
    for package in PACKAGES:
        for name in MODULES[package].__all__:
            public = getattr(MODULES[package], name)
            assert meaning.setdefault(name, public) is public, f"two subpackages mean different things by {name}"
    assert khot.__all__ == sorted({*meaning, *MODULES})
    assert set(khot.__all__) <= set(dir(khot))


@pytest.mark.parametrize("module", [khot, *MODULES.values()], ids=lambda module: module.__name__)
def test_dir_lists_the_public_names_and_nothing_else(module):
    assert dir(module) == list(module.__all__)


def test_star_import():
    namespace = {}
    exec("from khot import *", namespace)
    assert {"ConditionalPoisson", "StraightThrough", "sigmoid_topk"} <= set(namespace)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'khot' has no attribute 'sigmoid_topl'"):
        _ = khot.sigmoid_topl


def names_used(file: Path) -> set[str]:
    """Names that a file uses as code; those in strings and comments do not count."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name)}


TESTS = Path(__file__).parent
REGISTERED = names_used(TESTS / "registry.py")
TESTED = REGISTERED.union(*(names_used(file) for file in TESTS.rglob("test_*.py")))


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_public_name_is_under_test(package, name):
    assert name in TESTED, f"no test uses {name}"


@pytest.mark.parametrize("name", khot.distributions.__all__)
def test_design_is_registered(name):
    # The base class is no member; draws of PhantomUnit have no fixed size, relaxed ones are no subsets: they have tests
    # of their own.
    others = {"SamplingDesign", "PhantomUnit", "RelaxedKHot", "RelaxedKHotStraightThrough"}
    assert name in REGISTERED | others, f"{name} is not among DESIGNS in tests/registry.py"
