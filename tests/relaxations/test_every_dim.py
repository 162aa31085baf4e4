"""Every map along every axis, also for shapes whose axes have equal lengths, where strides coincide."""

import itertools
import warnings

import torch

import khot
from khot.relaxations import Logistic
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import ODD_MAPS, RELAXATIONS, publics

SHAPES = [(3, 3), (1, 4), (4, 1), (4, 2, 2), (1, 4, 4), (4, 1, 4), (40, 40)]
MAPS = {mask.__name__: lambda x, dim, mask=mask: mask(x, 0.7, dim=dim) for mask in publics(RELAXATIONS, ODD_MAPS)}
MAPS |= {
    "topk_mask": lambda x, dim: khot.topk_mask(x, 1, dim=dim),
    "straight_through_topk": lambda x, dim: khot.straight_through_topk(x, 1, dim=dim),
    "capped_simplex_map": lambda x, dim: khot.capped_simplex_map(x, 0.7, link=Logistic(), dim=dim),
    "sparse_topk": lambda x, dim: khot.sparse_topk(x, 0.7, p=1.5, dim=dim),
    "sparse_topk_signed": lambda x, dim: khot.sparse_topk_signed(x, 0.7, p=1.5, dim=dim),
    "sparse_topk_magnitude": lambda x, dim: khot.sparse_topk_magnitude(x, 0.7, p=1.5, dim=dim),
    "successive_softmax_topk": lambda x, dim: khot.successive_softmax_topk(x, 1, dim=dim),
    "soft_rank": lambda x, dim: khot.soft_rank(x, dim=dim),
    "soft_sort": lambda x, dim: khot.soft_sort(x, descending=True, dim=dim),
    "soft_count": lambda x, dim: khot.soft_count(x, torch.tensor([-0.3, 0.9], dtype=x.dtype), dim=dim),
    "soft_quantile": lambda x, dim: khot.soft_quantile(x, torch.tensor([0.2, 0.7], dtype=x.dtype), dim=dim),
    "permutahedron_rank": lambda x, dim: khot.permutahedron_rank(x, dim=dim),
    "permutahedron_sort": lambda x, dim: khot.permutahedron_sort(x, dim=dim),
    "permutahedron_projection": lambda x, dim: khot.permutahedron_projection(
        x, 0.3 * x.flip(dim).detach(), 2.0, dim=dim
    ),
    "sorted_transport_topk": lambda x, dim: khot.sorted_transport_topk(x, 1, dim=dim).squeeze(-1),
}
AT_THE_END = {"soft_permutation": lambda x, dim: khot.soft_permutation(x, dim=dim)}  # has its axes there


def derivative(function, x, dim, weight):
    """The map and its vector-Jacobian product; zeros for a hard mask."""
    x = x.detach().requires_grad_()
    y = function(x, dim)
    grad = torch.autograd.grad((y * weight).sum(), x)[0] if y.requires_grad else torch.zeros_like(x)
    return y.detach(), grad


@for_each("name", [*MAPS, *AT_THE_END])
@for_each("shape", SHAPES)
def test_every_dim(name, shape):
    function, x = {**MAPS, **AT_THE_END}[name], normal(*shape)
    for dim in range(-len(shape), len(shape)):
        weight = normal(*function(x, dim).shape, seed=1)
        moved, moved_weight = x.movedim(dim, -1).contiguous(), weight if name in AT_THE_END else weight.movedim(dim, -1)
        y, grad = derivative(function, x, dim, weight)
        expected, expected_grad = derivative(function, moved, -1, moved_weight)
        torch.testing.assert_close(y, expected if name in AT_THE_END else expected.movedim(-1, dim))
        torch.testing.assert_close(grad, expected_grad.movedim(-1, dim))


def test_every_map_is_here():
    """What is no map of one axis, or takes the last alone, is named."""
    others = {"Link", "Logistic", "isotonic_l2", "isotonic_lp", "straight_through_value", "topk_threshold"}
    others |= {"topk_indices"}
    assert set(khot.relaxations.__all__) == {*MAPS, *AT_THE_END} | others


@for_each("solver", ["pav", "dual"])
@for_each("p, shape", itertools.product([2.0, 1.5], SHAPES[:-1]))
def test_isotonic_maps_of_any_strides(shape, p, solver):
    s, w = normal(*shape), normal(*shape, seed=1)
    for dim in range(len(shape)):
        moved = s.movedim(dim, -1), w.movedim(dim, -1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # so few sweeps are not enough
            v = khot.isotonic_lp(*moved, p, 0.7, solver, max_iter=2)
            expected = khot.isotonic_lp(*(m.contiguous() for m in moved), p, 0.7, solver, max_iter=2)
        torch.testing.assert_close(v, expected)
