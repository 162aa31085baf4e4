"""sparse_topk against 60-digit arithmetic, as a maximiser, and at its kinks."""

import numpy as np
import pytest
import torch

from khot import sparse_topk, topk_mask
from tests.loops import for_each
from tests.oracle import interpreted_cases, tensor

EXPONENTS = {"2": 2.0, "3/2": 1.5, "4/3": 4 / 3}


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_oracle(dtype):
    for case in interpreted_cases("sparse_topk_mask", dtype):
        check_oracle(case, dtype)


def check_oracle(case, dtype):
    eps, single = torch.finfo(dtype).eps, dtype == torch.float32
    x = tensor(case["x"], dtype).requires_grad_()
    k = torch.tensor(float(case["k"]), dtype=torch.float64, requires_grad=True)
    strength = torch.tensor(float(case["lam"]), dtype=torch.float64, requires_grad=True)
    y, expected = sparse_topk(x, k, strength, EXPONENTS[case["p"]]), tensor(case["y"])
    size = 1 + (x[x.detach().isfinite()].abs().max() / strength).item()  # the oracles' A

    assert (y.double() - expected).abs().max() <= 64 * eps * size
    assert y.double().sum().item() == pytest.approx(case["k"], rel=1e-6 if single else 1e-12)
    assert torch.equal(y == 0, expected == 0) and torch.equal(y == 1, expected == 1)
    grads = torch.autograd.grad(y, (x, k, strength), tensor(case["g"], dtype))
    for grad, name in zip(grads, ("vjp_x", "vjp_k", "vjp_lam"), strict=True):
        if case[name] is None:  # in k, where all is 0 or 1: returned as 0
            assert name == "vjp_k" and grad == 0
            continue
        reference = tensor(case[name] if name == "vjp_x" else [case[name]]).reshape(grad.shape)
        assert ((grad.double() - reference).abs() <= (1e-4 if single else 1e-10) * (1 + reference.abs())).all(), name


@for_each("p", [2.0, 1.5, 4 / 3, 1.73, 1.1])
@for_each("strength", [0.3, 2.0])
def test_maximises_the_regularised_score(p, strength):
    """No step towards another feasible point improves <x, y> - (strength / p) sum y^p."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, generator=generator, dtype=torch.float64)

    def objective(y):
        return y @ x - strength / p * y.pow(p).sum(-1)

    y = sparse_topk(x, 3.4, strength, p)
    others = sparse_topk(2 * torch.randn(200, 8, generator=generator, dtype=torch.float64), 3.4, 1.0, 2)
    for step in (1.0, 1e-2, 1e-4):
        assert (objective(y + step * (others - y)) <= objective(y) + 1e-14).all()


@for_each("p", [2.0, 1.5, 1.1])
def test_hard_once_the_strength_is_below_the_gap(p):
    x = torch.tensor([0.3, -1.0, 2.0, 0.8, 0.1], dtype=torch.float64)  # gap of 0.5 below the second largest
    assert torch.equal(sparse_topk(x, 2, 0.4999, p), topk_mask(x, 2))
    y = sparse_topk(x, 2, 0.5001 + 0.05, p)
    assert ((y > 0) & (y < 1)).sum() == 2 and (y == 0).sum() == 2
    assert ((sparse_topk(x, 2, 100.0, p) > 0) & (sparse_topk(x, 2, 100.0, p) < 1)).all()


def test_the_number_of_nonzeros_grows_with_the_strength():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    support = [(sparse_topk(x, 50, strength) > 0).sum().item() for strength in (1e-3, 0.1, 0.5, 2.0, 1000.0)]
    assert support == sorted(support) and support[0] <= 51 and support[-1] == 1000


def test_kink_where_an_entry_reaches_its_cap():
    """For p = 4/3, k = 2, x = (s, 0, 0) the slope of the first entry falls from 1.67 to 0, though p < 2."""
    cap = 1 - 0.5 ** (1 / 3)  # the others are 1/2 = (0 - t)^3, and the first 1 = s - t
    assert cap == pytest.approx(0.2063, abs=1e-4)
    slopes = []
    for s in (cap - 1e-9, cap + 1e-9):
        x = torch.tensor([s, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
        slopes.append(torch.autograd.grad(sparse_topk(x, 2, 1.0, 4 / 3)[0], x)[0][0].item())
    assert slopes == [pytest.approx(1.67, abs=0.01), 0.0]


def test_smooth_where_an_entry_leaves_zero():
    """For p < 2, unlike p = 2."""
    jumps = {}
    for p in (2.0, 4 / 3):
        slopes = []
        for s in (-1e-9, 1e-9):  # k = 1 and x = (1/2, 1/2, u): the third entry leaves 0 at u = t
            u = 0.5 - 0.5 ** (p - 1) + s
            x = torch.tensor([0.5, 0.5, u], dtype=torch.float64, requires_grad=True)
            slopes.append(torch.autograd.grad(sparse_topk(x, 1, 1.0, p)[2], x)[0][2].item())
        jumps[p] = slopes[1] - slopes[0]
    assert jumps[2.0] > 0.5 and 0 <= jumps[4 / 3] < 1e-6


def test_exponent():
    x = torch.randn(5)
    torch.testing.assert_close(sparse_topk(x, 2, 1.0, 2), sparse_topk(x, 2, 1.0, 2.0))
    torch.testing.assert_close(sparse_topk(x, 2, 1.0, np.float32(1.5)), sparse_topk(x, 2, 1.0, 1.5))
    for p in (1, 1.0, 0.5, 2.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"`p` must satisfy 1 < p <= 2, but got p="):
            sparse_topk(x, 2, 1.0, p)
    for p in (torch.tensor(1.5), "2", None, True):
        with pytest.raises(TypeError, match="`p` must be a real number"):
            sparse_topk(x, 2, 1.0, p)


@pytest.mark.slow
def test_compiled_function_takes_p_as_an_argument():
    torch._dynamo.reset()
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    compiled = torch.compile(lambda x, p: sparse_topk(x, 2, 0.5, p), backend="aot_eager", fullgraph=True, dynamic=True)
    for p in (1.21, 1.37, 2.0):  # the first two have no link yet
        torch.testing.assert_close(compiled(x, p), sparse_topk(x, 2, 0.5, p))
