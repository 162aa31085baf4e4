"""Every map and loss where tensors have no numbers in them: meta tensors, FakeTensorMode, another default device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from khot import fenchel_young_topk_loss, topk_cross_entropy
from tests.every_map import MAPS, quick_first
from tests.inputs import normal


def softnesses(x):
    """A number, one for all rows, one for each."""
    one, each = (torch.full(shape, 0.7, device=x.device, requires_grad=True) for shape in ((), x.shape[:-1]))
    return [0.7, one, each]


def outcome(case, x, softness):
    """The map, its gradients, and the gradient of these."""
    x = x.detach().requires_grad_()
    y = case.call(x, softness)
    if not case.differentiable:
        return [y]
    leaves = [x, *([softness] if isinstance(softness, torch.Tensor) else [])]
    first = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    again = torch.autograd.grad(case.call(x, softness).square().sum(), leaves, allow_unused=True, create_graph=True)
    moving = [grad for grad in again if grad is not None and grad.requires_grad]
    second = torch.autograd.grad(sum(grad.square().sum() for grad in moving), x, allow_unused=True) if moving else []
    return [y, *first, *again, *second]


def described(results, device=None):
    return [None if v is None else (v.shape, v.dtype, device or v.device.type) for v in results]


@pytest.mark.parametrize("case", MAPS, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "calls",
    quick_first(
        {
            "a number, one for all": [(normal(3, 6).float(), 0), (normal(6, 3).T, 1)],
            "one for each, no rows of half precision": [(normal(3, 6).float(), 2), (normal(0, 6).half(), 2)],
        }
    ),
)
def test_shapes_of_maps_and_gradients(case, calls):
    for x, i in calls:
        results = outcome(case, x, softnesses(x)[i])
        meta = x.to("meta")
        assert described(outcome(case, meta, softnesses(meta)[i])) == described(results, "meta")
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            assert described(outcome(case, fake, softnesses(fake)[i])) == described(results)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[] if case.name in ("topk_mask", "successive_softmax_topk") else [pytest.mark.slow],
        )
        for case in MAPS
    ],
)
def test_default_device_does_not_matter(case):
    x = normal(3, 6)
    for i, softness in enumerate(softnesses(x)):
        expected = outcome(case, x, softness)
        with torch.device("meta"):
            results = outcome(case, x, softnesses(x)[i])
        assert described(results) == described(expected)
        torch.testing.assert_close([v for v in results if v is not None], [v for v in expected if v is not None])


def mask_loss(x):
    target = torch.zeros_like(x)
    target[..., :2] = 1
    return fenchel_young_topk_loss(x, target, 2)


def magnitude_loss(x):
    return fenchel_young_topk_loss(x, x.detach() / 2, torch.full((3,), 2.0, device=x.device), 0.5, 1.5, "magnitude")


def signed_loss(x):
    return fenchel_young_topk_loss(x, torch.zeros_like(x), 2, kind="signed", reduction="sum")


def cross_entropy(x):
    return topk_cross_entropy(x, torch.zeros(3, dtype=torch.long, device=x.device), [0.5, 0.0, 0.5])


@pytest.mark.parametrize("loss", [mask_loss, magnitude_loss, signed_loss, cross_entropy])
def test_losses(loss):
    def results(x):
        x = x.detach().requires_grad_()
        value = loss(x)
        return [value, *torch.autograd.grad(value, x)]

    x = normal(3, 6)
    expected = results(x)
    assert described(results(x.to("meta"))) == described(expected, "meta")
    with FakeTensorMode() as mode:
        assert described(results(mode.from_tensor(x))) == described(expected)
    with torch.device("meta"):
        torch.testing.assert_close(results(x), expected)
