"""Several k-hot vectors under one loss: laws made independent by ``to_event``, whose events are wider than (n,)."""

import itertools
import math

import pyro.distributions as dist
import pytest
import torch

from khot import (
    ConditionalPoisson,
    GumbelTopK,
    MovingAverage,
    PhantomUnit,
    Pivotal,
    RelaxedKHot,
    Sampford,
    StraightThrough,
    Systematic,
    enumerated,
    pathwise,
    reinmax,
    score_function,
    score_function_surrogate,
    straight_through,
    unordered_set,
)
from khot.estimators._unordered_set import _surrogate as unordered_set_surrogate
from tests.estimators.enumeration import assert_same
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import FUNCTIONS

WEIGHT = normal(2, 4, seed=3)
MAKERS = {
    "conditional_poisson": lambda logits: ConditionalPoisson(logits=logits, k=2),
    "two_sizes": lambda logits: ConditionalPoisson(logits=logits, k=torch.tensor([1, 2])),
    "sampford": lambda logits: Sampford(logits=logits, k=2),
    "phantom_unit": lambda logits: PhantomUnit(Sampford, logits=logits / 9 - 1.5),  # of no more than one
    "systematic": lambda logits: Systematic(logits=logits, k=2),
    "one_hot": lambda logits: dist.OneHotCategorical(logits=logits),
}
TO_EVENT = {"pyro": lambda law: law.to_event(1), "torch": lambda law: torch.distributions.Independent(law, 1)}


def loss(weight):
    """Of all latents together, no sum over them."""
    return lambda x: torch.sin(3 * (x * weight).sum((-1, -2))) + (x * weight).sum(-1).square().prod(-1)


def product_support(law):
    """All values of two independent rows ``(count, 2, n)``, and the probability of each with its gradient."""
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=law.event_shape[-1])), dtype=torch.float64)
    value = torch.stack([torch.stack(pair) for pair in itertools.product(every, repeat=2)])
    value = value[law.support.check(value).all(-1)]
    probability = law.log_prob(value).sum(-1).exp()
    return value[probability > 0], probability[probability > 0]


def leaves():
    return normal(2, 4).requires_grad_(), WEIGHT.clone().requires_grad_()


def derivatives(value, inputs):
    first = torch.autograd.grad(value, inputs, create_graph=True)
    mixed = sum((g * normal(2, 4, seed=5)).sum() for g in first)
    return [*first, *torch.autograd.grad(mixed, inputs, retain_graph=True)]


def check_same(actual, expected, inputs):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    assert_same(derivatives(actual, inputs), derivatives(expected, inputs))


@for_each("baseline", ["none", "moving_average", "leave_one_out", lambda design: 0.7])
@for_each("make", MAKERS.values())
def test_score_function_is_unbiased(make, baseline):
    """Summed over all pairs of draws, each of two latents."""
    logits, weight = leaves()
    law, f = make(logits), loss(weight)
    support, probability = product_support(law)
    pairs = torch.cartesian_prod(*2 * [torch.arange(len(support))]).T
    value, chance = support[pairs], probability.detach()[pairs].prod(0)
    design = law.to_event(1).expand((len(chance),))
    expected = (chance * score_function_surrogate(design, value, f(value), baseline=baseline)).sum()
    check_same(expected, (probability * f(support)).sum(), (logits, weight))


@for_each("chunk_size", [7, 4096])
@for_each("to_event", TO_EVENT.values())
@for_each("make", MAKERS.values())
def test_enumerated_is_the_sum_over_the_product(make, to_event, chunk_size):
    logits, weight = leaves()
    law, f, sizes = make(logits), loss(weight), []
    support, probability = product_support(law)
    value = enumerated(to_event(law), lambda x: sizes.append(len(x)) or f(x), chunk_size=chunk_size)
    assert sum(sizes) >= len(support) and max(sizes) <= chunk_size
    check_same(value, (probability * f(support)).sum(), (logits, weight))


@for_each("make", MAKERS.values())
def test_unordered_set_is_exact_with_the_whole_support(make):
    logits, weight = leaves()
    law, f = make(logits), loss(weight)
    support, probability = product_support(law)
    value = unordered_set(law.to_event(1), f, num_samples=len(support))
    check_same(value, (probability * f(support)).sum(), (logits, weight))


@for_each("baseline", ["built_in", "none"])
@for_each("make", [MAKERS["conditional_poisson"], MAKERS["one_hot"]])
def test_unordered_set_is_unbiased(make, baseline):
    """Summed over all pairs of distinct values, with the probability of drawing them in either order."""
    logits, weight = leaves()
    law, f = make(logits), loss(weight)
    support, probability = product_support(law)
    p = probability.detach()
    i, j = torch.combinations(torch.arange(len(p))).T
    chance, rest = p[i] * p[j] / (1 - p[i]) + p[i] * p[j] / (1 - p[j]), (1 - p[i] - p[j]).log()
    value, design = support[torch.stack((i, j))], law.to_event(1).expand((len(i),))
    expected = (chance * unordered_set_surrogate(design, value, f(value), rest, baseline)).sum()
    check_same(expected, (probability * f(support)).sum(), (logits, weight))


