"""compare_estimators reports what theory says about estimators whose law is known."""

import itertools
import math
import sys
from functools import partial

import pytest
import torch

from khot import (
    ConditionalPoisson,
    MovingAverage,
    PhantomUnit,
    Pivotal,
    Sampford,
    compare_estimators,
    enumerated,
    score_function,
    straight_through,
)
from khot.diagnostics import Comparison
from tests import gof
from tests.estimators.enumeration import tuples

LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1], dtype=torch.float64)
WEIGHT = torch.tensor([0.3, 1.0, -0.5, 2.0], dtype=torch.float64)


def linear(x):
    return x @ WEIGHT


def curved(x):
    return (x @ WEIGHT - 1).square()


@pytest.mark.slow
def test_default_estimators_on_a_linear_loss():
    torch.manual_seed(0)
    comparison = compare_estimators(ConditionalPoisson(logits=LOGITS, k=2), linear, num_samples=(1, 2), num_repeats=20)
    assert not LOGITS.requires_grad
    rows = {(row.estimator, row.num_samples): row for row in comparison.rows}
    unbiased = {"straight_through", "score_function", "leave_one_out", "unordered_set"}
    assert {name for name, _ in rows} == {"reinmax", *unbiased}
    assert ("leave_one_out", 1) not in rows and "leave_one_out on ConditionalPoisson with num" in comparison.skipped[0]
    for num_samples in (1, 2):
        row = rows["straight_through", num_samples]
        assert row.bias < 1e-12 and row.variance < 1e-24 and row.cosine == pytest.approx(1)
    assert all(row.seconds > 0 for row in rows.values())
    assert all(row.bias <= 5.5 * row.bias_error + 1e-12 for (name, _), row in rows.items() if name in unbiased)


