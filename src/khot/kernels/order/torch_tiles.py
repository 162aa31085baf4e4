r"""Soft ranks and soft sorting of sorted rows, and their first derivatives, with room for a few numbers of each item.

The sums, quantiles and derivatives are those of :mod:`khot.kernels.order` and :mod:`khot.relaxations.laplace`, on
tiles of a row: with the sums over all items before its first and after its last one, a tile is a row by itself. These
sums, the carries, come first, from one exponential of each item; derivatives have carries of their own.

Layout: values as sorted and ``order``, the places they came from, (rows, n); scale (rows,) in float64, negative for
descending rows. Arithmetic in float64, in half the items and half the scale, whose differences do not overflow.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import RowMap
from .torch_sums import FAR, is_narrow, sorted_positions, sums_by_cumsum, sums_by_doubling

TILE = 2**15  # items that are worked on at a time


class Tile(NamedTuple):
    """Some items of some rows.

    Attributes:
        rows: Which rows of the batch.
        start, stop: Which columns.
        items: Half of the items (rows, width), float64.
        column: Half the scale (rows, 1).
        to_left: Distance of the first item from that before it (rows, 1), ``FAR`` if there is none.
        following: The item after the last (rows, 1), or the last where there is none.
        last: Whether there is none.
    """

    rows: slice
    start: int
    stop: int
    items: Tensor
    column: Tensor
    to_left: Tensor
    following: Tensor
    last: bool

    def decay_from_first(self) -> Tensor:
        return ((self.items[:, :1] - self.items) / self.column).exp_()

    def decay_from_last(self) -> Tensor:
        return ((self.items - self.items[:, -1:]) / self.column).exp_()

    def decay_to_following(self) -> Tensor:
        return ((self.items[:, -1:] - self.following) / self.column).exp_()


def _blocks(values: Tensor, scale: Tensor) -> Iterator[list[Tile]]:
    """The tiles of rows that are worked on together: many short rows, or the parts of a long one."""
    rows, n = values.shape
    height = max(1, TILE // max(n, 1))
    for top in range(0, rows, height):
        which = slice(top, min(top + height, rows))
        column = 0.5 * scale[which, None]
        yield [_tile(values, which, start, min(start + TILE, n), column) for start in range(0, n, TILE)]


def _tile(values: Tensor, which: slice, start: int, stop: int, column: Tensor) -> Tile:
    n = values.shape[1]
    ends = values[which, max(start - 1, 0) : start + 1].double() * 0.5
    to_left = (ends[:, -1:] - ends[:, :1]) / column if start else torch.full_like(column, FAR)
    following = values[which, min(stop, n - 1), None].double() * 0.5
    lazily = values.new_empty(0, dtype=torch.float64)
    return Tile(which, start, stop, lazily, column, to_left, following, stop == n)


def _load(values: Tensor, tile: Tile) -> Tile:
    return tile._replace(items=values[tile.rows, tile.start : tile.stop].double() * 0.5)


class Carries(NamedTuple):
    """Of each tile (rows, 1).

    Attributes:
        before: The sum at its first item over those before it.
        after: The sum at its last item over those after it.
        upwards: The sum at its first item over itself and those after it; nothing for a single tile.
    """

    before: list[Tensor]
    after: list[Tensor]
    upwards: list[Tensor]


def _chain(totals: Tensor) -> Carries:
    """From the :func:`_totals` of all tiles (tiles, 4, rows, 1)."""
    at_last, at_first, across, onwards = totals.unbind(1)
    nothing = torch.zeros_like(at_last[0])
    before, after = [nothing], [nothing]
    for i in range(len(totals) - 1):
        before.append(onwards[i] * (at_last[i] + across[i] * before[-1]))
    for i in range(len(totals) - 1, 0, -1):
        after.append(onwards[i - 1] * (at_first[i] + across[i] * after[-1]))
    after.reverse()
    return Carries(before, after, [at_first[i] + across[i] * sums for i, sums in enumerate(after)])


def _carries(values: Tensor, tiles: list[Tile], weights: Callable[[Tile], tuple[Tensor, Tensor]]) -> Carries:
    """For the weights, of a tile, of its items in the sums over what lies on the left and on the right of each."""
    nothing = torch.zeros_like(tiles[0].column)
    if len(tiles) == 1:
        return Carries([nothing], [nothing], [])
    totals = _room_for_totals(tiles)
    for i, tile in enumerate(tiles):
        here = _load(values, tile)
        _totals(here, *weights(here), totals[i])
    return _chain(totals)


def _room_for_totals(tiles: list[Tile]) -> Tensor:
    """All at once: numbers that stay, allocated between buffers that go, keep an allocator from using these again."""
    return tiles[0].column.new_empty(len(tiles), 4, *tiles[0].column.shape)


def _totals(tile: Tile, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Its sums at its last and its first item, these included, the decay across it, and that to the next tile."""
    from_first, from_last = tile.decay_from_first(), tile.decay_from_last()
    out[0], out[1] = (left * from_last).sum(-1, keepdim=True), (right * from_first).sum(-1, keepdim=True)
    out[2], out[3] = from_first[:, -1:], tile.decay_to_following()


