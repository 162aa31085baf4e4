"""KHotReparam: either form against enumeration, under wrappers and plates, and its errors."""

from functools import partial

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_sample

import khot
from khot import ConditionalPoisson, PhantomUnit, Pivotal, StraightThrough, Systematic
from khot.constraints import capped_simplex, k_hot
from khot.infer import KHotReparam

GAIN = torch.tensor([2.0, -0.5, 1.0, 1.5, 0.3], dtype=torch.float64)
LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1, -0.3], dtype=torch.float64)


@pytest.fixture(autouse=True)
def fresh_pyro():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(True):
        yield


def model():
    with pyro.plate("rows", 2):
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(5, dtype=torch.float64), k=2))
        pyro.factor("gain", x @ GAIN)


def guide():
    logits = pyro.param("logits", lambda: torch.zeros(2, 5, dtype=torch.float64))
    with pyro.plate("rows", 2):
        return pyro.sample("x", ConditionalPoisson(logits=logits, k=2))


def loss_of(logits):
    """The loss of the problem above by enumeration of the pairs, for one row."""
    prior, posterior = (ConditionalPoisson(logits=theta, k=2) for theta in (torch.zeros_like(logits), logits))
    x = posterior.enumerate_support()
    log_q = posterior.log_prob(x)
    return (log_q.exp() * (log_q - prior.log_prob(x) - x @ GAIN)).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("elbo_class", [Trace_ELBO, TraceMeanField_ELBO])
def test_straight_through_reaches_the_optimum(elbo_class):
    """A gain linear in x: straight-through is exact, and the optimum is the posterior, of logits GAIN."""
    reparametrised = poutine.reparam(guide, {"x": KHotReparam()})
    elbo = elbo_class(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, reparametrised, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.02 ** (1 / 150)}), elbo)
    for _ in range(150):
        svi.step()
    excess = loss_of(pyro.param("logits").detach()) - loss_of(GAIN)
    assert (excess >= -1e-12).all() and (excess < 1e-2).all()  # from 0.47 at the start


@pytest.mark.slow
def test_relaxed_form_finds_the_best_pair():
    """The temperature falls. The relaxed loss is at least the smallest loss of the pairs themselves."""
    relax = KHotReparam(temperature=0.5)
    relaxed = [poutine.reparam(fn, {"x": relax}) for fn in (model, guide)]
    elbo = Trace_ELBO(num_particles=20, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(*relaxed, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.1 ** (1 / 100)}), elbo)
    start = elbo.loss(*relaxed)
    for step in range(100):
        relax.temperature = max(0.1, 0.5 * 0.97**step)
        svi.step()
    assert pyro.param("logits").topk(2).indices.sort().values.tolist() == [[0, 3], [0, 3]]
    loss = sum(elbo.loss(*relaxed) for _ in range(20)) / 20
    assert 2 * loss_of(GAIN) < loss < start - 0.1


def test_forms_of_a_site():
    def site(fn, **kwargs):
        return poutine.trace(poutine.reparam(lambda: pyro.sample("x", fn), {"x": KHotReparam(**kwargs)})).get_trace()

    design = Systematic(logits=LOGITS.expand(3, 5), k=2, temperature=torch.tensor([0.5, 1.0, 2.0]).double())
    mask = torch.tensor([True, False, True])
    for fn in (design.mask(mask), design.to_event(1), design.mask(mask).to_event(1), design.to_event(1).mask(True)):
        for kwargs in ({}, {"temperature": 0.5}, {"temperature": torch.tensor([0.5, 1.0, 2.0]).double()}):
            new = site(fn, **kwargs)
            new.compute_log_prob()
            node = new.nodes["x"]
            check = capped_simplex(2) if kwargs else k_hot(2)
            assert node["fn"].batch_shape == fn.batch_shape and node["fn"].event_shape == fn.event_shape
            assert node["log_prob"].shape == fn.batch_shape and node["fn"].has_rsample and not node["is_observed"]
            assert check.check(node["value"]).all()
    hidden = site(design.mask(mask), temperature=0.5).nodes["x"]
    assert hidden["fn"].log_prob(hidden["value"])[1] == 0
    relaxed = site(design, temperature=0.5).nodes["x"]["fn"]
    torch.testing.assert_close(relaxed.logits, LOGITS / torch.tensor([[0.5], [1.0], [2.0]]).double())
    from_probs = site(Pivotal(probs=design.probs), temperature=0.5).nodes["x"]["fn"]
    torch.testing.assert_close(from_probs.logits.softmax(-1), relaxed.logits.softmax(-1))
    scored = KHotReparam(partial(StraightThrough, log_prob="none"))
    trace = poutine.trace(poutine.reparam(lambda: pyro.sample("x", Pivotal(probs=design.probs)), {"x": scored}))
    assert trace.get_trace().log_prob_sum() == 0


