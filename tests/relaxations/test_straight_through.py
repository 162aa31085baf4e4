"""straight_through_topk: the value of topk_mask, the derivatives of the relaxation."""

import pytest
import torch

from khot import sigmoid_topk, sparse_topk, straight_through_topk, topk_mask


@pytest.mark.parametrize("relaxation", [sigmoid_topk, sparse_topk])
@pytest.mark.parametrize("dim", [-1, 0])
def test_value_and_gradients(relaxation, dim):
    torch.manual_seed(0)
    x = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([0.0, 1.2, 2.0, 3.8, 5.0], dtype=torch.float64, requires_grad=True)
    softness = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y, relaxed = straight_through_topk(x, k, softness, dim, relaxation=relaxation), relaxation(x, k, softness, dim=dim)
    assert torch.equal(y, topk_mask(x, torch.tensor([0, 1, 2, 4, 5]), dim))
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
