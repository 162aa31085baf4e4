"""Projections onto permutahedra: by their definition, the sparse top-k mask, limits, derivatives."""

import itertools

import numpy as np
import pytest
import scipy.optimize
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacrev, vmap

from khot import (
    isotonic_l2,
    permutahedron_projection,
    permutahedron_rank,
    permutahedron_sort,
    sparse_topk,
    topk_mask,
)
from tests.inputs import normal
from tests.loops import for_each
from tests.oracle import EPS, cases, tensor


@for_each("seed", range(3))
def test_is_the_nearest_convex_combination_of_permutations(seed):
    """A convex combination, seen from which no permutation lies in the direction of x / strength."""
    x, w = normal(4, seed=seed), normal(4, seed=10 + seed)
    vertices = torch.stack([w[list(order)] for order in itertools.permutations(range(4))])
    y = permutahedron_projection(x, w, 0.6)
    system, target = torch.cat([vertices.T, torch.ones(1, 24)]), torch.cat([y, torch.ones(1)])
    assert scipy.optimize.linprog(np.zeros(24), A_eq=system.numpy(), b_eq=target.numpy()).success  # weights >= 0
    assert ((vertices - y) @ (x / 0.6 - y)).max() <= 1e-12


MASKS = [c for c in cases("sparse_topk_mask") if c["p"] == "2" and float(c["k"]).is_integer()]


@for_each("case", MASKS)
def test_is_the_sparse_topk_mask(case):
    x = tensor(case["x"])
    masked = ~x.isfinite()
    x = x[~masked].requires_grad_()
    strength = torch.tensor(case["lam"], dtype=torch.float64, requires_grad=True)
    y = permutahedron_projection(x, (torch.arange(len(x)) < case["k"]).double(), strength)
    expected = tensor(case["y"])[~masked]
    assert (y - expected).abs().max() <= 64 * EPS * (1 + x.abs().max() / strength).item()
    assert torch.equal(y == 1, expected == 1)
    grads = torch.autograd.grad(y, (x, strength), tensor(case["g"])[~masked])
    for grad, reference in zip(grads, (tensor(case["vjp_x"])[~masked], tensor([case["vjp_lam"]])), strict=True):
        assert ((grad - reference).abs() <= 1e-10 * (1 + reference.abs())).all()


def test_reduces_to_isotonic_regression():
    s, w = (normal(3, 20, seed=seed).sort(-1, descending=True).values for seed in (0, 1))
    torch.testing.assert_close(permutahedron_projection(s, w), s - isotonic_l2(s, w))


def test_limits():
    x = normal(3, 8)
    torch.testing.assert_close(permutahedron_rank(x, 1e-6), x.argsort(-1).argsort(-1) + 1.0, check_dtype=False)
    assert torch.equal(permutahedron_sort(x, 1e-6), x.sort(-1).values)
    torch.testing.assert_close(permutahedron_rank(x, 1e9), torch.full_like(x, 4.5), rtol=0, atol=1e-6)
    torch.testing.assert_close(permutahedron_sort(x, 1e9), x.mean(-1, keepdim=True).expand(3, 8), rtol=0, atol=1e-6)
    gap = x.sort(-1).values.diff(dim=-1)
    exact = gap.amin(-1) * 0.99  # the documented bounds
    torch.testing.assert_close(permutahedron_rank(x, exact), permutahedron_rank(x, 1e-6))
    torch.testing.assert_close(permutahedron_sort(x, 0.99 / gap.amax(-1)), x.sort(-1).values)


def test_properties():
    x, w = normal(2, 9), normal(9, seed=1)
    y = permutahedron_projection(x, w, 0.5)
    torch.testing.assert_close(y.sum(-1), w.sum().expand(2))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(permutahedron_projection(x[:, order], w, 0.5), y[:, order])
    torch.testing.assert_close(permutahedron_projection(x + 3, w[order], 0.5), y)
    torch.testing.assert_close(permutahedron_sort(x[:, order]), permutahedron_sort(x))
    assert (permutahedron_sort(x).diff(dim=-1) >= -1e-12).all()
    half = normal(600, dtype=torch.bfloat16)  # ranks beyond 256 are not bfloat16 numbers, sorted entries are
    assert torch.equal(permutahedron_sort(half, 1e-4), half.sort().values)


