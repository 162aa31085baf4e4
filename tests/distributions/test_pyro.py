"""Every design as a citizen of Pyro: plates, masks, subsampling, enumeration and the ELBOs."""

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import (
    SVI,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    config_enumerate,
)

from khot import ConditionalPoisson, StraightThrough
from tests.inputs import COST, LOGITS
from tests.registry import DESIGNS

pytestmark = pytest.mark.usefixtures("fresh_pyro")

K = 2

every_design = pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
SCORED = [case for case in DESIGNS if case.has_log_prob]
every_scored_design = pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)


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
@pytest.mark.slow
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


def test_several_latents_of_one_event_are_not_enumerated():
    """As the documentation warns: Pyro draws such a site, and its rows in a plate are enumerated."""

    @config_enumerate
    def model(in_plate):
        design = ConditionalPoisson(logits=LOGITS.expand(3, 5), k=K)
        with pyro.plate("rows", 3) if in_plate else nullcontext():
            pyro.sample("x", design if in_plate else design.to_event(1))

    asked = [poutine.trace(model).get_trace(in_plate).nodes["x"]["infer"] for in_plate in (False, True)]
    assert [site.get("enumerate") for site in asked] == [None, "parallel"]


@every_scored_design
@pytest.mark.parametrize("elbo_class", [Trace_ELBO, TraceGraph_ELBO])
@pytest.mark.slow
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


@pytest.mark.parametrize("case", [case for case in DESIGNS if not case.has_log_prob], ids=lambda case: case.name)
def test_missing_log_prob_is_named(case):
    def model():
        pyro.sample("x", case.make(logits=LOGITS, k=K))

    with pytest.raises(NotImplementedError, match="no log_prob"):
        Trace_ELBO().loss(model, model)


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
