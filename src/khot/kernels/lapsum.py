r"""Sums over sorted items that decay with distance, and the inverse of the soft count of items.

With items :math:`z_1 \le \dots \le z_n` (in units of the scale) the order maps need

.. math:: \ell_j(v) = \sum_{i<j} e^{z_i - z_j} v_i, \qquad r_j(v) = \sum_{i>j} e^{z_j - z_i} v_i .

A cumulative sum of :math:`e^{z_i} v_i`, divided by :math:`e^{z_j}`, gives them in O(n) while no exponential over- or
underflows: in double precision as long as the items spread over no more than 1200 scales. Beyond that, and on
accelerators without Triton, where looking at the spread would stall, the sums double their reach log2(n) times with
factors :math:`e^{z_{j-d} - z_j} \le 1`, which no gap can harm.

Between neighbouring items the soft count of those below t, :math:`F(t) = \sum_i \mathrm{Lap}(t - z_i)`, is a constant
plus two exponentials. With p items at or below t, :math:`A = 1 + \ell_p(1)` and :math:`B = 1 + r_{p+1}(1)`,

.. math:: 2 (F(t) - p) = B e^{t - z_{p+1}} - A e^{z_p - t},

a quadratic equation in :math:`e^t`. With :math:`q = |d| + \sqrt{d^2 + A B e^{z_p - z_{p+1}}}` the root of F(t) = p + d
is :math:`t = z_{p+1} - \log(B/q)` if d > 0 and :math:`t = z_p + \log(A/q)` if d < 0, free of cancellation and in need
of no polish; if d = 0 it is :math:`\tfrac12 (z_p + z_{p+1} + \log(A/B))`, however wide the gap.

Layout: z, v (..., n) in float64.

References:
    [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .capped_simplex import move_batch_first
from .dispatch import triton_runs
from .operator import operator

SAFE_EXPONENT = 600.0  # exp of it leaves a factor of 1e47 for the length of the row and the size of v


@operator("decayed_sums")
def decayed_sums(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of the module's docstring, over the items on the left of each and over those on its right.

    Args:
        z: Ascending items (..., n), centred around 0 if the fast way is to be taken.
        left: Weights (..., n) of the items in the sums over what lies on the left.
        right: Weights (..., n) of the items in the sums over what lies on the right.
    """
    z, left, right = z.contiguous(), left.contiguous(), right.contiguous()
    if z.numel() == 0:
        return torch.zeros_like(z), torch.zeros_like(z)
    if triton_runs(z):
        from .lapsum_triton import launch_decayed_sums

        return launch_decayed_sums(z, left, right)
    if not z.is_cuda and torch.maximum(-z[..., 0], z[..., -1]).max() <= SAFE_EXPONENT:
        return _by_cumsum(z, left, right)
    return _by_doubling(z, left, right)


@decayed_sums.register_fake
def _(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape)


@decayed_sums.register_vmap
def _(info: Any, in_dims: Any, z: Tensor, left: Tensor, right: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return decayed_sums(*move_batch_first(info.batch_size, in_dims, (z, left, right))), (0, 0)


def _by_cumsum(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    rise, fall = z.exp(), z.neg().exp_()
    before, after = torch.zeros_like(rise), torch.zeros_like(rise)
    torch.cumsum((rise * left)[..., :-1], -1, out=before[..., 1:])
    torch.cumsum((fall * right)[..., 1:].flip(-1), -1, out=after[..., 1:])
    return before.mul_(fall), rise.mul_(after.flip(-1))


def _by_doubling(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    n = z.shape[-1]
    before, after = left.clone(), right.clone()  # each with the item itself
    reach = 1
    while reach < n:
        decay = (z[..., :-reach] - z[..., reach:]).exp_()
        if not z.is_cuda and not bool(decay.any()):
            break
        before[..., reach:] += decay * before[..., :-reach]
        after[..., :-reach] += decay * after[..., reach:]
        reach *= 2
    decay = (z[..., :-1] - z[..., 1:]).exp_()
    nothing = torch.zeros_like(z[..., :1])
    return torch.cat([nothing, decay * before[..., :-1]], -1), torch.cat([decay * after[..., 1:], nothing], -1)


@operator("soft_count_inverse")
def soft_count_inverse(z: Tensor, between: bool) -> tuple[Tensor, Tensor]:
    """Where F passes 1/2, 3/2, ..., n - 1/2, or with ``between`` 1, 2, ..., n - 1; and how many items lie below.

    Args:
        z: Ascending items (..., n), centred around 0 if the fast way is to be taken.
        between: Whether to cut the items apart rather than to follow them.

    Returns:
        The points t, ascending, and for each the number of items at or below it (int64).
    """
    n, shape = z.shape[-1], _inverse_shape(z, between)
    if math.prod(shape) == 0:
        return z.new_empty(shape), z.new_empty(shape, dtype=torch.long)
    left, right = decayed_sums(z, torch.ones_like(z), torch.ones_like(z))
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
    z_anchor, left_anchor, right_anchor = z.gather(-1, anchor), left.gather(-1, anchor), right.gather(-1, anchor)
    near, far = torch.where(excess > 0, right_anchor, left_anchor), torch.where(excess > 0, left_anchor, right_anchor)
    near += 1
    distance = excess.square().addcmul_(near, far).sqrt_().add_(excess.abs()).reciprocal_().mul_(near).log_()
    t = z_anchor.sub_(distance.clamp_(min=0).copysign_(excess))
    if between:
        lower, upper = (below - 1).clamp_(min=0), below.clamp(max=n - 1)
        middle = (
            left.gather(-1, lower).log1p() - right.gather(-1, upper).log1p() + z.gather(-1, lower) + z.gather(-1, upper)
        )
        t = torch.where(excess == 0, 0.5 * middle, t)
    return t, below


@soft_count_inverse.register_fake
def _(z: Tensor, between: bool) -> tuple[Tensor, Tensor]:
    shape = _inverse_shape(z, between)
    return z.new_empty(shape), z.new_empty(shape, dtype=torch.long)


@soft_count_inverse.register_vmap
def _(info: Any, in_dims: Any, z: Tensor, between: bool) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return soft_count_inverse(*move_batch_first(info.batch_size, in_dims, (z,)), between), (0, 0)


def _inverse_shape(z: Tensor, between: bool) -> tuple[int, ...]:
    return (*z.shape[:-1], max(z.shape[-1] - 1, 0) if between else z.shape[-1])
