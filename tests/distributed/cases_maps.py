"""Cases of maps and losses, whose rows are whole on each rank or gathered."""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import khot
from tests.distributed.group import case
from tests.distributed.spread import P, R, S, assert_same, compare, mesh_of, spread
from tests.every_map import MAPS
from tests.inputs import normal
from tests.registry import LOSSES

SHAPE = (3, 5, 7)  # uneven shards, and an empty one on four ranks
WHOLE_ROWS = [[S(0)], [S(1)], [R], [P], [S(0), S(1)], [S(1), S(1)], [P, S(0)], [R, S(1)]]


def soft(shape, seed=1):
    return normal(*shape, seed=seed).abs() + 0.5


@case
def every_map_of_whole_rows():
    x = normal(*SHAPE)
    for i, member in enumerate(MAPS):
        for placements in WHOLE_ROWS if i % 10 == 0 else WHOLE_ROWS[i % 8 :: 8]:
            y, leaves = compare(lambda x, m=member: m.call(x, 0.7), [x], [placements], member.differentiable)
            wanted = [R if p.is_partial() else p for p in placements]
            assert list(y.placements) == wanted, f"{member.name} {placements} {y.placements}"
            assert all(list(leaf.grad.placements) == wanted for leaf in leaves), f"{member.name} {placements}"


@case
def no_communication_for_whole_rows():
    x = spread(normal(*SHAPE), [S(0)], True)
    softness, k = spread(soft((3, 5)), [S(0)], True), spread(torch.full((5,), 2.0).double(), [R], True)
    for member in MAPS:
        with CommDebugMode() as mode:
            member.call(x, 0.7)
        assert mode.get_total_counts() == 0, member.name
    with CommDebugMode() as mode:
        khot.sigmoid_topk(x, k, softness).to_local().sum().backward()
    assert mode.get_total_counts() == 0


@case
def k_and_softness_of_every_kind():
    x, k = normal(*SHAPE), normal(3, 5, seed=2).sigmoid() * 6
    kinds = [
        (k, soft((3, 5))),
        (k[:, :1], soft((5,))),
        (torch.tensor(2.5).double(), soft((1, 1))),
        (k[:1], torch.tensor([0.7]).double()),
    ]
    for i, placements in enumerate(WHOLE_ROWS):
        k, softness = kinds[i % 4]
        everywhere = [R] * len(placements)
        function = khot.sparse_topk_magnitude if placements == [S(0), S(1)] else khot.sigmoid_topk
        compare(function, [x, k, softness], [placements, everywhere if i % 3 else None, everywhere])
    k, softness = kinds[0]
    for where in ([S(0)], [S(1)], [S(0), S(1)]):
        compare(khot.sigmoid_topk, [x, k, softness], [where, where, where])
        compare(khot.sigmoid_topk, [x, k, softness], [[R] * len(where), where, where])


@case
def gradients_of_numbers_have_the_right_placements():
    x, k, softness = normal(4, 7), torch.tensor([2.5]).double(), soft((4,))
    _, (_, of_k, of_softness) = compare(khot.sigmoid_topk, [x, k, softness], [[S(0)], [R], [R]])
    assert of_k.grad.placements[0].is_partial()
    assert of_softness.grad.placements[0] in (S(0), R)
    _, (_, of_k) = compare(lambda x, k: khot.sigmoid_topk(x, k), [x, k], [[R], [R]])
    assert of_k.grad.placements[0] == R


@case
def other_axes():
    x = normal(*SHAPE)
    for dim, placements in itertools.product((0, 1, (0, 2), (1, 0)), ([S(0)], [S(1)], [S(2)], [S(2), S(1)])):
        axes = {d % 3 for d in (dim if isinstance(dim, tuple) else (dim,))}
        sharded = {p.dim for p in placements if isinstance(p, S)}
        if axes & sharded:
            continue
        compare(lambda x, d=dim: khot.sparse_topk(x, 2.5, 0.7, dim=d), [x], [placements])
        if len(placements) == 1:
            compare(lambda x, d=dim: khot.topk_threshold(x, 2.5, 0.7, dim=d), [x], [placements])
        if isinstance(dim, int):
            compare(lambda x, d=dim: khot.soft_permutation(x, 0.7, dim=d), [x], [placements])
            compare(lambda x, d=dim: khot.sorted_transport_topk(x, 2, 0.7, dim=d), [x], [placements])


