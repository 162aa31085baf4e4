"""PlackettLuce against its definition, the law of its sets, and the estimates that rankings give."""

import copy
import itertools
import math
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, config_enumerate
from scipy import stats

from khot import GumbelTopK, PlackettLuce, score_function
from khot.constraints import ranking
from khot.laws import plackett_luce as law
from tests.gof import LEVEL, MIN_EXPECTED
from tests.inputs import normal
from tests.loops import for_each

EXCLUDED = torch.tensor([0.3, -1.0, -math.inf, 0.8, 0.1], dtype=torch.float64)
WIDE = torch.tensor([900.0, -3.0, 0.0, 1800.0, 2.0, 1.0], dtype=torch.float64)


WAYS = {"subtraction": (law.MOST_TAKEN, -1.0), "plain_sums": (-1.0, law.LARGEST_SPREAD), "logarithms": (-1.0, -1.0)}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Each way to add up weights, where it applies; that in logarithms always does."""
    most_taken, largest_spread = WAYS[request.param]
    monkeypatch.setattr(law, "MOST_TAKEN", most_taken)
    monkeypatch.setattr(law, "LARGEST_SPREAD", largest_spread)


def by_definition(logits, value):
    """The probability of one value, one choice after the other."""
    left, log_prob = dict(enumerate(logits.tolist())), 0.0
    for unit in value:
        highest = max(left.values())
        log_prob += left[unit] - highest - math.log(sum(math.exp(weight - highest) for weight in left.values()))
        del left[unit]
    return log_prob


@pytest.mark.parametrize(
    "logits", [normal(6), WIDE, normal(6, scale=100.0), EXCLUDED], ids=["plain", "wide", "far", "excluded"]
)
@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_log_prob_by_its_definition(way, logits, k):
    design, n = PlackettLuce(logits, k), len(logits)
    support = design.enumerate_support()
    assert support.tolist() == [list(value) for value in itertools.permutations(range(n), k)]
    assert design.support.check(support).all()
    log_prob = design.log_prob(support)
    torch.testing.assert_close(log_prob.exp().sum(), torch.ones_like(log_prob[0]))
    for value, found in zip(support.tolist(), log_prob.tolist(), strict=True):
        is_possible = all(logits[unit] > -math.inf for unit in value)
        assert found == (
            pytest.approx(by_definition(logits, value), rel=1e-13, abs=1e-13) if is_possible else -math.inf
        )


def test_set_has_the_law_of_gumbel_topk():
    for logits, k in ((normal(6), 3), (EXCLUDED, 2), (normal(5, scale=5.0), 4)):
        design, sets = PlackettLuce(logits, k), GumbelTopK(logits=logits, k=k)
        value = design.enumerate_support()
        log_prob, vectors = design.log_prob(value), design.to_khot(value)
        for vector in sets.enumerate_support():
            of_set = log_prob[(vectors == vector).all(-1)].logsumexp(0)
            torch.testing.assert_close(of_set, sets.log_prob(vector), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(log_prob.exp() @ vectors, sets.mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("logits", [normal(5), EXCLUDED], ids=["plain", "excluded"])
def test_derivatives(way, logits):
    """Of every order, those of excluded units 0."""
    value = torch.tensor([[0, 3, 1], [4, 1, 3], [1, 0, 4]])

    def log_prob(possible):
        return PlackettLuce(
            logits.where(logits == -math.inf, 0).masked_scatter(logits > -math.inf, possible), 3
        ).log_prob(value)

    possible = logits[logits > -math.inf].requires_grad_()
    assert torch.autograd.gradcheck(log_prob, possible) and torch.autograd.gradgradcheck(log_prob, possible)
    whole = logits.clone().requires_grad_()
    hessian = torch.func.hessian(lambda x: PlackettLuce(x, 3).log_prob(value).sum())(whole.detach())
    gradient = torch.autograd.grad(PlackettLuce(whole, 3).log_prob(value).sum(), whole)[0]
    assert hessian.isfinite().all() and (gradient[logits == -math.inf] == 0).all()
    torch.testing.assert_close(hessian.sum(0), torch.zeros(5, dtype=torch.float64))


def test_derivatives_of_distant_weights(way):
    """No NaN, to second order, where weights differ by more than the range of float64, nor at impossible values."""
    values = PlackettLuce(WIDE, 3).enumerate_support()
    jacobian = torch.func.jacrev(lambda x: PlackettLuce(x, 3).log_prob(values))(WIDE)
    hessian = torch.func.jacfwd(torch.func.jacrev(lambda x: PlackettLuce(x, 3).log_prob(values)))(WIDE)
    assert jacobian.isfinite().all() and hessian.isfinite().all()
    with_excluded = EXCLUDED.clone().requires_grad_()
    log_prob = PlackettLuce(with_excluded, 2).log_prob(torch.tensor([[2, 0], [0, 2], [0, 1]]))
    assert log_prob.tolist()[:2] == [-math.inf, -math.inf]
    (gradient,) = torch.autograd.grad(log_prob[:2].sum(), with_excluded)
    assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(way, dtype):
    logits, value = normal(3, 40, dtype=dtype), normal(3, 40, seed=1).argsort(-1)[:, :30]
    found = PlackettLuce(logits, 30).log_prob(value)
    expected = PlackettLuce(logits.double(), 30).log_prob(value)
    assert found.dtype == dtype
    k = torch.tensor([30, 7, 1])
    ragged = value.masked_fill(torch.arange(40)[:30] >= k[:, None], -1)
    found_of_ragged = PlackettLuce(logits, k).log_prob(ragged)
    expected_of_ragged = PlackettLuce(logits.double(), k).log_prob(ragged)
    torch.testing.assert_close(
        found_of_ragged, expected_of_ragged.to(dtype), rtol=max(2e-7, torch.finfo(dtype).eps), atol=2e-5
    )
    torch.testing.assert_close(found, expected.to(dtype), rtol=max(2e-7, torch.finfo(dtype).eps), atol=2e-5)
    assert PlackettLuce(logits, 2).to_khot(value[:, :2]).dtype == dtype


def test_rows_of_different_k():
    """-1 stands beyond the k of a row, in draws, in the mode and in observed choices."""
    logits, k = normal(4, 6), torch.tensor([3, 1, 0, 6])
    design = PlackettLuce(logits, k)
    rows = [PlackettLuce(row, int(size)) for row, size in zip(logits, k, strict=True)]
    value = design.sample((50,))
    assert value.shape == (50, 4, 6) and design.support.check(value).all()
    assert ((value >= 0).sum(-1) == k).all() and ((value < 0) == (torch.arange(6) >= k[:, None])).all()
    log_prob, entropy = design.log_prob(value), design.entropy()
    for i, row in enumerate(rows):
        torch.testing.assert_close(log_prob[:, i], row.log_prob(value[:, i, : k[i]]))
        torch.testing.assert_close(entropy[i], row.entropy())
        assert torch.equal(design.mode[i, : k[i]], row.mode)
    assert torch.equal(design.to_khot(value).sum(-1), k.double().expand(50, 4))
    assert not design.support.check(value.clamp(min=0))[:, :3].any()
    with pytest.raises(NotImplementedError, match=r"same k in all rows, but got k in \[0, 1, 3, 6\]"):
        design.enumerate_support()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: PlackettLuce(x, k).log_prob(value[:2]), logits)
    both = PlackettLuce(logits[0], torch.tensor([1, 2]))  # which extends the batch
    assert both.batch_shape == (2,) and both.event_shape == (2,)


@pytest.mark.parametrize(("logits", "k"), [(normal(6), 3), (EXCLUDED, 4)], ids=["plain", "excluded"])
@pytest.mark.slow
def test_draws(logits, k):
    """A million draws; chi-square at level 1e-6, cells that expect few draws merged."""
    design, total = PlackettLuce(logits, k), 1_000_000
    value = design.sample((total,), generator=torch.Generator().manual_seed(3))
    check_draws(design, value)


def test_few_draws():
    design = PlackettLuce(normal(4), 2)
    check_draws(design, design.sample((20_000,), generator=torch.Generator().manual_seed(3)))


def check_draws(design, value):
    base = design.logits.shape[-1] ** torch.arange(design.event_shape[0])
    support = design.enumerate_support()
    cells, order = (support @ base).sort()
    counts = torch.bincount(torch.searchsorted(cells, value @ base), minlength=len(cells)).double().numpy()
    expected = (len(value) * design.log_prob(support).exp())[order].numpy()
    assert not counts[expected == 0].any()
    rare = expected < MIN_EXPECTED
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert stats.chisquare(observed, expected).pvalue >= LEVEL


def test_wrong_draws_are_found():
    design = PlackettLuce(normal(4), 2)
    with pytest.raises(AssertionError):
        check_draws(design, PlackettLuce(normal(4) * 1.3, 2).sample((20_000,)))


def test_mode_and_entropy():
    logits = torch.stack([normal(5), EXCLUDED, torch.zeros(5, dtype=torch.float64)])
    design = PlackettLuce(logits, 3)
    log_prob = design.log_prob(design.enumerate_support())
    torch.testing.assert_close(design.log_prob(design.mode), log_prob.max(0).values)
    assert design.mode[2].tolist() == [0, 1, 2]  # of equal weights the earlier ones first
    possible = log_prob > -math.inf
    terms = torch.where(possible, log_prob.exp() * log_prob.masked_fill(~possible, 0), 0)
    torch.testing.assert_close(design.entropy(), -terms.sum(0))
    assert torch.autograd.gradcheck(lambda x: PlackettLuce(x, 2).entropy(), normal(2, 4).requires_grad_())
    with pytest.raises(ValueError, match=r"entropy lists at most 1000000 values, but 20! / 10! = 670442572800"):
        PlackettLuce(torch.zeros(20), 10).entropy()


def minorised(weight, choices):
    """One step of Hunter's MM algorithm (2004), whose only fixed point are the weights of maximum likelihood."""
    wins, share = np.bincount(np.concatenate(choices), minlength=len(weight)), np.zeros(len(weight))
    for chosen in choices:
        left = np.ones(len(weight), dtype=bool)
        for unit in chosen:
            share[left] += 1 / weight[left].sum()
            left[unit] = False
    return wins / share / (wins / share).sum()


