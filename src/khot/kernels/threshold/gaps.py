r"""Shares of slopes in a gap so wide that all slopes underflow, and z has lost the digits of x.

Then k is the number of items above t, or 0 or n. On each side, slopes are computed relative to that of the item nearest
to the gap, from differences of scores. The weights of the two sides follow from their tails, whose sums are equal. All
numbers are float64 and constants; other processes may hold further items of the rows.

The tails of all links with fused loops are exponential, and the loops use what this becomes for them. Let l and u be
the ends of the gap, and :math:`\Sigma_b = \sum e^{-(l - x_i)/s}` over the items below it and
:math:`\Sigma_a = \sum e^{-(x_i - u)/s}` over those above it. The tails below t are :math:`e^{(x_i - t)/s}` and those
above it :math:`e^{(t - x_i)/s}`, up to a common factor. Their sums :math:`e^{(l - t)/s} \Sigma_b` and
:math:`e^{(t - u)/s} \Sigma_a` are equal at

.. math:: t = \frac{l + u}{2} + \frac{s}{2} \log \frac{\Sigma_b}{\Sigma_a} .

The slopes are equal to the tails. So each side has half of the shares, those of a softmax of x / s below and of -x / s
above, and :math:`-dt/ds = \langle\omega, z\rangle` is :math:`\frac{1}{2} \log(\Sigma_a / \Sigma_b)`, half of
(u - t) / s - (t - l) / s, plus :math:`\langle\omega, b\rangle` with b = (x - u) / s above and (x - l) / s below.
A gap with only one side, at k = 0 and k = n, has all of the shares there. In capped softmax, t is at u, and held by the
items there alone.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..exact.reductions import Whole
from ..exact.rows import Threshold
from ..links.base import Link

UNDERFLOW = torch.finfo(torch.float64).tiny / torch.finfo(torch.float64).eps
WIDE = 256  # half the width of a gap in scales beyond which distances lose more digits than expansions about its middle
NEXT = 1.01  # a factor by which a distance is varied
FARTHEST = 0.125 * torch.finfo(torch.float64).max  # in scales, as good as infinite, but 0 * FARTHEST is 0


def are_far(total: Tensor) -> Tensor:
    """Rows with so small a sum of slopes that only the ratios of the slopes are meaningful."""
    return total < UNDERFLOW


class Side(NamedTuple):
    """The items on one side of a gap, for rows.

    Attributes:
        items: Which items these are (..., n).
        edge: The score of the nearest one (..., 1).
        start: Its distance z.
        tails: log of the sum of the tails, relative to the slope of the nearest one (...); -inf without items.
    """

    items: Tensor
    edge: Tensor
    start: Tensor
    tails: Tensor


class Gap(NamedTuple):
    """A gap that contains t; ``decay`` is log F' of items relative to the nearest item on the same side."""

    above: Side
    below: Side
    decay: Tensor


def gap_around(x: Tensor, s: Tensor, at: Threshold, link: Link, over: Whole) -> Gap:
    """The gap that contains a threshold."""
    half = 0.5 * x - (0.5 * at.anchor).unsqueeze(-1)
    z = (half / (0.5 * s).unsqueeze(-1) - at.offset.unsqueeze(-1)).clamp(-FARTHEST, FARTHEST)
    finite, is_above = x.isfinite(), z >= 0 if link.compact else z > 0
    sides = is_above & finite, ~is_above & finite
    values = (sides[0], -z), (sides[0], -x), (sides[1], z), (sides[1], x)
    first, right, last, left = (
        v.unsqueeze(-1) for v in over.max(*(torch.where(side, v, -torch.inf).amax(-1) for side, v in values))
    )
    edge = torch.where(is_above, -right, left).nan_to_num(0.0, 0.0, 0.0)
    start = torch.where(is_above, -first, last).nan_to_num(0.0, 0.0, 0.0)
    beyond = (0.5 * torch.where(finite, x, edge) - 0.5 * edge) * (2 / s).unsqueeze(-1)
    beyond = beyond.clamp(-FARTHEST, FARTHEST)
    decay = link.log_decay(start, beyond).masked_fill(~finite, -torch.inf)
    tails = decay - link.log_hazard(start + beyond)
    sums = over.logsumexp(*(torch.where(side, tails, -torch.inf) for side in sides))
    return Gap(Side(sides[0], -right, -first, sums[0]), Side(sides[1], left, last, sums[1]), decay)


