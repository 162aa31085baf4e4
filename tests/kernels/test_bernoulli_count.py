"""The law of units given their count in loops: tables and nodes against the tree, and rows that have no answer."""

import math

import pytest
import torch
from scipy.stats import chi2
from torch.distributions import kl_divergence

from khot import ConditionalPoisson, StraightThrough
from khot.kernels import backend
from khot.kernels.count import (
    bernoulli_count,
    bernoulli_count_derivative,
)
from khot.laws import conditional_poisson, sampford, unit_by_unit
from khot.laws.inverse import times_covariance_at
from khot.laws.size_range import SizeRange
from khot.laws.unit_by_unit import bernoulli_count_draw
from khot.relaxations import sigmoid_topk
from tests.inputs import normal

pytest.importorskip("numba", reason="numba is not installed")

from khot.kernels.count import numba_backend
from khot.kernels.count.numba_backend import widest_count
from tests.log_partition import log_partition

pytestmark = pytest.mark.slow  # as what is tested takes seconds to compile

SEED = torch.tensor([0x123456789ABCDEF])
LAWS = (
    conditional_poisson.inclusion_probabilities,
    conditional_poisson.inclusion_log_odds,
    conditional_poisson.entropy,
)


def law_of(logits, low, high):
    """The law by loops."""
    return bernoulli_count.loop(logits, low, high, widest_count(logits.shape[-1], low, high))


def in_both(function, logits, weight):
    """Values and gradients of a function, by loops and by the tree."""
    found = []
    for name in ("numba", "torch"):
        x = logits.clone().requires_grad_()
        with backend(name):
            value = function(x)
            total = (value.where(value.isfinite(), 0) * (weight if value.ndim == 2 else weight[:, 0])).sum()
            found.append((value.detach(), torch.autograd.grad(total, x)[0]))
    return zip(*found, strict=True)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    ("n", "k", "spread"),
    [
        (100, 3, 1), (33, 16, 9), (700, 690, 3), (20, 10, 100), (1500, 4, 90), (9, 4, 2000),  # tables
        (3000, 8, 2), (700, 350, 1), (700, 350, 40), (2500, 40, 1), (10000, 5000, 0.01),  # nodes
        (700, 350, 2000), (40, 20, 1e4),  # rows that loops leave to the tree
    ],
)  # fmt: skip
def test_tables_and_nodes_leave_nothing_out(law, n, k, spread):
    logits, weight = spread * normal(2, n), normal(2, n, seed=1)
    for found, expected in in_both(lambda x: law(x, k), logits, weight):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("scale", [1.0, 40.0, 1e4, 1e17, 1e300])
def test_any_scale_and_ties(scale):
    logits = scale * torch.tensor([[1.0, 1, 1, 0.5, 0, 0, 0, -1, -1], [3.0, 2, 1, 0, -1, -2, -3, -4, -5]]).double()
    for k in range(10):
        _, log_total, complement, inclusion, _ = law_of(logits, *2 * [torch.tensor([k, k])])
        assert log_total.isfinite().all()
        torch.testing.assert_close(inclusion.sum(-1), torch.full((2,), float(k)).double(), rtol=1e-12, atol=1e-12)
        assert (complement + inclusion - 1).abs().max() < 1e-15
        tied = inclusion[0, :3]
        assert tied.equal(tied[:1].expand(3)) or (tied - tied[0]).abs().max() < 1e-15


def test_rows_without_an_answer_are_nan_and_others_are_not():
    logits = normal(5, 6)
    logits[0, 2], logits[1, :3], logits[2, :4] = torch.nan, torch.inf, -torch.inf
    k = torch.tensor([3, 2, 3, 7, 3])
    tilt, *rest, left = law_of(logits, k, k)
    assert left == 4
    for result in (tilt, *rest):
        assert result[:4].isnan().all() and not result[4].isnan().any()
    gradient = bernoulli_count_derivative.loop(logits, k, k, tilt, *rest[1:], normal(5, 6, seed=1))
    assert gradient[:4].isnan().all() and not gradient[4].isnan().any()
    draws = bernoulli_count_draw(logits, k, k, SEED, 7, torch.float64)
    assert (draws[:, :4] == 0).all() and (draws[:, 4].sum(-1) == 3).all()


