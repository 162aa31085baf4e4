"""lapsum_topk and log_lapsum_topk against 60-digit arithmetic, to the tiers of the oracles' README."""

import pytest
import torch

from khot import lapsum_topk, log_lapsum_topk
from khot.kernels.links.laplace import LAPLACE
from tests.oracle import interpreted_cases, sum_tolerance, tensor


def check_gradients(case, grads, prefix, dtype, tolerance):
    for grad, name in zip(grads, ("vjp_x", "vjp_k", "vjp_alpha"), strict=True):
        reference = tensor(case[prefix + name] if name == "vjp_x" else [case[prefix + name]]).reshape(grad.shape)
        assert ((grad.double() - reference).abs() <= tolerance * (1 + reference.abs())).all(), prefix + name


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_oracle(dtype):
    for case in interpreted_cases("lapsum_topk", dtype):
        check_oracle(case, dtype)


def check_oracle(case, dtype):
    eps, single = torch.finfo(dtype).eps, dtype == torch.float32
    x = tensor(case["x"], dtype).requires_grad_()
    k = torch.tensor(float(case["k"]), dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(float(case["alpha"]), dtype=torch.float64, requires_grad=True)
    y, log_y = lapsum_topk(x, k, scale), log_lapsum_topk(x, k, scale)
    finite = x.detach().isfinite()
    size = 1 + (x[finite].abs().max() / scale).item()  # the oracles' A

    assert (y.double() - tensor(case["y"])).abs().max() <= 64 * eps * size
    farthest = tensor(case["log_y"])[finite].abs().max().item()  # about the largest |z|, each rounded by eps / 2 of it
    tolerance = max(sum_tolerance(dtype, size), min(1e-6, eps * farthest) if single else 0)
    assert y.double().sum().item() == pytest.approx(case["k"], rel=tolerance)
    assert (y[~finite] == 0).all() and (log_y[~finite] == -torch.inf).all()
    expected = tensor(case["log_y"])[finite]
    assert ((log_y[finite] - expected).abs() <= 64 * eps * (size + expected.abs())).all()
    log_complement = log_lapsum_topk(-x[finite], int(finite.sum()) - k, scale)
    torch.testing.assert_close(log_complement.exp().double(), 1 - y[finite].double(), rtol=0, atol=4 * eps * size)

    offset = "offset" in case["id"]  # the input's own rounding, eps * A, moves the reference
    tolerance = max(1e-4, eps * size) if single else 1e-10
    tolerance = max(tolerance, 64 * eps * size if offset else 0.0)
    g = tensor(case["g"], dtype)
    check_gradients(case, torch.autograd.grad(y, (x, k, scale), g), "", dtype, tolerance)
    if "log_vjp_x" in case:
        grads = torch.autograd.grad(log_y[finite], (x, k, scale), g[finite])
        check_gradients(case, grads, "log_", dtype, tolerance)


def test_invertible_up_to_a_shift():
    x = 3 * torch.randn(4, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shift = x - 0.7 * LAPLACE.inverse(lapsum_topk(x, 6.3, 0.7))
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift), rtol=0, atol=1e-11)


def test_twice_differentiable_except_at_the_threshold():
    """The second derivative jumps where an entry is the threshold itself; the first does not."""
    slopes = []
    for s in (-1e-7, 1e-7):  # the first of three entries, k = 1.5: the threshold is 0 for x = (0, -1, 1)
        x = torch.tensor([s, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(lapsum_topk(x, 1.5)[0], x, create_graph=True)
        slopes.append((first[0].item(), torch.autograd.grad(first[0], x)[0][0].item()))
    (left, curved_left), (right, curved_right) = slopes
    assert left == pytest.approx(right, abs=1e-6) and curved_left > 0.03 and curved_right < -0.03


def test_log_of_the_limits_of_k():
    x = torch.tensor([0.0, 1.0, 5.0])
    assert (log_lapsum_topk(x, 0) < -700).all() and log_lapsum_topk(x, 0).isfinite().all()
    assert torch.equal(log_lapsum_topk(x, 3), torch.zeros(3))
