"""finite_difference: exact in expectation by enumeration, its partners' law, and what it does not depend on."""

import itertools

import pytest
import torch

from khot import ConditionalPoisson, PhantomUnit, finite_difference, score_function, straight_through
from khot.estimators._finite_difference import _surrogate
from khot.laws.swaps import partner_law
from tests.estimators.enumeration import loss
from tests.inputs import normal

INF = torch.inf


def mean_gradient(design, f, logits, support, chunk_size=4096):
    """The estimates at all vectors of positive probability, weighted by it."""
    probability, total = design.log_prob(support).detach().exp(), torch.zeros_like(logits)
    for value, weight in zip(support.detach().unsqueeze(1), probability, strict=True):
        if weight > 0:
            surrogate = _surrogate(design, f, value, f(value), "all", chunk_size)
            total += weight * torch.autograd.grad(surrogate, logits, retain_graph=True)[0]
    return total


def exact_gradient(design, f, logits, support):
    support = support[design.log_prob(support) > -INF]
    return torch.autograd.grad(design.log_prob(support).exp() @ f(support), logits, retain_graph=True)[0]


def check_unbiased(design, f, logits, support, **kwargs):
    expected = exact_gradient(design, f, logits, support)
    torch.testing.assert_close(mean_gradient(design, f, logits, support, **kwargs), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk_size", [1, 4096])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (4, 0), (4, 4), (5, 1), (5, 4), (6, 3), (7, 2)])
def test_the_mean_over_all_draws_is_the_exact_gradient(n, k, chunk_size):
    logits = (3 * normal(n, seed=n)).requires_grad_()
    design = ConditionalPoisson(logits=logits, k=k)
    check_unbiased(design, loss(normal(n, seed=k)), logits, design.enumerate_support(), chunk_size=chunk_size)


EVERY = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)), dtype=torch.float64)
FORMS = {
    "probs": lambda logits: ConditionalPoisson(probs=torch.softmax(logits, -1)),
    "certain_units": lambda logits: ConditionalPoisson(logits=logits + torch.tensor([0.0, INF, 0.0, -INF]), k=2),
    "phantom_unit": lambda logits: PhantomUnit(ConditionalPoisson, logits=logits),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_other_forms_of_the_law(make):
    logits = normal(4).requires_grad_()
    design = make(logits)
    check_unbiased(design, loss(normal(4, seed=1)), logits, EVERY[design.support.check(EVERY)])


def test_several_latents_under_one_loss():
    """Two rows of different size, whose pairs of subsets are all there is."""
    logits, weight = normal(2, 4).requires_grad_(), normal(2, 4, seed=1)
    design = ConditionalPoisson(logits=logits, k=torch.tensor([1, 2])).to_event(1)
    rows = [EVERY[EVERY.sum(-1) == k] for k in (1, 2)]
    support = torch.stack([torch.stack(pair) for pair in itertools.product(*rows)])

    def f(x):
        return torch.sin(3 * (x * weight).sum((-1, -2))) + (x * weight).sum(-1).square().prod(-1)

    check_unbiased(design, f, logits, support, chunk_size=3)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_partners_of_long_rows(scale):
    """Chances sum to one, of units that differ; and to none for units that cannot change."""
    logits = scale * normal(60)
    logits[:2] = torch.tensor([INF, -INF])
    value = ConditionalPoisson(logits=logits, k=20).sample((7,))
    chances = partner_law(logits, value, 20)
    assert (chances >= 0).all() and chances[:, :2].abs().sum() == 0 and chances[..., :2].abs().sum() == 0
    torch.testing.assert_close(chances[:, 2:].sum(-1), torch.ones(7, 58, dtype=torch.float64))
    assert (chances * (value.unsqueeze(-1) == value.unsqueeze(-2))).abs().sum() == 0


def test_a_drawn_partner_has_its_chance():
    """The mean of 40000 estimates, each with partners of its own, within 5.5 standard errors of that over all partners.

    The false alarm of 6 units at 5.5 standard errors is 2e-7.
    """
    logits, f = normal(6), loss(normal(6, seed=1))
    value = ConditionalPoisson(logits=logits, k=3).sample()

    def estimates(rows, partners):
        own = logits.expand(rows, 6).clone().requires_grad_()
        design = ConditionalPoisson(logits=own, k=3)
        x = value.expand(1, rows, 6)
        surrogate = _surrogate(design, f, x, f(x), partners, 4096)
        return torch.autograd.grad(surrogate.sum(), own)[0]

    torch.manual_seed(0)
    drawn, (expected,) = estimates(40000, "drawn"), estimates(1, "all")
    error = drawn.std(0) / 200
    assert ((drawn.mean(0) - expected).abs() < 5.5 * error + 1e-12).all() and error.max() > 1e-4


def gradient_of(estimator, f, shift=0.0, **kwargs):
    """A thousand estimates at once, from the same random numbers whatever f is."""
    torch.manual_seed(0)
    logits = (shift + normal(8)).expand(1000, 8).clone().requires_grad_()
    return torch.autograd.grad(estimator(ConditionalPoisson(logits=logits, k=3), f, **kwargs).sum(), logits)[0]


def test_only_pathwise_gradients_depend_on_how_a_mask_is_written():
    """A quadratic form in which a mask enters squared, and the same one with the mask entering once."""
    features = normal(5, 8, seed=2)

    def squared(x):
        return torch.logdet(torch.eye(5) + torch.einsum("ai,...i,...i,bi->...ab", features, x, x, features))

    def linear(x):
        return torch.logdet(torch.eye(5) + torch.einsum("ai,...i,bi->...ab", features, x, features))

    for estimator in (finite_difference, score_function):
        torch.testing.assert_close(gradient_of(estimator, squared), gradient_of(estimator, linear))
    difference = gradient_of(straight_through, squared) - gradient_of(straight_through, linear)
    assert difference.abs().mean() > 0.1


def test_less_variance_where_the_law_is_concentrated():
    """On three units of eight, at 16 evaluations of f each."""

    def f(x):
        return (x @ normal(8, seed=3)).square()

    shift = 7.0 * (torch.arange(8) < 3)
    ours = gradient_of(finite_difference, f, shift).var(0).sum()
    theirs = gradient_of(score_function, f, shift, num_samples=16, baseline="leave_one_out").var(0).sum()
    assert ours < theirs / 4


def test_constants_give_no_gradient_from_any_draw():
    assert gradient_of(finite_difference, lambda x: 3 + x.sum(-1)).abs().max() < 1e-12


def test_neighbours_come_in_chunks():
    logits, seen = normal(2, 6).requires_grad_(), []

    def f(x):
        seen.append((x.shape, x.requires_grad, torch.is_grad_enabled()))
        return x.prod(-1)

    finite_difference(ConditionalPoisson(logits=logits, k=2), f, 3, chunk_size=9)  # 8 swaps, of 3 draws each
    assert [shape[0] for shape, *_ in seen] == [3, 9, 9, 6] and all(shape[1:] == (2, 6) for shape, *_ in seen)
    assert [enabled for *_, enabled in seen] == [True, False, False, False]