def test_log_prob_of_values_between_far_units():
    """Every term is accurate even if units are almost certain."""
    logits = torch.tensor([[500.0, 499.0, -500.0, -502.0]]).double()
    value = torch.tensor([1.0, 0.0, 1.0, 0.0]).double()
    assert conditional_poisson.log_prob(logits, 2, value).item() == pytest.approx(-999, rel=1e-15)


@pytest.mark.parametrize(("n", "draws"), [(9, 300), (700, 65)])
def test_parts_of_draws_are_parts_of_the_whole(n, draws):
    """The random numbers of a draw depend only on its position, not on the number of rows, draws or threads."""
    logits, k = normal(4, n), torch.tensor([1, n // 2, n - 1, n // 3])
    whole = bernoulli_count_draw(logits, k, k, SEED, draws, torch.float64)
    assert (whole.sum(-1) == k).all()
    for some, rows in ((2, 4), (draws, 1), (60, 3)):
        part = bernoulli_count_draw(*(v[:rows] for v in (logits, k, k)), SEED, some, torch.float64)
        assert torch.equal(part, whole[:some, :rows])


@pytest.mark.parametrize(("n", "k"), [(5, 2), (400, 60)])
def test_sampford_is_the_same_by_tree(n, k):
    probs, value = sigmoid_topk(normal(3, n).float(), k).double(), torch.zeros(2, 3, n)
    value[..., :k] = 1
    weight = normal(2, 3, seed=1)

    def score(x):
        return (weight * sampford.log_prob(x, k, value)).sum(0)

    for one, other in in_both(score, probs, normal(3, 1, seed=2)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_certain_units_and_values_between_are_the_same_by_tree():
    logits, k = 2 * normal(4, 11), torch.tensor([4, 5, 1, 11])
    logits[1, 3], logits[1, 5], logits[2, 0] = torch.inf, -torch.inf, 80.0
    between = sigmoid_topk(logits + normal(3, 4, 11, seed=1), k)
    largest = (logits.argsort(-1, descending=True).argsort(-1) < k[:, None]).double()
    for value in (largest[None], largest[None].float(), between):
        for found, expected in in_both(
            lambda x, v=value: conditional_poisson.log_prob(x, k, v).T, logits, normal(4, 1)
        ):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for law in LAWS:
        for found, expected in in_both(lambda x, law=law: law(x, k), logits, normal(4, 11, seed=1)):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)

    probs = sigmoid_topk(logits, k)
    probs[3] = largest[3]
    for value in (largest[None], largest.flip(-1)[None].float()):
        for found, expected in in_both(lambda x, v=value: sampford.log_prob(x, k, v).T, probs, normal(4, 1)):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_many_cotangents_at_once():
    """Torch passes these as one batch, which the tree takes."""
    logits = normal(6).requires_grad_()

    def pi(x):
        return conditional_poisson.inclusion_probabilities(x, 3)

    rows = torch.autograd.functional.jacobian(pi, logits)
    at_once = torch.autograd.functional.jacobian(pi, logits, vectorize=True)
    torch.testing.assert_close(at_once, rows, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(pi, logits) and torch.autograd.gradgradcheck(pi, logits)


def test_long_odds_keep_their_digits():
    """Inclusion probabilities of 1e-200 and their complements, against their closed form for one of n."""
    logits = torch.tensor([[0.0, -460.0, -230.0]]).double()
    *_, complement, inclusion, _ = law_of(logits, *2 * [torch.tensor([1])])
    total = 1 + math.exp(-460) + math.exp(-230)
    expected = torch.tensor([[1.0, math.exp(-460), math.exp(-230)]], dtype=torch.float64) / total
    torch.testing.assert_close(inclusion, expected, rtol=1e-13, atol=0)
    assert complement[0, 0].item() == pytest.approx((math.exp(-460) + math.exp(-230)) / total, rel=1e-13)


@pytest.fixture
def rows_of(monkeypatch):
    """A function from a loop to the numbers of rows of its calls since the last query."""
    rows = {}

    def counting(over_rows):
        def call(loop, count, *args):
            rows.setdefault(loop, []).append(count)
            over_rows(loop, count, *args)

        return call

    monkeypatch.setattr(numba_backend, "over_rows", counting(numba_backend.over_rows))
    return lambda loop: rows.pop(loop, [])


def test_a_step_has_one_derivative_of_inclusion_probabilities(rows_of):
    """Of a straight-through draw, the entropy and a divergence: also where a plate has expanded the estimator."""
    theta = normal(4, 9).float().requires_grad_()
    prior = ConditionalPoisson(logits=torch.zeros(4, 9), k=3)
    estimator = StraightThrough(ConditionalPoisson(logits=theta, k=3)).expand((4,))
    weight = normal(4, 9, seed=1).float()
    loss = (weight * estimator.rsample()).sum() + kl_divergence(estimator, prior).sum() - estimator.entropy().sum()
    found = torch.autograd.grad(loss, theta)[0]
    assert rows_of(numba_backend._derivative_blocks) == [1]

    design = ConditionalPoisson(logits=theta, k=3)
    alone = [(weight * design.mean).sum(), -2 * ConditionalPoisson(logits=theta, k=3).entropy().sum()]
    expected = sum(torch.autograd.grad(part, theta)[0] for part in alone)
    assert rows_of(numba_backend._derivative_blocks) == [1, 1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_backward_pass_of_the_mean_leaves_the_entropy_its_derivatives():
    theta = normal(2, 9).requires_grad_()
    design = ConditionalPoisson(logits=theta, k=3)
    mean, entropy = design.mean, design.entropy()
    torch.autograd.grad(mean.square().sum(), theta)
    first = torch.autograd.grad(entropy.sum(), theta, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), theta)[0]

    fresh = conditional_poisson.entropy(theta, 3)
    expected = torch.autograd.grad(fresh.sum(), theta, create_graph=True)[0]
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), theta)[0], rtol=1e-10, atol=1e-12)


