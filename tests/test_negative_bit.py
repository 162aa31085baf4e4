"""A tensor may be the negative of what lies in memory, as torch makes it of the imaginary part of a conjugate.

It is contiguous and looks like any other, so that a loop that reads memory must be given another one.
"""

import pytest
import torch

from tests.every_map import MAPS, AnyMap
from tests.inputs import normal
from tests.registry import DESIGNS, LOSSES, DesignCase

pytestmark = pytest.mark.usefixtures("cpu_backend")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def negated(x):
    """The same numbers as x, stored as their negatives."""
    found = torch._neg_view(-x.detach())
    assert found.is_neg() and found.is_contiguous() and found.equal(x)
    return found


def check(function, *arguments):
    """``function`` and its gradients are the same for each argument, for all of them and for cotangents."""
    wanted, wanted_grads = values_and_gradients(function, arguments, lambda x: x)
    for i in range(len(arguments)):
        given = tuple(negated(x) if j == i else x for j, x in enumerate(arguments))
        assert_equal(values_and_gradients(function, given, lambda x: x), wanted, wanted_grads)
    given = tuple(map(negated, arguments))
    assert_equal(values_and_gradients(function, given, negated), wanted, wanted_grads)
    assert_equal(values_and_gradients(function, arguments, negated), wanted, wanted_grads)


def values_and_gradients(function, arguments, cotangent):
    leaves = [x.detach().requires_grad_() for x in arguments]
    assert [x.is_neg() for x in leaves] == [x.is_neg() for x in arguments]
    value = function(*leaves)
    if not value.requires_grad:
        return value, []
    pull = cotangent(normal(*value.shape, seed=3, dtype=value.dtype))
    return value.detach(), torch.autograd.grad(value, leaves, pull, allow_unused=True)


def assert_equal(found, wanted, wanted_grads):
    value, grads = found
    torch.testing.assert_close(value, wanted)
    for grad, expected in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, expected)


@DTYPES
@pytest.mark.parametrize("case", MAPS, ids=lambda case: case.name)
def test_maps(case: AnyMap, dtype):
    x, softness = normal(2, 6, dtype=dtype), torch.tensor([0.7, 1.3], dtype=torch.float64)
    check(lambda x: case.call(x, 0.7), x)
    check(case.call, x, softness)
    with torch.no_grad():
        torch.testing.assert_close(case.call(negated(x), 0.7), case.call(x, 0.7))


@DTYPES
@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_designs(case: DesignCase, dtype):
    logits = normal(2, 5, dtype=dtype)

    def make(x):
        return case.make(logits=x, k=2)

    def drawn(x):
        torch.manual_seed(0)
        return make(x).sample((3,))

    check(lambda x: make(x).mean, logits)
    check(drawn, logits)
    if case.has_log_prob:
        value = make(logits).mode
        check(lambda x: make(x).log_prob(value), logits)
        torch.testing.assert_close(make(logits).log_prob(negated(value)), make(logits).log_prob(value))
    if case.has_entropy:
        check(lambda x: make(x).entropy(), logits)


@DTYPES
@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_losses(case, dtype):
    x, target = normal(3, 6, dtype=dtype), case.targets(1, 3)
    check(lambda x: case.function(x, target, 0.7, "none"), x)
