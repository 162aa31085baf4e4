"""Every argument of everything public, given what it cannot be: an error in time, which names the argument."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import khot
from khot import constraints
from tests.inputs import normal

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
    "draws": [*TYPES, 1.5, [1.0], DRAWS[0], DRAWS[..., :4]],
    "losses": [*TYPES, 1.5, [1.0], LOSSES.long(), LOSSES[:, 0]],
    "perturbed": [*TYPES, 1.5, [1.0], LOGITS.long(), LOGITS[0], LOGITS[..., :4]],
    "baseline": [*TYPES, 1, LOSSES],
    "generator": [*TYPES, 1, torch.Generator],
    "estimator": [*TYPES, 1, DESIGN],
    "estimators": [*TYPES, 1, [khot.score_function], {"a": "b"}, khot.score_function],
    "exact": [*TYPES[:4], 1, LOGITS[0], torch.zeros(2, 5, dtype=torch.complex64)],
    "repeats": [*NUMBERS, 1.5, 0, 1],
}


@dataclass(frozen=True)
class Call:
    """Something public, with arguments that it takes and the kind of each.

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
    """What makes an object and calls it: an object that is bad has to be found out by then."""
    return lambda **kwargs: make(**kwargs)(*args, **good)


X = {"x": LOGITS}
MASK = {"x": "scores", "k": "sum", "temperature": "softness", "dim": "dim"}
SCALED = {"x": "scores", "k": "sum", "scale": "softness", "dim": "dim"}
SPARSE = {"x": "scores", "k": "sum", "strength": "softness", "p": "exponent", "dim": "dim"}
ORDER = {"x": "scores", "scale": "softness", "descending": "flag", "dim": "dim"}
PROJECTED = {"x": "scores", "strength": "softness", "dim": "dim"}
LAW = {"logits": "logits", "k": "size", "validate_args": "flag"}
RELAXED = {**LAW, "relaxation": "function", "temperature": "softness"}
GIVEN = {"logits": LOGITS, "k": 2, "validate_args": True}
LOSS = {
    "k": "sum",
    "strength": "softness",
    "p": "exponent",
    "kind": "choice",
    "reduction": "choice",
    "unbounded": "flag",
}
ENTROPY = {"p_k": "shares", "relaxation": "function", "softness": "softness", "reduction": "choice"}
FUNCTION = {"design": "design", "f": "function", "num_samples": "count"}
ON_DESIGN = {"design": DESIGN, "f": lambda x: x[..., 0]}
WRAPPER = {"design": "design", "log_prob": "scorer", "validate_args": "flag"}
ISOTONIC = {"s": "vector", "w": "vector", "solver": "choice"}


def law(make: Any, **more: str) -> Call:
    return Call(make, GIVEN, {"probs": "probs", **(LAW if more.pop("plain", None) else RELAXED), **more})


