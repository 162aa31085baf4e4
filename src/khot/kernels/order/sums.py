"""Positions, decaying sums and the inverse of the soft count in plain torch, see :mod:`khot.kernels.order`."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

SAFE_EXPONENT = 128.0  # an exponential magnifies the rounding of z: up to here to 2^-47
FAR = 1600  # scales; exp(-FAR / 2) is 0 in double precision


class Points(NamedTuple):
    """Points among sorted items, all (..., points).

    Attributes:
        offset: Offset of a point from an item near it.
        anchor: The number of that item (int64).
        below: How many items lie at or below the point (int64): the anchor or the one after it.
    """

    offset: Tensor
    anchor: Tensor
    below: Tensor


def number_of_points(n: int, between: bool) -> int:
    """The number of points for n items: one for each, or one between each pair of neighbours."""
    return max(n - 1, 0) if between else n


def sorted_positions(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """z = values / scale, centred around 0, and the gaps between neighbours; the gap of the first item is ``FAR``.

    Args:
        values: Sorted items (..., n) in float64, at most half the largest double in size, so differences are finite.
        scale: Scales of the rows (..., 1) in float64; negative if the items descend.
    """
    values = values.contiguous()
    gap = torch.full_like(values, FAR)
    if values.numel() == 0:
        return torch.zeros_like(gap), gap
    first, last = values[..., :1], values[..., -1:]
    torch.diff(values, dim=-1, out=gap[..., 1:]).div_(scale)
    narrow = (last - first) / scale <= 2 * SAFE_EXPONENT
    if not values.is_cuda and bool(narrow.all()):
        return (values - (0.5 * first + 0.5 * last)).div_(scale), gap
    z = gap.clamp_(max=FAR).cumsum(-1)
    return z - 0.5 * (z[..., :1] + z[..., -1:]), gap


def decayed_sums(z: Tensor, gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over the items on the left of each and over those on its right, see :mod:`khot.kernels.order`.

    Args:
        z: Ascending items (..., n), centred around 0 to allow the fast method.
        gap: Their distances from the left neighbour (..., n).
        left: Weights (..., n) of the items in sums over the left.
        right: Weights (..., n) of the items in sums over the right.
    """
    z, gap, left, right = z.contiguous(), gap.contiguous(), left.contiguous(), right.contiguous()
    if z.numel() == 0:
        return torch.zeros_like(z), torch.zeros_like(z)
    if not z.is_cuda and is_narrow(z):
        return sums_by_cumsum(z.exp(), z.neg().exp_(), left, right)
    return sums_by_doubling(gap, left, right)


def is_narrow(z: Tensor) -> bool:
    """Whether the exponentials of all items, and their sums, are normal numbers."""
    return bool(torch.maximum(-z[..., 0], z[..., -1]).max() <= SAFE_EXPONENT)


def sums_by_cumsum(rise: Tensor, fall: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`decayed_sums` from exp(z) and exp(-z)."""
    before, after = torch.zeros_like(rise), torch.zeros_like(rise)
    torch.cumsum((rise * left)[..., :-1], -1, out=before[..., 1:])
    torch.cumsum((fall * right)[..., 1:].flip(-1), -1, out=after[..., 1:])
    return before.mul_(fall), after.flip(-1).mul_(rise)


def sums_by_doubling(gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`decayed_sums` for any gaps."""
    n = gap.shape[-1]
    first = decay = gap.neg().exp_()  # to each item from `reach` items before it
    before, after = left.clone(), right.clone()  # each including the item itself
    reach = 1
    while reach < n:
        before[..., reach:] += decay[..., reach:] * before[..., :-reach]
        after[..., :-reach] += decay[..., reach:] * after[..., reach:]
        decay = torch.cat([decay[..., :reach], decay[..., reach:] * decay[..., :-reach]], -1)
        reach *= 2
        if not gap.is_cuda and not bool(decay[..., reach:].any()):
            break
    nothing = torch.zeros_like(gap[..., :1])
    before = torch.cat([nothing, first[..., 1:] * before[..., :-1]], -1)
    return before, torch.cat([first[..., 1:] * after[..., 1:], nothing], -1)


def soft_count_inverse(z: Tensor, gap: Tensor, between: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The :class:`Points` where F passes 1/2, 3/2, ..., n - 1/2, or with ``between`` 1, 2, ..., n - 1; ascending.

    Args:
        z: Ascending items (..., n), centred around 0 to allow the fast method.
        gap: Their distances from the left neighbour (..., n).
        between: Whether to separate the items rather than to follow them.
    """
    n = z.shape[-1]
    shape = (*z.shape[:-1], number_of_points(n, between))
    if math.prod(shape) == 0:
        return Points(z.new_empty(shape), *(z.new_empty(shape, dtype=torch.long) for _ in range(2)))
    left, right = decayed_sums(z, gap, torch.ones_like(z), torch.ones_like(z))
    places = torch.arange(1, n + 1, dtype=z.dtype, device=z.device)
    # F at the items, + 1/2 to make the targets integers. Each item lies below the next target and all later ones:
    # counting is many times faster than a binary search for each target.
    rank = (right - left).mul_(0.5).add_(places if not between else places - 0.5)
    first_above = rank.ceil_().long()
    counts = torch.zeros((*z.shape[:-1], n + 2), dtype=torch.long, device=z.device)
    counts.scatter_add_(-1, first_above, torch.ones_like(counts[..., :1]).expand(z.shape))
    below = counts.cumsum(-1)[..., 1 : shape[-1] + 1].contiguous()
    target = places[:-1] if between else places - 0.5
    excess = target - below
    anchor = torch.where(excess > 0, below, below - 1)  # the neighbour whose exponential carries the larger part
    left_anchor, right_anchor = left.gather(-1, anchor), right.gather(-1, anchor)
    near, far = torch.where(excess > 0, right_anchor, left_anchor), torch.where(excess > 0, left_anchor, right_anchor)
    near += 1
    distance = excess.square().addcmul_(near, far).sqrt_().add_(excess.abs()).reciprocal_().mul_(near).log_()
    offset = distance.clamp_(min=0).copysign_(-excess)
    if between:
        upper = below.clamp(max=n - 1)
        middle = left_anchor.log1p() - right.gather(-1, upper).log1p() + gap.gather(-1, upper)
        offset = torch.where(excess == 0, 0.5 * middle, offset)
    return Points(offset, anchor, below)
