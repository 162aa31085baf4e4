"""Horvitz-Thompson totals and their estimated variances, exactly: by expectations over all draws."""

import math
import warnings

import pytest
import torch

from khot import (
    Brewer,
    ConditionalPoisson,
    GumbelTopK,
    ParetoSampling,
    PhantomUnit,
    Pivotal,
    Sampford,
    Systematic,
    horvitz_thompson,
)
from khot.distributions import totals
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS

PROBS = torch.tensor([0.5, 0.7, 0.4, 0.8, 0.6], dtype=torch.float64)
Y = normal(5, seed=3) + 10
EXACT = [case for case in DESIGNS if case.has_log_prob]


def expectation(design, y):
    """Mean of the total, its true variance, mean of the estimated variance."""
    support = design.enumerate_support()
    share = design.log_prob(support).double().exp()
    support, share = support[share > 0], share[share > 0]
    total, variance = horvitz_thompson(design, support, y)
    mean = share @ total
    return mean, share @ (total - mean).square(), share @ variance


@for_each("case", EXACT)
def test_total_is_unbiased(case):
    mean, _, _ = expectation(case.make(probs=PROBS), Y)
    torch.testing.assert_close(mean, Y.sum(), rtol=1e-7, atol=0)


@for_each(
    "design",
    [
        *(case.make(probs=PROBS) for case in EXACT if case.draws_all_pairs),
        *(case.make(logits=normal(6), k=3) for case in EXACT if case.draws_all_pairs),
        PhantomUnit(Sampford, probs=PROBS - 0.1),
        PhantomUnit(ConditionalPoisson, probs=PROBS),
        PhantomUnit(Brewer, probs=PROBS - 0.1),
        Sampford(probs=torch.tensor([1.0, 0.0, 0.5, 0.7, 0.4, 0.4], dtype=torch.float64)),
    ],
)
def test_variance_is_unbiased(design):
    y = normal(design.event_shape[0], seed=3) + 10
    y = y * (design.mean > 0)
    mean, variance, estimated = expectation(design, y)
    torch.testing.assert_close(mean, y.sum())
    torch.testing.assert_close(estimated, variance)