def test_a_mean_that_no_longer_holds_is_not_shared():
    theta = normal(2, 9).requires_grad_()
    design = ConditionalPoisson(logits=theta, k=3)
    expected = conditional_poisson.entropy(theta.detach(), 3)
    with torch.no_grad():
        design.mean.zero_()
    torch.testing.assert_close(design.entropy(), expected, rtol=1e-14, atol=0)

    old = conditional_poisson.inclusion_probabilities(theta, 3).sum()
    with torch.no_grad():
        theta.mul_(2)
    with pytest.raises(RuntimeError, match="`logits` have been modified in place"):
        old.backward()


def test_a_mean_of_inference_mode_is_not_shared():
    theta = torch.nn.Parameter(normal(2, 9))
    expected = conditional_poisson.entropy(theta.detach(), 3)
    with torch.inference_mode():
        design = ConditionalPoisson(logits=theta, k=3)
        _ = design.mean
        assert design.entropy().equal(expected)
    (found,) = torch.autograd.grad(design.entropy().sum(), theta)
    torch.testing.assert_close(found, torch.autograd.grad(conditional_poisson.entropy(theta, 3).sum(), theta)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_done_to_a_mean_is_not_done_to_the_entropy(dtype):
    theta = normal(2, 9).to(dtype).requires_grad_()
    (expected,) = torch.autograd.grad(conditional_poisson.entropy(theta, 3).sum(), theta)
    design = ConditionalPoisson(logits=theta, k=3)
    mean, entropy = design.mean, design.entropy()
    mean.register_hook(torch.zeros_like)
    torch.testing.assert_close(torch.autograd.grad(entropy.sum(), theta, retain_graph=True)[0], expected)
    assert torch.autograd.grad(entropy.sum(), mean, allow_unused=True, retain_graph=True) == (None,)
    mean.clamp_(0.2, 0.8)
    torch.testing.assert_close(torch.autograd.grad(entropy.sum(), theta)[0], expected)


def test_rows_that_an_expansion_repeats_are_solved_once(rows_of):
    """As a prior's by a plate; along any dimension, and also where there is a tensor of sizes."""
    value, rows = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]).double().expand(7, 1, 1, 1, 5), normal(3, 1, 5)
    whole = rows.expand(2, 3, 4, 5)

    def results(design):
        return design.mean, design.entropy(), design.log_prob(value)

    expected = results(ConditionalPoisson(logits=whole.contiguous(), k=2))
    assert rows_of(numba_backend._law_blocks) == [3]
    by_plates = ConditionalPoisson(logits=rows, k=2).expand((2, 3, 4))
    by_size = ConditionalPoisson(logits=whole, k=torch.tensor(2))
    by_sizes = ConditionalPoisson(logits=whole, k=torch.full((3, 4), 2))
    for design, solved in ((by_plates, 1), (by_size, 1), (by_sizes, 2)):
        assert all(map(torch.equal, results(design), expected))
        assert rows_of(numba_backend._law_blocks) == [solved]


