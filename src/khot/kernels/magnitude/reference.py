r"""The sparse maps by absolute value, by bisection in float64: the definition.

For entries and strengths of ordinary size; the formulas are those of :mod:`khot.kernels.magnitude`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..links.base import Link
from ..links.clipped_power import ClippedPower
from ..rows import Threshold

HALVINGS = 100  # of a bracket, until its ends are neighbouring doubles


class _Shape(NamedTuple):
    """Values and slopes of the entries a = abs(x) at a threshold; names as in :mod:`khot.kernels.magnitude`."""

    value: Tensor
    z: Tensor
    slope: Tensor
    gain: Tensor
    scale: Tensor
    own_slope: Tensor
    own_lever: Tensor
    weight: Tensor


def _root(rises, low: Tensor, high: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Where a condition on a number between low and high, true at first, becomes false."""
    for _ in range(HALVINGS):
        middle = 0.5 * low + 0.5 * high
        low, high = torch.where(rises(middle), middle, low), torch.where(rises(middle), high, middle)
    return low


def _shape(a: Tensor, t: Tensor, strength: Tensor, link: str, magnitude: bool) -> _Shape:
    found = Link.find(link)
    assert isinstance(found, ClippedPower)
    q, t, strength = found.q, t.unsqueeze(-1), strength.unsqueeze(-1)
    scale = strength * t ** (1 / q) if magnitude else strength.expand(t.shape)
    z = ((a - t) / scale).clamp(min=0).nan_to_num(0.0, torch.inf)
    pooled, capped = (z > 0) & (z < 1), z >= 1
    slope = torch.where(pooled, q * z ** (q - 1), 0.0)
    if not magnitude:
        nothing, weight = torch.zeros_like(z), slope.sum(-1, keepdim=True) * (t > 0)
        return _Shape(z.clamp(max=1) ** q, z, slope, torch.ones_like(t), scale, nothing, nothing, weight)
    own = _root(lambda y: y + strength * y ** (1 / q) <= a, torch.zeros_like(a), a)
    lever = own ** (1 / q)
    own_slope = torch.where(capped, lever ** (q - 1) / (lever ** (q - 1) + strength / q), 0.0)
    follower = torch.where(pooled, z**q, 0.0)
    weight = slope.sum(-1, keepdim=True) + (scale / t) * follower.sum(-1, keepdim=True)
    return _Shape(torch.where(capped, own, t * follower), z, slope, t, scale, own_slope, lever, weight)


def _magnitude_threshold(anchor: Tensor, offset: Tensor, strength: Tensor, link: str) -> Tensor:
    """The t with t = anchor + offset * strength * t^(p-1), which an offset up to 0 leaves below the anchor."""
    power = 1 / Link.find(link).q
    return _root(lambda t: t <= anchor + offset * strength * t**power, torch.zeros_like(anchor), anchor.clone())


def threshold(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> tuple[Tensor, Tensor]:
    """Anchor and offset of the threshold of each row of x (..., n), float64 (...).

    Args:
        x: Real entries; only their absolute values count.
        k: Sum, from 0 to n, float64 (...).
        strength: Positive, float64 (...).
        link: Key of the :class:`ClippedPower`.
        magnitude: Which of the two thresholds.
        check: Whether bad contents raise a ValueError.
    """
    a, found = x.double().abs(), Link.find(link)
    p = 1 + 1 / found.q

    def above(t: Tensor) -> Tensor:
        scale = strength * t ** (p - 1) if magnitude else strength
        return found.value((a - t.unsqueeze(-1)) / scale.unsqueeze(-1)).sum(-1) > k

    t = _root(above, torch.zeros_like(k), a.amax(-1))
    return t, torch.zeros_like(t)


def odd_map(
    x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y like ``x (..., n)``, and anchors and offsets of the batch shape; arguments as of :func:`threshold`."""
    at = Threshold(*threshold(x, k, strength, link, magnitude, check))
    shape = _shape(x.double().abs(), at.anchor, strength, link, magnitude)
    return (shape.value * x.sign()).to(x.dtype), *at


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
    """dL/dx in x's dtype, dL/dk and dL/d strength, zeros if it is not wanted, from dL/dy."""
    a, inward = x.double().abs(), grad.double() * x.sign()
    t = anchor + offset * strength if not magnitude else _magnitude_threshold(anchor, offset, strength, link)
    shape = _shape(a, t, strength, link, magnitude)
    mean = torch.where(shape.weight > 0, (shape.slope * inward).sum(-1, keepdim=True) / shape.weight, 0.0)
    pull = shape.gain * shape.slope * (inward - mean)
    grad_a = pull / shape.scale + shape.own_slope * inward
    lever = pull * shape.z / strength.unsqueeze(-1) + shape.own_slope * shape.own_lever * inward
    grad_strength = -lever.sum(-1) if with_strength else torch.zeros_like(strength)
    return (grad_a * x.sign()).to(x.dtype), (shape.gain * mean).squeeze(-1), grad_strength
