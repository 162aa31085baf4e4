r"""Derivatives of derivatives in k at k = 0 and k = n, where the threshold is infinitely far away.

There the slopes w and their sum W vanish, so that k moves the threshold infinitely far. With r_i = (log F')'(z_i),

    dF_i/dk = omega_i,  dw_i/dk = r_i omega_i,  dW/dk = <omega, r>,  domega_i/dk = omega_i (q_i - <omega, q>),

where q_i = r_i / W, and a link knows the limits of their differences. For exponential tails, F' / F changes by q / 2.
The derivatives of log y in k are divided by W, so those of F' / F and W in x matter too, although they vanish.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..links.base import Link

END_DENSITY = 2.0**-120  # replaces a sum of slopes of 0; its inverse is finite in float32


class Growth(NamedTuple):
    """Terms that are added in rows with k = 0 or k = n: numbers that are 0 but have derivatives.

    Attributes:
        share: Added to omega.
        slope: Added to F'.
        value: Added to F.
        factor: Added to F' / F.
        density: Replaces the sum of slopes.
    """

    share: Tensor
    slope: Tensor
    value: Tensor
    factor: Tensor
    density: Tensor


def growth_at(
    ends: Tensor, z: Tensor, share: Tensor, density: Tensor, x: Tensor, s: Tensor, k: Tensor, link: Link
) -> Growth:
    """The terms for rows of which ``ends`` have k = 0 or k = n; z and share are their distances and shares."""
    share = share.detach()
    counts = share > 0
    z = z.masked_fill(~counts, 0.0)
    nearest = z.detach().abs().masked_fill(~counts, torch.inf).argmin(-1, keepdim=True)
    items = torch.where(counts, x.detach(), 0.0)
    beyond = (0.5 * items - 0.5 * items.gather(-1, nearest)) * (2 / s.detach()).unsqueeze(-1)
    rate, bend = link.limits_at_ends(z.detach(), beyond.masked_fill(~counts, 0.0), share)
    of_share = share * (bend - (share * bend).sum(-1, keepdim=True))
    of_slope, by_k = share * rate, torch.where(ends, k - k.detach(), 0.0).unsqueeze(-1)
    by_x = END_DENSITY * torch.where(ends.unsqueeze(-1), z - z.detach(), 0.0)
    moved = by_k + by_x - (share * by_x).sum(-1, keepdim=True)
    at_ends = END_DENSITY + (of_slope * by_k + END_DENSITY * of_share * by_x).sum(-1)
    return Growth(
        of_share * by_k,
        of_slope * by_k,
        share * by_k,
        torch.where(z < 0, 0.5 * bend * moved, of_slope * by_k),
        torch.where(ends, at_ends, density),
    )
