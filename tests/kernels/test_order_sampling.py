"""Order sampling's integrals: closed forms, extremes of scale and size, derivatives, certain units, vmap."""

import itertools
import math

import pytest
import torch

from khot.kernels import order_sampling
from khot.kernels.order_sampling import EXACT, SINGLE, noises
from khot.laws import order_sampling as kernel
from khot.relaxations import sigmoid_topk
from tests.loops import for_each

pytestmark = pytest.mark.usefixtures("cpu_backend")

NOISES = {"logistic": noises.LOGISTIC, "log_exponential": noises.LOG_EXPONENTIAL}
every_noise = pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
SIZES = [(2, 1), (6, 1), (6, 3), (6, 5), (60, 1), (60, 30), (60, 59)]


def random_positions(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def k_hot(n, k):
    subsets = torch.tensor(list(itertools.combinations(range(n), k)))
    return torch.zeros(len(subsets), n, dtype=torch.float64).scatter_(-1, subsets, 1)


def successive_log_prob(theta, subset):
    """Recursion over the units drawn so far, a sum of positive terms: no digit is lost at any scale."""
    rest = torch.logsumexp(theta[[i for i in range(len(theta)) if i not in subset]], 0)
    log_prob = {frozenset(): torch.tensor(0.0, dtype=torch.float64)}
    for size in range(1, len(subset) + 1):
        for drawn in map(frozenset, itertools.combinations(subset, size)):
            terms = []
            for last in drawn:
                left = torch.cat((theta[[i for i in subset if i not in drawn or i == last]], rest[None]))
                terms.append(log_prob[drawn - {last}] + theta[last] - torch.logsumexp(left, 0))
            log_prob[drawn] = torch.logsumexp(torch.stack(terms), 0)
    return log_prob[frozenset(subset)]


@every_noise
@for_each("n, k", [(2, 1), (7, 3), (10, 5), (64, 1), (64, 32), (64, 63), (1000, 1), (1000, 500), (1000, 999)])
def test_equal_positions(noise, n, k):
    theta = torch.full((n,), -0.7, dtype=torch.float64)
    value = (torch.arange(n) < k).double()
    expected = -(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1))
    assert kernel.log_prob(noise, theta, k, value).item() == pytest.approx(expected, rel=1e-11)
    probs = kernel.inclusion_probabilities(noise, theta, k)
    torch.testing.assert_close(probs, torch.full_like(theta, k / n), rtol=1e-11, atol=0)


