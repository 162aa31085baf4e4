"""Hooks for saved tensors, such as those of activation checkpoints and of offloading to the host, change no result."""

import functools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from khot.distributions import Sampford
from khot.estimators import StraightThrough
from tests.every_map import MAPS, AnyMap
from tests.inputs import normal
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, PERTURBED, PHANTOM, RELAXED, DesignCase

pytestmark = [
    pytest.mark.usefixtures("cpu_backend"),
    pytest.mark.needs_torch("2.8"),  # earlier, hooks cannot be suspended, and transforms of torch.func refuse them
]


def check(function):
    """The function of scores (2, 5), with the same random numbers in each call, has the same derivatives in hooks."""
    x = normal(2, 5).requires_grad_()

    def call(x):
        torch.manual_seed(0)
        result = function(x)
        return (result * normal(*result.shape, seed=1)).sum()

    def derivatives():
        (first,) = torch.autograd.grad(call(x), x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), x)[0] if first.requires_grad else torch.zeros_like(x)
        return first.detach(), second

    expected = derivatives()
    (grad,) = torch.autograd.grad(checkpoint(call, x, use_reentrant=False), x)
    torch.testing.assert_close(grad, expected[0])
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        found = derivatives()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", [case for case in MAPS if case.differentiable], ids=lambda case: case.name)
def test_maps(case: AnyMap):
    check(lambda x: case.call(x, 0.7))


def members(case: DesignCase):
    """The results of a design that have a gradient."""
    yield "mean", lambda design: design.mean
    yield "draw", lambda design: StraightThrough(design).rsample()
    if case.has_log_prob:
        yield "log_prob", lambda design: design.log_prob(design.sample())
        yield "entropy", lambda design: design.entropy()
        yield "covariance_matrix", lambda design: design.covariance_matrix


@pytest.mark.parametrize(
    ("case", "member"),
    [
        pytest.param(case, member, id=f"{case.name}-{name}", marks=[pytest.mark.slow] if case.slow else [])
        for case in DESIGNS
        for name, member in members(case)
    ],
)
def test_designs(case: DesignCase, member):
    check(lambda x: member(case.make(logits=x, k=2)))


def test_phantom_unit():
    check(lambda x: PHANTOM.make(logits=x, k=2).mean)


@pytest.mark.parametrize("case", RELAXED, ids=lambda case: case.public.__name__)
def test_relaxed(case):
    check(lambda x: case.public(0.5, logits=x, k=2).rsample())


@pytest.mark.parametrize("case", ESTIMATORS, ids=lambda case: case.name)
@pytest.mark.parametrize("design", DESIGNS, ids=lambda case: case.name)
def test_draws_of_estimators(case, design: DesignCase):
    check(lambda x: case.wrap(design.make(logits=x, k=2)).rsample((3,)))


@pytest.mark.parametrize("case", PERTURBED, ids=lambda case: case.name)
def test_perturbed(case):
    law = functools.partial(case.make, k=2)
    check(lambda x: law(logits=x).rsample((3,)))


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_functions(case):
    def loss(values):
        return values[..., 0] * values[..., 1] + values.cumsum(-1).square().sum(-1)

    check(lambda x: case.estimate(Sampford(logits=x, k=2), loss, 2))