CALLS = {
    "sigmoid_topk": Call(khot.sigmoid_topk, {**X, "k": 2}, MASK),
    "log_sigmoid_topk": Call(khot.log_sigmoid_topk, {**X, "k": 2}, MASK),
    "capped_softmax": Call(khot.capped_softmax, {**X, "k": 2}, MASK),
    "rescaled_sigmoid_topk": Call(khot.rescaled_sigmoid_topk, {**X, "k": 2}, MASK),
    "successive_softmax_topk": Call(khot.successive_softmax_topk, {**X, "k": 2}, {**MASK, "k": "size"}),
    "lapsum_topk": Call(khot.lapsum_topk, {**X, "k": 2}, SCALED),
    "log_lapsum_topk": Call(khot.log_lapsum_topk, {**X, "k": 2}, SCALED),
    "normal_topk": Call(khot.normal_topk, {**X, "k": 2}, SCALED),
    "capped_simplex_map": Call(
        khot.capped_simplex_map, {**X, "k": 2, "link": khot.Logistic()}, {**SCALED, "link": "link"}
    ),
    "sparse_topk": Call(khot.sparse_topk, {**X, "k": 2}, SPARSE),
    "sparse_topk_magnitude": Call(khot.sparse_topk_magnitude, {**X, "k": 2}, SPARSE),
    "sparse_topk_signed": Call(khot.sparse_topk_signed, {**X, "k": 2}, SPARSE),
    "transport_topk": Call(
        khot.transport_topk, {**X, "k": 2}, {"x": "scores", "k": "sum", "epsilon": "softness", "dim": "dim"}
    ),
    "sorted_transport_topk": Call(
        khot.sorted_transport_topk,
        {**X, "k": 2},
        {"x": "scores", "k": "columns", "epsilon": "softness", "dim": "dim", "tol": "positive", "max_iter": "count"},
    ),
    "straight_through_topk": Call(
        khot.straight_through_topk,
        {**X, "k": 2},
        {"x": "scores", "k": "sum", "softness": "softness", "dim": "dim", "relaxation": "function"},
    ),
    "topk_mask": Call(khot.topk_mask, {**X, "k": 2}, {"x": "scores", "k": "size", "dim": "dim"}),
    "perturbed_topk": Call(
        khot.perturbed_topk,
        {**X, "k": 2},
        {"x": "scores", "k": "size", "scale": "softness", "num_samples": "count", "dim": "dim"},
    ),
    "soft_rank": Call(khot.soft_rank, X, ORDER),
    "soft_sort": Call(khot.soft_sort, X, ORDER),
    "soft_permutation": Call(khot.soft_permutation, X, ORDER),
    "permutahedron_rank": Call(khot.permutahedron_rank, X, PROJECTED),
    "permutahedron_sort": Call(khot.permutahedron_sort, X, PROJECTED),
    "permutahedron_projection": Call(
        khot.permutahedron_projection, {**X, "w": LOGITS.abs()}, {**PROJECTED, "w": "weights"}
    ),
    "isotonic_l2": Call(khot.isotonic_l2, {"s": LOGITS}, {**ISOTONIC, "max_iter": "count"}),
    "isotonic_lp": Call(
        khot.isotonic_lp,
        {"s": LOGITS, "w": LOGITS.abs(), "p": 1.5, "strength": 1.0},
        {**ISOTONIC, "p": "exponent", "strength": "softness", "kind": "choice", "max_iter": "count"},
    ),
    "Logistic": Call(khot.Logistic, {}, {}),
    "StudentT": Call(khot.StudentT, {"df": 2}, {"df": "degrees"}),
    "fenchel_young_topk_loss": Call(
        khot.fenchel_young_topk_loss, {**X, "target": TARGET, "k": 2}, {"x": "scores", "target": "target", **LOSS}
    ),
    "FenchelYoungTopKLoss": Call(
        used(khot.FenchelYoungTopKLoss, LOGITS, TARGET), {"k": 2}, LOSS, khot.FenchelYoungTopKLoss
    ),
    "topk_cross_entropy": Call(
        khot.topk_cross_entropy,
        {**X, "target": torch.tensor([0, 4]), "p_k": [0.5, 0.5]},
        {"x": "scores", "target": "classes", **ENTROPY},
    ),
    "TopKCrossEntropy": Call(
        used(khot.TopKCrossEntropy, LOGITS, torch.tensor([0, 4])), {"p_k": [0.5, 0.5]}, ENTROPY, khot.TopKCrossEntropy
    ),
    "k_hot": Call(constraints.k_hot, {"k": 2}, {"k": "ones", "upper": "ones"}),
    "capped_simplex": Call(constraints.capped_simplex, {"k": 2}, {"k": "any_sum"}),
    "ConditionalPoisson": law(khot.ConditionalPoisson, plain="yes"),
    "GumbelTopK": law(khot.GumbelTopK, plain="yes"),
    "Sampford": law(khot.Sampford),
    "Brewer": law(khot.Brewer),
    "SequentialPoisson": law(khot.SequentialPoisson),
    "SamplingDesign": law(khot.SamplingDesign),
    "Pivotal": law(khot.Pivotal, order="choice"),
    "Systematic": law(khot.Systematic, order="choice"),
    "ParetoSampling": law(khot.ParetoSampling, adjust="optional_choice"),
    "PhantomUnit": Call(
        khot.PhantomUnit,
        {"design_class": khot.Pivotal, "logits": LOGITS, "validate_args": True},
        {"design_class": "design_class", "probs": "probs", "logits": "logits", "validate_args": "flag"},
    ),
    "RelaxedKHot": Call(khot.RelaxedKHot, {**GIVEN, "temperature": 0.5}, {**RELAXED, "k": "sum"}),
    "RelaxedKHotStraightThrough": Call(khot.RelaxedKHotStraightThrough, {**GIVEN, "temperature": 0.5}, RELAXED),
    "StraightThrough": Call(khot.StraightThrough, {"design": DESIGN}, WRAPPER),
    "ReinMax": Call(
        khot.ReinMax,
        {"design": DESIGN},
        {**WRAPPER, "temperature": "softness", "relaxation": "function"},
    ),
    "PerturbedTopK": Call(
        khot.PerturbedTopK, GIVEN, {**LAW, "scale": "softness", "num_samples": "count", "log_prob": "scorer"}
    ),
    "IMLE": Call(
        khot.IMLE, GIVEN, {**LAW, "step": "step", "noise": "choice", "temperature": "softness", "log_prob": "scorer"}
    ),
    "AdaptiveStep": Call(
        khot.AdaptiveStep,
        {},
        {"initial": "positive", "increment": "positive", "target": "positive", "decay": "fraction"},
    ),
    "RaoBlackwellStraightThrough": Call(
        khot.RaoBlackwellStraightThrough,
        {**GIVEN, "temperature": 0.5},
        {**RELAXED, "num_conditional": "count", "log_prob": "scorer"},
    ),
    "MovingAverage": Call(khot.MovingAverage, {}, {"decay": "fraction"}),
    "score_function": Call(khot.score_function, ON_DESIGN, {**FUNCTION, "baseline": "baseline"}),
    "score_function_surrogate": Call(
        khot.score_function_surrogate,
        {"design": DESIGN, "value": DRAWS, "losses": LOSSES},
        {"design": "design", "value": "draws", "losses": "losses", "baseline": "baseline"},
    ),
    "unordered_set": Call(khot.unordered_set, ON_DESIGN, {**FUNCTION, "baseline": "choice"}),
    "enumerated": Call(khot.enumerated, ON_DESIGN, {**FUNCTION, "chunk_size": "count"}),
    "pathwise": Call(khot.pathwise, {**ON_DESIGN, "design": khot.StraightThrough(DESIGN)}, FUNCTION),
    "straight_through": Call(khot.straight_through, ON_DESIGN, FUNCTION),
    "reinmax": Call(khot.reinmax, ON_DESIGN, {**FUNCTION, "temperature": "softness", "relaxation": "function"}),
    "KHotReparam": Call(khot.KHotReparam, {}, {"estimator": "estimator", "temperature": "softness_of_any_shape"}),
    "compare_estimators": Call(
        khot.compare_estimators,
        {**ON_DESIGN, "num_repeats": 2, "num_samples": 2},
        {
            "design": "design",
            "f": "function",
            "estimators": "estimators",
            "num_samples": "counts",
            "num_repeats": "repeats",
            "exact": "exact",
        },
    ),
    "IMLE.from_scores": Call(khot.IMLE(LOGITS, 2).from_scores, {"scores": LOGITS}, {"scores": "perturbed"}),
    "RaoBlackwellStraightThrough.from_scores": Call(
        khot.RaoBlackwellStraightThrough(0.5, LOGITS, 2).from_scores, {"scores": LOGITS}, {"scores": "perturbed"}
    ),
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
# Of parameters that many share, so that whoever adds one need not name it again.
SHARED = {"generator": "generator"}


def parameters(case: Call) -> dict[str, inspect.Parameter]:
    named = inspect.signature(case.signature or case.call).parameters
    return {name: p for name, p in named.items() if not p.kind.name.startswith("VAR_")}


ARGUMENTS = [
    (name, argument)
    for name, case in CALLS.items()
    for argument in {**case.kinds, **{shared: "" for shared in SHARED if shared in parameters(case)}}
]


def is_legal(parameter: inspect.Parameter, value: Any) -> bool:
    return value is None and parameter.default is None


def names(error: Exception, argument: str) -> bool:
    """Whether an error is about this argument, in this library's words or in torch's for a distribution's parameter."""
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


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_wrong_arguments_are_named(name, argument):
    assert faults(CALLS[name], argument) == []


@pytest.mark.parametrize("name", CALLS)
def test_good_arguments_are_taken(name):
    """Else the errors above could be about them."""
    CALLS[name].call(**CALLS[name].good)


# A link is a class to derive from.
CALLABLE = [name for module in (khot, constraints) for name in module.__all__ if callable(getattr(module, name))]


@pytest.mark.parametrize("name", sorted({*CALLABLE} - {"Link"}))
def test_every_argument_of_everything_public_is_in_the_table(name):
    assert {*CALLS[name].kinds} == {*parameters(CALLS[name])} - {*SHARED}
