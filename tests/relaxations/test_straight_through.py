"""straight_through_topk: the value of topk_mask, the derivatives of the relaxation."""

import pytest
import torch

from khot import sigmoid_topk, sparse_topk, straight_through_topk, straight_through_value, topk_mask
from tests.loops import for_each


@for_each("relaxation", [sigmoid_topk, sparse_topk])
@for_each("dim", [-1, 0])
def test_value_and_gradients(relaxation, dim):
    torch.manual_seed(0)
    x = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([0.0, 1.2, 2.0, 3.8, 5.0], dtype=torch.float64, requires_grad=True)
    softness = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y, relaxed = (
        straight_through_topk(x, k, softness, dim=dim, relaxation=relaxation),
        relaxation(x, k, softness, dim=dim),
    )
    assert torch.equal(y, topk_mask(x, torch.tensor([0, 1, 2, 4, 5]), dim=dim))
    cotangent = torch.randn(5, 5, dtype=torch.float64)
    for gradient, expected in zip(
        *(torch.autograd.grad(v, (x, k, softness), cotangent) for v in (y, relaxed)), strict=True
    ):
        torch.testing.assert_close(gradient, expected)


def test_defaults_and_errors():
    x = torch.randn(3, 6)
    assert torch.equal(straight_through_topk(x, 2), topk_mask(x, 2))
    with pytest.raises(ValueError, match="`k` must satisfy 0 <= k <= n, but got k=7"):
        straight_through_topk(x, 7)
    with pytest.raises(ValueError, match="`softness` must be positive"):
        straight_through_topk(x, 2, -1.0)
    with pytest.raises(TypeError, match="`x` must be a torch.Tensor"):
        straight_through_topk([1.0, 2.0], 1)
    with pytest.raises(TypeError, match="`relaxation` must be a function"):
        straight_through_topk(x, 2, relaxation=1)


def test_value_broadcasts_and_keeps_the_dtype_of_the_hard_one():
    soft = torch.tensor([0.2, 0.8], dtype=torch.float64, requires_grad=True)
    y = straight_through_value(torch.ones(3, 2), soft)
    assert y.dtype == torch.float32 and torch.equal(y, torch.ones(3, 2))
    assert torch.autograd.grad(y.sum(), soft)[0].tolist() == [3.0, 3.0]


def test_value_has_derivatives_of_every_order_in_both_modes():
    soft = torch.tensor([0.2, 0.8], dtype=torch.float64)

    def cubed(soft):
        return straight_through_value(soft.detach().round(), soft**3).sum()

    torch.testing.assert_close(torch.func.hessian(cubed)(soft), (6 * soft).diag())
    torch.testing.assert_close(torch.func.jacfwd(cubed)(soft), 3 * soft**2)


@for_each(
    "hard, soft, error, message",
    [
        (1.0, torch.ones(2), TypeError, "`hard` must be a torch.Tensor, but got float"),
        (
            torch.ones(2),
            torch.ones(2).long(),
            TypeError,
            "`soft` must have a floating-point dtype, but got torch.int64",
        ),
        (torch.ones(2), torch.ones(3), ValueError, "`soft` must broadcast to the shape"),
        (torch.ones(2), torch.ones(3, 2), ValueError, "`soft` must broadcast to the shape"),
    ],
)
def test_value_errors(hard, soft, error, message):
    with pytest.raises(error, match=message):
        straight_through_value(hard, soft)
