"""AutoKHot: gradients against the exact ones of the ELBO, plates, guides beside it, starts, and errors."""

import pickle
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from khot import (
    AutoKHot,
    Brewer,
    ConditionalPoisson,
    GumbelTopK,
    ParetoSampling,
    PhantomUnit,
    Pivotal,
    ReinMax,
    Sampford,
    StraightThrough,
    Systematic,
)
from khot.distributions.sizes import size_of
from tests.inputs import normal

pytestmark = pytest.mark.usefixtures("fresh_pyro")

COVARIATES = normal(6, 5, seed=4)
SEEN = normal(6, seed=5)
GAIN = normal(5, seed=6)
ROW_SIZES = torch.tensor([1, 2, 3])


def regression():
    """Curved in x, with rows of observations that share it."""
    x = pyro.sample("x", ConditionalPoisson(logits=normal(5), k=2))
    with pyro.plate("observations", 6):
        pyro.sample("y", dist.Normal((COVARIATES * x).sum(-1), 1.0), obs=SEEN)


def regression_gain(x):
    return dist.Normal(x @ COVARIATES.mT, 1.0).log_prob(SEEN).sum(-1)


def rows(k=ROW_SIZES):
    """A plate whose rows differ in their size, under a prior that is the same for all."""
    with pyro.plate("rows", 3):
        x = pyro.sample("x", ConditionalPoisson(logits=normal(5), k=k))
        pyro.factor("gain", rows_gain(x))


def rows_gain(x):
    return x * x.roll(1, -1) @ GAIN


def at_most_three():
    x = pyro.sample("x", ConditionalPoisson(logits=normal(5), k=(0, 3)))
    pyro.factor("gain", at_most_three_gain(x))


def at_most_three_gain(x):
    return x.sum(-1) * (x @ GAIN)


MODELS = {
    "regression": (regression, regression_gain),
    "rows": (partial(rows, torch.full((3,), 2)), rows_gain),
    "range": (at_most_three, at_most_three_gain),
}


def started(model, *args, **kwargs):
    """A guide that knows its sites."""
    guide = AutoKHot(model, *args, **kwargs)
    guide()
    return guide


def logits_of(guide):
    return guide.logits.x_unconstrained


def exact_gradient(guide, gain):
    """Of minus the ELBO, by a sum over all k-hot vectors."""
    logits = guide.designs()["x"].logits.requires_grad_()
    design = ConditionalPoisson(logits=logits, k=size_of(guide.designs()["x"]))
    prior = ConditionalPoisson(logits=normal(5), k=size_of(design))
    support = design.enumerate_support()
    log_q = design.log_prob(support)
    loss = (log_q.exp() * (log_q - prior.log_prob(support) - gain(support))).sum()
    return torch.autograd.grad(loss, logits)[0]


def gradient(guide, model, elbo, by=lambda guide: guide):
    logits_of(guide).grad = None
    elbo.loss_and_grads(model, by(guide))
    return logits_of(guide).grad.clone()


@pytest.mark.parametrize(("model", "gain"), MODELS.values(), ids=MODELS)
def test_enumerated_gradients_are_exact(model, gain):
    guide = started(model, None, init_scale=0.5)
    found = gradient(guide, model, TraceEnum_ELBO(max_plate_nesting=1), config_enumerate)
    torch.testing.assert_close(found, exact_gradient(guide, gain))


@pytest.mark.parametrize(("model", "gain"), MODELS.values(), ids=MODELS)
def test_score_function_is_unbiased(model, gain):
    """The mean of 30 steps, within 5.5 standard errors: of Student's t, a false alarm of 2e-4; the seed is fixed."""
    guide = started(model, None, init_scale=0.5)
    elbo = Trace_ELBO(num_particles=400, vectorize_particles=True, max_plate_nesting=1)
    found = torch.stack([gradient(guide, model, elbo) for _ in range(30)])
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - exact_gradient(guide, gain)).abs() < 5.5 * error).all()


