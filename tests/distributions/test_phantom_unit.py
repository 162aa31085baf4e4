"""Real-valued sizes by a phantom unit: reference values, gradients without a constraint on the sum, and Pyro."""

import copy
import math
import pickle
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from torch.autograd import gradcheck

from khot import Brewer, ConditionalPoisson, PhantomUnit, Pivotal, Sampford, StraightThrough, Systematic, sigmoid_topk
from tests import gof
from tests.loops import for_each
from tests.oracle import cases, tensor
from tests.registry import DESIGNS

# The sums are 1.8, 2.4 and 2.
PROBS = torch.tensor([[0.3, 0.75, 0.15, 0.6], [0.9, 0.8, 0.2, 0.5], [0.5, 0.75, 0.5, 0.25]], dtype=torch.float64)
WRAPPED = {
    "conditional_poisson": (ConditionalPoisson, {}),
    "sampford": (Sampford, {}),
    "brewer": (Brewer, {}),
    "systematic": (Systematic, {"order": "fixed"}),
}
every_wrapped = for_each("name", WRAPPED)
one_quickly = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(WRAPPED)]
)


def make(name, **kwargs):
    design_class, design_kwargs = WRAPPED[name]
    return PhantomUnit(design_class, **kwargs, **design_kwargs)


def zero_one(subsets, n):
    return torch.tensor([[float(i in subset) for i in range(n)] for subset in subsets], dtype=torch.float64)


@for_each("case", cases("phantom_unit"))
def test_oracle(case):
    probs, n = tensor(case["pi"]), case["n"]
    design, listed, expected = (
        make("conditional_poisson", probs=probs),
        zero_one(case["subsets"], n),
        tensor(case["log_prob"]),
    )
    assert (design.log_prob(listed) - expected).abs().max() <= 1e-11
    assert (design.pairwise_inclusion - torch.stack([tensor(row) for row in case["pair"]])).abs().max() <= 1e-11
    assert abs(design.entropy().item() - case["entropy"]) <= 1e-11
    assert (design.mean - probs).abs().max() <= 1e-15
    support = design.enumerate_support()
    pmf, size = design.log_prob(support).exp(), support.sum(-1)
    for k, probability in case["size_prob"].items():
        assert pmf[size == int(k)].sum().item() == pytest.approx(probability, abs=1e-12)
    torch.manual_seed(0)
    gof.check_sampler(design.sample((50_000,)), support, pmf)
    if case["full"]:
        assert len(support) == len(listed) and torch.equal(design.mode, listed[expected.argmax()])


PIPS = [case for case in cases("exact_pips_designs") if case["full"] and case["n"] <= 8]


@for_each("case", PIPS)
def test_without_its_last_unit_a_design_is_its_own_phantom_design(case):
    # The probabilities of all units but the last have a real-valued sum, and the phantom is the last unit.
    design = make(case["design"], probs=tensor(case["pi"])[:-1])
    listed, expected = zero_one(case["subsets"], case["n"]), tensor(case["log_prob"])
    log_prob = design.log_prob(listed[:, :-1])
    assert ((log_prob - expected).abs() <= 1e-11 * (1 + expected.abs())).all()


@every_wrapped
def test_moments_and_sampler(name):
    for row in PROBS:
        design = make(name, probs=row)
        support = design.enumerate_support()
        pmf = design.log_prob(support).exp()
        assert design.support.check(support).all() and pmf.sum().item() == pytest.approx(1, rel=1e-13)
        torch.testing.assert_close(pmf @ support, row)
        torch.testing.assert_close(design.mean, row)
        if name != "brewer":
            torch.testing.assert_close(design.pairwise_inclusion, support.mT @ (pmf[:, None] * support))
            torch.testing.assert_close(design.covariance_matrix, (support - row).mT @ (pmf[:, None] * (support - row)))
        torch.manual_seed(0)
        gof.check_sampler(design.sample((20_000,)), support, pmf)


@for_each("case", [case for case in DESIGNS if case.has_log_prob])
def test_law_of_the_size(case):
    settings = case.make.keywords if isinstance(case.make, partial) else {}
    for row in PROBS:
        design = PhantomUnit(case.public, probs=row, **settings)
        support = design.enumerate_support()
        smaller = design.log_prob(support).exp()[support.sum(-1) == design.k].sum()
        torch.testing.assert_close(smaller, design.wrapped.mean[-1], rtol=1e-8, atol=1e-8)
        if case.exact_probs:
            torch.testing.assert_close(smaller, 1 - (row.sum() - design.k), rtol=1e-7, atol=1e-7)


