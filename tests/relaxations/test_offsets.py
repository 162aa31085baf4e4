"""Thresholds that no float64 near the scores can represent: t is an offset from an item of the row."""

import pytest
import torch

from khot import capped_softmax, sparse_topk
from tests.loops import for_each
from tests.maps import RELAXATIONS

DTYPES = [torch.float32, torch.float64]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


each_map = for_each("case", RELAXATIONS)
each_dtype = for_each("dtype", DTYPES)


@each_map
@for_each("x, softness", [([1e17, 1e17], 1.0), ([1e6, 1e6], 1e-10), ([-3e200, -3e200], 1e-5)])
def test_ties_far_from_zero_share_the_sum(case, x, softness):
    y = case.map(tensor(x), 0.5, softness)
    torch.testing.assert_close(y, tensor([0.25, 0.25]), rtol=1e-13, atol=0)


@each_map
@each_dtype
def test_limits_of_k_far_from_zero(case, dtype):
    x, k = torch.tensor([[5.9e14], [5.9e14]], dtype=dtype), tensor([0.0, 1.0])
    torch.testing.assert_close(case.map(x, k, 1e-8), k.to(dtype).unsqueeze(-1), rtol=0, atol=1e-20)


@each_map
@for_each("far", [-1e17, -1e30, torch.finfo(torch.float64).min])
def test_an_outlier_is_as_good_as_masked(case, far):
    """Up to what a tail as heavy as Cauchy's gives to it."""
    near = tensor([0.0, 3.0, 1.0])
    y = case.map(torch.cat([near, tensor([far])]), 1.5)
    torch.testing.assert_close(y[:3], case.map(near, 1.5), rtol=1e-13, atol=1e-15)
    assert y[3] <= 1e-15


@each_map
@each_dtype
def test_scores_and_softness_next_to_the_largest_number(case, dtype):
    largest = torch.finfo(dtype).max
    g = torch.tensor([1.3, -0.4], dtype=dtype)
    rows = [([0.95 * largest, 0.0], 0.5 * largest), ([0.3 * largest] * 2, 0.0566), ([largest, -largest], 1.0)]
    for x, softness in rows:
        leaves = [torch.tensor(v, dtype=torch.float64).to(dtype).requires_grad_() for v in (x, 0.3, softness)]
        y = case.map(*leaves)
        torch.testing.assert_close(y.double().sum().item(), 0.3, rtol=1e-6, atol=0)
        for short in (False, True):  # with and without the derivative in the softness
            y = case.map(*leaves[:2], leaves[2].detach() if short else leaves[2])
            assert all(v.isfinite().all() for v in torch.autograd.grad((y * g).sum(), leaves[: 2 + (not short)]))
    same = torch.tensor([0.95, 0.0], dtype=torch.float64)
    reference = case.map(same, 0.3, 0.5)
    x = (same * largest).to(dtype)
    torch.testing.assert_close(case.map(x, 0.3, 0.5 * largest).double(), reference, rtol=2e-6, atol=1e-7)


@each_map
@for_each("offset", [1e4, 1e8, 1e16, 1e25])
def test_an_offset_costs_no_digit(case, offset):
    """Of rows whose shifted scores are exact."""
    x = offset * torch.tensor([1.0, 1.25, 1.5, 0.75, 1.25], dtype=torch.float64)
    for softness in (1e-3 * offset, offset):
        expected = case.map(x - offset, 2.3, softness)
        torch.testing.assert_close(case.map(x, 2.3, softness), expected, rtol=1e-12, atol=1e-15)


def test_the_last_item_gets_the_rest():
    """Rows of the sparse maps on which a search by Newton's method used to end without a root."""
    x = tensor([1.1849699005317955, 3.2416738376540364, 2.0263249547470257])
    k = 1.9898202763350243
    torch.testing.assert_close(sparse_topk(x, k, 6.5e-8), tensor([0.0, 1.0, k - 1]), rtol=0, atol=1e-15)
    torch.testing.assert_close(sparse_topk(tensor([0.0, 3, 1, -1e17]), 1.5), tensor([0.0, 1, 0.5, 0]))
    torch.testing.assert_close(capped_softmax(tensor([1e17, 1e17]), 1), tensor([0.5, 0.5]))


@for_each("case", [case for case in RELAXATIONS if case.compact])
@for_each("softness", [1e-6, 1e-7, 1e-8, 1e-12])
def test_small_softness_and_real_sums(case, softness):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 6, generator=generator, dtype=torch.float64)
    k = 6 * torch.rand(1000, generator=generator, dtype=torch.float64)
    y = case.map(x, k, softness)
    torch.testing.assert_close(y.sum(-1), k, rtol=0, atol=1e-14)
    interior = y.sort(-1, descending=True).values.gather(-1, k.long().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(interior, k - k.floor(), rtol=0, atol=1e-14)


BAD = {
    torch.float32: (1e-46, 1e-39, 1e39),
    torch.float16: (1e-46, 1e-39, 1e39),
    torch.bfloat16: (1e-46, 1e-39, 1e39),
    torch.float64: (1e-320, float("inf")),
}


@each_map
@for_each("dtype", BAD)
def test_softness_outside_the_computing_dtype(case, dtype):
    x = torch.zeros(3, dtype=dtype)
    for bad in BAD[dtype]:
        for value in (bad, torch.tensor(bad, dtype=torch.float64)):
            with pytest.raises(ValueError, match=f"`{case.softness}` must "):
                case.map(x, 1, value)
    limits = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    for good in (2 * limits.tiny, limits.max):  # transport's temperature is half its epsilon
        torch.testing.assert_close(case.map(x, 1, good), torch.full_like(x, 1 / 3))
