"""Conditional Poisson laws through the product tree: oracles, enumeration, a plain recursion, goodness of fit."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.functional import hessian, jacobian

from khot.kernels.count import pairs as pair_convolution
from khot.kernels.count import tree as product_tree
from khot.laws import conditional_poisson as cps
from khot.laws.inverse import solve_logits
from khot.laws.largest_entropy import largest_entropy
from tests import gof, oracle
from tests.inputs import normal
from tests.log_partition import log_partition
from tests.loops import for_each

INF = math.inf
LONG = [(100, 47), (150, 75), (600, 290), (601, 40), (1500, 700), (1500, 3), (1500, 1490)]  # FFT, windows, odd nodes


def k_hot_vectors(n: int, k: int) -> Tensor:
    subsets = torch.tensor(list(itertools.combinations(range(n), k)), dtype=torch.long).view(math.comb(n, k), k)
    return torch.zeros(len(subsets), n, dtype=torch.float64).scatter_(1, subsets, 1.0)


def enumerate_law(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Support and log-probabilities, from the definition; infinite logits are limits."""
    support = k_hot_vectors(len(logits), k)
    possible = ((support == 1) | (logits < INF)).all(-1) & ((support == 0) | (logits > -INF)).all(-1)
    score = (support * logits.masked_fill(logits.isinf(), 0.0)).sum(-1).masked_fill(~possible, -INF)
    return support, score.log_softmax(0)


def log_esp_recursion(logits: Tensor, k: int) -> Tensor:
    """The plain O(nk) recursion for log e_k(exp(logits)) of each row."""
    row = torch.full((len(logits), k + 1), -INF, dtype=torch.float64)
    row[:, 0] = 0.0
    for x in logits.T:
        row = torch.cat((row[:, :1], torch.logaddexp(row[:, 1:], row[:, :-1] + x[:, None])), 1)
    return row[:, k]


def close(actual: Tensor, expected: Tensor | float, tolerance: float = 1e-11) -> None:
    """Agreement to ``tolerance * (1 + |expected|)``."""
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", oracle.cases("conditional_poisson"))
def test_oracle(case: dict[str, Any]) -> None:
    k, logits, pi = case["k"], oracle.tensor(case["theta"]).requires_grad_(), oracle.tensor(case["pi"])
    log_z, mean = log_partition(logits, k), cps.inclusion_probabilities(logits, k)
    close(log_z, case["log_Z"])
    close(mean, pi)
    close(torch.autograd.grad(log_z, logits)[0], pi)
    entropy = cps.entropy(logits, k)
    close(entropy, case["entropy"])
    value = torch.zeros(len(case["subsets"]), case["n"]).scatter_(1, torch.tensor(case["subsets"]), 1.0)
    close(cps.log_prob(logits, k, value), oracle.tensor(case["log_prob"]))
    if "g" in case:
        close(torch.autograd.grad(mean, logits, oracle.tensor(case["g"]))[0], oracle.tensor(case["pi_vjp_theta"]))
        close(torch.autograd.grad(entropy, logits)[0], oracle.tensor(case["entropy_grad_theta"]))
    if "pair" in case:
        covariance = torch.stack([oracle.tensor(row) for row in case["pair"]]) - pi.outer(pi)
        close(cps.covariance(logits, k), covariance)
        close(torch.func.jacfwd(cps.inclusion_probabilities)(logits.detach(), k), covariance)
        close(torch.func.hessian(log_partition)(logits.detach(), k), covariance)
        close(torch.func.jacfwd(torch.func.jacfwd(log_partition))(logits.detach(), k), covariance)


@pytest.mark.parametrize("case", oracle.cases("cps_inverse"))
def test_oracle_of_the_inverse(case: dict[str, Any]) -> None:
    close(solve_logits(oracle.tensor(case["pi"]), case["k"]), oracle.tensor(case["theta"]), 1e-12)


