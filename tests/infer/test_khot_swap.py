"""KHotSwap in Pyro's MCMC: posteriors against enumeration, plates, several sites, NUTS beside it, chains, errors."""

import math
import pickle
from contextlib import nullcontext
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import HMC, MCMC, NUTS
from pyro.infer.mcmc.rwkernel import RandomWalkKernel

from khot import Brewer, ConditionalPoisson, KHotSwap, ParetoSampling, PhantomUnit, Pivotal, StraightThrough, Systematic
from khot.distributions.base import unrounded
from khot.infer.swaps import Proposals
from tests.gof import check_subsets
from tests.inputs import normal
from tests.loops import for_each

ZEROS = partial(torch.zeros, dtype=torch.float64)


@pytest.fixture(autouse=True)
def fresh_pyro():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


OPTIONS = "continuous", "uniform_share", "swaps_per_step", "swaps_per_proposal", "chains"


def run(model, *args, num_samples=20, warmup_steps=20, **options):
    kernel = KHotSwap(model, **{name: options.pop(name) for name in OPTIONS if name in options})
    mcmc = MCMC(kernel, num_samples, warmup_steps, disable_progbar=True, **options)
    mcmc.run(*args)
    return mcmc


def k_hot_vectors(n, k):
    return ConditionalPoisson(logits=ZEROS(n), k=k).enumerate_support()


def steps_from(kernel, values, number):
    """Where a kernel without a continuous one comes from these values."""
    kernel.initial_params = values
    kernel.setup(0)
    params = kernel.initial_params
    for _ in range(number):
        params = kernel.sample(params)
    return params


def check_means(means, expected):
    """That means of independent chains, or of long parts of one, agree with what is expected to 4 standard errors.

    Of probabilities below 0.05 it is not asked: one chain has too few visits for a standard error of these.
    """
    error = means.std(0) / math.sqrt(len(means))
    wrong = ((means.mean(0) - expected).abs() > 4 * error) & (expected.abs() > 0.05)
    assert not wrong.any(), (means.mean(0)[wrong], expected[wrong], error[wrong])


# Variable selection: y = X diag(x) b + 2 noise with b ~ N(0, 1) summed out, so that y ~ N(0, X diag(x) Xᵀ + 4 I).
COVARIATES = normal(12, 12)
RESPONSE = COVARIATES[:, :3] @ torch.tensor([1.2, -0.9, 0.7]).double() + 2 * normal(12, seed=1)


def likelihood(x):
    covariance = (COVARIATES * x[..., None, :]) @ COVARIATES.mT + 4 * torch.eye(12).double()  # linear in x
    return dist.MultivariateNormal(ZEROS(12), covariance)


PRIOR_LOGITS = normal(12, seed=2)


def selection(k, chains):
    with pyro.plate("chains", chains):
        x = pyro.sample("x", ConditionalPoisson(logits=PRIOR_LOGITS, k=k))
        pyro.sample("y", likelihood(x), obs=RESPONSE.expand(chains, 12))


def check_selection(k, means_of):
    """Inclusion, pairs, and the most probable subsets, ratios of whose probabilities are those of evidences."""
    prior = ConditionalPoisson(logits=PRIOR_LOGITS, k=k)
    subsets = prior.enumerate_support()
    posterior = (prior.log_prob(subsets) + likelihood(subsets).log_prob(RESPONSE)).softmax(0)
    best = posterior.topk(3)
    check_means(means_of(lambda x: x), posterior @ subsets)
    check_means(means_of(lambda x: x[..., :, None] * x[..., None, :]), subsets.mT @ (posterior[:, None] * subsets))
    check_means(means_of(lambda x: (x[..., None, :] == subsets[best.indices]).all(-1).double()), best.values)


@pytest.mark.parametrize("k", [3, (0, 4)], ids=["three", "at most four"])
def test_variable_selection_against_enumeration(k):
    mcmc = run(partial(selection, k, 100), num_samples=30, warmup_steps=80)
    x, (lengths,) = mcmc.get_samples()["x"], mcmc.diagnostics()["swaps per proposal"].values()
    assert 1.2 < lengths["x"] < 2.5 if k == 3 else lengths["x"] == 1
    check_selection(k, lambda f: f(x).mean(0))


