"""sparse_topk_signed against 60-digit arithmetic, as a maximiser, and on both sides of its inequality."""

import pytest
import torch

from khot import sparse_topk, sparse_topk_signed, topk_mask
from tests.loops import for_each
from tests.oracle import cases, tensor

EXPONENTS = {"2": 2.0, "3/2": 1.5, "4/3": 4 / 3}


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@for_each("case", [c for c in cases("sparse_topk_magnitude") if c["kind"] == "signed_mask"])
def test_oracle(case, dtype):
    eps, single = torch.finfo(dtype).eps, dtype == torch.float32
    x = tensor(case["x"], dtype).requires_grad_()
    k = torch.tensor(float(case["k"]), dtype=torch.float64, requires_grad=True)
    strength = torch.tensor(float(case["lam"]), dtype=torch.float64, requires_grad=True)
    y, expected = sparse_topk_signed(x, k, strength, EXPONENTS[case["p"]]), tensor(case["y"])
    size = 1 + (x.abs().max() / strength).item()  # the oracles' A

    assert (y.double() - expected).abs().max() <= 64 * eps * size
    assert torch.equal(y == 0, expected == 0) and torch.equal(y.abs() == 1, expected.abs() == 1)
    grads = torch.autograd.grad(y, (x, k, strength), tensor(case["g"], dtype))
    for grad, name in zip(grads, ("vjp_x", "vjp_k", "vjp_lam"), strict=True):
        if case[name] is None:
            assert name == "vjp_k" and grad == 0
            continue
        reference = tensor(case[name] if name == "vjp_x" else [case[name]]).reshape(grad.shape)
        assert ((grad.double() - reference).abs() <= (1e-4 if single else 1e-10) * (1 + reference.abs())).all(), name


@for_each("p", [2.0, 4 / 3, 1.73])
@for_each("strength", [0.3, 6.0])  # the constraint binds, and does not
def test_maximises_the_regularised_score(p, strength):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, generator=generator, dtype=torch.float64)

    def objective(y):
        return y @ x - strength / p * y.abs().pow(p).sum(-1)

    y = sparse_topk_signed(x, 3.4, strength, p)
    assert (y.abs().sum() < 3.39) == (strength == 6.0)
    others = sparse_topk_signed(3 * torch.randn(200, 8, generator=generator, dtype=torch.float64), 3.4, 1.0)
    assert (others.abs().sum(-1) <= 3.4 + 1e-12).all()
    for step in (1.0, 1e-2, 1e-4):
        assert (objective(y + step * (others - y)) <= objective(y) + 1e-14).all()


@for_each("p", [2.0, 1.5])
def test_binding_or_not(p):
    x = torch.tensor([1.0, -2.0, 0.3, -0.1], dtype=torch.float64, requires_grad=True)
    k = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = sparse_topk_signed(x, k, 0.8, p)
    torch.testing.assert_close(y, x.sign() * sparse_topk(x.abs(), k, 0.8, p))
    assert torch.autograd.grad(y.abs().sum(), k)[0].item() == pytest.approx(1.0)
    y = sparse_topk_signed(x, k, 4.0, p)
    torch.testing.assert_close(y, x.sign() * (x.abs() / 4).clamp(0, 1) ** (1 / (p - 1)))
    assert torch.autograd.grad(y.abs().sum(), k)[0] == 0
    assert torch.equal(sparse_topk_signed(x, 4, 0.05, p), x.sign())
    assert (sparse_topk_signed(x, 0, 0.8, p) == 0).all()


@for_each("p", [2.0, 4 / 3])
def test_limits_and_order(p):
    x = torch.randn(5, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(sparse_topk_signed(x, 7, 1e-9, p), x.sign() * topk_mask(x.abs(), 7))
    y = sparse_topk_signed(x, 6.5, 0.8, p)
    torch.testing.assert_close(y.abs().sum(-1), torch.full((5,), 6.5).double())
    assert (y.abs().gather(-1, x.abs().argsort(-1)).diff(dim=-1) >= 0).all()
    torch.testing.assert_close(sparse_topk_signed(-x, 6.5, 0.8, p), -y)


@pytest.mark.parametrize("p", [2.0, *(pytest.param(p, marks=pytest.mark.slow) for p in (1.7, 1.1))])
def test_extreme_inputs(p):
    base = torch.randn(1, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one = torch.zeros(1, 50, dtype=torch.float64).index_fill(1, torch.tensor([7]), 0.3)
    for x in (1e4 * base, 1e-8 * base, base + 1e4, 0 * base, 1e30 * base, 1e38 * base.clamp(-1, 1), one, 0 * base + 1):
        for dtype in (torch.float32, torch.float64):
            k, strength = torch.cartesian_prod(torch.tensor([0.3, 9.0, 49.999, 50.0]), torch.tensor([1e-4, 1.0, 1e4])).T
            inputs = [v.detach().requires_grad_() for v in (x.to(dtype).expand(12, 50), k, strength)]
            y = sparse_topk_signed(*inputs, p)
            grads = torch.autograd.grad((y * base.to(dtype)).sum(), inputs)
            assert (y.abs() <= 1).all() and all(grad.isfinite().all() for grad in grads)


def test_refuses_infinities():
    with pytest.raises(ValueError, match=r"`x` must be finite \(0 masks an entry\), but row 0"):
        sparse_topk_signed(torch.tensor([1.0, -torch.inf]), 1)