@pytest.mark.parametrize("num_samples", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_moments_of_the_score_function(num_samples):
    """The law of the mean of loss times score is known: each moment is within gof.Z_LIMIT standard errors."""
    torch.manual_seed(0)
    repeats, design = 400, ConditionalPoisson(logits=LOGITS, k=2)
    (row,) = compare_estimators(design, linear, {"score": score_function}, num_samples, repeats).rows
    values, weight = tuples(design, num_samples)
    estimates = (linear(values)[..., None] * (values - design.mean)).mean(0)
    mean = weight @ estimates
    distance = (estimates - mean).square().sum(-1)
    cosine = torch.cosine_similarity(estimates, mean[None], dim=-1)
    for found, law in ((row.variance, distance), (row.cosine, cosine)):
        expected = weight @ law
        error = (weight @ (law - expected).square() / repeats).sqrt()
        assert abs(found - expected) <= gof.Z_LIMIT * error
    assert row.bias_error == pytest.approx(math.sqrt(row.variance / repeats))
    assert row.bias <= gof.Z_LIMIT * row.bias_error
    signal = row.signal_to_noise * math.sqrt(row.variance)
    assert abs(signal - mean.norm().item()) <= row.bias * (1 + 1e-9)  # both are lengths to the mean of the estimates
    assert row.bias > 0.1 * row.bias_error


def halved(design, f, num_samples):
    return enumerated(design, f) / 2


def test_bias_is_measured():
    logits = LOGITS.clone().requires_grad_()
    designs = {"poisson": ConditionalPoisson(logits=logits, k=2), "sampford": Sampford(logits=logits, k=2)}
    comparison = compare_estimators(designs, curved, {"halved": halved, "exact": enumerated}, 1, num_repeats=3)
    for row in comparison.rows:
        (exact,) = torch.autograd.grad(enumerated(designs[row.design], curved), logits, retain_graph=True)
        assert row.bias == pytest.approx(exact.norm().item() / 2 if row.estimator == "halved" else 0, abs=1e-12)
        assert row.cosine == pytest.approx(1) and row.variance < 1e-24
    assert [row.design for row in comparison.rows] == ["poisson", "poisson", "sampford", "sampford"]


@pytest.mark.parametrize("make", [ConditionalPoisson, Sampford])
def test_probabilities_are_compared_where_their_sum_stays(make):
    """Given probs, straight-through is exact for a linear loss up to a constant, which no feasible change sees."""
    probs = torch.tensor([0.3, 0.9, 0.2, 0.6], dtype=torch.float64)
    (row,) = compare_estimators(make(probs=probs), linear, {"st": straight_through}, 1, num_repeats=2).rows
    assert row.bias < 1e-9
    phantom = PhantomUnit(make, probs=torch.tensor([0.3, 0.9, 0.2, 0.3], dtype=torch.float64))
    (row,) = compare_estimators(phantom, linear, {"st": straight_through}, 1, num_repeats=2).rows
    assert row.bias < 1e-9


@pytest.mark.parametrize("phantom", [False, True])
def test_moments_of_given_gradients(phantom):
    """For known estimates: their unbiased variance, and the mean cosine of those that are not 0."""
    probs = torch.tensor([0.3, 0.9, 0.2, 0.6], dtype=torch.float64)
    design = PhantomUnit(ConditionalPoisson, probs=probs) if phantom else ConditionalPoisson(probs=probs)
    lengths = itertools.cycle([1.0, 3.0, 0.0])  # also of the first call, which is not measured

    def known(design, f, num_samples):
        return next(lengths) * (design.probs @ WEIGHT)

    (row,) = compare_estimators(design, linear, {"known": known}, 1, num_repeats=3, exact=WEIGHT).rows
    direction = WEIGHT if phantom else WEIGHT - WEIGHT.mean()  # the sum of the probabilities of a design is fixed
    length = direction.norm().item()
    assert row.bias == pytest.approx(length / 3)  # of the mean 4/3 to 1
    assert row.variance == pytest.approx(7 / 3 * length**2)
    assert row.cosine == pytest.approx(1) and row.signal_to_noise == pytest.approx(4 / 3 / math.sqrt(7 / 3))


def test_exact_gradients_may_be_given():
    logits = LOGITS.clone().requires_grad_()
    design = Pivotal(logits=logits, k=2)
    (exact,) = torch.autograd.grad(design.mean @ WEIGHT, logits)
    for given in (exact, {"Pivotal": exact}):
        second_order, row = compare_estimators(design, linear, num_samples=1, num_repeats=2, exact=given).rows
        assert second_order.estimator == "reinmax"
        assert row.estimator == "straight_through" and row.bias < 1e-12
    with pytest.raises(NotImplementedError, match="Pivotal has no log_prob.*Pass the exact gradient as `exact`"):
        compare_estimators(design, linear)
    with pytest.raises(ValueError, match=r"`exact` must have the shape of the design's parameter, \(4,\)"):
        compare_estimators(design, linear, exact=exact[:2])


def test_batches_baselines_and_computed_parameters():
    scores = torch.stack((LOGITS, -LOGITS)).requires_grad_()
    design = ConditionalPoisson(logits=2 * scores, k=2)
    with_memory = partial(score_function, baseline=MovingAverage())
    comparison = compare_estimators(design, curved, {"moving average": with_memory}, [4], num_repeats=30)
    assert comparison.rows[0].num_samples == 4 and comparison.rows[0].bias < 6 * comparison.rows[0].bias_error


@pytest.mark.parametrize("weight", [torch.ones(4), torch.ones(4, requires_grad=True)], ids=["", "learned"])
def test_a_loss_without_a_gradient_leaves_the_estimators_that_need_none(weight):
    design = ConditionalPoisson(logits=torch.tensor([0.0, 1.0, -1.0, 0.5]), k=2)
    comparison = compare_estimators(design, lambda x: (x.detach() * weight).square().sum(-1), None, 2, 2)
    assert [row.estimator for row in comparison.rows] == ["leave_one_out", "score_function", "unordered_set"]
    assert [line.partition(": ")[0] for line in comparison.skipped] == [
        f"{name} on ConditionalPoisson with num_samples=2" for name in ("reinmax", "straight_through")
    ]
    assert all("its result has no gradient" in line for line in comparison.skipped)


def test_gradients_are_measured_where_they_are_off():
    design = ConditionalPoisson(logits=torch.tensor([0.0, 1.0, -1.0, 0.5]), k=2)
    with torch.no_grad():
        comparison = compare_estimators(design, lambda x: x[..., 0], None, 2, 2)
    assert len(comparison.rows) == 5


def test_table_and_figure():
    design = ConditionalPoisson(logits=LOGITS, k=2)
    comparison = compare_estimators(design, curved, num_samples=(1, 2), num_repeats=3)
    lines = str(comparison).splitlines()
    assert lines[0].split()[2:] == ["samples", "bias", "±", "s.e.", "variance", "cosine", "signal/noise", "ms/call"]
    assert len(lines) == 1 + 9 + 1 and len({len(line) for line in lines[:-1]}) == 1
    assert lines[-1].startswith("skipped: leave_one_out on ConditionalPoisson with num_samples=1: `num_samples` must")
    figure = comparison.plot()
    assert [len(axes.lines) for axes in figure.axes] == [10, 5, 5, 5]  # five estimators, and errors of the bias


def test_errors():
    design = ConditionalPoisson(logits=LOGITS, k=2)
    with pytest.raises(ValueError, match="`num_repeats` must be at least 2, but got 1"):
        compare_estimators(design, linear, num_repeats=1)
    with pytest.raises(TypeError, match=r"`design` must be a khot.distributions.SamplingDesign, but got Tensor"):
        compare_estimators(LOGITS, linear)
    with pytest.raises(ValueError, match="nothing to compare:\nscore on ConditionalPoisson with num_samples=0"):
        compare_estimators(design, linear, {"score": score_function}, num_samples=0)
    with pytest.raises(NotImplementedError, match=r"C\(40, 20\).*Pass the exact gradient as `exact`"):
        compare_estimators(ConditionalPoisson(logits=torch.zeros(40), k=20), linear)
    with pytest.raises(ValueError, match="`f` must return one loss for each vector"):
        compare_estimators(design, lambda x: x)


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # what an import then finds missing
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        Comparison([], []).plot()
