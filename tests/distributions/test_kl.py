"""Divergences between all pairs of designs against enumeration, between different sizes, and under an ELBO."""

import itertools
import math

import pyro
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch.autograd import gradcheck
from torch.distributions import OneHotCategorical, kl_divergence

from khot import (
    Brewer,
    ConditionalPoisson,
    GumbelTopK,
    PhantomUnit,
    Pivotal,
    Sampford,
    StraightThrough,
    Systematic,
    sigmoid_topk,
)
from khot.distributions.sizes import size_of
from tests.inputs import normal
from tests.registry import DESIGNS

float64 = torch.float64
P = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6]], dtype=float64)
Q = torch.tensor([[0.1, -0.3, 0.6, 0.2, 0.0], [1.0, 0.0, -0.5, -1.0, 0.8]], dtype=float64)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, float64]
SCORED = [case for case in DESIGNS if case.has_log_prob]


def by_definition(p, q):
    """For one row each, from the probabilities of all vectors of zeros and ones."""
    x = torch.tensor(list(itertools.product([0.0, 1.0], repeat=p.event_shape[0])), dtype=float64)

    def pmf(design):
        value = x[design.support.check(x)]
        law = torch.zeros(len(x), dtype=float64)
        law[design.support.check(x)] = design.log_prob(value).exp()
        return law

    p, q = pmf(p), pmf(q)
    return torch.where(p > 0, p * (p / q).log(), 0).sum()


@pytest.mark.parametrize(
    ("p_case", "q_case"),
    [  # from each design to the next one, and to conditional Poisson, to which the divergence is a formula of its own
        pytest.param(p, q, id=f"{p.name}-{q.name}")
        for p, following in zip(SCORED, [*SCORED[1:], SCORED[0]], strict=True)
        for q in dict.fromkeys((following, SCORED[0]))
    ],
)
def test_pairs_of_designs(p_case, q_case):
    p, q = p_case.make(logits=P, k=2), q_case.make(logits=Q, k=2)
    expected = torch.stack(
        [by_definition(p_case.make(logits=a, k=2), q_case.make(logits=b, k=2)) for a, b in zip(P, Q, strict=True)]
    )
    torch.testing.assert_close(kl_divergence(p, q), expected, rtol=1e-9, atol=1e-12)
    assert kl_divergence(p, q_case.make(logits=Q[0], k=2).expand((2,))).shape == (2,)
    assert (kl_divergence(p, q_case.make(logits=Q, k=3)) == math.inf).all()
    mixed = kl_divergence(p, q_case.make(logits=Q, k=torch.tensor([2, 3])))
    assert mixed[1] == math.inf and (mixed[0] == expected[0] or abs(mixed[0] - expected[0]) < 1e-12)
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(2, dtype=float64), rtol=0, atol=1e-12)
    if expected.isfinite().all():

        def divergence(a, b):
            return kl_divergence(p_case.make(logits=a, k=2), q_case.make(logits=b, k=2))

        assert gradcheck(divergence, [P[0].clone().requires_grad_(), Q[0].clone().requires_grad_()])


@pytest.mark.parametrize("make", [ConditionalPoisson, lambda **kw: Systematic(order="fixed", **kw)])
def test_long_rows_to_conditional_poisson(make):
    """From the mean of the ratio over samples, within 5.5 standard errors."""
    torch.manual_seed(0)
    logits = torch.randn(2, 300, dtype=float64)
    p, q = make(logits=logits, k=90), ConditionalPoisson(logits=torch.zeros(2, 300, dtype=float64), k=90)
    x = p.sample((500,))
    ratio = p.log_prob(x) - q.log_prob(x)
    error = ratio.std(0) / math.sqrt(500)
    assert ((ratio.mean(0) - kl_divergence(p, q)).abs() <= 5.5 * error + 1e-9).all()


def test_many_vectors_are_not_enumerated():
    p, q = Sampford(logits=torch.zeros(40), k=20), ConditionalPoisson(logits=torch.zeros(40), k=20)
    phantom = PhantomUnit(Sampford, probs=torch.full((40,), 0.51))
    for pair in ((p, q), (q, p), (phantom, p), (phantom, phantom)):
        with pytest.raises(NotImplementedError, match="up to 10000 vectors.*entropy needs no enumeration"):
            kl_divergence(*pair)
    with pytest.raises(NotImplementedError, match="no log_prob"):
        kl_divergence(Pivotal(logits=P, k=2), ConditionalPoisson(logits=P, k=2))


