"""Functions made slab by slab are those made at once, with all their derivatives, and so is what is built on them."""

import pytest
import torch

from khot import ConditionalPoisson, Sampford
from khot.kernels.exact.row_slabs import by_rows, in_slabs, slab_size
from khot.laws import conditional_poisson, tilted_tree
from tests.inputs import normal

X, Y = normal(7, 3), normal(7, 2, seed=1)
SIZE = torch.arange(7)


def function(x, size, y):
    """Two results, one without a derivative in y; ``size`` is no number."""
    product = (x.sin() * size.unsqueeze(-1)).sum(-1) * y.square().sum(-1)
    return product, x.exp().cumsum(-1)


def slabs(x, y):
    return in_slabs(function, 3, x, SIZE, y)


def at_once(x, y):
    return function(x, SIZE, y)


@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_values(rows):
    inputs = X[:rows], SIZE[:rows], Y[:rows]
    for a, b in zip(in_slabs(function, 3, *inputs), function(*inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_derivatives_of_every_order_and_mode():
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    assert torch.autograd.gradcheck(slabs, (x, y), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(slabs, (x, y), check_fwd_over_rev=True)
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        for a, b in zip(transform(slabs)(X, Y), transform(at_once)(X, Y), strict=True):
            torch.testing.assert_close(a, b)
    third = [
        torch.autograd.functional.hessian(lambda x, f=f: torch.func.grad(lambda x: f(x, Y)[1].sum())(x).sum(), X)
        for f in (slabs, at_once)
    ]
    torch.testing.assert_close(*third)
    torch.testing.assert_close(torch.vmap(slabs)(X[None], Y[None])[0][0], at_once(X, Y)[0])


def test_a_result_without_any_derivative():
    x = X.clone().requires_grad_()
    positive, total = in_slabs(lambda x: ((x > 0).double(), x.sum(-1)), 2, x)
    assert torch.equal(positive, (X > 0).double())
    assert torch.equal(torch.autograd.grad(total.sum() + positive.sum(), x)[0], torch.ones_like(X))


def test_nothing_is_cut_twice():
    lengths = []

    def inner(x):
        lengths.append(len(x))
        return (x.sin(),)

    (y,) = by_rows(lambda x: by_rows(inner, 3, x), 12, X, most=2)
    assert torch.equal(y, X.sin()) and lengths == [4, 3]
    by_rows(inner, 3, X)  # as before: also where a slab has failed
    with pytest.raises(ZeroDivisionError):
        by_rows(lambda x: 1 // 0, 3, X)
    lengths.clear()
    by_rows(inner, 3, X, most=None)
    assert lengths == [1] * 7


def test_sizes():
    assert [slab_size(10, 4, 16), slab_size(10, 4, 40), slab_size(1, 100, 16), slab_size(5, 100, 16)] == [4, 10, 1, 1]
    assert slab_size(70, 4, 16) == 12 and slab_size(70, 4, 16, most=None) == 4  # six slabs, or as many as there are


K = torch.tensor([1, 2, 4, 3, 5, 0, 6])
LAWS = {
    "mean": lambda design, value: design.mean,
    "entropy": lambda design, value: design.entropy(),
    "log_prob": lambda design, value: design.log_prob(value[0]),
    "log_prob_of_draws": lambda design, value: design.log_prob(value),
    "pairs": lambda design, value: design.pairwise_inclusion,
}


@pytest.mark.parametrize(
    ("cls", "name", "k"),
    [
        *((ConditionalPoisson, name, K) for name in LAWS),
        *((Sampford, name, K) for name in LAWS if name != "entropy"),
        (ConditionalPoisson, "log_prob", 3),
    ],
)
def test_designs(cls, name, k, monkeypatch):
    results = []
    logits, value = normal(7, 6), None
    for slab in (tilted_tree.SLAB, 12):
        for module in (tilted_tree, conditional_poisson):
            monkeypatch.setattr(module, "SLAB", slab)
            monkeypatch.setattr(module, "WHOLE", 0)
        x = logits.clone().requires_grad_()
        design = cls(logits=x, k=k)
        value = design.sample((4,)) if value is None else value
        assert (design.sample((4,)).sum(-1) == design.k).all() and design.sample().shape == (7, 6)
        y = LAWS[name](design, value)
        (gradient,) = torch.autograd.grad((y * normal(*y.shape, seed=2)).sum(), x, create_graph=name != "pairs")
        results.append((y, gradient))
        if name != "pairs":
            results[-1] += torch.autograd.grad((gradient * normal(7, 6, seed=3)).sum(), x, allow_unused=True)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_designs_of_two_batch_dimensions_and_values_of_fewer(monkeypatch):
    monkeypatch.setattr(conditional_poisson, "SLAB", 12)
    logits = normal(2, 3, 6)
    value = ConditionalPoisson(logits=logits[0, 0], k=2).sample()
    log_prob = ConditionalPoisson(logits=logits, k=2).log_prob(value)
    expected = [[ConditionalPoisson(logits=row, k=2).log_prob(value) for row in rows] for rows in logits]
    torch.testing.assert_close(log_prob, torch.tensor(expected, dtype=torch.float64))
    assert ConditionalPoisson(logits=logits, k=2).sample((4, 5)).shape == (4, 5, 2, 3, 6)
