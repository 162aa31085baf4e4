"""The sparse maps by absolute value, their thresholds and their derivatives in plain torch, tile by tile."""

from collections.abc import Iterator

import torch
from torch import Tensor

from khot._distributed.shards import Shards

from ..contents import check_contents, check_empty
from ..links.base import Link
from ..links.clipped_power import ClippedPower
from ..rows import Span, Threshold, compute_dtype, row_range
from .local_loops import LocalLoops
from .local_shape import LocalShape, local_shape, over, pullback
from .search import far_dtype, solve_magnitudes, solve_signed, solve_signed_parts

ORDINARY = 2.0**24  # thresholds and strengths up to which, and down to the inverse of which, float32 does
TILE = 2**16  # entries that are worked on at a time, as few as fit a CPU's cache


def threshold(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> tuple[Tensor, Tensor]:
    return threshold_of_parts(x, k, strength, _found(link), magnitude, check, None, None)


def threshold_of_parts(
    x: Tensor,
    k: Tensor,
    strength: Tensor,
    link: ClippedPower,
    magnitude: bool,
    check: bool,
    shards: Shards | None,
    loops: LocalLoops | None,
) -> tuple[Tensor, Tensor]:
    """:func:`threshold` of rows of which x (..., m) may be the part of one process; the same on all of them."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:  # n = 0, or no rows
        if check:
            check_empty(k)
        return torch.zeros(batch, dtype=k.dtype, device=x.device), torch.zeros(batch, dtype=k.dtype, device=x.device)
    k, strength = k.reshape(-1), strength.reshape(-1)
    a = x.to(compute_dtype(x) if magnitude else far_dtype(x, strength)).reshape(-1, n).abs()
    if loops is not None:
        a = a.contiguous()  # as a loop wants it, which abs of transposed axes is not
    look = None if loops is None else loops.look(a, link)
    span = row_range(a, shards, None if look is None else look.ends)
    if check:
        _check_rows(x.reshape(-1, n), k, strength, span, shards)
    sums = loops.sums if loops is not None and loops.take(strength, span.highest) else None
    if magnitude:
        at = solve_magnitudes(a, k, strength, link, span, shards, look, sums)
    elif shards is None:
        at = solve_signed(a, k, strength, link)
    else:
        at = solve_signed_parts(a, k, strength, link, span, shards, sums)
    return at.anchor.reshape(batch), at.offset.reshape(batch)


def _check_rows(x: Tensor, k: Tensor, strength: Tensor, span: Span, shards: Shards | None) -> None:
    if bool((span.selected > 0).any()):
        row = int((span.selected > 0).nonzero()[0])
        raise ValueError(f"`x` must be finite (0 masks an entry), but row {row} of the flattened batch is not")
    check_contents(x, k, strength, "strength", span, shards)


def check_rows(x: Tensor, k: Tensor, strength: Tensor) -> None:
    """ValueError for rows of x (rows, n) that are not finite, or a k or strength (rows,) out of range."""
    _check_rows(x, k, strength, row_range(x.abs()), None)


def odd_map(
    x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    at, found = Threshold(*threshold(x, k, strength, link, magnitude, check)), _found(link)
    return map_at(x, strength, at, found, magnitude), *at


def map_at(x: Tensor, strength: Tensor, at: Threshold, link: ClippedPower, magnitude: bool) -> Tensor:
    """y of entries x (..., m) of rows with these thresholds."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    rows = x.reshape(-1, x.shape[-1])
    at, strength = Threshold(at.anchor.reshape(-1), at.offset.reshape(-1)), strength.reshape(-1)
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dtype = torch.float64 if link.is_steep else _arithmetic(x, at, strength, magnitude)
    for which, columns in _tiles(rows):
        part = rows[which, columns].to(dtype)
        here = Threshold(at.anchor[which], at.offset[which])
        y[which, columns] = local_shape(part.abs(), here, strength[which], link, magnitude).value.mul_(part.sign())
    return y.reshape(x.shape)


def odd_map_derivative(
    x: Tensor,
    strength: Tensor,
    anchor: Tensor,
    offset: Tensor,
    grad: Tensor,
    link: str,
    magnitude: bool,
    with_strength: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    at = Threshold(anchor, offset)
    return derivative_of_parts(x, strength, at, grad, _found(link), magnitude, with_strength, None)


def derivative_of_parts(
    x: Tensor,
    strength: Tensor,
    at: Threshold,
    grad: Tensor,
    link: ClippedPower,
    magnitude: bool,
    with_strength: bool,
    shards: Shards | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`odd_map_derivative` of rows of which x (..., m) may be the part of one process."""
    batch = x.shape[:-1]
    if x.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(at.anchor), torch.zeros_like(at.anchor)
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
    at, strength = Threshold(at.anchor.reshape(-1), at.offset.reshape(-1)), strength.reshape(-1)
    dtype = _arithmetic(x, at, strength, magnitude)

    def at_tile(which: slice, columns: slice) -> tuple[Tensor, Tensor, LocalShape]:
        part = rows[which, columns].to(dtype)
        sign, here = part.sign(), Threshold(at.anchor[which], at.offset[which])
        shape = local_shape(part.abs(), here, strength[which], link, magnitude)
        return sign, grads[which, columns].to(part.dtype) * sign, shape

    tiles, kept = list(_tiles(rows)), []
    weight, pull, gain = (torch.zeros_like(strength) for _ in range(3))
    for which, columns in tiles:
        sign, inward, shape = at_tile(which, columns)
        weight[which] += shape.weight
        pull[which] += (inward * shape.slope).sum(-1).double()
        gain[which] = shape.gain
        if len(tiles) == 1:  # else they are made again, rather than kept for the whole row
            kept.append((sign, inward, shape))
    if shards is not None:
        weight, pull = shards.sum(weight, pull)
    mean = over(weight, pull)
    grad_x = torch.empty_like(rows, memory_format=torch.contiguous_format)
    grad_strength = torch.zeros_like(strength)
    for which, columns in tiles:
        sign, inward, shape = kept.pop() if kept else at_tile(which, columns)
        grad_a, of_strength = pullback(shape, inward, mean[which], strength[which], with_strength)
        grad_x[which, columns] = grad_a.mul_(sign)
        grad_strength[which] += of_strength
    if shards is not None and with_strength:
        (grad_strength,) = shards.sum(grad_strength)
    return grad_x.reshape(x.shape), (gain * mean).reshape(batch), grad_strength.reshape(batch)


def _found(link: str) -> ClippedPower:
    found = Link.find(link)
    assert isinstance(found, ClippedPower)
    return found


def _arithmetic(x: Tensor, at: Threshold, strength: Tensor, magnitude: bool) -> torch.dtype:
    """The dtype that x is computed in: float64 where its map or what comes up on the way may leave float32."""
    if not magnitude:
        return far_dtype(x, strength)
    numbers = torch.stack([at.anchor, strength])
    ordinary = (numbers > 1 / ORDINARY) & (numbers < ORDINARY)
    return compute_dtype(x) if bool(ordinary.all()) else torch.float64


def _tiles(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of x (rows, n), which a CPU takes a few at a time, and an accelerator as they are."""
    rows, n = x.shape
    if x.is_cuda or x.numel() <= 2 * TILE:
        yield slice(None), slice(None)
        return
    height, width = max(1, TILE // n), min(n, TILE)
    for top in range(0, rows, height):
        for left in range(0, n, width):
            yield slice(top, top + height), slice(left, left + width)
