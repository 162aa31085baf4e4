"""Pages of the API reference, from what each package lists in its ``__all__``: a public name cannot be left out."""

import functools
import importlib
import inspect
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = {  # in the order in which a name that two of them list finds its home
    "khot.relaxations": "Relaxed top-k maps",
    "khot.distributions": "Sampling designs",
    "khot.estimators": "Gradient estimators",
    "khot.losses": "Losses",
    "khot.nn": "Modules",
    "khot.sklearn": "Feature selection for scikit-learn",
    "khot.infer": "Inference in Pyro",
    "khot.diagnostics": "Diagnostics",
    "khot.constraints": "Constraints",
    "khot.kernels": "Backends",
}
# What users meet without a place in `__all__`: the results of a function, and what they may call of the kernels.
BESIDES = {"khot.diagnostics": ["Comparison", "Report"], "khot.kernels": ["backend"]}
RECOMMENDED = {  # the members that a reader should meet first
    "khot.relaxations": ["sigmoid_topk", "sparse_topk", "topk_mask", "straight_through_topk"],
    "khot.distributions": ["ConditionalPoisson", "Pivotal", "Sampford", "GumbelTopK"],
    "khot.estimators": ["score_function", "reinmax", "straight_through", "ReinMax", "StraightThrough"],
    "khot.nn": ["TopK", "BatchTopK", "KHotGate"],
    "khot.infer": ["AutoKHot", "KHotSwap"],
}
# Reachable, but not promised: `__all__` and the module's own text are no reference.
PROMISE_NOTHING = {"khot.kernels": "The choice of a backend. What else the package has may change without notice."}


@functools.cache
def names() -> dict[str, list[str]]:
    """The names that each package has on its page."""
    there = [package for package in PACKAGES if find_spec(package) is not None]
    listed = {p: [] if p in PROMISE_NOTHING else list(module(p).__all__) for p in there}
    return {package: [*public, *BESIDES.get(package, [])] for package, public in listed.items()}


@functools.cache
def home_of(name: str) -> str | None:
    """The package under which a name, or a thing that goes by it, has its entry."""
    entry = entry_of(name)
    return None if entry is None else entry.rpartition(".")[0]


@functools.cache
def entry_of(name: str) -> str | None:
    """The full name under which a public name, or a thing that goes by it, has its entry."""
    homes = [package for package, public in names().items() if name in public]
    return ".".join(_home(getattr(module(homes[0]), name))) if homes else None


def write(folder: Path) -> None:
    """Writes a page for each package, and removes the entries of names that are gone."""
    folder.mkdir(exist_ok=True)
    entries = set()
    for package, public in names().items():
        own = [name for name in public if _home(getattr(module(package), name)) == (package, name)]
        entries |= {f"{package}.{name}" for name in own}
        text = "\n".join(_page(package, own, [name for name in public if name not in own]))
        _write_if_changed(folder / f"{package}.rst", text)
    _write_if_changed(folder / "index.rst", "\n".join(_index(names())))
    for entry in (folder / "names").glob("*.rst"):
        if entry.stem not in entries:
            entry.unlink()


def module(package: str) -> ModuleType:
    """The package of this name."""
    return importlib.import_module(package)


def _home(thing: Any) -> tuple[str, str]:
    """The first package that has this thing, and its name there."""
    places = ((package, name) for package, public in names().items() for name in public)
    return next(place for place in places if getattr(module(place[0]), place[1]) is thing)


def _write_if_changed(path: Path, text: str) -> None:
    """Leaves a page that is right as it is, so that Sphinx need not read it again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _index(packages: Iterable[str]) -> Iterable[str]:
    yield from ("API reference", "=============", "")
    yield "You can import most names from ``khot`` itself: ``from khot import sigmoid_topk``. The exceptions are the"
    yield "names of ``khot.nn``, ``khot.sklearn``, ``khot.kernels`` and ``khot.constraints``, and the results of"
    yield "``compare_estimators``. Each list begins with the members to try first."
    yield from ("", ".. toctree::", "   :hidden:", "")
    yield from (*(f"   {package}" for package in packages), "")
    for package in packages:
        text = PROMISE_NOTHING.get(package) or (inspect.getdoc(module(package)) or "").partition("\n\n")[0]
        yield from (f":doc:`{PACKAGES[package]} <{package}>`", *(f"   {line}" for line in text.splitlines()), "")


def _page(package: str, own: list[str], borrowed: Iterable[str]) -> Iterable[str]:
    heading = f"{PACKAGES[package]}: ``{package}``"
    yield from (heading, "=" * len(heading), "")
    if package in PROMISE_NOTHING:
        yield from (f".. module:: {package}", "")
    else:
        yield from (f".. automodule:: {package}", "   :no-members:", "")
    first = RECOMMENDED.get(package, [])
    own = sorted(own, key=lambda name: first.index(name) if name in first else len(first))
    classes = [name for name in own if inspect.isclass(getattr(module(package), name))]
    for group, members in (("Functions", [name for name in own if name not in classes]), ("Classes", classes)):
        if members:
            yield from (group, "-" * len(group), "", ".. autosummary::", "   :toctree: names", "   :nosignatures:", "")
            yield from (*(f"   {name}" for name in members), "")
    for name in borrowed:
        home = ".".join(_home(getattr(module(package), name)))
        yield from (f"``{name}`` is an alias of :py:obj:`{home}`.", "")
