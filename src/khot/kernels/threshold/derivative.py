r"""The relaxed top-k mask and its first derivative as one operator each, for which accelerators have fused kernels.

Forward: y_i = F(z_i), z_i = (x_i - t) / s, with t from :mod:`khot.kernels.threshold`. Derivatives, with slopes
w_i = F'(z_i) / s and their shares omega_i = w_i / sum w: of y,

    dL/dx_i = w_i (g_i - <omega, g>),  dL/dk = <omega, g>,  dL/ds = -sum_i z_i dL/dx_i

and of log y, with d_i = g_i F'(z_i) / (s F(z_i)): dL/dx_i = d_i - omega_i sum d,  dL/dk = sum d / sum w.

The torch versions here are the definition, and take what the kernels do not: links of a user's own, no Triton.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from khot._distributed.shards import Shards
from khot._torch_internals import is_transformed
from khot._validation import has_contents

from ..links.base import Link
from ..registry import Operator
from ..rows import BLOCK, Threshold, compute_dtype, distances, distances_of, double_distances

CANCELLED = 2**-6  # of what is pulled: how much has to be left of it in float32
WIDE = 256  # half the width of a gap in scales, from where distances lose more digits than expansions about its middle
NEXT = 1.01  # a factor by which a distance is varied
END_DENSITY = 2.0**-120  # what stands for a sum of slopes of 0 at k = 0 and k = n: its inverse is finite in float32
DOMINANT = 0.75  # share of the slopes above which what an item pulls itself may cancel what it is pulled


def bounded_distances(x: Tensor, at: Threshold, scale: Tensor) -> Tensor:
    """:func:`distances` between numbers as good as infinite, also of infinite scores (masked items): 0 * z stays 0."""
    infinite = x.isinf()
    limit = 0.125 * torch.finfo(x.dtype).max
    z = distances(x.masked_fill(infinite, 0), at, scale).clamp(-limit, limit)
    return torch.where(infinite, x.clamp(-2 * limit, 2 * limit), z)  # further out than all others


class Gap(NamedTuple):
    """A gap of which t is somewhere inside; each of its numbers is ``(..., 1)``, and -inf where a side has no item.

    Attributes:
        first: The largest -z of an item above.
        right: The largest -x of one.
        last: The largest z of an item below.
        left: The largest x of one.
    """

    first: Tensor
    right: Tensor
    last: Tensor
    left: Tensor


def far_shares(x: Tensor, scale: Tensor, at: Threshold, link: Link) -> Tensor:
    """The shares omega of rows in which all slopes underflow, 0 where no item has a slope; not differentiable.

    Float64 numbers are made of one block of a row at a time, so that a long row costs no more memory than its shares.
    """
    blocks = x.split(BLOCK, -1)
    gaps = [_gap(v, scale, at, link) for v in blocks]
    gap = Gap(*[torch.stack(ends).amax(0) for ends in zip(*gaps, strict=True)])
    tails = [_log_tails(v, scale, at, link, gap) for v in blocks]
    balance = [torch.stack(sides).logsumexp(0) for sides in zip(*tails, strict=True)]
    total = torch.stack([_far_logits(v, scale, at, link, gap, balance).logsumexp(-1) for v in blocks]).logsumexp(0)
    parts = []
    for v in blocks:
        part = (_far_logits(v, scale, at, link, gap, balance) - total.unsqueeze(-1)).exp().nan_to_num(0.0)
        parts.append(part.to(compute_dtype(x)))
    return torch.cat(parts, -1)


def far_shares_in_graph(x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, link: str) -> Tensor:
    """:func:`far_shares`, and zeros in rows whose slopes do not underflow."""
    at, found = Threshold(anchor, offset), Link.find(link)
    far = _underflows(found.slope(bounded_distances(x.to(compute_dtype(x)), at, scale)).sum(-1))
    share = torch.zeros_like(x, dtype=compute_dtype(x), memory_format=torch.contiguous_format)
    if bool(far.any()):
        share[far] = far_shares(x[far], scale[far], Threshold(anchor[far], offset[far]), found)
    return share


# A graph keeps it whole: a compiler would trace 200 operations more, and compute them for rows that have no need.
_far_shares = Operator(
    "threshold_far_shares",
    far_shares_in_graph,
    fake=lambda x, *_: torch.empty_like(x, dtype=compute_dtype(x), memory_format=torch.contiguous_format),
)


def far_logits(x: Tensor, scale: Tensor, at: Threshold, link: Link, shards: Shards) -> Tensor:
    """Float64 logarithms of the slopes up to a number of each row, of rows in which all slopes underflow.

    Then t lies in a gap whose width takes the digits of x from z. The slopes on one side are therefore taken relative
    to that of the nearest item there, from differences of scores; and the two sides weigh as the tails require, whose
    sums are equal: k is the number of items above. At k = 0 and k = n there is one side. Other processes have parts of
    the rows, x is that of this one.
    """
    gap = Gap(*shards.max(*_gap(x, scale, at, link)))
    balance = list(_log_tails(x, scale, at, link, gap))
    largest = shards.max(*balance)
    sums = shards.sum(*((v - top.nan_to_num(neginf=0.0)).exp() for v, top in zip(balance, largest, strict=True)))
    balance = [v.log() + top.nan_to_num(neginf=0.0) for v, top in zip(sums, largest, strict=True)]
    return _far_logits(x, scale, at, link, gap, balance)


def _sides(x: Tensor, scale: Tensor, at: Threshold, link: Link) -> tuple[Tensor, Tensor]:
    """z of the items, and which lie above the gap."""
    z = bounded_distances(x.double(), at, scale)
    return z, z >= 0 if link.compact else z > 0


def _gap(x: Tensor, scale: Tensor, at: Threshold, link: Link) -> Gap:
    z, above = _sides(x, scale, at, link)
    x, finite = x.double(), x.isfinite()
    pairs = (above & finite, -z), (above & finite, -x), (~above & finite, z), (~above & finite, x)
    return Gap(*(torch.where(side, v, -torch.inf).amax(-1, keepdim=True) for side, v in pairs))


def _decays(x: Tensor, scale: Tensor, above: Tensor, link: Link, gap: Gap) -> tuple[Tensor, Tensor]:
    """log of the slopes relative to that of the nearest item on the same side, and log of their hazards."""
    x, finite = x.double(), x.isfinite()
    nearest = torch.where(above, -gap.right, gap.left).nan_to_num(0.0, 0.0, 0.0)
    start = torch.where(above, -gap.first, gap.last).nan_to_num(0.0, 0.0, 0.0)
    beyond = (0.5 * torch.where(finite, x, nearest) - 0.5 * nearest) * (2 / scale).unsqueeze(-1)
    return link.log_decay(start, beyond).masked_fill(~finite, -torch.inf), link.log_hazard(start + beyond)


def _log_tails(x: Tensor, scale: Tensor, at: Threshold, link: Link, gap: Gap) -> tuple[Tensor, Tensor]:
    """log of the sums of the tails above and below, relative to the slopes of the nearest items."""
    _, above = _sides(x, scale, at, link)
    decay, hazard = _decays(x, scale, above, link, gap)
    tails = decay - hazard
    of_above, of_below = (torch.where(side, tails, -torch.inf).logsumexp(-1) for side in (above, ~above))
    return of_above, of_below


def _far_logits(x: Tensor, scale: Tensor, at: Threshold, link: Link, gap: Gap, balance: Sequence[Tensor]) -> Tensor:
    """:func:`far_logits` of some items of a row, from the gap of the whole and the sums of its tails."""
    _, above = _sides(x, scale, at, link)
    decay, _ = _decays(x, scale, above, link, gap)
    of_above, of_below = (v.unsqueeze(-1) for v in balance)
    logits = decay - torch.where(above, of_above, of_below)
    if link.compact:  # t is next to the cap of the nearest item above; without items below nothing holds it
        free = (~above & (gap.right > -torch.inf)) | (gap.left == -torch.inf)
        logits = logits.masked_fill(free, -torch.inf)
    return logits.masked_fill(~x.isfinite(), -torch.inf)


def mean_distance(share: Tensor, z: Tensor, x: Tensor, scale: Tensor, at: Threshold, link: Link, far: Tensor) -> Tensor:
    """sum omega z in float64, which is -dt/ds; its derivatives are those of this sum.

    This is the difference of what lies above t and below. Where t lies in a wide gap and slopes underflow, in ``far``
    rows, both are as large as the gap, and the difference is found from scores relative to its edges.
    """
    share, z, x = share.double(), z.double(), x.double()
    mean = (share * levers(z, x)).sum(-1)
    if type(link).limits_at_ends is Link.limits_at_ends:
        return mean
    find: Callable[..., Tensor] = _means_in_gaps if torch.compiler.is_compiling() else means_in_gaps
    rows = [v.detach() for v in (mean, share, x, scale, at.anchor, at.offset, far)]
    exact = find(*rows, link.key)
    return mean + (exact - mean).detach()


def means_in_gaps(
    mean: Tensor, share: Tensor, x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, far: Tensor, link: str
) -> Tensor:
    """The ``mean``, but of ``far`` rows with a wide gap around t that from the gap."""
    if _can_tell(far) and not bool(far.any()):
        return mean.clone()
    at, found = Threshold(anchor, offset), Link.find(link)
    gap = _gap(x, scale, at, found)
    half = (-0.5 * gap.right - 0.5 * gap.left) / scale.unsqueeze(-1)
    wide = far.unsqueeze(-1) & (half > WIDE) & half.isfinite()
    exact = _mean_in_gap(share, torch.where(wide, half, WIDE), x, scale, at, found, gap)
    return torch.where(wide.squeeze(-1), exact, mean)


_means_in_gaps = Operator("threshold_means_in_gaps", means_in_gaps, fake=lambda mean, *_: torch.empty_like(mean))


def _mean_in_gap(share: Tensor, half: Tensor, x: Tensor, scale: Tensor, at: Threshold, link: Link, gap: Gap) -> Tensor:
    """sum omega z in a gap that is twice ``half`` wide.

    With Z and -Z' the distances of the nearest items above and below, and b those of the others from them, this is
    sum omega b + (Omega Z - Omega' Z'). The slopes F'(Z) and F'(Z') differ by what the tails on the two sides differ
    relative to them, which tells Z - Z'. The shares Omega and Omega' of the sides are as their mean hazards, of which
    ``power`` is the exponent, 0 of exponential tails and 1 of the normal ones.
    """
    _, above = _sides(x, scale, at, link)
    edge = torch.where(above, -gap.right, gap.left)
    beyond = torch.where(share > 0, x - edge, 0.0) / scale.unsqueeze(-1)
    spread = (share * beyond).sum(-1)
    if link.compact:  # t stays at the cap of the nearest item above
        return spread
    of_above, of_below = _log_tails(x, scale, at, link, gap)
    rate, _ = link.limits_at_ends(half, torch.zeros_like(half), torch.ones_like(half))
    power = (link.log_hazard(NEXT * half) - link.log_hazard(half / NEXT)) / (2 * math.log(NEXT))
    return (1 + power.squeeze(-1)) * (0.5 * (of_above - of_below) / rate.abs().squeeze(-1) + spread)


def rate_of_slopes(z: Tensor, link: Link) -> Tensor:
    """0, whose derivatives are those of log F'(z)."""
    near = z.abs() < torch.finfo(z.dtype).max ** 0.5 / 16  # whose square is finite, with room for a factor
    moves = near & (z < 0) if link.compact else near
    rate = link.log_slope(torch.where(moves, z, -1.0))
    return rate - rate.detach()


def levers(z: Tensor, x: Tensor) -> Tensor:
    """The distances as factors of what the scale moves: of an infinite score 0, whose multiples cannot overflow."""
    return z.masked_fill(x.isinf(), 0.0)


class LocalShape(NamedTuple):
    """What every derivative is made of; the last two are there if k = 0 or k = n in some row.

    Attributes:
        z: The distances (..., n).
        share: The shares omega.
        slope: The slopes F'.
        density: The sum of the slopes (...), not 0.
        value_growth: 0 with the derivative of F in k.
        log_slope_growth: 0 with the derivatives of F' / F in x, k and the scale.
    """

    z: Tensor
    share: Tensor
    slope: Tensor
    density: Tensor
    value_growth: Tensor | None = None
    log_slope_growth: Tensor | None = None

    def log_derivative(self, link: Link) -> Tensor:
        """F' / F."""
        found = link.log_derivative(self.z)
        return found if self.log_slope_growth is None else found + self.log_slope_growth

    def per_share(self, share: Tensor, link: Link) -> Tensor:
        """``share / F`` above the threshold, where F is no less than 1/2, else 0."""
        found = per_share(self.z, share, link)
        return found if self.value_growth is None else found * (1 - self.value_growth)  # F is 1 at k = n


def local_shape(link: Link, x: Tensor, scale: Tensor, at: Threshold, log: bool, k: Tensor | None = None) -> LocalShape:
    """The :class:`LocalShape` of rows, differentiable to any order; in k at k = 0 and k = n once, and only given k."""
    ends = None if k is None else _ends(at, link)
    if ends is not None:  # whose distance from the threshold is arbitrary
        at = Threshold(at.anchor, torch.where(ends, at.offset.detach(), at.offset))
    z = bounded_distances(x.to(compute_dtype(x)), at, scale)
    slope, tiny = link.slope(z), torch.finfo(z.dtype).tiny
    share = _exact_shares(link.normalised_slope(z), slope.detach().sum(-1), z, x, scale, at, link)
    # The derivative of log y in k is the larger, the smaller their sum is: no digit of it is lost to underflow.
    density = link.log_slope(z).logsumexp(-1).double().exp() if log else slope.sum(-1).double()
    shape = LocalShape(z, share, slope, density.clamp(min=tiny))
    return shape if ends is None or k is None else _next_to_ends(shape, link, x, scale, k.to(x.device), ends)


def _ends(at: Threshold, link: Link) -> Tensor | None:
    """The rows with k = 0 or k = n, whose offset is ``link.reach``, if the limits of their derivatives are known."""
    if torch.compiler.is_compiling() or type(link).limits_at_ends is Link.limits_at_ends:
        return None  # compiled graphs have first derivatives alone
    ends = at.offset.detach().abs() == link.reach
    return None if _can_tell(ends) and not bool(ends.any()) else ends


def _next_to_ends(shape: LocalShape, link: Link, x: Tensor, scale: Tensor, k: Tensor, ends: Tensor) -> LocalShape:
    r"""The shape of rows, of which ``ends`` have k = 0 or k = n, with limits as the derivatives there.

    The slopes w and their sum W vanish there, so that k moves the threshold infinitely far. With r_i = (log F')'(z_i),

        dF_i/dk = omega_i,  dw_i/dk = r_i omega_i,  dW/dk = <omega, r>,  domega_i/dk = omega_i (q_i - <omega, q>),

    q_i = r_i / W, and the link knows the limits of their differences. For exponential tails, F' / F moves by q / 2.
    The derivatives of log y in k are divided by W, so that those of F' / F and W in x count, too, although they vanish.
    """
    share = shape.share.detach().double()
    counts = share > 0
    z = shape.z.double().masked_fill(~counts, 0.0)
    nearest = z.detach().abs().masked_fill(~counts, torch.inf).argmin(-1, keepdim=True)
    items = torch.where(counts, x.detach().double(), 0.0)
    beyond = (0.5 * items - 0.5 * items.gather(-1, nearest)) * (2 / scale.detach()).unsqueeze(-1)
    rate, bend = link.limits_at_ends(z.detach(), beyond.masked_fill(~counts, 0.0), share)
    of_share = share * (bend - (share * bend).sum(-1, keepdim=True))
    of_slope, by_k = share * rate, torch.where(ends, k - k.detach(), 0.0).unsqueeze(-1)
    by_x = END_DENSITY * torch.where(ends.unsqueeze(-1), z - z.detach(), 0.0)
    moved = by_k + by_x - (share * by_x).sum(-1, keepdim=True)
    density = END_DENSITY + (of_slope * by_k + END_DENSITY * of_share * by_x).sum(-1)
    dtype = shape.z.dtype
    return LocalShape(
        shape.z,
        shape.share + (of_share * by_k).to(dtype),
        shape.slope + (of_slope * by_k).to(dtype),
        torch.where(ends, density, shape.density),
        (share * by_k).to(dtype),
        torch.where(z < 0, 0.5 * bend * moved, of_slope * by_k).to(dtype),
    )


def _exact_shares(
    share: Tensor, total: Tensor, z: Tensor, x: Tensor, scale: Tensor, at: Threshold, link: Link
) -> Tensor:
    """Differentiable shares, with those of :func:`far_shares` where the slopes with this ``total`` underflow."""
    far = _underflows(total).unsqueeze(-1)
    if (link.compact and link.reaches_zero) or (_can_tell(far) and not bool(far.any())):
        return share
    place = Threshold(at.anchor.detach(), at.offset.detach())
    if torch.compiler.is_compiling():
        exact = _far_shares(x.detach(), scale.detach(), *place, link.key).to(z.dtype)
    else:
        exact = far_shares(x.detach(), scale.detach(), place, link).to(z.dtype)
    far = far & (exact.sum(-1, keepdim=True) > 0)
    moving = torch.softmax(torch.where(far, exact, 1.0).log() + rate_of_slopes(z, link), -1)
    return torch.where(far, moving, share)


def _can_tell(x: Tensor) -> bool:
    """Whether Python may decide on the contents of x."""
    return has_contents(x) and not is_transformed()


def sum_moves_threshold(density: Tensor, like: Tensor, link: Link) -> Tensor:
    """1 / sum F', how far k moves the threshold in scales; 0 where no slope holds it, and it may lie anywhere."""
    if not (link.compact and link.reaches_zero):
        return density.reciprocal()
    held = density > torch.finfo(like.dtype).tiny
    return torch.where(held, torch.where(held, density, 1.0).reciprocal(), 0.0)


def _underflowing(x: Tensor, scale: Tensor, at: Threshold, link: Link, log: bool, far: Tensor) -> tuple[Tensor, Tensor]:
    """The shares omega, and the sum of slopes for the derivative of a logarithm; as :func:`local_shape` has them.

    ``far`` says in which rows all slopes underflow.
    """
    if bool(far.all()):  # without copies of everything
        share = far_shares(x, scale.expand(far.shape), at, link)
    else:
        limit = 0.125 * torch.finfo(x.dtype).max
        z = distances_of(x, at, scale).clamp_(-limit, limit)
        z.masked_fill_(x == -torch.inf, -2 * limit).masked_fill_(x == torch.inf, 2 * limit)
        share = link.normalised_slope_(z)
        place = Threshold(at.anchor[far], at.offset[far])
        share[far] = far_shares(x[far], scale.expand(far.shape)[far], place, link)
    if not log:
        return share, scale
    top, most = share.argmax(-1, keepdim=True), share.amax(-1)  # whose slope tells the sum
    slope = link.log_slope(distances_of(x.gather(-1, top), at, scale).squeeze(-1)).double() - most.double().log()
    return share, slope.exp().clamp(min=torch.finfo(x.dtype).tiny)


def balanced(values: Tensor, share: Tensor) -> Tensor:
    """Values that sum to 0 but for rounding: that of the largest share as minus the sum of the others, which it is.

    By itself it may be the difference of two numbers that agree in all their digits.
    """
    top = share.argmax(-1, keepdim=True)
    others = values.scatter(-1, top, 0.0)
    return others.scatter(-1, top, -others.sum(-1, keepdim=True))


def centred(values: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Values less their mean, weighted by the shares, and the mean: twice, as nearly equal values lose digits once."""
    mean = (values * share).sum(-1)
    rest = values - mean.unsqueeze(-1)
    left = (rest * share).sum(-1)
    return rest - left.unsqueeze(-1), mean + left


def pull_on_k(grad: Tensor, direct: Tensor, shape: LocalShape, link: Link) -> Tensor:
    """dL/dk from dL/d log y, ``sum g_i omega_i / F(z_i)``; ``direct`` are the d.

    The share knows the slope of an item above the threshold where F' underflows; below, omega and F may both underflow,
    and d_i / sum w is the same.
    """
    above = shape.per_share(grad * shape.share, link).sum(-1)
    below = direct.masked_fill(shape.z > 0, 0.0).sum(-1)
    return above.double() + below.double() / shape.density


def per_share(z: Tensor, share: Tensor, link: Link) -> Tensor:
    """``share / F(z)`` above the threshold, where F is no less than 1/2, else 0."""
    return (share / link.value(z.clamp(min=0.0))).masked_fill(z <= 0, 0.0)


def _lever(grad_z: Tensor, z: Tensor, scale: Tensor) -> Tensor:
    """-sum grad_z z / scale, of which neither the z of outliers nor the scale let a product overflow on the way."""
    shrink, root = 2.0**-32 if z.dtype == torch.float32 else 2.0**-64, scale.sqrt()
    return -(z * shrink).mul(grad_z).sum(-1).double() / root / shrink / root


def plain_derivative(
    x: Tensor, scale: Tensor, at: Threshold, grad: Tensor, link: Link, log: bool, needs_scale: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`derivative` from dL/dy or dL/d log y alone, not differentiable: in few passes and fresh buffers."""
    x, grad = (v.to(compute_dtype(x)) for v in (x, grad))
    grad_z, grad_k = (_log_mask_gradient if log else _mask_gradient)(x, scale, at, grad, link)
    grad_scale = None
    if needs_scale:
        limit = 0.125 * torch.finfo(x.dtype).max
        grad_scale = _lever(grad_z, distances_of(x, at, scale).clamp_(-limit, limit), scale)  # 0 * z stays 0
    return grad_z.mul_(scale.reciprocal().to(x.dtype).unsqueeze(-1)), grad_k.double(), grad_scale


def shares(z: Tensor, x: Tensor, scale: Tensor, at: Threshold, link: Link) -> Tensor:
    """The omega of distances z; not differentiable."""
    slope = link.slope(z)
    total = slope.sum(-1, keepdim=True)
    if not _underflow(total):
        return slope.div_(total)
    return _exact_shares(link.normalised_slope(z), total.squeeze(-1), z, x, scale, at, link)


def _underflow(total: Tensor) -> bool:
    """Whether the slopes of some row with this sum make sense relative to each other only."""
    return bool(_underflows(total).any())


def _underflows(total: Tensor) -> Tensor:
    limits = torch.finfo(total.dtype)
    return total < limits.tiny / limits.eps


def _mask_gradient(x: Tensor, scale: Tensor, at: Threshold, grad: Tensor, link: Link) -> tuple[Tensor, Tensor]:
    """dL/dz and dL/dk from dL/dy."""
    slope = link.slope_(distances_of(x, at, scale))
    total = slope.sum(-1)
    if link.compact and link.reaches_zero:
        total.clamp_(min=torch.finfo(x.dtype).tiny)  # no slope at all gives zeros
    elif _underflow(total):
        share, _ = _underflowing(x, scale, at, link, False, _underflows(total))
        rest, grad_k = centred(grad, share)
        grad_z = slope.mul_(rest)
        del rest  # before others are made
        return balanced(grad_z, share), grad_k
    grad_k = (grad * slope).sum(-1) / total  # not vecdot, which autocast would round
    grad_z = (grad - grad_k.unsqueeze(-1)).mul_(slope)
    left = grad_z.sum(-1) / total  # by the rounding of the mean, as large as what is left of nearly equal cotangents
    grad_z.addcmul_(slope, left.unsqueeze(-1), value=-1)
    if bool((slope.amax(-1) > DOMINANT * total).any()):
        grad_z = balanced(grad_z, slope)
    return grad_z, grad_k + left


def _pull_by_shares(
    x: Tensor, scale: Tensor, at: Threshold, grad: Tensor, direct: Tensor, link: Link, far: Tensor
) -> tuple[Tensor, Tensor]:
    """The shares omega and dL/dk from dL/d log y, as :func:`pull_on_k` has it, in few buffers."""
    z = distances_of(x, at, scale)
    likely = z > 0
    below, above = direct.masked_fill(likely, 0).sum(-1), link.value(z.clamp_(min=0)).reciprocal_()
    del z  # before others are made
    share, density = _underflowing(x, scale, at, link, True, far)
    above = above.mul_(share).mul_(grad).masked_fill_(~likely, 0).sum(-1)
    return share, above.double() + below.double() / density


def _log_mask_gradient(x: Tensor, scale: Tensor, at: Threshold, grad: Tensor, link: Link) -> tuple[Tensor, Tensor]:
    """dL/dz and dL/dk from dL/d log y."""
    z = distances_of(x, at, scale)
    direct = link.log_derivative(z).mul_(grad).masked_fill_(x == -torch.inf, 0)
    pull, weight = direct.sum(-1), link.slope_(z)
    norm = density = weight.sum(-1)
    if _underflow(density):
        del z, weight  # before others are made
        weight, grad_k = _pull_by_shares(x, scale, at, grad, direct, link, _underflows(density))
        norm = torch.ones_like(pull)
    else:
        grad_k = pull / density
    grad_z = direct.sub_(weight * (pull / norm).unsqueeze(-1))
    largest = weight.amax(-1)
    if bool((largest > DOMINANT * norm).any()):
        grad_z = balanced(grad_z, weight)
    if x.dtype == torch.float32:
        lost = grad_z.abs().amax(-1) < CANCELLED * (largest / norm) * pull.abs()
        if bool(lost.any()):  # so much that the rounding of z shows
            some = at.anchor[lost], at.offset[lost]
            again = _log_mask_gradient(
                x[lost].double(), scale.expand_as(lost)[lost], Threshold(*some), grad[lost].double(), link
            )
            grad_z[lost], grad_k[lost] = (v.to(old.dtype) for v, old in zip(again, (grad_z, grad_k), strict=True))
    return grad_z, grad_k


def derivative(
    x: Tensor,
    scale: Tensor,
    at: Threshold,
    grad_y: Tensor | None,
    grad_offset: Tensor | None,
    link: Link,
    log: bool,
    k: Tensor | None = None,
    needs_scale: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in the computing dtype, dL/dk and dL/ds from dL/dy (or dL/d log y) and dL/d offset; differentiable.

    In k at k = 0 and k = n, too, if that is given.
    """
    shape = local_shape(link, x, scale, at, log, k)
    z, share, slope, density = shape[:4]
    grad_z, grad_k = torch.zeros_like(z), torch.zeros_like(at.offset)
    if grad_y is not None and log:
        grad = grad_y.to(z.dtype).masked_fill(x == -torch.inf, 0)
        direct = grad * shape.log_derivative(link)
        grad_z = balanced(direct - share * direct.sum(-1, keepdim=True), share)
        grad_k = pull_on_k(grad, direct, shape, link)
    elif grad_y is not None:
        rest, mean = centred(grad_y, share)
        grad_z, grad_k = balanced(slope * rest, share), mean.double()
    grad_scale = _lever(grad_z, levers(z, x), scale)
    if grad_offset is not None:  # which is (t - anchor) / s
        grad_z = grad_z + share * grad_offset.to(z.dtype).unsqueeze(-1)
        grad_k = grad_k - grad_offset * sum_moves_threshold(density, z, link)
        if needs_scale:
            mean = mean_distance(share, z, x, scale, at, link, _underflows(slope.detach().sum(-1)))
            grad_scale = grad_scale - grad_offset * ((mean + at.offset) / scale)
    grad_x = grad_z / scale.to(z.dtype).unsqueeze(-1)  # the derivative of 1 / scale may underflow
    return grad_x, grad_k, grad_scale


def mask_values(x: Tensor, scale: Tensor, at: Threshold, link: Link, log: bool) -> Tensor:
    """y or log y at the threshold, in x's dtype; not differentiable."""
    if link.is_steep and x.dtype != torch.float64 and x.numel() > 0 and not log:
        rows, *numbers = (v.reshape(-1) for v in (x, *at, scale.expand_as(at.anchor)))
        parts = double_distances(rows.view(-1, x.shape[-1]), Threshold(*numbers[:2]), numbers[2])
        y = torch.cat([torch.cat([link.value(z).to(compute_dtype(x)) for z in block], -1) for block in parts])
        return y.view(x.shape).to(x.dtype)
    z = distances_of(x.to(compute_dtype(x)), at, scale)
    return (link.log_value(z) if log else link.value(z)).to(x.dtype)
