r"""Derivatives of the maps of a threshold, in differentiable operations, so of every order and in both modes.

Let t = A + c sigma be the threshold with offset c and scale sigma, and :math:`v_i = da_i/\sigma - z_i\,ds/s` for scores
a (x itself, or abs(x) for odd maps). The items between 0 and their cap follow the threshold. With the slopes f = F'(z)
of these items, their sum W and the shares :math:`\omega = f / W`,

.. math:: \tau = \langle\omega, v\rangle - dk / W, \qquad dy_i = g f_i (v_i - \tau) + h_i (da_i - e_i\,ds), \qquad
    dc = \kappa\tau - c\,ds/s .

* Masks and signed masks have the gain g = 1, :math:`\kappa = 1` and no h. Nothing follows an idle threshold.
* Logarithms of masks have :math:`d\log y_i = (f_i / F_i) (v_i - \tau)`.
* Magnitudes have g = t. As the scale grows with t, :math:`W = \sum f_i + (\sigma/t) \sum z_i^q` over the pooled entries
  and :math:`\kappa = 1 - c\,(p-1)\,\sigma/t`. Capped entries have, with :math:`u = |y|^{p-1}`, the slope
  :math:`h = u^{q-1} / (u^{q-1} + s/q)` and the lever e = u.

The offset is an output of the map that depends on x, k and s; the anchor is a constant. 1 / W counts as 0 if nothing
holds the threshold. The derivatives cannot be computed from y: 1 - y has lost its digits where an item is almost
certain.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from khot._torch_internals import is_recorded, is_shape_only, is_traced_by_mode, is_transformed

from ..exact.reductions import WHOLE, Whole
from ..exact.rows import Threshold, compute_dtype, distances
from ..links.base import Link
from .gaps import FARTHEST, are_far, density_of, exact_shares, mean_distance
from .kinds import Kind, ratios, root_of, shrink

TINY = torch.finfo(torch.float64).tiny
SHRUNK = 2.0**-64  # temporary factor of levers, so that their products with slopes do not overflow
LARGEST_ROOT = 1e18  # roots beyond this have odds h : 1 - h that round to 1 : 0


class MapRows(NamedTuple):
    """The rows at which a map is differentiated, in float64.

    Attributes:
        a: Scores (..., n), x or abs(x); other processes may hold more items of the rows.
        sign: The signs of x, for odd maps.
        s: Softness (...).
        at: Thresholds, whose offset is differentiable; for k = 0 or k = n it is a constant if tails reach that far.
        link: The link F.
        kind: The kind of map.
        over: The reductions for numbers of rows.
        least: The lower limit of a sum of slopes, whose inverse might otherwise leave the range of the dtype of x.
    """

    a: Tensor
    sign: Tensor | None
    s: Tensor
    at: Threshold
    link: Link
    kind: Kind
    over: Whole
    least: float

    @classmethod
    def of(cls, x: Tensor, s: Tensor, at: Threshold, link: Link, kind: Kind, over: Whole = WHOLE) -> "MapRows":
        wide, least = x.double(), torch.finfo(compute_dtype(x)).tiny
        if kind.absolute:
            return cls(wide.abs(), wide.sign(), s, at, link, kind, over, least)
        if not (link.compact and link.reaches_zero):  # otherwise nothing holds t at the ends, and dt = 0
            constant = at.offset.detach()
            at = at._replace(offset=torch.where(constant.abs() == link.reach, constant, at.offset))
        return cls(wide, None, s, at, link, kind, over, least)

    @property
    def constant(self) -> "MapRows":
        """The same as constants."""
        at = Threshold(self.at.anchor.detach(), self.at.offset.detach())
        return self._replace(a=self.a.detach(), s=self.s.detach(), at=at)


class Items(NamedTuple):
    """The quantities from which derivatives are computed: tensors (..., n) for items and (...) for rows.

    Attributes:
        z: The distances, finite; for odd maps only of the items that follow the threshold.
        lever: z as a factor, 0 for infinite items.
        slope: f.
        scale: sigma.
        gain: g.
        stretch: kappa.
        root: The square root of g / sigma, for magnitudes.
        follows: Whether anything follows the threshold; None if something always does.
        factor: F' / F, for logarithms.
        powers: The terms of W other than f, for each item.
        own_slope: h, if any entry has it.
        own_lever: e.
    """

    z: Tensor
    lever: Tensor
    slope: Tensor
    scale: Tensor
    gain: Tensor
    stretch: Tensor
    root: Tensor | None = None
    follows: Tensor | None = None
    factor: Tensor | None = None
    powers: Tensor | None = None
    own_slope: Tensor | None = None
    own_lever: Tensor | None = None


def items_of(rows: MapRows) -> Items:
    """The items, in differentiable operations of the scores, the softness and the offset."""
    if rows.kind.grows:
        return _magnitudes(rows)
    a, s, at, link = rows.a, rows.s, rows.at, rows.link
    here, offset = rows.over.seen(s, at.offset)
    one = torch.ones_like(s)
    if rows.kind.absolute:
        z = rows.kind.distances(a, Threshold(at.anchor, offset), here, link)
        binding = (at.anchor != 0) | (at.offset != 0)
        lever = z.clamp(0, 1)  # beyond, the slope is 0 and the lever has no effect, but z may overflow
        return Items(lever, lever, link.slope(z), s, one, one, follows=binding)
    z = distances(a, Threshold(at.anchor, offset), here)
    if z.numel() and can_tell(z) and bool(z.abs().amax() < FARTHEST):
        return Items(z, z, link.slope(z), s, one, one, factor=link.log_derivative(z) if rows.kind.log else None)
    z, infinite = _finite_distances(a, Threshold(at.anchor, offset), here), a.isinf()
    factor = link.log_derivative(z).masked_fill(a == -torch.inf, 0) if rows.kind.log else None
    lever = z.masked_fill(infinite, 0.0)
    return Items(z, lever, link.slope(z), s, one, one, factor=factor)


def _finite_distances(x: Tensor, at: Threshold, s: Tensor) -> Tensor:
    """z between numbers that are as good as infinite, also for infinite scores."""
    infinite = x.isinf()
    z = distances(x.masked_fill(infinite, 0), at, s).clamp(-FARTHEST, FARTHEST)
    return torch.where(infinite, x.clamp(-2 * FARTHEST, 2 * FARTHEST), z)  # farther out than all others


def _magnitudes(rows: MapRows) -> Items:
    """The items of a map of magnitudes: each entry is zero, pooled or capped."""
    a, s, at, q = rows.a, rows.s, rows.at, rows.link.q
    t = rows.kind.threshold(at, s, rows.link)
    positive = torch.where(t == 0, 1.0, t)
    root, ratio = root_of(positive, q), s * positive ** (1 / q - 1)  # sigma / t
    seen_root, here, offset, seen_ratio = rows.over.seen(root, s, at.offset, ratio)
    idle, column = (t == 0).unsqueeze(-1), here.unsqueeze(-1)
    z = ratios(a, Threshold(at.anchor, offset), seen_root, here)
    capped, inside = ((z >= 1) | idle) & (a > 0), (z > 0) & (z < 1) & ~idle
    z = torch.where(inside, z, 0.5)  # a harmless number for the entries that this branch does not apply to
    lever = shrink(torch.where(capped, a, 1.0), column, q)[1]
    odds = (lever ** (0.5 * q - 0.5) * (q / column).sqrt()).clamp(max=LARGEST_ROOT).square()
    return Items(
        z,
        z,
        rows.link.slope(z) * inside,
        ratio * positive.clamp(min=TINY),
        t,
        1 - at.offset * ratio / q,
        ratio.rsqrt(),
        powers=seen_ratio.unsqueeze(-1) * z**q * inside,
        own_slope=odds / (1 + odds) * capped,
        own_lever=lever * capped,
    )


class Shares(NamedTuple):
    """How the items of a row share the motion of the threshold, and the effect of their cotangents g.

    Attributes:
        weight: omega up to a factor (..., n).
        norm: The sum of the weights, as the items use it (..., 1); infinite if nothing follows the threshold.
        rate: 1 / W, by how many scales k moves the threshold.
        first: The sum of omega z.
        pull: The sum of omega g; for logarithms the sum of d = g F' / F.
        on_k: dL/dk divided by the gain.
        moment: The sum of f g z; for logarithms the sum of d z.
        slope_moment: The sum of f z.
    """

    weight: Tensor
    norm: Tensor
    rate: Tensor
    first: Tensor
    pull: Tensor
    on_k: Tensor
    moment: Tensor
    slope_moment: Tensor

    @property
    def share(self) -> Tensor:
        """omega (..., n)."""
        return self.weight / self.norm


def shares_of(rows: MapRows, items: Items, g: Tensor, moments: bool = True) -> tuple[Items, Shares]:
    """The shares, from one reduction of all sums at once, unless all slopes of a row underflow.

    ``moments`` says whether the sums with z are wanted.
    """
    slope, log, over = items.slope, items.factor is not None, rows.over
    direct = g * (slope if items.factor is None else items.factor)
    held = slope if items.powers is None else slope + items.powers
    with_z = ((slope * items.lever).sum(-1), (direct * items.lever).sum(-1)) if moments else ()
    total, pull, *rest = over.sum(held.sum(-1), direct.sum(-1), *with_z)
    first, moment = rest or (torch.zeros_like(total),) * 2
    if items.follows is not None or (rows.link.compact and rows.link.reaches_zero):
        moves = total > TINY if items.follows is None else (total > 0) & items.follows
        rate = torch.where(moves, torch.where(moves, total, 1.0).reciprocal(), 0.0)
        norm = over.seen(torch.where(moves, total, torch.inf))[0].unsqueeze(-1)
        return items, Shares(slope, norm, rate, rate * first, rate * pull, rate * pull, moment, first)
    far = are_far(total)
    if not can_tell(far) or bool(far.any()):
        return _shares_in_gaps(rows, items, g, total, far)
    norm = over.seen(total)[0].unsqueeze(-1)
    mean, rate = pull / total, total.clamp(min=rows.least).reciprocal()
    return items, Shares(slope, norm, rate, first / total, pull if log else mean, mean, moment, first)


def _shares_in_gaps(rows: MapRows, items: Items, g: Tensor, total: Tensor, far: Tensor) -> tuple[Items, Shares]:
    """For rows whose slopes all underflow, the ``far`` ones: from ratios of slopes, which follow from differences of x.

    With k = 0 or k = n, k moves the threshold infinitely far. Then the shares, and so all first derivatives, are
    limits, but those of the shares themselves are taken at a constant threshold.
    """
    z, link, over, column, fixed = items.z, rows.link, rows.over, far.unsqueeze(-1), rows.constant
    exact = torch.where(column, exact_shares(fixed.a, fixed.s, fixed.at, link, over), 0.0)
    weight = torch.where(column, exact * rate_of_slopes(z, link).exp(), items.slope)
    (norm,) = over.sum(weight.sum(-1))
    norm = torch.where(norm > 0, norm, 1.0)
    share, inverse = weight / over.seen(norm)[0].unsqueeze(-1), 1 / link.value(z.clamp(min=0.0))
    density = torch.where(far, norm * density_of(z.detach(), link, over), total).clamp(min=rows.least)
    direct = g * (items.slope if items.factor is None else items.factor)
    pulled, above, below, pull, moment, slope_moment = over.sum(
        (share * g).sum(-1),
        (share * g * inverse).masked_fill(z <= 0, 0.0).sum(-1),
        direct.masked_fill(z > 0, 0.0).sum(-1),
        direct.sum(-1),
        (direct * items.lever).sum(-1),
        (items.slope * items.lever).sum(-1),
    )
    on_k = pulled if items.factor is None else above + below / density
    first = mean_distance(share, items.lever, fixed.a, fixed.s, fixed.at, far, link, over)
    norm = torch.ones_like(column.double())
    pull = on_k if items.factor is None else pull
    return items, Shares(share, norm, density.reciprocal(), first, pull, on_k, moment, slope_moment)


def rate_of_slopes(z: Tensor, link: Link) -> Tensor:
    """0, with the derivatives of log F'(z)."""
    near = z.abs() < torch.finfo(z.dtype).max ** 0.5 / 16  # its square is finite, with room for a factor
    moves = near & (z < 0) if link.compact else near
    rate = link.log_slope(torch.where(moves, z, -1.0))
    return rate - rate.detach()


