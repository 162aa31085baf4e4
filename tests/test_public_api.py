"""The public names: listed once in each subpackage, sorted, documented, and all reachable from khot."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch

import khot
from tests.every_map import MAPS
from tests.kernels.test_links import ALL
from tests.loops import for_each
from tests.maps import ODD_MAPS, RELAXATIONS, publics
from tests.modules import MODULES as NN_MODULES
from tests.registry import (
    CONSTRAINTS,
    DESIGNS,
    ESTIMATORS,
    FUNCTIONS,
    LOSSES,
    PERTURBED,
    PHANTOM,
    RELAXED,
    TOOLS,
)

LINKS = [type(link) for link, _ in ALL.values()]
PACKAGES = ("relaxations", "losses", "distributions", "estimators", "diagnostics", "infer")
MODULES = {name: importlib.import_module(f"khot.{name}") for name in (*PACKAGES, "constraints")}
BY_NAME = ("nn", "sklearn")  # not re-exported
MODULES |= {name: importlib.import_module(f"khot.{name}") for name in BY_NAME}
PUBLIC = [(package, name) for package, module in MODULES.items() for name in module.__all__]


def test_public_names_are_sorted_and_documented():
    for package, module in MODULES.items():
        assert dir(module) == list(module.__all__) == sorted(set(module.__all__))
        for name in module.__all__:
            public = getattr(module, name)
            assert not name.startswith("_")
            assert inspect.getdoc(public), f"{package}.{name} has no docstring"
            bases = [inspect.getdoc(base) for base in public.__mro__[1:]] if inspect.isclass(public) else []
            assert inspect.getdoc(public) not in bases, f"{package}.{name} only inherits its docstring"


def test_khot_lists_the_names_of_its_subpackages_once():
    meaning = {}
    for package in PACKAGES:
        assert getattr(khot, package) is MODULES[package]
        for name in MODULES[package].__all__:
            public = getattr(MODULES[package], name)
            assert getattr(khot, name) is public
            assert meaning.setdefault(name, public) is public, f"two subpackages mean different things by {name}"
    assert khot.__all__ == sorted({*meaning, *MODULES} - {*BY_NAME})


def test_dir_of_khot_lists_the_modules_that_are_not_exported_too():
    assert dir(khot) == sorted({*khot.__all__, *BY_NAME})


def test_no_module_has_the_name_of_a_public_function():
    """Pyright takes ``khot.f`` for the module f of a subpackage, if there is one, and refuses to call it.

    ``khot.kernels`` exports nothing, so that its modules are next to no function.
    """
    functions = {name for package, name in PUBLIC if not inspect.ismodule(getattr(MODULES[package], name))}
    root = Path(khot.__file__).parent
    files = [file.relative_to(root) for file in root.rglob("*.py")]
    modules = {part for file in files if file.parts[0] != "kernels" for part in file.with_suffix("").parts}
    assert modules & functions == set()


def test_star_import():
    namespace = {}
    exec("from khot import *", namespace)
    assert {"ConditionalPoisson", "StraightThrough", "sigmoid_topk"} <= set(namespace)


def test_unknown_name():
    meant = {"sigmoid_topK": "khot", "spam": None, "conditional_poisson": "khot", "Topk": "khot.nn"}
    for name, place in meant.items():
        advice = f": did you mean {place}." if place else "$"
        with pytest.raises(AttributeError, match=f"module 'khot' has no attribute '{name}'{advice}"):
            getattr(khot, name)


# What the contracts are run on.
REGISTRIES = {
    "relaxations": [*publics(RELAXATIONS, ODD_MAPS, MAPS, TOOLS["relaxations"]), *LINKS],
    "distributions": publics([*DESIGNS, PHANTOM], RELAXED, TOOLS["distributions"]),
    "estimators": publics(ESTIMATORS, PERTURBED, FUNCTIONS, RELAXED, TOOLS["estimators"]),
    "losses": publics(LOSSES, TOOLS["losses"]),
    "constraints": publics(CONSTRAINTS),
    "diagnostics": publics(TOOLS["diagnostics"]),
    "infer": publics(TOOLS["infer"]),
    "nn": publics(NN_MODULES, TOOLS["nn"], LOSSES),
    "sklearn": [MODULES["sklearn"].KHotSelector],  # scikit-learn's own checks are its contract
}
# To derive from: what they promise is tested of the classes below them.
BASES = {"Link", "SamplingDesign"}


def test_public_names_are_in_a_registry():
    for package, name in PUBLIC:
        public, members = getattr(MODULES[package], name), REGISTRIES[package]
        if name in BASES:
            assert any(issubclass(member, public) for member in members if inspect.isclass(member))
        else:
            assert any(member is public for member in members), f"{package}.{name} is in no registry"


def test_bases_cannot_be_members():
    """They do nothing unless a subclass defines them."""
    with pytest.raises(NotImplementedError):
        khot.SamplingDesign(logits=torch.zeros(3), k=1).sample()
    with pytest.raises(TypeError, match="abstract"):
        khot.Link()


@for_each("case", [case for cases in TOOLS.values() for case in cases])
def test_tools_by_their_definition(case):
    case.definition(case.public)


BY_POSITION = {  # of the modules and functions of khot.nn; all else is a keyword there
    "Anneal": "module name end steps",
    "ExpertChoice": "capacity",
    "JumpReLU": "threshold",
    "KHotGate": "n k",
    "MagnitudeSparsity": "density",
    "NMSparsity": "n m",
    "Selection": "values indices",
    "TopKCrossEntropyLoss": "p_k",
    "route": "logits k",
    "topk_attention": "query key value k",
}


def test_what_is_given_by_position():
    """An axis is a keyword everywhere, and in khot.nn whatever follows the size: TopK(3, 1) is no softness."""
    for package, name in PUBLIC:
        if callable(public := getattr(MODULES[package], name)):
            parameters = inspect.signature(public).parameters
            by_position = [each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
            assert "dim" not in by_position
            assert package != "nn" or by_position == BY_POSITION.get(name, "k").split()


@for_each(
    "call, message",
    [
        (lambda: khot.nn.TopK(3, 1), r"only `k` .* got 2 arguments; softness, .* the axis is the keyword `dim`"),
        (lambda: khot.nn.TokenChoice(8, 2), r"only `k` .*; the number of experts is no argument"),
        (lambda: khot.nn.KHotGate(8, 2, khot.Pivotal), r"only `n` and `k` .*; design, estimator are keywords"),
        (lambda: khot.topk_mask(torch.ones(3), 2, -1), r"topk_mask takes only \(x, k\) .* keyword `dim`"),
        (lambda: khot.soft_rank(torch.ones(3), 1.0, False, -1), r"only \(x, scale, descending\) .* keyword `dim`"),
    ],
)
def test_too_many_arguments_by_position(call, message):
    with pytest.raises(TypeError, match=message):
        call()
