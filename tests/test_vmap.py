"""Designs and estimators inside torch.vmap and other transforms, with validation on: the results are those of a loop.

Where something is drawn, both get the same numbers: ``randomness="same"`` and a generator of the same seed.
"""

import pytest
import torch
from torch.distributions import kl_divergence
from torch.func import grad, jacfwd, jacrev, vmap

from khot import (
    ConditionalPoisson,
    PhantomUnit,
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    Sampford,
    Systematic,
    enumerated,
    perturbed_topk,
    sigmoid_topk,
)
from khot.distributions import SamplingDesign
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, PERTURBED

LOGITS = torch.tensor(
    [[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6], [0.0, 0.3, -0.4, 2.5, 1.0]], dtype=torch.float64
)
PROBS = sigmoid_topk(LOGITS, 2)
WEIGHTS = torch.tensor([0.7, -1.1, 0.2, 2.0, 0.4], dtype=torch.float64)
GIVEN = {"logits": LOGITS, "probs": PROBS}
STATELESS = [case for case in PERTURBED if case.name != "imle_adaptive"]
SCORED = [case for case in DESIGNS if case.has_log_prob]
CLOSE = {"rtol": 1e-7, "atol": 1e-9}  # inside of a vmap the quadratures take another number of nodes
every_design = pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
# The others see nothing of logits but the inclusion probabilities that they give.
every_parameter = pytest.mark.parametrize(
    ("case", "given"),
    [(case, name) for case in DESIGNS for name in GIVEN if name == "probs" or not case.takes_relaxation],
    ids=lambda value: getattr(value, "name", value),
)


def check(function, *rows):
    """``function`` of each row, mapped and in a loop, and its gradient if it is a number."""
    functions = [function]
    if function(*(row[0] for row in rows)).dim() == 0:
        functions.append(grad(function))
    for function in functions:
        expected = torch.stack([function(*row) for row in zip(*rows, strict=True)])
        torch.testing.assert_close(vmap(function, randomness="same")(*rows), expected, **CLOSE)


def seeded():
    return torch.Generator().manual_seed(3)


@every_parameter
def test_what_a_design_computes(case, given):
    def make(row):
        return case.make(**{given: row}, k=2, validate_args=True)

    rows, value = GIVEN[given], make(GIVEN[given]).sample()
    check(lambda row: make(row).mean, rows)
    check(lambda row: make(row).variance @ WEIGHTS, rows)
    if case.has_log_prob:
        check(lambda row, x: make(row).log_prob(x), rows, value)
        check(lambda row: make(row).mode, rows)
    if case.has_entropy:
        check(lambda row: make(row).entropy(), rows)
    if case.has_pairwise:
        check(lambda row: WEIGHTS @ make(row).pairwise_inclusion @ WEIGHTS, rows)


@pytest.mark.parametrize("given", GIVEN)
@every_design
def test_draws(case, given):
    check(lambda row: case.make(**{given: row}, k=2, validate_args=True).sample((4,), generator=seeded()), GIVEN[given])
    check(lambda row: case.make(**{given: row}, k=2).sample_indices((4,), generator=seeded()), GIVEN[given])


@every_design
def test_sizes_that_differ(case):
    k = torch.tensor([1, 4, 2])

    def make(row, k):
        return case.make(logits=row, k=k, validate_args=True)

    value = make(LOGITS, k).sample()
    check(lambda row, k: make(row, k).mean @ WEIGHTS, LOGITS, k)
    check(lambda row, k: make(row, k).sample((4,), generator=seeded()).sum(-1) - k, LOGITS, k)
    if case.has_log_prob:
        check(lambda row, k, x: make(row, k).log_prob(x), LOGITS, k, value)


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd])
@pytest.mark.parametrize("case", [case for case in SCORED if case.has_entropy], ids=lambda case: case.name)
def test_transforms_that_only_differentiate_read_sizes(case, transform):
    """The size of a design made from probabilities alone is a sum of tensors that such a transform wraps."""

    def entropy(row):
        design = case.make(probs=sigmoid_topk(row, 2))
        assert len(design.enumerate_support()) == 10
        assert enumerated(design, lambda x: x.sum(-1)).item() == pytest.approx(2)
        return design.entropy()

    expected = torch.autograd.functional.jacobian(entropy, LOGITS[0])
    torch.testing.assert_close(transform(entropy)(LOGITS[0]), expected)


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd])
def test_transforms_that_only_differentiate_read_phantom_sizes(transform):
    def loss(row):
        return enumerated(PhantomUnit(Sampford, logits=row), lambda x: x @ WEIGHTS)

    torch.testing.assert_close(transform(loss)(LOGITS[0]), torch.autograd.functional.jacobian(loss, LOGITS[0]))