COUPLING = normal(5, 5, seed=3)
DESIGNS = {
    "conditional_poisson": lambda: ConditionalPoisson(logits=normal(5), k=2),
    "brewer": lambda: Brewer(logits=normal(5), k=2),
    "pareto": lambda: ParetoSampling(logits=normal(5), k=2),
    "at_most_three": lambda: ConditionalPoisson(logits=normal(5), k=(0, 3)),
    "prior_over_size": lambda: ConditionalPoisson(logits=normal(5), k=(0, 4, 2 * normal(5, seed=4))),
}


def quadratic(design, chains):
    with pyro.plate("chains", chains):
        x = pyro.sample("x", design())
        pyro.factor("gain", (x @ COUPLING * x).sum(-1))


@pytest.mark.parametrize(
    ("name", "share", "swaps", "chains"),
    [
        ("conditional_poisson", 0.1, 2, 5000),
        ("conditional_poisson", 0.0, 1, 2000),
        ("conditional_poisson", 1.0, 1, 2000),
        ("conditional_poisson", 1.0, 2, 2000),
        ("brewer", 0.1, 1, 2000),
        ("pareto", 0.1, 1, 500),
        ("at_most_three", 0.1, 1, 5000),
        ("at_most_three", 1.0, 2, 2000),
        ("prior_over_size", 0.1, 1, 1000),
    ],
)
def test_law_stays(name, share, swaps, chains):
    """Exact draws from the posterior, after 20 steps each, still follow it, at level 1e-6."""
    design = DESIGNS[name]
    support = design().enumerate_support()
    posterior = (design().log_prob(support) + (support @ COUPLING * support).sum(-1)).softmax(0)
    start = support[posterior.multinomial(chains, replacement=True)]
    kernel = KHotSwap(partial(quadratic, design, chains), uniform_share=share, swaps_per_proposal=swaps)
    end = steps_from(kernel, {"x": start}, 20)["x"]
    assert (end != start).any(-1).double().mean() > 0.2
    check_subsets(end, support, posterior)


def test_rows_that_depend_on_each_other_are_one_block():
    """Of two rows in ``to_event``, and of two sites, the joint law stays; the plate around them factorises."""
    h, chains = normal(3, 4), 5000

    def model():
        with pyro.plate("chains", chains):
            x = pyro.sample("x", ConditionalPoisson(logits=ZEROS(2, 4), k=torch.tensor([1, 2])).to_event(1))
            y = pyro.sample("y", ConditionalPoisson(logits=ZEROS(4), k=1))
            pyro.factor("gain", torch.einsum("...i,...i,...i->...", x[..., 0, :], x[..., 1, :] + y, 2 * h[0]))

    rows = [k_hot_vectors(4, k) for k in (1, 2, 1)]
    support = torch.stack([torch.cat([a, b, c]) for a in rows[0] for b in rows[1] for c in rows[2]])
    a, b, c = support.view(-1, 3, 4).unbind(1)
    posterior = (a * (b + c) @ (2 * h[0])).softmax(0)
    start = support[posterior.multinomial(chains, replacement=True)]
    kernel = KHotSwap(model, swaps_per_step=2)
    end = steps_from(kernel, {"x": start[:, :8].view(-1, 2, 4), "y": start[:, 8:]}, 5)
    assert (end["x"] != start[:, :8].view(-1, 2, 4)).any(-1).any(-1).double().mean() > 0.3
    check_subsets(torch.cat([end["x"].flatten(1), end["y"]], 1), support, posterior)


def in_plates(later):
    """A k-hot site in two plates, the terms after which are ``later(x)``."""

    def model():
        scale = pyro.sample("scale", dist.HalfNormal(1.0), obs=torch.tensor(0.5))
        with pyro.plate("columns", 3, dim=-1), pyro.plate("rows", 2, dim=-2):
            pyro.factor("before", scale)
            x = pyro.sample("x", ConditionalPoisson(logits=ZEROS(4), k=2))
            later(x, scale)

    return model


