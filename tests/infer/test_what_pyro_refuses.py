"""What Pyro's tools say of a k-hot site that they cannot take, and what takes it in their place."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import config_enumerate, infer_discrete
from pyro.infer.autoguide import (
    AutoDiscreteParallel,
    AutoNormal,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
)
from pyro.infer.mcmc import HMC, MCMC, NUTS
from pyro.infer.mcmc.util import initialize_model

from khot import ConditionalPoisson, KHotReparam, StraightThrough
from khot.infer import subset_categorical, subset_vector
from tests.registry import DESIGNS, ESTIMATORS

pytestmark = pytest.mark.usefixtures("fresh_pyro")

LOGITS = torch.tensor([0.5, -1.0, 0.0, 2.0])
SEEN = torch.tensor(1.5)
ALTERNATIVES = r"(?s)KHotSwap.*KHotReparam\(temperature=.*init_strategy=init_to_sample.*init_loc_fn=init_to_sample.*"
ALTERNATIVES += "subset_categorical"


def model_of(law):
    """A k-hot site of this law beside a continuous one."""

    def model():
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        x = pyro.sample("x", law)
        pyro.sample("y", dist.Normal(shift + x[..., 0], 1.0), obs=SEEN)

    return model


@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_autoguides_of_every_design(case):
    with pytest.raises(ValueError, match=ALTERNATIVES):
        AutoNormal(model_of(case.make(logits=LOGITS, k=2)))()


@pytest.mark.parametrize("case", ESTIMATORS, ids=lambda case: case.name)
def test_nuts_of_every_estimator(case):
    law = case.wrap(ConditionalPoisson(logits=LOGITS, k=2))
    with pytest.raises(ValueError, match=ALTERNATIVES):
        initialize_model(model_of(law))


@pytest.mark.parametrize("start", [init_to_feasible, init_to_mean, init_to_median, init_to_uniform])
def test_a_relaxed_site_names_where_to_start(start):
    relaxed = poutine.reparam(model_of(ConditionalPoisson(logits=LOGITS, k=2)), {"x": KHotReparam(temperature=0.5)})
    with pytest.raises(ValueError, match=ALTERNATIVES):
        AutoNormal(relaxed, init_loc_fn=start)()
    with pytest.raises(ValueError, match=ALTERNATIVES):
        initialize_model(relaxed, init_strategy=start)
    assert AutoNormal(relaxed, init_loc_fn=init_to_sample)()["x"].shape == (4,)
    assert initialize_model(relaxed, init_strategy=init_to_sample)[0]["x"].shape == (3,)


@pytest.mark.parametrize("kernel", [HMC, NUTS])
@pytest.mark.parametrize(
    ("law", "error", "match"),
    [
        (ConditionalPoisson(logits=torch.zeros(60), k=30), ValueError, r"C\(60, 30\) = .*KHotSwap"),
        (ConditionalPoisson(logits=torch.zeros(60), k=(0, 30)), ValueError, "0 to 30 ones out of 60.*KHotSwap"),
        (ConditionalPoisson(logits=LOGITS.expand(3, 4), k=2).to_event(1), ValueError, ALTERNATIVES),
        (StraightThrough(ConditionalPoisson(logits=LOGITS, k=2)), ValueError, ALTERNATIVES),
    ],
    ids=["many_vectors", "many_vectors_of_a_range", "several_rows", "estimator"],
)
def test_chains_on_a_site_that_cannot_be_enumerated(kernel, law, error, match):
    mcmc = MCMC(kernel(model_of(law)), num_samples=1, warmup_steps=1, disable_progbar=True)
    with pytest.raises(error, match=match):
        mcmc.run()


def numbered(design):
    """:func:`model_of` a design, with the numbers of its vectors as the site."""

    def model():
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        x = subset_vector(pyro.sample("i", subset_categorical(design)), 4, 2)
        pyro.sample("y", dist.Normal(shift + x[..., 0], 1.0), obs=SEEN)

    return model


@pytest.mark.parametrize("make_model", [model_of, numbered])
def test_nuts_sums_small_sites_out(make_model):
    """The potential of the continuous site is that of the sum over all vectors."""
    design = ConditionalPoisson(logits=LOGITS, k=2)
    model = make_model(design)
    potential = initialize_model(model, max_plate_nesting=0)[1]
    support = design.enumerate_support()
    for shift in torch.tensor([-1.0, 0.3]):
        terms = design.log_prob(support) + dist.Normal(shift + support[:, 0], 1.0).log_prob(SEEN)
        expected = -(dist.Normal(0.0, 1.0).log_prob(shift) + terms.logsumexp(0))
        torch.testing.assert_close(potential({"shift": shift}), expected)
    mcmc = MCMC(NUTS(model, max_tree_depth=2), num_samples=3, warmup_steps=3, disable_progbar=True)
    mcmc.run()
    assert set(mcmc.get_samples()) == {"shift"}


def test_rows_of_different_sizes_are_enumerated_by_number():
    design = ConditionalPoisson(logits=LOGITS, k=torch.tensor([1, 2]))
    with pytest.raises(NotImplementedError, match=r"k in \[1, 2\]; khot.infer.subset_categorical"):
        infer_discrete(config_enumerate(model_of(design)), first_available_dim=-2)()


@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_the_errors_that_the_guide_to_pyro_explains(case):
    """Two tools fail before they ask the design for anything; docs/guide/pyro.md quotes Pyro's own errors."""

    def model():
        x = pyro.sample("x", case.make(logits=LOGITS, k=2))
        pyro.sample("y", dist.Normal(x[..., 0], 1.0), obs=SEEN)

    with pytest.raises(NotImplementedError, match=f"{case.public.__name__} is not supported"):
        AutoDiscreteParallel(model)()
    if case.has_log_prob:
        with pytest.raises(ValueError, match="Invalid tensor shape"):
            infer_discrete(config_enumerate(model), first_available_dim=-1)()