def can_tell(x: Tensor) -> bool:
    """Whether Python may depend on the contents of x; must not be called under Dynamo."""
    return not (is_transformed() or is_traced_by_mode() or is_shape_only(x) or is_recorded(x))


def balanced(values: Tensor, share: Tensor, norm: Tensor) -> Tensor:
    """Values that sum to 0 up to rounding: one with more than half of the shares becomes minus the sum of the others.

    Computed directly, it may be the difference of two numbers that agree in all their digits.
    """
    large = share.amax(-1, keepdim=True) > 0.5 * norm
    if can_tell(large) and not bool(large.any()):
        return values
    top = share.argmax(-1, keepdim=True)
    others = values.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    return values.scatter(-1, top, torch.where(large, -others, values.gather(-1, top)))


def _minus_pull(items: Items, norm: Tensor, v: Tensor) -> Tensor:
    """f (v - sum f v / W) for magnitudes in whole rows.

    W is the sum F of the slopes and that of the powers. If the mask is nearly hard, F is almost W, and v and the mean m
    of v with the weights f may agree in all digits: f (v - m) + f m (W - F) / W keeps them.
    """
    f, powers = items.slope, cast(Tensor, items.powers).sum(-1, keepdim=True)
    total = f.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0)
    mean = (f * v).sum(-1, keepdim=True) / total
    centred = f * (v - mean)
    left = centred.sum(-1, keepdim=True) / total
    moves = norm < torch.inf  # otherwise W has overflown, or nothing follows the threshold, which leaves f v
    rest = torch.where(moves, powers, 1.0) / torch.where(moves, norm, 1.0)
    return balanced(centred - f * left, f, total) + f * (mean + left) * rest


