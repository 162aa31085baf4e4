"""Recorded functions: what they return for other inputs, and what cannot be recorded; recorded models in KHotSwap."""

import itertools
import pickle
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import HMC, MCMC

from khot import ConditionalPoisson, KHotSwap
from khot.infer.recorded import record
from tests.gof import check_subsets
from tests.infer.test_khot_swap import check_selection, run, selection
from tests.inputs import normal

ROWS, SCORES = normal(6, 4), normal(5)


@pytest.fixture(autouse=True)
def fresh_pyro():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def writes(x):
    """Constants that are written to, by constants and by the input."""
    weights, shifts = torch.zeros(3), torch.zeros(3)
    weights[0] = 1.0
    weights.select(0, 1).fill_(4.0)
    shifts[1:] = x[1:]
    return [weights * x + shifts, weights.sum() * torch.ones(2)]


def gradient(x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = (x.sin() * torch.arange(3.0)).square().sum()
    return list(torch.autograd.grad(y, x))


@pytest.mark.parametrize("function", [writes, gradient, lambda x: [x[x > 0].sum()]], ids=["writes", "gradient", "mask"])
def test_other_inputs(function):
    recorded = record(function, [normal(3).float()])
    for seed in (1, 2, 3):
        x = normal(3, seed=seed).float()
        for found, expected in zip(recorded(x), function(x), strict=True):
            torch.testing.assert_close(found, expected)


REFUSED = {
    "branch": lambda x: [x if x[0] > 0 else -x],
    "float": lambda x: [x * float(x[0])],
    "int": lambda x: [x * int(x[0])],
    "tolist": lambda x: [x * x.tolist()[0]],
    "numpy": lambda x: [torch.from_numpy(np.sin(x.numpy()))],
    "asarray": lambda x: [x * torch.tensor(np.asarray(x)).sum()],
    "equal": lambda x: [x if torch.equal(x, x.abs()) else -x],
    "rand": lambda x: [x + torch.rand(3)],
    "dropout": lambda x: [torch.dropout(x, 0.5, True)],
}


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_refused(function):
    with pytest.raises(RuntimeError, match=r"tracing tensor|reads the numbers|random numbers"):
        record(function, [normal(3).float()])


@pytest.mark.parametrize("k", [3, (0, 4)], ids=["three", "at most four"])
def test_posterior_against_enumeration(k):
    x = run(partial(selection, k, 100), num_samples=30, warmup_steps=80, jit_compile=True).get_samples()["x"]
    check_selection(k, lambda f: f(x).mean(0))


@pytest.mark.slow
@pytest.mark.parametrize("chains", [None, 3])
def test_the_same_chain_as_without(chains):
    """With continuous sites on which a prior depends, a second k-hot site and the same random numbers."""

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        x = pyro.sample("x", ConditionalPoisson(logits=SCORES * scale.unsqueeze(-1), k=2))
        z = pyro.sample("z", ConditionalPoisson(logits=SCORES[:4], k=2))
        pyro.sample("y", dist.Normal((x * SCORES).sum(-1) + z[..., 0], 1 + scale), obs=torch.tensor(3.0).double())

    def end(jit_compile):
        pyro.set_rng_seed(0)
        kernel = KHotSwap(
            model, partial(HMC, step_size=0.3, num_steps=2), chains=chains, jit_compile=jit_compile, swaps_per_step=4
        )
        mcmc = MCMC(kernel, 40, 20, disable_progbar=True)
        mcmc.run()
        return mcmc.get_samples()

    recorded, expected = end(True), end(False)
    for name, values in expected.items():
        torch.testing.assert_close(recorded[name].double(), values.double(), rtol=1e-3, atol=1e-3)


def outliers(y):
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4).double(), k=2))
    with pyro.plate("rows", 6, dim=-1):
        is_outlier = pyro.sample("outlier", dist.Bernoulli(torch.tensor(0.2).double()), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(ROWS @ x, 0.3 + 5 * is_outlier), obs=y)


def test_sites_that_are_summed_out():
    """The law of the end of short chains from exact draws is the posterior, level 1e-6."""
    y = ROWS[:, :2].sum(-1) + 5 * torch.eye(6)[0].double()
    support = ConditionalPoisson(logits=torch.zeros(4).double(), k=2).enumerate_support()
    terms = [dist.Normal(support @ ROWS.mT, scale).log_prob(y).exp() for scale in (0.3, 5.3)]
    posterior = (0.8 * terms[0] + 0.2 * terms[1]).log().sum(-1).softmax(0)
    kernel = KHotSwap(outliers, jit_compile=True)
    kernel.setup(0, y)
    ends = []
    for start in support[posterior.multinomial(1500, replacement=True)]:
        params = {"x": start}
        for _ in range(3):
            params = kernel.sample(params)
        ends.append(params["x"])
    check_subsets(torch.stack(ends), support, posterior)


def test_a_recording_is_made_again_where_a_kernel_is_sent():
    kernel = KHotSwap(partial(selection, 3, 1), jit_compile=True)
    kernel.setup(0)
    there = pickle.loads(pickle.dumps(kernel))
    assert there._log_joint._recorded is None and kernel._log_joint._recorded is not None
    assert (there.sample(kernel.initial_params)["x"].sum(-1) == 3).all()


def with_branch():
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
    pyro.factor("gain", x[1] if x[0] > 0 else x[2])


NUMBERS = itertools.count()


def with_state():
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
    pyro.factor("gain", next(NUMBERS) * x[0])


def test_models_that_cannot_be_recorded():
    with pytest.raises(ValueError, match=r"(?s)same tensor operations .* jit_compile=False \(RuntimeError"):
        run(with_branch, jit_compile=True)
    assert run(with_branch).get_samples()["x"].shape == (20, 4)
    with pytest.raises(ValueError, match="a recording of the model gave other values than the model"):
        run(with_state, jit_compile=True)