def linear():
    with pyro.plate("rows", 2):
        x = pyro.sample("x", ConditionalPoisson(logits=normal(5), k=2))
        pyro.factor("gain", x @ GAIN)


def test_straight_through_is_exact_where_the_model_is_linear():
    """One draw suffices, because with the exact divergence the gradient does not depend on it."""
    guide = started(linear, StraightThrough, init_scale=0.5)
    found = gradient(guide, linear, TraceMeanField_ELBO())
    torch.testing.assert_close(found, exact_gradient(guide, lambda x: x @ GAIN))


@pytest.mark.parametrize("elbo_class", [Trace_ELBO, TraceMeanField_ELBO])
def test_reinmax_is_that_of_a_guide_by_hand(elbo_class):
    guide = started(regression)
    logits = guide.designs()["x"].logits.requires_grad_()

    def by_hand():
        pyro.sample("x", ReinMax(ConditionalPoisson(logits=logits, k=2)))

    elbo = elbo_class()
    pyro.set_rng_seed(1)
    found = gradient(guide, regression, elbo)
    pyro.set_rng_seed(1)
    elbo.differentiable_loss(regression, by_hand).backward()
    torch.testing.assert_close(found, logits.grad)


def mixed(data):
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    with pyro.plate("rows", 6, subsample_size=3) as chosen:
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(5), k=2))
        pyro.sample("y", dist.Normal(x, noise).to_event(1), obs=data[chosen])


def test_beside_another_autoguide_in_a_subsampled_plate():
    """Each row of the plate learns a law of its own from the steps that it is in."""
    codes = ConditionalPoisson(logits=torch.zeros(6, 5), k=2).sample()
    data = codes + 0.1 * torch.randn(6, 5)
    guide = AutoGuideList(mixed)
    guide.append(AutoNormal(poutine.block(mixed, hide=["x"])))
    guide.append(AutoKHot(poutine.block(mixed, expose=["x"])))
    svi = SVI(mixed, guide, pyro.optim.Adam({"lr": 0.2}), TraceMeanField_ELBO())
    for _ in range(100):
        svi.step(data)
    assert torch.equal(guide[1].designs()["x"].mode, codes)
    for parallel in (False, True):
        draws = Predictive(mixed, guide=guide, num_samples=3, parallel=parallel)(data)
        assert draws["x"].shape == (3, 3, 5) and (draws["x"].sum(-1) == 2).all()


def test_vectorized_particles_from_the_first_call_on():
    elbo = Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)
    guide = AutoKHot(rows)
    SVI(rows, guide, pyro.optim.Adam({"lr": 0.1}), elbo).step()
    assert logits_of(guide).shape == (3, 5)
    assert guide.designs()["x"].sample().sum(-1).tolist() == [1, 2, 3]


def amortized(data, batch):
    with pyro.plate("rows", len(data), subsample_size=batch) as chosen:
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(6), k=2))
        pyro.sample("y", dist.Normal(x @ WORDS, 0.5).to_event(1), obs=data[chosen])


WORDS = normal(6, 12, seed=7).float()


def test_a_network_as_guide_of_a_subsampled_plate():
    """It learns from a tenth of the rows at a time, and its laws are right for rows that it has never seen."""
    encoder = torch.nn.Linear(12, 6)

    def guide(data, batch):
        pyro.module("encoder", encoder)
        with pyro.plate("rows", len(data), subsample_size=batch) as chosen:
            pyro.sample("x", ReinMax(ConditionalPoisson(logits=encoder(data[chosen]), k=2)))

    codes = ConditionalPoisson(logits=torch.zeros(400, 6), k=2).sample()
    data = codes @ WORDS + 0.1 * torch.randn(400, 12)
    svi = SVI(amortized, guide, pyro.optim.Adam({"lr": 0.05}), TraceMeanField_ELBO())
    for _ in range(150):
        svi.step(data[:200], 20)
    found = ConditionalPoisson(logits=encoder(data[200:]), k=2).mode
    assert (found == codes[200:]).all(-1).float().mean() > 0.9


