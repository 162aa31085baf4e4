"""Horvitz-Thompson totals and their estimated variances, exactly: by expectations over all draws."""

import pytest
import torch

from khot import Brewer, ConditionalPoisson, PhantomUnit, Sampford, horvitz_thompson
from tests.inputs import normal
from tests.registry import DESIGNS

PROBS = torch.tensor([0.5, 0.7, 0.4, 0.8, 0.6], dtype=torch.float64)
Y = normal(5, seed=3) + 10
EXACT = [case for case in DESIGNS if case.has_log_prob]


def expectation(design, y):
    """Mean of the total, its true variance, mean of the estimated variance."""
    support = design.enumerate_support()
    share = design.log_prob(support).exp()
    total, variance = horvitz_thompson(design, support, y)
    mean = share @ total
    return mean, share @ (total - mean).square(), share @ variance


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_total_is_unbiased(case):
    mean, _, _ = expectation(case.make(probs=PROBS), Y)
    torch.testing.assert_close(mean, Y.sum(), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    "design",
    [
        Sampford(probs=PROBS),
        ConditionalPoisson(logits=PROBS, k=3),
        ConditionalPoisson(logits=normal(5), k=2),
        PhantomUnit(Sampford, probs=PROBS - 0.1),
        PhantomUnit(ConditionalPoisson, probs=PROBS),
        Sampford(probs=torch.tensor([1.0, 0.0, 0.5, 0.7, 0.4, 0.4], dtype=torch.float64)),
    ],
    ids=lambda design: type(design).__name__,
)
def test_variance_is_unbiased(design):
    y = normal(design.event_shape[0], seed=3) + 10
    y = y * (design.mean > 0)
    mean, variance, estimated = expectation(design, y)
    torch.testing.assert_close(mean, y.sum())
    torch.testing.assert_close(estimated, variance)


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


def test_without_pairs_hajek_and_deville():
    """Of simple random sampling it is the exact form: n (n - k) / k times the variance in the sample."""
    design = Brewer(probs=torch.full((6,), 0.5, dtype=torch.float64))
    y = normal(6)
    value = design.sample((50,))
    _, variance = horvitz_thompson(design, value, y)
    expected = torch.stack([6 * 3 / 3 * y[row > 0].var() for row in value])
    torch.testing.assert_close(variance, expected)


def test_units_that_are_certain_have_no_variance():
    design = Brewer(probs=torch.tensor([1.0, 1.0, 0.5, 0.5], dtype=torch.float64))
    _, variance = horvitz_thompson(design, design.sample(), normal(4))
    assert variance.isnan()  # one unit says nothing
    design = Brewer(probs=torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    total, variance = horvitz_thompson(design, design.sample(), torch.tensor([1.0, 2.0, 5.0]))
    assert (total, variance) == (3.0, 0.0)


@pytest.mark.parametrize("design_class", [Sampford, Brewer])
def test_batches_are_loops(design_class):
    probs = torch.stack([PROBS, PROBS.flip(0), PROBS.roll(1)]).unsqueeze(0)
    design = design_class(probs=probs)
    value, y = design.sample((4, 2)), normal(3, 5)
    total, variance = horvitz_thompson(design, value, y)
    assert total.shape == variance.shape == (4, 2, 1, 3)
    for j in range(3):
        row = horvitz_thompson(design_class(probs=probs[0, j]), value[..., 0, j, :], y[j])
        torch.testing.assert_close((total[..., 0, j], variance[..., 0, j]), row)
    wider = horvitz_thompson(design_class(probs=PROBS), PROBS.round().clamp(max=0), normal(7, 5))
    assert wider[0].shape == (7,) and not wider[0].any()


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


def test_empty_batch():
    design = Sampford(probs=PROBS.expand(0, 5))
    assert horvitz_thompson(design, torch.zeros(2, 0, 5), torch.zeros(5))[1].shape == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, torch.ones(5), Y), TypeError, "`design` must be a khot.SamplingDesign"),
        ((Sampford(probs=PROBS), [1.0], Y), TypeError, "`value`"),
        ((Sampford(probs=PROBS), torch.ones(4), Y), ValueError, "`value` must have shape"),
        ((Sampford(probs=PROBS), torch.ones(5), 1.0), TypeError, "`y` must be a floating-point tensor"),
        ((Sampford(probs=PROBS), torch.ones(5), Y.long()), TypeError, "`y` must be a floating-point tensor"),
        ((Sampford(probs=PROBS), torch.ones(5), torch.tensor(1.0)), ValueError, "`y` must be a floating-point"),
        ((Sampford(probs=PROBS), torch.ones(5), torch.ones(1)), ValueError, "`y` must have 5 units"),
        ((Sampford(probs=PROBS), torch.ones(5), torch.ones(4)), ValueError, "`y`"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        horvitz_thompson(*arguments)
