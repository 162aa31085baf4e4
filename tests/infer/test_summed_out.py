"""KHotSwap beside enumerated sites: the log joint density by hand, laws that stay, chains, and errors."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import HMC, MCMC

from khot import ConditionalPoisson, KHotSwap
from khot.infer.chains import PLATE
from tests.gof import check_subsets
from tests.infer.test_khot_swap import steps_from
from tests.inputs import normal

pytestmark = pytest.mark.usefixtures("fresh_pyro")

COVARIATES, SEEN = normal(7, 5, seed=1), 2 * normal(7, seed=2)
SUM_OUT = {"enumerate": "parallel"}


def outliers(k=2):
    """A regression in which each observation may be an outlier, with a probability that depends on a global site."""
    much = pyro.sample("much", dist.Bernoulli(torch.tensor(0.25)), infer=SUM_OUT)
    x = pyro.sample("x", ConditionalPoisson(logits=normal(5), k=k))
    with pyro.plate("rows", 7):
        outlier = pyro.sample("outlier", dist.Bernoulli(0.1 + 0.3 * much.double()), infer=SUM_OUT)
        pyro.sample("y", dist.Normal((COVARIATES * x).sum(-1), 0.5 + 4 * outlier), obs=SEEN)


def log_joint_by_hand(x, k=2):
    """Of vectors (..., 5): the outlier of each row is independent of the others given the global site."""
    mean = (COVARIATES * x.unsqueeze(-2)).sum(-1)
    terms = []
    for much, prior in ((0, 0.75), (1, 0.25)):
        share = torch.tensor(0.1 + 0.3 * much).double()
        of_row = [dist.Normal(mean, scale).log_prob(SEEN) for scale in (4.5, 0.5)]
        of_row = torch.logaddexp(share.log() + of_row[0], (1 - share).log() + of_row[1])
        terms.append(torch.tensor(prior).double().log() + of_row.sum(-1))
    return torch.logaddexp(*terms) + ConditionalPoisson(logits=normal(5), k=k).log_prob(x)


@pytest.mark.parametrize("chains", [None, 6])
def test_log_joint_density_by_hand(chains):
    kernel = KHotSwap(outliers, chains=chains)
    kernel.setup(0)
    state = kernel._log_joint(kernel.initial_params)
    x = state.params["x"].reshape(-1, 5).requires_grad_()
    expected = log_joint_by_hand(x)
    torch.testing.assert_close(state.points["x"].log_joint, expected.detach())
    found = state.points["x"].slope
    difference = (
        torch.autograd.grad(expected.sum(), x)[0].view_as(found) - found
    )  # a constant for each vector changes no swap
    torch.testing.assert_close(difference, difference[..., :1].expand_as(difference))


@pytest.mark.parametrize("k", [2, (1, 3)])
def test_law_stays(k):
    """In a batch of chains that start from the posterior, at level 1e-6."""
    support = ConditionalPoisson(logits=normal(5), k=k).enumerate_support()
    posterior = log_joint_by_hand(support, k).softmax(0)
    start = support[posterior.multinomial(400, replacement=True)]
    end = steps_from(KHotSwap(partial(outliers, k), chains=400), {"x": start}, 15)["x"].squeeze(1)
    assert (end != start).any(-1).double().mean() > 0.1
    check_subsets(end, support, posterior)


def by_row(k=2):
    """A k-hot site in each row, with a latent class of the row that moves its logits and its observations."""
    with pyro.plate("rows", 3):
        kind = pyro.sample("kind", dist.Categorical(logits=normal(3)), infer=SUM_OUT)
        x = pyro.sample("x", ConditionalPoisson(logits=normal(3, 5)[kind], k=k))
        pyro.sample("y", dist.Normal((x * normal(3, 5, seed=1)[kind]).sum(-1), 1.0), obs=SEEN[:3])


def test_rows_that_are_independent_are_blocks():
    kernel = KHotSwap(by_row)
    kernel.setup(0)
    assert kernel._sites[0].plate_names == {"rows"}
    state = kernel._log_joint(kernel.initial_params)
    x, terms = state.params["x"], []
    for kind in range(3):
        given = dist.Normal((x * normal(3, 5, seed=1)[kind]).sum(-1), 1.0).log_prob(SEEN[:3])
        prior = normal(3).log_softmax(-1)[kind] + ConditionalPoisson(logits=normal(3, 5)[kind], k=2).log_prob(x)
        terms.append(prior + given)
    torch.testing.assert_close(state.points["x"].log_joint, torch.stack(terms).logsumexp(0))


@pytest.mark.parametrize("chains", [None, 4])
@pytest.mark.parametrize("shares", ["the class", "a parent of the class", "nothing"])
def test_a_class_that_rows_share_makes_them_one_block(shares, chains):
    """Even if it matters so little that no swap shows it; the other plates, as that of the chains, stay blocks."""

    def model():
        with pyro.plate("groups", 2, dim=-2):
            kind = pyro.sample("kind", dist.Bernoulli(torch.tensor(0.5)), infer=SUM_OUT)
            with pyro.plate("rows", 3, dim=-1):
                of_row = pyro.sample("of_row", dist.Bernoulli(0.2 + 0.5 * kind), infer=SUM_OUT)
                x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(5), k=2))
                matters = {"the class": kind, "a parent of the class": of_row, "nothing": torch.ones(())}[shares]
                pyro.factor("gain", 1e-9 * matters * x[..., 0])

    kernel = KHotSwap(model, chains=chains)
    kernel.setup(0)
    plates = {"groups"} if chains is None else {"groups", PLATE}
    assert kernel._sites[0].plate_names == (plates | {"rows"} if shares == "nothing" else plates)
    after = kernel.sample(kernel.initial_params)["x"]
    assert (after.sum(-1) == 2).all()


def test_beside_a_continuous_kernel():
    def model():
        scale = pyro.sample("scale", dist.LogNormal(torch.zeros(()).double(), 1.0))
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(5).double(), k=2))
        with pyro.plate("rows", 7):
            outlier = pyro.sample("outlier", dist.Bernoulli(torch.tensor(0.2).double()), infer=SUM_OUT)
            pyro.sample("y", dist.Normal((COVARIATES * x).sum(-1), scale + 4 * outlier), obs=SEEN)

    kernel = KHotSwap(model, partial(HMC, step_size=0.1, num_steps=2))
    mcmc = MCMC(kernel, num_samples=8, warmup_steps=4, disable_progbar=True)
    mcmc.run()
    samples = mcmc.get_samples()
    assert {*samples} == {"x", "scale"} and (samples["scale"] > 0).all()


def sized(infer):
    extra = pyro.sample("extra", dist.Bernoulli(0.5), infer=infer)
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=1 + extra.long()))
    pyro.factor("gain", x[..., 0])


@pytest.mark.parametrize(
    ("error", "match", "infer"),
    [
        (NotImplementedError, r"size of 'x' that depends on no other site.*k=\(low, high, log_prior\)", SUM_OUT),
        (TypeError, r"'extra' has the distribution Bernoulli.*\"parallel\"\} sums.*k=\(low, high, log_prior\)", {}),
    ],
)
def test_a_size_that_is_a_site(error, match, infer):
    with pytest.raises(error, match=match):
        KHotSwap(partial(sized, infer)).setup(0)
