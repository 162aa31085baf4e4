"""The exact expectation: equal to the direct sum whatever the chunks, within bounded memory."""

import math

import pyro.distributions as dist
import pytest
import torch

from khot import ConditionalPoisson, PhantomUnit, Pivotal, StraightThrough, Systematic, enumerated
from tests.estimators.enumeration import LOGITS, SCORED, WEIGHT, assert_same, derivatives, exact, leaves, loss


@pytest.mark.parametrize(
    ("make", "chunk_size"),
    [
        *(pytest.param(make, 4, id=f"{name}-4") for name, make in SCORED.items()),
        *(pytest.param(SCORED["conditional_poisson"], size, id=f"conditional_poisson-{size}") for size in (1, 4096)),
    ],
)
def test_is_the_sum_over_the_support(make, chunk_size):
    logits, weight = leaves()
    value = enumerated(make(logits), f := loss(weight), chunk_size=chunk_size)
    truth = exact(make(logits), f)
    torch.testing.assert_close(value, truth)
    assert_same(derivatives(value, (logits, weight)), derivatives(truth, (logits, weight)))


def test_batches_chunks_and_wrappers():
    logits = torch.stack((LOGITS, -LOGITS))
    f = loss(WEIGHT)
    design = ConditionalPoisson(logits=logits, k=2)
    expected = torch.stack([exact(ConditionalPoisson(logits=row, k=2), f) for row in logits])
    sizes = []
    for wrapped in (design, StraightThrough(design), ConditionalPoisson(logits=logits, k=torch.tensor([2, 2]))):
        value = enumerated(wrapped, lambda x: sizes.append(len(x)) or f(x), num_samples=7, chunk_size=4)
        torch.testing.assert_close(value, expected)
    assert sizes == 3 * [4, 2]
    one_hot = dist.OneHotCategorical(logits=logits)
    torch.testing.assert_close(
        enumerated(one_hot, f, chunk_size=3), enumerated(ConditionalPoisson(logits=logits, k=1), f)
    )
    phantom = PhantomUnit(Systematic, probs=torch.tensor([0.5, 0.5, 0.5]))
    torch.testing.assert_close(enumerated(phantom, lambda x: x.sum(-1), chunk_size=2), torch.tensor(1.5))


def saved_bytes(n, k, chunk_size):
    """The tensors that the graph of the expectation keeps for the backward pass, except what a chunk recomputes."""
    logits, total = torch.linspace(-1, 1, n, dtype=torch.float64).requires_grad_(), 0
    weight = torch.linspace(0, 1, n * n, dtype=torch.float64).view(n, n).requires_grad_()
    design, largest = ConditionalPoisson(logits=logits, k=k), 0

    def f(x):
        nonlocal largest
        largest = max(largest, len(x))
        return (torch.tanh(x @ weight) * x).sum(-1)

    def pack(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = enumerated(design, f, chunk_size=chunk_size)
    gradients = torch.autograd.grad(value, (logits, weight))
    assert largest <= chunk_size
    return total, gradients


def test_memory_does_not_grow_with_the_support():
    plain, expected = saved_bytes(12, 6, math.comb(12, 6))
    chunked, gradients = saved_bytes(12, 6, 32)
    assert_same(gradients, expected)
    assert chunked < 20_000 < 100_000 < plain


def test_randomness_is_left_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    enumerated(ConditionalPoisson(logits=LOGITS, k=2), loss(WEIGHT), chunk_size=2)
    assert torch.equal(state, torch.get_rng_state())


def test_errors():
    with pytest.raises(ValueError, match=r"at most 1000000 vectors, but C\(30, 15\) = 155117520; score_function"):
        enumerated(ConditionalPoisson(logits=torch.zeros(30), k=15), loss(WEIGHT))
    with pytest.raises(ValueError, match=r"C\(25, 12\) \+ C\(25, 13\)"):
        enumerated(PhantomUnit(ConditionalPoisson, probs=torch.full((25,), 0.5)), loss(WEIGHT))
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, but got 0"):
        enumerated(ConditionalPoisson(logits=LOGITS, k=2), loss(WEIGHT), chunk_size=0)
    with pytest.raises(TypeError, match=r"`chunk_size` must be an int, but got 2\.5"):
        enumerated(ConditionalPoisson(logits=LOGITS, k=2), loss(WEIGHT), chunk_size=2.5)
    with pytest.raises(NotImplementedError, match=r"same k in all rows, but got k in \[1, 2\]"):
        enumerated(ConditionalPoisson(logits=torch.zeros(2, 4), k=torch.tensor([1, 2])), lambda x: x.sum(-1))
    with pytest.raises(NotImplementedError, match="Pivotal has no log_prob"):
        enumerated(Pivotal(logits=LOGITS, k=2), loss(WEIGHT))
