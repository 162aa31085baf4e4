"""What every pathwise estimator promises on every design, and two wrappers that break it."""

import copy
import pickle
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

from khot import ConditionalPoisson, StraightThrough
from tests import gof
from tests.loops import for_each
from tests.maps import applies, only_for
from tests.registry import DESIGNS, ESTIMATORS

LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.7, -1.1, 0.2, 2.0, 0.4], dtype=torch.float64)


def check_draws_are_those_of_the_design(case, design_case):
    for dtype in (torch.float32, torch.float64):
        design = design_case.make(logits=LOGITS.to(dtype).requires_grad_(), k=2)
        estimator = case.wrap(design)
        assert estimator.has_rsample and estimator.batch_shape == (2,) and estimator.event_shape == (5,)
        torch.manual_seed(0)
        value = estimator.rsample((30,))
        torch.manual_seed(0)
        assert torch.equal(value, design.sample((30,))) and value.dtype == dtype  # to the bit, in spite of the gradient
        gof.check_k_hot(value.detach(), 2)
        assert estimator.support.check(value).all() and value.requires_grad and not estimator.sample().requires_grad
    torch.testing.assert_close(estimator.mean, design.mean)


@only_for(lambda case, design_case: case.exact_for_linear)
def check_linear_functions_get_the_exact_gradient(case, design_case):
    logits = LOGITS.clone().requires_grad_()
    design = design_case.make(logits=logits, k=2)
    (exact,) = torch.autograd.grad((design.mean @ WEIGHTS).sum(), logits)
    for seed in range(3):
        torch.manual_seed(seed)
        estimate = case.wrap(design_case.make(logits=logits, k=2)).rsample((4,)) @ WEIGHTS
        (gradient,) = torch.autograd.grad(estimate.sum(-1).mean(), logits)
        torch.testing.assert_close(gradient, exact)


def check_constants_get_no_gradient(case, design_case):
    logits = LOGITS.clone().requires_grad_()
    value = case.wrap(design_case.make(logits=logits, k=2)).rsample()
    (gradient,) = torch.autograd.grad(3.0 * value.sum(), logits)  # the sum of a k-hot vector is constant
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def check_limits_of_k(case, design_case):
    for k in (0, 5):
        logits = LOGITS.clone().requires_grad_()
        value = case.wrap(design_case.make(logits=logits, k=k)).rsample()
        (gradient,) = torch.autograd.grad((value * WEIGHTS).sum(), logits)
        assert torch.equal(value.detach(), torch.full_like(value, float(k == 5)))
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def check_expand_and_copies(case, design_case):
    estimator = case.wrap(design_case.make(logits=LOGITS, k=2))
    expanded = estimator.expand((3, 2))
    assert type(expanded) is type(estimator) and expanded.rsample((4,)).shape == (4, 3, 2, 5)
    assert estimator.to_event(1).rsample().shape == (2, 5) and estimator.to_event(1).event_shape == (2, 5)
    for twin in (copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
        torch.testing.assert_close(twin.mean, estimator.mean)


def check_score(case, design_case):
    design = design_case.make(logits=LOGITS, k=2)
    other, value = ConditionalPoisson(probs=design.mean), design.sample((3,))
    if design_case.has_log_prob:
        torch.testing.assert_close(case.wrap(design).log_prob(value), design.log_prob(value))
    else:
        with pytest.raises(
            NotImplementedError, match=r"log_prob=ConditionalPoisson\(probs=design.mean\).*log_prob='none'"
        ):
            case.wrap(design).log_prob(value)
    torch.testing.assert_close(case.wrap(design, log_prob=other).log_prob(value), other.log_prob(value))
    torch.testing.assert_close(
        case.wrap(design, log_prob=other).expand((4, 2)).log_prob(value[:1]), other.log_prob(value[:1]).expand(4, 2)
    )
    assert torch.equal(case.wrap(design, log_prob="none").log_prob(value), torch.zeros(3, 2).double())
    for wrong, error in ((ConditionalPoisson(logits=LOGITS[0], k=2), ValueError), ("all", TypeError), (3, TypeError)):
        with pytest.raises(error, match="`log_prob` must"):
            case.wrap(design, log_prob=wrong)
    with pytest.raises(TypeError, match="`design` must be"):
        case.wrap(dist.Normal(0, 1))
    with pytest.raises(ValueError, match="support"):
        case.wrap(design, log_prob=other, validate_args=True).log_prob(torch.full((5,), 0.4).double())


@only_for(lambda case, design_case: (ESTIMATORS.index(case) + DESIGNS.index(design_case)) % len(ESTIMATORS) == 0)
def check_trains_under_elbos(case, design_case):
    """A loss linear in x, whose best subset is known: both ELBOs find it."""
    for elbo in (
        Trace_ELBO(num_particles=4, vectorize_particles=True),
        TraceMeanField_ELBO(num_particles=4, vectorize_particles=True),
    ):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)

        def model():
            x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(5, dtype=torch.float64), k=2))
            pyro.factor("gain", 10 * x @ WEIGHTS)

        def guide():
            logits = pyro.param("logits", lambda: torch.zeros(5, dtype=torch.float64))
            design = design_case.make(logits=logits, k=2)
            scorer = None if design_case.has_log_prob else ConditionalPoisson(probs=design.mean)
            pyro.sample("x", case.wrap(design, log_prob=scorer))

        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.5}), elbo)
        for _ in range(30):
            svi.step()
        best = design_case.make(logits=pyro.param("logits").detach(), k=2).mean.topk(2).indices
        assert set(best.tolist()) == {0, 3}
    pyro.clear_param_store()


SLOW = {check_trains_under_elbos}
CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
CELLS = [
    pytest.param(
        case,
        design_case,
        check,
        marks=[pytest.mark.slow] if check in SLOW else [],
        id=f"{case.name}-{design_case.name}-{check.__name__.removeprefix('check_')}",
    )
    for case in ESTIMATORS
    for design_case in DESIGNS
    for check in CHECKS
    if applies(check, case, design_case)
]


@pytest.mark.parametrize(("case", "design_case", "check"), CELLS)
def test_contract(case, design_case, check):
    check(case, design_case)


class SoftForward(StraightThrough):
    """Returns the inclusion probabilities themselves."""

    def rsample(self, sample_shape=()):
        return self.design.mean.expand(self._extended_shape(sample_shape))


class SelfWeighted(StraightThrough):
    """Passes the gradient on only through the items drawn."""

    def rsample(self, sample_shape=()):
        value, mean = self.design.sample(sample_shape), self.design.mean
        return value + value * (mean - mean.detach())


@for_each(
    "wrong, check",
    [(SoftForward, check_draws_are_those_of_the_design), (SelfWeighted, check_linear_functions_get_the_exact_gradient)],
)
def test_contract_rejects(wrong, check):
    with pytest.raises(AssertionError):
        check(replace(ESTIMATORS[0], wrap=wrong), DESIGNS[0])
