r"""Thresholds of the sparse maps that look at a = abs(x), row by row: the signed mask and the magnitudes.

With strength s and F(z) = clip(z, 0, 1)^q, q = 1 / (p - 1),

* signed mask: the t >= 0 with sum_i F((a_i - t) / s) = k, or 0 if the sum is below k already there;
* magnitudes: the t > 0 with sum_i F((a_i - t) / (s t^(p-1))) = k, the same sum with a scale that grows with t; it falls
  from the number of nonzero entries at t = 0 to 0 at t = max a. t = 0 if k is no less than that number.

Step, for the magnitudes. z = (a - t) theta / s is linear in theta = t^(1-p) both for t << a and for p = 2. As for the
mask, let P be the sum of F over the entries that are not capped and B = k - #capped; Newton on P^(1/q) = B^(1/q) is

    theta_new = theta (1 + P ((B / P)^(1/q) - 1) / (P + t^(2-p) / s * sum F')),

positive whatever B >= 0 is.

Result. As of the masks, t = anchor + offset * scale, with the scale s, or s t^(p-1) of the magnitudes, where the offset
is never above 0. If any entry is between 0 and its cap, one lies less than a scale above t, and the number of its dtype
that is next above t is no further away. So z = (a - anchor) / scale - offset has all its digits, however small the
strength is; where the root lies between two neighbouring doubles, the search goes on in the offset.
"""

from functools import partial

import torch
from torch import Tensor

from khot._distributed.shards import Shards

from .. import threshold
from ..links.base import TailSums
from ..links.clipped_power import ClippedPower
from ..newton import COARSEST, NEAR, RESOLUTION, Evaluation, Root, arithmetic_mean, guarded_newton
from ..rows import SAMPLE_SIZE, Span, Threshold, compute_dtype, row_range
from .local_loops import LocalSums, Look

FIRST_STEPS = 8  # on all rows, before those that are left get some by themselves
OVERSHOOT = 2**-10  # relative to the step at which the last pooled entry leaves, so that it becomes an exact zero
ORDINARY = 2.0**40  # entries and strengths up to which, and down to the inverse of which, float32 does
SHRINK_STEPS, DIFFERENTIABLE_STEPS = 7, 3


def shrink(a: Tensor, strength: Tensor, link: ClippedPower) -> tuple[Tensor, Tensor]:
    """The y >= 0 with y + strength y^(p-1) = a >= 0, and y^(p-1); differentiable where a > 0, up to seven times.

    u = y^(p-1) solves u^q + strength u = a, of which either term is at least a / 2: Newton's method for this convex
    function starts within a factor 2 above the root. Derivatives go through the last three of its steps alone, each of
    which, taken from the root, doubles the number of derivatives that are exact.
    """
    if link.q == 1:
        y = a / (1 + strength)
        return y, y
    q, room = link.q, 4.0 ** (1 / link.q)  # for rounding, next to the largest numbers: u / room, from a / 4
    quarter, lighter = a / 4, strength * (room / 4)
    constant, weight = quarter.detach(), lighter.detach()
    u = torch.minimum(constant / weight, constant ** (1 / q))
    for i in range(SHRINK_STEPS):
        if i == SHRINK_STEPS - DIFFERENTIABLE_STEPS:
            u, constant, weight = u.detach(), quarter, lighter
        u = ((1 - 1 / q) * u**q + constant / q) / (u ** (q - 1) + weight / q)
    u = room * u
    return torch.where(strength * u < 0.5 * a, a - strength * u, u**q), u  # the one that rounds less


def threshold_value(at: Threshold, strength: Tensor, link: ClippedPower) -> Tensor:
    """t of the magnitudes, from t = anchor + offset * strength * t^(p-1); differentiable in offset and strength."""
    positive, pull = at.anchor > 0, (0 - at.offset) * strength  # not -0, of which 1 / pull would be -inf
    return torch.where(positive, shrink(torch.where(positive, at.anchor, 1.0), pull, link)[0], 0.0)


def ratios(a: Tensor, at: Threshold, root: Tensor, strength: Tensor) -> Tensor:
    """z of the magnitudes, for the root t^(p-1) > 0; differentiable.

    1 / scale might overflow; its factors do not, nor does what they multiply, up to the cap.
    """
    first, second = (v.to(a.dtype).unsqueeze(-1) for v in (1 / strength, _inverse(root, a.dtype)))
    return (a - at.anchor.to(a.dtype).unsqueeze(-1)) * first * second - at.offset.to(a.dtype).unsqueeze(-1)