def within(x, scale):
    pyro.sample("y", dist.Normal(x @ normal(4), scale), obs=ZEROS(2, 3))
    pyro.deterministic("sum", x.sum())


def one_row(x, scale):
    pyro.factor("mixes", (x * x.flip(-2)).sum(-1))  # against what the plates promise


def of_all(model):
    """A term outside of the plates, which depends on a site in them."""

    def extended():
        with pyro.poutine.trace() as trace:
            model()
        pyro.factor("total", trace.trace.nodes["x"]["value"][..., 0].sum((-2, -1), keepdim=True) ** 2)

    return extended


@pytest.mark.parametrize("chains", [None, 5])
@pytest.mark.parametrize(
    ("model", "blocks"),
    [(in_plates(within), 6), (in_plates(one_row), 1), (of_all(in_plates(within)), 1)],
    ids=["factorises", "against the plates", "term outside"],
)
def test_blocks(model, blocks, chains):
    kernel = KHotSwap(model, chains=chains)
    kernel.setup(0)
    (site,) = kernel._sites
    value, number = kernel.initial_params["x"], blocks * (chains or 1)
    assert site.blocks(value).shape == (number, 6 // blocks, 4)
    assert torch.equal(site.unblocked(site.blocks(value)), value)
    after = kernel.sample(kernel.initial_params)["x"]
    assert (after.sum(-1) == 2).all() and (after != value).any(-1).sum() <= number


@for_each("rows", [2, 3, 16])
def test_every_pair_of_rows_is_tested(rows):
    """Two rows that depend on each other, against the plate, are never taken for independent, whatever the seed."""

    def model():
        with pyro.plate("rows", rows):
            x = pyro.sample("x", ConditionalPoisson(logits=ZEROS(4), k=2))
            others = torch.cat([x[..., 1:2, :], x[..., :1, :], torch.zeros_like(x[..., 2:, :])], -2)
            pyro.factor("mixes", (x + others) @ normal(4))

    for seed in range(30):
        pyro.set_rng_seed(seed)
        kernel = KHotSwap(model, uniform_share=1.0)
        kernel.setup(0)
        assert kernel._sites[0].plates == ()


def test_mixed_sizes_and_rows_without_swaps():
    def model():
        with pyro.plate("rows", 4):
            x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4, 3), k=torch.tensor([0, 1, 2, 3])))
            pyro.factor("gain", 20 * x[:, 0])

    x = run(model, num_samples=5, warmup_steps=20).get_samples()["x"]
    assert (x.sum(-1) == torch.arange(4.0)).all() and (x[:, 1:, 0] == 1).all()
    assert (run(lambda: pyro.sample("x", ConditionalPoisson(logits=torch.zeros(3), k=0))).get_samples()["x"] == 0).all()


def test_models_without_a_useful_gradient():
    """What comes of comparisons has none; an infinite one counts as none."""

    def model():
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
        pyro.factor("gain", 30 * (x[0] > 0.5) + x.sqrt().sum())

    assert (run(model).get_samples()["x"][:, 0] == 1).all()


def spike_and_slab(x_matrix, y):
    scale = pyro.sample("scale", dist.Delta(torch.tensor(1.0, dtype=y.dtype)), obs=torch.tensor(1.0, dtype=y.dtype))
    slab = pyro.sample("slab", dist.Normal(torch.zeros_like(x_matrix[0]), 1.0).to_event(1))
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros_like(slab), k=2))
    pyro.sample("y", dist.Normal(x_matrix @ (x * slab), scale).to_event(1), obs=y)


