"""ConditionalPoisson with a range of sizes: everything by enumeration, and what has to be as with a fixed size."""

import math

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from torch.distributions import kl_divergence

from khot import (
    Brewer,
    ConditionalPoisson,
    KHotReparam,
    ParetoSampling,
    PhantomUnit,
    ReinMax,
    RelaxedKHot,
    StraightThrough,
    compare_estimators,
    enumerated,
    horvitz_thompson,
    score_function,
    subset_categorical,
)
from khot.constraints import k_hot
from khot.distributions.sizes import size_varies
from khot.estimators import unordered_set
from khot.kernels import backend
from khot.laws import inverse, inverse_newton
from khot.laws.conditional_poisson import inclusion_probabilities
from khot.laws.inverse import solve_logits
from khot.laws.inverse_newton import RANGE
from khot.laws.size_range import sizes_around
from tests import gof
from tests.inputs import normal
from tests.loops import for_each

RANGES = [(0, 2), (1, 3), (4, 6), (0, 6), (2, 3)]
LOGITS = normal(3, 6) * torch.tensor([[1.0], [6.0], [30.0]]) + torch.tensor([[0.0], [2.0], [-9.0]])
ELBOS = for_each("elbo", [Trace_ELBO, TraceMeanField_ELBO])


def assert_close(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=atol)


def vectors(low, high, n=6):
    """All vectors of these sizes by counting in binary, (count, n)."""
    every = torch.arange(2**n)[:, None] // 2 ** torch.arange(n).flip(0) % 2
    return every[(every.sum(-1) >= low) & (every.sum(-1) <= high)].double()


def log_law(logits, low, high):
    """The vectors, and their log-probabilities under rows of logits, (count, rows)."""
    value = vectors(low, high, logits.shape[-1])
    return value, (value @ logits.mT).log_softmax(0)


def check_against_enumeration(design, logits, low, high):
    value, log_p = log_law(logits, low, high)
    p, n = log_p.exp().mT, logits.shape[-1]
    mean, pairs = p @ value, torch.einsum("rc,ci,cj->rij", p, value, value)
    assert_close(design.log_prob(value[:, None]), log_p)
    assert_close(design.mean, mean)
    assert_close(design.variance, mean * (1 - mean))
    assert_close(design.pairwise_inclusion, pairs)
    assert_close(design.covariance_matrix, pairs - mean[:, :, None] * mean[:, None, :])
    assert_close(design.entropy(), -(p.mT * log_p).sum(0))
    assert_close(design.size_probs, p @ torch.eye(n + 1).double()[value.sum(-1).long()])
    assert torch.equal(design.mode, value[log_p.argmax(0)])


@for_each("low, high", RANGES)
def test_against_enumeration(low, high):
    design = ConditionalPoisson(logits=LOGITS, k=(low, high), validate_args=True)
    check_against_enumeration(design, LOGITS, low, high)
    twice = design.expand((2, 3))
    assert twice.batch_shape == (2, 3) and twice.support.check(twice.sample((5,))).all()
    assert_close(twice.mean, design.mean.expand(2, 3, 6))


def test_rows_of_different_ranges():
    """One of which is a single size: that of the fixed design."""
    low, high = torch.tensor([0, 2, 3]), torch.tensor([[3], [5]])
    design = ConditionalPoisson(logits=LOGITS, k=(low, high), validate_args=True)
    assert design.batch_shape == (2, 3) and design.support.check(design.sample((20,))).all()
    for i, j in ((0, 0), (0, 2), (1, 1)):
        row = ConditionalPoisson(logits=LOGITS[j], k=(int(low[j]), int(high[i])))
        for name in ("mean", "size_probs", "mode", "covariance_matrix"):
            assert_close(getattr(design, name)[i, j], getattr(row, name))
        assert_close(design.entropy()[i, j], row.entropy())
        assert_close(design.log_prob(row.mode)[i, j], row.log_prob(row.mode))
    with pytest.raises(NotImplementedError, match="same sizes in all rows"):
        design.enumerate_support()


