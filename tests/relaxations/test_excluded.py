"""Entries of -inf in the order maps: they share the lowest places, and the others are a row of their own."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, vmap

from khot import (
    permutahedron_projection,
    permutahedron_rank,
    permutahedron_sort,
    soft_permutation,
    soft_rank,
    soft_sort,
    sorted_transport_topk,
)
from tests.inputs import normal
from tests.loops import for_each

KEPT = [[0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 6], [5]]  # units of each row that are not excluded
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 2e-3}
TO_PARTS = {
    "rank": lambda x: soft_rank(x, 0.7),
    "sort": lambda x: soft_sort(x, 0.7),
    "sort_descending": lambda x: soft_sort(x, 0.7, descending=True),
    "permutation": lambda x: soft_permutation(x, 0.7),
    "permutahedron_rank": lambda x: permutahedron_rank(x, 0.7),
    "permutahedron_sort": lambda x: permutahedron_sort(x, 0.7),
    "transport": lambda x: sorted_transport_topk(x, 2, 0.7),
}
every_map = for_each("order_map", TO_PARTS.values())


def rows_with_excluded(dtype, spread=1.0):
    x = normal(3, 7, scale=spread).to(dtype)
    kept = torch.zeros(3, 7, dtype=torch.bool)
    for row, units in zip(kept, KEPT, strict=True):
        row[units] = True
    return x.masked_fill(~kept, -torch.inf), kept


def close(found, expected, dtype):
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@for_each("dtype", TOLERANCE)
@for_each("spread", [1.0, 1e3, 1e-4])
@for_each("descending", [False, True])
def test_soft_maps_by_definition(dtype, spread, descending):
    x, kept = rows_with_excluded(dtype, spread)
    for scale in (0.01, 0.7, 50.0):
        ranks, ordered, matrices = (f(x, scale, descending) for f in (soft_rank, soft_sort, soft_permutation))
        for row, own, rank, values, matrix in zip(x, kept, ranks, ordered, matrices, strict=True):
            m, others = int((~own).sum()), row[own]
            lowest, place = (slice(7 - m, 7), slice(0, 7 - m)) if descending else (slice(0, m), slice(m, 7))
            close(rank[own], soft_rank(others, scale, descending) + place.start, dtype)
            close(rank[~own], torch.full((m,), lowest.start + (m + 1) / 2, dtype=dtype), dtype)
            close(values[place], soft_sort(others, scale, descending), dtype)
            assert (values[lowest] == -torch.inf).all()
            close(matrix[own][:, place], soft_permutation(others, scale, descending), dtype)
            close(matrix[~own][:, lowest], torch.full((m, m), 1 / max(m, 1), dtype=dtype), dtype)
            assert (matrix[own][:, lowest] == 0).all() and (matrix[~own][:, place] == 0).all()


@for_each("dtype", TOLERANCE)
@for_each("strength", [0.01, 0.7, 50.0])
def test_permutahedron_maps_by_definition(dtype, strength):
    x, kept = rows_with_excluded(dtype)
    w = normal(7, seed=1).sort().values
    ranks, ordered, projected = (
        permutahedron_rank(x, strength),
        permutahedron_sort(x, strength),
        permutahedron_projection(x, w, strength),
    )
    for row, own, rank, values, y in zip(x, kept, ranks, ordered, projected, strict=True):
        m, others = int((~own).sum()), row[own]
        close(rank[own], permutahedron_rank(others, strength) + m, dtype)
        close(rank[~own], torch.full((m,), (m + 1) / 2, dtype=dtype), dtype)
        close(values[m:], permutahedron_sort(others, strength), dtype)
        assert (values[:m] == -torch.inf).all()
        close(y[own], permutahedron_projection(others, w[m:], strength), dtype)
        close(y[~own], w[:m].mean().expand(m).to(dtype), dtype)


@for_each("dtype", TOLERANCE)
@for_each("epsilon", [0.01, 0.7, 50.0])
def test_sorted_transport_by_definition(dtype, epsilon):
    x, kept = rows_with_excluded(dtype)
    for k, rows in ((1, 3), (4, 2)):  # up to all that are left
        y = sorted_transport_topk(x[:rows], k, epsilon)
        for row, own, found in zip(x, kept, y, strict=False):
            close(found[own], sorted_transport_topk(row[own], k, epsilon), dtype)
            assert (found[~own] == 0).all()
    with pytest.raises(ValueError, match="`k` must satisfy .* not exceed the number of entries above -inf, at least 1"):
        sorted_transport_topk(x, 2, epsilon)


@every_map
def test_derivatives(order_map):
    """Those of the others alone, to second order; 0 for excluded entries, and finite."""
    x = torch.tensor([0.3, -torch.inf, 1.2, 0.4, -torch.inf], dtype=torch.float64)
    own = x > -torch.inf

    def loss(x):
        y = order_map(x)
        y = torch.where(y == -torch.inf, 0.0, y)
        return (y.square() * torch.linspace(0.3, 1.0, y.numel(), dtype=y.dtype).view(y.shape)).sum()

    gradient, curvature = grad(loss)(x), hessian(loss)(x)
    assert gradient.isfinite().all() and (gradient[~own] == 0).all()
    assert curvature.isfinite().all() and (curvature[~own] == 0).all() and (curvature[:, ~own] == 0).all()
    torch.testing.assert_close(jacfwd(loss)(x), gradient)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loss(leaf), leaf)[0], gradient)

    def of_others(others):
        return loss(x.masked_scatter(own, others))

    assert torch.autograd.gradcheck(of_others, x[own].requires_grad_())


@every_map
def test_vmap(order_map):
    x = rows_with_excluded(torch.float64)[0][:2]
    torch.testing.assert_close(vmap(order_map)(x), order_map(x))


@every_map
def test_rows_far_from_zero(order_map):
    """An excluded entry must stay apart from others whose rounding exceeds the scale."""
    x = torch.tensor([1e8, 1e8 + 64, -torch.inf, 1e8 + 8], dtype=torch.float32)
    shifted = order_map(x - 1e8)
    if shifted.isinf().any():
        shifted, found = shifted[shifted.isfinite()] + 1e8, order_map(x)
        torch.testing.assert_close(found[found.isfinite()], shifted, rtol=1e-7, atol=8)
    else:
        torch.testing.assert_close(order_map(x), shifted, rtol=0, atol=1e-5)
        torch.testing.assert_close(vmap(order_map)(x.expand(2, 4))[0], shifted, rtol=0, atol=1e-5)


def test_rows_without_any_other_entry():
    x = torch.full((2, 3), -torch.inf)
    assert (soft_rank(x) == 2).all() and (permutahedron_rank(x) == 2).all()
    assert (soft_sort(x) == -torch.inf).all() and (permutahedron_sort(x) == -torch.inf).all()
    torch.testing.assert_close(soft_permutation(x), torch.full((2, 3, 3), 1 / 3))
    assert sorted_transport_topk(x, 0).shape == (2, 3, 0)