@pytest.mark.slow
def test_with_nuts_against_marginal_likelihoods():
    """Exact draws of x and slab stay exact: those of x at level 1e-6, the means of x * slab to 5 standard errors."""
    x_matrix = normal(12, 5)
    y = x_matrix[:, :2] @ torch.tensor([0.8, -0.5]).double() + normal(12, seed=1)
    support = k_hot_vectors(5, 2)
    covariance = (x_matrix * support[:, None]) @ x_matrix.mT + torch.eye(12).double()
    posterior = dist.MultivariateNormal(ZEROS(12), covariance).log_prob(y).softmax(0)
    means = torch.linalg.solve(covariance, y.expand(10, 12)) @ x_matrix * support
    precision = support[:, :, None] * (x_matrix.mT @ x_matrix) * support[:, None] + torch.eye(5).double()
    options = {"step_size": 0.3, "adapt_step_size": False, "adapt_mass_matrix": False, "max_tree_depth": 2}
    kernel = KHotSwap(spike_and_slab, lambda given: NUTS(given, **options), swaps_per_step=4)
    kernel.setup(0, x_matrix, y)
    starts = posterior.multinomial(200, replacement=True)
    slabs = dist.MultivariateNormal(means[starts], precision_matrix=precision[starts]).sample()
    ends = []
    for start, slab in zip(starts, slabs, strict=True):
        params = {"x": support[start], "slab": slab}
        for _ in range(2):
            params = kernel.sample(params)
        ends.append(params)
    x, slab = (torch.stack([end[name] for end in ends]) for name in ("x", "slab"))
    assert all((new != old).any(-1).double().mean() > 0.3 for new, old in ((x, support[starts]), (slab, slabs)))
    check_subsets(x, support, posterior)
    error = (x * slab).std(0) / math.sqrt(len(x))
    assert (((x * slab).mean(0) - posterior @ means).abs() < 5 * error).all()


def constrained():
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
    pyro.sample("y", dist.Normal(x @ torch.arange(4.0), 1 + scale), obs=torch.tensor(3.0))


def short_hmc(model):
    return HMC(model, step_size=0.3, num_steps=2)


def test_beside_a_continuous_kernel():
    """Values come back constrained; the kernel's own reports are there; ``initial_params`` are unconstrained."""
    start = {"x": torch.tensor([0.0, 0, 1, 1]), "scale": torch.tensor(-1.0)}
    seen = []
    mcmc = run(
        constrained,
        continuous=short_hmc,
        initial_params=start,
        hook_fn=lambda kernel, *_: seen.append(kernel.logging()),
        num_samples=120,
    )
    samples = mcmc.get_samples()
    assert (samples["scale"] > 0).all() and samples["scale"].unique().numel() > 5
    assert (samples["x"].sum(-1) == 2).all() and samples["x"].unique(dim=0).shape[0] > 1
    assert {*seen[0]} == {"acc. swaps", "step size", "acc. prob"}
    report = mcmc.diagnostics()
    assert 0 < report["acceptance rate of swaps"]["chain 0"]["x"] <= 1 and "chain 0" in report["divergences"]
    again = run(constrained, continuous=short_hmc, save_params=["x"])
    assert {*again.get_samples()} == {"x"}


def test_the_continuous_kernel_sees_every_change():
    """Its potential energy before each of its steps is that of the k-hot values at the time."""
    kernel = KHotSwap(constrained, short_hmc)
    kernel.setup(0)
    params = kernel.initial_params
    for _ in range(20):
        params = kernel.sample(params)
        z, energy, _ = kernel._inner._fetch_from_cache()
        expected = pyro.poutine.trace(
            pyro.poutine.condition(constrained, {"x": params["x"], "scale": z["scale"].exp()})
        ).get_trace()
        torch.testing.assert_close(energy, -expected.log_prob_sum() - z["scale"])