def test_enumeration_is_by_size_then_lexicographic():
    support = ConditionalPoisson(logits=LOGITS, k=(1, 3)).enumerate_support(expand=False)[:, 0]
    order = [(len(positions), positions) for positions in (row.nonzero()[:, 0].tolist() for row in support)]
    assert support.shape == (6 + 15 + 20, 6) and order == sorted(order)
    with pytest.raises(ValueError, match="at most 1000000 k-hot vectors.* are 1048576"):
        ConditionalPoisson(logits=torch.zeros(20), k=(0, 20)).enumerate_support()


def test_one_size_is_the_fixed_design():
    design = ConditionalPoisson(logits=LOGITS, k=(2, 2))
    assert design.sample().sum(-1).eq(2).all() and not size_varies(design) and design.sample_indices().shape == (3, 2)
    assert torch.equal(design.size_probs, torch.eye(7).double()[2].expand(3, 7))


def test_infinite_logits():
    inf = math.inf
    design = ConditionalPoisson(logits=torch.tensor([inf, 0.0, -inf, 1.0, 0.5]).double(), k=(0, 3), validate_args=True)
    rest = ConditionalPoisson(logits=torch.tensor([0.0, 1.0, 0.5]).double(), k=(0, 2))
    assert_close(design.mean[[1, 3, 4]], rest.mean)
    assert_close(design.entropy(), rest.entropy())
    assert_close(design.covariance_matrix[1, [3, 4]], rest.covariance_matrix[0, [1, 2]])
    value = design.sample((200,))
    assert (value[:, 0] == 1).all() and (value[:, 2] == 0).all() and value.sum(-1).aminmax() == (1, 3)
    assert kl_divergence(design, ConditionalPoisson(logits=torch.zeros(5).double(), k=(1, 3))).isfinite()
    with pytest.raises(ValueError, match=r"equal to inf, 1.*above -inf, 4.*k=5"):
        ConditionalPoisson(logits=design.logits, k=(torch.tensor(5), 5), validate_args=True)


@for_each("far", [1e3, 1e12, 1e30])
def test_entropy_with_certain_units_is_that_of_the_others(far):
    logits = torch.tensor([far, 0.0, 0.5, -0.3], dtype=torch.float64, requires_grad=True)
    rest = ConditionalPoisson(logits=logits[1:], k=(1, 2)).entropy()
    entropy = ConditionalPoisson(logits=logits, k=(2, 3)).entropy()
    assert_close(entropy, rest)
    assert_close(*(torch.autograd.grad(value, logits)[0] for value in (entropy, rest)))
    tied = torch.tensor([far, -far, -far, -far], dtype=torch.float64)  # of the smaller size for certain
    assert ConditionalPoisson(logits=tied, k=(2, 3)).entropy().item() == pytest.approx(math.log(3), rel=1e-13)


def test_sizes_that_infinite_logits_exclude():
    """Have no probability at all, also where it comes from the FFT."""
    logits = torch.cat((torch.full((1000,), 6.0), torch.full((2000,), -math.inf))).double()
    law = ConditionalPoisson(logits=logits, k=(0, 3000)).size_probs
    assert (law[1001:] == 0).all() and law[1000] > 0


def test_sizes_of_no_rows():
    for shape in ((0, 4), (2, 0, 4)):
        logits, low = torch.zeros(shape), torch.zeros(shape[:-1], dtype=torch.long)
        assert ConditionalPoisson(logits=logits, k=(1, 2)).size_probs.shape == (*shape[:-1], 5)
        for design in (ConditionalPoisson(logits=logits, k=(low, 2)), PhantomUnit(ConditionalPoisson, logits=logits)):
            assert design.enumerate_support().shape == (1, *shape)
            assert design.enumerate_support(expand=False).shape == (1, *(1 for _ in low.shape), 4)


