"""Cases of masks whose rows are cut: each rank holds a part of the items."""

import itertools
from functools import partial

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import khot
from tests.distributed.group import case
from tests.distributed.spread import P, R, S, assert_same, compare, mesh_of, spread
from tests.inputs import normal
from tests.maps import ODD_MAPS, RELAXATIONS

IN_PARTS = [[S(1)], [S(0), S(1)], [S(1), S(1)], [S(1), S(0)], [P, S(1)], [R, S(1)]]


@case
def every_mask_of_cut_rows():
    """Of what a process sums up between two reductions, in torch and in loops, against whole rows in torch."""
    maps = [m for member in RELAXATIONS for m in (member.map, member.log) if m] + [m.map for m in ODD_MAPS]
    for mask, (n, sums_by) in itertools.product(maps, ((7, "torch"), (9, "auto"), (1000, "auto"))):
        if n == 1000 and mask not in maps[::3]:
            continue
        x, k, softness = normal(3, n), torch.tensor([1.5, 2.0, 4.0]).double(), torch.tensor([0.5, 1.0, 0.1]).double()
        for placements in IN_PARTS if n == 7 and mask in maps[::4] else IN_PARTS[:1]:
            everywhere = [R] * len(placements)
            y, leaves = compare(
                mask, [x, k, softness], [placements, everywhere, everywhere], backends=("torch", sums_by)
            )
            assert list(y.placements) == [R if p.is_partial() else p for p in placements], mask
        assert all(list(leaf.grad.placements) == everywhere for leaf in leaves[1:]), mask
        if n == 9:
            compare(mask, [x, 2.5, 0.7], [[S(1)], None, None], backends=("torch", sums_by))


@case
def limits_of_cut_rows():
    masks = khot.sigmoid_topk, khot.sparse_topk, khot.sparse_topk_magnitude, khot.sparse_topk_signed
    for mask, n in zip(masks, (3, 3, 3, 7), strict=True):
        for k in (0, 1, n, float(n) - 0.5):
            compare(lambda x, m=mask, k=k: m(x, k, 0.7), [normal(2, n)], [[S(1)]])
        compare(lambda x, m=mask: m(x, 1, 0.7), [torch.zeros(2, n).double()], [[S(1)]])  # ties over all ranks
        compare(lambda x, m=mask: m(x, 0.5, 0.7), [torch.ones(1, 1).double()], [[S(1)]])  # all ranks but one have none
    assert khot.sigmoid_topk(spread(normal(0, 7), [S(1)]), 2).shape == (0, 7)
    assert khot.sigmoid_topk(spread(normal(2, 0), [S(1)]), 0).shape == (2, 0)


@case
def masked_items_and_far_ones():
    x = normal(4, 9)
    x[0, :6] = -torch.inf  # whole parts
    x[1, 3], x[1, 4] = torch.inf, -torch.inf
    x[2] *= 1e6
    x[3, 0] = 1e12
    for mask, softness in itertools.product((khot.sigmoid_topk, khot.lapsum_topk, khot.sparse_topk), (1.0, 1e-3, 1e3)):
        compare(lambda x, m=mask, s=softness: m(x, 2, s), [x], [[S(1)]], rtol=1e-8)
    x = x.nan_to_num(neginf=0.0, posinf=0.0)  # which masks an entry by absolute value
    x[0, 6:] *= 1e-12
    for mask, softness in itertools.product((khot.sparse_topk_magnitude, khot.sparse_topk_signed), (1.0, 1e-3, 1e3)):
        rows = x if softness == 1 else x[:3] if softness < 1 else x[1:3]  # some with numbers for which there are loops
        compare(lambda x, m=mask, s=softness: m(x, 2, s), [rows], [[S(1)]], rtol=1e-8)


@case
def gaps_in_which_all_tails_underflow():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 5.0, 9.0]]).double()
    maps = khot.sigmoid_topk, khot.log_sigmoid_topk, khot.lapsum_topk, khot.topk_threshold
    for mask, scale in itertools.product(maps, (1e-2, 1e-4)):
        k, softness = torch.tensor([2.0, 2.0]).double(), torch.tensor([scale, scale]).double()
        compare(mask, [x, k, softness], [[S(1)], [R], [R]], rtol=1e-7, atol=1e-9)
    # Of chosen items alone: the derivatives in k of others are so large that nothing shows beside them.
    compare(
        lambda x, k, s: khot.sigmoid_topk(x, k, s).detach().round() * khot.log_sigmoid_topk(x, k, s),
        [x, k, softness],
        [[S(1)], [R], [R]],
        rtol=1e-7,
        atol=1e-9,
    )


