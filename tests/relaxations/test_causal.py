"""Rows of different length, as in causal attention: one k for all is an error that says what to give instead."""

import pytest
import torch

import khot
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import RELAXATIONS

N, K = 6, 3
MASKS = [case.map for case in RELAXATIONS] + [khot.straight_through_topk]


def causal_scores():
    return normal(2, N, N).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)


@for_each("mask", MASKS)
def test_the_error_names_the_recipe_and_the_recipe_works(mask):
    x = causal_scores().requires_grad_()
    with pytest.raises(ValueError, match=r"causal attention is k=torch.arange\(1, n \+ 1\).clamp\(max=3\)"):
        mask(x, K, 0.7)
    k = torch.arange(1, N + 1).clamp(max=K)
    assert torch.equal(k.expand(2, N), (x > -torch.inf).sum(-1).clamp(max=K))
    y = mask(x, k, 0.7)
    torch.testing.assert_close(y.sum(-1), k.double().expand(2, N))
    assert not y[x == -torch.inf].any()
    (grad,) = torch.autograd.grad((y * normal(2, N, N, seed=1)).sum(), x)
    assert grad.isfinite().all() and not grad[x == -torch.inf].any()


def test_other_errors_have_no_such_advice():
    with pytest.raises(ValueError, match=r"\+inf entries") as error:
        khot.sigmoid_topk(torch.tensor([torch.inf, torch.inf, 0.0]), 1)
    assert "causal" not in str(error.value)