@for_each("n, scale", itertools.product(range(1, 8), [1.0, 300.0]))
@pytest.mark.parametrize("k", range(8))
def test_enumeration(n: int, k: int, scale: float) -> None:
    k, logits = min(k, n), normal(n, scale=scale, seed=n)
    support, log_prob = enumerate_law(logits, k)
    close(cps.log_prob(logits, k, support), log_prob)
    close(log_partition(logits, k), (support @ logits).logsumexp(0))
    close(cps.inclusion_probabilities(logits, k), log_prob.exp() @ support)
    close(cps.entropy(logits, k), -(log_prob.exp() * log_prob).sum())
    assert (cps.sample(logits, k, (20,)).sum(-1) == k).all()


@pytest.mark.parametrize(
    "logits, k",
    [
        ([INF, 0.3, -INF, 1.0, 2.0], 2),
        ([INF, INF, 1.0, 2.0], 2),
        ([-INF, -INF, 1.0, 2.0], 2),
        ([INF, -INF], 1),
        ([-INF, -INF], 0),
        ([-INF] * 3 + [0.5, -1.0, 2.0] + [INF] * 2, 4),
    ],
)
def test_infinite_logits(logits: list[float], k: int) -> None:
    theta = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    support, log_prob = enumerate_law(theta.detach(), k)
    likely = log_prob > -INF
    torch.testing.assert_close(cps.log_prob(theta, k, support).exp(), log_prob.exp(), rtol=0, atol=1e-14)
    close(cps.log_prob(theta, k, support[likely]), log_prob[likely])
    mean, entropy = cps.inclusion_probabilities(theta, k), cps.entropy(theta, k)
    close(mean, log_prob.exp() @ support)
    close(entropy, -(log_prob[likely].exp() * log_prob[likely]).sum())
    best = cps.log_prob(theta, k, support[log_prob.argmax()])
    for output in (mean.square().sum(), entropy, best):
        (grad,) = torch.autograd.grad(output, theta, create_graph=True)
        (grad_grad,) = torch.autograd.grad(grad.square().sum(), theta)
        for derivative in (grad, grad_grad):
            assert derivative.isfinite().all() and (derivative[theta.isinf()] == 0).all()


def test_infinite_logits_in_a_long_row() -> None:
    torch.manual_seed(2)
    logits = torch.cat((normal(300), torch.full((40,), INF), torch.full((60,), -INF)))[torch.randperm(400)]
    finite = logits[logits.isfinite()]
    close(cps.entropy(logits, 140), cps.entropy(finite, 100))
    close(cps.inclusion_probabilities(logits, 140)[logits.isfinite()], cps.inclusion_probabilities(finite, 100))
    draws = cps.sample(logits, 140, (200,))
    gof.check_k_hot(draws, 140)
    assert (draws[:, logits == INF] == 1).all() and (draws[:, logits == -INF] == 0).all()


@pytest.mark.parametrize("n, k", LONG)
def test_plain_recursion(n: int, k: int) -> None:
    logits = (torch.tensor([0.1, 3.0, 30.0]).double()[:, None] * normal(n)).requires_grad_()
    expected, actual = log_esp_recursion(logits.detach(), k), log_partition(logits, k)
    close(actual, expected)
    mean = cps.inclusion_probabilities(logits, k)
    close(torch.autograd.grad(actual.sum(), logits)[0], mean.detach())
    close(mean.sum(-1), torch.full((3,), float(k)), 1e-13)
    assert ((mean >= 0) & (mean <= 1)).all()
    assert (cps.sample(logits, k, (3,)).sum(-1) == k).all()


def test_long_rows_have_windows_and_the_fft() -> None:
    assert product_tree._plan(1500, 700)[-1].length < 700  # one entry at the root
    assert any(level.radius is not None for level in product_tree._plan(600, 290))
    assert all(level.radius is None for level in product_tree._plan(600, 40))


def test_gradients_of_a_long_row() -> None:
    equal = torch.full((150, 150), -0.25 / 149, dtype=torch.float64).fill_diagonal_(0.25)  # by symmetry
    close(cps.covariance(torch.zeros(150), 75), equal)
    logits = normal(150, scale=2.0)
    direction, cotangent = normal(2, 150, seed=1)

    def along_a_line(step: Tensor) -> Tensor:
        return cps.inclusion_probabilities(logits + step * direction, 75) @ cotangent

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert gradcheck(along_a_line, step) and gradgradcheck(along_a_line, step)


