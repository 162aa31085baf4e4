"""The lowest levels of the product tree as one operation: its torch version, its derivatives, its place in the tree."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from khot.kernels.count import forest, roots_shape
from khot.kernels.count import tree as product_tree
from khot.kernels.count.tree import ProductTree
from khot.laws import conditional_poisson as cps
from tests.log_partition import log_partition

OPERATORS = torch.ops.khot


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Product trees as on an accelerator, with the operations of the forest in torch; up to 16 units in one."""

    def levels(leaf: Tensor, widest: int) -> int:
        whole = (leaf.shape[1] - 1).bit_length()
        return whole if whole <= 4 else min(widest, 4)

    monkeypatch.setattr(product_tree, "forest_levels", levels)


@pytest.mark.slow
@pytest.mark.parametrize("n, levels, bound", [(5, 3, 2), (7, 2, 3)])
def test_derivatives(n: int, levels: int, bound: int) -> None:
    plan = torch.tensor([1, bound]), bound, levels
    leaf, u = uniform(2, 2, n, 2)
    g = uniform(*roots_shape(leaf, bound, levels), seed=1)
    cases = ((forest.roots, (leaf,)), (forest.outsides, (leaf, g)), (forest.bends, (leaf, u, g)))
    for f, inputs in cases:
        inputs = tuple(x.clone().requires_grad_() for x in inputs)
        assert gradcheck(lambda *x, f=f: f(*x, *plan), inputs, check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(lambda *x, f=f: f(*x, *plan), inputs, fast_mode=True)


@pytest.mark.slow
def test_transforms() -> None:
    leaf, k = uniform(3, 2, 5, 2), torch.tensor([1, 2])
    g = uniform(3, 1, 1, 2, seed=1)
    mapped = torch.func.vmap(forest.outsides, (0, 0, None, None, None))(leaf, g, k, 2, 3)
    rows = torch.stack([forest.outsides(x, y, k, 2, 3) for x, y in zip(leaf, g, strict=True)])
    torch.testing.assert_close(mapped, rows)
    third = torch.func.jacfwd(torch.func.jacfwd(torch.func.jacfwd(lambda x: forest.roots(x, k, 2, 3))))(leaf[0])
    again = torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(lambda x: forest.roots(x, k, 2, 3))))(leaf[0])
    torch.testing.assert_close(third, again)


@pytest.mark.slow
def test_operators() -> None:
    leaf, k = uniform(2, 7, 3), torch.tensor([1, 2, 3])
    for levels in (2, 3):
        g = uniform(*roots_shape(leaf, 3, levels), seed=1)
        torch.library.opcheck(OPERATORS.forest_roots.default, (leaf, k, 3, levels))
        torch.library.opcheck(OPERATORS.forest_outsides.default, (leaf, g, k, 3, levels))
        torch.library.opcheck(OPERATORS.forest_bends.default, (leaf, leaf.flip(0), g, k, 3, levels, True))


@pytest.mark.parametrize("n, k", [(2, 1), (11, 4), (16, 8), (50, 20), (600, 290), (601, 3)])
def test_tree_agrees(n: int, k: int, one_operation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (4 * uniform(3, n) - 2).requires_grad_()

    def results() -> list[Tensor]:
        value, mean = log_partition(logits, k), cps.inclusion_probabilities(logits, k)
        grads = torch.autograd.grad((mean * logits.detach().cos()).sum() + value.square().sum(), logits)
        return [value, mean, *grads]

    found = results()
    monkeypatch.undo()
    for a, b in zip(found, results(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_covariance(one_operation: None) -> None:
    logits = 4 * uniform(2, 40) - 2
    assert ProductTree(uniform(2, 40, 1), torch.tensor([15]), 15).low == 4
    hessian = torch.func.hessian(lambda t: log_partition(t, 15))(logits[0])
    torch.testing.assert_close(cps.covariance(logits, 15)[0], hessian)


def test_draws_without_triton(one_operation: None) -> None:
    """What was built for kernels that then do not run, for example because the backend changes in between."""
    for n, k in ((9, 4), (40, 15)):
        assert (cps.sample(uniform(2, n), k, (20,)).sum(-1) == k).all()