@pytest.mark.parametrize("scale", [1.0, 10.0, 50.0])
def test_successive_sampling_against_its_recursion(scale):
    theta = random_positions(9, scale=scale)
    subsets = [(0, 1, 2, 3), (5, 6, 7, 8), (0, 3, 4, 8), (1, 2, 6, 7)]
    value = torch.zeros(4, 9, dtype=torch.float64).scatter_(-1, torch.tensor(subsets), 1)
    expected = torch.stack([successive_log_prob(theta, subset) for subset in subsets])
    torch.testing.assert_close(
        kernel.log_prob(noises.LOG_EXPONENTIAL, theta, 4, value), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("gap", [0.1, 1.0, 10.0, 300.0])
def test_two_logistic_ranks(gap):
    """P(the lower position is first), for a difference of two logistic variables, has a closed form."""
    theta = torch.tensor([0.0, gap], dtype=torch.float64)
    r = math.exp(-gap)
    expected = math.log(r * (gap - 1 + r) / (1 - r) ** 2) if gap < 100 else math.log(gap - 1) - gap
    log_prob = kernel.log_prob(noises.LOGISTIC, theta, 1, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert log_prob.item() == pytest.approx(expected, rel=1e-11)


@every_noise
def test_enumeration(noise):
    """Probabilities add up to 1, and those of the subsets with a unit add up to its inclusion probability."""
    scales = torch.tensor([0.1, 5.0, 50.0]).double()[:, None, None]
    theta, support = (scales * random_positions(2, 8)).flatten(0, 1), k_hot(8, 3)
    pmf = kernel.log_prob(noise, theta, 3, support[:, None]).exp()
    torch.testing.assert_close(pmf.sum(0), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-12)
    probs = kernel.inclusion_probabilities(noise, theta, 3)
    torch.testing.assert_close(probs, pmf.T @ support, rtol=1e-10, atol=1e-12)


@every_noise
def test_probabilities_add_up_by_themselves(noise):
    """Nothing is normalised: P(i in S) and P(i not in S) are integrals, whose sums are checks of the quadrature."""
    scales = torch.tensor([0.0, 1.0, 8.0, 50.0]).double()[:, None, None]
    for n, k in SIZES:
        rows = kernel._rows((scales * random_positions(2, n)).flatten(0, 1), k)
        included, out = kernel._inclusion(noise, rows)
        assert (included + out - 1).abs().max() < 1e-11
        assert (included.sum(-1) - k).abs().max() < 1e-10
        assert (out.sum(-1) - (n - k)).abs().max() < 1e-10


@every_noise
@pytest.mark.parametrize("k", [1, 10, 500, 999])
def test_long_rows_add_up(noise, k):
    theta = torch.stack([random_positions(1000, scale=scale) for scale in (1.0, 5.0, 50.0)])
    included, out = kernel._inclusion(noise, kernel._rows(theta, k))
    assert (included + out - 1).abs().max() < 2e-11
    probs = kernel.inclusion_probabilities(noise, theta, k)
    assert (probs.sum(-1) - k).abs().max() < 1e-10


@every_noise
def test_far_positions(noise):
    theta = [[0.0, 1e5, -1e5, 2e5], [1e300, -1e300, 0.0, 1.0], [1e-300, 0.0, -1e-300, 5e-324]]
    theta = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    for result in (
        kernel.inclusion_probabilities(noise, theta, 2),
        kernel.log_prob(noise, theta, 2, k_hot(4, 2)[:, None]),
    ):
        (grad,) = torch.autograd.grad(result.sum(), theta)
        assert result.isfinite().all() and grad.isfinite().all()


@every_noise
def test_equal_positions_between_far_ones(noise):
    theta = torch.tensor([0.0, 2e3, 0.0, -2e3, 0.0, 1e300], dtype=torch.float64)
    expected = torch.tensor([1 / 3, 1, 1 / 3, 0, 1 / 3, 1], dtype=torch.float64)
    torch.testing.assert_close(kernel.inclusion_probabilities(noise, theta, 3), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(kernel.inclusion_probabilities(noise, -theta, 3), 1 - expected, rtol=0, atol=1e-13)


@every_noise
def test_certain_units_are_taken_out(noise):
    theta = random_positions(6).requires_grad_()
    inf = torch.tensor([math.inf], dtype=torch.float64)
    padded = torch.cat((inf, theta[:3], -inf, theta[3:], inf))
    order = [1, 2, 3, 5, 6, 7]
    probs = kernel.inclusion_probabilities(noise, padded, 5)
    torch.testing.assert_close(probs[order], kernel.inclusion_probabilities(noise, theta, 3), rtol=0, atol=1e-13)
    assert probs[[0, 4, 8]].tolist() == [1, 0, 1]
    value = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 0, 1], dtype=torch.float64)
    log_prob = kernel.log_prob(noise, padded, 5, torch.stack((value, value.roll(1))))
    torch.testing.assert_close(log_prob[0], kernel.log_prob(noise, theta, 3, value[order]), rtol=0, atol=1e-13)
    assert log_prob[1] == -math.inf
    (grad,) = torch.autograd.grad(log_prob[0] + probs[1], theta)
    assert grad.isfinite().all()


@every_noise
@pytest.mark.slow
def test_derivatives_to_second_order(noise):
    theta = random_positions(2, 4).requires_grad_()
    value = torch.tensor([[1.0, 0, 1, 0], [0, 1, 1, 0]], dtype=torch.float64)
    for function in (
        lambda t: kernel.log_prob(noise, t, 2, value),
        lambda t: kernel.inclusion_probabilities(noise, t, 2),
    ):
        assert torch.autograd.gradcheck(function, theta)
        assert torch.autograd.gradgradcheck(function, theta)


@every_noise
def test_derivatives_at_ties(noise):
    theta = torch.tensor([0.3, -0.5, 0.3, -1.0, 0.3, -1.0], dtype=torch.float64, requires_grad=True)
    value = k_hot(6, 3)[[0, 3, 8, 11, 17]]
    assert torch.autograd.gradcheck(lambda t: kernel.log_prob(noise, t, 3, value), theta)
    assert torch.autograd.gradcheck(lambda t: kernel.inclusion_probabilities(noise, t, 3), theta)


@every_noise
@for_each("scale", [0.0, 1.0, 30.0])
def test_jacobian_is_the_laplacian_of_a_graph(noise, scale):
    theta = random_positions(6, scale=scale)
    jacobian = torch.func.jacrev(lambda t: kernel.inclusion_probabilities(noise, t, 3))(theta)
    torch.testing.assert_close(jacobian, jacobian.T, rtol=0, atol=1e-12)
    assert jacobian.sum(-1).abs().max() < 1e-12
    assert (jacobian - torch.diag(jacobian.diag())).max() < 1e-12
    if scale == 0:
        torch.testing.assert_close(jacobian, jacobian[0, 0] * (1.2 * torch.eye(6, dtype=torch.float64) - 0.2))


@every_noise
def test_vmap(noise):
    theta, value = random_positions(5, 6, scale=3.0), k_hot(6, 3)[:5]
    log_prob = torch.func.vmap(lambda t, v: kernel.log_prob(noise, t, 3, v))(theta, value)
    torch.testing.assert_close(log_prob, kernel.log_prob(noise, theta, 3, value), rtol=0, atol=1e-12)
    jacobian = torch.func.jacrev(lambda t: kernel.inclusion_probabilities(noise, t, 3))
    each = torch.stack([jacobian(t) for t in theta])
    torch.testing.assert_close(torch.func.vmap(jacobian)(theta), each, rtol=0, atol=1e-12)


@every_noise
def test_slabs_change_nothing(noise, monkeypatch):
    theta, value = random_positions(3, 6), k_hot(6, 3)[:3]
    whole = kernel.log_prob(noise, theta, 3, value), kernel.inclusion_probabilities(noise, theta, 3)
    monkeypatch.setattr(kernel, "MAX_ELEMENTS", 7)
    parts = kernel.log_prob(noise, theta, 3, value), kernel.inclusion_probabilities(noise, theta, 3)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-14)