@for_each("case", FUNCTIONS)
@for_each("dtype", [torch.float32, torch.float64])
def test_every_function_takes_wider_events(case, dtype):
    for shape, event_dim in (((2, 4), 2), ((3, 2, 4), 2), ((3, 1, 2, 4), 3), ((1, 2, 2, 3), 3)):
        logits, seen = normal(*shape, dtype=dtype).requires_grad_(), []
        design = ConditionalPoisson(logits=logits, k=1).to_event(event_dim - 1)
        batch_shape, event = shape[:-event_dim], tuple(range(-event_dim, 0))

        def f(x, seen=seen, event=event):
            seen.append(x.shape)
            return (x.cumsum(-1) * normal(*x.shape[-2:], dtype=x.dtype, seed=1)).sum(event).exp()

        torch.manual_seed(0)
        surrogate = case.estimate(design, f, 2)
        assert surrogate.shape == batch_shape and surrogate.dtype == dtype
        assert seen[0][1:] == shape
        (gradient,) = torch.autograd.grad(surrogate.sum(), logits)
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


def test_nested_laws_are_one_product():
    logits = normal(2, 2, 3).requires_grad_()
    law, f = ConditionalPoisson(logits=logits, k=1), lambda x: (x.flatten(-3) @ normal(12, 1)).squeeze(-1).sin()
    once, twice = (enumerated(design, f) for design in (law.to_event(2), law.to_event(1).to_event(1)))
    torch.testing.assert_close(once, twice)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (once, twice)))


@for_each("function", [straight_through, reinmax])
@for_each("to_event", TO_EVENT.values())
def test_pathwise_functions_wrap_the_law_of_each_latent(function, to_event):
    weight, gradients = normal(2, 4, seed=1), []
    for wide in (False, True):
        logits = normal(3, 2, 4).requires_grad_()
        design = Pivotal(logits=logits, k=2)
        torch.manual_seed(0)
        if wide:
            surrogate = function(to_event(design), lambda x: (x * weight).sum((-1, -2)), 5)
        else:
            surrogate = function(design, lambda x: (x * weight).sum(-1), 5).sum(-1)
        gradients.append((surrogate, *torch.autograd.grad(surrogate.sum(), logits)))
    torch.testing.assert_close(*gradients)


def test_masked_laws_are_wrapped_inside():
    """A mask changes what is scored, not what is drawn."""
    logits = normal(3, 2, 4).requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2).mask(torch.tensor([True, False])).to_event(1)
    surrogate = straight_through(design, lambda x: x[..., 0].sum(-1))
    assert torch.autograd.grad(surrogate.sum(), logits)[0].abs().sum() > 0


def test_a_relaxed_law_of_several_latents_is_pathwise():
    logits = normal(3, 2, 4).requires_grad_()
    surrogate = pathwise(RelaxedKHot(0.5, logits=logits, k=1.5).to_event(1), lambda x: x.square().sum((-1, -2)), 5)
    assert surrogate.shape == (3,) and torch.autograd.grad(surrogate.sum(), logits)[0].abs().sum() > 0


def test_ten_latents_of_a_vae():
    """What the size of the product forbids says so; all else works."""
    logits = torch.zeros(16, 10, 10, requires_grad=True)

    def f(x):
        return (x[..., 0] * x[..., 1]).sum(-1)

    for function in (score_function, straight_through, reinmax):
        design = ConditionalPoisson(logits=logits, k=5).to_event(1)
        surrogate = function(design, f, 2)
        assert surrogate.shape == (16,) and torch.autograd.grad(surrogate.sum(), logits)[0].abs().sum() > 0
    for function in (enumerated, unordered_set):
        with pytest.raises(ValueError, match=rf"{function.__name__} .* at most 1000000 .*C\(10, 5\)\^10 = about 1e24"):
            function(design, f)
    with pytest.raises(ValueError, match=r"C\(40, 1\)\^2 \* C\(40, 2\)\^2 = 973440000"):
        enumerated(ConditionalPoisson(logits=torch.zeros(4, 40), k=torch.tensor([1, 2, 1, 2])).to_event(1), f)
    with pytest.raises(ValueError, match=r"\(C\(25, 12\) \+ C\(25, 13\)\)\^2"):
        enumerated(PhantomUnit(ConditionalPoisson, probs=torch.full((2, 25), 0.5)).to_event(1), f)
    with pytest.raises(ValueError, match=r"at most 1000000 .*2\^21 = 2097152"):
        enumerated(dist.Bernoulli(torch.full((21,), 0.5)).to_event(1), f)
    with pytest.raises(NotImplementedError, match=r"same k in all rows, but got k in \[1, 2\]"):
        sizes = torch.tensor([[1, 2], [2, 1]])
        enumerated(ConditionalPoisson(logits=torch.zeros(2, 2, 4), k=sizes).to_event(1), f)


