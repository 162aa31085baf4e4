r"""Relaxed top-k masks and their derivatives by bisection alone: slow, plain, and independent of the library.

The threshold is ``t = anchor + tau * softness`` with an item of the row for an anchor. Bisection among the sorted items
finds the two neighbours of t, a look at the middle between them which is nearer, and bisection over the doubles tau.
What is bisected is the sign of a sum over short tails, F below t and 1 - F above it, and of the difference of their
logarithms where k is the number of items above, so that nothing cancels or underflows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

HALVINGS = 66  # of the doubles, of which there are 2^64
FAR = 8e307


@dataclass(frozen=True)
class ReferenceLink:
    """A link F on float64 tensors.

    Attributes:
        name: Identifier.
        value: F.
        complement: 1 - F.
        log_value: log F.
        log_complement: log (1 - F), of smooth links.
        log_slope: log F'.
        kinks: Where F' jumps.
        cap: Where F reaches 1; ``inf`` if it does not.
        bare: Whether the link under test has no logarithms of its own.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    complement: Callable[[Tensor], Tensor]
    log_value: Callable[[Tensor], Tensor]
    log_complement: Callable[[Tensor], Tensor]
    log_slope: Callable[[Tensor], Tensor]
    kinks: tuple[float, ...] = ()
    cap: float = torch.inf
    bare: bool = False

    def above(self, z: Tensor) -> Tensor:
        """Which items count by what they lack to 1."""
        return z >= self.cap if self.cap < torch.inf else z > 0


def _laplace_log(z: Tensor) -> Tensor:
    return torch.where(z <= 0, z - math.log(2), torch.log1p(-0.5 * (-z.abs()).exp()))


def _cauchy(z: Tensor) -> Tensor:
    return torch.where(z < 0, (-1 / z).atan(), torch.pi / 2 + z.atan()) / torch.pi


LOGISTIC = ReferenceLink(
    "logistic",
    value=torch.special.expit,
    complement=lambda z: torch.special.expit(-z),
    log_value=lambda z: z.clamp(max=0) - (-z.abs()).exp().log1p(),
    log_complement=lambda z: -z.clamp(min=0) - (-z.abs()).exp().log1p(),
    log_slope=lambda z: -z.abs() - 2 * (-z.abs()).exp().log1p(),
)
LAPLACE = ReferenceLink(
    "laplace",
    value=lambda z: torch.where(z <= 0, 0.5 * (-z.abs()).exp(), 1 - 0.5 * (-z.abs()).exp()),
    complement=lambda z: torch.where(z >= 0, 0.5 * (-z.abs()).exp(), 1 - 0.5 * (-z.abs()).exp()),
    log_value=_laplace_log,
    log_complement=lambda z: _laplace_log(-z),
    log_slope=lambda z: -z.abs() - math.log(2),
)
NORMAL = ReferenceLink(
    "normal",
    value=lambda z: torch.special.erfc(-z / 2**0.5) / 2,
    complement=lambda z: torch.special.erfc(z / 2**0.5) / 2,
    log_value=torch.special.log_ndtr,
    log_complement=lambda z: torch.special.log_ndtr(-z),
    log_slope=lambda z: -z * z / 2 - 0.5 * math.log(2 * math.pi),
)
CAUCHY = ReferenceLink(
    "cauchy",
    value=_cauchy,
    complement=lambda z: _cauchy(-z),
    log_value=lambda z: _cauchy(z).log(),
    log_complement=lambda z: _cauchy(-z).log(),
    log_slope=lambda z: -math.log(math.pi) - 2 * torch.hypot(torch.ones_like(z), z).log(),
    bare=True,
)


CAPPED_EXPONENTIAL = ReferenceLink(
    "capped_exponential",
    value=lambda z: z.clamp(max=0).exp(),
    complement=lambda z: -z.clamp(max=0).expm1(),
    log_value=lambda z: z.clamp(max=0),
    log_complement=lambda z: (-z.clamp(max=0).expm1()).log(),
    log_slope=lambda z: torch.where(z < 0, z, -torch.inf),
    kinks=(0.0,),
    cap=0.0,
)


def clipped_power(q: float) -> ReferenceLink:
    """clip(z, 0, 1)^q."""

    def inside(z: Tensor) -> Tensor:
        return (z > 0) & (z < 1)

    return ReferenceLink(
        f"clipped_power_{q:g}",
        value=lambda z: z.clamp(0, 1) ** q,
        complement=lambda z: -(q * z.clamp(0, 1).log()).expm1(),
        log_value=lambda z: q * z.clamp(0, 1).log(),
        log_complement=lambda z: (-(q * z.clamp(0, 1).log()).expm1()).log(),
        log_slope=lambda z: torch.where(
            inside(z), math.log(q) + (q - 1) * z.clamp(0, 1).log().clamp(min=-FAR), -torch.inf
        ),
        kinks=(0.0, 1.0) if q == 1 else (1.0,),
        cap=1.0,
    )


