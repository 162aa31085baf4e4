"""Relaxed k-hot vectors: density against reference values and Concrete, the law of samples, rounding, gradients."""

import copy
import gc
import math
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch.autograd import gradcheck
from torch.distributions import biject_to
from torch.func import jacfwd, jacrev, vmap

from khot import (
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    capped_simplex_map,
    lapsum_topk,
    sigmoid_topk,
    sparse_topk,
    successive_softmax_topk,
    topk_mask,
)
from khot.constraints import capped_simplex, k_hot
from khot.distributions import relaxed_khot
from khot.relaxations import Logistic
from khot.relaxations import log_odds as log_odds_module
from khot.relaxations.log_odds import log_odds, remember_scores, sigmoid_topk_log_odds
from tests import gof
from tests.loops import for_each
from tests.maps import publics
from tests.oracle import cases, tensor
from tests.registry import RELAXED

float64 = torch.float64
LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6], [0.0, 0.3, -0.4, 2.5, 1.0]]).double()
VALUE = tensor([0.2, 0.3, 0.9, 0.15, 0.45])
both = for_each("cls", publics(RELAXED))


@pytest.fixture(autouse=True)
def fresh_pyro():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def matrix(rows):
    return torch.stack([tensor(row) for row in rows])


@for_each("case", cases("relaxed_khot_density"))
def test_oracle(case):
    logits = tensor(case["theta"]).expand(len(case["y"]), -1).clone().requires_grad_()
    temperature = torch.full((len(logits),), float(case["tau"]), dtype=float64, requires_grad=True)
    relaxed = RelaxedKHot(temperature, logits=logits, k=case["k"])
    z, expected = matrix(case["logit_y"]), tensor(case["log_prob"])
    y = z.sigmoid()
    remember_scores(y, z, case["k"])
    log_prob = relaxed.log_prob(y)
    assert ((log_prob - expected).abs() <= 1e-11 * (1 + expected.abs())).all()
    grad, grad_temperature = torch.autograd.grad(log_prob.sum(), [logits, temperature])
    torch.testing.assert_close(grad, matrix(case["grad_theta"]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grad_temperature, tensor(case["grad_tau"]), rtol=1e-9, atol=1e-9)
    forgotten = matrix(case["y"])
    inner = ((forgotten > 1e-3) & (forgotten < 1 - 1e-3)).all(-1)
    torch.testing.assert_close(relaxed.log_prob(forgotten)[inner], expected[inner], rtol=1e-11, atol=1e-11)


@for_each("temperature", [0.3, 1.0])
def test_two_units_are_concrete(temperature):
    # Two log-odds that sum to 0 are half the difference of the scores: Concrete at twice the temperature.
    logits = LOGITS[0, :2]
    concrete = dist.RelaxedOneHotCategorical(torch.tensor(2 * temperature).double(), logits=logits)
    y = torch.rand(20, 1, dtype=float64)
    y = torch.cat([y, 1 - y], -1)
    torch.testing.assert_close(RelaxedKHot(temperature, logits=logits, k=1).log_prob(y), concrete.log_prob(y))


def midpoints(k, size):
    """Centres of a grid over the first two of three entries, with the third."""
    grid = (torch.arange(size, dtype=float64) + 0.5) / size
    y = torch.stack(torch.broadcast_tensors(grid[:, None], grid, k - grid[:, None] - grid), -1)
    return y, ((y > 0) & (y < 1)).all(-1)


@for_each("k", [1, 1.37, 2])
def test_density_integrates_to_one_and_is_that_of_samples(k):
    """At temperature 2, where the density vanishes on the boundary, so that the midpoint rule converges."""
    relaxed, size, cells = RelaxedKHot(2.0, logits=LOGITS[0, :3], k=k, validate_args=False), 1000, 8
    y, possible = midpoints(k, size)
    density = relaxed.log_prob(y[possible]).exp()
    mass = torch.zeros(size, size, dtype=float64)
    mass[possible] = density / size**2
    assert mass.sum().item() == pytest.approx(1, abs=2e-4)
    expected = mass.view(cells, size // cells, cells, size // cells).sum((1, 3)).flatten()
    draws = relaxed.sample((40_000,))
    cell = (draws[:, :2] * cells).long().clamp(max=cells - 1)
    counts = torch.bincount(cell[:, 0] * cells + cell[:, 1], minlength=cells**2)
    observed, expected = gof._merge(counts.numpy(), (40_000 * expected / expected.sum()).numpy())
    chi2 = ((observed - expected) ** 2 / expected).sum()
    assert len(observed) > 20 and stats.chi2.sf(chi2, len(observed) - 1) >= gof.LEVEL


@for_each("k", [2, 3.6])
def test_law_of_samples(k):
    """softmax(theta - T logit y) is uniform on the simplex, and differences of T logit y - theta are logistic."""
    relaxed = RelaxedKHot(0.7, logits=LOGITS[0], k=k)
    z = relaxed.sample((20_000,)).detach().logit()  # of the values, not of what they remember
    shares, noise = torch.softmax(LOGITS[0] - 0.7 * z, -1), 0.7 * z - LOGITS[0]
    p_values = [stats.kstest(share.numpy(), stats.beta(1, 4).cdf).pvalue for share in shares.T]
    i, j = torch.triu_indices(5, 5, offset=1)
    p_values += [stats.kstest(row.numpy(), stats.logistic.cdf).pvalue for row in (noise[:, i] - noise[:, j]).T]
    assert min(p_values) * len(p_values) >= gof.LEVEL


GUMBEL = [case for case in cases("gumbel_topk") if case["full"] and case["n"] <= 6][:6]


@for_each("case", GUMBEL)
@pytest.mark.slow
def test_limit_is_gumbel_topk(case):
    logits, k, n = tensor(case["theta"]), case["k"], case["n"]
    support = torch.tensor([[float(i in subset) for i in range(n)] for subset in case["subsets"]], dtype=float64)
    pmf = tensor(case["log_prob"]).exp()
    hard = RelaxedKHotStraightThrough(0.5, logits=logits, k=k)
    gof.check_sampler(hard.sample((50_000,)), support, pmf)
    cold = RelaxedKHot(1e-6, logits=logits, k=k).sample((50_000,))
    assert ((cold - cold.round()).abs().amax(-1) > 0.01).sum() <= 25  # two scores that close: 2e-5 for each pair
    gof.check_sampler(topk_mask(cold, k), support, pmf)


@both
def test_gradients_of_samples(cls):
    """Against finite differences at fixed noise, in logits, temperature and k."""

    def draw(logits, temperature, k):
        torch.manual_seed(1)
        return RelaxedKHot(temperature, logits=logits, k=k).rsample((2,))

    logits, temperature, k = LOGITS.clone(), tensor([0.5, 1.0, 2.0]), tensor([1.0, 2.5, 4.0])
    inputs = [x.requires_grad_() for x in (logits, temperature, k)]
    assert gradcheck(draw, inputs)
    assert gradcheck(lambda x, t, k: RelaxedKHot(t, logits=x, k=k).log_prob(draw(x, t, k)), inputs)
    torch.manual_seed(1)
    sample = cls(temperature, logits=logits, k=torch.tensor([1, 2, 4])).rsample((2,))
    relaxed = draw(logits, temperature, torch.tensor([1.0, 2.0, 4.0]).double())
    torch.testing.assert_close(sample, relaxed if cls is RelaxedKHot else topk_mask(relaxed, torch.tensor([1, 2, 4])))
    weight = torch.randn_like(sample)
    for a, b in zip(
        torch.autograd.grad((weight * sample).sum(), inputs[:2], retain_graph=True),
        torch.autograd.grad((weight * relaxed).sum(), inputs[:2]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@for_each("k", [2, 2.5])
def test_gradients_of_the_density(k):
    start = sigmoid_topk(VALUE.logit(), k).expand(3, 5)

    def log_prob(logits, temperature, change):
        value = start + change - change.mean(-1, keepdim=True)  # whose sum is k, outside of which there is no density
        return RelaxedKHot(temperature, logits=logits, k=k, validate_args=False).log_prob(value)

    inputs = [LOGITS.clone(), tensor([0.5, 1.0, 2.0]), torch.zeros_like(start)]
    inputs = [x.requires_grad_() for x in inputs]
    assert gradcheck(log_prob, inputs)
    assert torch.autograd.gradgradcheck(log_prob, inputs)


@for_each("dtype", [torch.bfloat16, torch.float32, float64])
@for_each("temperature", [1e-3, 0.05, 30.0])
def test_samples_remember_what_rounding_takes(dtype, temperature):
    logits = 3 * torch.randn(200, 20).to(dtype)
    relaxed = RelaxedKHot(temperature, logits=logits.requires_grad_(), k=7, validate_args=True)
    y = relaxed.rsample()
    assert y.dtype == dtype and ((y > 0) & (y < 1)).all() and relaxed.support.check(y).all()
    log_prob = relaxed.log_prob(y)
    assert log_prob.dtype == dtype and log_prob.isfinite().all()
    assert torch.autograd.grad(log_prob.sum() + y.max(), logits)[0].isfinite().all()
    # The threshold drops out of the first part of the density, so that it follows from the noise alone.
    scores = log_odds_module._SCORES.find(y).made_from[0]
    share = torch.log_softmax((logits - scores).detach().double(), -1).sum(-1)
    exact = RelaxedKHot(temperature, logits=logits.detach().double(), k=7)
    z = log_odds(y).detach()
    torch.testing.assert_close(share, torch.log_softmax(logits.detach().double() - temperature * z, -1).sum(-1))
    for other in (exact, exact.expand((200,))):
        torch.testing.assert_close(other.log_prob(y).to(dtype), log_prob)


def test_draws_without_gradient_are_constants():
    """As their copies are, which remember nothing: E[d log p / d temperature] would not be 0 otherwise."""
    logits, temperature = LOGITS.clone().requires_grad_(), tensor([0.5, 1.0, 2.0]).requires_grad_()
    relaxed = RelaxedKHot(temperature, logits=logits, k=torch.full((3,), 2.5, dtype=float64, requires_grad=True))
    y = relaxed.sample()
    found, expected = (
        torch.autograd.grad(relaxed.log_prob(value).sum(), [logits, temperature, relaxed.k], allow_unused=True)
        for value in (y, y.clone())
    )
    assert found[2] is None and expected[2] is None
    torch.testing.assert_close(found[:2], expected[:2])


@for_each("k", [2, 2.5])
def test_derivatives_of_log_odds(k):
    x = LOGITS.clone().requires_grad_()

    def of_numbers(x):
        return sigmoid_topk_log_odds(x, k, 0.7)

    def of_tensors(x):
        return sigmoid_topk_log_odds(x, *tensor([k, 0.7]))

    torch.testing.assert_close(of_numbers(x), sigmoid_topk(x, k, 0.7).logit())
    torch.testing.assert_close(of_numbers(x), of_tensors(x), rtol=1e-13, atol=1e-13)
    assert gradcheck(of_numbers, x, check_forward_ad=True) and torch.autograd.gradgradcheck(of_numbers, x)
    torch.testing.assert_close(jacrev(of_numbers)(x), jacfwd(of_tensors)(x))
    torch.testing.assert_close(vmap(of_numbers)(x), of_numbers(x))


def test_memory_belongs_to_one_unchanged_tensor():
    relaxed = RelaxedKHot(0.02, logits=LOGITS[0], k=2)
    y = relaxed.sample()
    exact, rounded = relaxed.log_prob(y), relaxed.log_prob(y.clone())
    assert abs(exact - rounded) > 1e-3 and rounded.isfinite()
    y.copy_(VALUE)
    torch.testing.assert_close(relaxed.log_prob(y), relaxed.log_prob(VALUE))
    with torch.inference_mode():
        y = relaxed.sample()
        assert relaxed.log_prob(y).isfinite() and abs(relaxed.log_prob(y) - relaxed.log_prob(y.clone())) > 1e-3
        y.copy_(VALUE)
        torch.testing.assert_close(relaxed.log_prob(y), relaxed.log_prob(VALUE.clone()))
    other = RelaxedKHot(0.02, logits=LOGITS[0], k=2, relaxation=lapsum_topk).sample()
    assert log_odds_module._SCORES.find(other) is None  # they would be those of another map
    hard = RelaxedKHotStraightThrough(0.02, logits=LOGITS[0], k=2)
    torch.manual_seed(0)
    x = hard.sample()
    torch.manual_seed(0)
    torch.testing.assert_close(hard.log_prob(x), relaxed.log_prob(relaxed.sample()))
    x.copy_(VALUE)
    torch.testing.assert_close(hard.log_prob(x), relaxed.log_prob(VALUE))


@both
@for_each("dtype", [torch.float32, float64])
def test_a_detached_sample_has_the_density_of_the_sample(cls, dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 10, dtype=dtype)).requires_grad_()
    relaxed = cls(0.05, logits=logits, k=3)
    y, earlier = relaxed.rsample(), relaxed.rsample()
    for value in (y, earlier):
        assert not vars(value)
        expected = relaxed.log_prob(value)
        for same in (value.detach(), value.data, value.detach().view_as(value)):
            assert torch.equal(relaxed.log_prob(same), expected)
        by_entries = RelaxedKHot(0.05, logits=logits, k=3).log_prob
        if cls is RelaxedKHot and dtype == torch.float32:
            assert (by_entries(value.clone()) - expected).abs().amax() > 10
    # A constant has no gradient but that of the law, a leaf of its own has that of its entries.
    constant, leaf = y.detach(), y.detach().requires_grad_()
    share = torch.softmax((logits - 0.05 * log_odds(constant if cls is RelaxedKHot else relaxed_of(y))).detach(), -1)
    (found,) = torch.autograd.grad(relaxed.log_prob(constant).sum(), logits)
    torch.testing.assert_close(found, (1 - 10 * share).to(dtype), rtol=1e-4, atol=1e-4)
    if cls is RelaxedKHot:
        assert torch.autograd.grad(relaxed.log_prob(leaf).sum(), leaf)[0].ne(0).all()
        assert torch.equal(relaxed.log_prob(leaf), relaxed.log_prob(y.clone().detach()))


def relaxed_of(hard):
    return relaxed_khot._RELAXED.find(hard).made_from.detach()


def test_another_law_finds_the_scores():
    """As the model does under an ELBO, whose guide has drawn; also after copies of the law that drew."""
    guide, model = RelaxedKHot(0.05, logits=LOGITS.float(), k=2), RelaxedKHot(0.1, logits=LOGITS.float() / 2, k=2)
    y = guide.rsample()
    expected = RelaxedKHot(0.1, logits=LOGITS / 2, k=2).log_prob(y)
    assert (model.log_prob(y.clone()) - expected).abs().amax() > 1
    for law in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.expand((2, 3))):
        torch.testing.assert_close(law.log_prob(y).double(), expected.expand(law.batch_shape), rtol=1e-5, atol=1e-4)
    for other in (copy.deepcopy(y), y[:], y.to(float64).float()):  # the second shows the same memory
        assert torch.equal(guide.log_prob(other), guide.log_prob(y)) == (other.data_ptr() == y.data_ptr())


def test_what_is_remembered_ends_with_the_memory():
    gc.collect()
    kept = log_odds_module._SCORES._entries
    before, relaxed = len(kept), RelaxedKHot(0.05, logits=LOGITS, k=2)
    y = relaxed.rsample((100,))
    address, constant = y.data_ptr(), y.detach()
    del y
    gc.collect()
    assert len(kept) == before + 1
    del constant
    gc.collect()
    assert len(kept) == before
    values = [sigmoid_topk(torch.randn(100, 3, 5).double(), 2) for _ in range(50)]  # some of them at that address
    assert all(log_odds_module._SCORES.find(value) is None for value in values), address


def test_values_of_the_bijection_remember_as_well():
    k, u = 2, torch.tensor([300.0, -200.0, 90.0, 5.0]).double().requires_grad_()
    transform = biject_to(capped_simplex(k))
    y = transform(u)
    assert ((y > 0) & (y < 1)).all()
    relaxed = RelaxedKHot(0.1, logits=LOGITS[0], k=k)
    density = relaxed.log_prob(y) + transform.log_abs_det_jacobian(u, y)
    scores = torch.cat([u, torch.zeros(1).double()])
    share = torch.log_softmax(LOGITS[0] - 0.1 * scores, -1).sum()
    torch.testing.assert_close(density, share + math.lgamma(5) + 4 * math.log(0.1))
    assert gradcheck(lambda u: relaxed.log_prob(transform(u)), u)


@both
def test_no_density_on_the_boundary(cls):
    value = tensor([1.0, 0.0, 0.3, 0.3, 0.4])
    with pytest.raises(ValueError, match="no density where an entry is exactly 0 or 1"):
        cls(0.5, logits=LOGITS, k=2, validate_args=True).log_prob(value)
    logits = LOGITS.clone().requires_grad_()
    log_prob = cls(0.5, logits=logits, k=2, validate_args=False).log_prob(value)
    assert (log_prob == -math.inf).all() and (torch.autograd.grad(log_prob.sum(), logits)[0] == 0).all()
    with pytest.raises(ValueError, match="support"):
        cls(0.5, logits=LOGITS, k=2, validate_args=True).log_prob(VALUE * 1.1)


@both
@for_each("k", [0, 5, torch.tensor([0, 2, 5])])
def test_constant_samples_have_no_density(cls, k):
    relaxed = cls(0.5, logits=LOGITS, k=k, validate_args=True)
    sample, k = relaxed.sample((4,)), torch.as_tensor(k).expand(3)
    assert torch.equal(sample[:, k == 0], torch.zeros_like(sample[:, k == 0]))
    assert torch.equal(sample[:, k == 5], torch.ones_like(sample[:, k == 5]))
    with pytest.raises(ValueError, match="needs 0 < k < n"):
        relaxed.log_prob(sample)
    unchecked = cls(0.5, logits=LOGITS, k=k, validate_args=False)
    assert torch.equal(unchecked.log_prob(sample).isfinite(), ((k > 0) & (k < 5)).expand(4, 3))


@both
@for_each("dtype", [torch.float32, float64])
def test_shapes_expand_and_copies(cls, dtype):
    relaxed = cls(torch.tensor([0.5, 1.0, 2.0]), logits=LOGITS.to(dtype), k=torch.tensor([1, 2, 4]))
    assert relaxed.batch_shape == (3,) and relaxed.event_shape == (5,) and relaxed.event_dim == 1
    assert cls.infer_shapes(logits=(3, 5), k=(3,), temperature=()) == ((3,), (5,))
    expanded = relaxed.expand((4, 3)).expand((2, 4, 3))
    value = expanded.rsample((6,))
    assert type(expanded) is cls and value.shape == (6, 2, 4, 3, 5) and value.dtype == dtype
    torch.testing.assert_close(relaxed.log_prob(value), expanded.log_prob(value))
    assert expanded.log_prob(value).shape == (6, 2, 4, 3)
    torch.testing.assert_close(
        expanded.to_event(2).log_prob(value), relaxed.log_prob(value).sum((-1, -2)), rtol=1e-4, atol=1e-4
    )
    mask = torch.tensor([True, False, True])
    assert (relaxed.mask(mask).log_prob(value)[..., 1] == 0).all()
    torch.manual_seed(0)
    first = relaxed.rsample()
    for twin in (copy.deepcopy(relaxed), pickle.loads(pickle.dumps(relaxed)), copy.copy(relaxed)):
        torch.manual_seed(0)
        assert type(twin) is cls and torch.equal(twin.rsample(), first)
    assert cls(0.5, logits=LOGITS[:0].to(dtype), k=2).rsample((2,)).shape == (2, 0, 5)
    single = cls(0.5, logits=LOGITS[0, :1].to(dtype), k=1)
    assert single.rsample().tolist() == [1.0]
    check = k_hot if cls is RelaxedKHotStraightThrough else capped_simplex
    assert check(relaxed.k).check(relaxed.sample((50,))).all() and relaxed.support.check(relaxed.sample()).all()


@for_each("relaxation", [lapsum_topk, sparse_topk])
def test_other_relaxations_have_samples_and_no_density(relaxation):
    relaxed = RelaxedKHot(0.5, logits=LOGITS, k=2, relaxation=relaxation)
    y = relaxed.rsample((50,))
    assert relaxed.support.check(y).all()
    with pytest.raises(NotImplementedError, match=f"relaxation={relaxation.__name__}, only with sigmoid_topk"):
        relaxed.log_prob(y)
    hard = RelaxedKHotStraightThrough(0.5, logits=LOGITS, k=2, relaxation=relaxation)
    assert k_hot(2).check(hard.rsample((50,))).all()
    torch.manual_seed(0)
    mine = RelaxedKHot(
        0.5, logits=LOGITS, k=2, relaxation=lambda x, k, t: capped_simplex_map(x, k, t, link=Logistic())
    ).sample()
    torch.manual_seed(0)
    torch.testing.assert_close(mine, RelaxedKHot(0.5, logits=LOGITS, k=2).sample())


@both
def test_transforms_of_functions(cls):
    def sample_and_score(logits):
        relaxed = cls(0.5, logits=logits, k=2, validate_args=False)
        value = relaxed.rsample()
        return value, relaxed.log_prob(value)

    torch.manual_seed(0)
    value, log_prob = torch.vmap(sample_and_score, randomness="different")(LOGITS)
    torch.manual_seed(0)
    expected, expected_log_prob = sample_and_score(LOGITS)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(log_prob, expected_log_prob)

    def density(logits, value):
        return RelaxedKHot(0.5, logits=logits, k=2, validate_args=False).log_prob(value)

    value = sigmoid_topk(LOGITS.flip(0), 2)
    hessian = torch.vmap(torch.func.hessian(density))(LOGITS, value)
    share = torch.softmax(LOGITS - 0.5 * value.logit(), -1)
    torch.testing.assert_close(hessian, 5 * (share.unsqueeze(-1) * share.unsqueeze(-2) - torch.diag_embed(share)))


def exponential_noise(*shape):
    return -torch.empty(shape, dtype=float64).exponential_().log()


@both
def test_from_scores_is_the_draw_of_given_noise(cls):
    """The law of scores that somebody else perturbed: the same value, density and derivatives as a draw's."""
    torch.manual_seed(0)
    logits, temperature = LOGITS.clone().requires_grad_(), torch.tensor(0.5, dtype=float64, requires_grad=True)
    relaxed = cls(temperature, logits=logits, k=2)
    noise = exponential_noise(4, 3, 5)
    soft = sigmoid_topk(logits + noise, 2, temperature)
    expected = topk_mask(soft, 2) if cls is RelaxedKHotStraightThrough else soft
    (for_logits, for_temperature) = torch.autograd.grad((soft * VALUE).sum(), (logits, temperature))
    # Scores without a gradient, as noise is often added without one, are those of the logits all the same.
    for scores in (logits + noise, (logits + noise).detach()):
        y = relaxed.from_scores(scores)
        torch.testing.assert_close(y, expected)
        found = torch.autograd.grad((y * VALUE).sum(), (logits, temperature), retain_graph=True)
        torch.testing.assert_close(found[0], for_logits)
        torch.testing.assert_close(found[1], for_temperature)
        torch.testing.assert_close(relaxed.log_prob(y), RelaxedKHot(0.5, logits=LOGITS, k=2).log_prob(soft))
    torch.manual_seed(1)
    drawn = relaxed.rsample((4,))
    torch.manual_seed(1)
    assert torch.equal(relaxed.from_scores(relaxed._scores(torch.Size((4,)), None)), drawn)
    assert relaxed.from_scores(LOGITS.expand(2, 7, 3, 5)).shape == (2, 7, 3, 5)


@both
@for_each("detached", [True, False])
def test_from_scores_under_transforms(cls, detached):
    """Scores without a derivative get that of the logits, scores with one keep it, also where a vmap hides it."""
    torch.manual_seed(0)
    noise, vmap, jvp = exponential_noise(3, 5), torch.func.vmap, torch.func.jvp
    tangent = torch.ones_like(LOGITS[0]).cumsum(-1)

    def draw(logits, noise=noise[0]):
        scores = (logits.detach() if detached else logits) + noise
        return cls(0.5, logits=logits, k=2, validate_args=False).from_scores(scores)

    def draws(logits):
        return vmap(draw)(logits, noise)

    leaf = LOGITS.clone().requires_grad_()
    (expected,) = torch.autograd.grad((sigmoid_topk(leaf + noise, 2, 0.5) * tangent).sum(), leaf)  # J is symmetric
    torch.testing.assert_close(torch.func.grad(lambda logits: (draws(logits) * tangent).sum())(LOGITS), expected)
    torch.testing.assert_close(torch.autograd.grad((draws(leaf) * tangent).sum(), leaf)[0], expected)
    torch.testing.assert_close(jvp(draw, (LOGITS[0],), (tangent,))[1], expected[0])
    torch.testing.assert_close(jvp(draws, (LOGITS,), (tangent.expand_as(LOGITS),))[1], expected)
    in_rows = vmap(lambda row, noise: jvp(lambda logits: draw(logits, noise), (row,), (tangent,))[1])(LOGITS, noise)
    torch.testing.assert_close(in_rows, expected)


@both
@for_each("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_from_scores_has_the_dtype_of_the_logits(cls, dtype):
    relaxed = cls(0.5, logits=LOGITS.to(dtype), k=2)
    assert relaxed.from_scores(LOGITS.float()).dtype == relaxed.rsample().dtype == dtype


@for_each("k", [2, np.int64(2), torch.tensor(2)])
@for_each("cls", [RelaxedKHot, RelaxedKHotStraightThrough])
def test_integer_sizes_stay_integers(cls, k):
    """For relaxations that take nothing else."""
    relaxed = cls(0.5, logits=LOGITS, k=k, relaxation=successive_softmax_topk)
    y = relaxed.rsample((7,))
    torch.testing.assert_close(y.sum(-1), torch.full((7, 3), 2.0, dtype=float64))
    assert relaxed.expand((4, 3)).rsample().shape == (4, 3, 5)