@for_each("case", [c for c in EXACT if not c.has_pairwise_at_any_size])
def test_variance_is_unbiased_by_enumerated_pairs_in_float32(case):
    mean, variance, estimated = expectation(case.make(probs=PROBS.float()), Y)
    torch.testing.assert_close(mean, Y.sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(estimated, variance, rtol=1e-4, atol=0)


def test_is_the_sum_over_pairs():
    design = Sampford(probs=PROBS)
    value, pairs = design.sample((4,)), design.pairwise_inclusion
    _, variance = horvitz_thompson(design, value, Y)
    for row, v in zip(value, variance, strict=True):
        drawn, expected = row.nonzero().flatten().tolist(), 0.0
        for i in drawn:
            for j in drawn[: drawn.index(i)]:
                weight = PROBS[i] * PROBS[j] / pairs[i, j] - 1
                expected = expected + weight * (Y[i] / PROBS[i] - Y[j] / PROBS[j]) ** 2
        torch.testing.assert_close(v, expected)


@pytest.mark.filterwarnings("ignore:horvitz_thompson approximates")
def test_without_pairs_hajek_and_deville():
    """For simple random sampling it has the textbook form: n (n - k) / k times the variance in the sample."""
    design = Pivotal(probs=torch.full((6,), 0.5, dtype=torch.float64))
    y = normal(6)
    value = design.sample((50,))
    _, variance = horvitz_thompson(design, value, y)
    expected = torch.stack([6 * 3 / 3 * y[row > 0].var() for row in value])
    torch.testing.assert_close(variance, expected)


@pytest.mark.filterwarnings("ignore:horvitz_thompson approximates")
@for_each("design_class", [Pivotal, Brewer])
def test_units_that_are_certain_have_no_variance(design_class):
    design = Pivotal(probs=torch.tensor([1.0, 1.0, 0.5, 0.5], dtype=torch.float64))
    _, variance = horvitz_thompson(design, design.sample(), normal(4))
    assert variance.isnan()  # one unit says nothing
    design = design_class(probs=torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    total, variance = horvitz_thompson(design, design.sample(), torch.tensor([1.0, 2.0, 5.0]))
    assert (total, variance) == (3.0, 0.0)


@for_each("design_class", [Sampford, Brewer])
def test_batches_are_loops(design_class):
    probs = torch.stack([PROBS, PROBS.flip(0), PROBS.roll(1)]).unsqueeze(0)
    design = design_class(probs=probs)
    value, y = design.sample((4, 2)), normal(3, 5)
    total, variance = horvitz_thompson(design, value, y)
    assert total.shape == variance.shape == (4, 2, 1, 3)
    for j in range(3):
        row = horvitz_thompson(design_class(probs=probs[0, j]), value[..., 0, j, :], y[j])
        torch.testing.assert_close((total[..., 0, j], variance[..., 0, j]), row)
    single, of_many = design_class(probs=PROBS), normal(7, 5)
    wider = horvitz_thompson(single, value[0, 0, 0, 0], of_many)
    apart = [horvitz_thompson(single, value[0, 0, 0, 0], row) for row in of_many]
    torch.testing.assert_close(wider, tuple(map(torch.stack, zip(*apart, strict=True))))


def test_gradient_and_dtype():
    design = Sampford(probs=PROBS.float())
    y = Y.float().requires_grad_()
    value = design.sample((3,))
    total, variance = horvitz_thompson(design, value, y)
    assert total.dtype == variance.dtype == torch.float32
    (grad,) = torch.autograd.grad(total.sum(), y, retain_graph=True)
    torch.testing.assert_close(grad, (value / PROBS.float()).sum(0))
    assert torch.autograd.grad(variance.sum(), y)[0].isfinite().all()
    (double,) = {v.dtype for v in horvitz_thompson(design, value, Y)}
    assert double == torch.float64
    for dtype in (torch.bool, torch.uint8, torch.int64):  # of the values that log_prob takes
        torch.testing.assert_close(horvitz_thompson(design, value.to(dtype), y), (total, variance), rtol=0, atol=0)


def test_empty_batch():
    design = Sampford(probs=PROBS.expand(0, 5))
    assert horvitz_thompson(design, torch.zeros(2, 0, 5), torch.zeros(5))[1].shape == (2, 0)


@for_each(
    "arguments, error, message",
    [
        ((Sampford(probs=PROBS), torch.ones(4), Y), ValueError, "`value` must have shape"),
        (
            (Sampford(probs=PROBS), torch.ones(5), torch.ones(1)),
            ValueError,
            "`y` must be.*one entry for each of the 5 units.*may be NaN",
        ),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        horvitz_thompson(*arguments)


IMPOSSIBLE = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5], [1, 2, -1, 0]])
OF_FOUR = torch.tensor([0.8, 0.2, 0.6, 0.4], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:horvitz_thompson approximates")
@for_each("case", DESIGNS)
def test_values_that_no_design_draws(case):
    design, y = case.make(probs=OF_FOUR, validate_args=True), torch.tensor([3.0, 1.0, 2.0, 5.0])
    for value in IMPOSSIBLE[1:]:
        for values in (value, torch.stack((IMPOSSIBLE[0], value))):
            with pytest.raises(ValueError, match="`value` must contain vectors that `design` can.*design, value, y"):
                horvitz_thompson(design, values, y)
    with pytest.raises(ValueError, match="`value`.*an entry 3.0, which is not in its support k_hot.2."):
        horvitz_thompson(design, y, IMPOSSIBLE[0])
    design = case.make(probs=torch.tensor([1.0, 0.0, 0.6, 0.4]), validate_args=True)
    for value, message in (([1.0, 1, 0, 0], "one with unit 1"), ([0.0, 0, 1, 1], "one without unit 0")):
        with pytest.raises(ValueError, match=f"`value` .*{message}, whose inclusion probability is"):
            horvitz_thompson(design, torch.tensor(value), y)
    total, _ = horvitz_thompson(case.make(probs=OF_FOUR, validate_args=False), IMPOSSIBLE[1], y)
    assert total.isfinite()


def test_values_that_a_design_in_order_does_not_draw():
    design = Systematic(probs=torch.full((4,), 0.5), validate_args=True)
    with pytest.raises(ValueError, match="one of probability 0"):
        horvitz_thompson(design, torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.ones(4))


@pytest.mark.filterwarnings("ignore:horvitz_thompson approximates")
@for_each("case", DESIGNS)
def test_sizes_of_rows_are_checked(case):
    arguments, y = {"logits": torch.zeros(2, 4), "k": torch.tensor([1, 2])}, torch.ones(4)
    value = torch.tensor([[1.0, 0, 0, 0], [1, 0, 1, 0]])
    horvitz_thompson(case.make(**arguments, validate_args=True), value, y)
    horvitz_thompson(case.make(**arguments, validate_args=False), value.flip(0), y)
    with pytest.raises(ValueError, match="`value` must contain vectors that `design` can draw"):
        horvitz_thompson(case.make(**arguments, validate_args=True), value.flip(0), y)


def test_sizes_of_a_phantom_unit_are_checked():
    design = PhantomUnit(Brewer, probs=OF_FOUR - 0.1, validate_args=True)
    horvitz_thompson(design, torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]]), torch.ones(4))
    for value in (torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 0.0])):
        with pytest.raises(ValueError, match="`value` must contain vectors"):
            horvitz_thompson(design, value, torch.ones(4))


