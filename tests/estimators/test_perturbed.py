"""The wrappers of perturbed scores: what all of them promise, and each gradient against its definition."""

import copy
import math
import pickle
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from scipy import stats

from khot import (
    IMLE,
    AdaptiveStep,
    ConditionalPoisson,
    PerturbedTopK,
    Pivotal,
    pathwise,
    perturbed_topk,
    sigmoid_topk,
    topk_mask,
)
from khot.estimators.perturbation import GAMMA_TERMS, sum_of_gamma_noise
from tests import gof
from tests.loops import for_each
from tests.registry import PERTURBED, PerturbedCase

LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.7, -1.1, 0.2, 2.0, 0.4], dtype=torch.float64)

every_case = pytest.mark.parametrize("case", PERTURBED, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def check_mean(draws, expected):
    """The mean of independent draws along the first dimension, at level 1e-6."""
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - expected).abs() <= gof.Z_LIMIT * error + 1e-12).all()


@every_case
def test_draws_are_hard_and_reproducible(case):
    for dtype in (torch.float32, torch.float64):
        estimator = case.make(logits=LOGITS.to(dtype).requires_grad_(), k=2)
        assert estimator.has_rsample and estimator.batch_shape == (2,) and estimator.event_shape == (5,)
        torch.manual_seed(0)
        value = estimator.rsample((30,))
        torch.manual_seed(0)
        assert torch.equal(value, estimator.sample((30,))) and value.dtype == dtype
        gof.check_k_hot(value.detach(), 2)
        assert value.requires_grad and estimator.support.check(value).all() and not estimator.sample().requires_grad
    assert torch.equal(estimator.mode, topk_mask(LOGITS, 2))
    with pytest.raises(NotImplementedError, match="estimate them from draws"):
        _ = estimator.mean


@every_case
@for_each("k", [0, 5, torch.tensor([0, 3]), torch.tensor([5, 1])])
def test_sizes(case, k):
    logits = LOGITS.clone().requires_grad_()
    x = case.make(logits=logits, k=k).rsample((7,))
    gof.check_k_hot(x.detach(), k)
    (gradient,) = torch.autograd.grad((x @ WEIGHTS).square().sum(), logits)
    fixed = (torch.as_tensor(k).expand(2) % 5 == 0)[:, None].expand(2, 5)
    assert gradient.isfinite().all() and not gradient[fixed].any()


@every_case
def test_excluded_and_included_units(case):
    logits = torch.tensor([-torch.inf, 0.3, torch.inf, 100.0, -2.0], requires_grad=True)
    x = case.make(logits=logits, k=3).rsample((20,))
    assert not x[:, 0].any() and x[:, 2].all()
    (gradient,) = torch.autograd.grad((x @ WEIGHTS.float()).square().sum(), logits)
    assert gradient.isfinite().all() and gradient[0] == 0 and gradient[2] == 0
    with pytest.raises(ValueError, match="`k` must lie between"):
        case.make(logits=logits, k=5)


@every_case
def test_constants_get_no_gradient(case):
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(3.0 * case.make(logits=logits, k=2).rsample((5,)).sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@every_case
def test_expand_and_copies(case):
    estimator = case.make(logits=LOGITS, k=2)
    expanded = estimator.expand((3, 2))
    assert type(expanded) is type(estimator) and expanded.rsample((4,)).shape == (4, 3, 2, 5)
    assert estimator.to_event(1).rsample().shape == (2, 5)
    for twin in (copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
        assert torch.equal(twin.mode, estimator.mode)


@every_case
def test_score(case):
    value = ConditionalPoisson(logits=LOGITS, k=2).sample((3,))
    scorer = ConditionalPoisson(logits=2 * LOGITS, k=2)
    for method, arguments in (("log_prob", (value,)), ("entropy", ())):
        cure = r"perturbed scores is not known.*ConditionalPoisson\(logits=logits, k=k\).*log_prob='none'"
        with pytest.raises(NotImplementedError, match=f"the {method} of the top k of {cure}"):
            getattr(case.make(logits=LOGITS, k=2), method)(*arguments)
    torch.testing.assert_close(case.make(logits=LOGITS, k=2, log_prob=scorer).log_prob(value), scorer.log_prob(value))
    assert not case.make(logits=LOGITS, k=2, log_prob="none").log_prob(value).any()
    with pytest.raises(ValueError, match="`log_prob` must have the shape"):
        case.make(logits=LOGITS[0], k=2, log_prob=scorer)


@every_case
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.slow
def test_trains_under_elbos(case, elbo):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)

    def model():
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(5, dtype=torch.float64), k=2))
        pyro.factor("gain", 10 * x @ WEIGHTS)

    def guide():
        logits = pyro.param("logits", lambda: torch.zeros(5, dtype=torch.float64))
        scorer = ConditionalPoisson(logits=logits, k=2)
        pyro.sample("x", case.make(logits=logits, k=2, log_prob=scorer))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.3}), elbo(num_particles=4, vectorize_particles=True))
    for _ in range(30):
        svi.step()
    assert set(pyro.param("logits").topk(2).indices.tolist()) == {0, 3}
    pyro.clear_param_store()