def test_divergences():
    """Infinite unless q has all sizes of p; between ranges and with a fixed size; by enumeration with other designs."""
    sizes = {"wide": (0, 4), "narrow": (1, 3), "fixed": 2, "higher": (1, 4)}
    designs = {
        name: ConditionalPoisson(logits=normal(6, seed=seed), k=k) for seed, (name, k) in enumerate(sizes.items())
    }
    designs["phantom"] = PhantomUnit(Brewer, probs=torch.full((6,), 0.4).double())  # sizes 2 and 3
    for larger, smaller in (
        ("wide", "narrow"),
        ("wide", "fixed"),
        ("narrow", "fixed"),
        ("narrow", "phantom"),
        ("higher", "narrow"),
    ):
        p, q = designs[smaller], designs[larger]
        log_p = p.log_prob(value := p.enumerate_support())
        assert_close(kl_divergence(p, q), (log_p.exp() * (log_p - q.log_prob(value))).sum())
        assert kl_divergence(q, p) == math.inf


def test_gradients_of_every_order():
    """The Hessian of log_prob is minus the covariance; numerical derivatives, twice; all modes, vmap and a graph."""

    def design_of(logits):
        return ConditionalPoisson(logits=logits, k=(1, 3), validate_args=False)

    value, logits = vectors(1, 3)[7], LOGITS[0]
    covariance = design_of(logits).covariance_matrix
    assert_close(-torch.func.jacfwd(torch.func.jacrev(lambda t: design_of(t).log_prob(value)))(logits), covariance)
    for function in (lambda t: design_of(t).size_probs, lambda t: design_of(t).entropy()):
        point = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(function, point) and torch.autograd.gradgradcheck(function, point)
        assert_close(torch.func.vmap(function)(LOGITS), function(LOGITS))
    x = value.clone().requires_grad_()  # the logits themselves: a change of the size counts
    assert_close(torch.autograd.grad(design_of(logits).log_prob(x), x)[0], logits)


@for_each("low, high", [(0, 2), (4, 6)])
def test_sampler(low, high):
    torch.manual_seed(0)
    logits = LOGITS[:1]
    value, log_p = log_law(logits, low, high)
    p = log_p[:, 0].exp()
    gof.check_sampler(ConditionalPoisson(logits=logits[0], k=(low, high)).sample((gof.num_draws(p),)), value, p)


@for_each("low, high", [(0, 100), (900, 1100), (0, 10**5), (99_000, 10**5)])
def test_long_rows(low, high):
    """n = 100,000: the size has the law that it says, and the mean that the units have."""
    torch.manual_seed(0)
    design = ConditionalPoisson(logits=normal(10**5) - 4, k=(low, high))
    sizes, law = torch.arange(10**5 + 1), design.size_probs
    expected = (sizes * law).sum()
    deviation = ((sizes - expected) ** 2 * law).sum().sqrt()
    assert_close(law.sum(), torch.tensor(1.0).double())
    assert abs(design.mean.sum() - expected) < 1e-7 and low <= expected <= high
    drawn = design.sample((5,))
    assert design.support.check(drawn).all() and (drawn.sum(-1).mean() - expected).abs() < 5 * deviation
    assert design.log_prob(drawn).isfinite().all() and design.entropy() > 0


def test_many_rows_are_made_in_slabs():
    """The results and derivatives of some rows equal those of each row by itself."""
    logits = normal(3000, 60).requires_grad_()
    low = torch.arange(3000) % 7
    results = []
    for rows in (slice(None), slice(0, 3000, 1000)):
        design = ConditionalPoisson(logits=logits[rows], k=(low[rows], low[rows] + 3), validate_args=False)
        parts = design.mean, design.entropy()[:, None], design.log_prob(design.mode)[:, None], design.size_probs
        result = torch.cat(parts, -1)
        picked = result[::1000] if rows == slice(None) else result
        results += [picked, torch.autograd.grad(picked.square().sum(), logits)[0]]
    for whole, alone in zip(results[:2], results[2:], strict=True):
        assert_close(whole, alone)


