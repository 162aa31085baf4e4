"""Every design as a citizen of Pyro: plates, masks, enumeration, the ELBOs, autoguides, MCMC, inspection, storage."""

import io
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import (
    MCMC,
    NUTS,
    SVI,
    Predictive,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    config_enumerate,
)
from pyro.infer.autoguide import AutoDelta, AutoDiscreteParallel, AutoGuideList, AutoNormal
from pyro.infer.inspect import get_dependencies, get_model_relations
from pyro.ops.stats import effective_sample_size

from khot import ConditionalPoisson, PhantomUnit, RelaxedKHot, RelaxedKHotStraightThrough, Sampford, StraightThrough
from tests.registry import DESIGNS

LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1, -0.3], dtype=torch.float64)
COST = torch.tensor([0.3, 1.0, -0.5, 0.2, 0.7], dtype=torch.float64)
K = 2

every_design = pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
SCORED = [case for case in DESIGNS if case.has_log_prob]
every_scored_design = pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def fresh_pyro():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(True):
        yield


def pair_cost(x):
    """A cost that is not linear in x, so that it sees more than the inclusion probabilities."""
    return (x @ COST).square()


def problem(case):
    """A model and a guide over one k-hot latent with equal supports, and the exact loss with its gradient."""

    def model():
        x = pyro.sample("x", case.make(logits=LOGITS, k=K))
        pyro.factor("cost", -pair_cost(x))

    def guide():
        logits = pyro.param("logits", LOGITS + torch.tensor([0.05, -0.05, 0.1, 0.0, -0.1]))
        pyro.sample("x", case.make(logits=logits, k=K))

    guide()
    logits = pyro.param("logits").detach().requires_grad_()
    posterior, prior = case.make(logits=logits, k=K), case.make(logits=LOGITS, k=K)
    x = posterior.enumerate_support()
    log_q = posterior.log_prob(x)
    assert torch.equal(log_q > -math.inf, prior.log_prob(x) > -math.inf)
    possible = log_q > -math.inf
    x, log_q = x[possible], log_q[possible]
    loss = (log_q.exp() * (log_q - prior.log_prob(x) + pair_cost(x))).sum()
    return model, guide, loss.item(), torch.autograd.grad(loss, logits)[0]


@every_design
def test_plate_expands_a_global_design(case):
    with pyro.plate("outer", 3, dim=-2), pyro.plate("inner", 4, dim=-1):
        x = pyro.sample("x", case.make(logits=LOGITS, k=K))
    assert x.shape == (3, 4, 5) and (x.sum(-1) == K).all()


@every_scored_design
def test_subsample_scales_and_selects(case):
    logits = LOGITS + torch.randn(100, 5, dtype=torch.float64)

    def model():
        with pyro.plate("data", 100, subsample_size=10) as index:
            pyro.sample("x", case.make(logits=logits[index], k=K))

    trace = poutine.trace(model).get_trace()
    site = trace.nodes["x"]
    assert site["value"].shape == (10, 5) and site["scale"] == 10
    index = trace.nodes["data"]["value"]
    expected = 10 * case.make(logits=logits[index], k=K).log_prob(site["value"]).sum()
    torch.testing.assert_close(trace.log_prob_sum(), expected)


@every_scored_design
def test_to_event(case):
    base = case.make(logits=LOGITS.expand(3, 4, 5), k=K)
    design = base.to_event(1)
    assert design.batch_shape == (3,) and design.event_shape == (4, 5)
    value = design.sample((2,))
    torch.testing.assert_close(design.log_prob(value), base.log_prob(value).sum(-1))
    assert design.support.check(value).shape == (2, 3) and design.support.check(value).all()
    assert design.expand((2, 3)).batch_shape == (2, 3)


@every_scored_design
def test_mask(case):
    mask = torch.tensor([True, False, True])
    base = case.make(logits=LOGITS, k=K).expand((3,))
    value = base.sample()
    torch.testing.assert_close(base.mask(mask).log_prob(value), base.log_prob(value) * mask)
    assert case.make(logits=LOGITS, k=K).mask(mask).batch_shape == (3,)
    assert base.mask(False).log_prob(value).sum() == 0


