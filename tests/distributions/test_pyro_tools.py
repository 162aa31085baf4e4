"""What Pyro has around designs, estimators and relaxed laws: prediction, inspection, storage, autoguides, MCMC."""

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
    TraceMeanField_ELBO,
    config_enumerate,
)
from pyro.infer.autoguide import AutoDelta, AutoDiscreteParallel, AutoGuideList, AutoNormal
from pyro.infer.inspect import get_dependencies, get_model_relations
from pyro.ops.stats import effective_sample_size

from khot import ConditionalPoisson, PhantomUnit, RelaxedKHot, RelaxedKHotStraightThrough, Sampford, StraightThrough
from tests.inputs import COST, LOGITS
from tests.registry import DESIGNS

pytestmark = pytest.mark.usefixtures("fresh_pyro")

K = 2

SCORED = [case for case in DESIGNS if case.has_log_prob]
OTHERS = {  # that are no members of the registry
    "phantom_unit": lambda logits, k: PhantomUnit(Sampford, logits=logits),
    "straight_through": lambda logits, k: StraightThrough(ConditionalPoisson(logits=logits, k=k)),
    "relaxed": lambda logits, k: RelaxedKHot(0.5, logits=logits, k=k),
    "relaxed_straight_through": lambda logits, k: RelaxedKHotStraightThrough(0.5, logits=logits, k=k),
}
SITES = {case.name: case.make for case in SCORED} | OTHERS
SEEN = torch.tensor([0.1, -0.4, 0.8], dtype=torch.float64)
every_site = pytest.mark.parametrize("make", SITES.values(), ids=SITES)
some_quickly = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] if i > 4 else [])
        for i, (name, make) in enumerate(SITES.items())
    ],
)


def hierarchy(make):
    """A continuous latent variable shifts the logits of a plate of k-hot sites, which are observed with noise."""

    def model(data=SEEN):
        shift = pyro.sample("shift", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0)).unsqueeze(-1)
        with pyro.plate("rows", 3):
            x = pyro.sample("x", make(logits=LOGITS + shift * COST, k=K))
            pyro.sample("y", dist.Normal(x @ COST, 0.5), obs=data)

    return model


conditional_poisson_model = hierarchy(ConditionalPoisson)


@some_quickly
def test_log_prob_shapes_and_predictive(make):
    model = hierarchy(make)
    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["x"]["log_prob"].shape == (3,)
    for parallel in (False, True):
        draws = Predictive(model, num_samples=4, parallel=parallel)(None)
        assert draws["x"].shape == (4, 3, 5) and draws["y"].shape == (4, 3)
        assert make(logits=LOGITS.expand(4, 3, 5), k=K).support.check(draws["x"]).all()


@some_quickly
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
def test_continuous_autoguides_refuse_the_site_and_work_without_it(autoguide):
    with pytest.raises(ValueError, match=r"no transform maps real vectors to k_hot\(.*poutine.block\(model, hide="):
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


@pytest.mark.slow
def test_nuts_sums_k_hot_sites_out():
    model = hierarchy(ConditionalPoisson)
    mcmc = MCMC(NUTS(model, max_plate_nesting=1), num_samples=200, warmup_steps=80, disable_progbar=True)
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