class _Scan:
    """The sums over the left and the right of each item of a tile, for one pair of weights after the other."""

    def __init__(self, tile: Tile, alone: bool) -> None:
        self.tile, self.alone = tile, alone
        z, self.gap = sorted_positions(tile.items, tile.column)
        self.exponentials = (z.exp(), z.neg_().exp_()) if is_narrow(z) else None

    def __call__(self, left: Tensor, right: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """From the weights and the carries, which a tile that is ``alone`` does not have."""
        if self.exponentials is None:
            sums = sums_by_doubling(self.gap, left, right)
        else:
            sums = sums_by_cumsum(*self.exponentials, left, right)
        if self.alone:
            return sums
        return sums[0] + self.tile.decay_from_first() * before, sums[1] + self.tile.decay_from_last() * after


def _ones(tile: Tile) -> tuple[Tensor, Tensor]:
    one = torch.ones_like(tile.items)
    return one, one


class _Stretch:
    """dL/d scale from dL/dz of one tile after the other: a gap's length times what crosses it, see ``_Positions``."""

    def __init__(self, tiles: list[Tile]) -> None:
        self.crossing = torch.zeros_like(tiles[0].column)
        self.total = torch.zeros_like(tiles[0].column)

    def add(self, tile: Tile, grad_z: Tensor) -> None:
        gap = torch.cat([tile.to_left, tile.items.diff(dim=-1) / tile.column], -1)
        through = grad_z.cumsum(-1)
        crossing = self.crossing + torch.cat([torch.zeros_like(self.crossing), through[:, :-1]], -1)
        self.total += torch.where(gap < FAR, gap * crossing, 0.0).sum(-1, keepdim=True)
        self.crossing = self.crossing + through[:, -1:]


def soft_rank(values: Tensor, order: Tensor, scale: Tensor) -> Tensor:
    """r_i = i + (sum over its right - sum over its left) / 2, in the order that the values had."""
    result = torch.empty_like(values)
    for tiles in _blocks(values, scale):
        carries = _carries(values, tiles, _ones)
        for i, tile in enumerate(tiles):
            here = _load(values, tile)
            before, after = _Scan(here, len(tiles) == 1)(*_ones(here), carries.before[i], carries.after[i])
            places = torch.arange(tile.start + 1, tile.stop + 1, dtype=torch.float64, device=values.device)
            rank = after.sub_(before).mul_(0.5).add_(places)
            result[tile.rows].scatter_(1, order[tile.rows, tile.start : tile.stop], rank.to(values.dtype))
    return result


def soft_rank_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool
) -> tuple[Tensor, Tensor]:
    """dL/dx, and dL/d scale unless it is not wanted: dL/dz_i = sum_j exp(-|z_i - z_j|) (g_i - g_j) / 2."""
    grad_x, grad_scale = torch.empty_like(values), torch.zeros_like(scale)
    for tiles in _blocks(values, scale):
        rows, alone, stretch = tiles[0].rows, len(tiles) == 1, _Stretch(tiles)

        def weights(tile: Tile) -> tuple[Tensor, Tensor]:
            g = grad[tile.rows].gather(1, order[tile.rows, tile.start : tile.stop]).double()
            return g, g

        plain, weighted = _carries(values, tiles, _ones), _carries(values, tiles, weights)
        for i, tile in enumerate(tiles):
            here = _load(values, tile)
            scan = _Scan(here, alone)
            before, after = scan(*_ones(here), plain.before[i], plain.after[i])
            g, _ = weights(here)
            grad_z = before.add_(after).mul_(g)
            before, after = scan(g, g, weighted.before[i], weighted.after[i])
            grad_z.sub_(before).sub_(after).mul_(0.5)
            if with_scale:
                stretch.add(here, grad_z)
            grad_z.div_(scale[rows, None])
            grad_x[rows].scatter_(1, order[rows, tile.start : tile.stop], grad_z.to(grad_x.dtype))
        grad_scale[rows] = stretch.total.squeeze(-1) / scale[rows]
    return grad_x, grad_scale