# ---- The first derivative, in reverse mode and in forward mode


def derivative(
    rows: MapRows, grad_y: Tensor | None, grad_offset: Tensor | None, with_scale: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in float64, dL/dk and dL/ds, 0 without ``with_scale``, from dL/dy and dL/d offset; differentiable."""
    over, kind, s = rows.over, rows.kind, rows.s
    if over.is_whole and rows.a.shape[-1] == 0:
        return torch.zeros_like(rows.a), torch.zeros_like(s), torch.zeros_like(s)
    g = torch.zeros_like(rows.a) if grad_y is None else grad_y.double()
    if rows.sign is not None:
        g = g * rows.sign
    elif kind.log:
        g = g.masked_fill(rows.a == -torch.inf, 0)
    moments = not over.is_whole or grad_offset is not None
    items, shares = shares_of(rows, items_of(rows), g, moments)
    pull, here = (v.unsqueeze(-1) for v in over.seen(shares.pull, s))
    centred = items.slope * (g - pull) if items.factor is None else items.factor * g - shares.share * pull
    on_k = shares.on_k
    if over.is_whole and kind.grows:
        centred = _minus_pull(items, shares.norm, g)
    elif over.is_whole and not kind.absolute:
        if items.factor is None:  # again, since nearly equal cotangents have lost digits in the first pass
            pulled = centred if shares.weight is items.slope else shares.weight * (g - pull)
            left = pulled.sum(-1) / shares.norm.squeeze(-1)
            centred, on_k = centred - items.slope * left.unsqueeze(-1), on_k + left
        centred = balanced(centred, shares.weight, shares.norm)
    grad_a = centred / here
    if items.root is not None:  # times t / sigma, in two steps: where that overflows, slopes are small
        (root,) = (v.unsqueeze(-1) for v in over.seen(items.root * (items.gain > 0)))
        grad_a = centred * root * root
    grad_s = -_lever(rows, centred, items, shares) * items.gain if with_scale else torch.zeros_like(on_k)
    if items.own_slope is not None and items.own_lever is not None:
        own = g * items.own_slope
        grad_a = grad_a + own
        grad_s = grad_s - over.sum((own * items.own_lever).sum(-1))[0] if with_scale else grad_s
    grad_k = items.gain * on_k
    if grad_offset is not None:
        push = items.stretch * grad_offset
        (pushed,) = over.seen(push / items.scale)
        grad_a = grad_a + shares.share * pushed.unsqueeze(-1)
        grad_k = grad_k - push * shares.rate
        grad_s = grad_s - (push * shares.first + grad_offset * rows.at.offset) / s
    return grad_a if rows.sign is None else grad_a * rows.sign, grad_k, grad_s


def _lever(rows: MapRows, centred: Tensor, items: Items, shares: Shares) -> Tensor:
    """sum centred z / s, arranged so that outliers of z and the scale make no product overflow or underflow."""
    if rows.over.is_whole:
        root = rows.s.sqrt()
        shrunk = torch.ones_like(rows.s).masked_fill(rows.s < 1 / SHRUNK, SHRUNK)  # a large scale already makes z small
        return (items.lever * shrunk.unsqueeze(-1) * centred).sum(-1) / root / shrunk / root
    return (shares.moment - shares.pull * (shares.slope_moment if items.factor is None else shares.first)) / rows.s


def tangents(rows: MapRows, dx: Tensor | None, dk: Tensor | None, ds: Tensor | None) -> tuple[Tensor, Tensor]:
    """dy in float64 and d offset from dx, dk and ds, for whole rows; differentiable."""
    s, kind = rows.s, rows.kind
    if rows.a.shape[-1] == 0:
        return torch.zeros_like(rows.a), torch.zeros_like(s)
    items, shares = shares_of(rows, items_of(rows), torch.zeros_like(rows.a), moments=False)
    moved = torch.zeros_like(rows.a) if dx is None else dx.double()
    moved = moved if rows.sign is None else moved * rows.sign
    v = moved / items.scale.unsqueeze(-1)
    if ds is not None:
        v = v - items.lever * (ds / s).unsqueeze(-1)
    mean = (shares.share * v).sum(-1)
    rest = v - mean.unsqueeze(-1)
    left = torch.zeros_like(mean) if kind.absolute else (shares.share * rest).sum(-1)
    rest, shift = rest - left.unsqueeze(-1), mean + left
    if items.factor is None:
        followed = _minus_pull(items, shares.norm, v) if kind.grows else items.slope * rest
        dy = items.gain.unsqueeze(-1) * followed
        dy = dy if kind.absolute else balanced(dy, shares.weight, shares.norm)
    else:
        dy = items.factor * rest
    if items.own_slope is not None and items.own_lever is not None:
        dy = dy + items.own_slope * (moved if ds is None else moved - items.own_lever * ds.unsqueeze(-1))
    if dk is not None:
        by_k = (items.gain * dk).unsqueeze(-1) * shares.share
        if items.factor is not None:  # above the threshold from the share, which handles slopes that underflow
            below = items.factor * (shares.rate * dk).unsqueeze(-1)
            by_k = torch.where(items.z > 0, by_k / rows.link.value(items.z.clamp(min=0.0)), below)
        dy, shift = dy + by_k, shift - shares.rate * dk
    if kind.log:
        dy = dy.masked_fill(rows.a == -torch.inf, 0)
    shift = items.stretch * shift
    return dy if rows.sign is None else dy * rows.sign, shift if ds is None else shift - rows.at.offset * (ds / s)