@every_noise
@for_each("n, k, scale", [(2, 1, 1.0), (5, 2, 10.0), (20, 7, 40.0), (20, 19, 3.0), (100, 1, 3.0)])
@pytest.mark.slow
def test_solved_positions(noise, n, k, scale):
    probs = sigmoid_topk(random_positions(2, n, scale=scale), k)
    theta = kernel.solve_positions(noise, probs, k)
    torch.testing.assert_close(kernel.inclusion_probabilities(noise, theta, k), probs, rtol=1e-9, atol=1e-13)


@every_noise
def test_solved_positions_of_certain_units(noise):
    probs = torch.tensor([0.0, 0.3, 1.0, 0.7, 1.0], dtype=torch.float64, requires_grad=True)
    theta = kernel.solve_positions(noise, probs, 3)
    assert theta.isinf().tolist() == [True, False, True, False, True]
    (grad,) = torch.autograd.grad(theta[1] - theta[3], probs)
    assert grad.isfinite().all() and grad[[0, 2, 4]].abs().max() == 0 and grad[1] > 0


@pytest.mark.slow
def test_derivatives_of_solved_positions():
    offset = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    base = torch.tensor([0.5, 0.7, 0.8], dtype=torch.float64)
    for noise in (noises.LOGISTIC, noises.LOG_EXPONENTIAL):
        solve = lambda x, noise=noise: kernel.solve_positions(noise, base + x - x.mean(), 2)  # noqa: E731
        assert torch.autograd.gradcheck(solve, offset, check_forward_ad=True)


