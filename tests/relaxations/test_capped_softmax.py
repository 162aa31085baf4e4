"""capped_softmax: softmax at k = 1, probabilities proportional to size with take-all units, a maximiser."""

import pytest
import torch

from khot import ConditionalPoisson, capped_softmax, sparse_topk
from tests.inputs import normal
from tests.loops import for_each

float64 = torch.float64
EPS = torch.finfo(float64).eps


@for_each("scale", [1.0, 100.0])
@for_each("temperature", [0.3, 2.0])
def test_is_softmax_for_k_1(scale, temperature):
    x, weight = normal(3, 20, scale=scale).requires_grad_(), normal(3, 20, seed=1)
    y, expected = capped_softmax(x, 1, temperature), torch.softmax(x / temperature, -1)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-15)
    left, right = (torch.autograd.grad((v * weight).sum(), x)[0] for v in (y, expected))
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-13)


def take_all(size, k):
    """By the textbook: units whose share exceeds 1 are taken, the others share what is left, again and again."""
    certain = torch.zeros_like(size, dtype=torch.bool)
    while True:
        rest = size.masked_fill(certain, 0.0)
        probs = torch.where(certain, 1.0, rest * ((k - certain.sum()) / rest.sum()))
        if (probs <= 1).all():
            return probs
        certain = probs >= 1


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("k", "spread"), [(1, 0.1), (1, 4.0), (7, 1.0), (7, 4.0), (30, 0.1), (49, 1.0), (49, 4.0), (12.5, 0.1), (12.5, 4.0)]
)
def test_is_proportional_to_size_beside_take_all_units(k, spread):
    size = normal(50, scale=spread).exp()
    probs = capped_softmax(size.log(), k)
    torch.testing.assert_close(probs, take_all(size, k), rtol=1e-12, atol=1e-14)


@for_each("spread", [1.0, 4.0])
def test_are_probabilities_of_a_design(spread):
    probs = capped_softmax(normal(50, scale=spread), 7)
    assert ConditionalPoisson(probs=probs, k=7).sample().sum() == 7


@for_each("temperature", [0.3, 2.0])
def test_maximises_the_regularised_score(temperature):
    """No step towards another feasible point improves <x, y> - temperature sum y log y."""
    x = normal(8)

    def objective(y):
        return y @ x - temperature * torch.special.xlogy(y, y).sum(-1)

    y = capped_softmax(x, 3.4, temperature)
    others = sparse_topk(2 * normal(200, 8, seed=1), 3.4)
    for step in (1.0, 1e-2, 1e-4):
        assert (objective(y + step * (others - y)) <= objective(y) + 1e-14).all()


@pytest.mark.interpreted
def test_take_all_units_have_no_gradient():
    x = torch.tensor([0.0, 1.0, 5.0, 5.0], dtype=float64, requires_grad=True)
    y = capped_softmax(x, 3)
    assert (y[2:] == 1).all()
    assert torch.autograd.grad(y @ normal(4), x)[0][2:].tolist() == [0, 0]


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, float64], ids=str)
def test_where_all_units_are_taken_nothing_has_a_gradient(dtype):
    x, k = normal(6, dtype=dtype).requires_grad_(), torch.tensor(6.0, dtype=float64, requires_grad=True)
    y = capped_softmax(x, k)
    assert y.tolist() == [1] * 6
    gradients = torch.autograd.grad(y @ normal(6, dtype=dtype), (x, k))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, float64], ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4, 1e8])
def test_extreme_gaps(dtype, scale):
    x = scale * torch.tensor([3.0, 3.0, 1.0, 0.0, -2.0], dtype=dtype)
    for k in (0.5, 1.0, 2.0, 2.5, 4.0, 4.999):
        value = x.clone().requires_grad_()
        y = capped_softmax(value, k)
        (gradient,) = torch.autograd.grad(y @ x.new_tensor([1.0, 2, 3, 4, 5]), value)
        assert y.isfinite().all() and gradient.isfinite().all()
        assert y.double().sum().item() == pytest.approx(
            k, rel=4 * torch.finfo(dtype).eps + 4 * EPS * 3 * scale
        )  # rounding of t