def test_units_that_were_not_drawn_may_be_missing():
    design, value = Sampford(probs=PROBS), torch.tensor([1.0, 0, 1, 0, 1])
    expected = horvitz_thompson(design, value, Y)
    y = Y.masked_fill(value == 0, math.nan).requires_grad_()
    found = horvitz_thompson(design, value, y)
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(sum(found), y)
    assert grad.isfinite().all()


@pytest.mark.parametrize("design_class", [Brewer, ParetoSampling, GumbelTopK])
def test_variance_is_approximated_where_subsets_are_too_many(design_class, monkeypatch):
    """With many units the two are close; with few, who calls is warned once."""
    probs = torch.full((12,), 0.25, dtype=torch.float64) + 0.02 * normal(12, seed=2)
    design = design_class(probs=probs + (3 - probs.sum()) / 12)
    value, y = design.sample((20,)), normal(12) + 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, exact = horvitz_thompson(design, value, y)
    monkeypatch.setattr("khot.distributions.design.MAX_SUPPORT", math.comb(12, 3) - 1)
    totals._warn_of_few_units.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"{design_class.__name__}.*30 units") as caught:
        _, approximate = horvitz_thompson(design, value, y)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        horvitz_thompson(design, value, y)
    torch.testing.assert_close(approximate, exact, rtol=0.05, atol=0)


@pytest.mark.filterwarnings("ignore:horvitz_thompson approximates")
@for_each("case", DESIGNS)
def test_one_random_unit_tells_nothing_of_the_variance(case):
    """Beside certain units or alone, of any design and of its phantom design; without any, the variance is 0."""
    y = torch.tensor([30.0, 2.0, 5.0, 40.0], dtype=torch.float64)
    beside, alone = torch.tensor([1.0, 0.2, 0.3, 0.5]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    for probs, value in ((beside, [1.0, 0, 0, 1]), (alone, [0.0, 0, 1, 0])):
        _, variance = horvitz_thompson(case.make(probs=probs), torch.tensor(value).double(), y)
        assert variance.isnan()
    settings = getattr(case.make, "keywords", {})
    below_one = PhantomUnit(case.public, probs=alone / 2, **settings)
    values = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 0]]).double()
    assert horvitz_thompson(below_one, values, y)[1].isnan().all()
    _, variance = horvitz_thompson(
        case.make(probs=torch.tensor([1.0, 0, 0, 1]).double()), torch.tensor([1.0, 0, 0, 1]).double(), y
    )
    assert variance == 0