def square(x):
    """Quadratic, with an effect of the size: what an estimator has to learn of."""
    return (x @ normal(6, seed=5)).square() + x[..., 0] * x[..., 3] - x.sum(-1)


def exact_gradient(logits, low, high, f):
    value, log_p = log_law(logits[None], low, high)
    centred = value - log_p[:, 0].exp() @ value
    return (log_p[:, 0].exp() * f(value)) @ centred


def test_estimators():
    """Enumerated, the exact gradient; unbiased ones at 6 standard errors; straight-through exact for linear f."""
    logits = LOGITS[0].clone().requires_grad_()
    exact = exact_gradient(LOGITS[0], 1, 3, square)

    def gradient(surrogate):
        return torch.autograd.grad(surrogate.sum(), logits)[0]

    def design():
        return ConditionalPoisson(logits=logits, k=(1, 3))

    assert_close(gradient(enumerated(design(), square)), exact)
    assert_close(gradient(unordered_set(design(), square, num_samples=41)), exact)  # all there are
    torch.manual_seed(0)
    estimates = torch.stack([gradient(score_function(design(), square, num_samples=100)) for _ in range(100)])
    assert ((estimates.mean(0) - exact).abs() < 6 * estimates.std(0) / 10).all()
    weight = normal(6, seed=6)
    linear = exact_gradient(LOGITS[0], 1, 3, lambda x: x @ weight)
    assert_close(gradient(StraightThrough(design()).rsample() @ weight), linear)
    table = compare_estimators(design(), square, {"score": score_function}, num_samples=10, num_repeats=3)
    assert len(table.rows) == 1


def test_reinmax_is_exact_for_quadratic_functions_of_one_unit():
    logits = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    design = ConditionalPoisson(logits=logits, k=(0, 1))
    estimator, p = ReinMax(design), torch.sigmoid(logits.detach())
    slopes = [
        torch.autograd.grad(
            (3 * estimator.attach_gradient(torch.tensor([x]).double()) ** 2).sum(), logits, retain_graph=True
        )[0]
        for x in (0.0, 1.0)
    ]
    assert_close((1 - p) * slopes[0] + p * slopes[1], 3 * p * (1 - p))


@for_each("sizes", [2, (1, 3), (0, 5)])
def test_reinmax_has_a_second_derivative(sizes):
    """That of the gradient at given draws, against differences, also for rows at the ends of the range."""
    value = torch.tensor([[1.0, 0, 1, 0, 0], [0, 1, 0, 1, 0]], dtype=torch.float64)
    start, direction, weight = normal(3, 5)

    def derivative(at, order):
        place = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        design = ConditionalPoisson(logits=start + place * direction, k=sizes)
        found = (ReinMax(design).attach_gradient(value) @ weight).sum()
        for _ in range(order):
            (found,) = torch.autograd.grad(found, place, create_graph=True)
        return found.detach()

    step = 1e-4
    differences = (derivative(step, 1) - derivative(-step, 1)) / (2 * step)
    torch.testing.assert_close(derivative(0.0, 2), differences, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("n", "sizes"), [(10, (0, 10)), (32, (3, 8)), (60, (5, 9)), (60, (5, 20))], ids=str)
def test_reinmax_makes_few_trees(monkeypatch, n, sizes):
    """To solve for the logits behind a draw takes a few evaluations of the inclusion probabilities, each of a tree."""
    evaluations = []

    def scores(logits, k):
        evaluations.append(k)
        return RANGE.scores(logits, k)

    monkeypatch.setattr(inverse, "RANGE", RANGE._replace(scores=scores))
    monkeypatch.setattr(inverse_newton, "_newton", None)  # its systems take longer
    logits = normal(8, n, dtype=torch.float32).requires_grad_()
    torch.manual_seed(0)
    with backend("torch"):
        ReinMax(ConditionalPoisson(logits=logits, k=sizes)).rsample()[..., 0].sum().backward()
    assert 0 < len(evaluations) <= 6


