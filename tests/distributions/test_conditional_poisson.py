"""ConditionalPoisson against the oracles and against what is known of it; its kernel has tests of its own."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.func import jacfwd, jacrev

from khot import ConditionalPoisson, GumbelTopK, ParetoSampling, PhantomUnit, sigmoid_topk
from tests.inputs import normal
from tests.loops import for_each
from tests.oracle import cases, tensor


@pytest.mark.usefixtures("cpu_backend")
@for_each("case", cases("conditional_poisson"))
def test_oracle(case):
    n, k, logits = case["n"], case["k"], tensor(case["theta"])
    design = ConditionalPoisson(logits=logits, k=k)
    tolerance = 1e-11 * (1 + abs(case["log_Z"]))
    assert (design.mean - tensor(case["pi"])).abs().max() <= 1e-11
    assert abs(design.entropy().item() - case["entropy"]) <= tolerance
    if "theta_q" in case:
        other = ConditionalPoisson(logits=tensor(case["theta_q"]), k=k)
        assert abs(kl_divergence(design, other).item() - case["kl_pq"]) <= tolerance
        assert abs(kl_divergence(other, design).item() - case["kl_qp"]) <= tolerance
    if case.get("full"):
        support = design.enumerate_support()
        assert support.nonzero()[:, 1].view(-1, k).tolist() == case["subsets"]
        assert (design.log_prob(support) - tensor(case["log_prob"])).abs().max() <= tolerance
    if case.get("pair") is not None and n <= 200:
        pairs = torch.stack([tensor(row) for row in case["pair"]])
        assert (design.pairwise_inclusion - pairs).abs().max() <= 1e-11


@pytest.mark.usefixtures("cpu_backend")
@for_each("case", cases("cps_inverse"))
def test_oracle_of_the_inverse(case):
    design = ConditionalPoisson(probs=tensor(case["pi"]))
    assert design.k == case["k"] and (design.logits - tensor(case["theta"])).abs().max() <= 1e-9
    if "entropy" in case:
        assert abs(design.entropy().item() - case["entropy"]) <= 1e-10


def test_one_of_n_is_categorical():
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    design, categorical = ConditionalPoisson(logits=logits, k=1), Categorical(logits=logits)
    torch.testing.assert_close(design.mean, categorical.probs)
    torch.testing.assert_close(design.entropy(), categorical.entropy())
    log_prob = design.log_prob(torch.eye(6, dtype=torch.float64).unsqueeze(1))
    torch.testing.assert_close(log_prob, categorical.log_prob(torch.arange(6).unsqueeze(1)))


def test_score_and_fisher_information():
    """The gradient of log_prob is x - mean, its negative second derivative the covariance."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    design = ConditionalPoisson(logits=logits, k=3)
    value = design.mode

    def log_prob(logits):
        return ConditionalPoisson(logits=logits, k=3, validate_args=False).log_prob(value)

    torch.testing.assert_close(torch.func.grad(log_prob)(logits), value - design.mean)
    torch.testing.assert_close(-torch.func.hessian(log_prob)(logits), design.covariance_matrix)