@every_scored_design
@pytest.mark.parametrize("enumerate_", ["sequential", "parallel"])
@pytest.mark.parametrize("expand", [False, True])
def test_enumeration_is_exact(case, enumerate_, expand):
    model, guide, exact_loss, exact_grad = problem(case)
    elbo = TraceEnum_ELBO(max_plate_nesting=0)
    guide = config_enumerate(guide, default=enumerate_, expand=expand)
    loss = elbo.differentiable_loss(model, guide)
    torch.testing.assert_close(loss.item(), exact_loss, rtol=1e-10, atol=1e-10)
    (grad,) = torch.autograd.grad(loss, pyro.param("logits").unconstrained())
    torch.testing.assert_close(grad, exact_grad, rtol=1e-9, atol=1e-9)


@every_scored_design
def test_enumeration_in_the_model(case):
    # Marginal likelihood of independent rows in a plate, the latent summed out in the model.
    data = torch.tensor([0.1, -0.4, 0.8], dtype=torch.float64)

    @config_enumerate
    def model():
        with pyro.plate("data", 3):
            x = pyro.sample("x", case.make(logits=LOGITS, k=K))
            pyro.sample("y", dist.Normal(x @ COST, 1.0), obs=data)

    loss = TraceEnum_ELBO(max_plate_nesting=1).loss(model, lambda: None)
    design = case.make(logits=LOGITS, k=K)
    x = design.enumerate_support()
    log_joint = design.log_prob(x)[:, None] + dist.Normal((x @ COST)[:, None], 1.0).log_prob(data)
    assert loss == pytest.approx(-log_joint.logsumexp(0).sum().item(), rel=1e-10)


@every_scored_design
@pytest.mark.parametrize("elbo_class", [Trace_ELBO, TraceGraph_ELBO])
def test_score_function_elbos_agree_with_enumeration(case, elbo_class):
    # Ten estimates, each of 500 particles: their mean within 8 standard errors (two-sided 2e-5 for Student's t with 9
    # degrees of freedom; the seed is fixed).
    model, guide, exact_loss, exact_grad = problem(case)
    elbo = elbo_class(num_particles=500, vectorize_particles=True, max_plate_nesting=0)
    losses, grads = [], []
    for _ in range(10):
        pyro.param("logits").unconstrained().grad = None
        losses.append(elbo.loss_and_grads(model, guide))
        grads.append(pyro.param("logits").unconstrained().grad)
    for estimates, exact in ((torch.tensor(losses), exact_loss), (torch.stack(grads), exact_grad)):
        error = estimates.std(0) / math.sqrt(len(estimates))
        assert ((estimates.mean(0) - exact).abs() <= 8 * error + 1e-12).all()


@pytest.mark.slow
@every_scored_design
def test_svi_finds_the_best_subset(case):
    def model():
        x = pyro.sample("x", case.make(logits=torch.zeros(5), k=K).mask(False))
        pyro.factor("cost", -10 * (x * torch.tensor([1.0, 0.2, 0.9, 0.1, 0.8])).sum(-1))

    def guide():
        pyro.sample("x", case.make(logits=pyro.param("logits", torch.zeros(5)), k=K), infer={"enumerate": "parallel"})

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceEnum_ELBO(max_plate_nesting=0))
    for _ in range(100):
        svi.step()
    learned = case.make(logits=pyro.param("logits").detach(), k=K)
    assert learned.mode.tolist() == [0, 1, 0, 1, 0] and learned.mean[[1, 3]].min() > 0.9


@every_design
def test_missing_log_prob_is_named(case):
    if case.has_log_prob:
        return

    def model():
        pyro.sample("x", case.make(logits=LOGITS, k=K))

    with pytest.raises(NotImplementedError, match="no log_prob"):
        Trace_ELBO().loss(model, model)


OTHERS = {  # that are no members of the registry
    "phantom_unit": lambda logits, k: PhantomUnit(Sampford, logits=logits),
    "straight_through": lambda logits, k: StraightThrough(ConditionalPoisson(logits=logits, k=k)),
    "relaxed": lambda logits, k: RelaxedKHot(0.5, logits=logits, k=k),
    "relaxed_straight_through": lambda logits, k: RelaxedKHotStraightThrough(0.5, logits=logits, k=k),
}
SITES = {case.name: case.make for case in SCORED} | OTHERS
SEEN = torch.tensor([0.1, -0.4, 0.8], dtype=torch.float64)
every_site = pytest.mark.parametrize("make", SITES.values(), ids=SITES)