def root_of(t: Tensor, link: ClippedPower) -> Tensor:
    """t^(p-1), with a last step that makes its q-th power t to all digits, whatever the rounding of 1 / q does."""
    if link.q == 1:
        return t
    root = t ** (1 / link.q)
    return root * (1 + ((t.sqrt() / root ** (link.q / 2)).square() - 1) / link.q)


def _inverse(root: Tensor, dtype: torch.dtype) -> Tensor:
    return root.reciprocal().clamp(max=torch.finfo(dtype).max)


def far_dtype(x: Tensor, strength: Tensor) -> torch.dtype:
    """float64 for the signed mask in float32 where a strength is so large or small that slopes may leave float32."""
    ordinary = (strength > 1 / ORDINARY) & (strength < ORDINARY)
    return compute_dtype(x) if bool(ordinary.all()) else torch.float64


def solve_signed(a: Tensor, k: Tensor, strength: Tensor, link: ClippedPower) -> Threshold:
    """Thresholds of the signed mask for a = abs(x), not below 0."""
    return _not_below_0(Threshold(*threshold.threshold(a, k, strength, link.key, "strength", False)), strength)


def solve_signed_parts(
    a: Tensor,
    k: Tensor,
    strength: Tensor,
    link: ClippedPower,
    span: Span,
    shards: Shards,
    local_sums: LocalSums | None,
) -> Threshold:
    """The same of rows of which a is the part of one process."""
    return _not_below_0(threshold.solve_rows(a.contiguous(), k, strength, link, span, shards, local_sums), strength)


def _not_below_0(at: Threshold, strength: Tensor) -> Threshold:
    binding = at.anchor + at.offset * strength > 0
    return Threshold(torch.where(binding, at.anchor, 0.0), torch.where(binding, at.offset, 0.0))


class _Magnitudes:
    """Rows to solve, a (rows, n), in the dtype of a, and the last sums that were taken.

    Where other processes have parts of the rows, a is that of this one, and what is found of rows is reduced.
    """

    def __init__(
        self,
        a: Tensor,
        k: Tensor,
        strength: Tensor,
        link: ClippedPower,
        shards: Shards | None = None,
        local_sums: LocalSums | None = None,
    ) -> None:
        self.a, self.k, self.strength, self.link, self.shards = a, k, strength, link, shards
        self.local_sums = local_sums
        self.n = a.shape[-1] if shards is None else shards.n
        self.buffer = torch.empty_like(a)
        self.sums, self.excess = TailSums(k, k, k, k), k

    def take(self, which: Tensor) -> "_Magnitudes":
        return _Magnitudes(self.a[which], self.k[which], self.strength[which], self.link, self.shards)

    def _finish(self, sums: TailSums) -> None:
        self.sums = TailSums(*((v.double() for v in sums) if self.shards is None else self.shards.sum(*sums)))
        self.excess = self.sums.above - self.k

    def _sums_here(self, a: Tensor, t: Tensor, strength: Tensor, link: ClippedPower) -> TailSums:
        dtype = a.dtype
        z, high = self.buffer, t.to(dtype)
        torch.sub(a, high[:, None], out=z)
        if dtype != t.dtype:
            z.sub_((t - high).to(dtype)[:, None])
        z.mul_((1 / strength).to(dtype)[:, None]).mul_(_inverse(t ** (1 / link.q), dtype).to(dtype)[:, None])
        return link.tail_sums(z)

    def _is_small(self, residual: Tensor) -> Tensor:
        size = self.sums.total + self.excess.abs()
        return residual.abs() <= (1 + self.link.q) * torch.finfo(self.a.dtype).eps * size

    def at_threshold(self, t: Tensor) -> Evaluation:
        """For :func:`guarded_newton`, of thresholds t."""
        sums_at = self._sums_here if self.local_sums is None else self.local_sums
        self._finish(sums_at(self.a, t, self.strength, self.link))
        q, total = self.link.q, self.sums.total
        residual = total + self.excess
        inverse = t ** (1 - 1 / q) / self.strength  # t in scales
        growth = torch.where(self.excess <= 0, total * ((-self.excess / total) ** (1 / q) - 1), -residual / q)
        growth = growth * (1 + (self.excess == 0) * OVERSHOOT) / (total + inverse * self.sums.slope)
        relative = torch.expm1(-q * torch.log1p(growth))
        # Where the doubles are too far apart for a small residual, a step to between them that crosses no kink.
        between = (RESOLUTION * inverse).clamp(max=COARSEST)
        found = self._is_small(residual) | ((relative.abs() * inverse <= between) & (self.sums.slope > 0))
        return t * relative, residual, found

    def at_offset(self, anchor: Tensor, offset: Tensor) -> Evaluation:
        """The same of offsets from an anchor."""
        at = Threshold(anchor, offset)
        t = threshold_value(at, self.strength, self.link)
        self._finish(self.link.tail_sums(ratios(self.a, at, root_of(t, self.link), self.strength)))
        step, residual = self.link.newton_step(self.sums, self.excess), self.sums.total + self.excess
        return step, residual, self._is_small(residual)

    def may_be_hard(self) -> Tensor:
        """Where entries are all zero or capped, or about to be, which leaves the threshold free."""
        whole = (self.excess == 0) | (
            (self.link.condition * self.sums.total >= (1 - NEAR) * self.sums.slope)
            & ((self.sums.total + self.excess).abs() <= NEAR * self.sums.total)
        )
        return whole & (self.k == self.k.round())

    def is_extreme(self, highest: Tensor) -> Tensor:
        """Where powers and products of entries and strength may leave float32."""
        if self.a.dtype == torch.float64:
            return torch.zeros_like(highest, dtype=torch.bool)
        largest, smallest = torch.maximum(highest, self.strength), torch.minimum(highest, self.strength)
        return (largest > ORDINARY) | (smallest < 1 / ORDINARY)


