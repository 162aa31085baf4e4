"""Every argument of everything public, with invalid values: an early error names the argument."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pyro.infer import NUTS
from torch.distributions import biject_to, transform_to

import khot
from khot import constraints, nn
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import ODD_MAPS, RELAXATIONS, publics
from tests.modules import MODULES
from tests.registry import CONSTRAINTS, DESIGNS, ESTIMATORS, FUNCTIONS, RELAXED

LOGITS, TARGET = normal(2, 5), khot.topk_mask(normal(2, 5, seed=1), 2)
DESIGN = khot.ConditionalPoisson(logits=LOGITS, k=2)
DRAWS, LOSSES = DESIGN.sample((3,)), normal(3, 2)

TYPES = [object(), "wrong", None, 1j, {1: 2}, torch.zeros(2, 5, dtype=torch.complex64)]
NUMBERS = [*TYPES, True, [1.0], torch.tensor(True)]  # what is no number
SOFTNESS = [0.0, -1.0, math.nan, math.inf, torch.tensor(-1.0), torch.tensor(math.nan), torch.ones(7)]
WRONG: dict[str, list[Any]] = {
    "scores": [*TYPES, 1.5, [1.0], LOGITS.long(), LOGITS > 0, torch.tensor(1.0), LOGITS * math.nan],
    "values": [*TYPES, 1.5, [1.0], LOGITS[..., :3]],
    "weights": [*TYPES, 1.5, [1.0], LOGITS[..., :3], LOGITS * math.nan],
    "vector": [*TYPES, 1.5, [1.0]],
    "points": [*NUMBERS, math.nan, math.inf, torch.tensor(math.nan), LOGITS.long(), LOGITS[:1], LOGITS * math.nan],
    "levels": [*NUMBERS, 0.0, 1.0, -0.1, math.nan, torch.tensor(1.0), LOGITS[:1].sigmoid(), LOGITS],
    "probs": [*TYPES, 1.5, [1.0], LOGITS.long(), torch.tensor(1.0), LOGITS, LOGITS * math.nan],
    "logits": [*TYPES, 1.5, [1.0], LOGITS.long(), torch.tensor(1.0), LOGITS * math.nan],
    "softness": [*NUMBERS, *SOFTNESS],
    "sum": [*NUMBERS, -1, 6, math.nan, torch.tensor(-1.0), torch.tensor(6.0), torch.tensor([1, 2, 3])],
    "size": [*NUMBERS, 1.5, -1, 6, torch.tensor(1.5), torch.tensor(-1), torch.tensor(6), torch.tensor([1, 2, 3])],
    "ones": [*NUMBERS, 1.5, -1, torch.tensor(1.5)],  # of a constraint, which knows no n
    "any_sum": [*NUMBERS, -1, math.nan, math.inf],
    "columns": [*NUMBERS, 1.5, -1, 6, torch.tensor(2)],
    "exponent": [*NUMBERS, 1.0, 2.5, math.nan, torch.tensor([1.5, 2.0])],
    "fraction": [*NUMBERS, -0.1, 1.0, math.nan, torch.tensor([0.5, 0.6])],
    "share": [*NUMBERS, -0.1, 1.1, math.nan, torch.tensor([0.5, 0.6])],
    "not_negative": [*NUMBERS, -1.0, math.nan, math.inf],
    "positive": [*NUMBERS, 0.0, -1.0, math.nan, math.inf],
    "count": [*NUMBERS, 1.5, 0, -1, torch.tensor([1, 2])],
    "degrees": [*NUMBERS, 2.0, 0, 3, -1, torch.tensor(2)],
    "counts": [*NUMBERS, 1.5, 0, -1, [1.5], ["wrong"], [0]],
    "dim": [*NUMBERS, 1.5, 2, -3, torch.tensor([0, 1])],
    "flag": [*TYPES, 1, 0.0, [True], torch.tensor([True, False])],
    "choice": [*TYPES, 1, ["mask"], "Mask"],
    "optional_choice": [*TYPES[:2], *TYPES[3:], 1, ["mask"], "Mask"],
    "function": [*TYPES, 1, [], torch.zeros(2)],
    "link": [*TYPES, 1, torch.sigmoid, khot.Logistic],
    "design": [*TYPES, 1, LOGITS, khot.ConditionalPoisson],
    "scorer": [*TYPES, 1, LOGITS, khot.ConditionalPoisson, "None"],
    "design_class": [*TYPES, 1, DESIGN, torch.Tensor, khot.ConditionalPoisson.sample],
    "softness_of_any_shape": [*NUMBERS, *SOFTNESS[:-1]],
    "step": [*NUMBERS, *SOFTNESS, khot.AdaptiveStep],
    "target": [*TYPES, 1.5, [1.0], TARGET[0], TARGET * math.nan, TARGET * 2],
    "classes": [*TYPES, 1, [0, 1], torch.tensor([0.0, 1.0]), torch.tensor([0, 5]), torch.tensor([0, 1, 2])],
    "shares": [*TYPES, 1.5, "ab", [], [-1.0, 2.0], [0.0], [math.nan], [None], torch.ones(6), torch.tensor([True])],
    "relevance": [*TYPES, 1.5, [1.0], TARGET[0], TARGET * math.nan, TARGET * math.inf, -TARGET],
    "discounts": [*TYPES, 1.5, [1.0], "NDCG", *map(torch.tensor, ([1.0], [0.5, 1.0], [0.5, -0.5], [0.0, 0.0], [2, 1]))],
    "features": [*TYPES, 1.5, [1.0], LOGITS.long(), LOGITS[0], LOGITS[..., :3], LOGITS * math.nan],
    "labels": [*TYPES, 1, [0, 1], torch.tensor([0.0, 1.0]), torch.tensor([0, 1, 2])],
    "neighbours": [*NUMBERS, -1, 6, math.nan, torch.tensor(-1.0), torch.tensor(6.0), torch.tensor([1, 2, 3])],
    "draws": [*TYPES, 1.5, [1.0], DRAWS[0], DRAWS[..., :4]],
    "losses": [*TYPES, 1.5, [1.0], LOSSES.long(), LOSSES[:, 0]],
    "perturbed": [*TYPES, 1.5, [1.0], LOGITS.long(), LOGITS[0], LOGITS[..., :4]],
    "baseline": [*TYPES, 1, LOSSES],
    "generator": [*TYPES, 1, torch.Generator],
    "estimator": [*TYPES, 1, DESIGN],
    "estimator_or_none": [*(value for value in TYPES if value is not None), 1, DESIGN],
    "kernel_class": [*TYPES, 1, DESIGN, NUTS(lambda: None)],
    "estimators": [*TYPES, 1, [khot.score_function], {"a": "b"}, khot.score_function],
    "exact": [*TYPES[:4], 1, LOGITS[0], torch.zeros(2, 5, dtype=torch.complex64)],
    "repeats": [*NUMBERS, 1.5, 0, 1],
    "k_hot": [*TYPES, 1.5, [1.0], torch.tensor(1.0), TARGET / 2, TARGET * math.nan],
    "number": [*NUMBERS, 1.5, -1, 10, torch.tensor(1.5), torch.tensor([0, 10])],
    "units": [*NUMBERS, 1.5, 0, -1, torch.tensor([1, 2])],
    "dtype": [*TYPES, 1, float, torch.long, torch.bool],
    "dtype_of_indices": [*TYPES, 1, float, torch.double, torch.bool],
    "places": [*NUMBERS, 1.5, -1, torch.tensor(2)],
    "fill": [*NUMBERS, 1.5, torch.tensor(2), 2**63],
    "bounds": [*(value for value in NUMBERS if value is not None), 1, torch.tensor(1.5), torch.tensor([1, 2, 3])],
}


@dataclass(frozen=True)
class Call:
    """A public function or class, with valid arguments and the kind of each.

    Attributes:
        call: Called with the good arguments, one of which is replaced.
        good: The arguments that have to be given, and those on which others depend.
        kinds: Of each parameter, whose name in the signature it is.
        signature: What has the signature, if not ``call``.
    """

    call: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, str]
    signature: Any = None


def used(make: Callable[..., Any], *args: Any, **good: Any) -> Callable[..., Any]:
    """Constructs an object and calls it; a bad object must raise an error by then."""
    return lambda **kwargs: make(**kwargs)(*args, **good)


# What kind of argument a name means, wherever it stands; a member of a registry may be added without a word here.
KINDS = {
    "x": "scores",
    "k": "sum",
    **dict.fromkeys(("temperature", "scale", "strength", "epsilon", "softness"), "softness"),
    "p": "exponent",
    "dim": "dim",
    "descending": "flag",
    "unbounded": "flag",
    "validate_args": "flag",
    "kind": "choice",
    "order": "choice",
    "noise": "choice",
    "solver": "choice",
    "reduction": "choice",
    "adjust": "optional_choice",
    "link": "link",
    "df": "degrees",
    "relaxation": "function",
    "f": "function",
    "logits": "logits",
    "probs": "probs",
    "design": "design",
    "log_prob": "scorer",
    "step": "step",
    "p_k": "shares",
    **dict.fromkeys(("num_samples", "chunk_size", "max_iter"), "count"),
    "tol": "positive",
    "decay": "fraction",
    "dtype": "dtype",
    "design_class": "design_class",
    "baseline": "baseline",
    "relevance": "relevance",
    "metric": "discounts",
    "gain": "choice",
}
# Of parameters that many share, so that whoever adds one need not name it again.
SHARED = {"generator": "generator"}


def named_parameters(signature: Any) -> dict[str, inspect.Parameter]:
    named = inspect.signature(signature).parameters
    return {name: p for name, p in named.items() if not p.kind.name.startswith("VAR_")}


def call(public: Any, good: dict[str, Any], use: Callable[..., Any] | None = None, **special: str) -> Call:
    """The kinds of all arguments by name, except the special ones."""
    kinds = {name: special.get(name) or KINDS[name] for name in named_parameters(public) if name not in SHARED}
    return Call(use or public, good, kinds, public)


X, GIVEN = {"x": LOGITS}, {"logits": LOGITS, "k": 2, "validate_args": True}
ON_DESIGN = {"design": DESIGN, "f": lambda x: x[..., 0]}
CLASSES = torch.tensor([0, 4])
CALLS = {public.__name__: call(public, {**X, "k": 2}) for public in publics(RELAXATIONS, ODD_MAPS)}
CALLS |= {public.__name__: call(public, GIVEN, k="size") for public in publics(DESIGNS)}
CALLS |= {public.__name__: call(public, {"design": DESIGN}) for public in publics(ESTIMATORS)}
CALLS |= {public.__name__: call(public, {**GIVEN, "temperature": 0.5}) for public in publics(RELAXED)}
CALLS |= {public.__name__: call(public, ON_DESIGN) for public in publics(FUNCTIONS)}
CALLS |= {
    "topk_threshold": call(khot.topk_threshold, {**X, "k": 2}),
    "straight_through_value": call(
        khot.straight_through_value, {"hard": TARGET, "soft": LOGITS}, hard="vector", soft="values"
    ),
    "horvitz_thompson": call(
        khot.horvitz_thompson, {"design": DESIGN, "value": DRAWS, "y": LOGITS}, value="vector", y="values"
    ),
    "successive_softmax_topk": call(khot.successive_softmax_topk, {**X, "k": 2}, k="size"),
    "capped_simplex_map": call(khot.capped_simplex_map, {**X, "k": 2, "link": khot.Logistic()}),
    "sorted_transport_topk": call(khot.sorted_transport_topk, {**X, "k": 2}, k="columns"),
    "straight_through_topk": call(khot.straight_through_topk, {**X, "k": 2}),
    "topk_mask": call(khot.topk_mask, {**X, "k": 2}, k="size"),
    "topk_indices": call(
        khot.topk_indices,
        {**X, "k": 2},
        k="places",
        starts="bounds",
        lengths="bounds",
        fill="fill",
        dtype="dtype_of_indices",
    ),
    "perturbed_topk": call(khot.perturbed_topk, {**X, "k": 2}, k="size"),
    "soft_rank": call(khot.soft_rank, X),
    "soft_sort": call(khot.soft_sort, X),
    "soft_permutation": call(khot.soft_permutation, X),
    "soft_count": call(khot.soft_count, {**X, "points": LOGITS}, points="points"),
    "soft_quantile": call(khot.soft_quantile, {**X, "q": LOGITS.sigmoid()}, q="levels"),
    "permutahedron_rank": call(khot.permutahedron_rank, X),
    "permutahedron_sort": call(khot.permutahedron_sort, X),
    "permutahedron_projection": call(khot.permutahedron_projection, {**X, "w": LOGITS.abs()}, w="weights"),
    "isotonic_l2": call(khot.isotonic_l2, {"s": LOGITS}, s="vector", w="vector"),
    "isotonic_lp": call(
        khot.isotonic_lp, {"s": LOGITS, "w": LOGITS.abs(), "p": 1.5, "strength": 1.0}, s="vector", w="vector"
    ),
    "Logistic": call(khot.Logistic, {}),
    "fenchel_young_topk_loss": call(khot.fenchel_young_topk_loss, {**X, "target": TARGET, "k": 2}, target="target"),
    "FenchelYoungTopKLoss": call(nn.FenchelYoungTopKLoss, {"k": 2}, used(nn.FenchelYoungTopKLoss, LOGITS, TARGET)),
    "topk_cross_entropy": call(khot.topk_cross_entropy, {**X, "target": CLASSES, "p_k": [0.5, 0.5]}, target="classes"),
    "TopKCrossEntropyLoss": call(
        nn.TopKCrossEntropyLoss, {"p_k": [0.5, 0.5]}, used(nn.TopKCrossEntropyLoss, LOGITS, CLASSES)
    ),
    "topk_metric_loss": call(khot.topk_metric_loss, {**X, "relevance": TARGET, "k": 2}, k="count"),
    "TopKMetricLoss": call(nn.TopKMetricLoss, {"k": 2}, used(nn.TopKMetricLoss, LOGITS, TARGET), k="count"),
    "knn_loss": call(
        khot.knn_loss,
        {"query": LOGITS, "keys": LOGITS, "query_labels": CLASSES, "key_labels": CLASSES, "k": 1, "softness": 1.0},
        query="features",
        keys="features",
        query_labels="labels",
        key_labels="labels",
        k="neighbours",
    ),
    "k_hot": call(constraints.k_hot, {"k": 2}, k="ones", upper="ones"),
    "capped_simplex": call(constraints.capped_simplex, {"k": 2}, k="any_sum"),
    "ranking": call(constraints.ranking, {"n": 5, "k": 2}, n="units", k="ones"),
    "PlackettLuce": call(khot.PlackettLuce, GIVEN, k="size"),
    "SamplingDesign": call(khot.SamplingDesign, GIVEN, k="size"),
    "PhantomUnit": call(khot.PhantomUnit, {"design_class": khot.Pivotal, "logits": LOGITS, "validate_args": True}),
    "RelaxedKHotStraightThrough": call(khot.RelaxedKHotStraightThrough, {**GIVEN, "temperature": 0.5}, k="size"),
    "PerturbedTopK": call(khot.PerturbedTopK, GIVEN, k="size"),
    "IMLE": call(khot.IMLE, GIVEN, k="size"),
    "AdaptiveStep": call(khot.AdaptiveStep, {}, initial="positive", increment="positive", target="positive"),
    "MovingAverage": call(khot.MovingAverage, {}),
    "score_function_surrogate": call(
        khot.score_function_surrogate,
        {"design": DESIGN, "value": DRAWS, "losses": LOSSES},
        value="draws",
        losses="losses",
    ),
    "unordered_set": call(khot.unordered_set, ON_DESIGN, baseline="choice"),
    "pathwise": call(khot.pathwise, {**ON_DESIGN, "design": khot.StraightThrough(DESIGN)}),
    "AutoKHot": call(
        khot.AutoKHot,
        {"model": lambda: None},
        model="function",
        estimator="estimator_or_none",
        init_scale="not_negative",
        create_plates="function",
    ),
    "KHotSwap": call(
        khot.KHotSwap,
        {"model": lambda: None},
        model="function",
        continuous="kernel_class",
        uniform_share="share",
        swaps_per_step="count",
        swaps_per_proposal="count",
        chains="count",
    ),
    "KHotReparam": call(khot.KHotReparam, {}, estimator="estimator", temperature="softness_of_any_shape"),
    "subset_categorical": call(khot.subset_categorical, {"design": DESIGN}),
    "subset_index": call(khot.subset_index, {"value": TARGET}, value="k_hot"),
    "subset_vector": call(
        khot.subset_vector, {"index": torch.tensor([3, 4]), "n": 5, "k": 2}, index="number", n="units", k="size"
    ),
    "compare_estimators": call(
        khot.compare_estimators,
        {**ON_DESIGN, "num_repeats": 2, "num_samples": 2},
        estimators="estimators",
        num_samples="counts",
        num_repeats="repeats",
        exact="exact",
    ),
    "IMLE.from_scores": Call(khot.IMLE(LOGITS, 2).from_scores, {"scores": LOGITS}, {"scores": "perturbed"}),
    "RelaxedKHot.from_scores": Call(
        khot.RelaxedKHot(0.5, LOGITS, 2).from_scores, {"scores": LOGITS}, {"scores": "perturbed"}
    ),
    "StraightThrough.attach_gradient": Call(
        khot.StraightThrough(DESIGN).attach_gradient, {"value": TARGET}, {"value": "values"}
    ),
    "ReinMax.attach_gradient": Call(khot.ReinMax(DESIGN).attach_gradient, {"value": TARGET}, {"value": "values"}),
    "PerturbedTopK.attach_gradient": Call(
        khot.PerturbedTopK(LOGITS, 2).attach_gradient, {"value": TARGET}, {"value": "values"}
    ),
}


def parameters(case: Call) -> dict[str, inspect.Parameter]:
    return named_parameters(case.signature or case.call)


def kinds_of(case: Call) -> dict[str, str]:
    """Of all arguments that the table has."""
    return {**case.kinds, **{name: kind for name, kind in SHARED.items() if name in parameters(case)}}


def is_legal(parameter: inspect.Parameter, value: Any) -> bool:
    return value is None and parameter.default is None


def names(error: Exception, argument: str) -> bool:
    """Whether an error is about this argument, in khot's words or in torch's words for a distribution's parameter."""
    return f"`{argument}`" in str(error) or str(error).startswith(f"Expected parameter {argument} (")


