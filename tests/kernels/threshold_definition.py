r"""The definition of the maps of a threshold: bisection in float64.

.. math:: \sum_i F(z_i) = k, \qquad z_i = (a_i - t)/\sigma(t)

It is for scores and softness of ordinary size: t is one double here, where the exact path finds an anchor and an
offset.
"""

import torch
from torch import Tensor

from khot.kernels.exact.rows import Threshold
from khot.kernels.links.base import Link
from khot.kernels.threshold.kinds import KINDS, root_of, shrink

HALVINGS = 200  # of a bracket, until its ends are neighbouring doubles


def threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: int, q: float, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor]:
    """Anchor and offset of the threshold t = anchor + offset * sigma of each row of x (..., n).

    Args:
        x: Scores.
        k: Sum, float64 of the batch shape, like the scale; for signed masks a bound of the sum.
        scale: Positive softness s; sigma is s, or s t^(p-1) for magnitudes.
        link: The number of the link F.
        q: Its parameter.
        kind: Name of the kind of map, see :mod:`khot.kernels.threshold.kinds`.
        softness: The name of the scale in errors.
        check: Whether bad contents raise a ValueError.
    """
    found, which = Link.find(link, q), KINDS[kind]
    a, reach = which.scores(x.double()), torch.full_like(scale, found.reach) * scale
    infinite = a.isinf()
    low = a.masked_fill(infinite, torch.inf).amin(-1) - reach
    high = a.masked_fill(infinite, -torch.inf).amax(-1) + reach
    low = low.clamp(min=0) if which.absolute else low
    for _ in range(HALVINGS):
        t = 0.5 * low + 0.5 * high
        column = which.scale(t, scale, found).unsqueeze(-1)
        rises = found.value((a - t.unsqueeze(-1)) / column).sum(-1) > k
        low, high = torch.where(rises, t, low), torch.where(rises, high, t)
    return low, torch.zeros_like(low)


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: int, q: float, kind: str, softness: str, check: bool, with_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x (..., n), empty without values, and anchors and offsets; the arguments are those of :func:`threshold`.

    k and scale may be on the CPU for x elsewhere, if they expand one number.
    """
    k, scale = k.to(x.device), scale.to(x.device)
    at, found, which = (
        Threshold(*threshold(x, k, scale, link, q, kind, softness, check)),
        Link.find(link, q),
        KINDS[kind],
    )
    a, t = which.scores(x.double()), at.anchor.unsqueeze(-1)
    z = (a - t) / which.scale(at.anchor, scale, found).unsqueeze(-1)
    y = found.log_value(z) if which.log else found.value(z)
    if which.grows:
        kept, _ = shrink(a.clamp(min=torch.finfo(a.dtype).tiny), scale.unsqueeze(-1), found.q)
        y = torch.where((z >= 1) | ((t == 0) & (a > 0)), kept, (root_of(t, found.q) * z.clamp(0, 1)) ** found.q)
    y = (y * x.sign() if which.absolute else y).to(x.dtype)
    return y if with_values else y[..., :0], *at


def mask_derivative(
    x: Tensor,
    scale: Tensor,
    anchor: Tensor,
    offset: Tensor,
    grad: Tensor,
    link: int,
    q: float,
    kind: str,
    with_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in x's dtype, dL/dk and dL/ds, zeros if that is not wanted, from dL/dy, or from dL/d offset of masks."""
    if grad.dim() < x.dim():
        return threshold_derivative(x, scale, anchor, offset, grad, Link.find(link, q))
    scale, found, which = scale.to(x.device), Link.find(link, q), KINDS[kind]
    a, sign = which.scores(x.double()), x.sign().double() if which.absolute else torch.ones_like(x.double())
    t, s = which.threshold(Threshold(anchor, offset), scale, found).unsqueeze(-1), scale.unsqueeze(-1)
    sigma = which.scale(t, s, found)
    z, inward = (a - t) / sigma, grad.double() * sign
    slope = found.slope(z)
    direct = inward * (found.log_derivative(z) if which.log else slope)
    weight, gain, own_slope, own_lever = slope.sum(-1, keepdim=True), torch.ones_like(t), 0.0 * a, 0.0 * a
    if which.grows:
        weight = weight + sigma / t * torch.where((z > 0) & (z < 1), z, 0.0).pow(found.q).sum(-1, keepdim=True)
        _, own_lever = shrink(a.clamp(min=torch.finfo(a.dtype).tiny), s, found.q)
        steepness = own_lever ** (found.q - 1)
        gain, own_slope = t, torch.where(z >= 1, steepness / (steepness + s / found.q), 0.0)
    held = (weight > 0) & (t > 0) if which.absolute else weight > 0
    mean = torch.where(held, direct.sum(-1, keepdim=True) / weight, 0.0)
    pull = gain * (direct - slope * mean)
    grad_a = pull / sigma + own_slope * inward
    lever = torch.where(slope > 0, pull * z, 0.0) / s + own_slope * own_lever * inward
    grad_scale = -lever.sum(-1) if with_scale else torch.zeros_like(anchor)
    return (grad_a * sign).to(x.dtype), (gain * mean).squeeze(-1), grad_scale


def threshold_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, found: Link
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in x's dtype, dL/dk and dL/ds from dL/d offset of the thresholds of masks; 0 if no slope holds one."""
    z = (x.double() - (anchor + offset * scale).unsqueeze(-1)) / scale.unsqueeze(-1)
    slope = found.slope(z)
    total = slope.sum(-1, keepdim=True)
    share = torch.where(total > 0, slope / total, 0.0)
    grad_z, grad_k = share * grad.unsqueeze(-1), torch.where(total > 0, -1 / total, 0.0).squeeze(-1) * grad
    return (grad_z / scale.unsqueeze(-1)).to(x.dtype), grad_k, -((z * grad_z).sum(-1) + offset * grad) / scale