def test_maximum_likelihood_of_choices_of_different_length():
    n, sizes = 5, torch.tensor([1, 2, 3, 5]).repeat(15)
    choices = PlackettLuce(normal(n), sizes).sample(generator=torch.Generator().manual_seed(0))
    logits = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=200, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = -PlackettLuce(logits, (choices >= 0).sum(-1)).log_prob(choices).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    weight = logits.detach().softmax(-1).numpy()
    np.testing.assert_allclose(minorised(weight, [row[row >= 0].numpy() for row in choices]), weight, rtol=1e-6)


def test_score_function():
    """Its mean gradient is that of the exact expectation; 5.5 standard errors, with a fixed seed."""
    cost = normal(4, seed=1)

    def f(value):
        return cost[value[..., 0]] + 0.5 * cost[value[..., 1]]

    logits = normal(4).requires_grad_()
    design = PlackettLuce(logits, 2)
    support = design.enumerate_support()
    (expected,) = torch.autograd.grad(design.log_prob(support).exp() @ f(support), logits)
    rows = PlackettLuce(logits.expand(2000, 4), 2)
    surrogate = score_function(rows, f, 10, baseline="leave_one_out", generator=torch.Generator().manual_seed(0))
    weights = torch.eye(4, dtype=torch.float64)
    (found,) = torch.autograd.grad(surrogate.mean(), logits)
    assert ((found - expected).abs() @ weights < 5.5 * 1.0 / math.sqrt(20_000)).all()