def faults(case: Call, argument: str) -> list[str]:
    """The wrong values that are taken, or refused without a word about the argument."""
    parameter, kind = parameters(case)[argument], case.kinds.get(argument) or SHARED[argument]
    found = []
    for value in WRONG[kind]:
        if is_legal(parameter, value):
            continue
        good = {name: given for name, given in case.good.items() if {name, argument} != {"logits", "probs"}}
        try:
            case.call(**{**good, argument: value})
        except (TypeError, ValueError) as error:
            if not names(error, argument):
                found.append(f"{value!r:.60}: {type(error).__name__}: {error!s:.90}")
        except Exception as error:
            found.append(f"{value!r:.60}: {type(error).__name__}: {error!s:.90}")
        else:
            found.append(f"{value!r:.60}: no error")
    return found


@for_each("name", CALLS)
def test_wrong_arguments_are_named(name):
    for argument in kinds_of(CALLS[name]):
        assert faults(CALLS[name], argument) == [], argument


# ---- Tensors that are sparse or nested, or have a dtype for storage

ROWS = torch.linspace(-1.0, 1.0, 10).view(2, 5)
LAYOUTS = {
    "coo": (ROWS.to_sparse, "to_dense"),
    "csr": (ROWS.to_sparse_csr, "to_dense"),
    "jagged": (lambda: torch.nested.nested_tensor([ROWS[0], ROWS[1, :3]], layout=torch.jagged), "to_padded_tensor"),
    "nested": (lambda: torch.nested.nested_tensor([ROWS[0], ROWS[1, :3]]), "to_padded_tensor"),
    "float8": (lambda: ROWS.to(torch.float8_e4m3fn), "float8_e4m3fn"),
}
TENSORS = {"scores", "values", "weights", "vector", "points", "levels", "probs", "logits", "softness", "sum", "size"}
TENSORS |= {"ones", "any_sum", "target", "shares", "relevance", "discounts", "features", "k_hot", "number", "perturbed"}
OF_LAWS = {case.name: case.make(logits=ROWS, k=2).log_prob for case in DESIGNS}
OF_LAWS |= {case.name: case.wrap(DESIGN).log_prob for case in ESTIMATORS}
OF_LAWS |= {case.public.__name__: case.public(0.5, logits=ROWS, k=2).log_prob for case in RELAXED}
OF_LAWS |= {case.public.__name__: case.make(2).check for case in CONSTRAINTS}
TRANSFORMS = [make(constraints.capped_simplex(2)) for make in (transform_to, biject_to)]