@pytest.mark.parametrize("method", ["sample_indices", "enumerate_support"])
def test_shapes_that_depend_on_contents_are_refused(method):
    with pytest.raises(NotImplementedError, match=f"{method} needs `k` as an int"):
        vmap(lambda row: getattr(ConditionalPoisson(probs=row), method)())(PROBS)
    with pytest.raises(NotImplementedError, match=f"{method} needs the sizes, which are unknown under vmap"):
        vmap(lambda row: getattr(PhantomUnit(Sampford, probs=row), method)())(PROBS)


@every_parameter
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda case: case.name)
def test_gradients_per_sample(case, given, estimator):
    if estimator.name == "reinmax" and given == "probs" and case.name != "conditional_poisson":
        given = "logits"  # ReinMax has to know the relaxation

    def loss(row):
        design = case.make(**{given: row}, k=2, validate_args=True)
        value = estimator.wrap(design, validate_args=True).rsample((3,), generator=seeded())
        return ((value @ WEIGHTS) ** 2).sum()

    check(loss, GIVEN[given])


@pytest.mark.parametrize("case", STATELESS, ids=lambda case: case.name)
def test_gradients_per_sample_of_perturbed_scores(case):
    def loss(row):
        return ((case.make(logits=row, k=2, validate_args=True).rsample((3,), generator=seeded()) @ WEIGHTS) ** 2).sum()

    check(loss, LOGITS)


def test_a_step_that_adapts_is_refused():
    case = next(case for case in PERTURBED if case.name == "imle_adaptive")
    with pytest.raises(NotImplementedError, match="a vmap cannot change the state of an AdaptiveStep"):
        vmap(grad(lambda row: case.make(logits=row, k=2).rsample() @ WEIGHTS), randomness="different")(LOGITS)


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
@pytest.mark.parametrize("design", [Systematic, Sampford])
def test_functions(case, design):
    def estimate(row):
        return case.estimate(design(logits=row, k=2), lambda x: (x @ WEIGHTS).square(), 4, generator=seeded())

    check(estimate, LOGITS)


@pytest.mark.parametrize("relaxed", [RelaxedKHot, RelaxedKHotStraightThrough])
def test_relaxed(relaxed):
    def make(row):
        return relaxed(0.5, logits=row, k=2, validate_args=True)

    value = make(LOGITS).sample()
    check(lambda row: (make(row).rsample((3,), generator=seeded()) @ WEIGHTS).square().sum(), LOGITS)
    check(lambda row: make(row).log_prob(make(row).rsample(generator=seeded())), LOGITS)
    if relaxed is RelaxedKHot:
        check(lambda row, y: make(row).log_prob(y), LOGITS, value)


@pytest.mark.slow
def test_phantom_unit():
    def make(row):
        return PhantomUnit(ConditionalPoisson, logits=row, validate_args=True)

    value = make(LOGITS).sample()
    check(lambda row: make(row).mean @ WEIGHTS, LOGITS)
    check(lambda row: make(row).entropy(), LOGITS)
    check(lambda row, x: make(row).log_prob(x), LOGITS, value)
    check(lambda row: make(row).sample((3,), generator=seeded()), LOGITS)
    check(lambda row: kl_divergence(make(row), make(0.5 * row)), LOGITS)


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
def test_divergences(case):
    def divergence(row):
        return kl_divergence(case.make(logits=row, k=2), ConditionalPoisson(logits=WEIGHTS * row, k=2))

    check(divergence, LOGITS)


def test_perturbed_topk():
    check(lambda row: perturbed_topk(row, 2, num_samples=5, generator=seeded()) @ WEIGHTS, LOGITS)


def test_checks_of_this_library_do_not_look_inside():
    """Contents that they refuse outside."""
    wrong = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.8, 0.7]])
    with pytest.raises(ValueError, match="sum"):
        SamplingDesign(probs=wrong)
    vmap(lambda row: SamplingDesign(probs=row, validate_args=True).mean)(wrong)


@pytest.mark.needs_torch("2.8")  # earlier, torch does not look inside either
def test_checks_of_torch_look_inside():
    wrong = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.8, 0.7]])
    with pytest.raises(ValueError, match="probs"):
        vmap(lambda row: SamplingDesign(probs=row, validate_args=True).mean)(wrong + 1)
