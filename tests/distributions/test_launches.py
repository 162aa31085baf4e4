"""How many kernels draws and log-probabilities launch on an accelerator that Triton supports."""

import pytest
import torch

from khot import Brewer, GumbelTopK, ParetoSampling, Sampford, Systematic, sigmoid_topk
from khot.laws import order_at_once, order_inclusion_at_once
from tests.launches import launches, launches_of_gradient
from tests.loops import for_each

N, K = 100, 5
PROBS = sigmoid_topk(torch.randn(16, N, generator=torch.Generator().manual_seed(0)), K)


@for_each(
    "design, options, most",
    [
        (Systematic, {"order": "fixed"}, 25),
        (Systematic, {"order": "random"}, 29),
        (Brewer, {}, 10 * K + 35),  # of which five find how many steps there are on a CPU
        (Sampford, {}, 113),
    ],
)
def test_draws(design, options, most):
    value, names = launches(lambda: design(probs=PROBS, k=K, validate_args=False, **options).sample())
    assert (value.sum(-1) == K).all()
    assert names.total() <= most, names


@for_each("design, most, most_of_gradient", [(Systematic, 30, 30), (Brewer, 52, 83), (Sampford, 101, 36)])
def test_log_probabilities(design, most, most_of_gradient):
    """Of values that are known to be k-hot, with what their derivative needs."""
    value, probs = design(probs=PROBS, k=K).sample(), PROBS.clone().requires_grad_()
    law = design(probs=probs, k=K, validate_args=False)
    log_prob, names = launches(lambda: law._rounded(law._log_prob(value)))
    torch.testing.assert_close(log_prob, design(probs=PROBS, k=K).log_prob(value))
    assert names.total() <= most, names
    names = launches_of_gradient(log_prob, probs)
    assert names.total() <= most_of_gradient, names


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("n", [20, N])
@pytest.mark.parametrize("design", [GumbelTopK, ParetoSampling])
def test_order_sampling(design, n, scale, monkeypatch):
    """Log-probabilities, inclusion probabilities and the derivatives of both by the positions, as on an accelerator."""
    monkeypatch.setattr(order_at_once, "FARTHEST", (160.0, 160.0))
    monkeypatch.setattr(order_inclusion_at_once, "MOST", dict.fromkeys(order_inclusion_at_once.MOST, (2**26, 2**26)))
    monkeypatch.setattr(order_inclusion_at_once, "ELEMENTS", (2**26, 2**26))
    logits = (scale * torch.randn(16, n, generator=torch.Generator().manual_seed(0))).requires_grad_()
    made, numbers = design(logits=logits, k=K, validate_args=False), design(logits=logits, k=K)
    positions, value = made._positions, made.sample((2,))
    for function, expected in (
        (lambda: made._rounded(made._log_prob(value)), numbers.log_prob(value)),
        (lambda: made.mean, numbers.mean),
    ):
        found, names = launches(function)
        torch.testing.assert_close(found, expected)
        assert names.total() <= 40, names
        names = launches_of_gradient(found, positions)
        assert names.total() <= 40, names
