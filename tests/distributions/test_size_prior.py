"""ConditionalPoisson with a prior over its size: everything by enumeration, in Pyro, and its errors."""

import math
from functools import partial

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from torch.distributions import kl_divergence

from khot import (
    ConditionalPoisson,
    PhantomUnit,
    ReinMax,
    Sampford,
    StraightThrough,
    enumerated,
    score_function,
)
from khot.laws import size_prior
from tests import gof
from tests.distributions.test_size_range import assert_close, vectors
from tests.inputs import normal
from tests.loops import for_each

INF = torch.inf
LOGITS = normal(3, 6) * torch.tensor([[1.0], [6.0], [30.0]]) + torch.tensor([[0.0], [2.0], [-9.0]])
PRIOR = normal(3, 4, seed=1)


def log_law(logits, low, high, log_prior):
    """The vectors ``(count, n)`` and their log-probabilities under rows of logits, ``(count, rows)``."""
    value = vectors(low, high, logits.shape[-1])
    size, score = value.sum(-1), (value[:, None] * logits).nan_to_num(0.0, INF, -INF)
    score = score.masked_fill((value[:, None] == 0) & (logits == INF), -INF)
    score = score.masked_fill((value[:, None] == 1) & (logits == INF), 0.0).sum(-1)
    of_size = torch.stack([score[size == s].logsumexp(0) for s in range(low, high + 1)])
    prior = log_prior.masked_fill((of_size == -INF).mT, -INF).log_softmax(-1).mT
    number = size.long() - low
    return value, prior[number] + torch.where(score > -INF, score - of_size[number], -INF)


def check_against_enumeration(design, logits, low, high, log_prior):
    value, log_p = log_law(logits, low, high, log_prior)
    p, n = log_p.exp().mT, logits.shape[-1]
    mean, pairs = p @ value, torch.einsum("rc,ci,cj->rij", p, value, value)
    assert_close(design.log_prob(value[:, None].expand(-1, len(logits), -1)), log_p)
    assert_close(design.mean, mean)
    assert_close(design.pairwise_inclusion, pairs)
    assert_close(design.covariance_matrix, pairs - mean[:, :, None] * mean[:, None, :])
    assert_close(design.entropy(), -(p.mT * log_p.masked_fill(p.mT == 0, 0.0)).sum(0))
    assert_close(design.size_probs, p @ torch.eye(n + 1).double()[value.sum(-1).long()])
    assert torch.equal(design.mode, value[log_p.argmax(0)])
    support = design.enumerate_support(expand=False)
    assert support.shape == (len(value), 1, n)
    assert_close(design.log_prob(support).exp().sum(0), torch.ones(len(logits)).double())


@for_each("low, high", [(0, 3), (1, 4), (3, 6)])
def test_against_enumeration(low, high):
    design = ConditionalPoisson(logits=LOGITS, k=(low, high, PRIOR), validate_args=True)
    check_against_enumeration(design, LOGITS, low, high, PRIOR)
    twice = design.expand((2, 3))
    assert twice.batch_shape == (2, 3) and twice.support.check(twice.sample((5,))).all()
    assert_close(twice.mean, design.mean.expand(2, 3, 6))
    shifted = ConditionalPoisson(logits=LOGITS + 40, k=(low, high, PRIOR - 7))
    assert_close(shifted.mean, design.mean)


def test_sizes_without_probability_and_certain_units():
    logits = torch.tensor([[INF, 0.0, -INF, 1.0, 0.5], [0.0, 1.0, -1.0, 0.3, INF]]).double()
    prior = torch.tensor([[0.0, 1.0, -INF, 0.5, 2.0, 3.0], [1.0, -INF, 0.2, 0.0, 0.0, -INF]]).double()
    design = ConditionalPoisson(logits=logits, k=(0, 5, prior), validate_args=True)
    check_against_enumeration(design, logits, 0, 5, prior)
    value = design.sample((300,))
    assert (design.log_prob(value) > -INF).all() and (value[:, :, 0].min(0).values == torch.tensor([1.0, 0.0])).all()


def test_a_prior_that_follows_from_the_logits_changes_nothing():
    plain = ConditionalPoisson(logits=LOGITS, k=(1, 4))
    design = ConditionalPoisson(logits=LOGITS, k=(1, 4, plain.size_probs[:, 1:5].log()))
    assert_close(design.mean, plain.mean)
    assert_close(design.covariance_matrix, plain.covariance_matrix)
    assert_close(design.entropy(), plain.entropy(), atol=1e-8)


def test_the_prior_broadcasts_and_may_extend_the_batch():
    one = ConditionalPoisson(logits=LOGITS, k=(1, 4, PRIOR[0]))
    more = ConditionalPoisson(logits=LOGITS[0], k=(1, 4, PRIOR[:, None]))
    assert one.batch_shape == (3,) and more.batch_shape == (3, 1)
    assert_close(one.mean[0], more.mean[0, 0])


