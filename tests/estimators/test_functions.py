"""What every estimator function promises on every design: a matrix of which each cell works or says why not."""

import pyro.distributions as dist
import pytest
import torch

from khot import ConditionalPoisson, Sampford, enumerated
from tests.loops import for_each
from tests.registry import DESIGNS, FUNCTIONS, PHANTOM

LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6]], dtype=torch.float64)
WEIGHT = torch.tensor([0.7, -1.1, 0.2, 2.0, 0.4], dtype=torch.float64)


def recorded(f):
    """f, and the list of (values, losses) that it will have been called with."""
    calls = []

    def g(x):
        calls.append((x.detach(), f(x)))
        return calls[-1][1]

    return g, calls


def refusal(case, design_case, num_samples):
    """The error and its message if an estimator cannot work on a design; None if it must work."""
    if num_samples < case.min_samples:
        return ValueError, f"`num_samples` must be at least {case.min_samples}( with baseline=.*)?, but got"
    if case.needs_log_prob and not design_case.has_log_prob:
        return NotImplementedError, "has no log_prob; .*ConditionalPoisson.*Sampford"
    if case.needs_relaxation and design_case.name == "gumbel_topk":
        return NotImplementedError, "this GumbelTopK has none"
    return None


def quadratic(weight):
    return lambda x: ((x * weight).sum(-1) - 0.3).square() + x[..., 0] * x[..., 1]


CELLS = [(case, design, size) for size in (1, 3) for design in [*DESIGNS, PHANTOM] for case in FUNCTIONS]
every_function = for_each("case", FUNCTIONS)


@for_each("case, design_case, num_samples", [cell for cell in CELLS if refusal(*cell) is None])
def test_cell_works(case, design_case, num_samples):
    logits, weight = LOGITS.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    design = design_case.make(logits=logits, k=2)
    f, calls = recorded(quadratic(weight))
    surrogate = case.estimate(design, f, num_samples=num_samples)
    assert surrogate.shape == (2,) and surrogate.dtype == torch.float64
    values, losses = calls[0]
    assert design.support.check(values).all()
    if case.plain_mean:
        torch.testing.assert_close(surrogate, losses.mean(0))
        assert values.shape == (num_samples, 2, 5)
    for gradient in torch.autograd.grad(surrogate.sum(), (logits, weight)):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


@for_each("case, design_case, num_samples", [cell for cell in CELLS if refusal(*cell) is not None])
def test_cell_says_why_not(case, design_case, num_samples):
    error, message = refusal(case, design_case, num_samples)
    design = design_case.make(logits=LOGITS.clone().requires_grad_(), k=2)
    with pytest.raises(error, match=message):
        case.estimate(design, quadratic(WEIGHT), num_samples)


@every_function
def test_shapes_and_dtypes(case):
    for dtype in (torch.float32, torch.float64):
        for batch_shape in ((), (3,), (0,), (2, 0), (4, 1)):
            logits = torch.zeros(*batch_shape, 5, dtype=dtype, requires_grad=True)
            surrogate = case.estimate(ConditionalPoisson(logits=logits, k=2), lambda x: x[..., 0] * x[..., 1], 2)
            assert surrogate.shape == batch_shape and surrogate.dtype == dtype
            assert torch.autograd.grad(surrogate.sum(), logits)[0].shape == logits.shape
    for n, k in ((5, 0), (5, 5), (1, 0), (1, 1)):  # one vector only: no gradient, and no two distinct draws
        logits = torch.zeros(n, requires_grad=True)
        design = ConditionalPoisson(logits=logits, k=k)
        surrogate = case.estimate(design, lambda x: (x + 1).prod(-1), 1 if case.distinct else 2)
        assert surrogate.item() == 2**k and torch.autograd.grad(surrogate, logits)[0].abs().max() < 1e-6


@every_function
def test_stays_on_the_device_of_the_design(case):
    logits = LOGITS.clone().requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2)
    with torch.device("meta"):  # the default device, where whatever is created without a device has no contents
        surrogate = case.estimate(design, lambda x: x[..., 0] * x[..., 1], 2)
    assert surrogate.device == torch.autograd.grad(surrogate.sum(), logits)[0].device == LOGITS.device


@every_function
def test_declares_what_it_is(case):
    """Of 2000 estimates of the gradient for a cubic f, the mean is where it should be, or far from there."""
    assert case.public.min_samples == 1 and case.public.__name__ in case.name
    torch.manual_seed(0)
    logits = LOGITS[0].expand(2000, 5).clone().requires_grad_()
    exact = LOGITS[0].clone().requires_grad_()

    def gradient(estimate, logits):
        design = Sampford(logits=logits, k=2)
        surrogate = estimate(design, lambda x: (x @ WEIGHT - 0.3) ** 3 + 4 * x[..., 0] * x[..., 1], 2)
        return torch.autograd.grad(surrogate.sum(), logits)[0]

    estimates, expected = gradient(case.estimate, logits), gradient(enumerated, exact)
    error = (estimates.mean(0) - expected) / (estimates.std(0) / len(estimates) ** 0.5 + 1e-12)
    assert bool(error.abs().max() < 5) is case.unbiased  # in units of the standard error


@every_function
def test_errors(case):
    design = ConditionalPoisson(logits=LOGITS, k=2)
    with pytest.raises(ValueError, match=r"`f` must return one loss for each vector.*but got \(\)"):
        case.estimate(design, lambda x: x.sum(), 2)
    with pytest.raises(TypeError, match="`f` must return a floating-point tensor, but got float"):
        case.estimate(design, lambda x: 1.0, 2)
    with pytest.raises(TypeError, match="floating-point tensor, but got dtype torch.int64"):
        case.estimate(design, lambda x: x.sum(-1).long(), 2)
    if case.needs_log_prob:
        with pytest.raises(ValueError, match=r"event_shape \(n,\), but got event_shape \(\)"):
            case.estimate(dist.Categorical(logits=LOGITS), lambda x: x.float(), 2)
        one_hot = dist.OneHotCategorical(logits=LOGITS)
        assert case.estimate(one_hot, lambda x: x[..., 0], 2).shape == (2,)


READS_AGAIN = [case for case in FUNCTIONS if case.needs_log_prob]


@for_each("case", READS_AGAIN)
def test_values_that_are_read_again_must_not_change(case):
    design = ConditionalPoisson(logits=LOGITS[0].clone().requires_grad_(), k=2)
    with pytest.raises(ValueError, match="`f` must not change its argument in place"):
        case.estimate(design, lambda x: x.mul_(2).sum(-1), num_samples=3)


@for_each("case", [case for case in FUNCTIONS if case not in READS_AGAIN])
def test_pathwise_values_may_change(case):
    def gradient(f):
        logits = LOGITS[0].clone().requires_grad_()
        torch.manual_seed(0)
        return torch.autograd.grad(case.estimate(ConditionalPoisson(logits=logits, k=2), f, num_samples=3), logits)[0]

    torch.testing.assert_close(
        gradient(lambda x: (x.mul_(2) * WEIGHT).sum(-1)), gradient(lambda x: (2 * x * WEIGHT).sum(-1))
    )