class SoftForward(IMLE):
    """Returns the relaxed vectors themselves."""

    def rsample(self, sample_shape=()):
        scores = self.design.perturb(self._extended_shape(sample_shape))
        return sigmoid_topk(scores + (self.design.logits - self.design.logits.detach()), 2, 0.5)


class SelfWeighted(IMLE):
    """Passes the gradient on only through the drawn items."""

    def rsample(self, sample_shape=()):
        value, logits = self.design.sample(sample_shape), self.design.logits
        return value + value * (logits - logits.detach())


@for_each(
    "make, check",
    [
        (SoftForward, test_draws_are_hard_and_reproducible),
        (SelfWeighted, test_constants_get_no_gradient),
        (lambda **kwargs: IMLE(**{**kwargs, "k": 2}), partial(test_sizes, k=torch.tensor([5, 1]))),
    ],
)
def test_wrong_members_are_rejected(make, check):
    with pytest.raises(AssertionError):
        check(case=PerturbedCase("wrong", make))


def test_perturbed_topk_by_its_definition():
    logits, cotangent = LOGITS.clone().requires_grad_(), torch.randn(2, 5, dtype=torch.float64)
    torch.manual_seed(0)
    y = perturbed_topk(logits, 2, 0.7, num_samples=9)
    torch.manual_seed(0)
    noise = torch.randn(9, 2, 5, dtype=torch.float64)
    drawn = topk_mask(LOGITS + 0.7 * noise, 2)
    torch.testing.assert_close(y, drawn.mean(0))
    gain = ((drawn - topk_mask(LOGITS, 2)) * cotangent).sum(-1)
    expected = torch.einsum("mb,mbi->bi", gain, noise) / (9 * 0.7)
    torch.testing.assert_close(torch.autograd.grad(y, logits, cotangent)[0], expected)
    torch.manual_seed(0)
    torch.testing.assert_close(
        perturbed_topk(LOGITS.T, 2, 0.7, num_samples=9, dim=0).sum(0), torch.full((2,), 2.0).double()
    )


@for_each("face", ["map", "distribution"])
def test_perturbed_topk_is_unbiased_where_the_mean_is_known(face):
    """Of two units with normal noise one wins with probability Phi(difference / (sigma sqrt 2))."""
    logits, scale = torch.tensor([0.3, -0.4], dtype=torch.float64), 0.8
    rows = logits.expand(20_000, 2).clone().requires_grad_()
    law = dist.Normal(torch.tensor(0.0, dtype=torch.float64), scale * math.sqrt(2))
    if face == "map":
        y = perturbed_topk(rows, 1, scale, num_samples=3)
    else:
        y = PerturbedTopK(logits=rows, k=1, scale=scale, num_samples=3).rsample()
    check_mean(y.detach()[:, 0], law.cdf(torch.tensor(0.7)).item())
    (gradient,) = torch.autograd.grad(y[:, 0].sum(), rows)
    check_mean(gradient, law.log_prob(torch.tensor(0.7)).exp() * torch.tensor([1.0, -1.0]))


def test_perturbed_topk_refuses_rows_with_too_few_units():
    with pytest.raises(
        ValueError, match="`k` must satisfy 0 <= k <= n and not exceed the number of entries above -inf"
    ):
        perturbed_topk(torch.tensor([-torch.inf, -torch.inf, 3.0]), 2)
    with pytest.raises(TypeError, match="`k` must be an int"):
        perturbed_topk(torch.zeros(3), 2.0)
    assert perturbed_topk(torch.tensor([-torch.inf, torch.inf, 3.0]), 2).tolist() == [0, 1, 1]


def test_perturbed_topk_is_a_relaxation():
    logits = LOGITS.clone().requires_grad_()
    design = Pivotal(logits=logits, k=2, relaxation=perturbed_topk)
    gof.check_k_hot(design.sample((9,)), 2)
    assert torch.autograd.grad((design.mean @ WEIGHTS).sum(), logits)[0].abs().sum() > 0


@for_each("step", [0.5, torch.tensor([0.5, 3.0], dtype=torch.float64)])
def test_imle_by_its_definition(step):
    logits, cotangent = LOGITS.clone().requires_grad_(), torch.randn(40, 2, 5, dtype=torch.float64)
    scores = LOGITS + torch.randn(40, 2, 5, dtype=torch.float64)
    x = IMLE(logits=logits, k=2, step=step).from_scores(scores)
    assert torch.equal(x, topk_mask(scores, 2))
    size = step[:, None] if isinstance(step, torch.Tensor) else step
    expected = ((topk_mask(scores, 2) - topk_mask(scores - size * cotangent, 2)) / size).sum(0)
    torch.testing.assert_close(torch.autograd.grad(x, logits, cotangent)[0], expected)


