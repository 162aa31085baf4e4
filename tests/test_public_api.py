"""The public names: listed once in each subpackage, sorted, documented, and all reachable from khot."""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import khot
from tests.maps import ODD_MAPS, RELAXATIONS
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, LOSSES, PERTURBED, PHANTOM

TESTS = Path(__file__).parent
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


# What the contracts are run on. A public name is here, or has tests of its own, listed below.
REGISTRIES = {
    "relaxations": [*RELAXATIONS, *ODD_MAPS],
    "distributions": [*DESIGNS, PHANTOM],
    "estimators": [*ESTIMATORS, *PERTURBED, *FUNCTIONS],
    "losses": LOSSES,
}
OWN_TESTS = {
    "constraints": {"capped_simplex": "test_constraints.py", "k_hot": "test_constraints.py"},
    "diagnostics": {"compare_estimators": "test_diagnostics.py"},
    "distributions": {  # draws of PhantomUnit have no fixed size, relaxed ones are no subsets
        "PhantomUnit": "distributions/test_phantom_unit.py",
        "RelaxedKHot": "distributions/test_relaxed_khot.py",
        "RelaxedKHotStraightThrough": "distributions/test_relaxed_khot.py",
    },
    "estimators": {
        "MovingAverage": "estimators/test_score_function.py",
        "RelaxedKHotStraightThrough": "distributions/test_relaxed_khot.py",
        "pathwise": "estimators/test_pathwise_functions.py",
        "perturbed_topk": "estimators/test_perturbed.py",
        "score_function_surrogate": "estimators/test_event_shapes.py",
    },
    "infer": {"KHotReparam": "test_infer.py"},
    "relaxations": {
        "Logistic": "kernels/test_links.py",
        "StudentT": "kernels/test_links.py",
        "isotonic_l2": "relaxations/test_isotonic.py",
        "isotonic_lp": "relaxations/test_isotonic.py",
        "permutahedron_projection": "relaxations/test_permutahedron.py",
        "permutahedron_rank": "relaxations/test_permutahedron.py",
        "permutahedron_sort": "relaxations/test_permutahedron.py",
        "rescaled_sigmoid_topk": "relaxations/test_baselines.py",
        "soft_permutation": "relaxations/test_order.py",
        "soft_rank": "relaxations/test_order.py",
        "soft_sort": "relaxations/test_order.py",
        "sorted_transport_topk": "relaxations/test_sorted_transport.py",
        "straight_through_topk": "relaxations/test_straight_through.py",
        "successive_softmax_topk": "relaxations/test_baselines.py",
        "topk_mask": "relaxations/test_hard.py",
    },
}


def ingredients(value: object) -> Iterator[object]:
    """What a member of a registry is made of: functions and classes, with the bases of these."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from ingredients(getattr(value, field.name))
    elif isinstance(value, partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from ingredients(part)
    elif inspect.isfunction(value):
        yield value
        if value.__module__.startswith("tests."):
            parts = inspect.getclosurevars(value)
            yield from (*parts.globals.values(), *parts.nonlocals.values())
            yield from (parameter.default for parameter in inspect.signature(value).parameters.values())
    else:
        yield from (value if isinstance(value, type) else type(value)).__mro__


REGISTERED = {package: [part for case in cases for part in ingredients(case)] for package, cases in REGISTRIES.items()}


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_public_name_is_under_test(package, name):
    own = OWN_TESTS.get(package, {}).get(name)
    if own is None:
        public = getattr(MODULES[package], name)
        assert any(part is public for part in REGISTERED.get(package, [])), f"{package}.{name} is in no registry"
    else:
        assert callers_of(name, (TESTS / own).read_text()), f"no test in {own} calls {name} and asserts something"


def test_names_listed_are_public():
    listed = {(package, name) for package, names in OWN_TESTS.items() for name in names}
    assert listed <= set(PUBLIC)


def callers_of(name: str, source: str) -> list[str]:
    """The tests of a file that call ``name``, themselves or in what they use of the file, and assert something."""
    definitions: dict[str, ast.AST] = {}
    tests: list[ast.FunctionDef] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            definitions.update((target.id, node) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
            functions = [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef)]
            tests += [function for function in functions if function.name.startswith("test_")]
    return [test.name for test in tests if calls_and_asserts(test, name, definitions)]


def calls_and_asserts(test: ast.FunctionDef, name: str, definitions: dict[str, ast.AST]) -> bool:
    parts, names = [test], {test.name}
    for part in parts:  # grows by the definitions that it leads to
        found = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)} & definitions.keys() - names
        names |= found
        parts += [definitions[other] for other in found]
    nodes = [node for part in parts for node in ast.walk(part)]
    calls = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in nodes if isinstance(node, ast.Call)}
    asserts = any(isinstance(node, ast.Assert) for node in nodes) or calls & {"assert_close", "gradcheck"}
    # Given to the test as a value: by a decorator, or by a list that a decorator names.
    own = {argument.arg for argument in test.args.args}
    uses_what_is_given = any(isinstance(node, ast.Name) and node.id in own for node in ast.walk(test))
    given = [*test.decorator_list, *(part for part in parts if isinstance(part, ast.Assign))]
    values = {node.id for part in given for node in ast.walk(part) if isinstance(node, ast.Name)}
    return bool(asserts) and (name in calls or (uses_what_is_given and name in values))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_a():\n    assert soft_rank(x) == 1", ["test_a"]),
        ("def test_a():\n    soft_rank(x)", []),
        ("def test_a():\n    assert isinstance(soft_rank, object)", []),
        ("from khot import soft_rank\ndef test_a():\n    assert 1", []),
        ("def test_a():\n    with pytest.raises(ValueError):\n        soft_rank(x)", []),
        ("MAPS = [soft_rank]\n@parametrize('f', MAPS)\ndef test_a(f):\n    assert f(x) == 1", ["test_a"]),
        ("MAPS = [soft_rank]\ndef test_a():\n    assert sigmoid_topk(x) == 1", []),
        (
            "def check(x):\n    assert soft_rank(x) == 1\ndef test_a():\n    check(2)\ndef test_b():\n    assert 1",
            ["test_a"],
        ),
    ],
)
def test_what_counts_as_a_test(source, found):
    assert callers_of("soft_rank", source) == found