def _middle(low: Tensor, high: Tensor) -> Tensor:
    """In the logarithm, over a range of many powers of ten."""
    return torch.where(high > 4 * low, low.sqrt() * high.sqrt(), arithmetic_mean(low, high))


def solve_magnitudes(
    a: Tensor,
    k: Tensor,
    strength: Tensor,
    link: ClippedPower,
    span: Span,
    shards: Shards | None = None,
    look: Look | None = None,
    local_sums: LocalSums | None = None,
) -> Threshold:
    """Thresholds of the magnitudes for a = abs(x); of parts of rows a backend may have a look, and loops for sums."""
    q = link.q
    if look is None:
        nonzero, smallest = a.sign().sum(-1).double(), torch.where(a > 0, a, torch.inf).amin(-1).double()
    else:
        nonzero, smallest = look.nonzero, look.smallest
    if shards is not None:
        (nonzero,) = shards.sum(nonzero)
        smallest = -shards.max(-smallest)[0]
    # At `low` every nonzero entry is capped: half of it is above t, half above the scale at t.
    floor = torch.finfo(torch.float64).tiny  # below which y = t z vanishes anyway
    low = torch.minimum(smallest / 2, (smallest / strength / 2) ** q).clamp(floor, None)
    high = torch.maximum(span.highest, low)
    everything, none = k >= nonzero, k == 0
    trivial = everything | none
    start = torch.maximum(torch.minimum(_first_guess(a, k, strength, link, span, shards), high), low)
    t = torch.where(none, high, start)
    rows = _Magnitudes(a, k, strength, link, shards, local_sums)
    root = _search(rows, t, low, high, trivial, FIRST_STEPS)
    at = _split(root, strength, link, a.dtype)
    anchor = torch.where(everything, 0.0, torch.where(none, span.highest, at.anchor))
    at = Threshold(anchor, torch.where(trivial, 0.0, at.offset))
    extreme = rows.is_extreme(span.highest)
    hard = ~trivial & (~root.found | rows.may_be_hard() | extreme)
    if bool(hard.any()):
        which = hard.nonzero().squeeze(-1)
        rest = rows if local_sums is None and bool(hard.all()) else rows.take(which)
        if bool(extreme.any()):  # the distances of entries from a threshold among them are far smaller than they are
            rest = _Magnitudes(a[which].double(), k[which], strength[which], link, shards)
        again = _solve_hard_rows(rest, root.t[which], low[which], high[which], a.dtype)
        at.anchor[which], at.offset[which] = again.anchor, again.offset
    return at


