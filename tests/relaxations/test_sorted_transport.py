"""sorted_transport_topk against 60-digit arithmetic and Sinkhorn's iterations; marginals, limits and derivatives."""

import itertools
import math

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, vmap

from khot import sorted_transport_topk, transport_topk
from khot.kernels.transport import solver
from tests.inputs import normal
from tests.loops import for_each
from tests.oracle import cases, tensor

SORTED = [case for case in cases("transport_topk") if case["kind"] == "sorted"]


@for_each("dtype", [torch.float64, torch.float32])
@for_each("case", SORTED)
def test_oracle(case, dtype):
    eps, gradient_tolerance = torch.finfo(dtype).eps, 1e-10 if dtype == torch.float64 else 1e-4
    x = tensor(case["x"], dtype).requires_grad_()
    epsilon = torch.tensor(case["eps"], dtype=torch.float64, requires_grad=True)
    y = sorted_transport_topk(x, case["k"], epsilon)
    size = 1 + (2 * x.abs().max() / epsilon).item()
    assert (y.double() - torch.tensor(case["y"], dtype=torch.float64)).abs().max() <= 64 * eps * size
    grads = torch.autograd.grad(y, (x, epsilon), torch.tensor(case["g"], dtype=dtype))
    for grad, name in zip(grads, ("vjp_x", "vjp_eps"), strict=True):
        reference = tensor(case[name] if name == "vjp_x" else [case[name]]).reshape(grad.shape)
        assert ((grad.double() - reference).abs() <= gradient_tolerance * (1 + reference.abs())).all(), name


@for_each("n, k, epsilon", [(5, 2, 1.0), (12, 4, 3.0), (7, 7, 2.0), (30, 1, 0.5)])
def test_equals_converged_sinkhorn(n, k, epsilon):
    """The problem as posed: anchors k, ..., 0, raw squared cost, mass 1/n on every item, in the log domain."""
    x = normal(n, seed=n)
    anchors = torch.arange(k, -1, -1).double()
    mass = torch.tensor([1 / n] * k + [(n - k) / n], dtype=torch.float64)
    if k == n:
        anchors, mass = anchors[:-1], mass[:-1]
    scores = -(x[:, None] - anchors).square() / epsilon
    g = torch.zeros_like(mass)
    for _ in range(5000):
        f = -math.log(n) - torch.logsumexp(scores + g, 1)
        g = mass.log() - torch.logsumexp(scores + f[:, None], 0)
    plan = n * (scores + f[:, None] + g).exp()[:, :k]
    torch.testing.assert_close(sorted_transport_topk(x, k, epsilon), plan, rtol=1e-10, atol=1e-12)


def inputs(kind, n):
    x = normal(3, n, seed=n)
    if kind == "heavy":
        x = x**5
    elif kind == "clumps":
        x = (3 * x).round() / 3 + 1e-3 * x
    elif kind == "ties":
        x = x.round()
    x = x / x.std(-1, keepdim=True).clamp(min=0.1)
    if kind == "outliers":
        x[:, 0], x[:, -1] = 1e6, -1e6
    return x


@for_each("n, k", [(2, 1), (10, 3), (50, 50), (200, 60), (60, 59), (1000, 10)])
@for_each("kind", ["normal", "heavy", "clumps", "ties", "outliers"])
def test_marginals_at_every_epsilon(kind, n, k):
    """Without a warning of no convergence, in few steps, from hard to flat."""
    x, sixteen_steps = inputs(kind, n), {"max_iter": 16}
    for epsilon in (1e-5, 1e-3, 0.01, 0.1, 0.5, 2.0, 10.0, 1e3, 1e6):
        y = sorted_transport_topk(x, k, epsilon, **sixteen_steps)
        assert ((y >= 0) & (y <= 1)).all() and (y.sum(-1) <= 1 + 1e-13).all()
        torch.testing.assert_close(y.sum(-2), torch.ones(3, k).double(), rtol=0, atol=1e-10)


def test_steps_are_shortened_where_newton_overshoots(monkeypatch):
    """Without the safeguard some of these rows never get there."""
    x = normal(300, 40).round()
    y = sorted_transport_topk(x, 20, 0.1, max_iter=60)
    torch.testing.assert_close(y.sum(-2), torch.ones(300, 20).double(), rtol=0, atol=1e-10)
    monkeypatch.setattr(solver, "OVERSHOOT", math.inf)
    with pytest.warns(RuntimeWarning, match="rows were off by up to"):
        sorted_transport_topk(x, 20, 0.1, max_iter=60)