@for_each("scale", [1.0, 6.0, 15.0])
@for_each("n, sizes", [(5, (0, 1)), (33, (0, 3)), (64, (3, 9)), (64, (0, 64))])
def test_logits_at_every_scale(n, sizes, scale):
    """Rows whose size hardly varies, or is near an end of the range, among ordinary ones."""
    design = ConditionalPoisson(logits=scale * normal(8, n) + torch.linspace(-3, 3, 8).double()[:, None], k=sizes)
    probs, around = design.mean, sizes_around(design.mean, design.k, design.largest_k)
    found = inclusion_probabilities(solve_logits(probs, around), around)
    tolerance = 1e-7 * probs * (1 - probs) + 1e-15
    assert ((found - probs).abs() <= tolerance).all()


def test_logits_of_given_means():
    """Points inside the hull, near its ends, and, in some rows, at them."""
    design = ConditionalPoisson(logits=LOGITS * torch.tensor([[1.0], [1.0], [9.0]]) + 9, k=(1, 3))
    torch.manual_seed(0)
    middle = (design.sample() + design.mean) / 2
    sizes = sizes_around(middle, design.k, design.largest_k)
    assert torch.unique(torch.stack(sizes), dim=1).shape[1] > 1
    assert_close(inclusion_probabilities(solve_logits(middle, sizes), sizes), middle)
    probs = torch.tensor([[0.3, 0.4, 0.6], [0.5, 0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    range_of = sizes_around(probs, torch.tensor([0, 0]), torch.tensor([2, 2]))
    assert torch.autograd.gradcheck(lambda p: solve_logits(p, range_of), probs)
    single = sizes_around(probs[1:], torch.tensor([1]), torch.tensor([2]))
    assert [end.item() for end in single] == [1, 1]
    solved = solve_logits(probs[1:], single)
    assert_close(solved, ConditionalPoisson(probs=probs[1:]).logits)
    weight = normal(1, 3)
    weight = weight - weight.mean()
    assert_close(
        torch.autograd.grad((solved * weight).sum(), probs)[0],
        torch.autograd.grad((ConditionalPoisson(probs=probs[1:]).logits * weight).sum(), probs)[0],
    )


def test_derivatives_of_logits_in_both_modes():
    """In one batch a row of a single size, where only differences of the logits matter, and one of a range."""
    probs = torch.tensor([[0.5, 0.2, 0.3], [0.3, 0.4, 0.6]], dtype=torch.float64, requires_grad=True)
    sizes = sizes_around(probs, torch.tensor([1, 1]), torch.tensor([2, 2]))
    assert (sizes.low == sizes.high).tolist() == [True, False]
    assert torch.autograd.gradcheck(lambda p: solve_logits(p, sizes), probs, check_forward_ad=True)


PRIOR = normal(2, 5)


def model():
    with pyro.plate("rows", 2):
        x = pyro.sample("x", ConditionalPoisson(logits=PRIOR, k=(0, 3)))
        pyro.sample("y", pyro.distributions.Normal(x @ normal(5, seed=1), 1.0), obs=torch.ones(2).double())


def evidence():
    """log p(y)."""
    value, log_p = log_law(PRIOR, 0, 3)
    likelihood = pyro.distributions.Normal(value @ normal(5, seed=1), 1.0).log_prob(torch.ones(()).double())
    return (log_p + likelihood[:, None]).logsumexp(0).sum()


def test_enumeration_in_pyro():
    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    loss = elbo.loss(config_enumerate(model), lambda: None)
    assert_close(torch.tensor(-loss, dtype=torch.float64), evidence())


@ELBOS
def test_guides_in_pyro(elbo):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)

    def guide():
        logits = pyro.param("logits", PRIOR.clone())
        with pyro.plate("rows", 2):
            pyro.sample("x", StraightThrough(ConditionalPoisson(logits=logits, k=(1, 3))))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo(num_particles=20))
    assert math.isfinite(loss := svi.step()) and loss > -evidence() - 1  # a bound, up to its noise


@for_each(
    "error, match, arguments",
    [
        (ValueError, r"needs `logits`, but got `probs` with k=\(1, 2\)", {"probs": torch.full((4,), 0.5), "k": (1, 2)}),
        (ValueError, r"0 <= low <= high <= n.*k=\(2, 1\) with n=4", {"k": (2, 1)}),
        (ValueError, r"0 <= low <= high <= n.*k=\(-1, 1\)", {"k": (-1, 1)}),
        (ValueError, r"0 <= low <= high <= n.*k=\(1, 5\) with n=4", {"k": (1, 5)}),
        (ValueError, "low from 1 to 3 and high from 2 to 2", {"k": (torch.tensor([1, 3]), 2)}),
        (ValueError, r"must be k=\(low, high\) or k=\(low, high, log_prior\), but got k=\(1,\)", {"k": (1,)}),
        (TypeError, r"`k\[2\]`, the log-probabilities.*floating-point tensor, but got 3", {"k": (1, 2, 3)}),
        (TypeError, r"`k\[0\]` must be an int.*got 1\.5", {"k": (1.5, 2)}),
        (TypeError, r"`k\[1\]` must be an int.*True", {"k": (1, True)}),
        (TypeError, r"`k\[1\]` must be an int.*float32", {"k": (1, torch.ones(()))}),
        (
            ValueError,
            r"`k` must broadcast.*\(2, 3\)|`k` must broadcast",
            {"k": (torch.ones(3).long(), torch.tensor([2, 2]))},
        ),
    ],
)
def test_bad_ranges(error, match, arguments):
    logits = {} if "probs" in arguments else {"logits": torch.zeros(4)}
    with pytest.raises(error, match=match):
        ConditionalPoisson(**logits, **arguments, validate_args=True)


def relaxed_site():
    with pyro.poutine.reparam(config={"x": KHotReparam(temperature=0.5)}):
        pyro.sample("x", AT_MOST_TWO)


AT_MOST_TWO = ConditionalPoisson(logits=torch.zeros(4), k=(0, 2), validate_args=True)


@for_each(
    "error, match, call",
    [
        (TypeError, r"k=\(1, 2\); ConditionalPoisson\(logits", lambda: ParetoSampling(logits=torch.zeros(4), k=(1, 2))),
        (TypeError, r"\(1, 2\); ConditionalPoisson\(logits", lambda: RelaxedKHot(1.0, logits=torch.zeros(4), k=(1, 2))),
        (TypeError, "PhantomUnit takes no `k`", lambda: PhantomUnit(Brewer, logits=torch.zeros(4), k=(1, 2))),
        (TypeError, r"'x' has the support k_hot\(0, 2\)", relaxed_site),
        (TypeError, "of a fixed size", lambda: subset_categorical(AT_MOST_TWO)),
        (NotImplementedError, r"one size.*k_hot\(0, 2\)", lambda: AT_MOST_TWO.sample_indices()),
        (NotImplementedError, "one size", lambda: horvitz_thompson(AT_MOST_TWO, torch.zeros(4), torch.ones(4))),
        (ValueError, "within the support", lambda: AT_MOST_TWO.log_prob(torch.ones(4))),
    ],
)
def test_what_needs_one_size_refuses(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_values_of_other_sizes_have_no_probability():
    design = ConditionalPoisson(logits=torch.zeros(4), k=(0, 2), validate_args=False)
    assert design.log_prob(torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]])).isinf().tolist() == [True, False]
    assert isinstance(design.support, k_hot) and repr(design) == "ConditionalPoisson(logits: (4,), k: (0, 2))"
