"""Users can write into results in place, as with torch's own functions, and autograd stays correct."""

import pytest
import torch

from khot.estimators import StraightThrough
from tests.every_map import MAPS, AnyMap
from tests.inputs import normal
from tests.registry import DESIGNS, DesignCase

pytestmark = pytest.mark.usefixtures("cpu_backend")


def check(function, x):
    """Twice the result has twice the gradient, and writing is no error that speaks of views."""
    weight = normal(*function(x).shape, seed=1)
    (wanted,) = torch.autograd.grad((function(x) * weight).sum(), x)
    result = function(x)
    result *= 2
    (grad,) = torch.autograd.grad((result * weight).sum(), x)
    torch.testing.assert_close(grad, 2 * wanted)


@pytest.mark.parametrize("learned", [False, True], ids=["number", "learned"])
@pytest.mark.parametrize("case", [case for case in MAPS if case.differentiable], ids=lambda case: case.name)
def test_maps(case: AnyMap, learned):
    softness = torch.full((2,), 0.7, dtype=torch.float64, requires_grad=True) if learned else 0.7
    check(lambda x: case.call(x, softness), normal(2, 6).requires_grad_())


@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_designs(case: DesignCase):
    def make(x):
        return case.make(logits=x, k=2)

    logits = normal(2, 5).requires_grad_()
    check(lambda x: make(x).mean, logits)
    check(lambda x: StraightThrough(make(x)).rsample(), logits)
    if case.has_log_prob:
        value = make(logits.detach()).mode
        check(lambda x: make(x).log_prob(value), logits)
    if case.has_entropy:
        check(lambda x: make(x).entropy(), logits)
