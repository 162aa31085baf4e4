"""How many kernels draws and log-probabilities launch on an accelerator that Triton supports."""

import pytest
import torch

from khot import Brewer, Sampford, Systematic, sigmoid_topk
from tests.launches import launches, launches_of_gradient

N, K = 100, 5
PROBS = sigmoid_topk(torch.randn(16, N, generator=torch.Generator().manual_seed(0)), K)


@pytest.mark.parametrize(
    ("design", "options", "most"),
    [
        (Systematic, {"order": "fixed"}, 25),
        (Systematic, {"order": "random"}, 29),
        (Brewer, {}, 5),
        (Sampford, {}, 35),
    ],
)
def test_draws(design, options, most):
    value, names = launches(lambda: design(probs=PROBS, k=K, validate_args=False, **options).sample())
    assert (value.sum(-1) == K).all()
    assert names.total() <= most, names


@pytest.mark.parametrize(
    ("design", "most", "most_of_gradient"), [(Systematic, 31, 41), (Brewer, 64, 100), (Sampford, 42, 49)]
)
def test_log_probabilities(design, most, most_of_gradient):
    """Of values that are known to be k-hot, with what their derivative needs."""
    value, probs = design(probs=PROBS, k=K).sample(), PROBS.clone().requires_grad_()
    log_prob, names = launches(lambda: design(probs=probs, k=K, validate_args=False)._log_prob(value))
    torch.testing.assert_close(log_prob, design(probs=PROBS, k=K).log_prob(value))
    assert names.total() <= most, names
    names = launches_of_gradient(log_prob, probs)
    assert names.total() <= most_of_gradient, names