def test_sizes_too_large_to_print_are_named():
    with pytest.raises(ValueError, match=r"C\(20000, 10000\) = about 1e6018"):
        enumerated(ConditionalPoisson(logits=torch.zeros(20000), k=10000), lambda x: x[..., 0])


def test_latents_whose_sizes_differ_are_a_product_all_the_same():
    """Per latent, the same in all rows of the batch."""
    k = torch.tensor([0, 1, 3])
    logits = normal(2, 3, 3).requires_grad_()
    value = enumerated(ConditionalPoisson(logits=logits, k=k).to_event(1), lambda x: (x * normal(3, 3)).sum((-1, -2)))
    torch.testing.assert_close(value, (ConditionalPoisson(logits=logits, k=k).mean * normal(3, 3)).sum((-1, -2)))


def test_draws_of_unordered_set_are_distinct_values_of_the_product():
    torch.manual_seed(0)
    seen = []
    design = GumbelTopK(logits=normal(50, 2, 3), k=1).to_event(1)
    unordered_set(design, lambda x: seen.append(x) or x[..., 0, 0], 5)
    code = (seen[0].flatten(-2) * 2 ** torch.arange(6)).sum(-1).sort(0).values
    assert (code.diff(dim=0) > 0).all()


@for_each("baseline", ["none", "moving_average", "leave_one_out"])
def test_surrogate_of_given_draws_is_that_of_the_function(baseline):
    """A client that draws here and evaluates there gets what score_function gives in one call."""
    logits, weight = normal(3, 4).requires_grad_(), normal(4).requires_grad_()
    design, kept = ConditionalPoisson(logits=logits, k=2), []

    def f(x):
        kept[:] = [x, (x * weight).sum(-1).sin()]
        return kept[1]

    together = score_function(design, f, 4, baseline=baseline)
    apart = score_function_surrogate(design, *kept, baseline=baseline)
    torch.testing.assert_close(apart, together)
    gradients = [torch.autograd.grad(s.sum(), (logits, weight), retain_graph=True) for s in (apart, together)]
    torch.testing.assert_close(*gradients)


def test_surrogate_of_given_draws_lets_a_baseline_learn():
    baseline, design = MovingAverage(), ConditionalPoisson(logits=normal(3, 4), k=2)
    value = design.sample((5,))
    score_function_surrogate(design, value, torch.full((5, 3), 2.0), baseline=baseline)
    assert baseline.mean == 2


def test_surrogate_of_given_draws_takes_them_as_constants():
    """A draw that carries a gradient of its own, as straight-through ones do, adds nothing to the score function."""
    logits = normal(3, 4).requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2)
    value, losses = StraightThrough(design).rsample((5,)), normal(5, 3, seed=1)
    gradients = [
        torch.autograd.grad(score_function_surrogate(design, v, losses).sum(), logits)[0]
        for v in (value, value.detach())
    ]
    torch.testing.assert_close(*gradients)


def test_surrogate_of_given_draws_names_what_does_not_fit():
    design = ConditionalPoisson(logits=normal(3, 4), k=2)
    value, losses = design.sample((5,)), normal(5, 3)
    for error, match, wrong in (
        (TypeError, "`design` must be a", {"design": normal(3, 4)}),
        (TypeError, "`value` must be a", {"value": value.tolist()}),
        (ValueError, r"`value` must have shape \(S, 3, 4\).* but got \(3, 4\)", {"value": value[0]}),
        (ValueError, r"`value` must have shape \(S, 3, 4\).* but got \(5, 3, 3\)", {"value": value[..., :3]}),
        (TypeError, "`losses` must be a floating-point tensor, but got float", {"losses": 1.0}),
        (TypeError, "`losses` must be a floating-point tensor, but got dtype torch.int64", {"losses": losses.long()}),
        (ValueError, r"`losses` must have shape .*\(5, 3\), but got \(5,\)", {"losses": losses[:, 0]}),
        (ValueError, "`baseline` must be", {"baseline": "mean"}),
        (ValueError, "`value` must contain at least 2 draws", {"value": value[:1], "losses": losses[:1]}),
    ):
        with pytest.raises(error, match=match):
            good = {"design": design, "value": value, "losses": losses, "baseline": "leave_one_out"}
            score_function_surrogate(**{**good, **wrong})


def test_events_without_a_ground_set_are_refused():
    for function in (score_function, pathwise, enumerated, unordered_set):
        with pytest.raises(ValueError, match=r"`design` must .*\(n,\), but got event_shape \(\)"):
            function(dist.Normal(torch.zeros(3), 1.0), lambda x: x)
    assert math.isclose(enumerated(dist.Bernoulli(torch.full((3,), 0.5)).to_event(1), lambda x: x.sum(-1)).item(), 1.5)