def test_imle_is_a_finite_difference_in_expectation():
    """Of two units with Gumbel noise one wins with a logistic probability; f is linear."""
    rows = torch.tensor([0.3, -0.4], dtype=torch.float64).expand(20_000, 2).clone().requires_grad_()
    x = IMLE(logits=rows, k=1, step=0.6).rsample()
    check_mean(x.detach()[:, 0], torch.sigmoid(torch.tensor(0.7)).item())
    (gradient,) = torch.autograd.grad(2 * x[:, 0].sum(), rows)
    before, after = torch.sigmoid(torch.tensor([0.7, 0.7 - 0.6 * 2], dtype=torch.float64))
    check_mean(gradient, (before - after) / 0.6 * torch.tensor([1.0, -1.0]))


@for_each("k", [2, 3])
def test_sum_of_gamma_noise_adds_up_to_gumbel_noise(k):
    design = IMLE(logits=torch.zeros(k + 1, dtype=torch.float64), k=k, noise="sum_of_gamma").design
    total = sum_of_gamma_noise(design, torch.Size((40_000, k + 1)))[:, :k].sum(-1)
    terms = torch.arange(1, GAMMA_TERMS + 1, dtype=torch.float64)
    check_mean(total, ((1 / terms).sum() - math.log(GAMMA_TERMS)).item())
    check_mean((total - total.mean()).square(), (1 / terms.square()).sum().item())
    # The terms left out shift the sum by about 1 / (2 GAMMA_TERMS), and so the distribution function by a third of it.
    assert stats.kstest(total.numpy(), "gumbel_r").statistic < 0.5 / GAMMA_TERMS


def test_sum_of_gamma_noise_is_smaller_than_gumbel_noise_and_draws_vary_less():
    """As the docstring says; the spread is the sum of the variances of the entries, which differ far beyond chance."""
    logits, k = torch.linspace(-2, 2, 40, dtype=torch.float64), 10

    def spread(mean):
        return (mean * (1 - mean)).sum()

    gumbel, gamma = (IMLE(logits=logits, k=k, noise=noise) for noise in ("gumbel", "sum_of_gamma"))
    noise = gamma.design.perturb(torch.Size((4000, 40))) - logits
    assert noise.std() == pytest.approx(math.pi / math.sqrt(6 * k), rel=0.1)
    assert spread(gamma.sample((4000,)).mean(0)) < 0.5 * spread(gumbel.sample((4000,)).mean(0))
    assert spread(gamma.sample((4000,)).mean(0)) < 0.5 * spread(ConditionalPoisson(logits=logits, k=k).mean)


def test_adaptive_step_by_its_definition():
    step = AdaptiveStep(initial=0.8, increment=0.01, target=1.0, decay=0.5)
    logits, cotangent = LOGITS.clone().requires_grad_(), torch.randn(40, 2, 5, dtype=torch.float64)
    scores = LOGITS + torch.randn(40, 2, 5, dtype=torch.float64)
    x = IMLE(logits=logits, k=2, step=step).from_scores(scores)
    size = 0.8 * scores.norm() / cotangent.norm()
    per_draw = (topk_mask(scores, 2) - topk_mask(scores - size * cotangent, 2)) / size
    torch.testing.assert_close(torch.autograd.grad(x, logits, cotangent)[0], per_draw.sum(0))
    assert step.entries == pytest.approx(0.5 + 0.5 * int(per_draw.count_nonzero()) / 80)
    assert step.alpha == pytest.approx(0.79 if step.entries >= 1 else 0.81)
    for _ in range(5):  # a zero cotangent has zero gradient, which asks for larger steps
        alpha = step.alpha
        x = IMLE(logits=logits, k=2, step=step).from_scores(scores)
        assert not torch.autograd.grad(0.0 * x.sum(), logits)[0].any()
    assert step.alpha == pytest.approx(alpha + 0.01)
    with pytest.raises(ValueError, match="`decay` must satisfy"):
        AdaptiveStep(decay=1.0)
    step = AdaptiveStep(initial=0.01, increment=0.02)
    step.update(torch.ones(3, 4))  # dense gradients ask for smaller steps, which end at 0
    assert step.alpha == 0


def test_enters_custom_loops():
    logits = LOGITS.clone().requires_grad_()
    surrogate = pathwise(IMLE(logits=logits, k=2), lambda x: (x @ WEIGHTS) ** 2, num_samples=30)
    assert surrogate.shape == (2,) and torch.autograd.grad(surrogate.sum(), logits)[0].abs().sum() > 0


@for_each("make", [PerturbedTopK, partial(IMLE, step=5.0)])
def test_transforms_of_functions(make):
    """A vmap hides that logits require a gradient, and a dual tensor does not say so."""

    def draw(logits):
        return make(logits=logits, k=2, validate_args=False).rsample()

    def loss(logits):
        return (torch.func.vmap(draw, randomness="different")(logits) * WEIGHTS).sum()

    def gradient(function):
        torch.manual_seed(0)
        return function(loss)(LOGITS)

    def by_autograd(function):
        def call(logits):
            logits = logits.clone().requires_grad_()
            return torch.autograd.grad(function(logits), logits)[0]

        return call

    found = gradient(torch.func.grad)
    assert (found.abs().sum(-1) > 0).all()
    assert torch.equal(gradient(by_autograd), found)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(draw, (LOGITS,), (LOGITS,))
