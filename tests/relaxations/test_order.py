"""Soft ranks, sorting and permutations by LapSum: against 60-digit arithmetic, derivatives, limits and extremes."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, vmap

from khot import lapsum_topk, soft_permutation, soft_rank, soft_sort
from tests.backends import USUAL
from tests.inputs import normal
from tests.loops import for_each
from tests.oracle import cases, tensor

MAPS = [soft_rank, soft_sort, soft_permutation]
every_map = pytest.mark.parametrize("order_map", MAPS, ids=lambda order_map: order_map.__name__)


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32],
    ids=str,
)
@for_each("case", cases("lapsum_order"))
def test_oracle(case, dtype):
    eps, tolerance = torch.finfo(dtype).eps, 1e-10 if dtype == torch.float64 else 1e-4
    x = tensor(case["x"], dtype).requires_grad_()
    scale = torch.tensor(case["alpha"], dtype=torch.float64, requires_grad=True)
    size = 1 + (x.abs().max() / scale).item()  # the oracles' A
    for name, order_map, cotangent in (
        ("rank", soft_rank, "g"),
        ("sort", soft_sort, "g"),
        ("perm", soft_permutation, "perm_g"),
    ):
        y = order_map(x, scale)
        assert (y.double() - torch.tensor(case[name], dtype=torch.float64)).abs().max() <= 64 * eps * size
        grads = torch.autograd.grad(y, (x, scale), torch.tensor(case[cotangent], dtype=dtype))
        for grad, key in zip(grads, ("vjp_x", "vjp_alpha"), strict=True):
            reference = torch.tensor(case[f"{name}_{key}"], dtype=torch.float64)
            assert ((grad.double() - reference).abs() <= tolerance * (1 + reference.abs())).all(), (name, key)


@every_map
@pytest.mark.slow
def test_derivatives(order_map):
    inputs = normal(2, 6).requires_grad_(), torch.tensor([0.5, 1.3], dtype=torch.float64, requires_grad=True)
    assert gradcheck(order_map, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(order_map, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


@every_map
def test_functional_transforms(order_map):
    def loss(x):
        return (order_map(x, 0.7) ** 2).sum()

    x, scale = normal(3, 5), torch.tensor([0.4, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(vmap(order_map)(x, scale), order_map(x, scale))
    torch.testing.assert_close(vmap(lambda s: order_map(x[0], s))(scale), order_map(x[:1].expand(3, 5), scale))
    torch.testing.assert_close(vmap(jacrev(order_map))(x, scale)[1], jacfwd(order_map)(x[1], scale[1]))
    for outer in (jacrev, jacfwd):
        torch.testing.assert_close(outer(jacrev(loss))(x[0]), hessian(loss)(x[0]))
        torch.testing.assert_close(outer(jacfwd(loss))(x[0]), hessian(loss)(x[0]))
    torch.testing.assert_close(jacfwd(hessian(loss))(x[0]), jacrev(jacrev(jacrev(loss)))(x[0]))


def test_definitions():
    """By bisection on F, elementwise."""
    x, scale = normal(4, 30), torch.tensor([0.03, 0.5, 2.0, 30.0], dtype=torch.float64)

    def count_below(t):
        z = (t.unsqueeze(-1) - x.unsqueeze(-2)) / scale[:, None, None]
        return torch.where(z < 0, z.clamp(max=0).exp() / 2, 1 - (-z.clamp(min=0)).exp() / 2).sum(-1)

    torch.testing.assert_close(soft_rank(x, scale), count_below(x) + 0.5, rtol=0, atol=1e-12)
    places = torch.arange(1, 31).double()
    torch.testing.assert_close(count_below(soft_sort(x, scale)), (places - 0.5).expand(4, 30), rtol=0, atol=1e-12)


@for_each("descending", [False, True])
def test_hard_limit(descending):
    x = normal(3, 9)
    ordered = x.sort(-1, descending=descending)
    torch.testing.assert_close(soft_sort(x, 1e-6, descending), ordered.values, rtol=0, atol=1e-5)
    ranks = ordered.indices.argsort(-1) + 1.0
    torch.testing.assert_close(soft_rank(x, 1e-6, descending), ranks.double(), rtol=0, atol=1e-9)
    matrix = soft_permutation(x, 1e-6, descending)
    torch.testing.assert_close((matrix.mT @ x.unsqueeze(-1)).squeeze(-1), ordered.values, rtol=0, atol=1e-9)


def test_flat_limit():
    x = normal(3, 9)
    torch.testing.assert_close(soft_rank(x, 1e9), torch.full_like(x, 5.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(soft_permutation(x, 1e9), torch.full((3, 9, 9), 1 / 9).double(), rtol=0, atol=1e-6)


@for_each("scale", [1e-3, 0.3, 10.0])
def test_permutation_is_doubly_stochastic(scale):
    x = normal(3, 40)
    matrix = soft_permutation(x, scale)
    assert (matrix >= 0).all()
    ones = torch.ones(3, 40, dtype=torch.float64)
    torch.testing.assert_close(matrix.sum(-1), ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix.sum(-2), ones, rtol=0, atol=1e-12)
    largest = soft_permutation(x, scale, descending=True)[..., :7].sum(-1)
    torch.testing.assert_close(largest, lapsum_topk(x, 7, scale), rtol=0, atol=1e-11)
    rank_sum = soft_rank(x, scale).sum(-1)
    torch.testing.assert_close(rank_sum, torch.full((3,), 820.0).double(), rtol=1e-13, atol=0)


@for_each("scale", [1e-5, 1e-2, 0.3, 1e4])  # beyond the digits of float32, underflow, products, flat
def test_permutation_in_float32(scale):
    x = normal(2, 60, dtype=torch.float32).requires_grad_()
    matrix, exact = soft_permutation(x, scale), soft_permutation(x.double(), scale)
    torch.testing.assert_close(matrix.double(), exact, rtol=1e-5, atol=1e-37)
    for dim in (-1, -2):
        torch.testing.assert_close(matrix.double().sum(dim), torch.ones(2, 60).double(), rtol=0, atol=1e-6)
    grad = normal(2, 60, 60, dtype=torch.float32)
    found, expected = (torch.autograd.grad((y * grad).sum(), x)[0] for y in (matrix, exact))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 / scale)


def test_equivariance_and_mirror():
    x = normal(2, 12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(soft_rank(x[:, order]), soft_rank(x)[:, order])
    torch.testing.assert_close(soft_sort(x[:, order]), soft_sort(x))
    torch.testing.assert_close(soft_permutation(x[:, order]), soft_permutation(x)[:, order])
    torch.testing.assert_close(soft_rank(3 * x + 7, 3.0), soft_rank(x))
    torch.testing.assert_close(soft_sort(3 * x + 7, 3.0), 3 * soft_sort(x) + 7)
    torch.testing.assert_close(soft_rank(x, descending=True), soft_rank(-x))
    torch.testing.assert_close(soft_sort(x, descending=True), -soft_sort(-x))
    torch.testing.assert_close(soft_permutation(x, descending=True), soft_permutation(-x))
    assert (soft_sort(x).diff(dim=-1) > 0).all()
    assert (soft_rank(x).gather(-1, x.argsort(-1)).diff(dim=-1) > 0).all()


def test_ties_and_short_rows():
    torch.testing.assert_close(soft_rank(torch.tensor([1.0, 0, 1, 1]), 1e-3), torch.tensor([3.0, 1, 3, 3]))
    torch.testing.assert_close(soft_sort(torch.zeros(3), 1.0).sum(), torch.tensor(0.0))
    torch.testing.assert_close(soft_permutation(torch.zeros(3)), torch.full((3, 3), 1 / 3))
    one = torch.tensor([[2.0]])
    assert soft_rank(one).item() == 1 and soft_sort(one).item() == 2 and soft_permutation(one).item() == 1
    for shape in ((0, 5), (2, 0)):
        empty = torch.zeros(shape, requires_grad=True)
        for order_map in MAPS:
            y = order_map(empty)
            assert y.shape == ((*shape, shape[-1]) if order_map is soft_permutation else shape)
            y.sum().backward()
    x = torch.tensor([0.3, 0.3, -1.0, 0.3], dtype=torch.float64, requires_grad=True)
    for order_map in MAPS:  # once differentiable at ties
        assert gradcheck(lambda x, f=order_map: f(x, 0.5), x)


@every_map
def test_extreme_inputs(order_map):
    base = normal(1, 40, seed=2)
    outlier = torch.cat([base[:, 1:], 1e6 + base[:, :1]], 1)
    for dtype in (torch.float32, torch.float64):
        for x in (1e4 * base, 1e-8 * base, base + 1e4, 0 * base, 1e30 * base, outlier):
            for softness in (1e-4, 1.0, 1e4):
                leaf, scale = x.to(dtype).requires_grad_(), torch.tensor(softness, requires_grad=True)
                y = order_map(leaf, scale)
                grads = torch.autograd.grad((y * normal(*y.shape, dtype=dtype)).sum(), (leaf, scale), create_graph=True)
                again = torch.autograd.grad(sum(g.square().sum() for g in grads), (leaf, scale))
                assert y.isfinite().all() and all(g.isfinite().all() for g in (*grads, *again)), (dtype, softness)


@every_map
def test_largest_numbers(order_map):
    """In units of the scale they are beyond float32."""
    x = torch.tensor([1e38, -3e38, 3e38, 2e38, 1.0, 0.0]).requires_grad_()
    y = order_map(x, 1e-6)
    (grad,) = torch.autograd.grad((y * torch.arange(float(len(y)))).sum(), x)
    assert y.isfinite().all() and grad.isfinite().all()
    if order_map is soft_permutation:
        torch.testing.assert_close(y, torch.eye(6)[x.argsort().argsort()])


def test_saves_numbers_per_item():
    x, saved = normal(5, 300, dtype=torch.float32).requires_grad_(), []
    for order_map in MAPS:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            order_map(x, torch.tensor(0.3, requires_grad=True))
    most = 45 if USUAL == "torch" else 30  # without a loop for a map each of its operations saves what it needs
    assert saved and max(saved) <= x.numel() and sum(saved) <= most * x.numel()