@case
def ranks_that_need_different_steps():
    """One rank's shard of the batch is easy and another's hard, while both share a mesh with cut rows."""
    x = normal(4, 1000)
    x[2:] = x[2:].exp().exp()
    compare(lambda x: khot.normal_topk(x, 2.5, 1e-3), [x], [[S(0), S(1)]], rtol=1e-8)
    compare(lambda x: khot.sparse_topk(x, 2.5, 1e-3, p=1.5), [x], [[S(0), S(1)]], rtol=1e-8)


@case
def hard_masks_of_cut_rows():
    cuts = [(7, i % 4, placements) for i, placements in enumerate(IN_PARTS)]
    for n, k, placements in (*cuts, (3, 2, IN_PARTS[0]), (3, 3, IN_PARTS[2]), (1000, 3, IN_PARTS[0])):
        x = normal(3, n)
        compare(lambda x, k=k: khot.topk_mask(x, k), [x], [placements], differentiable=False)
        sizes = torch.tensor([0, k, n])
        compare(lambda x, s=sizes: khot.topk_mask(x, s), [x], [placements], differentiable=False)
        half = x.to(torch.bfloat16)
        y = khot.topk_mask(spread(half, placements), k).full_tensor()
        assert (y.sum(-1) == k).all() and y.dtype == half.dtype
        chosen, best = half.masked_fill(y == 0, torch.inf).amin(-1), half.topk(max(k, 1), -1).values[..., -1]
        assert k == 0 or torch.equal(chosen, best)
    for x in (torch.zeros(2, 7), torch.full((2, 7), -torch.inf), torch.tensor([[1.0, 1, 0, 1, 1, -torch.inf, 1]])):
        for k in range(8):
            y = khot.topk_mask(spread(x.double(), [S(1)]), k).full_tensor()
            for row, chosen in zip(x.double(), y, strict=True):
                assert torch.equal(row[chosen == 1].sort(descending=True).values, row.topk(k).values), (x, k, y)


@case
def joint_axes_some_of_them_cut():
    x = normal(4, 3, 5)
    cuts = [S(0)], [S(2)], [S(0), S(2)], [S(0), S(0)], [S(1), S(0)]
    for i, (dim, placements) in enumerate(itertools.product(((0, 1), (0, 2), (2, 1), (0, 1, 2), 0), cuts)):
        if i % 3 == 2:
            y, _ = compare(lambda x, d=dim: khot.topk_mask(x, 2, dim=d), [x], [placements], differentiable=False)
        else:
            relaxation = (khot.sigmoid_topk, khot.sparse_topk_magnitude)[i % 3]
            y, _ = compare(lambda x, d=dim, m=relaxation: m(x, 2.5, 0.7, dim=d), [x], [placements])
        assert list(y.placements) == placements


@case
def thresholds_and_straight_through_of_cut_rows():
    x, k, softness = normal(3, 7), torch.tensor([1.4, 2.6, 3.5]).double(), torch.tensor([0.5, 1.0, 0.1]).double()
    for relaxation in (khot.sigmoid_topk, khot.sparse_topk, partial(khot.sparse_topk, p=1.5), khot.topk_mask):
        sizes = k.long() if relaxation is khot.topk_mask else k
        threshold = partial(khot.topk_threshold, relaxation=relaxation)
        compare(lambda x, k, s, t=threshold: t(x, k, s), [x, sizes, softness], [[S(1)], [R], [R]])
    compare(lambda x, k, s: khot.straight_through_topk(x, k, s), [x, k, softness], [[S(1)], [R], [R]])
    own = lambda x, k, s: khot.sigmoid_topk(x, k, s) ** 1  # noqa: E731 - a relaxation without a link
    compare(lambda x: khot.straight_through_topk(x, 2, 0.7, relaxation=own), [x], [[S(1)]])


