"""How a tensor is stored changes no result: hooks for saved tensors, results written into, negatives in memory, NaN.

Each member of each family is a function of scores, and perhaps of a softness.
"""

from contextlib import suppress

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from khot import Sampford, StraightThrough, sigmoid_topk, soft_rank, topk_indices, topk_mask
from tests.every_map import SHORT
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, LOSSES, PERTURBED, PHANTOM, RELAXED

SCORES, SOFTNESS = normal(2, 5), torch.tensor([0.7, 1.3], dtype=torch.float64)


def cubic(values):
    return values[..., 0] * values[..., 1] + values.cumsum(-1).square().sum(-1)


def results_of(case):
    """What a design computes."""
    value = case.make(logits=SCORES, k=2).sample()
    found = [lambda design: design.mean, lambda design: StraightThrough(design, log_prob="none").rsample()]
    if case.has_log_prob:
        found += [lambda design: design.log_prob(value), lambda design: design.entropy()]
        found += [lambda design: design.covariance_matrix]
    return [lambda x, f=f: f(case.make(logits=x, k=2)) for f in found]


CALLS = {
    case.name: [(lambda x, case=case: case.call(x, 0.7), SCORES), (case.call, SCORES, SOFTNESS)]
    for case in SHORT
    if case.differentiable
}
CALLS |= {case.name: [(f, SCORES) for f in results_of(case)] for case in DESIGNS}
CALLS |= {
    "phantom_unit": [(lambda x: PHANTOM.make(logits=x, k=2).mean, SCORES)],
    "relaxed": [(lambda x, case=case: case.public(0.5, logits=x, k=2).rsample(), SCORES) for case in RELAXED],
    "wrappers": [
        (lambda x, case=case: case.wrap(Sampford(logits=x, k=2)).rsample((3,)), SCORES) for case in ESTIMATORS
    ],
    "perturbed": [(lambda x, case=case: case.make(logits=x, k=2).rsample((3,)), SCORES) for case in PERTURBED],
    "functions": [
        (lambda x, case=case: case.estimate(Sampford(logits=x, k=2), cubic, 2), SCORES) for case in FUNCTIONS
    ],
    "losses": [
        (lambda x, case=case: case.function(x, case.targets(1, 2), 0.7, "none"), normal(2, 6)) for case in LOSSES
    ],
}
SLOW = {case.name for case in (*DESIGNS, *SHORT) if case.slow}
every_member = pytest.mark.parametrize(
    "calls",
    [pytest.param(calls, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, calls in CALLS.items()],
)


def pulled(function, arguments, cotangent=lambda x: x):
    """A value that always draws the same, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in arguments]
    torch.manual_seed(0)
    value = function(*leaves)
    weight = cotangent(normal(*value.shape, seed=1, dtype=value.dtype))
    return value.detach(), torch.autograd.grad(value, leaves, weight, materialize_grads=True)


@for_each("function", (sigmoid_topk, topk_mask, soft_rank))
def test_storages_of_scores_can_be_resized(function):
    """As FSDP resizes those of parameters; it could not if a storage were shown to NumPy, not even afterwards."""
    for dtype in (torch.float32, torch.float64):
        x = normal(4, 600, dtype=dtype)  # so many that NumPy sorts
        function(x, *(() if function is soft_rank else (3,)))
        x.untyped_storage().resize_(0)


@for_each("case", DESIGNS)
def test_storages_of_parameters_and_values_can_be_resized(case):
    x, value = normal(3, 7).requires_grad_(), case.make(logits=normal(3, 7), k=3).sample((2,)).clone()
    design = case.make(logits=x, k=3)
    design.sample((2,))
    with suppress(NotImplementedError):
        (design.log_prob(value).sum() + design.entropy().sum()).backward()
    probs = torch.full((3, 6), 0.5, dtype=torch.float64)
    case.make(probs=probs, k=3).sample()
    del design
    for tensor in (x.detach(), value, probs):
        tensor.untyped_storage().resize_(0)


@pytest.mark.needs_torch("2.8")  # earlier, hooks cannot be suspended, and transforms of torch.func refuse them
@every_member
def test_hooks_for_saved_tensors_change_no_derivative(calls):
    """Such as those of activation checkpoints and of offloading to the host."""

    def derivatives(function, x):
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        second = torch.zeros_like(x)
        if first.requires_grad:
            with suppress(NotImplementedError):  # of positions that are solved for
                (second,) = torch.autograd.grad(first.square().sum(), x)
        return first.detach(), second

    for function, scores, *others in calls:
        x = scores.clone().requires_grad_()

        def total(x, function=function, others=others):
            torch.manual_seed(0)
            result = function(x, *others)
            return (result * normal(*result.shape, seed=1)).sum()

        expected = derivatives(total, x)
        (grad,) = torch.autograd.grad(checkpoint(total, x, use_reentrant=False), x)
        torch.testing.assert_close(grad, expected[0])
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            torch.testing.assert_close(derivatives(total, x), expected)


@every_member
def test_results_may_be_written_into(calls):
    """A result that is doubled in place has the gradient of the doubled result; no error speaks of views."""
    for function, *arguments in calls:
        _, expected = pulled(lambda *leaves, f=function: 2 * f(*leaves), arguments)
        _, doubled = pulled(lambda *leaves, f=function: f(*leaves).mul_(2), arguments)
        torch.testing.assert_close(doubled, expected)


def negated(x):
    """The same numbers, stored as their negatives, as the imaginary part of a conjugate: it looks like any tensor."""
    found = torch._neg_view(-x.detach())
    assert found.is_neg() and found.is_contiguous() and found.equal(x)
    return found


@every_member
def test_negatives_in_memory(calls):
    for function, *arguments in calls:
        for dtype in (torch.float32, torch.float64):
            x, *others = arguments[0].to(dtype), *arguments[1:]
            expected = pulled(function, (x, *others))
            for given in [(negated(x), *map(negated, others)), *([(x, *map(negated, others))] if others else [])]:
                torch.testing.assert_close(pulled(function, given), expected)
                torch.testing.assert_close(pulled(function, given, negated), expected)


def test_hard_masks_of_negatives_in_memory():
    for case in (case for case in SHORT if not case.differentiable):
        assert case.call(negated(SCORES), 0.7).equal(case.call(SCORES, 0.7))
    for case in (case for case in DESIGNS if case.has_log_prob):
        design = case.make(logits=SCORES, k=2)
        torch.testing.assert_close(design.log_prob(negated(design.mode)), design.log_prob(design.mode))
        drawn = [case.make(logits=x, k=2).sample((3,), generator=torch.Generator()) for x in (SCORES, negated(SCORES))]
        assert drawn[0].equal(drawn[1])


@for_each("case", [case for case in SHORT if case.public is not topk_indices])  # which does not look beside a window
def test_nan_is_refused(case):
    """Wherever it stands: loops that sum in any order must not optimise it away."""
    for dtype in (torch.float32, torch.float64):
        for n, place in ((5, 0), (9, 8), (40, 17)):
            x = normal(3, n, dtype=dtype)
            x[1, place] = torch.nan
            with pytest.raises(ValueError, match="NaN|must be finite"):
                case.call(x, 0.7)