class _Counted(NamedTuple):
    """Items of a tile and the one that follows (rows, width), their sums of ones, and what points lie among them.

    Attributes:
        scan: The sums of the tile.
        items: Half of the items.
        before, after: The sums over the left and the right of each.
        first_goal: From which of the points 1, 2, ... on each item of the tile lies below (rows, width of the tile).
        goals: The points above the first item of the tile, and not above the one that follows.
    """

    scan: _Scan
    items: Tensor
    before: Tensor
    after: Tensor
    first_goal: Tensor
    goals: range


def _goals(tiles: list[Tile], carries: Carries, n: int) -> list[int]:
    """The first point above the first item of each tile, and one more than there are points; the first tile has all."""
    bounds = [1]
    for tile, before, upwards in zip(tiles[1:], carries.before[1:], carries.upwards[1:], strict=True):
        rank = tile.start + 1 + 0.5 * (upwards - 1 - before)
        bounds.append(min(max(int(rank.ceil().item()), bounds[-1]), n + 1))
    return [*bounds, n + 1]


def _count(values: Tensor, tile: Tile, i: int, carries: Carries, goals: list[int]) -> _Counted:
    here = _load(values, tile)
    scan = _Scan(here, len(goals) == 2)
    before, after = scan(*_ones(here), carries.before[i], carries.after[i])
    places = torch.arange(tile.start + 1, tile.stop + 1, dtype=torch.float64, device=tile.items.device)
    first_goal = (after - before).mul_(0.5).add_(places).ceil_().long()
    items = here.items
    if not tile.last:
        items = torch.cat([items, tile.following], -1)
        before = torch.cat([before, carries.before[i + 1]], -1)
        after = torch.cat([after, carries.upwards[i + 1] - 1], -1)
    first_goal = first_goal.clamp_(goals[i], goals[i + 1])
    return _Counted(scan, items, before, after, first_goal, range(goals[i], goals[i + 1]))


class _Points(NamedTuple):
    """Points 1/2, 3/2, ... of a tile (rows, points); items by their number in the tile.

    Attributes:
        below: How many items of the whole row lie below.
        lower, upper: The neighbours, or the only one twice.
        anchor: The one from which the offset counts.
        offset: In scales.
    """

    below: Tensor
    lower: Tensor
    upper: Tensor
    anchor: Tensor
    offset: Tensor


def _points(at: _Counted, goals: range) -> _Points:
    """See :func:`khot.kernels.order.torch_sums.soft_count_inverse`."""
    rows, count = len(at.items), len(goals)
    reached = torch.zeros(rows, count + 1, dtype=torch.long, device=at.items.device)
    slot = (at.first_goal - goals.start).clamp_(0, count)
    reached.scatter_add_(1, slot, torch.ones_like(reached[:, :1]).expand_as(slot))
    local = reached.cumsum(1)[:, :count]
    lower, upper = (local - 1).clamp_(min=0), local.clamp(max=at.items.shape[1] - 1)
    below = local + at.scan.tile.start
    excess = torch.arange(goals.start, goals.stop, dtype=torch.float64, device=below.device) - 0.5 - below
    anchor = torch.where(excess > 0, upper, lower)
    left, right = at.before.gather(1, anchor), at.after.gather(1, anchor)
    near, far = torch.where(excess > 0, right, left).add_(1), torch.where(excess > 0, left, right)
    distance = excess.square().addcmul_(near, far).sqrt_().add_(excess.abs()).reciprocal_().mul_(near).log_()
    return _Points(below, lower, upper, anchor, distance.clamp_(min=0).copysign_(-excess))


def _parts(goals: range) -> Iterator[range]:
    """However many points lie in a tile."""
    return (goals[i : i + TILE] for i in range(0, len(goals), TILE))


def soft_sort(values: Tensor, order: Tensor, scale: Tensor) -> Tensor:
    """The points of each row."""
    result, n = torch.empty_like(values), values.shape[1]
    for tiles in _blocks(values, scale):
        carries = _carries(values, tiles, _ones)
        goals = _goals(tiles, carries, n)
        for i, tile in enumerate(tiles):
            at = _count(values, tile, i, carries, goals)
            for part in _parts(at.goals):
                points = _points(at, part)
                y = at.items.gather(1, points.anchor).addcmul_(tile.column, points.offset).mul_(2)
                result[tile.rows, part.start - 1 : part.stop - 1] = y.to(values.dtype)
    return result


class _Pulls(NamedTuple):
    """What the points of a tile give to its items and the one that follows (rows, width).

    Attributes:
        left, right: dL/dz that goes on to the items on the left, and on the right, of these.
        anchored: dL/d point, at the item that each point's offset counts from.
        lever: Sum over the points of dL/d point times its offset (rows, 1).
    """

    left: Tensor
    right: Tensor
    anchored: Tensor
    lever: Tensor