@pytest.mark.parametrize("elbo_class", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("vectorize", [False, True])
def test_a_relaxation_of_one_side_only_raises(elbo_class, vectorize):
    relax = KHotReparam(temperature=0.5)
    relaxed_model, relaxed_guide = (poutine.reparam(fn, {"x": relax}) for fn in (model, guide))
    hard_guide = poutine.reparam(guide, {"x": KHotReparam()})
    elbo = elbo_class(num_particles=2, vectorize_particles=vectorize, max_plate_nesting=1)
    pairs = [(model, relaxed_guide, "relax the model too"), (relaxed_model, hard_guide, "needs a relaxed guide")]
    for one, other, match in pairs:
        with pytest.raises(ValueError, match="site 'x'") as caught:
            elbo.loss(one, other)
        assert match in f"{caught.value}{caught.value.__cause__}"


def test_continuous_inference_on_the_relaxed_form():
    relaxed = poutine.reparam(model, {"x": KHotReparam(temperature=0.5)})
    autoguide = AutoNormal(relaxed, init_loc_fn=init_to_sample)
    svi = SVI(relaxed, autoguide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    for _ in range(5):
        svi.step()
    assert capped_simplex(2).check(autoguide()["x"]).all()
    mcmc = MCMC(
        NUTS(relaxed, max_tree_depth=2, init_strategy=init_to_sample),
        num_samples=5,
        warmup_steps=5,
        disable_progbar=True,
    )
    mcmc.run()
    assert capped_simplex(2).check(mcmc.get_samples()["x"]).all()


def test_values_that_are_given_are_kept():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64).expand(2, 5)
    conditioned = poutine.condition(poutine.reparam(guide, {"x": KHotReparam()}), {"x": x})
    assert torch.equal(conditioned(), x)


def test_errors():
    for error, match, args, kwargs in (
        (ValueError, "cannot be combined", (StraightThrough,), {"temperature": 0.5}),
        (TypeError, "`estimator`.*'simple'", ("simple",), {}),
        (ValueError, "`temperature`.*-1", (), {"temperature": -1}),
        (ValueError, "`temperature`.*nan", (), {"temperature": float("nan")}),
        (TypeError, "`temperature` must be a real number or a tensor, but got 'cold'", (), {"temperature": "cold"}),
    ):
        with pytest.raises(error, match=match):
            KHotReparam(*args, **kwargs)
    x = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    design, phantom = ConditionalPoisson(logits=LOGITS, k=2), PhantomUnit(ConditionalPoisson, logits=LOGITS)
    for error, match, fn, obs, kwargs in (
        (NotImplementedError, "latent sites, but 'x' is observed", design, x, {}),
        (TypeError, "'x' has the distribution Normal", dist.Normal(LOGITS, 1.0).to_event(1), None, {}),
        (TypeError, "'x' has the distribution StraightThrough", StraightThrough(design), None, {}),
        (TypeError, "fixed size, but 'x' is a PhantomUnit", phantom, None, {"temperature": 0.5}),
    ):
        with pytest.raises(error, match=match), poutine.reparam(config={"x": KHotReparam(**kwargs)}):
            pyro.sample("x", fn, obs=obs)
    with poutine.reparam(config={"x": KHotReparam()}):
        assert pyro.sample("x", phantom).requires_grad is False and khot.KHotReparam is KHotReparam


def test_relaxed_form_depends_on_the_law_not_on_how_it_was_given():
    logits = torch.tensor([0.3, -1.0, 0.8, 2.0])
    expected = khot.sigmoid_topk(logits, 2, 0.5).logit()
    for design in (
        Pivotal(logits=logits, k=2, temperature=0.5),
        Pivotal(logits=logits, k=2, relaxation=khot.transport_topk, temperature=1.0),
        Pivotal(probs=khot.sigmoid_topk(logits, 2, 0.5)),
    ):
        site = poutine.trace(poutine.reparam(lambda d=design: pyro.sample("x", d), {"x": KHotReparam(temperature=1.0)}))
        relaxed = site.get_trace().nodes["x"]["fn"].logits
        torch.testing.assert_close(relaxed - relaxed.mean(), expected - expected.mean())