def test_gradients():
    value = vectors(1, 3, 4)[::5]

    def results(logits, log_prior):
        design = ConditionalPoisson(logits=logits, k=(1, 3, log_prior), validate_args=False)
        return design.mean, design.entropy(), design.log_prob(value), design.size_probs

    point = LOGITS[0, :4].clone().requires_grad_(), PRIOR[0, :3].clone().requires_grad_()
    assert torch.autograd.gradcheck(results, point) and torch.autograd.gradgradcheck(results, point)
    hidden = torch.tensor([0.3, -INF, 0.1]).double().requires_grad_()
    design = ConditionalPoisson(logits=point[0], k=(1, 3, hidden))
    for result in (design.mean.square().sum(), design.entropy(), kl_divergence(design, design)):
        for gradient in torch.autograd.grad(result, [point[0], hidden], allow_unused=True):
            assert gradient is None or gradient.isfinite().all()
    x = value[0].clone().requires_grad_()
    slope = torch.autograd.grad(design.log_prob(x), x)[0]
    assert_close(slope - slope[0], LOGITS[0, :4] - LOGITS[0, 0])  # up to a constant


def test_half_precision_rounds_results():
    logits, prior = LOGITS.bfloat16(), PRIOR.bfloat16()
    design = ConditionalPoisson(logits=logits, k=(1, 4, prior))
    exact = ConditionalPoisson(logits=logits.float(), k=(1, 4, prior.float()))
    assert torch.equal(design.mean, exact.mean.bfloat16()) and torch.equal(design.entropy(), exact.entropy().bfloat16())


def test_sampler():
    torch.manual_seed(0)
    value, log_p = log_law(LOGITS[:1], 1, 4, PRIOR[:1])
    p = log_p[:, 0].exp()
    design = ConditionalPoisson(logits=LOGITS[0], k=(1, 4, PRIOR[0]))
    gof.check_sampler(design.sample((gof.num_draws(p),)), value, p)
    assert torch.equal(*(design.sample((3,), generator=torch.Generator().manual_seed(1)) for _ in range(2)))
    assert design.sample((0,)).shape == (0, 6)


def test_divergences():
    """From and to ranges, fixed sizes, priors with and without all sizes, and other designs."""
    every = {
        "prior": ConditionalPoisson(logits=normal(6), k=(1, 4, PRIOR[0])),
        "other": ConditionalPoisson(logits=normal(6, seed=1), k=(0, 4, normal(5, seed=2))),
        "gap": ConditionalPoisson(logits=normal(6, seed=3), k=(1, 4, torch.tensor([0.0, 1.0, -INF, 0.5]).double())),
        "low": ConditionalPoisson(logits=normal(6, seed=3), k=(1, 4, torch.tensor([0.0, 1.0, -INF, -INF]).double())),
        "range": ConditionalPoisson(logits=normal(6, seed=4), k=(1, 3)),
        "wide": ConditionalPoisson(logits=normal(6, seed=4), k=(1, 4)),
        "fixed": ConditionalPoisson(logits=normal(6, seed=5), k=2),
        "sampford": Sampford(probs=torch.full((6,), 0.5).double()),
        "phantom": PhantomUnit(Sampford, probs=torch.full((6,), 0.4).double()),
    }
    value = vectors(0, 6)
    laws = {}
    for name, design in every.items():
        design._validate_args = False
        laws[name] = design.log_prob(value)
    pairs = [(p, q) for p in every for q in ("other", "gap")]
    pairs += [(p, q) for p in ("gap", "low") for q in ("range", "wide", "fixed")]
    for p, q in pairs:
        possible = laws[p] > -INF
        expected = (laws[p][possible].exp() * (laws[p] - laws[q])[possible]).sum()
        assert_close(kl_divergence(every[p], every[q]), expected)


@for_each("p_batch, q_batch", [((), (2,)), ((2,), (3, 2)), ((3,), (2, 1)), ((3, 2), (2,))])
@for_each("k", [2, (0, 4), (0, 4, normal(5, seed=2))])
def test_divergences_broadcast(k, p_batch, q_batch):
    p = ConditionalPoisson(logits=normal(*p_batch, 6), k=k)
    q = ConditionalPoisson(logits=normal(*q_batch, 6, seed=1), k=(0, 4, normal(5, seed=3)))
    shape = torch.broadcast_shapes(p_batch, q_batch)
    assert_close(kl_divergence(p, q), kl_divergence(p.expand(shape), q.expand(shape)))