def _pulls(at: _Counted, grad: Tensor, n: int) -> _Pulls:
    left, right, anchored = (torch.zeros_like(at.items) for _ in range(3))
    lever = torch.zeros_like(at.scan.tile.column)
    for part in _parts(at.goals):
        points = _points(at, part)
        g = grad[at.scan.tile.rows, part.start - 1 : part.stop - 1].double()
        mass_left, mass_right = (
            1 + sums.gather(1, item) for sums, item in ((at.before, points.lower), (at.after, points.upper))
        )
        width = (at.items.gather(1, points.upper) - at.items.gather(1, points.lower)) / at.scan.tile.column
        width = width.clamp_(max=FAR)
        farther_left = torch.where(points.anchor == points.lower, width, -width) - 2 * points.offset
        balance = mass_left.log() - mass_right.log() + farther_left
        balance = balance.masked_fill_(points.below == 0, -torch.inf).masked_fill_(points.below == n, torch.inf)
        left.scatter_add_(1, points.lower, g * torch.sigmoid(balance) / mass_left)
        right.scatter_add_(1, points.upper, g * torch.sigmoid(-balance) / mass_right)
        anchored.scatter_add_(1, points.anchor, g)
        lever += (g * points.offset).sum(-1, keepdim=True)
    return _Pulls(left, right, anchored, lever)


def _pulls_in_turn(
    values: Tensor, tiles: list[Tile], carries: Carries, goals: list[int], grad: Tensor
) -> Iterator[tuple[_Scan, _Pulls]]:
    """Tile after tile, with what the tile before gave to the item that follows it."""
    spilt = [torch.zeros_like(tiles[0].column) for _ in range(2)]
    for i, tile in enumerate(tiles):
        at = _count(values, tile, i, carries, goals)
        pulls = _pulls(at, grad, values.shape[1])
        right, anchored = pulls.right, pulls.anchored
        right[:, :1] += spilt[0]
        anchored[:, :1] += spilt[1]
        width = tile.stop - tile.start
        if not tile.last:
            spilt = [v[:, width:].clone() for v in (right, anchored)]
        yield at.scan, pulls._replace(left=pulls.left[:, :width], right=right[:, :width], anchored=anchored[:, :width])


def soft_sort_derivative(
    values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool
) -> tuple[Tensor, Tensor]:
    """dL/dx, and dL/d scale unless it is not wanted."""
    grad_x, grad_scale, n = torch.empty_like(values), torch.zeros_like(scale), values.shape[1]
    for tiles in _blocks(values, scale):
        rows, stretch = tiles[0].rows, _Stretch(tiles)
        counted = _carries(values, tiles, _ones)
        goals = _goals(tiles, counted, n)
        arguments = values, tiles, counted, goals, grad
        if len(tiles) == 1:
            carries = counted  # nothing
        else:
            totals = _room_for_totals(tiles)
            for i, (scan, pulls) in enumerate(_pulls_in_turn(*arguments)):
                _totals(scan.tile, pulls.right, pulls.left, totals[i])
            carries = _chain(totals)
        for i, (scan, pulls) in enumerate(_pulls_in_turn(*arguments)):
            tile = scan.tile
            before, after = scan(pulls.right, pulls.left, carries.before[i], carries.after[i])
            grad_z = before.add_(after).add_(pulls.left).add_(pulls.right)
            if with_scale:
                stretch.total += pulls.lever
                stretch.add(tile, grad_z - pulls.anchored)
            grad_x[rows].scatter_(1, order[rows, tile.start : tile.stop], grad_z.to(grad_x.dtype))
        grad_scale[rows] = stretch.total.squeeze(-1)
    return grad_x, grad_scale


def _whole(forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor]]:
    def of_batch(values: Tensor, order: Tensor, scale: Tensor) -> tuple[Tensor]:
        rows, places = _rows(values, order)
        return (forward(rows, places, scale.reshape(-1)).reshape(values.shape),)

    return of_batch


def _whole_derivative(backward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def of_batch(
        values: Tensor, order: Tensor, scale: Tensor, grad: Tensor, with_scale: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows, places, grads = _rows(values, order, grad)
        grad_x, grad_scale = backward(rows, places, scale.reshape(-1), grads, with_scale)
        return grad_x.reshape(values.shape), grad_scale.reshape(scale.shape) if with_scale else None

    return of_batch


def _rows(*tensors: Tensor) -> list[Tensor]:
    return [v.reshape(-1, v.shape[-1]) for v in tensors]


SOFT_RANK = RowMap(_whole(soft_rank), _whole_derivative(soft_rank_derivative))
SOFT_SORT = RowMap(_whole(soft_sort), _whole_derivative(soft_sort_derivative))
