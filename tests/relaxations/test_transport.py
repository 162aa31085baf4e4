"""transport_topk against 60-digit arithmetic, against Sinkhorn's iterations and against theorem 2 of its paper."""

import math

import pytest
import torch

from khot import sigmoid_topk, topk_mask, transport_topk
from tests.loops import for_each
from tests.oracle import cases, tensor

UNSORTED = [case for case in cases("transport_topk") if case["kind"] == "unsorted"]


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def inputs(case, dtype):
    x = tensor(case["x"], dtype).requires_grad_()
    k = torch.tensor(case["k"], dtype=torch.float64, requires_grad=True)
    # The listing divides the cost by its largest entry, which multiplies epsilon.
    return x, k, torch.tensor(case["eps"] * case.get("cost_scale", 1.0), dtype=torch.float64, requires_grad=True)


@pytest.mark.usefixtures("cpu_backend")
@DTYPES
@for_each("case", UNSORTED)
def test_oracle(case, dtype):
    x, k, epsilon = inputs(case, dtype)
    size = 1 + (2 * x[x.isfinite()].abs().max() / epsilon).item()
    error = (transport_topk(x, k, epsilon).double() - tensor(case["y"])).abs().max()
    assert error <= 64 * torch.finfo(dtype).eps * size


@pytest.mark.usefixtures("cpu_backend")
@DTYPES
@for_each("case", [case for case in UNSORTED if "g" in case])
def test_oracle_of_derivatives(case, dtype):
    leaves, tolerance = inputs(case, dtype), 1e-10 if dtype == torch.float64 else 1e-4
    grads = torch.autograd.grad(transport_topk(*leaves), leaves, tensor(case["g"], dtype))
    for grad, name in zip(grads, ("vjp_x", "vjp_k", "vjp_eps"), strict=True):
        reference = tensor(case[name] if name == "vjp_x" else [case[name]]).reshape(grad.shape)
        assert ((grad.double() - reference).abs() <= tolerance * (1 + reference.abs())).all(), name


def sinkhorn(x, k, epsilon, iterations):
    """The problem as posed: anchors 1 and 0, raw squared cost, uniform mass on the items, in the log domain."""
    n = len(x)
    scores = -(x[:, None] - torch.tensor([1.0, 0.0]).double()).square() / epsilon
    log_nu = torch.tensor([k / n, (n - k) / n], dtype=torch.float64).log()
    g = torch.zeros(2).double()
    for _ in range(iterations):
        f = -math.log(n) - torch.logsumexp(scores + g, 1)
        g = log_nu - torch.logsumexp(scores + f[:, None], 0)
    return (scores + f[:, None] + g).exp()


@for_each("n, k, epsilon", [(5, 2, 1.0), (12, 3.7, 0.5), (40, 39.5, 2.0), (8, 0.2, 5.0)])
def test_equals_converged_sinkhorn(n, k, epsilon):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    plan = sinkhorn(x, k, epsilon, 5000)
    torch.testing.assert_close(transport_topk(x, k, epsilon), n * plan[:, 0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(transport_topk(x, k, epsilon), sigmoid_topk(x, k, epsilon / 2), rtol=1e-13, atol=1e-15)


@for_each("epsilon", [1e-3, 0.03, 0.3, 1.0, 5.0])
@for_each("n, k", [(2, 1), (6, 2), (50, 25), (300, 7)])
def test_error_bound_of_the_paper(n, k, epsilon):
    """Theorem 2: the plan is within eps (ln n + ln 2) / (n gap) of the hard one in Frobenius norm."""
    x = torch.randn(200, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    ordered = x.sort(-1, descending=True).values
    gap = ordered[:, k - 1] - ordered[:, k]
    error = transport_topk(x, k, epsilon) - topk_mask(x, k)  # of n times the first column; minus it is the second's
    distance = math.sqrt(2) * error.norm(dim=-1) / n
    assert (distance <= epsilon * math.log(2 * n) / (n * gap)).all()
    if n == 2 and epsilon >= 0.3:  # no bound of this form holds with a much smaller constant
        assert (distance > 0.1 * epsilon * math.log(2 * n) / (n * gap)).any()


def test_epsilon_is_absolute():
    x = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(transport_topk(4 * x, 3, 2.0), transport_topk(x, 3, 0.5), rtol=1e-13, atol=0)


def test_is_sigmoid_topk_with_its_kernels():
    """Bit for bit, in x, k and epsilon: one piece of code for both."""
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    epsilon = torch.tensor([0.1, 1.0, 30.0], requires_grad=True)
    k = torch.tensor([1.0, 2.5, 6.0], requires_grad=True)
    temperature = (epsilon.detach() / 2).requires_grad_()
    y, expected = transport_topk(x, k, epsilon), sigmoid_topk(x, k, temperature)
    assert torch.equal(y, expected)
    grads, others = (
        torch.autograd.grad(y[:, 0].sum(), (x, k, epsilon)),
        torch.autograd.grad(expected[:, 0].sum(), (x, k, temperature)),
    )
    assert torch.equal(grads[0], others[0]) and torch.equal(grads[1], others[1])
    torch.testing.assert_close(2 * grads[2], others[2])


def test_errors_name_epsilon_and_its_value():
    x = torch.zeros(2, 3)
    for wrong in (torch.tensor(-1.0), torch.tensor([1.0, -1.0]), -1.0):
        with pytest.raises(ValueError, match="`epsilon` must be positive and finite, but got -1"):
            transport_topk(x, 1, wrong)