def test_float32_parameters_compute_in_float64():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(2))
    single, double = ConditionalPoisson(logits=logits, k=100), ConditionalPoisson(logits=logits.double(), k=100)
    assert single.mean.dtype == single.entropy().dtype == torch.float32
    torch.testing.assert_close(single.mean, double.mean.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(single.entropy(), double.entropy().float())


def test_sizes_that_infinite_logits_exclude():
    logits = torch.tensor([math.inf, 0.0, -math.inf, 1.0, 0.5], dtype=torch.float64)
    with pytest.raises(ValueError, match="number of `logits` equal to inf, 1.*above -inf, 4.*k=0"):
        ConditionalPoisson(logits=logits, k=0, validate_args=True)


def test_divergence_of_different_sizes_is_infinite():
    p, q = (ConditionalPoisson(logits=torch.zeros(2, 4), k=torch.tensor(k)) for k in ([1, 2], [2, 2]))
    assert kl_divergence(p, q).tolist() == [math.inf, 0.0]


def test_long_rows():
    """Inclusion probabilities sum to k, and k-hot draws have the counts that they say."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(10**4, dtype=torch.float64)
    design = ConditionalPoisson(logits=logits, k=1000)
    mean, value = design.mean, design.sample((20,))
    assert abs(mean.sum().item() - 1000) < 1e-7 and (value.sum(-1) == 1000).all()
    likely = mean > 0.5
    deviation = (value[:, likely].sum() - 20 * mean[likely].sum()) / (20 * (mean * (1 - mean))[likely].sum()).sqrt()
    assert deviation.abs() < 5  # the covariances are negative, so the variance is smaller still
    assert torch.isfinite(design.log_prob(value)).all()


@for_each("output", ["logits", "entropy"])
def test_derivatives_in_probs_agree_in_both_modes(output):
    weight = normal(5, seed=1)

    def function(probs):
        design = ConditionalPoisson(probs=probs, k=2, validate_args=False)
        return design.entropy() if output == "entropy" else design.logits @ weight

    probs = torch.tensor([0.3, 0.75, 0.15, 0.6, 0.2], dtype=torch.float64)
    torch.testing.assert_close(jacfwd(function)(probs), jacrev(function)(probs), rtol=1e-8, atol=1e-9)


def rows_of_pairs(logits, k, units):
    """P(i and j in S) of some units i with all j, without differences: means where i is included, times that of i."""
    included = logits.expand(len(units), -1).clone()
    included[range(len(units)), units] = math.inf
    mean = ConditionalPoisson(logits=included, k=k).mean
    return mean * ConditionalPoisson(logits=logits, k=k).mean[units, None]


def test_gradients_through_solved_logits_have_derivatives_in_other_arguments():
    """Of a gradient that is linear in weights; its derivative in the parameter is refused, with what to do instead."""
    scores = normal(2, 5)
    makes = {
        "`logits=` instead of `probs=`": lambda p: ConditionalPoisson(probs=sigmoid_topk(p, 3), k=3),
        "and GumbelTopK": lambda p: GumbelTopK(probs=sigmoid_topk(p, 3), k=3),
        "another `adjust`": lambda p: ParetoSampling(logits=p, k=3, adjust="exact"),
        r"k=\(low, high\)\) in place of PhantomUnit": lambda p: PhantomUnit(ConditionalPoisson, logits=p),
    }
    for cure, make in makes.items():
        theta = scores.clone().requires_grad_()
        value = make(theta).sample((4,))
        weights, cotangent = normal(4, 2, seed=1).requires_grad_(), normal(2, 5, seed=2)

        def gradient(weights, make=make, theta=theta, value=value, cotangent=cotangent):
            loss = (make(theta).log_prob(value) * weights).sum()
            return (torch.autograd.grad(loss, theta, create_graph=True)[0] * cotangent).sum()

        (found,) = torch.autograd.grad(gradient(weights), weights)
        units = torch.eye(8, dtype=torch.float64).view(8, 4, 2)
        expected = torch.stack([gradient(unit) for unit in units]).view(4, 2).detach()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        with pytest.raises(NotImplementedError, match=f"second derivatives .*{cure}"):
            torch.autograd.grad(gradient(weights), theta)


@for_each("n, k", [(60, 2), (60, 30), (400, 5), (400, 200), (400, 390)])
@for_each("scale", [0.0, 1e-9, 0.3, 3.0, 30.0])
def test_pairs_have_all_their_digits(n, k, scale):
    """Of units that are equal, or nearly so, or both rare, as of others."""
    logits = scale * normal(n, seed=n + k)
    units = [0, 1, int(logits.argmax()), int(logits.argmin())]
    pairs = ConditionalPoisson(logits=logits, k=k).pairwise_inclusion
    torch.testing.assert_close(pairs[units], rows_of_pairs(logits, k, units), rtol=1e-11, atol=1e-300)


def test_pairs_of_rare_units():
    logits = torch.cat((normal(20, seed=3), normal(30, seed=4) - 40))
    pairs = ConditionalPoisson(logits=logits, k=10).pairwise_inclusion
    assert pairs[25, 26] < 1e-30
    torch.testing.assert_close(pairs[20:], rows_of_pairs(logits, 10, list(range(20, 50))), rtol=1e-12, atol=0)


def log_joint(logits, low, high):
    """Of all pairs of units of rows (rows, n): the log-probabilities of (both, neither, the first, the second)."""
    n = logits.shape[-1]
    every = torch.arange(2**n)[:, None] // 2 ** torch.arange(n) % 2
    value = every[(every.sum(-1) >= low) & (every.sum(-1) <= high)].double()
    log_p = (logits @ value.mT).log_softmax(-1)[:, None, None]
    one, other = value.mT[:, None] > 0, value.mT[None] > 0
    events = (one & other, ~one & ~other, one & ~other, other & ~one)
    return [log_p.masked_fill(~event, -math.inf).logsumexp(-1) for event in events]


@for_each("scale", [3.0, 30.0, 100.0])
@for_each("low, high", [(1, 1), (2, 2), (3, 3), (5, 5), (0, 3), (2, 4), (4, 6)])
def test_pairs_and_covariances_are_exact_at_any_scale(low, high, scale):
    """Relative to P(both), and to the larger of the products that a covariance is the difference of."""
    logits = scale * normal(30, 6, seed=low + 7 * high)
    logits[0, :4] = torch.tensor([-39.659, -67.4156, -39.0758, 34.1584])
    design = ConditionalPoisson(logits=logits, k=low if low == high else (low, high))
    both, neither, first, second = log_joint(logits, low, high)
    torch.testing.assert_close(design.pairwise_inclusion, both.exp(), rtol=1e-10, atol=1e-290)
    apart, together = first + second, both + neither
    unit = torch.maximum(apart, together)
    error = (design.covariance_matrix - (together.exp() - apart.exp())).abs()
    assert (error <= 1e-10 * unit.exp() + 1e-290).all()


def test_derivatives_of_lost_pairs_and_covariances():
    """Those of the sums of products, where the values are made otherwise."""
    logits = torch.tensor([-39.659, -67.4156, -39.0758, 34.1584], dtype=torch.float64).requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2)
    assert design.pairwise_inclusion[0, 2].item() == pytest.approx(5.609349761884216e-33, rel=1e-12)
    value = design.enumerate_support()
    share, weight = design.log_prob(value).exp(), normal(4, 4)
    pairs = torch.einsum("s,si,sj->ij", share, value, value)
    mean = share @ value
    for found, expected in (
        (design.pairwise_inclusion, pairs),
        (design.covariance_matrix, pairs - mean[:, None] * mean),
    ):
        slopes = [torch.autograd.grad((x * weight).sum(), logits, retain_graph=True)[0] for x in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-15)


@for_each("n", [1, 2, 5, 400])
def test_pairs_without_a_choice_are_exact(n):
    logits = 3 * normal(n, seed=n)
    none, one, every = (ConditionalPoisson(logits=logits, k=k) for k in (0, 1, n))
    assert torch.equal(none.pairwise_inclusion, torch.zeros(n, n).double())
    assert torch.equal(one.pairwise_inclusion, one.mean.diag())
    assert torch.equal(every.pairwise_inclusion, torch.ones(n, n).double())


def test_pairs_beside_certain_units():
    inf = math.inf
    logits = torch.tensor([[inf, 0.3, -inf, 1.0, -0.5], [inf, inf, -inf, 1.0, -0.5]], dtype=torch.float64)
    pairs, mean = (lambda design: (design.pairwise_inclusion, design.mean))(ConditionalPoisson(logits=logits, k=2))
    assert torch.equal(pairs[:, 0], mean) and (pairs[:, 2] == 0).all() and torch.equal(pairs[1, 1], mean[1])
    assert pairs[0, 1, 3] == pairs[0, 3, 4] == pairs[1, 3, 4] == 0


def test_derivatives_of_covariances_are_cumulants():
    support = ConditionalPoisson(logits=torch.zeros(6), k=3).enumerate_support().double()

    def enumerated(logits):
        p = (support @ logits).softmax(0)
        mean = p @ support
        return torch.einsum("s,si,sj->ij", p, support, support) - mean.outer(mean)

    def covariance(logits):
        return ConditionalPoisson(logits=logits, k=3, validate_args=False).covariance_matrix

    logits = 2 * normal(6, seed=5)
    for derivative in (jacrev, jacfwd, lambda f: jacfwd(jacrev(f))):
        torch.testing.assert_close(derivative(covariance)(logits), derivative(enumerated)(logits), rtol=0, atol=1e-14)