@every_noise
def test_ranks_are_positive_finite_and_distinct(noise):
    torch.manual_seed(0)
    theta = torch.cat((random_positions(500, scale=200.0), torch.tensor([math.inf, -math.inf], dtype=torch.float64)))
    scale = order_sampling.rank_scale(theta, order_sampling.rank_centre(theta, 50))
    ranks = order_sampling.draw_ranks(noise, scale, torch.Size((200, 502)))
    assert (ranks > 0).all() and ranks.isfinite().all() and (ranks.sort(-1).values.diff(dim=-1)[:, 1:-1] > 0).any()
    assert (ranks[:, 500:501] < ranks[:, :500]).all() and (ranks[:, 501:] > ranks[:, :500]).all()
    equal = order_sampling.draw_ranks(noise, torch.ones(10**6).double(), torch.Size((10**6,)))
    assert len(equal.unique()) == 10**6


@for_each("n, k", [(2, 1), (10, 5), (64, 1), (64, 32), (100, 99)])
@pytest.mark.parametrize("depth", [SINGLE, EXACT])
def test_nodes_suffice_where_most_are_needed(depth, n, k):
    """If all positions are equal; the Jacobian is then a multiple of that of the mean."""
    theta = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    probs = kernel.inclusion_probabilities(noises.LOGISTIC, theta, k, depth)
    assert (probs / k * n - 1).abs().max() <= 2 * math.exp(-depth) + 1e-14
    vector = torch.arange(n, dtype=torch.float64) / n
    (product,) = torch.autograd.grad(probs, theta, vector)
    other = kernel._inclusion_in_torch(noises.LOGISTIC, theta, k)
    torch.testing.assert_close(
        product, torch.autograd.grad(other, theta, vector)[0], rtol=2 * math.exp(-depth), atol=1e-13
    )


@every_noise
@pytest.mark.parametrize("depth", [SINGLE, EXACT])
def test_loops_and_torch_agree(noise, depth):
    """Ordinary rows, one with certain units, one with almost none open, and one so wide that a loop leaves it."""
    theta = torch.cat([scale * random_positions(1, 9) for scale in (1.0, 3.0, 40.0, 500.0)])
    theta[1, 2], theta[1, 5] = math.inf, -math.inf
    theta.requires_grad_()
    k, vector = torch.tensor([3, 4, 3, 3]), random_positions(9)
    first = k_hot(9, 3)[[5, 70]].repeat(2, 1)
    value = torch.stack((theta.argsort(-1).argsort(-1) >= 9 - k[:, None], first, first.flip(-1))).to(theta.dtype)
    found = kernel.inclusion_probabilities(noise, theta, k, depth), kernel.log_prob(noise, theta, k, value, depth)
    expected = (
        kernel._inclusion_in_torch(noise, theta, k),
        kernel._log_prob_in_torch(noise, theta, k, value),
    )
    tolerance = 20 * math.exp(-depth) + 1e-12
    assert expected[1].isinf().any() and expected[1].isfinite().any()
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)
    gradients = [
        torch.autograd.grad((p * vector).sum() + y[y.isfinite()].sum(), theta)[0] for p, y in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=10 * tolerance)


