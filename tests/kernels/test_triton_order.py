"""The order maps through their Triton kernels: on an accelerator, or in the interpreter in a process made for it."""

import pytest
import torch

from tests.kernels.device import DEVICE, kernel_marks

pytestmark = kernel_marks()


import khot.kernels
from khot import soft_permutation, soft_rank, soft_sort
from khot.kernels.order import LONGEST_ON_CHIP, slice_weights, slice_weights_derivative, torch_sums, triton_rank
from khot.kernels.order import soft_rank as soft_rank_backends
from khot.kernels.order import triton_scans as lapsum_triton
from tests.inputs import normal

MAPS = [soft_rank, soft_sort, soft_permutation]
every_map = pytest.mark.parametrize("order_map", MAPS, ids=lambda order_map: order_map.__name__)


def on_device(*shape, **options):
    return normal(*shape, **options).to(DEVICE)


def against_torch(function, *arguments):
    found = function(*arguments)
    with khot.kernels.backend("torch"):
        expected = function(*arguments)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("order_map", [soft_rank, soft_sort], ids=["rank", "sort"])
def test_rows_beyond_the_chip(order_map):
    x, scale = on_device(2, 1100), torch.tensor([0.3, 1e-3], device=DEVICE).double()
    x[0, [3, 70, 71]] = torch.tensor([-1e17, 1e300, -1e300], device=DEVICE, dtype=torch.float64)
    x.requires_grad_()
    assert x.shape[-1] > LONGEST_ON_CHIP

    def both(x, scale):
        y = order_map(x, scale)
        return y, *torch.autograd.grad((y * on_device(2, 1100, seed=1)).sum(), x)

    against_torch(both, x, scale)


def test_more_tiles_than_are_composed_at_a_time(monkeypatch):
    monkeypatch.setattr(lapsum_triton, "CARRIES", 2)
    gap, left, right = on_device(2, 5000, scale=0.1).abs(), on_device(2, 5000), on_device(2, 5000, seed=1)
    gap[:, 0] = gap[:, 1234] = torch_sums.FAR
    found, expected = lapsum_triton.decayed_sums(None, gap, left, right), torch_sums.sums_by_doubling(gap, left, right)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@every_map
def test_derivatives_of_every_kind(order_map):
    x, scale = on_device(2, 5).requires_grad_(), on_device(2).abs().requires_grad_()
    assert soft_rank_backends.find(x) is triton_rank.SOFT_RANK

    def derivatives(x, scale):
        y = order_map(x, scale)
        first = torch.autograd.grad(y.square().sum(), (x, scale), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, scale))
        directions = torch.stack([torch.ones_like(y), y.detach()])
        batched = torch.autograd.grad(order_map(x, scale), (x, scale), directions, is_grads_batched=True)
        _, forward = torch.func.jvp(order_map, (x.detach(), scale.detach()), (x.detach(), scale.detach()))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
            tangent = torch.autograd.forward_ad.unpack_dual(order_map(dual, 0.5)).tangent
        alone = torch.autograd.grad(order_map(x.detach(), scale).square().sum(), scale)
        return *first, *second, *batched, forward, tangent, *alone

    against_torch(derivatives, x, scale)


@every_map
def test_ties_and_symmetry(order_map):
    """F is an integer where items tie, and points and items must agree on the side they are on."""
    x = torch.tensor([[-1.0, 0, 0, 1], [2, 2, 2, 2], [0.1, 0.3, 0.3, 0.5], [-9, 3, 3, 15]], device=DEVICE).double()
    x = torch.cat([x, x / 3, -x], -1).requires_grad_()

    def both(x):
        y = order_map(x, 0.7)
        return y, *torch.autograd.grad((y * torch.arange(12.0, device=DEVICE)).sum(), x)

    against_torch(both, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_permutation_is_doubly_stochastic(dtype):
    """Also far from 0 in units of the scale, where float32 cannot represent the distances."""
    x = on_device(1, 140, dtype=dtype)
    for scale in (1e-5, 0.05, 1e4):
        matrix = soft_permutation(x, scale)
        assert (matrix >= 0).all()
        for dim in (-1, -2):
            error = (matrix.double().sum(dim) - 1).abs().max().item()
            assert error <= (1e-6 if dtype == torch.float32 else 1e-13)


def test_slices_of_any_cuts():
    """Also if no items, or many, lie between two cuts."""
    values, order = on_device(2, 40).sort(-1)
    t, grad = (3 * on_device(2, 39, seed=1)).sort(-1).values, on_device(2, 40, 40)
    scale = torch.tensor([[1.0], [0.3]], device=DEVICE).double()
    anchor = torch.randint(40, (2, 39), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    below = torch.searchsorted(values, t)
    cuts = values.gather(-1, anchor)
    cuts = values, scale, order, cuts, (t - cuts) / scale
    against_torch(lambda: (slice_weights(*cuts, below, torch.float64), *slice_weights_derivative(*cuts, grad)))