def test_chains_in_processes(monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.cpu_count", lambda: 3)  # else they run one after the other
    mcmc = run(constrained, continuous=short_hmc, num_samples=6, warmup_steps=3, num_chains=2, mp_context="fork")
    samples = mcmc.get_samples(group_by_chain=True)
    assert samples["x"].shape == (2, 6, 4) and (samples["x"].sum(-1) == 2).all() and (samples["scale"] > 0).all()
    assert not torch.equal(samples["scale"][0], samples["scale"][1])
    assert {*mcmc.diagnostics()["acceptance rate of swaps"]} == {"chain 0", "chain 1"}


def test_a_kernel_can_be_sent_to_a_process():
    kernel = KHotSwap(constrained, NUTS)
    kernel.setup(0)
    assert (pickle.loads(pickle.dumps(kernel)).sample(kernel.initial_params)["x"].sum() == 2).all()


def one_site(fn, *more):
    def model():
        pyro.sample("x", fn)
        for number, law in enumerate(more):
            pyro.sample(f"z{number}", law)

    return model


KHOT = ConditionalPoisson(logits=torch.zeros(4), k=2)


def subsampled():
    with pyro.plate("rows", 10, subsample_size=2):
        pyro.sample("x", KHOT)


@pytest.mark.parametrize(
    ("error", "match", "model", "options"),
    [
        (TypeError, "PhantomUnit.*k=.low, high", one_site(PhantomUnit(ConditionalPoisson, logits=torch.zeros(4))), {}),
        (TypeError, "'x' has the distribution StraightThrough", one_site(StraightThrough(KHOT)), {}),
        (TypeError, "'z0' has the distribution Bernoulli", one_site(KHOT, dist.Bernoulli(0.5)), {"continuous": NUTS}),
        (ValueError, "`model` must have a latent k-hot site", one_site(dist.Normal(0.0, 1.0)), {}),
        (ValueError, "`continuous`, such as NUTS, must be given.*'z0'", one_site(KHOT, dist.Normal(0.0, 1.0)), {}),
        (NotImplementedError, "Pivotal has no log_prob", one_site(Pivotal(logits=torch.zeros(4), k=2)), {}),
        (NotImplementedError, "the plate 'rows' subsamples", subsampled, {}),
        (TypeError, "`continuous` must return an HMC or NUTS", constrained, {"continuous": RandomWalkKernel}),
        (NotImplementedError, "jit_compile", constrained, {"continuous": partial(NUTS, jit_compile=True)}),
        (ValueError, "for 'x', but got", one_site(KHOT), {"initial_params": {"x": torch.ones(4)}}),
        (ValueError, r"for \['w'\], but", one_site(KHOT), {"initial_params": {"w": torch.ones(4)}}),
    ],
)
def test_errors(error, match, model, options):
    with pytest.raises(error, match=match):
        run(model, num_samples=1, warmup_steps=0, **options)


def two_sites(size, k):
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(8), k=k))
    pyro.sample("y", ConditionalPoisson(logits=torch.zeros(3), k=size(x).long()))


@pytest.mark.parametrize("chains", [None, 3])
@pytest.mark.parametrize(
    ("size", "k"),
    [(lambda x: x.sum(-1), (1, 2)), (lambda x: 1 + x[..., 0], 4), (lambda x: 1 + x[..., 5] * x[..., 6], 2)],
    ids=["number", "unit", "seldom"],
)
def test_sizes_that_depend_on_a_k_hot_site(size, k, chains):
    """Found before the first step if other values that are tried show it, and otherwise when a step does."""
    kernel = KHotSwap(partial(two_sites, size, k), chains=chains)
    if k == 2:
        kernel.initial_params = {"x": torch.eye(8)[[0, 1]].sum(0).expand(*[chains] * bool(chains), 8)}
    with pytest.raises(NotImplementedError, match=r"size of 'y' that depends on no other site.*log_prior may depend"):
        kernel.setup(0)
        params = kernel.initial_params
        for _ in range(200):
            params = kernel.sample(params)
    assert (kernel._step > 0) == (k == 2)


