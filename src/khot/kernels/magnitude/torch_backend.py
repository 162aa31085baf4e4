r"""The sparse maps by absolute value, the signed mask and the magnitudes, and their derivatives as an operator each.

A map is :math:`y_i = \mathrm{sign}(x_i)\, Y(a_i, t, \lambda)` of :math:`a = |x|`, with one threshold
:math:`t = A + c\sigma` per row, an anchor A, an offset c and a scale :math:`\sigma`. With q = 1 / (p - 1) and
:math:`z = (a - t)/\sigma`,

* the signed mask has :math:`\sigma = \lambda` and :math:`Y = \mathrm{clip}(z, 0, 1)^q`. The threshold does not follow
  below 0;
* the magnitudes have :math:`\sigma = \lambda t^{p-1}` and three kinds of entries. Capped, :math:`z \ge 1`:
  :math:`Y + \lambda Y^{p-1} = a`, whatever t is. Pooled, z between 0 and 1: :math:`Y = ((a - t)/\lambda)^q = t z^q`.
  Zero, :math:`z \le 0`.

An entry between 0 and its cap follows the threshold. With the slopes :math:`f_i = q z_i^{q-1}` of those in z, 0 for the
others, and :math:`v_i = da_i/\sigma - z_i\,d\lambda/\lambda`,

.. math:: \tau = \frac{\langle f, v\rangle - dk}{W}, \qquad
    d|y_i| = g f_i (v_i - \tau) + h_i\,(da_i - e_i\,d\lambda), \qquad dc = \kappa\tau - c\,d\lambda/\lambda,

where 1 / W is taken as 0 where the threshold is idle. The signed mask has a gain g of 1, the weight
:math:`W = \sum f_i` and no h. The magnitudes have g = t; as the scale grows with t,
:math:`W = \sum f_i + (\sigma/t) \sum z_i^q` over the pooled entries and :math:`\kappa = 1 - c\,(p-1)\,\sigma/t`; and of
capped entries, with :math:`u = |y|^{p-1}`, the slope :math:`h = u^{q-1} / (u^{q-1} + \lambda/q)` and the lever e = u.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import move_batch_first
from ..links.base import Link
from ..links.clipped_power import ClippedPower
from ..registry import operator
from ..rows import Threshold, compute_dtype, distances
from .threshold import far_dtype, odd_threshold, ratios, root_of, shrink, threshold_value

LARGEST_ROOT = 1e18  # of the odds h : 1 - h, which is sure to round to 1 : 0
SMALLEST_ROOT = 1e-30  # of a number that rows are multiplied by in two steps; below, one is enough
LARGE, SHRINKAGE = 1e280, 2.0**-64  # numbers above which are added when they are smaller
ORDINARY = 2.0**24  # thresholds and strengths up to which, and down to the inverse of which, float32 does
TILE = 2**16  # entries that are worked on at a time, as few as fit a CPU's cache


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


@operator("odd_map")
def odd_map(
    x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y like ``x (..., n)``, and anchors and offsets of the batch shape; arguments as of :func:`odd_threshold`."""
    anchor, offset = odd_threshold(x, k, strength, link, magnitude, check)
    if x.numel() == 0:
        return torch.zeros_like(x), anchor, offset
    found, rows = _found(link), x.reshape(-1, x.shape[-1])
    at, strength = Threshold(anchor.reshape(-1), offset.reshape(-1)), strength.reshape(-1)
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dtype = _arithmetic(x, at, strength, magnitude)
    for which, columns in _tiles(rows):
        part = rows[which, columns].to(dtype)
        here = Threshold(at.anchor[which], at.offset[which])
        y[which, columns] = local_shape(part.abs(), here, strength[which], found, magnitude).value.mul_(part.sign())
    return y.reshape(x.shape), anchor, offset


def _found(link: str) -> ClippedPower:
    found = Link.find(link)
    assert isinstance(found, ClippedPower)
    return found


@odd_map.register_fake
def _(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> tuple[Tensor, Tensor, Tensor]:
    of_row = torch.empty_like(k, memory_format=torch.contiguous_format)
    return torch.empty_like(x, memory_format=torch.contiguous_format), of_row, torch.empty_like(of_row)


@odd_map.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> Any:
    x, k, strength = move_batch_first(info.batch_size, in_dims, (x, k, strength))
    return odd_map(x, k, strength, link, magnitude, False), (0, 0, 0)


@operator("odd_map_derivative")
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
    """dL/dx in x's dtype, dL/dk and dL/d strength, unless it is not wanted, from dL/dy; not differentiable."""
    batch, found = x.shape[:-1], _found(link)
    if x.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(anchor), torch.zeros_like(anchor)
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
    at, strength = Threshold(anchor.reshape(-1), offset.reshape(-1)), strength.reshape(-1)
    dtype = _arithmetic(x, at, strength, magnitude)

    def at_tile(which: slice, columns: slice) -> tuple[Tensor, Tensor, LocalShape]:
        part = rows[which, columns].to(dtype)
        sign, here = part.sign(), Threshold(at.anchor[which], at.offset[which])
        shape = local_shape(part.abs(), here, strength[which], found, magnitude)
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
    mean = over(weight, pull)
    grad_x = torch.empty_like(rows, memory_format=torch.contiguous_format)
    grad_strength = torch.zeros_like(strength)
    for which, columns in tiles:
        sign, inward, shape = kept.pop() if kept else at_tile(which, columns)
        grad_a, of_strength = pullback(shape, inward, mean[which], strength[which], with_strength)
        grad_x[which, columns] = grad_a.mul_(sign)
        grad_strength[which] += of_strength
    return grad_x.reshape(x.shape), (gain * mean).reshape(batch), grad_strength.reshape(batch)


@odd_map_derivative.register_fake
def _(
    x: Tensor, strength: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    of_row = torch.empty_like(anchor, memory_format=torch.contiguous_format)
    return torch.empty_like(x, memory_format=torch.contiguous_format), of_row, torch.empty_like(of_row)


@odd_map_derivative.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> tuple[Any, tuple[int, int, int]]:
    return odd_map_derivative(*move_batch_first(info.batch_size, in_dims, args[:5]), *args[5:]), (0, 0, 0)
