"""Every operator in every backend that runs here, against its reference, the definition."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import khot.kernels
import khot.laws
from khot.kernels import backend, registry, selection
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.order_sampling import rank_centre
from khot.kernels.order_sampling.noises import NOISES
from khot.kernels.registry import OPERATORS
from tests.inputs import normal
from tests.kernels import count_definition, isotonic_definition, transport_definition
from tests.kernels import order_definition as order
from tests.kernels import threshold_definition as simplex
from tests.kernels.device import INTERPRETED

DOUBLE = torch.float64
SEED = torch.tensor([0x123456789ABCDEF])
SPARSE = clipped_power(1.5)

for _package in (khot.kernels, khot.laws):  # all operators there are, whatever was imported before
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        if not any(library in _module.name for library in ("triton", ".gpu", "numba", ".cpu")):
            importlib.import_module(_module.name)


def rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (3, 40), sums and scales."""
    return (
        normal(3, 40, seed=seed),
        torch.tensor([2.3, 7.5, 30.0], dtype=DOUBLE),
        torch.tensor([0.3, 1.0, 2.0]).double(),
    )


def mask_gradient(kind: str) -> tuple[Any, ...]:
    x, k, scale = rows()
    at = simplex.threshold(x, k, scale, *LOGISTIC.key, kind, "scale", True)
    return x, scale, *at, normal(3, 40, seed=1), *LOGISTIC.key, kind, True


def threshold_gradient() -> tuple[Any, ...]:
    """Of thresholds that are not their anchors."""
    x, scale, anchor, offset, _, *options = mask_gradient("mask")
    return x, scale, anchor - 0.25 * scale, offset + 0.25, normal(3, seed=1), *options


def odd_gradient(kind: str, with_strength: bool = True) -> tuple[Any, ...]:
    x, k, strength = rows()
    at = simplex.threshold(x, k, strength, *SPARSE.key, kind, "strength", True)
    return x, strength, *at, normal(3, 40, seed=1), *SPARSE.key, kind, with_strength