@pytest.mark.slow
def test_derivatives():
    inputs = normal(2, 5).requires_grad_(), normal(2, 5, seed=1).requires_grad_()
    strength = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    options = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(permutahedron_projection, (*inputs, strength), **options)
    assert gradgradcheck(permutahedron_projection, (*inputs, strength), check_fwd_over_rev=True)
    for function in (permutahedron_rank, permutahedron_sort):
        assert gradcheck(function, (inputs[0], strength), **options)


@pytest.mark.slow
def test_functional_transforms():
    x, w = normal(3, 6), normal(6, seed=1)
    torch.testing.assert_close(vmap(permutahedron_projection, in_dims=(0, None))(x, w), permutahedron_projection(x, w))
    assert vmap(jacrev(permutahedron_rank))(x).shape == (3, 6, 6)


def test_extreme_inputs():
    base = normal(2, 40)
    for dtype in (torch.float32, torch.float64):
        rows = torch.cat((1e4 * base, 1e-8 * base, base + 1e4, 0 * base, 1e30 * base))
        for x in (rows, base[:, :1], base[:0]):
            for strength in (1e-4, 1.0, 1e4):
                for function in (permutahedron_rank, permutahedron_sort):
                    leaf = x.to(dtype).requires_grad_()
                    y = function(leaf, strength)
                    (grad,) = torch.autograd.grad((y * y.detach().sign()).sum(), leaf)
                    assert y.shape == x.shape and y.isfinite().all() and grad.isfinite().all()


@for_each("offset", [1e8, -1e12])
def test_a_common_offset_changes_nothing(offset):
    moved = torch.tensor([0.1, 0.5, 0.3, 2.0], dtype=torch.float64) + offset
    for strength in (0.3, 1.0):
        rank = permutahedron_rank(moved, strength)
        torch.testing.assert_close(rank, permutahedron_rank(moved - offset, strength), rtol=1e-14, atol=0)
        assert rank.sum().item() == pytest.approx(10.0, rel=1e-15)


EXPONENTS = [1.2, 4 / 3, 1.5, 1.9]
WEIGHTS = {"ranks": [4.0, 3.0, 2.0, 1.0], "signs": [1.5, 0.3, -0.4, -2.0], "zeros": [1.0, 1.0, 0.0, 0.0]}


@for_each("p", EXPONENTS)
@for_each("w", WEIGHTS.values())
@for_each("strength", [0.05, 0.5, 3.0])
def test_other_norms_by_their_optimality(p, w, strength):
    """y is in the permutahedron, and its objective has no gradient towards any vertex."""
    x, w = normal(5, 4), torch.tensor(w, dtype=torch.float64)
    y = permutahedron_projection(x, w, strength, p=p)
    sums = y.sort(-1, descending=True).values.cumsum(-1)
    most = w.sort(descending=True).values.cumsum(-1)
    assert (sums <= most + 1e-12).all()
    torch.testing.assert_close(sums[:, -1], most[-1].expand(5))
    gradient = x - strength * y.abs().pow(p - 1).copysign(y)
    vertices = torch.tensor(list(itertools.permutations(w.tolist())), dtype=torch.float64)
    gain = gradient @ vertices.mT - (gradient * y).sum(-1, keepdim=True)
    assert (gain <= 1e-6).all()


def test_other_norms_of_masks():
    x = normal(3, 8)
    w = torch.tensor([1.0] * 3 + [0.0] * 5, dtype=torch.float64)
    for p in EXPONENTS:
        expected = sparse_topk(x, 3, 0.8, p=p)
        torch.testing.assert_close(permutahedron_projection(x, w, 0.8, p=p), expected, rtol=1e-10, atol=1e-12)
    ordered = permutahedron_projection(x, w, 1e-9, p=1.5)
    assert torch.equal(ordered, topk_mask(x, 3))
    torch.testing.assert_close(permutahedron_projection(x, w, 0.8, p=2.0), permutahedron_projection(x, w, 0.8))


@pytest.mark.parametrize("p", [4 / 3, 1.5])
def test_derivatives_of_other_norms(p):
    x, w = normal(2, 5).requires_grad_(), torch.tensor([2.0, 1.0, 0.5, 0.1, -1.0], dtype=torch.float64).requires_grad_()
    strength = torch.tensor([0.9, 2.0], dtype=torch.float64, requires_grad=True)

    def projection(*arguments):
        return permutahedron_projection(*arguments, p=p)

    assert gradcheck(projection, (x, w, strength), check_forward_ad=True)
    assert gradgradcheck(projection, (x, w, strength))
    torch.testing.assert_close(vmap(lambda x, s: projection(x, w, s))(x, strength), projection(x, w, strength))