def test_in_pyro():
    """A site in a plate, enumerated: the loss is the exact one, and its gradient."""
    logits = normal(3, 4).requires_grad_()
    data = torch.tensor([0.2, -0.4, 1.0], dtype=torch.float64)
    place = normal(4, seed=2)

    @config_enumerate
    def model():
        with pyro.plate("rows", 3):
            choice = pyro.sample("choice", PlackettLuce(logits, 2))
            first, second = choice[..., 0], choice[..., 1]
            pyro.sample("y", dist.Normal(place[first] - 0.3 * place[second], 1.0), obs=data)

    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    found = -elbo.differentiable_loss(model, lambda: None)
    design = PlackettLuce(logits, 2)
    support = design.enumerate_support()
    mean = place[support[..., 0]] - 0.3 * place[support[..., 1]]
    expected = (design.log_prob(support) + dist.Normal(mean, 1.0).log_prob(data)).logsumexp(0).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (found, expected)))
    svi = SVI(model, lambda: None, pyro.optim.Adam({"lr": 0.1}), elbo)
    assert math.isfinite(svi.evaluate_loss())


def test_vmap():
    logits, value = normal(3, 6), normal(3, 6, seed=1).argsort(-1)[:, :3]

    def log_prob(x, v):
        return PlackettLuce(x, 3).log_prob(v)

    expected = log_prob(logits, value)
    torch.testing.assert_close(torch.func.vmap(log_prob)(logits, value), expected)
    torch.testing.assert_close(
        torch.func.vmap(log_prob, in_dims=(None, 0))(logits[0], value), log_prob(logits[0], value)
    )
    drawn = torch.func.vmap(lambda x: PlackettLuce(x, 3).sample(), randomness="different")(logits)
    assert ranking(6, 3).check(drawn).all()
    with pytest.raises(NotImplementedError, match="`k` as an int under vmap"):
        torch.func.vmap(lambda x, k: PlackettLuce(x, k).logits)(logits, torch.tensor([1, 2, 3]))


