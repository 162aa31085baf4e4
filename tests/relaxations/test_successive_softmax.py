"""Successive softmax: its definition, what it promises, and the flaws that its docstring names."""

import itertools

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacrev, vmap

from khot import successive_softmax_topk, topk_mask
from tests.inputs import normal
from tests.loops import for_each

INF = float("inf")


def test_shape_dtype_and_sum():
    x = normal(2, 3, 12)
    for dtype, dim in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), range(-3, 3)):
        y = successive_softmax_topk(x.to(dtype), 2, 0.7, dim=dim)
        assert y.shape == x.shape and y.dtype == dtype and (y >= 0).all()
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            y.double().sum(dim), torch.tensor(2.0).double().expand(y.sum(dim).shape), rtol=tolerance, atol=0
        )
    expected = successive_softmax_topk(x.movedim(1, -1), 2).movedim(-1, 1)
    torch.testing.assert_close(successive_softmax_topk(x, 2, dim=1), expected)
    permutation = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        successive_softmax_topk(x[..., permutation], 5), successive_softmax_topk(x, 5)[..., permutation]
    )
    temperature = torch.tensor([0.3, 1.0, 2.0]).double()
    torch.testing.assert_close(
        successive_softmax_topk(x, 4, temperature)[1, 2], successive_softmax_topk(x[1, 2], 4, 2.0)
    )
    assert successive_softmax_topk(torch.zeros(0, 4), 2).shape == (0, 4)
    assert torch.equal(successive_softmax_topk(x, 0), torch.zeros_like(x))