def test_units_that_are_certain_or_excluded():
    p = ConditionalPoisson(logits=torch.tensor([math.inf, 0.3, -0.2, -math.inf]).double(), k=2)
    same = ConditionalPoisson(logits=torch.tensor([math.inf, 0.0, 0.0, -math.inf]).double(), k=2)
    free = ConditionalPoisson(logits=torch.zeros(4, dtype=float64), k=2)
    for q in (same, free):
        torch.testing.assert_close(kl_divergence(p, q), by_definition(p, q))
    assert kl_divergence(free, p) == math.inf


WRAPPED = [(ConditionalPoisson, {}), (Sampford, {}), (Brewer, {}), (Systematic, {"order": "fixed"})]


@pytest.mark.parametrize(("design_class", "kwargs"), WRAPPED)
@pytest.mark.slow
def test_phantom_units(design_class, kwargs):
    rows = torch.tensor(
        [
            [0.3, 0.75, 0.15, 0.6],  # sizes 1 and 2
            [0.5, 0.2, 0.3, 0.55],  # 1 and 2
            [0.25, 0.25, 0.25, 0.25],  # 1
            [0.5, 0.75, 0.5, 0.25],  # 2
            [0.9, 0.8, 0.2, 0.5],  # 2 and 3
        ],
        dtype=float64,
    )

    def make(probs):
        return PhantomUnit(design_class, probs=probs, **kwargs)

    designs = [make(row) for row in rows]
    pairs = list(itertools.product(designs, repeat=2))
    expected = torch.stack([by_definition(p, q) for p, q in pairs])
    divergence = torch.stack([kl_divergence(p, q) for p, q in pairs])
    torch.testing.assert_close(divergence, expected, rtol=1e-9, atol=1e-12)
    if design_class is not Systematic:  # where row after row another set of vectors is possible
        same = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
        larger_has_both = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 4)]
        assert expected.isfinite().nonzero().squeeze(-1).tolist() == sorted(
            5 * i + j for i, j in same + larger_has_both
        )
    if design_class is ConditionalPoisson:  # which needs no enumeration, and so takes rows of any sizes
        p, q = rows.repeat_interleave(5, 0), rows.repeat(5, 1)
        torch.testing.assert_close(kl_divergence(make(p), make(q)), expected)
        assert gradcheck(lambda a, b: kl_divergence(make(a), make(b)), [rows[:1].requires_grad_(), rows[1:2]])


def test_phantom_units_and_fixed_sizes():
    whole, real = torch.tensor([0.5, 0.75, 0.5, 0.25]).double(), torch.tensor([0.5, 0.75, 0.5, 0.5]).double()
    fixed = ConditionalPoisson(probs=whole)
    for p, q in (
        (PhantomUnit(Sampford, probs=whole), fixed),
        (PhantomUnit(ConditionalPoisson, probs=whole), Sampford(probs=whole)),
        (fixed, PhantomUnit(Sampford, probs=real)),
        (PhantomUnit(ConditionalPoisson, probs=real), PhantomUnit(Sampford, probs=real)),
    ):
        torch.testing.assert_close(kl_divergence(p, q), by_definition(p, q), rtol=1e-9, atol=1e-12)
    assert kl_divergence(PhantomUnit(ConditionalPoisson, probs=real), fixed) == math.inf


@pytest.mark.parametrize("form", ["fixed", "phantom"])
def test_mean_field_elbo_uses_it(form):
    """A model that is nothing but its prior: the loss is the divergence, whatever was drawn."""
    if form == "fixed":
        p, q = Systematic(logits=P, k=2), Sampford(logits=Q, k=2)
    else:
        p, q = (PhantomUnit(ConditionalPoisson, logits=logits) for logits in (P, P + 0.1))

    def site(fn):
        with pyro.plate("rows", 2):
            pyro.sample("x", fn)

    loss = TraceMeanField_ELBO().loss(lambda: site(q), lambda: site(StraightThrough(p)))
    assert loss == pytest.approx(kl_divergence(p, q).sum().item(), rel=1e-12)