@every_noise
@for_each("n", [6, 13, 200])
def test_rows_are_independent(noise, n, cpu_backend):
    """To the last bit, although long rows of few draws and of many have different methods."""
    if cpu_backend == "torch":
        pytest.skip("rows share the number of nodes there")
    theta, vector = random_positions(5, n, scale=2.0).requires_grad_(), random_positions(n)
    k = torch.tensor([n // 3, n // 2, n - 1, 1, n // 2])

    def results(rows):
        mean = kernel.inclusion_probabilities(noise, theta[rows], k[rows])
        value = (theta[rows].argsort(-1).argsort(-1) >= n - k[rows, None]).double()
        log_prob = kernel.log_prob(noise, theta[rows], k[rows], value)
        (slope,) = torch.autograd.grad((mean * vector).sum() + log_prob.sum(), theta)
        return mean, log_prob, slope[rows]

    whole = results(torch.arange(5))
    for rows in ([3], [4, 1, 2], [2, 0, 1, 4, 3]):
        for one, part in zip(whole, results(torch.tensor(rows)), strict=True):
            assert torch.equal(part, one[rows])


@every_noise
def test_accuracy_where_the_integrals_end(noise, cpu_backend):
    """Nothing of an integral is left out where few units are drawn, or almost all, or where positions are far apart."""
    if cpu_backend == "torch":
        pytest.skip("this is the reference")
    for n, k, scale in [(1000, 500, 50.0), (40, 3, 5.0), (100, 99, 0.3), (100, 10, 20.0), (2, 1, 10.0)]:
        theta = random_positions(1, n, scale=scale).clamp(-140, 140).requires_grad_()
        vector = random_positions(n)
        expected = kernel._inclusion_in_torch(noise, theta, k)
        (gradient,) = torch.autograd.grad((expected * vector).sum(), theta)
        for depth in (SINGLE, EXACT):
            found = kernel.inclusion_probabilities(noise, theta, k, depth)
            tolerance = math.exp(-depth) + 1e-12
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
            (slope,) = torch.autograd.grad((found * vector).sum(), theta)
            torch.testing.assert_close(slope, gradient, rtol=0, atol=tolerance)


@every_noise
def test_accuracy_between_clusters(noise, cpu_backend):
    """Units in two clusters far apart, with k at the boundary: the integrand is flat between sharp edges."""
    if cpu_backend == "torch":
        pytest.skip("this is the reference")
    theta, k = 1e-3 * random_positions(2, 30), torch.tensor([15, 29])
    theta[0, 15:] += 26
    theta[1, 0] -= 18.4
    expected = kernel._inclusion_in_torch(noise, theta, k)
    for depth in (SINGLE, EXACT):
        found = kernel.inclusion_probabilities(noise, theta, k, depth)
        torch.testing.assert_close(found, expected, rtol=0, atol=math.exp(-depth) + 1e-11)


@every_noise
@pytest.mark.parametrize("mask", [-100.0, -1e9, -1e30])
def test_masked_rows_stay_in_the_loops(noise, mask, cpu_backend, monkeypatch):
    """Units that are masked by a large number, and others that are certain, cost no more than infinite positions."""
    theta = random_positions(5, 20)
    is_masked, is_sure = theta < -0.5, theta > 1.5
    limits = theta.masked_fill(is_masked, -math.inf).masked_fill(is_sure, math.inf)
    theta = theta.masked_fill(is_masked, mask).masked_fill(is_sure, -mask).requires_grad_()
    k = is_sure.sum(-1) + 2
    value = (limits.argsort(-1).argsort(-1) >= 20 - k[:, None]).double()
    log_prob, inclusion = kernel._log_prob_in_torch, kernel._inclusion_in_torch
    expected = log_prob(noise, limits, k, value), inclusion(noise, limits, k)
    if cpu_backend == "numba":
        for name in ("_log_prob_in_torch", "_inclusion_in_torch"):
            monkeypatch.setattr(kernel, name, lambda *_, **__: pytest.fail("a row has left the loop"))
    found = kernel.log_prob(noise, theta, k, value), kernel.inclusion_probabilities(noise, theta, k)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    (gradient,) = torch.autograd.grad(found[0].sum() + (found[1] * random_positions(20)).sum(), theta)
    assert gradient.isfinite().all()
    if mask < -150:
        assert (gradient[is_masked | is_sure] == 0).all() and (gradient[~is_masked & ~is_sure] != 0).all()