@pytest.mark.parametrize("chains", [None, 3])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gaps_between_the_sizes(batch, chains):
    """The size changes by one, so a chain cannot cross a size of probability 0, but sizes at the ends may have it."""
    inf = math.inf

    def start(log_prior, logits=(0.0, 0.0, 0.0, 0.0)):
        def model():
            law = ConditionalPoisson(logits=torch.tensor(logits).expand(*batch, 4), k=(0, 4, torch.tensor(log_prior)))
            pyro.sample("x", law.to_event(len(batch)))

        kernel = KHotSwap(model, chains=chains)
        kernel.setup(0)
        return {*kernel.initial_params["x"].sum(-1).flatten().tolist()}

    for log_prior in ([-inf, 0.0, -inf, 0.0, -inf], [0.0, -inf, -inf, -inf, 0.0]):
        excluded = log_prior[1:].index(-inf) + 1
        with pytest.raises(NotImplementedError, match=f"size of 'x' by one.*excludes size {excluded} and.*drop the"):
            start(log_prior)
    assert start([-inf, 0.0, 0.0, -inf, -inf]) <= {1, 2}
    assert start([-inf, 0.0, -1000.0, 0.0, -inf]) <= {1, 3}
    assert start([-inf, 0.0, -inf, 0.0, -inf], logits=(inf, inf, 0.0, 0.0)) == {3}  # size 1 is impossible, too


def test_no_start():
    def impossible():
        pyro.sample("x", KHOT)
        pyro.factor("never", torch.tensor(-math.inf))

    with pytest.raises(ValueError, match="give `initial_params`"):
        run(impossible)


def test_sparse_supports_keep_their_vectors():
    """Of the systematic design in its order, few vectors have a probability: no other one is ever reached."""
    design = Systematic(logits=normal(5), k=2, order="fixed")
    x = run(one_site(design), num_samples=50).get_samples()["x"]
    assert (design.log_prob(x) > -math.inf).all()


@pytest.mark.parametrize("sites", [1, 2])
def test_weights_are_made_once_for_each_state(monkeypatch, sites):
    """One evaluation of the log joint density for each swap, and one set of weights for each state of a site."""

    def model():
        for site in range(sites):
            pyro.sample(f"x{site}", ConditionalPoisson(logits=normal(6, seed=site), k=2))

    kernel = KHotSwap(model)
    kernel.setup(0)
    params = kernel.sample(kernel.initial_params)
    counts = dict.fromkeys(("of", "_log_joint"), 0)

    def counted(name, call, *args):
        counts[name] += 1
        return call(*args)

    monkeypatch.setattr(Proposals, "of", partial(counted, "of", Proposals.of))
    monkeypatch.setattr(kernel, "_log_joint", partial(counted, "_log_joint", kernel._log_joint))
    for _ in range(20):
        params = kernel.sample(params)
    assert counts["_log_joint"] == 20 * sites
    assert counts["of"] <= 20 * sites**2  # an accepted swap changes the slopes of all sites


@for_each("chains", [None, 2])
@for_each("swaps", [1, None])
def test_chains_do_not_depend_on_the_default_dtype(swaps, chains):
    """Random numbers of half types have few digits; those of float64 would give another chain."""
    weights = normal(12).float()

    def model():
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(12, dtype=torch.float32), k=(4, 6)))
        pyro.factor("f", (weights * x).sum(-1))

    def draws(default):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            pyro.set_rng_seed(0)
            kernel = KHotSwap(model, chains=chains, swaps_per_proposal=swaps)
            mcmc = MCMC(kernel, num_samples=60, warmup_steps=10, disable_progbar=True)
            mcmc.run()
        finally:
            torch.set_default_dtype(before)
        return mcmc.get_samples()["x"]

    expected = draws(torch.float32)
    assert torch.equal(draws(torch.float64), expected)
    assert torch.equal(draws(torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plate", [False, True])
def test_log_probabilities_in_half_types_are_not_rounded(dtype, plate):
    """What decides about a swap has the digits of float32: at 200 units, logits differ by less than bfloat16 tells."""
    design = ConditionalPoisson(logits=normal(3, 200).to(dtype), k=50)

    def model():
        with pyro.plate("rows", 3) if plate else nullcontext(), pyro.poutine.scale(scale=0.5):
            pyro.sample("x", design if plate else design.to_event(1))

    kernel = KHotSwap(model)
    kernel.setup(0)
    state = kernel._log_joint(kernel.initial_params)
    expected = 0.5 * unrounded(design).log_prob(state.params["x"].float())
    torch.testing.assert_close(state.points["x"].log_joint, expected if plate else expected.sum()[None])