def check_layouts(call: Callable[..., Any], argument: str, layouts: Any = ("coo", "nested", "float8")) -> None:
    for layout in layouts:
        make, cure = LAYOUTS[layout]
        with pytest.raises(TypeError, match=f"`{argument}` must .*{cure}"):
            call(make())


@pytest.mark.filterwarnings("ignore")
@for_each("name", CALLS)
def test_layouts_are_named_with_the_cure(name):
    case = CALLS[name]
    of_integers = {"size"} if name.islower() else set()  # of which maps say that they must be integers
    for argument in (argument for argument, kind in case.kinds.items() if kind in TENSORS - of_integers):
        good = {key: given for key, given in case.good.items() if {key, argument} != {"logits", "probs"}}
        check_layouts(lambda z, argument=argument, good=good: case.call(**{**good, argument: z}), argument)


@pytest.mark.filterwarnings("ignore")
def test_layouts_of_values_and_of_what_modules_take():
    check_layouts(lambda z: khot.sigmoid_topk(z, 2), "x", LAYOUTS)
    for call in OF_LAWS.values():
        check_layouts(call, "value")
    for transform in TRANSFORMS:
        check_layouts(transform.inv, "y")
    check_layouts(TRANSFORMS[0], "x")
    check_layouts(TRANSFORMS[1], "u")
    check_layouts(lambda z: khot.ConditionalPoisson(logits=ROWS, k=(z, 3)), r"k\[0\]")
    check_layouts(lambda z: khot.ConditionalPoisson(logits=ROWS, k=(1, 5, z)), r"k\[2\]")
    for module in MODULES:
        check_layouts(lambda z, module=module: module.call(module.make(), z), "(x|weight)")
    check_layouts(lambda z: nn.TopK(2, softness=0.5)(ROWS, z), "k")
    check_layouts(lambda z: nn.ExpertChoice(2, softness=0.5)(ROWS, z), "capacity")
    check_layouts(lambda z: nn.KHotGate(5, 2)(ROWS, z), "k")
    check_layouts(nn.JumpReLU, "threshold")
    check_layouts(lambda z: nn.NMSparsity(2, 4, softness=0.5, scores=z), "scores")