def exact_shares(x: Tensor, s: Tensor, at: Threshold, link: Link, over: Whole) -> Tensor:
    """omega of rows in such gaps; 0 if no item has a slope."""
    gap = gap_around(x, s, at, link, over)
    logits = gap.decay - torch.where(gap.above.items, gap.above.tails.unsqueeze(-1), gap.below.tails.unsqueeze(-1))
    if link.compact:  # t is next to the cap of the nearest item above; without items below nothing holds it
        some_above, some_below = (side.edge.isfinite() for side in (gap.above, gap.below))
        logits = logits.masked_fill(torch.where(gap.above.items, ~some_below, some_above), -torch.inf)
    logits = logits.masked_fill(~x.isfinite(), -torch.inf)
    (top,) = over.max(logits.amax(-1))
    weights = (logits - torch.where(top > -torch.inf, top, 0.0).unsqueeze(-1)).exp()
    (total,) = over.sum(weights.sum(-1))
    return weights / torch.where(total > 0, total, 1.0).unsqueeze(-1)


def density_of(z: Tensor, link: Link, over: Whole) -> Tensor:
    """The sum of slopes, each of which underflows."""
    return over.logsumexp(link.log_slope(z))[0].exp()


def mean_distance(
    share: Tensor, z: Tensor, x: Tensor, s: Tensor, at: Threshold, far: Tensor, link: Link, over: Whole
) -> Tensor:
    """sum omega z, which is -dt/ds, with the derivatives of this sum. Everything except share and z is constant.

    It is the difference of the parts above and below t, both as large as the gap. In a wide gap it is computed from
    scores relative to the edges. With Z and -Z' the distances of the nearest items above and below, and b those of the
    others from them, this is sum omega b + (Omega Z - Omega' Z'). The slopes F'(Z) and F'(Z') differ by as much as the
    relative tails on the two sides differ, which gives Z - Z'. The shares Omega and Omega' of the sides are in
    proportion to their mean hazards, of which ``power`` is the exponent: 0 for exponential tails, 1 for normal ones.
    """
    (mean,) = over.sum((share * z).sum(-1))
    if type(link).log_decay is Link.log_decay:
        return mean
    gap = gap_around(x, s, at, link, over)
    half = ((gap.above.edge - gap.below.edge) * 0.5 / s.unsqueeze(-1)).squeeze(-1)
    wide = far & (half > WIDE) & half.isfinite()  # in other rows t may be at an item, with no gap around it
    half = torch.where(wide, half, WIDE)
    edge = torch.where(gap.above.items, gap.above.edge, gap.below.edge)
    weight = share.detach()
    (spread,) = over.sum((weight * torch.where(weight > 0, x - edge, 0.0)).sum(-1) / s)
    exact = spread  # right for a compact link: its threshold stays at the cap of the nearest item above
    if not link.compact:
        # -(log F')' at the ends, exact if it is linear in z, as those of exponential and of normal tails are.
        rate = 0.5 * link.log_decay(half, torch.full_like(half, 2.0)) - 2 * link.log_decay(half, torch.ones_like(half))
        power = (link.log_hazard(NEXT * half) - link.log_hazard(half / NEXT)) / (2 * math.log(NEXT))
        exact = (1 + power) * (0.5 * (gap.above.tails - gap.below.tails) / rate + spread)
    return mean + torch.where(wide, exact - mean.detach(), 0.0)