def _ordinal(t: Tensor) -> Tensor:
    bits = t.view(torch.int64)
    return torch.where(bits < 0, torch.iinfo(torch.int64).min - bits, bits)


def _double(ordinal: Tensor) -> Tensor:
    return torch.where(ordinal < 0, torch.iinfo(torch.int64).min - ordinal, ordinal).view(torch.float64)


def bisect(rises: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """A double next to where the root lies: ``rises(t)`` says whether the root is at t or above, true at ``low``."""
    a, b = _ordinal(low.double().contiguous() + 0.0), _ordinal(high.double().contiguous() + 0.0)
    for _ in range(HALVINGS):
        middle = (a >> 1) + (b >> 1) + (a & b & 1)
        right = rises(_double(middle))
        a, b = torch.where(right, middle, a), torch.where(right, b, middle)
    return _double(a)


class Mask(NamedTuple):
    """The mask of rows (rows, n) at their roots.

    Attributes:
        z: Standardised scores, float64.
        y: Values.
        log_y: Their logarithms.
        kink: Distance of a row from the nearest kink, in units of z; ``inf`` if there is none.
        limit: Rows with k = 0 or all unmasked items.
        hard: Rows of zeros and ones alone that stay so.
    """

    z: Tensor
    y: Tensor
    log_y: Tensor
    kink: Tensor
    limit: Tensor
    hard: Tensor


def _standardise(x: Tensor, anchor: Tensor, tau: Tensor, softness: Tensor) -> Tensor:
    half = 0.5 * x - 0.5 * anchor.unsqueeze(-1)  # halves do not overflow
    return half / softness.unsqueeze(-1) * 2 - tau.unsqueeze(-1)


def _rises(link: ReferenceLink, z: Tensor, k: Tensor) -> Tensor:
    """Whether sum F(z) >= k."""
    above = link.above(z)
    excess = above.sum(-1) - k
    below_tail = torch.where(above, 0.0, link.value(z)).sum(-1)
    above_tail = torch.where(above, link.complement(z), 0.0).sum(-1)
    plain = below_tail - above_tail + excess >= 0
    if link.cap < torch.inf:
        return plain
    low = torch.where(above, -torch.inf, link.log_value(z)).logsumexp(-1)
    high = torch.where(above, link.log_complement(z), -torch.inf).logsumexp(-1)
    return torch.where(excess == 0, low >= high, plain)


def _neighbours(link: ReferenceLink, x: Tensor, k: Tensor, softness: Tensor) -> tuple[Tensor, Tensor]:
    """The largest item at or below t and the smallest above, or infinities, by bisection among the sorted items."""
    items, n = x.sort(-1, descending=True).values, x.shape[-1]
    real = items > -torch.inf
    low, high = torch.full_like(k, -1, dtype=torch.int64), real.sum(-1)  # the root is below item low, not below high
    zero = torch.zeros_like(k)
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        at = items.gather(-1, middle.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1)
        rises = _rises(link, _standardise(x, at, zero, softness), k)
        going = high - low > 1
        high, low = torch.where(going & rises, middle, high), torch.where(going & ~rises, middle, low)
    count = real.sum(-1)
    lower = items.gather(-1, high.clamp(max=n - 1).unsqueeze(-1)).squeeze(-1).masked_fill(high >= count, -torch.inf)
    upper = items.gather(-1, low.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(low < 0, torch.inf)
    return lower, upper


def mask(link: ReferenceLink, x: Tensor, k: Tensor, softness: Tensor) -> Mask:
    """The mask of x (rows, n) in float64, for 0 <= k <= number of entries above -inf and no +inf."""
    x, k, softness = x.double(), k.double(), softness.double()
    lower, upper = _neighbours(link, x, k, softness)
    none, everything = k == 0, k == x.isfinite().sum(-1)
    first, last = lower.isinf(), upper.isinf()
    gap = ((0.5 * upper - 0.5 * lower) / softness).clamp(max=FAR)  # half of it, in scales
    gap = torch.where(first | last, FAR, gap)
    anchor = torch.where(first, upper, lower)
    after = _rises(link, _standardise(x, anchor, gap, softness), k) & ~first & ~last
    anchor = torch.where(after, upper, anchor)
    left = after | first
    tau = bisect(
        lambda tau: _rises(link, _standardise(x, anchor, tau, softness), k),
        torch.where(left, -gap, 0.0),
        torch.where(left, 0.0, gap),
    )
    z = _standardise(x, anchor, tau, softness)
    z = torch.where(none.unsqueeze(-1), -torch.inf, torch.where(everything.unsqueeze(-1), torch.inf, z))
    z = torch.where(x == -torch.inf, -torch.inf, z)
    kink, hard = _kinks(link, x, z, k, softness)
    y = torch.where(hard.unsqueeze(-1), link.value(z).round(), link.value(z))
    return Mask(z, y, link.log_value(z), kink, none | everything, hard)


def _kinks(link: ReferenceLink, x: Tensor, z: Tensor, k: Tensor, softness: Tensor) -> tuple[Tensor, Tensor]:
    """Distance from the nearest kink, and which rows are zeros and ones that a small change leaves so."""
    never = torch.zeros_like(k, dtype=torch.bool)
    if not link.kinks:
        return torch.full_like(k, torch.inf), never
    finite = x.isfinite()
    distance = torch.stack([torch.where(finite, (z - kink).abs(), torch.inf).amin(-1) for kink in link.kinks]).amin(0)
    limit = (k == 0) | (k == finite.sum(-1))
    distance = distance.masked_fill(limit, torch.inf)
    if link.cap == 0:
        return distance, never
    size = k.round().long()
    items = x.sort(-1, descending=True).values
    n = x.shape[-1]
    kth = items.gather(-1, (size - 1).clamp(0, n - 1).unsqueeze(-1)).squeeze(-1)
    next_one = items.gather(-1, size.clamp(max=n - 1).unsqueeze(-1)).squeeze(-1)
    room = (0.5 * kth - 0.5 * next_one) / softness * 2 - 1
    inner = (k == k.round()) & ~limit
    hard = inner & (room >= 0)
    return torch.where(inner, torch.where(hard, room, distance.minimum(-room)), distance), hard | limit


class Gradients(NamedTuple):
    """Derivatives of <weight, y>, or <weight, log y>, the size that errors are relative to, the largest log F'."""

    x: Tensor
    k: Tensor
    softness: Tensor
    size: Tensor
    top: Tensor


def _sum_of_products(a: Tensor, b: Tensor, divisor: Tensor) -> Tensor:
    """sum a b / divisor along the last axis, in which no product over- or underflows; 0 times infinity is 0."""
    (a, of_a), (b, of_b) = torch.frexp(a), torch.frexp(torch.where(a == 0, 0.0, b.clamp(-1.7e308, 1.7e308)))
    (divisor, of_divisor), exponent = torch.frexp(divisor), (of_a + of_b).double()
    top = exponent.masked_fill(a * b == 0, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    total = (a * b * torch.exp2((exponent - top).clamp(max=0))).sum(-1, keepdim=True) / divisor
    return (total * torch.exp2(top - of_divisor)).squeeze(-1)


def gradients(link: ReferenceLink, at: Mask, weight: Tensor, softness: Tensor, log: bool = False) -> Gradients:
    """By the implicit function theorem, from log F' so that nothing underflows before it has to."""
    g, z = weight.double(), at.z
    log_slope = link.log_slope(z).masked_fill(z.isinf() | at.hard.unsqueeze(-1), -torch.inf)
    top = log_slope.amax(-1, keepdim=True)
    shares = torch.where(top > -torch.inf, (log_slope - top).exp(), 0.0)
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-300)
    column = softness.double().unsqueeze(-1)
    if log:
        direct = torch.where(z == -torch.inf, 0.0, g * (log_slope - at.log_y).exp().nan_to_num(0.0))
        total = direct.sum(-1, keepdim=True)
        dz = direct - shares * total
        top_one = shares.argmax(-1, keepdim=True)  # minus the sum of the others, where it cancels
        others = dz.scatter(-1, top_one, 0.0)
        dz = others.scatter(-1, top_one, -others.sum(-1, keepdim=True))
        dk = (total / log_slope.exp().sum(-1, keepdim=True)).squeeze(-1)
        size = (direct.abs().amax(-1) + direct.abs().sum(-1) * shares.amax(-1)) / column.squeeze(-1)
    else:
        dk = (shares * g).sum(-1)
        rest = g - g.gather(-1, shares.argmax(-1, keepdim=True))  # the mean may lie next to the largest share's
        dz = log_slope.exp() * (rest - (shares * rest).sum(-1, keepdim=True))
        size = top.squeeze(-1).exp() / column.squeeze(-1) * g.abs().amax(-1)
    return Gradients(dz / column, dk, -_sum_of_products(dz, z, column), size, top.squeeze(-1))
