"""The pathwise estimators as functions: value and gradient of the mean of f over draws by rsample."""

import pytest
import torch

from khot import ConditionalPoisson, Pivotal, StraightThrough, pathwise, straight_through
from tests.loops import for_each

LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1], [1.0, 0.3, -0.2, 0.8]], dtype=torch.float64)


@for_each("make", [ConditionalPoisson, Pivotal])
def test_is_the_mean_of_f_over_draws_by_rsample(make):
    weight = torch.tensor([[0.3, 1.0, -0.5, 2.0], [0.1, 0.7, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    logits, drawn = LOGITS.clone().requires_grad_(), []

    def f(x):
        drawn.append(x)
        return ((x * weight).sum(-1) - 1).square()

    torch.manual_seed(0)
    surrogate = straight_through(make(logits=logits, k=2), f, num_samples=5)
    torch.manual_seed(0)
    values = make(logits=LOGITS, k=2).sample((5,))
    assert torch.equal(drawn[0], values) and surrogate.shape == (2,)
    torch.testing.assert_close(surrogate, f(values).mean(0))
    cotangent = 2 * ((values * weight).sum(-1, keepdim=True) - 1)
    mean = make(logits=logits, k=2).mean
    (expected,) = torch.autograd.grad((mean * (cotangent * weight).mean(0).detach()).sum(), logits)
    for_logits, for_weight = torch.autograd.grad(surrogate.sum(), (logits, weight))
    torch.testing.assert_close(for_logits, expected)
    torch.testing.assert_close(for_weight, (cotangent * values).mean(0))


def test_design_without_rsample():
    design = ConditionalPoisson(logits=LOGITS, k=2)
    with pytest.raises(NotImplementedError, match=r"ConditionalPoisson has none: wrap it.*score_function"):
        pathwise(design, lambda x: x[..., 0])
    assert pathwise(StraightThrough(design), lambda x: x[..., 0]).shape == (2,)