def test_designs_without_log_prob():
    torch.manual_seed(0)
    for design_class, settings in ((Pivotal, {}), (Systematic, {"order": "random"})):
        design = PhantomUnit(design_class, probs=PROBS, **settings)
        draws = design.sample((50_000,))
        size = draws.sum(-1)
        assert ((size == design.k) | (size == design.k + 1)).all() and (size[:, 2] == 2).all()
        for row, probs in zip(draws.unbind(1), PROBS, strict=True):
            gof.check_inclusion(row, probs)
        with pytest.raises(NotImplementedError, match="no log_prob.*ConditionalPoisson"):
            design.log_prob(draws[0])


@every_wrapped
def test_rows_of_different_size(name):
    design = make(name, probs=PROBS)
    assert design.k.tolist() == [1, 2, 2] and design.largest_k.tolist() == [2, 3, 2]
    draws = design.sample((500,))
    assert design.support.check(draws).all()
    log_prob = torch.stack(
        [make(name, probs=row).log_prob(x) for row, x in zip(PROBS, draws.unbind(1), strict=True)], 1
    )
    torch.testing.assert_close(design.log_prob(draws), log_prob)
    for wrong in (torch.ones(4), torch.zeros(4)):  # neither of the sizes
        with pytest.raises(ValueError, match="support"):
            make(name, probs=PROBS, validate_args=True).log_prob(wrong.double())
        assert (make(name, probs=PROBS, validate_args=False).log_prob(wrong.double()) == -math.inf).all()
    with pytest.raises(NotImplementedError, match=r"same sizes.*\[\[1, 2\], \[2, 2\], \[2, 3\]\]"):
        design.enumerate_support()
    with pytest.raises(NotImplementedError, match=r"same sizes.*\[\[2, 2\], \[2, 3\]\]"):
        make(name, probs=PROBS[1:]).enumerate_support()
    with pytest.raises(NotImplementedError, match="range of sizes"):
        design.sample_indices()
    assert make(name, probs=PROBS[2]).sample_indices((7,)).shape == (7, 2)


@one_quickly
def test_gradients(name):
    """The sum of the probabilities is free, so the identities of a score hold in every coordinate."""
    logits = PROBS[0].logit().requires_grad_()
    support = make(name, logits=logits).enumerate_support()
    support = support[make(name, logits=logits).log_prob(support) > -math.inf]

    def law(logits):
        return make(name, logits=logits).log_prob(support)

    assert gradcheck(law, logits)
    score = torch.autograd.functional.jacobian(law, logits)
    pmf = law(logits).detach().exp()
    torch.testing.assert_close(pmf @ score, torch.zeros(4, dtype=torch.float64))
    derivative_of_the_mean = support.mT @ (pmf[:, None] * score)
    torch.testing.assert_close(derivative_of_the_mean, torch.diag(PROBS[0] * (1 - PROBS[0])))
    mean = make(name, logits=logits).mean
    torch.testing.assert_close(torch.autograd.grad(mean[1], logits)[0], derivative_of_the_mean[1].detach())
    if name == "systematic":
        assert gradcheck(lambda x: make(name, logits=x).entropy(), logits)


@every_wrapped
def test_limits(name):
    probs = tensor([0, 0, 0, 1, 1, 1, 1, 0, 0.5, 0, 1, 0.25]).view(4, 3).requires_grad_()  # sums 0, 3, 1.5, 1.25
    design = make(name, probs=probs)
    assert design.k.tolist() == [0, 3, 1, 1] and design.largest_k.tolist() == [0, 3, 2, 2]
    draws = design.sample((50,))
    assert design.support.check(draws).all() and (draws[:, probs == 1] == 1).all() and (draws[:, probs == 0] == 0).all()
    log_prob = design.log_prob(draws)
    assert torch.equal(log_prob[:, :2], torch.zeros(50, 2, dtype=torch.float64))
    assert torch.autograd.grad(log_prob.sum(), probs)[0].isfinite().all()
    assert make(name, probs=PROBS[:0]).sample((2,)).shape == (2, 0, 4)