@pytest.mark.parametrize("batch_shapes", [((), (3,)), ((3,), ()), ((3,), (2, 1))])
def test_batches_broadcast(batch_shapes):
    torch.manual_seed(0)
    for design_class in (GumbelTopK, ConditionalPoisson, Sampford):
        p, q = (design_class(logits=torch.randn(*shape, 3, dtype=float64), k=1) for shape in batch_shapes)
        shape = torch.broadcast_shapes(*batch_shapes)
        torch.testing.assert_close(kl_divergence(p, q), kl_divergence(p.expand(shape), q.expand(shape)))


@pytest.mark.parametrize("q_class", [ConditionalPoisson, Sampford])
def test_different_numbers_of_units(q_class):
    for n in (1, 5):
        with pytest.raises(ValueError, match="the same number of units"):
            kl_divergence(ConditionalPoisson(logits=torch.zeros(4), k=1), q_class(logits=torch.zeros(n), k=1))


@pytest.mark.parametrize(
    "case",
    [case for case in DESIGNS if case.name in ("conditional_poisson", "pivotal", "pareto_plain")],
    ids=lambda case: case.name,
)
def test_one_hot_categorical(case):
    """At k = 1 every design is a law of a single unit; in rows of another size the two have nothing in common."""
    logits = P.clone().requires_grad_()
    design, one_hot = case.make(logits=logits, k=1), OneHotCategorical(logits=Q)
    mean = design.mean
    torch.testing.assert_close(kl_divergence(design, one_hot), (mean * (mean.log() - one_hot.logits)).sum(-1))
    back = (one_hot.probs * (one_hot.logits - mean.log())).sum(-1)
    torch.testing.assert_close(kl_divergence(one_hot, design), back, rtol=1e-7, atol=1e-9)
    (gradient,) = torch.autograd.grad(
        kl_divergence(one_hot, design).sum() + kl_divergence(design, one_hot).sum(), logits
    )
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
    sizes = case.make(logits=P, k=torch.tensor([1, 2]))
    for mixed, expected in (
        (kl_divergence(sizes, one_hot), kl_divergence(design, one_hot)),
        (kl_divergence(one_hot, sizes), back),
    ):
        assert abs(mixed[0] - expected[0]) < 1e-7 and mixed[1] == math.inf


def test_one_hot_categorical_and_what_is_impossible():
    some = OneHotCategorical(probs=torch.tensor([0.5, 0.0, 0.5]).double())
    zeros = torch.zeros(3, dtype=float64)
    every, fewer = (ConditionalPoisson(logits=zeros + x, k=1) for x in (zeros, torch.tensor([0.0, -math.inf, 0.0])))
    assert kl_divergence(every, some) == math.inf and kl_divergence(fewer, some) == pytest.approx(0.0, abs=1e-12)
    assert kl_divergence(some, every).item() == pytest.approx(math.log(1.5))
    assert kl_divergence(some, fewer).item() == pytest.approx(0.0, abs=1e-12)
    phantom = PhantomUnit(ConditionalPoisson, probs=torch.tensor([0.3, 0.2, 0.2]).double())  # of no unit or one
    assert kl_divergence(phantom, some) == math.inf
    assert kl_divergence(some, phantom).item() == pytest.approx(math.log(0.5 / 0.3) / 2 + math.log(0.5 / 0.2) / 2)
    with pytest.raises(ValueError, match="the same number of units"):
        kl_divergence(OneHotCategorical(logits=torch.zeros(4)), every)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=2)), ids=str)