def _first_guess(
    a: Tensor, k: Tensor, strength: Tensor, link: ClippedPower, span: Span, shards: Shards | None
) -> Tensor:
    """A start: the root of a sample of a long row; of a short one, what its mean and variance say."""
    n = a.shape[-1] if shards is None else shards.n
    if span.moments is not None:
        mean, variance = span.moments
    elif n >= 4 * SAMPLE_SIZE:
        sample = a[:, :: n // SAMPLE_SIZE].contiguous()
        at = solve_magnitudes(sample, k * (sample.shape[-1] / n), strength, link, row_range(sample))
        return threshold_value(at, strength, link)
    else:
        mean, square = a.mean(-1).double(), torch.linalg.vector_norm(a, dim=-1).double().square() / n
        variance = (square - mean.square()).clamp(min=0)
    fraction = (k / n).clamp(1e-300, 1 - 2.0**-53)
    quantile = mean - variance.sqrt() * torch.special.ndtri(fraction)
    # the root if all entries were this
    return shrink(quantile.clamp(min=0), strength * fraction ** (1 / link.q), link)[0].nan_to_num(0.0)


def _search(rows: _Magnitudes, t: Tensor, low: Tensor, high: Tensor, done: Tensor, *max_steps: int) -> Root:
    residuals = rows.n - rows.k, -rows.k
    return guarded_newton(rows.at_threshold, t, (low, high), residuals, done, 0.0, _middle, *max_steps)


def _split(root: Root, strength: Tensor, link: ClippedPower, dtype: torch.dtype) -> Threshold:
    """t as a :class:`Threshold`, the anchor next above it."""
    nearest = root.t.to(dtype)
    below = (nearest.double() - root.t < root.rest) & (root.t > 0)
    anchor = torch.where(below, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest)
    anchor = anchor.clamp(max=torch.finfo(dtype).max).double()
    offset = ((root.t - anchor) + root.rest) / strength * root.t ** (-1 / link.q)
    return Threshold(anchor, offset.clamp(max=0))


def _solve_hard_rows(rows: _Magnitudes, start: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Threshold:
    """The thresholds of rows that a few steps do not solve, or that may leave them free; anchors are of this dtype."""
    root = _search(rows, start, low, high, rows.k.isnan())
    at = _split(root, rows.strength, rows.link, dtype)
    lost = (~root.found).nonzero().squeeze(-1)
    if len(lost):
        again = _search_offset(rows.take(lost), root.low[lost], root.high[lost])
        at.anchor[lost], at.offset[lost] = again.anchor, again.offset
    return _leave_kink(rows, at)


def _search_offset(rows: _Magnitudes, low: Tensor, high: Tensor) -> Threshold:
    """The thresholds between two neighbouring doubles, from the distances to the entry next above them."""
    anchor = torch.where(rows.a >= high[:, None], rows.a, torch.inf).amin(-1).double()
    if rows.shards is not None:
        anchor = -rows.shards.max(-anchor)[0]
    first = ((low - anchor) / rows.strength * low ** (-1 / rows.link.q)).clamp(min=-1e300)
    bracket = first * (1 + 2**-10), torch.zeros_like(first)
    residuals = rows.n - rows.k, -rows.k
    root = guarded_newton(
        partial(rows.at_offset, anchor),
        first.clamp(min=-0.5),
        bracket,
        residuals,
        torch.zeros_like(rows.k, dtype=torch.bool),
    )
    return Threshold(anchor, (root.t + root.rest).clamp(max=0))


def _leave_kink(rows: _Magnitudes, at: Threshold) -> Threshold:
    """Where entries are all zero or capped, the threshold at the largest zero, so that no rounding brings it back."""
    a, link = rows.a, rows.link
    root = root_of(threshold_value(at, rows.strength, link), link)
    above = ratios(a, at, root, rows.strength) > 0.5
    left, right = torch.where(above, 0.0, a).amax(-1).double(), torch.where(above, a, torch.inf).amin(-1).double()
    count = above.sum(-1)
    if rows.shards is not None:
        left, right = rows.shards.max(left, -right)
        right = -right
        (count,) = rows.shards.sum(count)
    room = (right - left) * (1 / rows.strength) * _inverse(left ** (1 / link.q), left.dtype) - 1
    free = (count == rows.k) & (room >= 0) & (left > 0)
    return Threshold(torch.where(free, left, at.anchor), torch.where(free, 0.0, at.offset))