def hierarchy(make):
    """A continuous latent shifts the logits of a plate of k-hot ones, which are seen through noise."""

    def model(data=SEEN):
        shift = pyro.sample("shift", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0)).unsqueeze(-1)
        with pyro.plate("rows", 3):
            x = pyro.sample("x", make(logits=LOGITS + shift * COST, k=K))
            pyro.sample("y", dist.Normal(x @ COST, 0.5), obs=data)

    return model


conditional_poisson_model = hierarchy(ConditionalPoisson)


@every_site
def test_log_prob_shapes_and_predictive(make):
    model = hierarchy(make)
    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["x"]["log_prob"].shape == (3,)
    for parallel in (False, True):
        draws = Predictive(model, num_samples=4, parallel=parallel)(None)
        assert draws["x"].shape == (4, 3, 5) and draws["y"].shape == (4, 3)
        assert make(logits=LOGITS.expand(4, 3, 5), k=K).support.check(draws["x"]).all()


@every_site
def test_inspection(make):
    model = hierarchy(make)
    relations = get_model_relations(model)
    assert relations["sample_sample"] == {"shift": [], "x": ["shift"], "y": ["x"]}
    assert relations["sample_dist"]["x"] == type(make(logits=LOGITS, k=K)).__name__
    assert relations["plate_sample"] == {"rows": ["x", "y"]} and relations["observed"] == ["y"]
    assert set(get_dependencies(model)["posterior_dependencies"]["x"]) == {"x", "y"}


def test_rendering():
    pytest.importorskip("graphviz")
    assert "ConditionalPoisson" in pyro.render_model(conditional_poisson_model, render_distributions=True).source