def test_items_left_out_wrongly_are_taken_in_again(monkeypatch):
    """Rows whose thresholds end up near what was left out, beside a row in which nothing else counts."""
    x = normal(3, 40)
    x[1] *= 1e4
    expected = sorted_transport_topk(x, 3, 0.1)
    monkeypatch.setattr(solver, "MOVE", -1e9)
    torch.testing.assert_close(sorted_transport_topk(x, 3, 0.1), expected, rtol=0, atol=1e-12)


def test_slabs_of_rows(monkeypatch):
    x, epsilon = normal(7, 6).requires_grad_(), torch.linspace(0.1, 2, 7).double().requires_grad_()
    results = []
    for entries in (2**17, 40, 1):
        monkeypatch.setattr(solver, "SLAB", entries)
        y = sorted_transport_topk(x, 3, epsilon)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, epsilon))))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-12, atol=1e-12)


def test_limits():
    x = normal(3, 8)
    hard = torch.nn.functional.one_hot(x.argsort(-1, descending=True), 8).mT.double()
    for k in (1, 3, 8):
        torch.testing.assert_close(sorted_transport_topk(x, k, 1e-4), hard[..., :k], rtol=0, atol=1e-9)
        torch.testing.assert_close(sorted_transport_topk(x, k, 1e9), torch.full((3, 8, k), 1 / 8).double())
    assert sorted_transport_topk(x, 0).shape == (3, 8, 0)
    torch.testing.assert_close(sorted_transport_topk(x[:, :1], 1), torch.ones(3, 1, 1).double())
    everything = sorted_transport_topk(x, 8, 0.5)
    torch.testing.assert_close(everything.sum(-1), torch.ones(3, 8).double())


def test_tied_items_share_places():
    x = torch.tensor([1.0, 0.0, 1.0, 1.0, -2.0])
    for epsilon in (1e-6, 1e-3):
        y = sorted_transport_topk(x, 4, epsilon)
        torch.testing.assert_close(y[[0, 2, 3], :3], torch.full((3, 3), 1 / 3))
        torch.testing.assert_close(y[1], torch.tensor([0.0, 0, 0, 1]))


def test_one_place_is_the_unsorted_map():
    x = normal(4, 20)
    for epsilon in (0.05, 1.0, 20.0):
        expected = transport_topk(x, 1, epsilon)
        torch.testing.assert_close(sorted_transport_topk(x, 1, epsilon).squeeze(-1), expected, rtol=1e-10, atol=1e-13)


def test_soft_values_keep_their_order():
    x = normal(20, 15)
    y = sorted_transport_topk(x, 6, 0.5)
    assert ((y.mT @ x.unsqueeze(-1)).squeeze(-1).diff(dim=-1) < 0).all()
    likelihood_ratio = (y[..., :-1] / y[..., 1:]).gather(-2, x.argsort(-1).unsqueeze(-1).expand(-1, -1, 5))
    assert (likelihood_ratio.diff(dim=-2) > 0).all()  # the larger the item, the better its places


def test_equivariance_and_shift():
    x, permutation = normal(3, 9), torch.randperm(9, generator=torch.Generator().manual_seed(0))
    y = sorted_transport_topk(x, 4, 0.3)
    torch.testing.assert_close(sorted_transport_topk(x[:, permutation], 4, 0.3), y[:, permutation])
    torch.testing.assert_close(sorted_transport_topk(x + 1e4, 4, 0.3), y, rtol=0, atol=1e-9)
    torch.testing.assert_close(sorted_transport_topk(5 * x, 4, 1.5), y)


def test_dims_dtypes_and_batches():
    x, epsilon = normal(2, 3, 6), torch.tensor([0.3, 1.0, 4.0])
    y = sorted_transport_topk(x, 2, epsilon)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(y[i, j], sorted_transport_topk(x[i, j], 2, epsilon[j].item()))
    for dim in range(-3, 3):
        expected = sorted_transport_topk(x.movedim(dim, -1), 2).movedim(-2, dim % 3)
        torch.testing.assert_close(sorted_transport_topk(x, 2, dim=dim), expected)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low = x.to(dtype)
        error = sorted_transport_topk(low, 2).double() - sorted_transport_topk(low.double(), 2)
        assert sorted_transport_topk(low, 2).dtype == dtype and error.abs().max() <= torch.finfo(dtype).eps
    assert sorted_transport_topk(torch.zeros(0, 5), 2).shape == (0, 5, 2)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
