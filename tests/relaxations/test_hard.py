from fractions import Fraction

import numpy as np
import pytest
import torch

from khot import topk_mask

INF = float("inf")


def test_marks_the_largest():
    x = torch.tensor([[0.3, 2.0, -1.0, 0.9], [-INF, INF, 0.0, INF]])
    assert torch.equal(topk_mask(x, 2), torch.tensor([[0.0, 1, 0, 1], [0, 1, 0, 1]]))
    assert torch.equal(topk_mask(x.T, 2, dim=0), topk_mask(x, 2).T)
    assert topk_mask(x.half(), 2).dtype == torch.float16


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_exactly_k_also_with_ties(k):
    for x in (torch.zeros(4, 7), torch.tensor([1.0, 1, 1, 0, 0, 1, 1]).expand(4, 7), torch.full((4, 7), -INF)):
        for size in (k, torch.tensor(k), torch.full((4,), k)):
            mask = topk_mask(x, size)
            assert torch.equal(mask.sum(-1), torch.full((4,), float(k))) and ((mask == 0) | (mask == 1)).all()


def test_k_per_row_empty_batch_and_no_gradient():
    x = torch.tensor([[3.0, 1, 2], [1, 2, 3]], requires_grad=True)
    mask = topk_mask(x, torch.tensor([1, 2]))
    assert torch.equal(mask, torch.tensor([[1.0, 0, 0], [0, 1, 1]])) and not mask.requires_grad
    assert topk_mask(torch.zeros(0, 3), 2).shape == (0, 3)


@pytest.mark.slow
def test_vmap_and_compile():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.func.vmap(lambda row: topk_mask(row, 2))(x), topk_mask(x, 2))
    torch._dynamo.reset()
    compiled = torch.compile(topk_mask, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, 2), topk_mask(x, 2))
    assert torch.equal(compiled(x, torch.tensor([1, 2, 3, 4])), topk_mask(x, torch.tensor([1, 2, 3, 4])))


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, "0 <= k <= n.*k=4 with n=3", (torch.zeros(3), 4)),
        (ValueError, "0 <= k <= n.*k=-1", (torch.zeros(3), -1)),
        (ValueError, "0 <= k <= n", (torch.zeros(2, 3), torch.tensor([1, 4]))),
        (ValueError, "NaN", (torch.tensor([torch.nan, 1.0]), 1)),
        (TypeError, "`k` must be an int", (torch.zeros(3), 1.0)),
        (TypeError, "`k` must be an int", (torch.zeros(3), np.float32(1))),
        (TypeError, "`k` must be an int", (torch.zeros(3), Fraction(1))),
        (TypeError, "`k` must be an int", (torch.zeros(3), torch.tensor(1.0))),
        (TypeError, "`k`.*bool", (torch.zeros(3), True)),
        (TypeError, "floating-point", (torch.zeros(3, dtype=torch.long), 1)),
        (ValueError, r"`k` of shape \(2,\)", (torch.zeros(3, 4), torch.tensor([1, 2]))),
    ],
)
def test_errors(error, match, args):
    with pytest.raises(error, match=match):
        topk_mask(*args)
