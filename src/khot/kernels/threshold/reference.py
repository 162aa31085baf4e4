r"""Relaxed top-k masks by bisection, in float64: the definition.

.. math:: y_i = F((x_i - t) / s), \qquad \sum_i y_i = k

For scores and scales of ordinary size: t is one double here, where :mod:`khot.kernels.threshold.search` finds an
anchor and an offset.
"""

import torch
from torch import Tensor

from ..links.base import Link
from ..rows import Threshold, distances

HALVINGS = 200  # of a bracket, until its ends are neighbouring doubles


def threshold(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> tuple[Tensor, Tensor]:
    """Anchor and offset of the threshold t = anchor + offset * scale of each row of x (..., n).

    Args:
        x: Scores.
        k: Sum, float64 of the batch shape, as the scale.
        scale: Positive.
        link: Key of the link F.
        softness: What errors call the scale.
        check: Whether bad contents raise a ValueError.
    """
    found, items, s = Link.find(link), x.double(), scale.unsqueeze(-1)
    reach = torch.full_like(scale, found.reach) * scale
    infinite = items.isinf()
    low = items.masked_fill(infinite, torch.inf).amin(-1) - reach
    high = items.masked_fill(infinite, -torch.inf).amax(-1) + reach
    for _ in range(HALVINGS):
        t = 0.5 * low + 0.5 * high
        rises = found.value((items - t.unsqueeze(-1)) / s).sum(-1) > k
        low, high = torch.where(rises, t, low), torch.where(rises, high, t)
    return low, torch.zeros_like(low)


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, or log y, like x (..., n), and anchors and offsets; arguments as of :func:`threshold`.

    k and scale may be on the CPU for an x elsewhere, if they expand one number.
    """
    k, scale = k.to(x.device), scale.to(x.device)
    at = Threshold(*threshold(x, k, scale, link, softness, check))
    z, found = distances(x.double(), at, scale), Link.find(link)
    return (found.log_value(z) if log else found.value(z)).to(x.dtype), *at


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, log: bool, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in x's dtype, dL/dk and dL/ds, zeros if that is not wanted, from dL/dy or dL/d log y."""
    scale, found = scale.to(x.device), Link.find(link)
    z = distances(x.double(), Threshold(anchor, offset), scale)
    slope = found.slope(z)
    direct = grad.double() * (found.log_derivative(z) if log else slope)
    grad_k = direct.sum(-1) / slope.sum(-1)
    grad_x = (direct - slope * grad_k.unsqueeze(-1)) / scale.unsqueeze(-1)
    grad_scale = -(z * grad_x).sum(-1) if with_scale else torch.zeros_like(grad_k)
    return grad_x.to(x.dtype), grad_k, grad_scale


def threshold_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in x's dtype, dL/dk and dL/ds from dL/dt of the thresholds ``(...)``; 0 where no slope holds one."""
    found = Link.find(link)
    z = distances(x.double(), Threshold(anchor, offset), scale)
    slope = found.slope(z)
    total = slope.sum(-1, keepdim=True)
    share = torch.where(total > 0, slope / total, 0.0)
    grad_x = share * grad.unsqueeze(-1)
    grad_k = torch.where(total > 0, -scale.unsqueeze(-1) / total, 0.0).squeeze(-1) * grad
    return grad_x.to(x.dtype), grad_k, -(z * grad_x).sum(-1)