@pytest.mark.parametrize("n, k", [(1, 0), (2, 1), (3, 3), (5, 2)])
@pytest.mark.slow
def test_gradcheck(n: int, k: int) -> None:
    logits, value = normal(2, n).requires_grad_(), k_hot_vectors(n, k)[:1]
    assert gradcheck(lambda t: log_partition(t, k), logits) and gradgradcheck(lambda t: log_partition(t, k), logits)
    for f in (cps.inclusion_probabilities, cps.entropy, lambda t, k: cps.log_prob(t, k, value)):
        assert gradcheck(lambda t, f=f: f(t, k), logits) and gradgradcheck(lambda t, f=f: f(t, k), logits)


def test_log_prob_is_linear_in_the_value() -> None:
    logits = normal(5).requires_grad_()
    value = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(cps.log_prob(logits, 2, value), value)
    close(grad - grad.mean(), (logits - logits.mean()).detach())


@pytest.mark.parametrize("f", [log_partition, cps.inclusion_probabilities, cps.entropy, cps.covariance])
def test_batches(f: Callable[[Tensor, int | Tensor], Tensor]) -> None:
    logits, k = normal(4, 9), torch.tensor([0, 3, 9, 7])
    rows = torch.stack([f(row, int(size)) for row, size in zip(logits, k, strict=True)])
    close(f(logits, k), rows, 1e-14)
    close(torch.func.vmap(f)(logits, k), rows, 1e-14)
    close(f(logits[0], k)[1], f(logits[0], 3), 1e-14)
    close(f(logits.T.contiguous().T, k), rows, 1e-14)
    assert f(logits.float(), k).dtype == torch.float64
    assert f(logits[:0], 3).shape == f(logits[:0], k[:0]).shape == (0, *rows.shape[1:])


def test_sizes_per_row_in_a_long_batch() -> None:
    logits, k = normal(3, 300), torch.tensor([4, 150, 290])
    for f in (log_partition, cps.inclusion_probabilities):
        close(f(logits, k), torch.stack([f(row, int(size)) for row, size in zip(logits, k, strict=True)]), 1e-13)
    gof.check_k_hot(cps.sample(logits, k, (50,)), k)