@every_site
def test_storage_and_conversion(make):
    logits = torch.nn.Parameter(LOGITS.expand(3, 5).clone())
    design = make(logits=logits, k=K)
    buffer = io.BytesIO()
    torch.save(design, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    value = loaded.sample()
    assert type(loaded) is type(design)
    torch.testing.assert_close(loaded.log_prob(value), design.log_prob(value))
    module = torch.nn.ParameterDict({"logits": logits})
    assert make(logits=module.float()["logits"], k=K).sample().dtype == torch.float32


@pytest.mark.parametrize("name", sorted(SITES.keys() - {"phantom_unit"}))  # whose size depends on its contents
def test_stays_on_its_device(name):
    """A device without data: whatever is made on another one, or read on the host, raises."""
    with pyro.validation_enabled(False):
        design = SITES[name](logits=LOGITS.to("meta"), k=K)
        assert design.log_prob(torch.empty(3, 5, device="meta")).device.type == "meta"
        if name != "brewer":  # who looks for the largest number of units to draw
            assert design.sample((3,)).device.type == "meta"


@every_site
def test_wrong_values_and_plates_give_the_usual_errors(make):
    def observe(value, logits=LOGITS):
        return poutine.trace(lambda: pyro.sample("x", make(logits=logits, k=K), obs=value)).get_trace()

    for value, match in (
        (torch.ones(5), "'x'(.|\n)*within the support"),
        (torch.tensor([1.0, 2.0, -1.0, 0.0, 0.0]), "'x'(.|\n)*within the support"),
        (torch.tensor([1.0, 1.0, 0.0]), "'x'(.|\n)*must match event_shape"),
    ):
        with pytest.raises(ValueError, match=match):
            observe(value.double()).compute_log_prob()

    def unplated():
        pyro.sample("x", make(logits=LOGITS.expand(2, 5), k=K))

    def misfit():
        with pyro.plate("rows", 3):
            unplated()

    with pytest.raises(ValueError, match='site "x", invalid log_prob shape'):
        Trace_ELBO().loss(unplated, unplated)
    with pytest.raises(ValueError, match="Shape mismatch inside plate"):
        Trace_ELBO().loss(misfit, misfit)


@pytest.mark.parametrize("autoguide", [AutoNormal, AutoDelta])
def test_continuous_autoguides_name_the_site_and_work_without_it(autoguide):
    with pytest.raises(ValueError, match="cannot handle discrete sample site 'x'"):
        autoguide(conditional_poisson_model)()
    hidden = autoguide(poutine.block(conditional_poisson_model, hide=["x"]))
    svi = SVI(
        config_enumerate(conditional_poisson_model),
        hidden,
        pyro.optim.Adam({"lr": 0.01}),
        TraceEnum_ELBO(max_plate_nesting=1),
    )
    assert math.isfinite(svi.step())


def test_autoguides_join_a_guide_of_the_site():
    with pytest.raises(NotImplementedError, match="ConditionalPoisson is not supported"):
        AutoDiscreteParallel(poutine.block(conditional_poisson_model, expose=["x"]))()

    def k_hot_guide(*args):
        logits = pyro.param("logits", lambda: torch.zeros(3, 5, dtype=torch.float64))
        with guide.plates["rows"]:
            return {"x": pyro.sample("x", StraightThrough(ConditionalPoisson(logits=logits, k=K)))}

    guide = AutoGuideList(conditional_poisson_model)
    guide.append(AutoNormal(poutine.block(conditional_poisson_model, hide=["x"])))
    guide.append(k_hot_guide)
    svi = SVI(conditional_poisson_model, guide, pyro.optim.Adam({"lr": 0.01}), TraceMeanField_ELBO())
    assert math.isfinite(svi.step()) and pyro.param("logits").abs().max() > 0


GAIN = torch.tensor([[2.0, -0.5, 1.0, 0.3], [0.0, 1.5, -1.0, 0.5], [1.0, 0.0, 0.5, -0.5]], dtype=torch.float64)
ELBOS = {
    "Trace_ELBO": (Trace_ELBO, None, {}),
    "TraceGraph_ELBO": (TraceGraph_ELBO, None, {"baseline": {"use_decaying_avg_baseline": True}}),
    "TraceEnum_ELBO": (TraceEnum_ELBO, None, {"enumerate": "parallel"}),
    "TraceMeanField_ELBO": (TraceMeanField_ELBO, StraightThrough, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("elbo_class", "estimator", "infer"), ELBOS.values(), ids=ELBOS)
def test_every_elbo_reaches_the_optimum(elbo_class, estimator, infer):
    """A plate whose posterior is the guide at logits GAIN: there the loss is the least, minus the log-evidence."""

    def model():
        with pyro.plate("rows", 3):
            x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4, dtype=torch.float64), k=K))
            pyro.factor("gain", (x * GAIN).sum(-1))

    def guide():
        logits = pyro.param("logits", lambda: torch.zeros(3, 4, dtype=torch.float64))
        design = ConditionalPoisson(logits=logits, k=K)
        with pyro.plate("rows", 3):
            pyro.sample("x", estimator(design) if estimator else design, infer=infer)

    particles = {} if elbo_class is TraceEnum_ELBO else {"num_particles": 20, "vectorize_particles": True}
    steps = 150
    svi = SVI(
        model,
        guide,
        pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.02 ** (1 / steps)}),
        elbo_class(max_plate_nesting=1, **particles),
    )
    for _ in range(steps):
        svi.step()
    x = ConditionalPoisson(logits=GAIN, k=K).enumerate_support()
    least = math.log(6) - (x * GAIN).sum(-1).logsumexp(0)

    def exact_loss(logits):
        log_q = ConditionalPoisson(logits=logits, k=K).log_prob(x)
        return (log_q.exp() * (log_q + math.log(6) - (x * GAIN).sum(-1))).sum(0)

    torch.testing.assert_close(exact_loss(GAIN), least)
    excess, at_start = exact_loss(pyro.param("logits").detach()) - least, exact_loss(0 * GAIN) - least
    assert (excess > -1e-12).all() and (excess < 0.02).all() and at_start.max() > 0.5


@pytest.mark.slow
def test_nuts_sums_k_hot_sites_out():
    model = hierarchy(ConditionalPoisson)
    mcmc = MCMC(NUTS(model, max_plate_nesting=1), num_samples=400, warmup_steps=100, disable_progbar=True)
    mcmc.run()
    shift = mcmc.get_samples()["shift"]
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    design = ConditionalPoisson(logits=LOGITS + grid[:, None] * COST, k=K)
    x = design.enumerate_support()
    seen = dist.Normal((x @ COST).unsqueeze(-1), 0.5).log_prob(SEEN)
    log_posterior = (design.log_prob(x).unsqueeze(-1) + seen).logsumexp(0).sum(-1) - grid.square() / 2
    weight = log_posterior.softmax(0)
    for statistic in (lambda z: z, torch.square):
        values = statistic(shift)
        error = values.std() / effective_sample_size(values[None, :, None]).sqrt()
        assert (values.mean() - weight @ statistic(grid)).abs() < 4 * error