def test_dtypes_are_promoted_as_in_torch(dtypes):
    """All arithmetic takes place at least in float32, also that of a one-hot law, whose logits torch rounds."""
    makes = [
        lambda logits: ConditionalPoisson(logits=logits, k=1),
        lambda logits: ConditionalPoisson(logits=logits, k=(1, 2)),
        lambda logits: ConditionalPoisson(logits=logits, k=(0, 2, torch.zeros(3))),
        lambda logits: GumbelTopK(logits=logits, k=1),
        lambda logits: PhantomUnit(ConditionalPoisson, logits=logits),
        lambda logits: OneHotCategorical(logits=logits, validate_args=False),  # torch wants 1 from sums of half types
    ]
    p_logits, q_logits = P.to(dtypes[0]).requires_grad_(), Q.to(dtypes[1]).requires_grad_()
    for make, other in [*itertools.product(makes, makes)][:-1]:  # without torch's own divergence, the last one
        p, q = make(p_logits), other(q_logits)
        found, expected = kl_divergence(p, q), kl_divergence(make_wide(p), make_wide(q)).detach()
        assert found.dtype == torch.promote_types(*dtypes)
        tolerance = max(torch.finfo(found.dtype).eps, 1e-5)
        torch.testing.assert_close(found.detach().double(), expected, rtol=tolerance, atol=tolerance / 10)
        if found.isfinite().all():
            grads = torch.autograd.grad(found.sum(), (p_logits, q_logits))
            assert [grad.dtype for grad in grads] == list(dtypes)
            assert all(grad.isfinite().all() for grad in grads)


def make_wide(law):
    """The same law in float64; a one-hot law with the logits that torch has rounded."""
    if isinstance(law, OneHotCategorical):
        return OneHotCategorical(logits=law.logits.double())
    if isinstance(law, PhantomUnit):
        return PhantomUnit(ConditionalPoisson, logits=law.logits.double())
    return type(law)(logits=law.logits.double(), k=size_of(law))


def test_one_hot_probabilities_that_underflow():
    """They are tiny rather than 0, which would make the divergence infinite."""
    for dtype, far in ((torch.float16, 20.0), (torch.bfloat16, 100.0), (torch.float32, 110.0)):
        logits = torch.tensor([0.0, -far], dtype=dtype)
        one_hot, design = (
            OneHotCategorical(logits=logits, validate_args=False),
            ConditionalPoisson(logits=torch.zeros(2), k=1),
        )
        assert one_hot.probs[1] == 0
        assert kl_divergence(design, one_hot).item() == pytest.approx(far / 2 - math.log(2), rel=1e-6)
        assert kl_divergence(one_hot, design).item() == pytest.approx(math.log(2), rel=1e-6)


def test_wrapper_as_the_second_law():
    p, q = Systematic(logits=P, k=2), Sampford(logits=Q, k=2)
    torch.testing.assert_close(kl_divergence(StraightThrough(p), StraightThrough(q)), kl_divergence(p, q))
    with pytest.raises(NotImplementedError, match="it gives no log-probability"):
        kl_divergence(p, StraightThrough(q, log_prob="none"))


OF_LONG_ROWS = {
    "logits": lambda x: ConditionalPoisson(logits=x, k=300),
    "probs": lambda x: ConditionalPoisson(probs=sigmoid_topk(x, 300)),
    "range": lambda x: ConditionalPoisson(logits=x, k=(299, 301)),
    "prior": lambda x: ConditionalPoisson(logits=x, k=(299, 301, torch.zeros(3))),
    "phantom": lambda x: PhantomUnit(ConditionalPoisson, logits=x),
}


@pytest.mark.parametrize("make", OF_LONG_ROWS.values(), ids=OF_LONG_ROWS)
def test_no_term_is_rounded(make):
    """The terms are a million times their difference."""
    p, q = normal(1000), normal(1000) + 0.01 * normal(1000, seed=1)
    single, double = (kl_divergence(make(p.to(dtype)), make(q.to(dtype))) for dtype in (torch.float32, float64))
    assert 1e-5 < double < 0.1
    torch.testing.assert_close(single.double(), double, rtol=2e-5, atol=0)
    assert kl_divergence(make(p.float()), make(p.float())) == 0


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
def test_no_term_of_few_vectors_is_rounded(case):
    q = (P + 1e-3 * (Q - P)).float()
    single, double = (
        kl_divergence(case.make(logits=P.to(dtype), k=2), case.make(logits=q.to(dtype), k=2))
        for dtype in (torch.float32, float64)
    )
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=0)
    assert (kl_divergence(case.make(logits=q, k=2), case.make(logits=q.clone(), k=2)) == 0).all()