@pytest.mark.parametrize("width", [2, 5, 33, 34, 50])
def test_pair_convolution(width: int) -> None:
    x, u, full = normal(width, 2, 3), normal(width, 2, 3, seed=1), 2 * width - 1
    for start, length in ((0, full), (0, width), (width // 2, width - 1), (width - 1, 1)):
        g = normal(length, 3, seed=2)
        matrix = torch.zeros(length, width, width, dtype=torch.float64)
        for c in range(length):
            for i in range(max(0, start + c - width + 1), min(width, start + c + 1)):
                matrix[c, i, start + c - i] = 1.0
        merged = pair_convolution.merge(x, start, length)
        close(merged, torch.einsum("cij,ib,jb->cb", matrix, x[:, 0], x[:, 1]), 1e-13)
        parts = [torch.einsum("cij,cb,jb->ib", m, g, x[:, s]) for m, s in ((matrix, 1), (matrix.mT, 0))]
        close(pair_convolution.split(g, x, start), torch.stack(parts, 1), 1e-13)
        close((g * merged).sum(), (g * pair_convolution.merge(x.flip(1), start, length)).sum(), 1e-12)
        tangent = torch.func.jvp(lambda x, a=(start, length): pair_convolution.merge(x, *a), (x,), (u,))[1]
        close((g * tangent).sum(), (u * pair_convolution.split(g, x, start)).sum(), 1e-12)


def test_derivatives_of_pair_convolution() -> None:
    for width, start, length in ((3, 0, 5), (3, 1, 3), (35, 34, 2)):
        x, g = normal(width, 2, 1).requires_grad_(), normal(length, 1).requires_grad_()
        cases: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = [
            (pair_convolution.merge, (x, start, length)),
            (pair_convolution.split, (g, x, start)),
        ]
        for f, inputs in cases:
            assert gradcheck(f, inputs, check_forward_ad=True, fast_mode=True)
            assert gradgradcheck(f, inputs, fast_mode=True)


def support_and_pmf(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    support, log_prob = enumerate_law(logits, k)
    return support, log_prob.exp()


@pytest.mark.parametrize(
    "n, k",
    [
        (4, 1),
        (5, 2),
        (8, 4),
        (9, 7),
        pytest.param(50, 2, marks=pytest.mark.slow),
    ],
)
def test_sampler(n: int, k: int) -> None:
    torch.manual_seed(20 + n)
    logits = normal(n, scale=1.5)
    support, pmf = support_and_pmf(logits, k)
    draws = cps.sample(logits, k, (min(gof.num_draws(pmf), 100_000),))
    gof.check_k_hot(draws, k)
    gof.check_sampler(draws, support, pmf)


def test_sampler_with_certain_units() -> None:
    torch.manual_seed(3)
    logits = torch.tensor([0.5, INF, -1.0, -INF, 0.0, 2.0], dtype=torch.float64)
    support, pmf = support_and_pmf(logits, 3)
    gof.check_sampler(cps.sample(logits, 3, (30_000,)), support, pmf)


@pytest.mark.parametrize("n, k, scale", [(600, 250, 30.0), (2000, 30, 2.0), (1000, 990, 1.0)])
@pytest.mark.slow
def test_sampler_of_long_rows(n: int, k: int, scale: float) -> None:
    torch.manual_seed(4)
    logits, count = normal(n, scale=scale), 2000
    draws = cps.sample(logits, k, (count,))
    gof.check_k_hot(draws, k)
    gof.check_inclusion(draws, cps.inclusion_probabilities(logits, k))
    gof.check_mean_log_prob(cps.log_prob(logits, k, draws), cps.entropy(logits, k).item())


def test_a_wrong_sampler_is_rejected() -> None:
    """Gumbel top-k on the same logits: another law on the same subsets."""
    torch.manual_seed(5)
    logits, k, count = normal(8, scale=1.5), 4, 30_000
    support, pmf = support_and_pmf(logits, k)
    perturbed = logits - torch.empty(count, 8, dtype=torch.float64).exponential_().log()
    draws = torch.zeros(count, 8).scatter_(1, perturbed.topk(k).indices, 1.0)
    with pytest.raises(AssertionError):
        gof.check_subsets(draws, support, pmf)


def test_sampler_shapes_seeds_and_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, k = normal(2, 3, 7), torch.tensor([1, 4, 6])
    draws = cps.sample(logits, k, (4, 5))
    assert draws.shape == (4, 5, 2, 3, 7) and (draws.sum(-1) == k).all()
    assert cps.sample(logits, 3).shape == (2, 3, 7)
    assert cps.sample(logits[:0], 3, (2,)).shape == (2, 0, 3, 7) and cps.sample(logits, 3, (0,)).shape == (0, 2, 3, 7)
    generator = torch.Generator()
    first, second = (cps.sample(logits, k, (9,), generator.manual_seed(1)) for _ in range(2))
    assert (first == second).all()
    monkeypatch.setattr(product_tree, "MAX_DRAW_ELEMENTS", 2 * 42)  # two draws at a time
    assert (cps.sample(logits, k, (9,)).sum(-1) == k).all()


@pytest.mark.parametrize("n, k", [(2, 1), (9, 4), (30, 29), (300, 40), (5000, 2000)])
def test_solve_logits_inverts(n: int, k: int) -> None:
    logits = torch.tensor([0.1, 3.0]).double()[:, None] * normal(2, n)
    logits = logits - logits.mean(-1, keepdim=True)
    close(solve_logits(cps.inclusion_probabilities(logits, k), k), logits, 1e-9)


def test_solve_logits_per_row_and_at_certain_units() -> None:
    k = torch.tensor([1, 2, 4])
    rows = [[0.2, 0.3, 0.5, 0.0, 0.0], [1.0, 0.25, 0.25, 0.5, 0.0], [1.0, 1.0, 0.4, 0.6, 1.0]]
    probs = torch.tensor(rows, dtype=torch.float64)
    logits = solve_logits(probs, k)
    assert ((logits == INF) == (probs == 1)).all() and ((logits == -INF) == (probs == 0)).all()
    close(cps.inclusion_probabilities(logits, k), probs, 1e-14)
    close(logits.masked_fill(logits.isinf(), 0.0).sum(-1), torch.zeros(3), 1e-13)
    close(torch.func.vmap(solve_logits)(probs, k), logits, 1e-12)
    assert solve_logits(probs[:0], 2).shape == (0, 5)
    limits = solve_logits(torch.tensor([1.0, 1e-30, 1e-40], dtype=torch.float64), 1)
    assert limits.tolist() == [INF, -INF, -INF]  # what is left for the others is 0 to rounding


@pytest.mark.slow
def test_solve_logits_over_many_orders_of_magnitude() -> None:
    for k, seed in itertools.product((1, 12), range(3)):
        probs = cps.inclusion_probabilities(normal(7, 24, seed=seed) ** 3 * 100, k)
        close(cps.inclusion_probabilities(solve_logits(probs, k), k), probs)


@pytest.mark.slow
def test_solve_logits_derivatives() -> None:
    def solve(u: Tensor) -> Tensor:
        probs = torch.cat((u.softmax(-1), 1 - u.softmax(-1), u.new_tensor([0.0, 1.0])))
        return solve_logits(probs, 4)[:6]

    u = normal(3).requires_grad_()
    assert gradcheck(solve, u)
    numeric = jacobian(solve, u)
    close(torch.func.jacrev(solve)(u.detach()), numeric, 1e-12)
    probs = torch.tensor([0.0, 1.0, 0.4, 0.6], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(solve_logits(probs, 2)[2], probs, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives .* `logits=` instead of `probs=`"):
        torch.autograd.grad(grad[2], probs)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.func.jacfwd(torch.func.jacrev(solve))(u.detach())
    assert grad[:2].tolist() == [0.0, 0.0] and grad.isfinite().all()


def test_solve_logits_of_rounded_probabilities() -> None:
    probs = cps.inclusion_probabilities(normal(5, 30, scale=2.0), 7).float()
    close(solve_logits(probs, 7), solve_logits(probs.double(), 7), 1e-7)


@pytest.mark.slow
def test_largest_entropy_falls_with_the_logits() -> None:
    """Value and derivatives are those of the entropy as a function of the logits that are solved for."""

    def entropy(u: Tensor) -> Tensor:
        probs = cps.inclusion_probabilities(u, 2)
        return largest_entropy(probs, solve_logits(probs, 2), 2)

    u, expected = normal(4), partial(cps.entropy, k=2)
    close(entropy(u), expected(u), 1e-13)
    for derivative in (jacobian, hessian):
        close(derivative(entropy, u), derivative(expected, u), 1e-11)
    close(torch.func.vmap(torch.func.grad(entropy))(u[None])[0], jacobian(expected, u), 1e-13)


def test_solve_logits_never_fails_silently() -> None:
    with pytest.raises(RuntimeError, match="no logits found"):
        solve_logits(torch.tensor([math.nan, 0.5, 0.5], dtype=torch.float64), 1)


@pytest.mark.parametrize("n, k", [(10**5, 10**4), pytest.param(10**6, 10**5, marks=pytest.mark.exhaustive)])
def test_huge_rows_against_closed_forms(n: int, k: int) -> None:
    torch.manual_seed(6)
    logits = torch.full((n,), -0.7, dtype=torch.float64, requires_grad=True)
    log_z = log_partition(logits, k)
    close(log_z, math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - 0.7 * k)
    close(torch.autograd.grad(log_z, logits)[0], torch.full((n,), k / n, dtype=torch.float64))
    logits = normal(n, scale=2.0)
    probs = cps.inclusion_probabilities(logits, k)
    close(probs.sum(), float(k), 1e-13)
    assert cps.sample(logits, k).sum() == k
    close(solve_logits(probs, k), logits - logits.mean(), 1e-9)