@case
def collectives_of_cut_rows():
    x, k = spread(normal(4, 1000), [S(1)], True), spread(torch.tensor(20.0).double(), [R], True)
    softness = spread(torch.tensor(0.7).double(), [R], True)
    for mask in (khot.sigmoid_topk, khot.lapsum_topk, khot.normal_topk, khot.capped_softmax):
        with CommDebugMode() as forward:
            y = mask(x, k, softness)
        assert 2 <= forward.get_total_counts() <= 2 + 6, (mask, forward.get_comm_counts())
        loss = y.to_local().sum()
        with CommDebugMode() as backward:
            loss.backward()
        assert backward.get_total_counts() == 1, (mask, backward.get_comm_counts())
    for mask, most, back in ((khot.sparse_topk_signed, 2 + 8, 1), (khot.sparse_topk_magnitude, 4 + 8, 2)):
        with CommDebugMode() as forward:
            y = mask(x, k, softness)
        assert 3 <= forward.get_total_counts() <= most, (mask, forward.get_comm_counts())
        loss = y.to_local().sum()
        with CommDebugMode() as backward:
            loss.backward()
        assert backward.get_total_counts() == back, (mask, backward.get_comm_counts())
    with CommDebugMode() as forward:
        khot.topk_mask(x, 20)
    assert forward.get_total_counts() == 1


@case
def bad_cut_rows_raise_on_all_ranks():
    x = normal(4, 7)
    x[1, 0] = torch.nan
    for mask in (khot.sigmoid_topk, khot.sparse_topk, khot.topk_mask):
        with pytest.raises(ValueError, match="`x` must not contain NaN"):
            mask(spread(x, [S(1)]), 2)
    x[1] = -torch.inf
    with pytest.raises(ValueError, match="`k` must lie between .* entries above -inf, 0, but got k=2 with n=7"):
        khot.sigmoid_topk(spread(x, [S(1)]), 2)
    with pytest.raises(ValueError, match="`x` must be finite"):
        khot.sparse_topk_magnitude(spread(x, [S(1)]), 2)
    with pytest.raises(ValueError, match="k=8 with n=7"):
        khot.sigmoid_topk(spread(x, [S(1)]), 8)
    with pytest.raises(ValueError, match="must be positive"):
        khot.sigmoid_topk(spread(normal(4, 7), [S(1)]), 2, torch.tensor(-1.0))


@case
def derivatives_of_higher_order_of_cut_rows():
    """Of values and thresholds, in scores, sums and softness; a gap lets all slopes underflow."""
    x, k, softness = normal(2, 7), torch.tensor([1.5, 2.0]).double(), torch.tensor([0.5, 1.0]).double()
    maps = [khot.log_sigmoid_topk, partial(khot.sparse_topk, p=1.5), khot.topk_threshold, khot.sparse_topk_signed]
    compare_nested_gradients(maps, (x, k, softness), orders=2)
    compare_nested_gradients([khot.sigmoid_topk, khot.sparse_topk_magnitude], (x, k, softness), orders=3)
    gap = torch.tensor([[0.0, 1, 2, 3]]).double(), torch.tensor([2.0]).double(), torch.tensor([1e-3]).double()
    compare_nested_gradients([khot.sigmoid_topk], gap, orders=2)


def compare_nested_gradients(maps, whole, orders):
    """Derivatives in all arguments, each of one number made of those before."""
    for mask in maps:
        found = []
        for leaves in (
            [v.clone().requires_grad_() for v in whole],
            [spread(v, [where], True) for v, where in zip(whole, (S(1), R, R), strict=True)],
        ):
            values, nested = [mask(*leaves)], []
            for _ in range(orders):
                number = sum(value.sin().sum() for value in values)
                values = torch.autograd.grad(number, leaves, create_graph=True)
                nested += values
            found.append(nested)
        for i, (one, several) in enumerate(zip(*found, strict=True)):
            assert_same(several, one, f"{mask}, {i}", rtol=1e-8, atol=1e-9)


@case
def collectives_of_the_second_derivative():
    x, k = spread(normal(4, 1000), [S(1)], True), spread(torch.tensor(20.0).double(), [R], True)
    y = khot.sigmoid_topk(x, k).to_local()
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    loss = first.to_local().square().sum()
    with CommDebugMode() as backward:
        loss.backward()
    # Numbers that items have seen, and the sums of a first derivative of the values and of the threshold.
    assert backward.get_total_counts() == 3, backward.get_comm_counts()


@case
def float32_rows_of_many_items():
    x = normal(2, 50_000, dtype=torch.float32)
    y = khot.sigmoid_topk(spread(x, [S(1)]), 100, 0.1)
    assert_same(y, khot.sigmoid_topk(x.double(), 100, 0.1).float(), "the mask", rtol=1e-5, atol=1e-9)
    total = y.full_tensor().double().sum(-1)
    assert ((total - 100).abs() <= 1e-4).all(), total
    assert mesh_of(1).size() > 1
