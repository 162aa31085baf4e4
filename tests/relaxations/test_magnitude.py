"""sparse_topk_magnitude against 60-digit arithmetic, as a maximiser, and within its bound."""

import pytest
import torch
from torch.func import jacfwd, jacrev

from khot import sparse_topk_magnitude, topk_mask
from tests.loops import for_each
from tests.oracle import cases, tensor

EXPONENTS = {"2": 2.0, "3/2": 1.5, "4/3": 4 / 3}


@pytest.mark.usefixtures("cpu_backend")
@for_each("dtype", [torch.float64, torch.float32])
@for_each("case", [c for c in cases("sparse_topk_magnitude") if c["kind"] == "magnitude"])
def test_oracle(case, dtype):
    eps, single = torch.finfo(dtype).eps, dtype == torch.float32
    x = tensor(case["x"], dtype).requires_grad_()
    k = torch.tensor(float(case["k"]), dtype=torch.float64, requires_grad=True)
    strength = torch.tensor(float(case["lam"]), dtype=torch.float64, requires_grad=True)
    y, expected = sparse_topk_magnitude(x, k, strength, EXPONENTS[case["p"]]), tensor(case["y"])
    size = 1 + (x.abs().max() / strength).item()  # the oracles' A

    assert (y.double() - expected).abs().max() <= 64 * eps * size
    assert torch.equal(y == 0, expected == 0)
    grads = torch.autograd.grad(y, (x, k, strength), tensor(case["g"], dtype))
    tolerance = max(1e-4, eps * size) if single else 1e-10
    for grad, name in zip(grads, ("vjp_x", "vjp_k", "vjp_lam"), strict=True):
        if case[name] is None:  # in k, where nothing is pooled: returned as 0
            assert name == "vjp_k" and grad == 0
            continue
        reference = tensor(case[name] if name == "vjp_x" else [case[name]]).reshape(grad.shape)
        assert ((grad.double() - reference).abs() <= tolerance * (1 + reference.abs())).all(), name


def half_squared_k_support_norm(y, k):
    """min over z in [0, 1]^n, sum z = k, of (1/2) sum y^2 / z, by bisection on the level v, z = min(1, abs(y) / v)."""
    a, low, high = y.abs(), torch.zeros(len(y)).double(), y.abs().sum(-1)
    for _ in range(200):
        v = (low + high) / 2
        large = (a / v.unsqueeze(-1)).clamp(max=1).sum(-1) > k
        low, high = torch.where(large, v, low), torch.where(large, high, v)
    return 0.5 * (y.square() / (a / v.unsqueeze(-1)).clamp(1e-300, 1)).sum(-1)


@for_each("p", [2.0, 4 / 3, 1.73, 1.1])
@for_each("strength", [0.05, 0.8])
def test_maximises_the_regularised_score(p, strength):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, generator=generator, dtype=torch.float64)

    def objective(y):
        return y @ x - half_squared_k_support_norm(y, 3.4) - strength / p * y.abs().pow(p).sum(-1)

    y = sparse_topk_magnitude(x, 3.4, strength, p)
    others = y + torch.randn(200, 8, generator=generator, dtype=torch.float64)
    for step in (1.0, 1e-2, 1e-3):
        assert (objective(y + step * (others - y)) < objective(y[None]) + 1e-13).all()


@for_each("p", [2.0, 1.5, 4 / 3])
def test_bound_and_its_condition(p):
    """At most strength * max(abs(x))^(p-1) from the hard map, once the strength is below the gap; not before."""
    x = torch.tensor([3.0, -0.2, 1.0, -2.0, 0.9], dtype=torch.float64)
    hard = x * topk_mask(x.abs(), 3)
    critical = (1.0 - 0.9) / 0.9 ** (p - 1)
    for strength in (1e-6, 0.5 * critical, 0.999 * critical):
        y = sparse_topk_magnitude(x, 3, strength, p)
        assert torch.equal(y == 0, hard == 0)
        torch.testing.assert_close(y.abs() + strength * y.abs() ** (p - 1) * (y != 0), hard.abs())
        assert (y - hard).abs().max() <= strength * 3.0 ** (p - 1)
    close = torch.tensor([1.0, 0.999], dtype=torch.float64)  # a gap far below the strength
    y = sparse_topk_magnitude(close, 1, 0.01, p)
    assert y[1] > 0.3 and 1 - y[0] > 0.3


