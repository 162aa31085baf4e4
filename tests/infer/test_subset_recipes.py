"""Subsets by their numbers in Pyro's tools for discrete sites, each against enumeration."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO, infer_discrete
from pyro.infer.autoguide import AutoDiscreteParallel
from scipy.stats import chisquare

from khot import ConditionalPoisson, PhantomUnit, Pivotal, Sampford, StraightThrough
from khot.infer import subset_categorical, subset_index, subset_vector
from tests.inputs import COST, LOGITS

pytestmark = pytest.mark.usefixtures("fresh_pyro")

FALSE_ALARM = 1e-6
N = 5
SEEN = torch.tensor([0.1, -0.9, 1.2], dtype=torch.float64)
NOISE = 0.3


def subset(name, design, k):
    """A k-hot site by its number."""
    index = pyro.sample(name, subset_categorical(design), infer={"enumerate": "parallel"})
    return subset_vector(index, N, k, dtype=torch.float64)


def rows(k=2):
    """Three rows of one subset each, seen through noise."""
    with pyro.plate("rows", 3):
        x = subset("subset", ConditionalPoisson(logits=LOGITS, k=k), k)
        pyro.sample("y", dist.Normal(x @ COST, NOISE), obs=SEEN)
    return x


def posterior_of_rows(k=2):
    """P(subset | y) of each row, ``(3, C(5, k))``."""
    design = ConditionalPoisson(logits=LOGITS, k=k)
    x = design.enumerate_support()
    log_joint = design.log_prob(x) + dist.Normal(x @ COST, NOISE).log_prob(SEEN.unsqueeze(-1))
    return log_joint.softmax(-1)


def markov(seen=SEEN):
    """A chain of subsets, each of which is likely to keep what the last one had."""
    logits, subsets = LOGITS, []
    for step in pyro.markov(range(len(seen))):
        x = subset(f"subset_{step}", ConditionalPoisson(logits=logits, k=2), 2)
        pyro.sample(f"y_{step}", dist.Normal(x @ COST, NOISE), obs=seen[step])
        logits = LOGITS + 2 * x
        subsets.append(x)
    return torch.stack(torch.broadcast_tensors(*subsets))


def joint_of_the_chain():
    """Every chain of three subsets ``(1000, 3, 5)``, and the log-probability of each with what is seen."""
    support = ConditionalPoisson(logits=LOGITS, k=2).enumerate_support()
    chains = torch.stack([torch.stack(chain) for chain in itertools.product(support, repeat=3)])
    before = torch.cat((torch.zeros_like(chains[:, :1]), chains[:, :-1]), 1)
    steps = ConditionalPoisson(logits=LOGITS + 2 * before, k=2).log_prob(chains)
    return chains, (steps + dist.Normal(chains @ COST, NOISE).log_prob(SEEN)).sum(-1)


def mixture():
    """Two or three of five, at a probability of its own."""
    size = torch.tensor([2, 3])[pyro.sample("size", dist.Categorical(torch.tensor([0.3, 0.7], dtype=torch.float64)))]
    x = subset("subset", ConditionalPoisson(logits=LOGITS, k=size), size)
    pyro.sample("y", dist.Normal(x @ COST, NOISE), obs=SEEN[0])
    return x


mixture = pyro.infer.config_enumerate(mixture)


def joint_of_the_mixture():
    """P(size, subset | y), ``(2, 10)``."""
    log_joint = []
    for weight, k in ((0.3, 2), (0.7, 3)):
        design = ConditionalPoisson(logits=LOGITS, k=k)
        x = design.enumerate_support()
        seen = dist.Normal(x @ COST, NOISE).log_prob(SEEN[0])
        log_joint.append(math.log(weight) + design.log_prob(x) + seen)
    return torch.stack(log_joint).flatten().softmax(-1).view(2, -1)


def test_marginals_and_samples_of_the_posterior():
    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    probs = elbo.compute_marginals(rows, lambda: None)["subset"].probs
    torch.testing.assert_close(probs, posterior_of_rows(), rtol=0, atol=1e-10)
    x = elbo.sample_posterior(rows, lambda: None)
    assert x.shape == (3, N) and (x.sum(-1) == 2).all()


def test_most_likely_subsets():
    x = infer_discrete(rows, first_available_dim=-2, temperature=0)()
    assert torch.equal(subset_index(x), posterior_of_rows().argmax(-1))


def test_subsets_drawn_from_the_posterior():
    """Counts of 2000 draws of each row, against the posterior."""
    draws = pyro.plate("draws", 2000, dim=-2)(rows)
    index = subset_index(infer_discrete(draws, first_available_dim=-3, temperature=1)())
    for own, probs in zip(index.T, posterior_of_rows(), strict=True):
        common = probs > 0.0025  # at least five expected
        counts = torch.bincount(own, minlength=10)
        observed = [*counts[common].tolist(), counts[~common].sum().item()]
        expected = [*(2000 * probs[common]).tolist(), 2000 * probs[~common].sum().item()]
        assert chisquare(observed, expected).pvalue > FALSE_ALARM / 3


def test_viterbi_over_subsets():
    chains, log_joint = joint_of_the_chain()
    best = infer_discrete(markov, first_available_dim=-1, temperature=0)()
    assert torch.equal(best, chains[log_joint.argmax()])
    loss = TraceEnum_ELBO(max_plate_nesting=0).loss(markov, lambda: None)
    assert loss == pytest.approx(-log_joint.logsumexp(0).item(), rel=1e-10)


def test_mixture_of_sizes():
    marginals = TraceEnum_ELBO(max_plate_nesting=0).compute_marginals(mixture, lambda: None)
    joint = joint_of_the_mixture()
    torch.testing.assert_close(marginals["size"].probs, joint.sum(-1), rtol=0, atol=1e-10)
    torch.testing.assert_close(marginals["subset"].probs, joint.sum(0), rtol=0, atol=1e-10)
    best = infer_discrete(mixture, first_available_dim=-1, temperature=0)()
    size, index = divmod(joint.argmax().item(), 10)
    assert torch.equal(best, subset_vector(index, N, size + 2, dtype=torch.float64))


@pytest.mark.slow
def test_auto_discrete_parallel_finds_the_posterior():
    guide = AutoDiscreteParallel(rows)
    elbo, optimizer = TraceEnum_ELBO(max_plate_nesting=1), pyro.optim.ClippedAdam({"lr": 0.5, "lrd": 0.1 ** (1 / 400)})
    svi = SVI(rows, guide, optimizer, elbo)
    losses = [svi.step() for _ in range(400)]
    evidence = elbo.loss(rows, lambda: None)
    assert -1e-9 < losses[-1] - evidence < 0.01 < losses[0] - evidence
    (probs,) = [value for name, value in pyro.get_param_store().items() if "subset" in name]
    torch.testing.assert_close(probs.detach(), posterior_of_rows(), rtol=0, atol=0.02)


def test_gradients_reach_the_design():
    logits = LOGITS.clone().requires_grad_()
    design = Sampford(logits=logits, k=2)
    x = design.enumerate_support()
    (expected,) = torch.autograd.grad((design.log_prob(x).exp() * (x @ COST).square()).sum(), logits)
    law = subset_categorical(Sampford(logits=logits, k=2))
    (actual,) = torch.autograd.grad((law.probs * (x @ COST).square()).sum(), logits)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "k"), [(33, 16), (33, 17), (34, 17), (62, 31)])  # C(n, k) below 2³¹, below, above, 2⁵⁸
def test_numbers_of_many_subsets(n, k):
    """Ranks of vectors by the definition, a sum of binomials over the units that are left out."""
    index = torch.tensor(
        [[0, 1, math.comb(n, k) // 3], [math.comb(n, k) // 2, math.comb(n, k) - 2, math.comb(n, k) - 1]]
    )
    x = subset_vector(index, n, k)
    assert x.shape == (2, 3, n) and (x.sum(-1) == k).all() and torch.equal(subset_index(x), index)
    for row, rank in zip(x.view(-1, n).long().tolist(), index.flatten().tolist(), strict=True):
        before = [math.comb(n - i - 1, sum(row[i:]) - 1) for i in range(n) if not row[i] and sum(row[i:])]
        assert sum(before) == rank


def test_what_has_no_numbers_is_refused():
    design = ConditionalPoisson(logits=LOGITS.expand(3, N), k=2)
    for wrong in (
        StraightThrough(design),
        design.to_event(1),
        PhantomUnit(Sampford, logits=LOGITS),
        design.mask(False),
    ):
        with pytest.raises(TypeError, match="`design` must be a sampling design of a fixed size, but got"):
            subset_categorical(wrong)
    with pytest.raises(ValueError, match=r"at most 1000000 subsets for subset_categorical, but C\(60, 30\) = "):
        subset_categorical(ConditionalPoisson(logits=torch.zeros(60), k=30))
    with pytest.raises(NotImplementedError, match="Pivotal has no log_prob; .*ConditionalPoisson"):
        subset_categorical(Pivotal(logits=LOGITS, k=2))
    for index, n, k, match in (
        (10, 5, 2, r"`index` must satisfy 0 <= index < C\(n, k\) = 10, but got index from 10"),
        (torch.tensor([0, 11]), 5, torch.tensor([2, 3]), "`index` must satisfy"),
        (0, 5, 6, "`k` must satisfy 0 <= k <= n, but got k from 6"),
        (0, 80, 40, r"`k` must satisfy C\(n, k\) < 2\*\*63 to number subsets, but got k=40 with n=80"),
    ):
        with pytest.raises(ValueError, match=match):
            subset_vector(index, n, k)
    with pytest.raises(ValueError, match=r"C\(n, k\) < 2\*\*63"):
        subset_index((torch.arange(80) < 40).float())
