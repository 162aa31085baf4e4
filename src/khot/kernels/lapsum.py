r"""Sums over sorted items that decay with distance, and the inverse of the soft count of items.

With items :math:`z_1 \le \dots \le z_n` (in units of the scale) the order maps need

.. math:: \ell_j(v) = \sum_{i<j} e^{z_i - z_j} v_i, \qquad r_j(v) = \sum_{i>j} e^{z_j - z_i} v_i .

They depend on the gaps :math:`h_j = z_j - z_{j-1}` alone, which come from differences of neighbours: an item far away
costs the others no digit, and beyond ``FAR`` scales it makes no difference how far. A gap that wide stands for itself
in z, too, so that nothing overflows.

A cumulative sum of :math:`e^{z_i} v_i`, divided by :math:`e^{z_j}`, gives the sums in O(n) while no exponential over-
or underflows: in double precision as long as the items spread over no more than 256 scales. Beyond that, and on
accelerators without Triton, where looking at the spread would stall, the sums double their reach log2(n) times with
products of the decays :math:`e^{-h_j} \le 1`, which no gap can harm.

Between neighbouring items the soft count of those below t, :math:`F(t) = \sum_i \mathrm{Lap}(t - z_i)`, is a constant
plus two exponentials. With p items at or below t, :math:`A = 1 + \ell_p(1)` and :math:`B = 1 + r_{p+1}(1)`,

.. math:: 2 (F(t) - p) = B e^{t - z_{p+1}} - A e^{z_p - t},

a quadratic equation in :math:`e^t`. With :math:`q = |d| + \sqrt{d^2 + A B e^{-h_{p+1}}}` the root of F(t) = p + d
is :math:`t = z_{p+1} - \log(B/q)` if d > 0 and :math:`t = z_p + \log(A/q)` if d < 0, free of cancellation and in need
of no polish; if d = 0 it is :math:`z_p + \tfrac12 (h_{p+1} + \log(A/B))`, however wide the gap. Points are kept as
offsets from these items.

Layout: z, h, v (..., n) in float64. h_1 is ``FAR``: nothing is to the left of the first item.

References:
    [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .capped_simplex import move_batch_first
from .dispatch import triton_runs
from .operator import operator

SAFE_EXPONENT = 128.0  # an exponential shows what z rounds: up to here 2^-47
FAR = 1600.0  # scales; exp(-FAR / 2) is 0 in double precision


@operator("sorted_positions")
def sorted_positions(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """z, centred around 0, and the gaps h of the module's docstring.

    Args:
        values: Sorted items (..., n) in float64, at most half the largest double in size: their differences are finite.
        scale: Of the rows (..., 1) in float64; negative where the items descend.
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


@sorted_positions.register_fake
def _(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), values.new_empty(values.shape)


@sorted_positions.register_vmap
def _(info: Any, in_dims: Any, values: Tensor, scale: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return sorted_positions(*move_batch_first(info.batch_size, in_dims, (values, scale))), (0, 0)


@operator("decayed_sums")
def decayed_sums(z: Tensor, gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of the module's docstring, over the items on the left of each and over those on its right.

    Args:
        z: Ascending items (..., n), centred around 0 if the fast way is to be taken.
        gap: Their distances from the left neighbour (..., n).
        left: Weights (..., n) of the items in the sums over what lies on the left.
        right: Weights (..., n) of the items in the sums over what lies on the right.
    """
    z, gap, left, right = z.contiguous(), gap.contiguous(), left.contiguous(), right.contiguous()
    if z.numel() == 0:
        return torch.zeros_like(z), torch.zeros_like(z)
    if triton_runs(z):
        from .lapsum_triton import launch_decayed_sums

        return launch_decayed_sums(gap, left, right)
    if not z.is_cuda and is_narrow(z):
        return sums_by_cumsum(z.exp(), z.neg().exp_(), left, right)
    return sums_by_doubling(gap, left, right)


@decayed_sums.register_fake
def _(z: Tensor, gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape)


@decayed_sums.register_vmap
def _(info: Any, in_dims: Any, *args: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return decayed_sums(*move_batch_first(info.batch_size, in_dims, args)), (0, 0)


def is_narrow(z: Tensor) -> bool:
    """Whether exponentials of all items, and their sums, are normal numbers."""
    return bool(torch.maximum(-z[..., 0], z[..., -1]).max() <= SAFE_EXPONENT)


def sums_by_cumsum(rise: Tensor, fall: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`decayed_sums` from exp(z) and exp(-z)."""
    before, after = torch.zeros_like(rise), torch.zeros_like(rise)
    torch.cumsum((rise * left)[..., :-1], -1, out=before[..., 1:])
    torch.cumsum((fall * right)[..., 1:].flip(-1), -1, out=after[..., 1:])
    return before.mul_(fall), after.flip(-1).mul_(rise)


def sums_by_doubling(gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`decayed_sums` whatever the gaps."""
    n = gap.shape[-1]
    first = decay = gap.neg().exp_()  # to each item from `reach` items before it
    before, after = left.clone(), right.clone()  # each with the item itself
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


class Points(NamedTuple):
    """Points among sorted items, all (..., points).

    Attributes:
        offset: Of a point from an item near to it.
        anchor: The number of that item (int64).
        below: How many items lie at or below the point (int64): the anchor or the one after it.
    """

    offset: Tensor
    anchor: Tensor
    below: Tensor


@operator("soft_count_inverse")
def soft_count_inverse(z: Tensor, gap: Tensor, between: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The :class:`Points` where F passes 1/2, 3/2, ..., n - 1/2, or with ``between`` 1, 2, ..., n - 1; ascending.

    Args:
        z: Ascending items (..., n), centred around 0 if the fast way is to be taken.
        gap: Their distances from the left neighbour (..., n).
        between: Whether to cut the items apart rather than to follow them.
    """
    n, shape = z.shape[-1], _inverse_shape(z, between)
    if math.prod(shape) == 0:
        return Points(z.new_empty(shape), *(z.new_empty(shape, dtype=torch.long) for _ in range(2)))
    left, right = decayed_sums(z, gap, torch.ones_like(z), torch.ones_like(z))
    places = torch.arange(1, n + 1, dtype=z.dtype, device=z.device)
    # F at the items, + 1/2 to make whole numbers of the targets. Each item lies below all targets from the next one on:
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


@soft_count_inverse.register_fake
def _(z: Tensor, gap: Tensor, between: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = _inverse_shape(z, between)
    return z.new_empty(shape), z.new_empty(shape, dtype=torch.long), z.new_empty(shape, dtype=torch.long)


@soft_count_inverse.register_vmap
def _(info: Any, in_dims: Any, z: Tensor, gap: Tensor, between: bool) -> tuple[Any, tuple[int, int, int]]:
    return soft_count_inverse(*move_batch_first(info.batch_size, in_dims, (z, gap)), between), (0, 0, 0)


def _inverse_shape(z: Tensor, between: bool) -> tuple[int, ...]:
    return (*z.shape[:-1], max(z.shape[-1] - 1, 0) if between else z.shape[-1])
