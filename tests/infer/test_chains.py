"""KHotSwap with chains in a batch: posteriors of each chain against enumeration, shapes, starts, and errors."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import HMC, MCMC

from khot import ConditionalPoisson, KHotSwap
from khot.infer.swaps import Point
from tests.gof import check_subsets
from tests.infer.test_khot_swap import RESPONSE, check_selection, likelihood, steps_from
from tests.inputs import normal

pytestmark = pytest.mark.usefixtures("fresh_pyro")

GAIN = normal(4, 4, seed=3)


def selection(k):
    x = pyro.sample("x", ConditionalPoisson(logits=normal(12, seed=2), k=k))
    pyro.sample("y", likelihood(x), obs=RESPONSE)


@pytest.mark.parametrize("k", [3, pytest.param((0, 4), marks=pytest.mark.slow)], ids=["three", "at most four"])
def test_every_chain_has_the_posterior(k):
    mcmc = MCMC(KHotSwap(partial(selection, k), chains=100), num_samples=30, warmup_steps=80, disable_progbar=True)
    mcmc.run()
    x = mcmc.get_samples(group_by_chain=True)["x"]
    assert x.shape == (100, 30, 12)
    check_selection(k, lambda f: f(x).mean(1))


@pytest.mark.parametrize(("n", "swaps"), [(4, None), (6, None), (4, 2), (6, 3)])
def test_chains_reach_all_vectors(n, swaps):
    """Even if half of the units are in, and all of them may leave at once; chi-square, level 1e-6."""
    design = ConditionalPoisson(logits=torch.zeros(n), k=n // 2)
    support = design.enumerate_support()
    kernel = KHotSwap(lambda: pyro.sample("x", design), chains=1000, swaps_per_proposal=swaps)
    start = {"x": support[:1].expand(1000, n)}
    mcmc = MCMC(kernel, num_samples=1, warmup_steps=200, initial_params=start, disable_progbar=True)
    mcmc.run()
    check_subsets(mcmc.get_samples()["x"], support, torch.full((len(support),), 1 / len(support)).double())


def coupled(k):
    """Two sites, the second of which has rows in an inner plate, next to each other and to a plate of no rows."""
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4).double(), k=k))
    with pyro.plate("rows", 2):
        y = pyro.sample("y", ConditionalPoisson(logits=normal(2, 4), k=1))
        pyro.factor("gain", ((x @ GAIN) * y).sum(-1))


@pytest.mark.parametrize(
    ("k", "chains"),
    [(2, 300), pytest.param((1, 3), 3000, marks=pytest.mark.slow)],
)
def test_law_stays_of_sites_with_and_without_a_plate(k, chains):
    """Exact draws from the posterior, one for each chain, still follow it after some steps, at level 1e-6."""
    laws = [ConditionalPoisson(logits=torch.zeros(4).double(), k=k)]
    laws += [ConditionalPoisson(logits=row, k=1) for row in normal(2, 4)]
    rows = [law.enumerate_support() for law in laws]
    support = torch.stack([torch.stack([a, b, c]) for a in rows[0] for b in rows[1] for c in rows[2]])
    a, b, c = support.unbind(1)
    gain = ((a @ GAIN) * (b + c)).sum(-1) + sum(law.log_prob(v) for law, v in zip(laws, (a, b, c), strict=True))
    posterior = gain.softmax(0)
    start = support[posterior.multinomial(chains, replacement=True)]
    kernel = KHotSwap(partial(coupled, k), chains=chains)
    end = steps_from(kernel, {"x": start[:, 0], "y": start[:, 1:]}, 6)
    assert kernel.diagnostics()["acceptance rate of swaps"]["x"][0] > 0
    end = torch.cat([end["x"], end["y"]], 1)
    assert (end != start).flatten(1).any(-1).double().mean() > 0.5
    check_subsets(end.flatten(1), support.flatten(1), posterior)


def two_sites():
    x = pyro.sample("x", ConditionalPoisson(logits=normal(4), k=2))
    z = pyro.sample("z", ConditionalPoisson(logits=normal(4, seed=1), k=(0, 2)))
    pyro.factor("gain", ((x @ GAIN) * z).sum(-1))


def test_states_are_mixed_chain_by_chain_without_another_evaluation(monkeypatch):
    """A state that some chains have left is the one that an evaluation of the model finds."""
    kernel = KHotSwap(two_sites, chains=20)
    kernel.setup(0)
    params, calls, evaluate = kernel.initial_params, [], kernel._log_joint
    monkeypatch.setattr(kernel, "_log_joint", lambda values: calls.append(1) or evaluate(values))
    params = kernel.sample(params)
    calls.clear()
    for _ in range(5):
        params = kernel.sample(params)
    assert len(calls) == 10
    expected = evaluate(params)
    for site in kernel._sites:
        found, wanted = kernel._at(params).points[site.name], expected.points[site.name]
        assert isinstance(found, Point) and torch.equal(found.value, wanted.value)
        for name in ("slope", "log_joint"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
        for one, other in zip(found.proposals, wanted.proposals, strict=True):
            assert one is other is None or torch.allclose(one.double(), other.double())


def noisy():
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal((x * torch.arange(4.0)).sum(-1), 1 + scale), obs=torch.tensor([3.0, 2.0, 4.0]))


def short_hmc(model):
    return HMC(model, step_size=0.3, num_steps=2)


@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.filterwarnings("ignore:num_chains=2 is more than available_cpu")
def test_samples_are_grouped_by_chain(num_chains):
    """Beside a continuous kernel too, whose values come back constrained; processes count as further chains."""
    mcmc = MCMC(KHotSwap(noisy, short_hmc, chains=3), 12, 5, num_chains=num_chains, disable_progbar=True)
    mcmc.run()
    grouped, flat = mcmc.get_samples(group_by_chain=True), mcmc.get_samples()
    assert grouped["x"].shape == (3 * num_chains, 12, 4) and grouped["scale"].shape == (3 * num_chains, 12)
    assert torch.equal(flat["x"], grouped["x"].flatten(0, 1)) and (flat["x"].sum(-1) == 2).all()
    assert (flat["scale"] > 0).all() and flat["scale"].unique().numel() > 5
    report = mcmc.diagnostics()
    assert report["x"]["n_eff"].shape == (4,) and report["scale"]["r_hat"].shape == ()
    assert len(report["acceptance rate of swaps"]["chain 0"]["x"]) == 3


def test_starts_of_chains():
    start = {"x": torch.eye(4)[[0, 1]] + torch.eye(4)[[2, 3]], "scale": torch.tensor([-1.0, 1.0])}
    kernel = KHotSwap(noisy, short_hmc, chains=2)
    kernel.initial_params = start
    kernel.setup(0)
    assert torch.equal(kernel.initial_params["x"], start["x"].view(2, 1, 4))
    assert torch.equal(kernel.initial_params["scale"], start["scale"].view(2, 1))
    assert torch.equal(kernel.transforms["scale"].inv(kernel.initial_params["scale"]), start["scale"].exp())
    assert torch.equal(kernel.transforms["x"].inv(kernel.initial_params["x"]), start["x"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor_dtype", [torch.float32, None])
def test_sites_in_half_types(dtype, factor_dtype):
    """Rounding to such a type is no sign of a model that mixes its chains."""

    def model():
        x = pyro.sample("x", ConditionalPoisson(logits=normal(200).to(dtype), k=50))
        pyro.factor("gain", (x * normal(200, seed=1).to(x.dtype)).sum(-1).to(factor_dtype or dtype))

    for _ in range(5):
        kernel = KHotSwap(model, chains=7)
        kernel.setup(0)
        assert (kernel.sample(kernel.initial_params)["x"].sum(-1) == 50).all()


def with_matmul():
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
    pyro.sample("y", dist.Normal(torch.ones(3, 4) @ x, 1.0).to_event(1), obs=torch.zeros(3))


def mixing():
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
    pyro.factor("gain", x[..., 0] + (x - x.mean(0) if x.dim() > 1 else 0 * x)[..., 1])


ALIKE = torch.tensor([1.0, 0.0, 1.0, 0.0]).expand(3, 4)


@pytest.mark.parametrize(
    ("match", "model", "start"),
    [
        (r"written for an additional batch dimension.*\(RuntimeError: ", with_matmul, {}),
        ("written for an additional batch dimension.* mixes the chains of 'x'", mixing, {"x": ALIKE}),
        (
            "log joint density of 3 chains together is",
            lambda: pyro.factor("gain", pyro.sample("x", ConditionalPoisson(logits=normal(4), k=2)).exp().sum()),
            {},
        ),
        (
            r"`initial_params` must start with the .* 3 chains, but got \{'x': \(4,\)\}",
            noisy,
            {"x": ALIKE[0]},
        ),
    ],
)
def test_errors(match, model, start):
    kernel = KHotSwap(model, short_hmc, chains=3)
    kernel.initial_params = start
    with pytest.raises(ValueError, match=match):
        kernel.setup(0)