@pytest.mark.slow
def test_derivatives(k):
    x = normal(2, 5).requires_grad_()
    epsilon = torch.tensor([0.5, 0.9], dtype=torch.float64, requires_grad=True)

    def function(x, epsilon):
        return sorted_transport_topk(x, k, epsilon)

    assert gradcheck(
        function, (x, epsilon), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(function, (x, epsilon), check_fwd_over_rev=True, check_rev_over_rev=True)
    g = normal(2, 5, k, seed=1)
    short = torch.autograd.grad(function(x, epsilon.detach()), x, g)[0]
    long = torch.autograd.grad(function(x, epsilon), x, g, create_graph=True)[0]
    torch.testing.assert_close(short, long.detach(), rtol=1e-12, atol=1e-13)


def test_functional_transforms():
    x, rows = normal(5), normal(3, 5, seed=1)

    def loss(x):
        return sorted_transport_topk(x, 3, 0.7).square().sum()

    torch.testing.assert_close(jacfwd(jacrev(loss))(x), hessian(loss)(x))
    torch.testing.assert_close(jacfwd(jacfwd(loss))(x), jacrev(jacrev(loss))(x))
    torch.testing.assert_close(jacfwd(hessian(loss))(x), jacrev(hessian(loss))(x))
    epsilon = torch.tensor([0.3, 1.0, 2.0]).double()
    mapped = vmap(lambda x, e: sorted_transport_topk(x, 2, e))
    torch.testing.assert_close(mapped(rows, epsilon), sorted_transport_topk(rows, 2, epsilon))
    torch.testing.assert_close(vmap(jacrev(loss))(rows)[1], jacrev(loss)(rows[1]))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), rows[0])
        tangent = forward_ad.unpack_dual(torch.autograd.grad(loss(dual), dual, create_graph=True)[0]).tangent
    torch.testing.assert_close(tangent, hessian(loss)(x) @ rows[0])


def test_autocast():
    x = normal(3, 50, dtype=torch.float32).requires_grad_()
    expected = sorted_transport_topk(x, 5)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = sorted_transport_topk(x, 5)
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], grad, rtol=1e-5, atol=1e-6)


def test_saves_x_and_k_numbers_per_row():
    x, saved = normal(4, 1000).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sorted_transport_topk(x, 10, torch.tensor(0.5, requires_grad=True))
    others = [t for t in saved if t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()]
    assert len(others) < len(saved) and sum(t.numel() for t in others) <= 4 * 12


def test_extreme_inputs():
    base = normal(1, 30)
    outlier = torch.cat([base[:, 1:], 1e6 + base[:, :1]], 1)
    inputs = (1e4 * base, 1e-8 * base, base + 1e4, 0 * base, 1e30 * base, 1e300 * base, outlier)
    for x, epsilon, k, dtype in itertools.product(inputs, (1e-4, 1.0, 1e4), (1, 7, 30), (torch.float32, torch.float64)):
        if not x.to(dtype).isfinite().all():
            continue
        x, epsilon = x.to(dtype).requires_grad_(), torch.tensor(epsilon, dtype=dtype, requires_grad=True)
        y = sorted_transport_topk(x, k, epsilon, max_iter=30)
        torch.testing.assert_close(y.double().sum(-2), torch.ones(1, k).double(), rtol=0, atol=1e-6)
        for create_graph in (False, True):
            grads = torch.autograd.grad(
                y[..., 0].square().sum(), (x, epsilon), create_graph=create_graph, retain_graph=True
            )
            assert all(grad.isfinite().all() for grad in grads)
        again = torch.autograd.grad(grads[0].square().sum(), (x, epsilon))
        assert x.detach().abs().max() > 1e25 or epsilon < 1 or all(grad.isfinite().all() for grad in again)


def test_tolerance_and_warning():
    x = normal(5, 40)
    errors = [(sorted_transport_topk(x, 6, 1.0, tol=tol).sum(-2) - 1).abs().max() for tol in (1e-2, 1e-5, 1e-12)]
    assert all(error <= tol for error, tol in zip(errors, (1e-2, 1e-5, 1e-12), strict=True))
    assert errors[0] > 1e-12
    with pytest.warns(RuntimeWarning, match="5 of 5 rows were off by up to .* max_iter=1"):
        sorted_transport_topk(x, 6, 1.0, max_iter=1)