def test_long_rows():
    """The size has its prior, however improbable the logits make it."""
    torch.manual_seed(0)
    prior = torch.full((101,), -INF)
    prior[[0, 10, 100]] = torch.tensor([0.2, 0.5, 0.3]).log()
    design = ConditionalPoisson(logits=normal(3000) - 20, k=(0, 100, prior.double()))
    assert_close(design.mean.sum(), torch.tensor(35.0).double(), atol=1e-5)
    sizes = design.sample((400,)).sum(-1)
    assert {*sizes.tolist()} == {0.0, 10.0, 100.0} and design.entropy().isfinite()
    assert design.log_prob(design.sample((4,))).isfinite().all()


@pytest.mark.usefixtures("fresh_pyro")
def test_in_pyro():
    """As prior and guide, enumerated and sampled; the posterior of the size by enumeration."""
    log_prior = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    gain = torch.tensor([2.0, -1.0, 0.5, 1.0])

    def model():
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=(0, 3, log_prior)))
        pyro.factor("gain", x @ gain)

    def guide(wrap=lambda design: design):
        weights = pyro.param("weights", torch.zeros(4))
        logits = pyro.param("logits", torch.zeros(4))
        pyro.sample("x", wrap(ConditionalPoisson(logits=logits, k=(0, 3, weights))))

    svi = SVI(model, config_enumerate(guide), pyro.optim.Adam({"lr": 0.3}), TraceEnum_ELBO(max_plate_nesting=0))
    for _ in range(30):
        loss = svi.step()
    prior = ConditionalPoisson(logits=torch.zeros(4), k=(0, 3, log_prior))
    support = prior.enumerate_support()
    evidence = (prior.log_prob(support) + support @ gain).logsumexp(0)
    assert abs(loss + evidence) < 0.01
    posterior = ConditionalPoisson(logits=pyro.param("logits"), k=(0, 3, pyro.param("weights")))
    expected = (prior.log_prob(support) + support @ gain).softmax(0)
    assert (posterior.size_probs[:4] - torch.bincount(support.sum(-1).long(), expected)).abs().max() < 0.02
    for elbo in (Trace_ELBO(), TraceMeanField_ELBO()):
        assert math.isfinite(elbo.loss(model, partial(guide, StraightThrough)))


def test_estimators():
    logits, prior = normal(5).requires_grad_(), normal(4, seed=1).requires_grad_()
    design = ConditionalPoisson(logits=logits, k=(0, 3, prior))

    def loss(x):
        return (x @ normal(5, seed=2)) ** 2

    exact = torch.autograd.grad(enumerated(design, loss), [logits, prior], retain_graph=True)
    torch.manual_seed(0)
    surrogate = score_function(design, loss, 40_000, baseline="leave_one_out")
    found = torch.autograd.grad(surrogate, [logits, prior])
    for one, other in zip(exact, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.05)
    with pytest.raises(NotImplementedError, match="not known under a prior over the size: use khot.score_function"):
        ReinMax(design)


@for_each(
    "error, match, k",
    [
        (ValueError, r"k=\(low, high\) or k=\(low, high, log_prior\)", (0, 2, PRIOR, 3)),
        (TypeError, "needs ints as the ends", (torch.tensor(0), 3, PRIOR)),
        (TypeError, r"`k\[2\]`.*must be a floating-point tensor, but got \[0.5\]", (0, 3, [0.5])),
        (TypeError, r"`k\[2\]`.*a tensor of dtype torch.int64", (0, 3, PRIOR.long())),
        (ValueError, r"`k\[2\]`.*shape \(..., 3\) for k from 0 to 2.*\(3, 4\)", (0, 2, PRIOR)),
        (ValueError, r"`k\[2\]`.*batch shape \(3,\), but got shape \(2, 4\)", (0, 3, PRIOR[:2])),
        (ValueError, "a positive probability to a size that the logits allow", (0, 3, torch.full((4,), -INF))),
        (ValueError, "must be below inf", (0, 3, torch.tensor([0.0, INF, 0.0, 0.0]))),
        (ValueError, "must be below inf", (0, 3, torch.tensor([0.0, torch.nan, 0.0, 0.0]))),
        (ValueError, "0 <= low <= high <= n", (3, 7, PRIOR)),
    ],
)
def test_errors(error, match, k):
    with pytest.raises(error, match=match):
        ConditionalPoisson(logits=LOGITS, k=k, validate_args=True)


@pytest.mark.parametrize(("share", "drawn"), [(0.0, [1, 0]), (1 - 2**-53, [2, 1])])
def test_no_size_of_weight_0_is_drawn_at_either_end(share, drawn, monkeypatch):
    weights = torch.tensor([[0.0, 0.3, 0.7, 0.0], [0.1, 0.2, 0.0, 0.0]], dtype=torch.float64)
    monkeypatch.setattr(size_prior, "uniform", lambda shape, dtype, *_: torch.full(shape, share, dtype=dtype))
    assert size_prior._drawn(weights, None).tolist() == drawn
