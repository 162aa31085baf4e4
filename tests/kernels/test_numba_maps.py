"""Loops of the maps by absolute value and permutations: threads, and rows left."""

import pytest
import torch

from khot import sparse_topk_magnitude
from khot.kernels import backend
from tests.inputs import normal

pytest.importorskip("numba", reason="numba is not installed")

from khot.kernels.threshold import numba_backend as magnitude

pytestmark = pytest.mark.slow  # loops that few tests share, each a second or more to compile


@pytest.fixture
def left(monkeypatch):
    """How many rows each call of a loop leaves to the torch backend."""
    counts, run = [], magnitude.over_rows

    def counted(*arguments):
        counts.append(run(*arguments))
        return counts[-1]

    monkeypatch.setattr(magnitude, "over_rows", counted)
    return counts


both_reals = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def differentiate(function, *inputs):
    """Values and gradients in each backend."""
    results = []
    for name in ("numba", "torch"):
        with backend(name):
            leaves = [x.clone().requires_grad_() for x in inputs]
            y = function(*leaves)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, normal(*y.shape, seed=5).to(y.dtype))])
    return zip(*results, strict=True)


@both_reals
@pytest.mark.parametrize("p", [2.0, 1.7])
def test_ordinary_magnitudes_are_not_left(p, dtype, left):
    eps = torch.finfo(dtype).eps
    cases = [(2, 1, 1), (10, 5, 0.01), (100, 3.5, 1), (1000, 500, 1e-3), (6000, 77, 0.5), (10, 10, 1), (10, 0, 1)]
    for n, k, strength in cases:
        x = normal(20, n, dtype=dtype)
        x[0], x[1, ::2] = 1.0, 0.0  # ties, and masked entries
        numbers = torch.tensor([k] * 20, dtype=torch.float64), torch.tensor(strength, dtype=torch.float64)
        for found, expected in differentiate(lambda x, k, s: sparse_topk_magnitude(x, k, s, p), x, *numbers):
            size = 1 + expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=0, atol=1000 * eps * size)
    assert left == [0] * 2 * len(cases)


@both_reals
def test_rare_magnitudes_are_those_of_the_torch_backend(dtype, left):
    x, far = normal(8, 40, dtype=dtype), 1e30 if dtype == torch.float32 else 1e200
    x[0] *= far  # squares overflow
    x[1] /= far
    x[2, 3] = torch.finfo(dtype).max
    x[3, 3:] = 0.0
    x[4] = 0.0
    x[5, :5], x[5, 5:] = 1.0, 1 - 4 * torch.finfo(dtype).eps
    x[6, ::2] *= 1e-10
    k = torch.full((8,), 5.0, dtype=torch.float64)
    for strength in (1.0, 1e-12, 1e10):
        results = differentiate(lambda x, k, s: sparse_topk_magnitude(x, k, s, 1.7), x, k, torch.full_like(k, strength))
        for found, expected in results:
            torch.testing.assert_close(found, expected, rtol=2e4 * torch.finfo(dtype).eps, atol=0.0)
    assert all(left)
    left.clear()
    for k in (5, 40):  # all entries, in which case there is no threshold to find
        sparse_topk_magnitude(x[7:].index_fill(-1, torch.tensor(0), 2.0**50), k)  # of which powers lose digits
    assert left == [1, 1] * 2  # by the short way of a call with numbers, and by the general one
    x[7, 3] = torch.nan
    with pytest.raises(ValueError, match="`x` must not contain NaN, but row 7 of the flattened batch does"):
        sparse_topk_magnitude(x, 5)
