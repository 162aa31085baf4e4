"""What the sparse maps by absolute value and their derivatives are made of, see :mod:`khot.kernels.magnitude`."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..links.clipped_power import ClippedPower
from ..rows import Threshold, distances
from .search import ratios, root_of, shrink, threshold_value

LARGEST_ROOT = 1e18  # of the odds h : 1 - h, which is sure to round to 1 : 0
SMALLEST_ROOT = 1e-30  # of a number that rows are multiplied by in two steps; below, one is enough
LARGE, SHRINKAGE = 1e280, 2.0**-64  # numbers above which are added when they are smaller


class LocalShape(NamedTuple):
    """What values and derivatives are made of; tensors (..., n) in the computing dtype, or (...) in float64.

    Attributes:
        value: abs(y).
        z: Of the entries that follow the threshold; anything within [0, 1] for the others.
        slope: f.
        weight: W (...); 0 where the threshold is idle. A sum over the entries.
        scale: sigma (...).
        gain: g (...).
        root_rate: The square root of g / sigma (...), which may be beyond all numbers.
        stretch: kappa (...).
        own_slope: h, if any entry has it.
        own_lever: e.
    """

    value: Tensor
    z: Tensor
    slope: Tensor
    weight: Tensor
    scale: Tensor
    gain: Tensor
    root_rate: Tensor
    stretch: Tensor
    own_slope: Tensor | None = None
    own_lever: Tensor | None = None


def local_shape(a: Tensor, at: Threshold, strength: Tensor, link: ClippedPower, magnitude: bool) -> LocalShape:
    """For a = abs(x) (..., n); in differentiable operations of a, the offset and the strength."""
    return (_magnitude_shape if magnitude else _signed_shape)(a, at, strength, link)


def _signed_shape(a: Tensor, at: Threshold, strength: Tensor, link: ClippedPower) -> LocalShape:
    z = distances(a, at, strength)
    slope, binding = link.slope(z), (at.anchor != 0) | (at.offset != 0)
    one = torch.ones_like(strength)
    weight = slope.sum(-1).double() * binding
    # Beyond (0, 1) the slope is 0 and the lever idle, but z may overflow.
    return LocalShape(link.value(z), z.clamp(0, 1), slope, weight, strength, one, strength.rsqrt(), one)


def _magnitude_shape(a: Tensor, at: Threshold, strength: Tensor, link: ClippedPower) -> LocalShape:
    q, t = link.q, threshold_value(at, strength, link)
    idle, positive = (t == 0).unsqueeze(-1), torch.where(t == 0, 1.0, t)
    root = root_of(positive, link)
    z = ratios(a, at, root, strength)
    capped = ((z >= 1) | idle) & (a > 0)
    inside = (z > 0) & (z < 1) & ~idle
    z = torch.where(inside, z, 0.5)  # the other kinds see a harmless number instead, as capped ones alone see theirs
    pooled = (root.to(a.dtype).unsqueeze(-1) * z) ** q  # in which the rounding of the root cancels
    ratio = strength * positive ** (1 / q - 1)  # sigma / t
    column = strength.to(a.dtype).unsqueeze(-1)
    kept, lever = shrink(torch.where(capped, a, 1.0), column, link)
    slope, share = link.slope(z) * inside, (z**q * inside).sum(-1).double()
    odds = (lever ** (0.5 * q - 0.5) * (q / column).sqrt()).clamp(max=LARGEST_ROOT).square()
    return LocalShape(
        torch.where(capped, kept, pooled * inside),
        z,
        slope,
        slope.sum(-1).double() + ratio * share,
        ratio * t.clamp(min=torch.finfo(t.dtype).tiny),
        t,
        strength.rsqrt() * positive ** (0.5 - 0.5 / q),
        1 - at.offset * ratio / q,
        torch.where(capped, odds / (1 + odds), 0.0),
        torch.where(capped, lever, 0.0),
    )


def over(weight: Tensor, numerator: Tensor) -> Tensor:
    """numerator / W, and 0 where W is."""
    return torch.where(weight > 0, numerator / torch.where(weight > 0, weight, 1.0), 0.0)


def times_square(entries: Tensor, root: Tensor) -> Tensor:
    """Rows (..., n) times the square of a float64 number each, in two steps: where it overflows, entries are small."""
    column = root.to(entries.dtype).unsqueeze(-1)
    return entries * column * column


def pullback(
    shape: LocalShape, inward: Tensor, mean: Tensor, strength: Tensor, with_strength: bool
) -> tuple[Tensor, Tensor]:
    """dL/da from dL/d abs(y) and its mean over the threshold's weight; and the share of these entries in dL/d strength.

    The latter is 0 if it is not wanted.
    """
    centred = shape.slope * (inward - mean.to(inward.dtype).unsqueeze(-1))
    grad_a, grad_strength = times_square(centred, shape.root_rate), torch.zeros_like(mean)
    own = None if shape.own_slope is None else inward * shape.own_slope
    if with_strength:
        half = (shape.gain.sqrt() / strength.sqrt()).detach().clamp(min=SMALLEST_ROOT)
        grad_strength = -_weighted_sum(centred, shape.z, half, shape.gain / half / strength)
        if own is not None and shape.own_lever is not None:  # which may cancel where it is near the largest number
            small = torch.where(shape.own_lever.amax(-1) > LARGE, SHRINKAGE, 1.0).double()
            grad_strength = (
                grad_strength * small - _weighted_sum(own, shape.own_lever, torch.ones_like(small), small)
            ) / small
    return grad_a if own is None else grad_a + own, grad_strength


def _weighted_sum(entries: Tensor, levers: Tensor, factor: Tensor, other: Tensor) -> Tensor:
    """factor * other * sum entries * levers in float64, in units of the largest: it alone overflows or underflows."""
    tiny = torch.finfo(levers.dtype).tiny
    units = [v.detach().abs().amax(-1).clamp(min=tiny) for v in (entries, levers)]
    left, right = (v / unit.unsqueeze(-1) for v, unit in zip((entries, levers), units, strict=True))
    return (left * right).sum(-1).double() * (units[0].double() * factor) * (units[1].double() * other)
