"""Entries of -inf change nothing of a mask: not a bit where loops leave them out, else no more than rounding."""

import pytest
import torch
from torch.func import jacfwd, jacrev

from khot import (
    capped_simplex_map,
    lapsum_topk,
    log_lapsum_topk,
    log_sigmoid_topk,
    normal_topk,
    sigmoid_topk,
    sparse_topk,
)
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from tests.backends import USUAL
from tests.inputs import normal
from tests.loops import for_each

MAPS = {
    "sigmoid": sigmoid_topk,
    "log_sigmoid": log_sigmoid_topk,
    "lapsum": lapsum_topk,
    "log_lapsum": log_lapsum_topk,
    "normal": normal_topk,
    "capped_exponential": lambda x, k, s: capped_simplex_map(x, k, s, link=CAPPED_EXPONENTIAL),
    **{f"sparse_{p:.3g}": lambda x, k, s, p=p: sparse_topk(x, k, s, p=p) for p in (2.0, 1.9, 4 / 3, 1.15, 1.1)},
}


def among_infinite(x, low, high):
    """The rows with entries of -inf and +inf between, and where their own are."""
    n = x.shape[-1]
    where = torch.randperm(n + low + high, generator=torch.Generator().manual_seed(0))
    own = where[:n].sort().values
    wide = torch.full((*x.shape[:-1], n + low + high), -torch.inf, dtype=x.dtype)
    wide[..., where[n : n + high]] = torch.inf
    wide[..., own] = x
    return wide, own


@pytest.mark.parametrize("relaxation", MAPS.values(), ids=MAPS.keys())
@for_each("dtype, softness", [(torch.float32, 0.3), (torch.float64, 1.0)])
def test_infinite_entries_change_nothing(relaxation, dtype, softness):
    for n, scale in ((50, 1.0), (50, 30.0), (5000, 1.0)):
        x = normal(100 if n == 50 else 3, n, dtype=dtype, scale=scale)
        y = relaxation(x, 5, softness)
        for low, high in ((14, 0), (100, 3)):
            wide, own = among_infinite(x, low, high)
            found = relaxation(wide, 5 + high, softness)[..., own]
            has_loops = USUAL == "numba" and relaxation is not MAPS["normal"]
            if has_loops and scale == 1.0:  # rows that loops leave to others they leave as they are
                assert torch.equal(found, y)
            else:
                torch.testing.assert_close(found, y, rtol=64 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)


@for_each("relaxation", MAPS.values())
@for_each("dtype", [torch.float32, torch.float64])
def test_rows_without_any_other_entry_have_no_gradient(relaxation, dtype):
    """Such as padding, with k = 0 in a batch of one k for each row."""
    x, k = normal(3, 6, dtype=dtype), torch.tensor([2, 0, 1])
    x[1] = -torch.inf
    x.requires_grad_()
    for sizes in (k, k.to(dtype).requires_grad_()):
        y = relaxation(x, sizes, 0.5)
        (grad,) = torch.autograd.grad(y.exp().sin().sum(), x)
        assert grad.isfinite().all() and not grad[1].any()


@for_each("relaxation", MAPS.values())
@for_each("row", [[-torch.inf], [-torch.inf] * 2, [torch.inf] * 2, [torch.inf, -torch.inf]])
def test_derivatives_of_rows_of_infinities(relaxation, row):
    x = torch.tensor(row, dtype=torch.float64)
    k, s = (x == torch.inf).sum().double(), torch.tensor(0.5, dtype=torch.float64)
    possible = (x > -torch.inf).double()  # elsewhere the logarithm of a mask is -inf

    def weighted(x, k, s):
        y = relaxation(x, k, s)
        return torch.where(y == -torch.inf, 0.0, y * possible)

    everything = (0, 1, 2)
    for derivatives in (jacrev(weighted, everything), jacfwd(weighted, everything)):
        assert all(value.isfinite().all() for value in derivatives(x, k, s))
    second = jacrev(jacrev(weighted, everything), everything)(x, k, s)
    assert all(value.isfinite().all() for values in second for value in values)