@for_each("p", [2.0, 4 / 3, 1.7])
def test_limits_and_order(p):
    x = torch.randn(5, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(sparse_topk_magnitude(x, 7, 1e-9, p), x * topk_mask(x.abs(), 7), rtol=0, atol=1e-7)
    assert sparse_topk_magnitude(x, 7, 1e9, p).abs().max() < 1e-6
    y = sparse_topk_magnitude(x, 6.5, 0.8, p)
    assert (y * x >= 0).all() and (y.abs() <= x.abs()).all()
    assert (y.abs().gather(-1, x.abs().argsort(-1)).diff(dim=-1) >= 0).all()
    torch.testing.assert_close(sparse_topk_magnitude(-x, 6.5, 0.8, p), -y)
    everything = sparse_topk_magnitude(x, 30, 0.8, p).abs()
    torch.testing.assert_close(everything + 0.8 * everything ** (p - 1), x.abs())
    assert (sparse_topk_magnitude(x, 0, 0.8, p) == 0).all()


def test_derivatives_next_to_the_hard_map_keep_their_digits():
    """Of m equal entries that share k: each is x z / (1 + strength z) with z = k / m."""
    for jacobian, x, z in ((jacrev, [2.0, 1.0], 0.5), (jacfwd, [2.0, 1.0], 0.5), (jacrev, [2.0, 2.0], 0.75)):
        k, entries = z * x.count(2.0), torch.tensor(x, dtype=torch.float64)
        for strength in (1e-3, 1e-12):
            slope = jacobian(lambda x, k=k, s=strength: sparse_topk_magnitude(x, k, s).sum())(entries)
            assert (slope[entries == 2] - z / (1 + strength * z)).abs().max() < 1e-14


def test_thresholds_smaller_than_all_doubles_leave_zeros():
    x = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    for strength in (10**33.5, 1e40, 1e200):
        assert sparse_topk_magnitude(x, 1, strength, p=1.1).abs().max() < 1e-300


@for_each("p", [2.0, 4 / 3])
def test_zeros_are_masked(p):
    x = torch.tensor([0.7, 0.0, -2.0, 0.0, 1.1], dtype=torch.float64, requires_grad=True)
    for k in (2.5, 3.0, 4.0, 5.0):
        y = sparse_topk_magnitude(x, k, 0.5, p)
        torch.testing.assert_close(y[[0, 2, 4]], sparse_topk_magnitude(x[[0, 2, 4]], min(k, 3.0), 0.5, p))
        (grad,) = torch.autograd.grad(y.square().sum() + y.sum(), x)
        assert (y[[1, 3]] == 0).all() and (grad[[1, 3]] == 0).all() and grad.isfinite().all()


@for_each("p", [2.0, 4 / 3, 1.1])
@for_each("dtype", [torch.float32, torch.float64])
def test_extreme_inputs(p, dtype):
    base = torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one = torch.zeros(50, dtype=torch.float64).index_fill(0, torch.tensor([7]), 0.3)
    x = torch.stack((1e4 * base, 1e-8 * base, base + 1e4, 0 * base, 1e30 * base, one, 0 * base + 1)).to(dtype)
    k, strength = torch.cartesian_prod(torch.tensor([0.3, 9.0, 49.999, 50.0]), torch.tensor([1e-4, 1.0, 1e4])).T
    inputs = [v.detach().requires_grad_() for v in (x.unsqueeze(1).expand(7, 12, 50), k, strength)]
    y = sparse_topk_magnitude(*inputs, p)
    grads = torch.autograd.grad((y * base.to(dtype)).sum(), inputs)
    assert y.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    assert (y.abs() <= inputs[0].abs() * (1 + 4 * torch.finfo(dtype).eps)).all()


@for_each("p", [2.0, 4 / 3])
def test_long_rows(p):
    x = torch.randn(1, 10**5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = sparse_topk_magnitude(x, 100, 0.01, p)
    y.sum().backward()
    assert 100 <= (y != 0).sum() < 110 and x.grad.isfinite().all() and (x.grad[y == 0] == 0).all()


def test_refuses_infinities():
    for value in (torch.inf, -torch.inf):
        with pytest.raises(ValueError, match=r"`x` must be finite \(0 masks an entry\), but row 1"):
            sparse_topk_magnitude(torch.tensor([[1.0, 2.0], [0.0, value]]), 1)
    with pytest.raises(ValueError, match="`p`"):
        sparse_topk_magnitude(torch.ones(3), 1, 1.0, 3)


@for_each("size, strength", [(1e-35, 1e-5), (1e-40, 1.0), (1e-20, 1e-25), (1e-30, 1e-3)])
@for_each("p", [2.0, 1.5])
def test_thresholds_next_to_the_smallest_numbers(size, strength, p):
    """In single precision one over their scale overflows."""
    x = (torch.tensor([1.0, 2.0, 3.0, -4.0, 5.0]) * size).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, expected = sparse_topk_magnitude(x, 2, strength, p), sparse_topk_magnitude(wide, 2, strength, p)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-44)
    grads = (torch.autograd.grad(v[2:].sum(), leaf)[0].double() for v, leaf in ((y, x), (expected, wide)))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@for_each("n, k, strength", [(100, 33, 1e-6), (8, 2, 1e-5), (12, 4, 1e-3)])
def test_ties_with_nearly_equal_cotangents(n, k, strength):
    """Their pulls on the threshold cancel but for a share of the strength, and are divided by it."""
    found = []
    for dtype in (torch.float32, torch.float64):
        x, s = torch.ones(n, dtype=dtype).requires_grad_(), torch.tensor(strength, dtype=dtype, requires_grad=True)
        cotangent = 1 + 1e-7 * torch.arange(n, dtype=torch.float64)
        grads = torch.autograd.grad(sparse_topk_magnitude(x, k, s), (x, s), cotangent.float().to(dtype))
        found.append([grad.double() for grad in grads])
    for grad, expected in zip(*found, strict=True):
        torch.testing.assert_close(grad, expected, rtol=2e-4, atol=2e-4)


@for_each("p, strength", [(2.0, 1e3), (1.7, 0.05), (4 / 3, 1.0)])
@for_each(
    "x, k",
    [([1.0, -2.0], 2), ([0.0, 2.0], 2), ([0.0, 2.0], 1), ([1.0, 0.0, -2.0], 2), ([0.0, 0.0], 1), ([3.0, 1.0], 0)],
)
def test_forward_mode_without_a_threshold(p, strength, x, k):
    """If k entries are all that is not 0, the threshold is 0 and all of them are kept: none follows it."""
    inputs = [torch.tensor(value, dtype=torch.float64) for value in (x, k, strength)]
    forward, reverse = (
        jacobian(lambda x, k, s: sparse_topk_magnitude(x, k, s, p), (0, 1, 2))(*inputs) for jacobian in (jacfwd, jacrev)
    )
    torch.testing.assert_close(forward, reverse, rtol=1e-12, atol=1e-12)
