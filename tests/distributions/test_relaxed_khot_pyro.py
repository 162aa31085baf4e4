"""Relaxed k-hot sites in Pyro: under the ELBOs, in NUTS and in autoguides."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.ops.stats import effective_sample_size

from khot import ConditionalPoisson, RelaxedKHot, RelaxedKHotStraightThrough, sigmoid_topk
from khot.constraints import capped_simplex
from tests.oracle import tensor

float64 = torch.float64
LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6], [0.0, 0.3, -0.4, 2.5, 1.0]]).double()
GAIN = tensor([3.0, 0.0, 1.0, 2.5, 0.5])


@pytest.fixture(autouse=True)
def fresh_pyro():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


@pytest.mark.slow
@pytest.mark.parametrize("elbo_class", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("form", ["relaxed", "hard", "hard guide"])
def test_trains_under_elbos(form, elbo_class):
    cls = RelaxedKHot if form == "relaxed" else RelaxedKHotStraightThrough

    def model():
        with pyro.plate("rows", 2):
            if form == "hard guide":
                prior = ConditionalPoisson(logits=torch.zeros(5, dtype=float64), k=2)
            else:
                prior = cls(0.5, logits=torch.zeros(5, dtype=float64), k=2)
            x = pyro.sample("x", prior)
            pyro.factor("gain", 3 * x @ GAIN)

    def guide():
        logits = pyro.param("logits", lambda: torch.zeros(2, 5, dtype=float64))
        with pyro.plate("rows", 2):
            pyro.sample("x", cls(0.5, logits=logits, k=2))

    elbo = elbo_class(num_particles=8, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
    losses = [svi.step() for _ in range(80)]
    assert pyro.param("logits").topk(2).indices.sort().values.tolist() == [[0, 3], [0, 3]]
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.slow
def test_nuts_recovers_the_law():
    """A cold site, whose values round to 0 and 1 more often than not."""
    relaxed = RelaxedKHot(0.05, logits=LOGITS[0, :4], k=2)

    def model():
        pyro.sample("y", relaxed)

    mcmc = MCMC(NUTS(model, max_tree_depth=4), num_samples=200, warmup_steps=80, disable_progbar=True)
    mcmc.run()
    found, exact = (torch.cat([y, y.logit()], -1) for y in (mcmc.get_samples()["y"], relaxed.sample((100_000,))))
    error = (found.var(0) / effective_sample_size(found[None]) + exact.var(0) / len(exact)).sqrt()
    assert ((found.mean(0) - exact.mean(0)).abs() < 4 * error).all()


def test_autonormal_takes_a_cold_site():
    def model():
        with pyro.plate("rows", 3):
            y = pyro.sample("y", RelaxedKHot(0.05, logits=LOGITS.float(), k=2))
            pyro.sample("seen", dist.Normal(y @ GAIN.float(), 0.5), obs=torch.tensor([5.5, 1.5, 4.0]))

    guide = AutoNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    assert all(math.isfinite(svi.step()) for _ in range(20))
    y = guide()["y"]
    assert y.shape == (3, 5) and capped_simplex(2).check(y).all()
    torch.testing.assert_close(sigmoid_topk(y.logit(), 2), y, rtol=1e-3, atol=1e-3)