@case
def rows_in_parts_are_gathered_for_maps_of_their_order():
    x, w = normal(4, 7), torch.arange(7.0, 0.0, -1).double()
    functions = [
        lambda x: khot.soft_rank(x, 0.7),
        lambda x: khot.soft_quantile(x, torch.tensor([0.3]), 0.7),
        lambda x: khot.permutahedron_projection(x, w, 0.7),
        lambda x: khot.isotonic_l2(x, w),
        lambda x: khot.successive_softmax_topk(x, 2),
    ]
    for function, placements in itertools.product(functions, ([S(1)], [S(0), S(1)], [S(1), S(1)])):
        y, _ = compare(function, [x], [placements])
        assert list(y.placements) == placements
    compare(lambda x: khot.soft_permutation(x, 0.7), [x], [[S(1)]])
    compare(lambda x: khot.soft_quantile(x, 0.3, 0.7), [x], [[S(0), S(1)]])  # a number drops the axis


@case
def every_loss():
    spreads = [[S(0)], [R], [P], [S(1)], [S(0), S(0)], [S(0), S(1)]]
    for i, (loss, reduction) in enumerate(itertools.product(LOSSES, ("none", "mean", "sum"))):
        for placements in spreads[i % 3 :: 3]:  # some of them, the others with the next reduction and loss
            x, target = normal(5, 6), loss.targets(1, 5)
            everywhere = [R] * len(placements)
            call = lambda x, s, t=target, m=loss, r=reduction: m.function(x, t, s, r)  # noqa: E731 - of this turn
            compare(call, [x, soft((5,))], [placements, everywhere])
    p_k = torch.tensor([0.5, 0.2, 0.3]).double()
    target = torch.tensor([0, 5, 3, 2, 2])
    compare(lambda x, p: khot.topk_cross_entropy(x, target, p), [normal(5, 6), p_k], [[S(0)], [R]])
    relevance, discounts = (normal(5, 6, seed=1) > 0.5) * torch.tensor([[1], [0], [2], [0], [1]]), p_k.sort().values
    for placements in ([S(0)], [S(1)], [S(0), S(1)]):  # rows without relevance are no part of the mean
        everywhere = [R] * len(placements)
        call = lambda x, d: khot.topk_metric_loss(x, relevance, 3, d)  # noqa: E731
        compare(call, [normal(5, 6), discounts.flip(0)], [placements, everywhere])


@case
def half_types():
    x = normal(5, 9, dtype=torch.bfloat16)
    compare(lambda x: khot.sigmoid_topk(x, 2.5), [x], [[S(0)]], rtol=0, atol=0)
    target = khot.topk_mask(x, 2)
    compare(lambda x: khot.fenchel_young_topk_loss(x, target, 2), [x], [[S(0)]], rtol=1e-2, atol=1e-2)


@case
def what_is_refused():
    mesh, x = mesh_of(1), spread(normal(4, 7), [S(0)])
    with pytest.raises(ValueError, match="`k` is a plain tensor that requires a gradient beside the DTensor `x`"):
        khot.sigmoid_topk(x, torch.tensor(2.0, requires_grad=True))
    with pytest.raises(TypeError, match="`x` must be a DTensor, too, if `k` is one"):
        khot.sigmoid_topk(normal(4, 7), spread(torch.tensor(2.0), [R]))
    with pytest.raises(ValueError, match="`k` must be on the device mesh of `x`"):
        khot.sigmoid_topk(x, spread(torch.tensor(2.0), [R, R]))
    with pytest.raises(ValueError, match="must broadcast to the batch shape \\(4,\\)"):
        khot.sigmoid_topk(x, torch.ones(3))
    with pytest.raises(ValueError, match="k=8 with n=7"):
        khot.sigmoid_topk(x, 8)
    with pytest.raises(TypeError, match="`k` must be a real number"):
        khot.sigmoid_topk(x, True)
    strided = DTensor.from_local(
        x.to_local(), mesh, [_StridedShard(0, split_factor=2)], shape=x.shape, stride=x.stride()
    )
    with pytest.raises(ValueError, match="`x` must be placed by Shard, Replicate or Partial"):
        khot.sigmoid_topk(strided, 2)


@case
def bad_contents_raise_where_they_lie():
    x = normal(4, 7)
    x[0, 0] = torch.nan
    with_nan = spread(x, [S(0)])
    if with_nan.to_local().isnan().any():
        with pytest.raises(ValueError, match="must not contain NaN"):
            khot.sigmoid_topk(with_nan, 2)
    else:
        assert khot.sigmoid_topk(with_nan, 2).to_local().sum() == 2 * with_nan.to_local().shape[0]


@case
def derivatives_of_second_order():
    x = normal(4, 7)
    wholes, parts = x.clone().requires_grad_(), spread(x, [S(0)], True)
    results = []
    for v in (wholes, parts):
        (first,) = torch.autograd.grad(khot.sigmoid_topk(v, 2.5).square().sum(), v, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), v)[0])
    assert_same(results[1], results[0], "the second derivative")