def test_integer_sums_are_recognised():
    probs = sigmoid_topk(
        3 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)), torch.arange(100, 900, 100)
    )
    design = PhantomUnit(Pivotal, probs=probs)
    assert torch.equal(design.k, torch.arange(100, 900, 100)) and torch.equal(design.largest_k, design.k)
    gof.check_k_hot(design.sample((5,)), design.k)
    fixed = ConditionalPoisson(probs=PROBS[2])
    support = fixed.enumerate_support()
    design = make("conditional_poisson", probs=PROBS[2])
    assert torch.equal(design.enumerate_support(), support)
    torch.testing.assert_close(design.log_prob(support), fixed.log_prob(support))


@every_wrapped
def test_expand_and_copies(name):
    logits = PROBS.logit().requires_grad_()
    design = make(name, logits=logits)
    value = design.sample()
    expanded = design.expand((2, 3)).expand((4, 2, 3))
    assert type(expanded) is PhantomUnit and expanded.sample((5,)).shape == (5, 4, 2, 3, 4)
    torch.testing.assert_close(expanded.log_prob(value), design.log_prob(value).expand(4, 2, 3))
    torch.testing.assert_close(expanded.mean, design.mean.expand(4, 2, 3, 4))
    _ = design.mean
    for twin in (copy.deepcopy(design), pickle.loads(pickle.dumps(design)), copy.copy(design)):
        torch.testing.assert_close(twin.log_prob(value), design.log_prob(value))
    two_sizes = make(name, logits=logits[:1])
    assert two_sizes.enumerate_support(expand=False).shape == (10, 1, 4)
    assert two_sizes.expand((3, 1)).enumerate_support().shape == (10, 3, 1, 4)


def test_straight_through_learns_a_size():
    """The best set has three units, and nobody says so."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    gain = torch.tensor([2.0, -3.0, 1.5, -2.0, 2.5])

    def model():
        x = pyro.sample("x", PhantomUnit(Pivotal, logits=torch.zeros(5)).mask(False))
        pyro.factor("gain", x @ gain)

    def guide():
        design = PhantomUnit(Pivotal, logits=pyro.param("logits", torch.zeros(5)))
        pyro.sample("x", StraightThrough(design, log_prob="none"))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.2}), Trace_ELBO())
    for _ in range(100):
        svi.step()
    learned = PhantomUnit(ConditionalPoisson, logits=pyro.param("logits").detach())
    assert learned.mode.tolist() == [1, 0, 1, 0, 1] and learned.mean.sum().item() == pytest.approx(3, abs=0.2)


@one_quickly
def test_enumeration_in_pyro(name):
    pyro.clear_param_store()
    logits, cost = PROBS[0].logit(), tensor([0.3, 1.0, -0.5, 0.2])
    prior = make("sampford", logits=logits)

    def model():
        x = pyro.sample("x", make("sampford", logits=logits))
        pyro.factor("cost", -(x @ cost).square())

    def guide():
        pyro.sample("x", make(name, logits=pyro.param("logits", logits)))

    elbo = TraceEnum_ELBO(max_plate_nesting=0)
    design = make(name, logits=logits)
    x = design.enumerate_support()
    log_q = design.log_prob(x)
    x, log_q = x[log_q > -math.inf], log_q[log_q > -math.inf]
    exact = (log_q.exp() * (log_q - prior.log_prob(x) + (x @ cost).square())).sum()
    for enumeration in ("sequential", "parallel"):
        if len(x) == 10 or enumeration == "sequential":
            loss = elbo.loss(model, config_enumerate(guide, default=enumeration))
            assert loss == pytest.approx(exact.item(), rel=1e-10)
    with pyro.plate("rows", 3):
        assert pyro.sample("y", make(name, logits=logits)).shape == (3, 4)


def test_bad_arguments():
    good = {"probs": PROBS}
    for error, match, args, kwargs in (
        (TypeError, "`design_class`.*Normal", (dist.Normal,), good),
        (TypeError, "`design_class`.*ConditionalPoisson", (ConditionalPoisson(probs=PROBS[2]),), good),
        (TypeError, "no `k`.*sum", (ConditionalPoisson,), {**good, "k": 2}),
        (TypeError, "no `relaxation`", (Pivotal,), {**good, "relaxation": sigmoid_topk}),
        (TypeError, "order", (Sampford,), {**good, "order": "fixed"}),
        (ValueError, "`order`.*'none'", (Systematic,), {**good, "order": "none"}),
        (ValueError, "both", (Pivotal,), {**good, "logits": PROBS}),
        (ValueError, "neither", (Pivotal,), {}),
    ):
        with pytest.raises(error, match=match):
            PhantomUnit(*args, **kwargs, validate_args=True)