def sorted_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Half of sorted values, half of their scale as a column, and where they came from."""
    values, places = normal(2, 12).sort(-1)
    return values / 2, torch.tensor([[0.2], [0.5]]).double(), places


def sums() -> tuple[Tensor, ...]:
    values, scale, _ = sorted_rows()
    return *order.sorted_positions(values, scale), normal(2, 12, seed=1), normal(2, 12, seed=2)


def slices(seed: int = 1) -> tuple[Any, ...]:
    values, scale, places = sorted_rows()
    z, gap = order.sorted_positions(values, scale)
    offset, anchor, below = order.soft_count_inverse(z, gap, True)
    return values, scale, places, values.gather(-1, anchor), offset, below


def transport(k: int) -> tuple[Any, ...]:
    return normal(2, 8), torch.tensor([0.2, 0.5], dtype=DOUBLE), k, 1e-13, 1000, True


def transport_gradient(k: int) -> tuple[Any, ...]:
    x, half, *_ = transport(k)
    t = OPERATORS["sorted_transport"](x, half, k, 1e-14, 1000, True)[1]
    return x, half, t, normal(2, k, 8, seed=1), True


def leaves() -> tuple[Tensor, Tensor]:
    p = normal(20, 3).sigmoid()
    return torch.stack((1 - p, p)), torch.tensor([2, 5, 6])


def law(count: int) -> tuple[Tensor, ...]:
    x = normal(6, 2, 3).abs()
    return x if count == 0 else normal(count, 3, seed=1), x


def balanced(k: Tensor) -> Tensor:
    return simplex.mask(normal(2, 9), k.double(), torch.ones(2).double(), *LOGISTIC.key, "mask", "", False, True)[0]


def ranks(n: int) -> tuple[Tensor, ...]:
    """Positions, with certain units, sizes and centres."""
    theta = normal(2, n)
    theta[1, 2], theta[1, 5] = torch.inf, -torch.inf
    return theta, SIZES, rank_centre(theta, SIZES)


def counted() -> tuple[Tensor, Tensor]:
    """Logits, some of them infinite, and counts."""
    logits = 2 * normal(4, 11)
    logits[1, 3], logits[1, 5], logits[2, 0] = torch.inf, -torch.inf, 80.0
    return logits, torch.tensor([4, 5, 1, 11])


def k_hot(logits: Tensor, k: Tensor) -> Tensor:
    return (logits.argsort(-1, descending=True).argsort(-1) < k.unsqueeze(-1)).double()


def tied_rows() -> tuple[Any, ...]:
    """Rows with ties at the threshold, infinite entries and a size each."""
    x = (2 * normal(4, 40)).round()
    x[1, 3], x[1, 5] = torch.inf, -torch.inf
    return x, torch.tensor([0, 7, 20, 40]), True


def parts() -> tuple[Tensor, Tensor]:
    """Bounds of parts of these rows: whole, without the infinite entries, short and empty."""
    return torch.tensor([0, 6, 37, 9]), torch.tensor([40, 40, 40, 9])


SIZES = torch.tensor([3, 4])
ISOTONIC = (normal(1, 33), normal(1, 33, seed=1).abs(), torch.tensor([0.5]).double())
CASES: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "threshold_mask": [
        lambda: (*rows(), *LOGISTIC.key, "mask", "scale", True, True),
        lambda: (*rows(), *LOGISTIC.key, "log_mask", "scale", True, True),
        *(lambda kind=kind: (*rows(), *SPARSE.key, kind, "s", True, True) for kind in ("mask", "signed", "magnitude")),
        lambda: (*rows(), *LOGISTIC.key, "mask", "scale", True, False),
    ],
    "threshold_mask_derivative": [
        lambda: mask_gradient("mask"),
        lambda: mask_gradient("log_mask"),
        lambda: odd_gradient("signed"),
        lambda: odd_gradient("magnitude"),
        lambda: odd_gradient("signed", with_strength=False),
        lambda: odd_gradient("magnitude", with_strength=False),
        threshold_gradient,
    ],
    "isotonic": [
        lambda: (*ISOTONIC, 2.0, False, False, 0, "s,w"),
        lambda: (*ISOTONIC, 2.0, True, False, 0, "s,w"),
        lambda: (*ISOTONIC, 1.5, True, True, 5000, "s,w"),
        lambda: (*ISOTONIC, 1.5, False, False, 0, ""),
    ],
    "sorted_positions": [lambda: sorted_rows()[:2]],
    "decayed_sums": [sums],
    "soft_count_inverse": [lambda: (*sums()[:2], False), lambda: (*sums()[:2], True)],
    "slice_weights": [lambda: (*slices(), DOUBLE)],
    "slice_weights_derivative": [lambda: (*slices()[:-1], normal(2, 12, 12, seed=3))],
    "sorted_transport": [lambda: transport(3), lambda: transport(8)],
    "sorted_transport_derivative": [lambda: transport_gradient(3), lambda: transport_gradient(8)],
    "pair_merge": [lambda: (normal(6, 2, 3).abs(), 2, 5), lambda: (normal(50, 2, 3).abs(), 0, 99)],
    "pair_split": [lambda: (normal(5, 3, seed=1), normal(6, 2, 3), 2)],
    "topk_indices": [
        lambda: (tied_rows()[0], 5, *parts(), True, -1, False),
        lambda: (normal(3, 1000).float(), 50, *selection.bounds_of(normal(3, 1000)), False, -1, True),
    ],
    "topk_mask": [tied_rows, lambda: (normal(3, 1000).float(), torch.tensor(50).expand(3), True)],
    "forest_roots": [lambda: (*leaves(), 6, 5), lambda: (*leaves(), 6, 3)],
    "forest_outsides": [lambda: (leaves()[0], normal(1, 1, 3), leaves()[1], 6, 5)],
    "forest_bends": [lambda: (leaves()[0], normal(2, 20, 3), normal(7, 3, 3), leaves()[1], 6, 3, True)],
    "order_draw": [
        *(lambda noise=noise: (*ranks(9), SEED, 3, DOUBLE, noise) for noise in NOISES),
        lambda: (*ranks(600), SEED, 2, torch.float32, "logistic"),
    ],
    "pivotal_draw": [
        lambda: (balanced(SIZES), SIZES, SEED, 3, DOUBLE),
        lambda: (normal(2, 600).sigmoid().round().float(), SIZES, SEED, 1, torch.half),
        lambda: (normal(2, 600).sigmoid().float(), torch.tensor([300, 290]), SEED, 2, torch.float32),
    ],
    "bernoulli_count_draw": [lambda: (*counted(), counted()[1], SEED, 50, torch.float32)],
}
DEFINITIONS = {
    "threshold_mask": simplex.mask,
    "threshold_mask_derivative": simplex.mask_derivative,
    "isotonic": isotonic_definition.isotonic,
    "sorted_positions": order.sorted_positions,
    "decayed_sums": order.decayed_sums,
    "soft_count_inverse": order.soft_count_inverse,
    "slice_weights": order.slice_weights,
    "slice_weights_derivative": order.slice_weights_derivative,
    "sorted_transport": transport_definition.sorted_transport,
    "sorted_transport_derivative": transport_definition.sorted_transport_derivative,
    "bernoulli_count_draw": count_definition.bernoulli_count_draw,
}  # those of other operators are their plain functions
OF_TREES = {"pair_merge", "pair_split", "forest_roots", "forest_outsides", "forest_bends"}  # of memory in their order


def runs_here(option: str) -> bool:
    """In Triton's interpreter, a process of its own, only what that is for."""
    if INTERPRETED and option != "triton":
        return False
    return registry.OBSTACLES[option](torch.device("cpu")) is None


