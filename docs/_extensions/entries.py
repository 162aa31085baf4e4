"""The order of an entry: what a name is for, its picture, an example that imports what it uses, the rest, and others.

Docstrings have their example at the end, as usual in Google style, and use names that the doctests provide.
"""

import ast
import builtins
import doctest
import inspect
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import api_pages
import khot
import pictures

SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "References:")
MOST = 6  # other names that an entry refers to
# Each name refers to the others of its groups.
GROUPS = (
    "sigmoid_topk log_sigmoid_topk sparse_topk topk_threshold straight_through_topk TopKMask",
    "lapsum_topk log_lapsum_topk sigmoid_topk normal_topk",
    "normal_topk capped_simplex_map Link Logistic",
    "capped_softmax successive_softmax_topk sigmoid_topk Sampford",
    "transport_topk sorted_transport_topk sigmoid_topk",
    "sparse_topk sparse_topk_magnitude sparse_topk_signed fenchel_young_topk_loss",
    "topk_mask topk_indices topk_threshold straight_through_topk",
    "straight_through_topk straight_through_value",
    "sparse_topk_magnitude MagnitudeSparsity",
    "soft_rank soft_sort soft_permutation soft_count soft_quantile",
    "permutahedron_rank permutahedron_sort permutahedron_projection isotonic_l2 isotonic_lp",
    "soft_rank permutahedron_rank",
    "soft_sort permutahedron_sort",
    "ConditionalPoisson Pivotal Sampford PhantomUnit SamplingDesign",
    "Pivotal Systematic Brewer",
    "Sampford ParetoSampling horvitz_thompson",
    "GumbelTopK PlackettLuce ParetoSampling",
    "RelaxedKHot RelaxedKHotStraightThrough KHotReparam",
    "ReinMax StraightThrough reinmax",
    "StraightThrough straight_through",
    "IMLE AdaptiveStep PerturbedTopK",
    "PerturbedTopK perturbed_topk",
    "score_function score_function_surrogate MovingAverage unordered_set enumerated",
    "reinmax straight_through pathwise score_function compare_estimators",
    "fenchel_young_topk_loss FenchelYoungTopKLoss",
    "topk_cross_entropy TopKCrossEntropyLoss",
    "topk_metric_loss TopKMetricLoss knn_loss",
    "FenchelYoungTopKLoss TopKCrossEntropyLoss TopKMetricLoss",
    "TopK BatchTopK JumpReLU TopKMask",
    "TopK topk_mask GatherTopK Selection",
    "TokenChoice ExpertChoice route",
    "route Selection",
    "NMSparsity MagnitudeSparsity TopKMask",
    "KHotGate KHotSelector ConditionalPoisson",
    "GatherTopK topk_attention TopKMask",
    "Anneal TopK TopKMask",
    "AutoKHot KHotReparam KHotSwap",
    "subset_categorical subset_index subset_vector",
    "k_hot capped_simplex ranking",
)


def others(name: str) -> list[str]:
    """The names that the entry of a name refers to."""
    groups = [group.split() for group in GROUPS]
    return list(dict.fromkeys(other for group in groups if name in group for other in group if other != name))[:MOST]


def imports(source: str, module: str) -> list[str]:
    """The lines that import what an example uses and does not define; names without an origin raise KeyError."""
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    own = {name.id for name in names if isinstance(name.ctx, ast.Store)} | set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            own |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    needed: dict[str, list[str]] = {}
    lines = []
    for name in sorted({name.id for name in names} - own):
        if name in khot.__all__:
            needed.setdefault("khot", []).append(name)
        elif home := api_pages.home_of(name):
            needed.setdefault(home, []).append(name)
        elif name in ("torch", "math"):
            lines.append(f"import {name}")
        else:
            origin = getattr(sys.modules[module], name, None)
            if origin is None:
                raise KeyError(f"an example in {module} uses {name}")
            needed.setdefault(_origin(name, origin), []).append(name)
    return lines + [f"from {home} import {', '.join(found)}" for home, found in needed.items()]


def _origin(name: str, thing: Any) -> str:
    """The shortest module of its package that has a thing by this name."""
    parts = getattr(thing, "__module__", None) or thing.__name__.rpartition(".")[0]
    places = [".".join(parts.split(".")[: i + 1]) for i in range(parts.count(".") + 1)]
    return next(place for place in places if getattr(sys.modules[place], name, None) is thing)


def arranged(name: str, module: str, lines: list[str]) -> list[str]:
    """The lines of a docstring in the order of an entry."""
    blank = lines.index("") if "" in lines else len(lines)
    summary, rest = lines[:blank], lines[blank:]
    example: list[str] = []
    if "Example:" in rest:
        start = rest.index("Example:")
        end = next((i for i in range(start + 1, len(rest)) if rest[i] and rest[i][0] != " "), len(rest))
        example, rest = rest[start + 1 : end], rest[:start] + rest[end:]
        shown = inspect.cleandoc("\n".join(example))
        source = "".join(found.source for found in doctest.DocTestParser().get_examples(shown))
        needed = [f">>> {line}" for line in imports(source, module)]
        example = ["", ".. rubric:: Example", "", *needed, *shown.splitlines(), ""]
    picture = []
    if name in pictures.FIGURES:
        picture = ["", f".. image:: /_build/pictures/{name}.png", f"   :alt: {pictures.ALT[name]}", ""]
    besides = [f":obj:`~khot.{other}`" for other in others(name)]
    see = ["", ".. rubric:: See also", "", ", ".join(besides), ""] if besides else []
    return [*summary, *picture, *example, *rest, *see]


def with_example() -> set[str]:
    """The public names whose docstring has an example, which then shows how to import them."""
    things = {name: getattr(api_pages.module(package), name) for package, n in api_pages.names().items() for name in n}
    return {name for name, thing in things.items() if "Example:" in (inspect.getdoc(thing) or "").splitlines()}


def arrange(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    package, _, member = name.rpartition(".")
    if package in api_pages.PACKAGES and api_pages.home_of(member) == package:
        lines[:] = arranged(member, obj.__module__, lines)


def setup(app: Sphinx) -> dict[str, bool]:
    pictures.draw(Path(app.srcdir) / "_build" / "pictures")
    app.connect("autodoc-process-docstring", arrange, priority=300)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