def test_copies():
    logits, value = normal(3, 6), normal(3, 6, seed=1).argsort(-1)[:, :3]

    def log_prob(x):
        return PlackettLuce(x, 3).log_prob(value)

    for copied in (copy.deepcopy(PlackettLuce(logits, 3)), pickle.loads(pickle.dumps(PlackettLuce(logits, 3)))):
        torch.testing.assert_close(copied.log_prob(value), log_prob(logits))
    nowhere = PlackettLuce(torch.zeros(3, 6, device="meta"), 3)
    assert nowhere.sample((2,)).shape == (2, 3, 3) and nowhere.log_prob(nowhere.sample()).shape == (3,)


@for_each("elbo", [Trace_ELBO, TraceGraph_ELBO])
def test_as_a_guide(elbo):
    """A step of the score function lowers the logit of what costs more."""
    pyro.set_rng_seed(0)
    pyro.clear_param_store()

    def model():
        with pyro.plate("rows", 200):
            choice = pyro.sample("choice", PlackettLuce(torch.zeros(200, 4), 2))
            pyro.factor("cost", -5.0 * (choice == 0).any(-1))

    def guide():
        logits = pyro.param("logits", torch.zeros(4))
        with pyro.plate("rows", 200):
            pyro.sample("choice", PlackettLuce(logits.expand(200, 4), 2))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo())
    for _ in range(3):
        svi.step()
    assert pyro.param("logits").argmin() == 0


def test_values_outside_of_the_support():
    design = PlackettLuce(normal(4), 2, validate_args=False)
    value = torch.tensor([[0, 0], [0, 4], [-1, 0], [0, 1]])
    log_prob = design.log_prob(value)
    assert log_prob[:3].tolist() == [-math.inf] * 3 and log_prob[3].isfinite()
    design = PlackettLuce(normal(4), 2, validate_args=True)
    for wrong in value[:3]:
        with pytest.raises(ValueError, match="support"):
            design.log_prob(wrong)
    for wrong, error, message in (
        (torch.tensor([0.0, 1.0]), TypeError, "integer dtype"),
        ([0, 1], TypeError, "`value` must be a tensor"),
        (torch.tensor([0, 1, 2]), ValueError, r"shape \(..., 2\), but got \(3,\)"),
    ):
        with pytest.raises(error, match=message):
            design.log_prob(wrong)


def test_bad_parameters():
    for logits, k, error, message in (
        (EXCLUDED, 5, ValueError, "k=5 in a row with 4 of them"),
        (-EXCLUDED, 1, ValueError, "less than inf"),
    ):
        with pytest.raises(error, match=message):
            PlackettLuce(logits, k, validate_args=True)


def test_expand_and_numpy_integers():
    design = PlackettLuce(normal(4), np.int64(2)).expand((3, 2))
    assert design.batch_shape == (3, 2) and design.sample((5,)).shape == (5, 3, 2, 2)
    assert design.expand((6, 3, 2)).log_prob(design.sample()).shape == (6, 3, 2)
    assert design.to_event(1).log_prob(design.sample()).shape == (3,)
    assert repr(design) == "PlackettLuce(logits: (3, 2, 4), k: 2)"
    assert design.enumerate_support(expand=False).shape == (12, 1, 1, 2)
    assert PlackettLuce(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)).sample().shape == (0, 0)
