"""Several axes as one ground set: every mask equals that of the flattened axes, without a copy if a view suffices."""

import pytest
import torch

import khot
from khot.relaxations.axes import as_axes, as_rows
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import ODD_MAPS, RELAXATIONS


def seeded():
    return torch.Generator().manual_seed(0)


MASKS = {case.name: case.map for case in [*RELAXATIONS, *ODD_MAPS]}
MASKS |= {case.log.__name__: case.log for case in RELAXATIONS if case.log}
MASKS |= {"straight_through_topk": khot.straight_through_topk}
WHOLE = {
    "perturbed_topk": lambda x, k, s, dim: khot.perturbed_topk(x, k, s, 5, dim=dim, generator=seeded()),
    "topk_mask": lambda x, k, softness, dim: khot.topk_mask(x, k, dim=dim),
    "successive_softmax_topk": khot.successive_softmax_topk,
}
EVERY = {**MASKS, **WHOLE}
ONE_BY_ONE = [name for name in EVERY if name != "perturbed_topk"]  # whose rows have noise of their own
DIMS = [(-1,), (0, 1), (1, 2), (-1, 0), (2, 1, 0), (3, -3), (0, 1, 2, 3)]
X = normal(2, 3, 2, 2)


def flattened(x, dim):
    """By indices alone: the other axes, then the entries."""
    axes = sorted(axis % x.dim() for axis in dim)
    others = [axis for axis in range(x.dim()) if axis not in axes]
    return x.permute(*others, *axes).reshape(*(x.shape[axis] for axis in others), -1)


@for_each("dim", DIMS)
@for_each("name", EVERY)
def test_is_the_mask_of_the_flattened_axes(name, dim):
    x, weight = X.clone().requires_grad_(), normal(*X.shape, seed=1)
    y = EVERY[name](x, 2, 0.7, dim=dim)
    expected = EVERY[name](flattened(x, dim), 2, 0.7, dim=-1)
    assert y.shape == x.shape
    torch.testing.assert_close(flattened(y, dim), expected)
    if y.requires_grad:
        (grad,) = torch.autograd.grad((y * weight).sum(), x)
        (wanted,) = torch.autograd.grad((expected * flattened(weight, dim)).sum(), x)
        torch.testing.assert_close(grad, wanted)


@for_each("name", ONE_BY_ONE)
def test_sum_and_softness_broadcast_with_the_other_axes(name):
    k, softness = torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.0, 2.0], dtype=X.dtype)
    y = EVERY[name](X, k, softness, dim=(0, 2, 3))
    for j in range(3):
        row = EVERY[name](X[:, j].reshape(-1), int(k[j]), softness[j].item(), dim=-1)
        torch.testing.assert_close(y[:, j].reshape(-1), row)


@for_each("name", ONE_BY_ONE)
def test_empty_batch_and_vmap(name):
    assert EVERY[name](normal(0, 2, 3), 2, 0.7, dim=(1, 2)).shape == (0, 2, 3)
    assert EVERY[name](normal(3, 0, 2), 0, 0.7, dim=(1, 2)).shape == (3, 0, 2)
    mapped = torch.vmap(lambda x: EVERY[name](x, 2, 0.7, dim=(0, -1)))(X)
    torch.testing.assert_close(mapped, torch.stack([EVERY[name](x, 2, 0.7, dim=(0, -1)) for x in X]))


def test_compiled_and_exported():
    class Mask(torch.nn.Module):
        def forward(self, x):
            return khot.sigmoid_topk(x, 2, dim=(0, 2))

    expected = Mask()(X)
    torch.testing.assert_close(torch.compile(Mask(), fullgraph=True, backend="aot_eager")(X), expected)
    torch.testing.assert_close(torch.export.export(Mask(), (X,)).module()(X), expected)


@for_each("dim", [(-1,), (2, 3), (3, 2), (0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_adjacent_axes_are_a_view(dim):
    x = torch.zeros(2, 3, 4, 5)
    rows = as_rows(x, dim)
    assert rows.data_ptr() == x.data_ptr() and rows._base is x
    rows.fill_(1.0)
    back = as_axes(rows, x, dim)
    assert (x == 1).all() and back.data_ptr() == x.data_ptr() and back.stride() == x.stride()


@for_each(
    "dim, error, message",
    [
        ((), ValueError, "one or more axes"),
        ((0, 4), ValueError, r"one or more axes in \[-4, 3\], each once"),
        ((0, -4), ValueError, "each once"),
        ((0, True), TypeError, "an int or a tuple of ints"),
        ((0.0,), TypeError, "an int or a tuple of ints"),
        ([0, 1], TypeError, "an int or a tuple of ints"),
    ],
)
def test_errors(dim, error, message):
    for name in ("sigmoid_topk", "topk_mask", "sparse_topk_signed_two"):
        with pytest.raises(error, match=message):
            EVERY[name](X, 1, 0.7, dim=dim)


def test_maps_of_sorted_entries_take_one_axis():
    with pytest.raises(TypeError, match="`dim` must be an int, but"):
        khot.soft_rank(X, dim=(0, 1))