def test_the_padding_that_is_named_excludes_entries_of_scores_only():
    nested = LAYOUTS["nested"][0]()
    with pytest.raises(TypeError, match=r"to_padded_tensor\(logits, -torch.inf\), which excludes"):
        khot.Pivotal(logits=nested, k=2)
    with pytest.raises(TypeError, match=r"to_padded_tensor\(probs, 0.0\)$"):
        khot.Pivotal(probs=nested)


def softness_of(case: Call) -> list[str]:
    """What a function that has the keyword ``dim`` calls its softness."""
    return [name for name, kind in case.kinds.items() if kind == "softness" and "dim" in parameters(case)]


@for_each("name", [name for name, case in CALLS.items() if softness_of(case)])
def test_an_axis_in_the_place_of_the_softness(name):
    """Users of torch.topk have it there: docstrings say that ``dim`` is a keyword, and so do errors."""
    case = CALLS[name]
    (softness,) = softness_of(case)
    for axis in (-1, 0, -2, -1.0, np.int64(-1)):
        with pytest.raises(ValueError, match=f"`{softness}` must be .* the axis is the keyword `dim`, as in dim=-1"):
            case.call(**{**case.good, softness: axis})
    with pytest.raises(ValueError) as error:
        case.call(**{**case.good, softness: np.inf})
    assert "dim" not in str(error.value)
    place = ("first", "second", "third")[[*parameters(case)].index(softness)]
    first_line = inspect.getdoc(case.call).splitlines()[0]
    assert first_line.endswith(f"({place} argument: ``{softness}``; ``dim`` by keyword).")