def in_an_event():
    x = pyro.sample("x", ConditionalPoisson(logits=normal(2, 5), k=torch.tensor([1, 3])).to_event(1).mask(True))
    pyro.factor("gain", (x @ GAIN).sum(-1))


@pytest.mark.parametrize(
    ("model", "shape"),
    [(in_an_event, (2, 5)), (lambda: pyro.sample("x", Brewer(logits=normal(5), k=2)), (5,))],
    ids=["event", "another design"],
)
def test_starts_at_the_prior(model, shape):
    """Without noise the guide has the inclusion probabilities of the prior; draws have its shape and dtype."""
    guide = started(model, init_scale=0)
    node = poutine.trace(guide).get_trace().nodes["x"]
    prior = poutine.trace(model).get_trace().nodes["x"]["fn"]
    assert node["value"].shape == shape and node["fn"].event_shape == prior.event_shape
    torch.testing.assert_close(guide.designs()["x"].mean, prior.mean)
    pyro.clear_param_store()
    assert not torch.equal(logits_of(started(model)), logits_of(guide))


def test_a_prior_over_the_size_starts_at_its_expected_size():
    log_prior = torch.tensor([0.0, 1.0, 3.0, 0.0]).double()
    prior = ConditionalPoisson(logits=normal(6) + 5, k=(0, 3, log_prior))
    guide = started(lambda: pyro.sample("x", prior), init_scale=0)
    design = guide.designs()["x"]
    assert size_of(design) == (0, 3) and design.log_prior is None
    assert (design.mean.sum() - prior.mean.sum()).abs() < 0.6
    assert torch.equal(design.mean.argsort(), prior.mean.argsort())


@pytest.mark.parametrize(
    ("weights", "sizes"),
    [
        ([0.0, 1.0, 3.0, 0.0], [(1, 2)]),
        ([[0.0, 1.0, 3.0, 0.0], [0.0, 0.0, 0.0, 2.0], [1.0, 2.0, 0.0, 0.0]], [(1, 2), (3, 3), (0, 1)]),
    ],
    ids=["all rows", "by row"],
)
def test_sizes_that_a_prior_excludes_stay_excluded(weights, sizes):
    """Otherwise the ELBO is minus infinity, which a few draws may not show."""
    weights = torch.tensor(weights)
    logits = torch.zeros(*weights.shape[:-1], 4)

    def model():
        with pyro.plate("rows", len(sizes)):
            pyro.sample("x", ConditionalPoisson(logits=logits, k=(0, 3, weights.log())))

    guide = AutoKHot(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceMeanField_ELBO())
    assert all(0 <= svi.step() < 10 for _ in range(5))
    design = guide.designs()["x"]
    ends = torch.stack(torch.broadcast_tensors(design.k, design.largest_k), -1)
    assert (ends == torch.tensor(sizes)).all()


@pytest.mark.parametrize(
    "prior",
    [
        Systematic(logits=torch.zeros(6), k=2),
        Systematic(logits=normal(300, 6).half(), k=2),
    ],
    ids=repr,
)
def test_priors_that_exclude_vectors_are_refused_unless_masked(prior):
    for fn in (prior, prior.expand((3, *prior.batch_shape)).to_event(1)):
        with pytest.raises(NotImplementedError, match="ELBO of minus infinity at the site 'x'.*excludes vectors"):
            AutoKHot(one_site(fn))()
        assert AutoKHot(one_site(fn.mask(False)))()["x"].shape == fn.shape()
        pyro.clear_param_store()
    assert AutoKHot(one_site(Systematic(logits=torch.zeros(6), k=1)))()["x"].sum() == 1