def refusal(operator: registry.Operator, option: str, arguments: tuple[Any, ...]) -> str | None:
    _, takes = operator.backends[option]
    return takes(*operator.asks(*arguments))


SLOW = pytest.mark.slow  # to compile
CALLS = [
    pytest.param(
        name,
        make,
        partial(OPERATORS[name].load, option),
        id=f"{name}-{i}-{option}",
        marks=SLOW if option == "numba" else (),
    )
    for name, makes in CASES.items()
    for i, make in enumerate(makes)
    for option in OPERATORS[name].backends
    if runs_here(option) and refusal(OPERATORS[name], option, make()) is None
]
CALLS += [
    pytest.param(name, make, lambda name=name: OPERATORS[name].plain, id=f"{name}-{i}-torch")
    for name in ({} if INTERPRETED else DEFINITIONS)
    if name != "bernoulli_count_draw"  # plain torch draws with other random numbers, see test_product_tree
    for i, make in enumerate(CASES[name])
]


def test_every_operator_has_a_case():
    assert set(OPERATORS) == set(CASES)


def test_backends_refuse_in_words():
    for name, makes in CASES.items():
        for operator, arguments in ((OPERATORS[name], make()) for make in makes):
            reasons = [refusal(operator, option, arguments) for option in operator.backends]
            assert all(reason is None or (isinstance(reason, str) and reason) for reason in reasons)


@pytest.mark.parametrize(("name", "make", "load"), CALLS)
def test_is_what_the_reference_defines(name, make, load):
    operator, arguments = OPERATORS[name], make()
    found = load()(*arguments)
    expected = DEFINITIONS.get(name, operator.plain)(*arguments)
    if name == "threshold_mask":  # t, however it is split
        scale = arguments[2] * (expected[1] ** (1 / SPARSE.q) if arguments[5] == "magnitude" else 1)
        found, expected = ((y, anchor + offset * scale) for y, anchor, offset in (found, expected))
    elif name == "soft_count_inverse":  # the point, whichever neighbour it goes by
        z = arguments[0]
        found, expected = ((z.gather(-1, anchor) + offset, below) for offset, anchor, below in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_backends_are_forced_for_every_operation():
    with backend("torch"):
        for name, makes in CASES.items():
            operator, arguments = OPERATORS[name], makes[0]()
            assert operator.implementation(*arguments) is operator.plain


@pytest.mark.parametrize("name", [name for name in CASES if not INTERPRETED or "triton" in OPERATORS[name].backends])
def test_results_are_like_their_fakes(name):
    """What a compiler is told of shapes, dtypes and strides, whatever the strides of the arguments."""
    for make in CASES[name][: 1 if INTERPRETED else None]:
        arguments = make()
        columns = tuple(v.mT.contiguous().mT if isinstance(v, Tensor) and v.dim() > 1 else v for v in arguments)
        for given in (arguments, columns) if name not in OF_TREES else (arguments,):
            torch.library.opcheck(getattr(torch.ops.khot, name).default, given, test_utils="test_faketensor")
