"""What every loss promises, checked for each member of the registry, and members that break it."""

import copy

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from tests.inputs import normal
from tests.loops import for_each
from tests.maps import members
from tests.registry import LOSSES


def check_value(case):
    for seed, softness in enumerate((0.4, 1.0, 3.0)):
        x, target = normal(8, 6, seed=seed), case.targets(seed + 50, 8)
        expected = torch.tensor([case.value(row, t, softness) for row, t in zip(x, target, strict=True)]).double()
        torch.testing.assert_close(case.function(x, target, softness, "none"), expected, rtol=1e-6, atol=1e-7)


def check_reductions(case):
    x, target = normal(4, 6), case.targets(1, 4)
    rows = case.function(x, target, 0.7, "none")
    assert rows.shape == (4,) and (rows > 0).all() and rows.std() > 0
    for reduction, expected in (("none", rows), ("sum", rows.sum()), ("mean", rows.mean())):
        torch.testing.assert_close(case.function(x, target, 0.7, reduction), expected)
        torch.testing.assert_close(case.module(0.7, reduction)(x, target), expected)
    torch.testing.assert_close(case.function(x, target), case.function(x, target, 1.0, "mean"))
    for wrong in ("avg", None):
        with pytest.raises(ValueError, match="`reduction` must be 'none', 'mean' or 'sum', but got"):
            case.function(x, target, 0.7, wrong)


def check_batch_equals_loop(case):
    x, target, softness = normal(4, 6), case.targets(1, 4), torch.tensor([0.3, 0.7, 1.0, 2.0]).double()
    rows = case.function(x, target, softness, "none")
    for i in range(4):
        torch.testing.assert_close(case.function(x[i], target[i], softness[i].item()), rows[i])
    square = case.function(x.view(2, 2, 6), target.view(2, 2, *target.shape[1:]), softness.view(2, 2), "none")
    torch.testing.assert_close(square, rows.view(2, 2))
    mapped = torch.func.vmap(lambda x, t, s: case.function(x, t, s))(x, target, softness)
    torch.testing.assert_close(mapped, rows)
    columns = case.function(x.T.contiguous().T, target, softness, "none")
    torch.testing.assert_close(columns, rows)


def check_derivatives(case):
    x, softness = normal(3, 6).requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    target = case.targets(1, 3)
    assert gradcheck(lambda x, s: case.function(x, target, s, "none"), (x, softness), check_forward_ad=True)
    assert gradgradcheck(lambda x, s: case.function(x, target, s, "none"), (x, softness))


def check_scores_are_relative(case):
    """Adding a constant to all scores changes nothing, even if float32 has few digits left."""
    x, target = normal(5, 6, dtype=torch.float32), case.targets(2, 5)
    far = (x + 1e4).requires_grad_()
    exact = far.detach().double().requires_grad_()
    loss, expected = case.function(far, target), case.function(exact, target)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(case.function(exact.detach() - 1e4, target), expected, rtol=1e-9, atol=1e-9)
    grads = torch.autograd.grad(loss, far)[0].double(), torch.autograd.grad(expected, exact)[0]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def check_dtypes(case):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x, target = normal(5, 6, dtype=dtype).requires_grad_(), case.targets(2, 5)
        loss = case.function(x, target)
        (grad,) = torch.autograd.grad(loss, x)
        assert loss.dtype == grad.dtype == dtype and grad.isfinite().all()
        exact = case.function(x.detach().double(), target).item()
        assert loss.item() == pytest.approx(exact, rel=2 * torch.finfo(dtype).eps)


def check_inputs_untouched_and_empty_batches(case):
    x, target = normal(4, 6).requires_grad_(), case.targets(1, 4)
    kept = copy.deepcopy((x, target))
    case.function(x, target).backward()
    assert torch.equal(x, kept[0]) and torch.equal(target, kept[1])
    empty = torch.zeros(0, 6, requires_grad=True)
    for reduction, shape in (("none", (0,)), ("sum", ())):
        loss = case.function(empty, target[:0], 1.0, reduction)
        assert loss.shape == shape and torch.autograd.grad(loss.sum(), empty)[0].shape == (0, 6)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize(("case", "check"), members(LOSSES, CHECKS, costly=(check_derivatives,)))
def test_contract(case, check):
    check(case)


def with_function(case, wrong):
    twin = copy.copy(case)
    vars(twin)["function"] = wrong(case.function)  # in the place of the method
    return twin


def off_by_a_constant(loss):
    return lambda x, target, softness=1.0, reduction="mean": loss(x, target, softness, reduction) + 1e-3


def detached_softness(loss):
    return lambda x, target, softness, reduction: loss(x, target, softness.detach(), reduction) + 0 * softness


def absolute_scores(loss):
    return lambda x, target: loss(x, target) + 1e-6 * x.square().mean()


def in_other_units(loss):
    return lambda x, target, softness=1.0, reduction="mean": 1.001 * loss(x, target, softness, reduction)


@for_each(
    "wrong, check",
    [
        (off_by_a_constant, check_value),
        (in_other_units, check_reductions),
        (detached_softness, check_derivatives),
        (absolute_scores, check_scores_are_relative),
    ],
)
@for_each("case", LOSSES)
def test_contract_rejects(wrong, check, case):
    with pytest.raises((AssertionError, GradcheckError)):
        check(with_function(case, wrong))