def test_certain_units_stay_certain():
    prior = ConditionalPoisson(logits=torch.tensor([torch.inf, 0.0, 0.0, -torch.inf]), k=2)

    def model():
        pyro.factor("gain", pyro.sample("x", prior) @ torch.tensor([-1.0, 2.0, 0.0, 1.0]))

    guide = AutoKHot(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(20):
        svi.step()
    mean = guide.designs()["x"].mean
    assert mean[0] == 1 and mean[3] == 0 and mean[1] > 0.6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draws_have_the_dtype_of_the_site(dtype):
    guide = AutoKHot(lambda: pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4, dtype=dtype), k=2)))
    assert guide()["x"].dtype == dtype and guide.designs()["x"].dtype == dtype
    assert logits_of(guide).dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("design", [Brewer, GumbelTopK, ParetoSampling, Pivotal, Sampford])
def test_priors_in_half_types_have_rounded_inclusion_probabilities(design, dtype):
    """Whose sum is not the size, so the start is computed from those before rounding."""
    prior = design(logits=normal(50, 9).to(dtype), k=3)
    guide = started(one_site(prior), init_scale=0)
    torch.testing.assert_close(guide.designs()["x"].mean, prior.mean, atol=torch.finfo(dtype).eps, rtol=0)


def test_guides_can_be_saved():
    guide = started(rows)
    again = AutoKHot(rows)
    again()
    again.load_state_dict(guide.state_dict())
    torch.testing.assert_close(again.designs()["x"].mean, guide.designs()["x"].mean)
    state = pickle.loads(pickle.dumps(guide.state_dict()))
    assert torch.equal(state["logits.x_unconstrained"], logits_of(guide))


def subsampled_sizes():
    with pyro.plate("rows", 6, subsample_size=3):
        pyro.sample("x", ConditionalPoisson(logits=torch.zeros(5), k=torch.tensor([1, 2, 3])))


def one_site(fn):
    return lambda: pyro.sample("x", fn)


@pytest.mark.parametrize(
    ("error", "match", "model", "kwargs"),
    [
        (TypeError, "`model`", 3, {}),
        (TypeError, "`estimator` must be a function of a design", rows, {"estimator": "ReinMax"}),
        (TypeError, "`init_scale`", rows, {"init_scale": "small"}),
        (ValueError, "`init_scale` must be finite and at least 0, but got -1", rows, {"init_scale": -1}),
        (TypeError, "'x' has the distribution Normal.*AutoGuideList", one_site(dist.Normal(0.0, 1.0)), {}),
        (TypeError, "PhantomUnit.*by hand", one_site(PhantomUnit(Brewer, logits=torch.zeros(4))), {}),
        (ValueError, "`model` must have a latent k-hot site", lambda: None, {}),
        (
            NotImplementedError,
            "ELBO of minus infinity at the site 'x'.*excludes size 2 and allows .* finite log_prior",
            one_site(ConditionalPoisson(logits=torch.zeros(4), k=(1, 3, torch.tensor([0.0, -torch.inf, 0.0])))),
            {},
        ),
        (NotImplementedError, "plate 'rows' subsamples the rows of 'x', which differ in `k`", subsampled_sizes, {}),
    ],
)
def test_errors(error, match, model, kwargs):
    with pytest.raises(error, match=match):
        AutoKHot(model, **kwargs)()


def test_a_model_is_refused_at_each_call():
    def model():
        pyro.sample("x", ConditionalPoisson(logits=normal(4), k=2))
        pyro.sample("z", dist.Normal(0.0, 1.0))

    guide = AutoKHot(model)
    for _ in range(2):
        with pytest.raises(TypeError, match="'z' has the distribution"):
            guide()


def test_what_has_no_order_has_no_median():
    guide = AutoKHot(one_site(Pivotal(logits=torch.zeros(4), k=2)))
    with pytest.raises(RuntimeError, match="before its first call"):
        guide.designs()
    for call in (guide.median, partial(guide.quantiles, [0.5])):
        with pytest.raises(NotImplementedError, match="k-hot vectors have no order: guide.designs()"):
            call()
