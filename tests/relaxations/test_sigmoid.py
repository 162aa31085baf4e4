"""sigmoid_topk and log_sigmoid_topk against 60-digit arithmetic, to the tiers of the oracles' README."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from khot import log_lapsum_topk, log_sigmoid_topk, sigmoid_topk
from tests.oracle import interpreted_cases, sum_tolerance, tensor


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_oracle(dtype):
    for case in interpreted_cases("sigmoid_topk", dtype):
        check_oracle(case, dtype)


def check_oracle(case, dtype):
    single = dtype == torch.float32
    eps, gradient_tolerance = torch.finfo(dtype).eps, 1e-4 if single else 1e-10
    x = tensor(case["x"], dtype).requires_grad_()
    k = torch.tensor(float(case["k"]), dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(float(case["T"]), dtype=torch.float64, requires_grad=True)
    y, log_y = sigmoid_topk(x, k, temperature), log_sigmoid_topk(x, k, temperature)
    finite = x.detach().isfinite()
    size = 1 + (x[finite].abs().max() / temperature).item()  # the oracles' A

    expected, logit = tensor(case["y"]), tensor(case["logit_y"])
    assert (y.double() - expected).abs().max() <= 64 * eps * size
    assert y.double().sum().item() == pytest.approx(case["k"], rel=sum_tolerance(dtype, size))
    assert (y[~finite] == 0).all()
    # The logit, from the logarithms of y and of 1 - y, each accurate in its own tail.
    log_complement = log_sigmoid_topk(-x[finite], int(finite.sum()) - k, temperature)
    error = (log_y[finite].double() - log_complement.double() - logit[finite]).abs().max()
    assert error <= 64 * eps * size
    log_expected = logsigmoid(logit)[finite]
    assert ((log_y[finite] - log_expected).abs() <= 64 * eps * (size + log_expected.abs())).all()

    grads = torch.autograd.grad(y, (x, k, temperature), tensor(case["g"], dtype))
    offset = "offset" in case["id"]  # the input's own rounding, eps * A, moves the reference
    for grad, name in zip(grads, ("vjp_x", "vjp_k", "vjp_T"), strict=True):
        reference = tensor(case[name] if name == "vjp_x" else [case[name]]).reshape(grad.shape)
        tolerance = max(gradient_tolerance, 64 * eps * size if offset else 0.0)
        assert ((grad.double() - reference).abs() <= tolerance * (1 + reference.abs())).all(), name


def test_one_hot_is_softmax_like():
    """For n = 2 and k = 1 the map is softmax at half the temperature's reach: sigmoid of half the difference."""
    x = torch.tensor([[0.3, -1.2], [2.0, 2.5]], dtype=torch.float64)
    torch.testing.assert_close(sigmoid_topk(x, 1), torch.softmax(x / 2, -1))


def test_maximises_the_regularised_score():
    """No feasible direction improves <x, y> + T sum H(y)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, generator=generator, dtype=torch.float64)

    def objective(y):
        return x @ y + 0.7 * torch.special.entr(torch.stack([y, 1 - y])).sum()

    y = sigmoid_topk(x, 2.5, 0.7)
    for _ in range(50):
        step = 1e-3 * torch.randn(6, generator=generator, dtype=torch.float64)
        assert objective(y + step - step.mean()) < objective(y)


def test_log_of_the_limits_of_k():
    x = torch.tensor([0.0, 1.0, 5.0])
    assert (log_sigmoid_topk(x, 0) < -700).all() and log_sigmoid_topk(x, 0).isfinite().all()
    assert torch.equal(log_sigmoid_topk(x, 3), torch.zeros(3))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [log_sigmoid_topk, log_lapsum_topk])
@pytest.mark.parametrize("gap", [None, 10.0, 100.0, 400.0, 4000.0])
def test_log_of_certain_items_follows_k(gap, function, dtype):
    """At k = n and in wide gaps, d log y_i / dk is the share of slopes that underflow: of e^-x_i, halved by a gap."""
    chosen = torch.tensor([0.3, -0.5, 1.0], dtype=dtype)
    x = chosen if gap is None else torch.cat((chosen, torch.tensor([0.2, -1.0], dtype=dtype) - gap))
    expected = torch.softmax(-chosen, -1) * (1.0 if gap is None else 0.5)
    atol = 100 * torch.finfo(dtype).eps if gap != 10.0 else 0.01  # which is not so wide
    for order in (1, 2):  # the second way is that of derivatives that are to be differentiated again
        k = torch.tensor(3.0, dtype=dtype, requires_grad=True)
        y = function(x.clone().requires_grad_(), k)
        found = [torch.autograd.grad(y[i], k, retain_graph=True, create_graph=order == 2)[0] for i in range(3)]
        torch.testing.assert_close(torch.stack(found).detach(), expected, rtol=0, atol=atol)
        if order == 2:
            (second,) = torch.autograd.grad(found[0], k)
            assert second.isfinite()
    _, moved = torch.func.jvp(lambda k: function(x, k)[:3], (k.detach(),), (torch.ones_like(k),))
    torch.testing.assert_close(moved, expected, rtol=0, atol=atol)