def test_gradients_of_rows_that_an_expansion_repeats():
    theta = normal(3, 1, 5).requires_grad_()
    value = normal(2, 3, 4, 5, seed=1).topk(2).indices
    value = torch.zeros(2, 3, 4, 5).double().scatter(-1, value, 1)
    weight = normal(2, 3, 4, 5, seed=2)
    gradients = []
    for rows in (theta.expand(2, 3, 4, 5), theta.expand(2, 3, 4, 5).contiguous()):
        loss = conditional_poisson.log_prob(rows, 2, value).sum()
        loss = loss + (weight * conditional_poisson.inclusion_probabilities(rows, 2)).sum()
        gradients.append(torch.autograd.grad(loss, theta)[0])
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)


def test_rows_of_large_numbers_keep_their_digits():
    logits = 1e9 + normal(3, 50)
    k = torch.tensor([1, 20, 49])
    with backend("numba"):
        *_, complement, inclusion, _ = law_of(logits, k, k)
        draws = bernoulli_count_draw(logits, k, k, SEED, 9, torch.float64)
        *_, expected_complement, expected, _ = law_of(logits - 1e9, k, k)
    torch.testing.assert_close(inclusion, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(complement, expected_complement, rtol=1e-12, atol=0)
    assert (draws.sum(-1) == k).all()


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(scale):
    """Rows of other sizes, and rows that loops leave, share its vectors; shares of threads cut the batch elsewhere."""
    logits = scale * normal(21, 11)
    logits[3], logits[8, 2], logits[9, :3] = 1e6 * logits[3], torch.nan, torch.inf
    low = torch.arange(21) % 11
    high = torch.where(torch.arange(21) % 3 == 0, low, (low + 3).clamp(max=11))
    g = normal(21, 11, seed=1)

    def results(rows):
        given = logits[rows], low[rows], high[rows]
        *law, _ = law_of(*given)
        return [*law, bernoulli_count_derivative.loop(*given, law[0], *law[2:], g[rows])]

    whole = results(torch.arange(21))
    for rows in (torch.randperm(21), torch.tensor([13]), torch.arange(5, 18), torch.tensor([4, 4, 20] * 9)):
        for found, expected in zip(results(rows), whole, strict=True):
            assert torch.equal(found.nan_to_num(-1.0), expected[rows].nan_to_num(-1.0))


def test_long_rows_do_not_depend_on_their_neighbours():
    """Each has its own way, by a table or by nodes, and a range without a table is left to other code."""
    n, k = 300, torch.tensor([150, 2, 140, 299, 150, 60])
    logits, g, low = normal(6, n), normal(6, n, seed=1), k - torch.tensor([0, 0, 0, 0, 40, 3])

    def results(rows):
        given = logits[rows], low[rows], k[rows]
        *law, _ = law_of(*given)
        return [*law, bernoulli_count_derivative.loop(*given, law[0], *law[2:], g[rows])]

    whole = results(torch.arange(6))
    assert [part.isnan().view(6, -1).all(-1).nonzero().flatten().tolist() for part in whole] == [[4]] * 5
    for rows in ([0], [1, 3], [2, 5, 1], [4]):
        for found, expected in zip(results(torch.tensor(rows)), whole, strict=True):
            assert torch.equal(found.nan_to_num(-1.0), expected[rows].nan_to_num(-1.0))


def test_covariance_of_long_rows_of_ranges():
    sizes, g = SizeRange(torch.tensor([100, 3]), torch.tensor([150, 9])), normal(2, 300, seed=1)
    with backend("torch"):
        probs = conditional_poisson.inclusion_probabilities(normal(2, 300), sizes)
        expected = times_covariance_at(probs, sizes, g)
    with torch.no_grad():
        torch.testing.assert_close(times_covariance_at(probs, sizes, g), expected, rtol=1e-10, atol=1e-13)


def test_ranges_of_sizes_are_the_same_by_tree():
    logits, g = 2 * normal(5, 12), normal(5, 12, seed=1)
    logits[0, 3], logits[1, 5], logits[2], logits[3] = torch.inf, -torch.inf, logits[2] + 9, 100 * logits[3]
    value = (logits.argsort(-1, descending=True).argsort(-1) < torch.tensor([2, 3, 4, 3, 2])[:, None]).double()
    for sizes in (SizeRange(2, 4), SizeRange(torch.arange(5), torch.tensor([4, 3, 12, 3, 9])), SizeRange(0, 12)):
        for law in (conditional_poisson.inclusion_probabilities, conditional_poisson.inclusion_log_odds):
            for found, expected in in_both(lambda x, law=law, k=sizes: law(x, k), logits, g):
                torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
        for found, expected in in_both(lambda x, k=sizes: conditional_poisson.log_prob(x, k, value), logits, g):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("sizes", [2, SizeRange(1, 3)])
def test_draws_have_the_law_of_the_tree(sizes):
    """By chi-square at a false alarm of 1e-6."""
    logits = torch.tensor([[1.5, -0.5, 0.0, 2.0, -1.0], [500.0, -500.0, 300.0, 1e9, 2.0]]).double()
    draws = unit_by_unit.sample(logits, sizes, 200_000, torch.Generator().manual_seed(3)).double()
    every = torch.cartesian_prod(*5 * [torch.tensor([0.0, 1.0])]).double()
    ends = (sizes, sizes) if isinstance(sizes, int) else sizes
    every = every[(every.sum(-1) >= ends[0]) & (every.sum(-1) <= ends[1])]
    with backend("torch"):
        expected = 200_000 * conditional_poisson.log_prob(logits, sizes, every[:, None]).exp()
    counts = (draws[:, None] == every[:, None]).all(-1).double().sum(0)
    inside = expected > 5
    statistic = ((counts - expected).square() / expected).where(inside, 0.0).sum(0)
    assert (statistic.numpy() < chi2.isf(1e-6, (inside.sum(0) - 1).clamp(min=1).numpy())).all()
    assert (counts.where(~inside, 0.0).sum(0) <= 40).all() and (counts.sum(0) == 200_000).all()


def test_long_draws_have_the_law_of_the_tree():
    """With certain units, nearly certain ones and ties; numbers of ones in groups of units by chi-square at 1e-6."""
    logits, k, draws = 3 * normal(3, 700), torch.tensor([40, 350, 690]), 20_000
    logits[0, :5], logits[1, 7:400], logits[2, 3:60] = torch.inf, 0.25, -40.0
    drawn = bernoulli_count_draw(logits, k, k, SEED, draws, torch.bool)
    assert (drawn.sum(-1) == k).all()
    with backend("torch"):
        mean = conditional_poisson.inclusion_probabilities(logits, k)
    assert ((drawn.double().mean(0) - mean).abs() <= 6 * (mean * (1 - mean) / draws).sqrt() + 20 / draws).all()
    for group in (slice(350), slice(690, 700), slice(0, 700, 2)):
        inside, outside = logits.clone(), logits.clone()
        inside[:, [i for i in range(700) if i not in range(700)[group]]] = -torch.inf
        outside[:, group] = -torch.inf
        for r in range(3):
            counts = torch.arange(min(int(k[r]), len(range(700)[group])) + 1)
            log_weight = sum(
                log_partition(rows[r].masked_fill(rows[r] == torch.inf, 60.0).expand(len(counts), -1), size).where(
                    (size <= (rows[r] > -torch.inf).sum()), -torch.inf
                )
                for rows, size in ((inside, counts), (outside, k[r] - counts))
            )
            expected = draws * log_weight.softmax(0)
            found = drawn[:, r, group].sum(-1).bincount(minlength=len(counts)).double()
            large = expected > 5
            statistic = ((found - expected).square() / expected)[large].sum()
            assert statistic < chi2.isf(1e-6, max(int(large.sum()) - 1, 1)) and found[~large].sum() <= 40