def test_derivatives():
    x, temperature = normal(2, 5).requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def three(x, temperature):
        return successive_softmax_topk(x, 3, temperature)

    assert gradcheck(three, (x, temperature), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(three, (x, temperature))
    rows = normal(3, 5, seed=1)
    torch.testing.assert_close(vmap(lambda x: successive_softmax_topk(x, 2))(rows), successive_softmax_topk(rows, 2))
    torch.testing.assert_close(
        vmap(jacrev(lambda x: successive_softmax_topk(x, 2)))(rows)[0],
        jacrev(lambda x: successive_softmax_topk(x, 2))(rows[0]),
    )


@for_each("k", [0, torch.tensor(0)])
@for_each("shape", [(5,), (2, 5), (0, 5)])
def test_a_mask_of_nothing_has_a_gradient_of_zero(k, shape):
    """So that a training in which k varies runs its backward pass; also in the temperature alone."""
    x, temperature = torch.randn(shape), torch.tensor(0.7, requires_grad=True)
    leaf = x.masked_fill(x > 1, -torch.inf).requires_grad_()
    for result, wanted in (
        (successive_softmax_topk(leaf, k), leaf),
        (successive_softmax_topk(x, k, temperature), temperature),
    ):
        assert not result.any()
        assert torch.equal(torch.autograd.grad(result.sum(), wanted)[0], torch.zeros_like(wanted))


def test_masked_items():
    x = torch.tensor([0.3, -INF, 1.0, -0.5, -INF, 0.1], dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    finite = x.detach().isfinite()
    for k in (1, 3, 4):
        y = successive_softmax_topk(x, k, temperature)
        assert (y[~finite] == 0).all()
        torch.testing.assert_close(y[finite], successive_softmax_topk(x[finite], k, temperature))
        grads = torch.autograd.grad((y * normal(6)).sum(), (x, temperature))
        assert (grads[0][~finite] == 0).all() and all(grad.isfinite().all() for grad in grads)
    with pytest.raises(ValueError, match="entries above -inf, at least 4"):
        successive_softmax_topk(x, 5)


def test_extreme_inputs():
    base = normal(1, 9)
    inputs = (
        1e4 * base,
        1e-8 * base,
        base + 1e4,
        base - 1e4,
        0 * base,
        1e30 * base,
        torch.cat([base, 0 * base + 1e6], 1),
    )
    for x, k, temperature in itertools.product(inputs, (1, 4, 9), (1e-4, 1.0, 1e4)):
        for dtype in (torch.float32, torch.float64):
            x, soft = x.detach().to(dtype).requires_grad_(), torch.tensor(temperature, dtype=dtype, requires_grad=True)
            y = successive_softmax_topk(x, k, soft)
            torch.testing.assert_close(y.double().sum(), torch.tensor(float(k)).double(), rtol=1e-5, atol=0)
            assert all(grad.isfinite().all() for grad in torch.autograd.grad(y[0, :3].sum(), (x, soft)))


@for_each("dtype", [torch.float32, torch.float64])
@for_each("as_tensor", [False, True])
def test_ratios_to_the_temperature_that_overflow(dtype, as_tensor):
    big = torch.finfo(dtype).max / 4
    rows = [[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [1.0, -1.0, 0.0], [-1.0, -0.5, -0.75], [-INF, -1.0, -1.0]]
    for row, temperature, k in itertools.product(rows, (1e-3, 1.0, 1e30), (0, 1, 2)):
        x, soft = big * torch.tensor(row, dtype=dtype), torch.tensor(temperature, dtype=dtype)
        if not as_tensor:
            soft = temperature

        def weighted(x, soft, k=k):
            return successive_softmax_topk(x, k, soft) @ torch.tensor([1.0, -2.0, 0.5], dtype=dtype)

        y = successive_softmax_topk(x, k, soft)
        torch.testing.assert_close(y.sum(), torch.tensor(k, dtype=dtype))
        for wanted in (0, 1)[: 1 + as_tensor]:
            first = jacrev(weighted, wanted)
            assert first(x, soft).isfinite().all() and jacrev(first)(x, soft).isfinite().all()


def test_definition():
    """alpha <- alpha + log(1 - p), p = softmax(alpha / T), as long as nothing saturates."""
    x, temperature = normal(4, 6), 0.8
    alpha, y = x.clone(), torch.zeros_like(x)
    for _ in range(3):
        p = torch.softmax(alpha / temperature, -1)
        alpha, y = alpha + torch.log(1 - p), y + p
    torch.testing.assert_close(successive_softmax_topk(x, 3, temperature), y)
    torch.testing.assert_close(successive_softmax_topk(x, 1, temperature), torch.softmax(x / temperature, -1))


def test_tends_to_the_hard_mask_however_wide_the_gaps():
    x = torch.tensor([[0.0, 200.0, 1000.0, 3e4], [0.1, 0.4, 0.3, 0.2]])
    for k in range(5):
        torch.testing.assert_close(successive_softmax_topk(x, k, 1e-3), topk_mask(x, k))


@for_each("dtype, temperature", [(torch.float32, 1e-36), (torch.float64, 1e-300)])
def test_tends_to_the_hard_mask_however_small_the_temperature(dtype, temperature):
    x = torch.tensor([[0.1, 0.4, 0.3, 0.2], [3.1, 3.4, 3.3, 3.2]], dtype=dtype, requires_grad=True)
    softness = torch.tensor(temperature, dtype=dtype, requires_grad=True)
    for k in range(5):
        for soft in (temperature, softness):
            torch.testing.assert_close(successive_softmax_topk(x, k, soft), topk_mask(x, k))
        if k > 0:
            y = successive_softmax_topk(x, k, softness)
            assert all(grad.isfinite().all() for grad in torch.autograd.grad(y[:, 1].sum(), (x, softness)))


def test_one_k_per_row():
    x, k = normal(3, 6), torch.tensor([0, 4, 2])
    y = successive_softmax_topk(x, k)
    for row, size in enumerate(k.tolist()):
        torch.testing.assert_close(y[row], successive_softmax_topk(x[row], size))
    for wrong in (1.5, np.float32(2), torch.tensor([1.0, 2.0, 3.0])):
        with pytest.raises(TypeError, match="`k` must be an int"):
            successive_softmax_topk(x, wrong)


@for_each("temperature", [1.0, 0.3, 1e-3])
def test_single_precision_agrees_with_double(temperature):
    """Also where a softmax saturates, in rows beside ordinary ones."""
    spread = torch.tensor([[1e-3], [1.0], [30.0], [0.5], [1e4]]).double()
    x, g = spread * normal(5, 12), normal(5, 12, seed=1)
    x[3, 4:7] = -INF
    for k in (1, 3, 9, torch.tensor([2, 0, 9, 3, 5])):
        single = x.float().requires_grad_()
        double = single.detach().double().requires_grad_()
        y, expected = (successive_softmax_topk(rows, k, temperature) for rows in (single, double))
        grad = torch.autograd.grad(y, single, g.float())[0].double()
        slope = torch.autograd.grad(expected, double, g)[0]
        # The third row spans some 100: its logits are rounded by that many eps / T.
        tolerance = {"rtol": 0, "atol": 150 * torch.finfo(torch.float32).eps / temperature}
        torch.testing.assert_close(y.double(), expected, **tolerance)
        size = 1 + slope.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(grad / size, slope / size, **tolerance)


def test_flaw_entries_above_one():
    y = successive_softmax_topk(torch.tensor([0.0, 1.0]), 2)
    torch.testing.assert_close(y, torch.tensor([0.7689, 1.2311]), rtol=0, atol=1e-4)  # k = n, and not ones


def test_flaw_order_is_not_kept():
    x = torch.tensor([-0.9541, -1.4486, 1.0441, -1.1259, -0.9390, 0.2556])
    y = successive_softmax_topk(x, 2, 0.3)
    assert x[2] > x[5] and y[2] < y[5] - 0.05