def test_an_axis_in_the_place_of_the_softness_of_a_threshold_that_has_none():
    with pytest.raises(ValueError, match="the axis is the keyword `dim`"):
        khot.topk_threshold(LOGITS, 2, 0, relaxation=khot.topk_mask)


@pytest.mark.parametrize("name", ["fenchel_young_topk_loss", "topk_cross_entropy", "isotonic_lp"])
def test_no_axis_is_named_where_there_is_none(name):
    case = CALLS[name]
    softness = next(name for name in parameters(case) if {**SHARED, **case.kinds}.get(name) == "softness")
    with pytest.raises(ValueError, match=f"`{softness}` must be positive and finite, but got -1$"):
        case.call(**{**case.good, softness: -1})


@for_each("name", CALLS)
def test_good_arguments_are_taken(name):
    """Otherwise the errors above could be about them."""
    CALLS[name].call(**CALLS[name].good)


# A link is a class to derive from.
CALLABLE = [name for module in (khot, constraints) for name in module.__all__ if callable(getattr(module, name))]


def test_every_argument_of_everything_public_is_in_the_table():
    for name in {*CALLABLE} - {"Link"}:
        assert {*CALLS[name].kinds} == {*parameters(CALLS[name])} - {*SHARED}, name


def numbers_among(case: Call) -> dict[str, int | float]:
    """The arguments of the good call that are numbers, and defaults that are."""
    defaults = {name: p.default for name, p in parameters(case).items()}
    return {name: value for name, value in {**defaults, **case.good}.items() if type(value) in (int, float)}


def numpy_kinds(value: int | float) -> tuple[type, ...]:
    """NumPy's types of numbers; in the narrow ones products overflow."""
    if type(value) is float:
        return np.float64, np.float32
    return np.int64, np.uint8 if 0 <= value < 256 else np.int32


@for_each("name", CALLS)
def test_numbers_of_numpy_are_numbers(name):
    case = CALLS[name]

    def result(**changed):
        torch.manual_seed(0)
        return case.call(**{**case.good, **changed})

    expected = result()
    for argument, value in numbers_among(case).items():
        for kind in numpy_kinds(value):
            found = result(**{argument: kind(value)})
            if isinstance(found, torch.Tensor):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
