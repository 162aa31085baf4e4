r"""Thresholds of every row, exactly: plain torch in float64, one residual, one guarded search.

Residual. Let u_i be the short tail of an item: F(z_i) below the threshold, 1 - F(z_i) above, where m items lie. Then

    sum F - k = A - B,  A = sum of the tails below + max(m - k, 0),  B = sum of the tails above + max(k - m, 0),

two sums of positive numbers, where sum F - k itself would lose every digit of a mask of zeros and ones. The search
looks at g = log A - log B, which has the sign of sum F - k and falls with t. Newton's method on g is exact in one step
where tails are exponential, in a gap of many scales as well as near the root. Where the tails underflow, the same sums
are taken of their logarithms. A compact link counts as above the items at their cap, which leaves no tail there.

Threshold. No double t tells z where scores are many scales from 0. So the search first runs in t, whose doubles it sees
exactly; where two neighbouring doubles do not tell the root, it goes on in the offset c of t = anchor + c * sigma from
the nearest item. Then x - anchor is exact for the items near t, and z keeps its digits.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vecdot

from khot._distributed.shards import Shards

from ..contents import check_contents, check_empty
from ..links.base import Link
from ..newton import COARSEST, MAX_STEPS, RESOLUTION, Evaluation, Root, arithmetic_mean, guarded_newton
from ..rows import Span, Threshold, compute_dtype, row_range
from .derivatives import derivative, items_of
from .kinds import KINDS, Kind, inverse_of, root_of
from .reductions import WHOLE, Whole, reductions

FIRST_STEPS = 8  # on all rows, before those that are left get some by themselves
TOLERANCE = 2.0**-27  # of the last step, in scales: Newton's method then has all digits
EPS, TINY = torch.finfo(torch.float64).eps, torch.finfo(torch.float64).tiny
UNDERFLOW = TINY / EPS  # sums below which tails are taken by their logarithms
SHORT = 2.0**-30  # of a step between neighbouring doubles, relative to distances from the threshold
FARTHEST = 1e306  # in scales, as good as infinite
WIDENINGS = 14  # of a bracket, each of which squares its width in scales: 2^1024 is beyond all doubles
MARGIN = 2.0**-10  # relative, that a bracket leaves to rounding and to rough inverses
ANCHORINGS = 3  # searches in the offset, while another item turns out to be nearer
LARGE_SCALE, LARGE_SCORE = 2.0**500, 2.0**1000  # above which differences might overflow, so that rows are shrunk
SHRINKAGE = 2.0**-600
LEAST_SHARE = 1e-300


class Rows(NamedTuple):
    """Rows to solve: items x (rows, n) in float64, k and softness (rows,).

    Where other processes hold further items of the rows, what is found of a row is reduced over all of them.
    """

    x: Tensor
    k: Tensor
    softness: Tensor
    link: Link
    kind: Kind
    over: Whole

    def take(self, which: Tensor) -> "Rows":
        return self._replace(x=self.x[which], k=self.k[which], softness=self.softness[which])

    def distances(self, at: Threshold) -> Tensor:
        """z; numbers are of such a size that no difference overflows."""
        if self.kind.grows:
            return self.kind.distances(self.x, at, self.softness, self.link)
        return (self.x - at.anchor.unsqueeze(-1)) / self.softness.unsqueeze(-1) - at.offset.unsqueeze(-1)

    def scale(self, t: Tensor) -> Tensor:
        return self.kind.scale(t, self.softness, self.link)

    def neighbours(self, above: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest item that is not above, the smallest that is, infinite if there is none, and how many are."""
        left = self.x.masked_fill(above, -torch.inf).amax(-1)
        right = self.x.masked_fill(~above, torch.inf).amin(-1)
        left, right = self.over.max(left, -right)
        return left, -right, self.over.sum(above.sum(-1).double())[0]


# ---- The residual


def _evaluate(rows: Rows, at: Threshold) -> Evaluation:
    """A step of t in scales, a number with the sign of sum F - k, and whether t with that step is the root."""
    z, link = rows.distances(at), rows.link
    if link.compact:
        tail, slope = link.value(z), link.slope(z)
        above = (tail >= 1).double()
    else:
        (tail, slope), above = link.tail_and_slope(z), (z > 0).double()
    if rows.kind.grows:  # as t rises, the scale does, too
        t = rows.kind.threshold(at, rows.softness, link)
        slope = slope * (1 + z.clamp(0, 1) * (rows.scale(t) / (link.q * t)).unsqueeze(-1))
    others = 1 - above
    m, below, falls = rows.over.sum(above.sum(-1), vecdot(tail, others), vecdot(slope, others))
    if link.compact:
        return _compact_step(rows, at, m - rows.k, below, falls)
    beyond, rises = rows.over.sum(vecdot(tail, above), vecdot(slope, above))
    excess = m - rows.k
    a, b = below + excess.clamp(min=0), beyond + (-excess).clamp(min=0)
    g, falls, rises = (a / b).log(), falls / a, rises / b
    lost = torch.minimum(a, b) < UNDERFLOW
    if bool(lost.any()):
        exact = _by_logarithms(rows, z, above > 0, excess)
        g, falls, rises = (torch.where(lost, v, old) for v, old in zip(exact, (g, falls, rises), strict=True))
    step = g / (falls + rises)
    return step, g, (step.abs() <= TOLERANCE) | (g == 0)


def _by_logarithms(rows: Rows, z: Tensor, above: Tensor, excess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g and the rates at which log A falls and log B rises with t, in scales."""
    link = rows.link
    tail = torch.where(above, link.log_complement(z), link.log_value(z))
    below, beyond = rows.over.logsumexp(*(torch.where(side, tail, -torch.inf) for side in (~above, above)))
    a = torch.logaddexp(below, excess.clamp(min=0).log())
    b = torch.logaddexp(beyond, (-excess).clamp(min=0).log())
    # The rates are mean hazards, weighted by the tails. A difference of sums of slopes and of tails would round more.
    total = torch.where(above, beyond.unsqueeze(-1), below.unsqueeze(-1))
    weighted = torch.where(tail > -torch.inf, (tail - total + link.log_hazard(z)).exp(), 0.0)
    falls, rises = rows.over.sum(*(weighted.masked_fill(side, 0.0).sum(-1) for side in (above, ~above)))
    falls, rises = (below - a).nan_to_num(0.0).exp() * falls, (beyond - b).nan_to_num(0.0).exp() * rises
    g, blind = (a - b).nan_to_num(0.0, torch.inf, -torch.inf), (a == -torch.inf) & (b == -torch.inf)
    if bool(blind.any()):  # in a gap so wide that not even logarithms tell, the middle is the root
        z = z.clamp(-FARTHEST, FARTHEST)
        below, beyond = z.masked_fill(above, -torch.inf).amax(-1), z.masked_fill(~above, torch.inf).amin(-1)
        below, beyond = rows.over.max(below, -beyond)
        g = torch.where(blind, below - beyond, g)
        falls, rises = (torch.where(blind, 1.0, v) for v in (falls, rises))
    return g, falls, rises


def _compact_step(rows: Rows, at: Threshold, excess: Tensor, below: Tensor, falls: Tensor) -> Evaluation:
    """For a link whose kinks make the residual the measure, not the step; ``below`` is the sum P of the uncapped.

    P is about a power of the distance to t, or an exponential of it: Newton's method on P^(1/order) = (k - capped)^(1 /
    order), or on log P. If more items are capped than k, it is Newton's method on the residual, or a step by which all
    entries together fall; and without any slope a step as if one item had some.
    """
    link, residual = rows.link, below + excess
    if link.reaches_zero:
        under = link.q * below / falls * (1 - (-excess / below) ** (1 / link.q))
        step = torch.where(excess < 0, under, residual / torch.where(falls > 0, falls, 1.0))
    else:
        lost = (below < UNDERFLOW) & (excess < 0)
        step = torch.where(excess < 0, (below / -excess).log(), torch.log1p(residual / rows.k))
        step = torch.where(lost, _log_of_uncapped(rows, at) - (-excess).log(), step) if bool(lost.any()) else step
    size = below + excess.abs()
    found = residual.abs() <= (1 + link.condition) * EPS * size
    # Where the doubles are too far apart for that, a step to between them that crosses no kink and is so short, beside
    # the distances of the items that make up the sum, that what it leaves shows in no sum.
    apart = (RESOLUTION * at.anchor.abs() / rows.scale(at.anchor)).clamp(max=COARSEST)
    found |= (excess < 0) & (falls > 0) & (step.abs() <= torch.minimum(apart, SHORT * below / falls))
    return step.masked_fill(found & (excess >= 0), 0.0), residual, found  # what is left may be a step across a kink


def _log_of_uncapped(rows: Rows, at: Threshold) -> Tensor:
    z = rows.distances(at)
    return rows.over.logsumexp(rows.link.log_value(z).masked_fill(rows.link.value(z) >= 1, -torch.inf))[0]


# ---- The search


def solve(rows: Rows, span: Span, dtype: torch.dtype) -> Threshold:
    """The thresholds of rows whose contents are in order, with anchors that are numbers of this dtype."""
    large = (rows.softness > LARGE_SCALE) | (torch.maximum(-span.lowest, span.highest) > LARGE_SCORE)
    if bool(large.any()) and not rows.kind.grows:
        factor = torch.ones_like(rows.softness).masked_fill(large, SHRINKAGE)
        small = rows._replace(x=rows.x * factor.unsqueeze(-1), softness=rows.softness * factor)
        at = solve(small, span._replace(lowest=span.lowest * factor, highest=span.highest * factor), torch.float64)
        anchor = _rounded(at.anchor / factor, dtype)
        return Threshold(anchor, at.offset + (at.anchor - anchor * factor) / small.softness)
    none, everything, start, low, high, width = _start(rows, span)
    wrong = ~((rows.k >= span.selected) & (rows.k <= span.selected + span.finite)) | span.nan
    at, done = _search(rows, start, low, high, width, none | everything | wrong, FIRST_STEPS, dtype)
    if not bool(done.all()):
        hard = (~done).nonzero().squeeze(-1)
        nothing = torch.zeros_like(hard, dtype=torch.bool)
        start, low, high, width = (v[hard] for v in (at.anchor, low, high, width))
        again, _ = _search(rows.take(hard), start, low, high, width, nothing, MAX_STEPS, dtype)
        at.anchor[hard], at.offset[hard] = again.anchor, again.offset
    at = _at_the_ends(rows, span, at, none, everything)
    return Threshold(at.anchor, at.offset.masked_fill(wrong, torch.nan))


def _start(rows: Rows, span: Span) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Which rows have nothing or everything in the mask; of the others a first guess, inside a bracket.

    And how many scales beyond the items the root may be.
    """
    link, finite = rows.link, span.finite.clamp(min=1)
    share = ((rows.k - span.selected) / finite).clamp(LEAST_SHARE, 1 - 2.0**-53)
    none = rows.k <= span.selected
    centre, variance = span.moments or _moments(rows.x, finite)
    if rows.kind.grows:
        (nonzero,) = rows.over.sum((rows.x > 0).sum(-1).double())
        (smallest,) = rows.over.max(torch.where(rows.x > 0, -rows.x, -torch.inf).amax(-1))
        # At `low` every entry but 0 is capped: half of it is above t, half above the scale at t.
        low = torch.minimum(-smallest / 2, (-smallest / rows.softness / 2) ** link.q).clamp(min=TINY)
        guess = centre - variance.sqrt() * torch.special.ndtri(share)
        high = torch.maximum(span.highest, low)
        return none, rows.k >= nonzero, _inside(guess, low, high), low, high, torch.zeros_like(low)
    middle, spread = link.start(rows.x.device)
    deviation = (variance + spread * rows.softness.square()).sqrt()
    guess = centre - middle * rows.softness - deviation * torch.special.ndtri(share)
    # F is the share everywhere if all items are equal, so the root lies within its quantile of the extreme items.
    width = (1 + MARGIN) * link.inverse(share).abs().nan_to_num(0.0) + 1
    low, high, width = _bracket(rows, span, width)
    return none, rows.k >= span.selected + span.finite, _inside(guess, low, high), low, high, width


def _moments(x: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.where(x.isfinite(), x, 0.0)
    mean = kept.sum(-1) / finite
    return mean, (kept.square().sum(-1) / finite - mean.square()).clamp(min=0)


def _inside(guess: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(guess.nan_to_num(0.0), high), low)


def _bracket(rows: Rows, span: Span, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where g is positive and where negative; widened until it is, since the inverse of a user's link may be rough."""
    largest = torch.finfo(torch.float64).max
    for _ in range(WIDENINGS):
        low = (span.lowest - width * rows.softness - 4 * EPS * span.lowest.abs()).clamp(-largest, largest)
        high = (span.highest + width * rows.softness + 4 * EPS * span.highest.abs()).clamp(-largest, largest)
        if rows.link.kernel is not None:
            break
        nothing = torch.zeros_like(low)
        at_low, at_high = (_evaluate(rows, Threshold(end, nothing))[1] for end in (low, high))
        missed = ((at_low < 0) & (low > -largest)) | ((at_high > 0) & (high < largest))
        if not bool(missed.any()):
            break
        width = torch.where(missed, width * width.clamp(min=4), width)
    return low, high, width


def _search(
    rows: Rows, start: Tensor, low: Tensor, high: Tensor, width: Tensor, done: Tensor, steps: int, dtype: torch.dtype
) -> tuple[Threshold, Tensor]:
    """The threshold from a search in t and, if that has enough steps to end, in the offset; and which rows are done."""
    nothing = torch.zeros_like(start)

    def evaluate(t: Tensor) -> Evaluation:
        step, g, found = _evaluate(rows, Threshold(t, nothing))
        return step * rows.scale(t), g.clamp(-1 / EPS, 1 / EPS), found

    middle = _geometric_mean if rows.kind.grows else arithmetic_mean
    root = guarded_newton(evaluate, start, (low, high), (1 + nothing, nothing - 1), done, None, middle, steps)
    anchor = _rounded(root.t, dtype)
    if rows.kind.grows:  # then the offset is not positive, and t not below 0
        higher = torch.nextafter(anchor.to(dtype), torch.tensor(torch.inf, dtype=dtype, device=anchor.device)).double()
        anchor = torch.where((anchor - root.t < root.rest) & higher.isfinite(), higher, anchor)
    at = Threshold(anchor, ((root.t - anchor) + root.rest) / rows.scale(root.t))
    if steps == MAX_STEPS:
        lost = (~root.found).nonzero().squeeze(-1)
        if len(lost):
            again = _search_offset(rows.take(lost), Root(*(v[lost] for v in root)), width[lost], dtype)
            at.anchor[lost], at.offset[lost] = again.anchor, again.offset
        if not bool(root.done.all()):
            raise RuntimeError(f"found no threshold: {rows.link} must increase from 0 to 1, and have no NaN")
    if rows.link.compact and rows.link.reaches_zero:
        at, free = _leave_kink(rows, at)
        return at, root.found | free
    return at, root.found


def _geometric_mean(low: Tensor, high: Tensor) -> Tensor:
    return torch.where(high > 4 * low, low.sqrt() * high.sqrt(), arithmetic_mean(low, high))


def _rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The finite number of a dtype next to t, in float64."""
    largest = torch.finfo(dtype).max
    return t.clamp(-largest, largest).to(dtype).double()


def _search_offset(rows: Rows, root: Root, width: Tensor, dtype: torch.dtype) -> Threshold:
    """The thresholds between two neighbouring doubles, from the distances to the item that is nearest.

    In a wide gap the number next to t is nearer than any item, and becomes the anchor.
    """
    t, offset = root.t, torch.zeros_like(root.t)
    anchor = torch.full_like(t, torch.nan)
    for _ in range(ANCHORINGS):
        left, right, _ = rows.neighbours(rows.x > t.unsqueeze(-1) if not rows.kind.grows else rows.x >= t.unsqueeze(-1))
        nearest = right if rows.kind.grows else torch.where(t - left < right - t, left, right)
        nearest = torch.where(nearest.isfinite(), nearest, t)
        if bool((nearest == anchor).all()):
            break
        anchor, scale = nearest, rows.scale(t)
        low, high = (((end - anchor) / scale).clamp(-FARTHEST, FARTHEST) for end in (root.low, root.high))
        low, high = low - MARGIN * low.abs() - 1 - width, high + MARGIN * high.abs() + 1 + width
        if rows.kind.grows:
            high = torch.zeros_like(high)

        def evaluate(c: Tensor, at: Tensor = anchor) -> Evaluation:
            step, g, found = _evaluate(rows, Threshold(at, c))
            return step, g.clamp(-1 / EPS, 1 / EPS), found

        one, nothing = torch.ones_like(t), torch.zeros_like(t, dtype=torch.bool)
        found = guarded_newton(evaluate, _inside((t - anchor) / scale, low, high), (low, high), (one, -one), nothing)
        offset = found.t + found.rest
        t = anchor + offset * scale
    nearer = _rounded(t, dtype)
    rest = offset + (0.5 * anchor - 0.5 * nearer) * (2 / scale)
    better = (rest.abs() < offset.abs()) & (not rows.kind.grows)
    return Threshold(torch.where(better, nearer, anchor), torch.where(better, rest, offset))


def _leave_kink(rows: Rows, at: Threshold) -> tuple[Threshold, Tensor]:
    """Thresholds of masks of zeros and ones, away from either end of where they may be; and which masks these are.

    Those of magnitudes, which the scale depends on, are at the largest zero, so that no rounding brings it back.
    """
    left, right, count = rows.neighbours(rows.distances(at) > 0.5)
    if rows.kind.grows:
        room = (right - left) * (1 / rows.softness) * inverse_of(root_of(left.clamp(min=0), rows.link.q)) - 1
        free, beyond = (count == rows.k) & (room >= 0) & (left > 0), torch.zeros_like(room)
    else:
        room = (0.5 * right - 0.5 * left) * (2 / rows.softness) - 1
        free, beyond = (count == rows.k) & (room >= 0), (0.5 * room).clamp(max=1)
    return Threshold(torch.where(free, left, at.anchor), torch.where(free, beyond, at.offset)), free


def _at_the_ends(rows: Rows, span: Span, at: Threshold, none: Tensor, everything: Tensor) -> Threshold:
    """With the thresholds of rows that have nothing or everything in the mask; those of odd maps are not below 0."""
    if rows.kind.grows:
        anchor = torch.where(everything, 0.0, torch.where(none, span.highest, at.anchor))
        return Threshold(anchor, torch.where(none | everything, 0.0, at.offset.clamp(max=0)))
    reach = rows.link.reach  # beyond the last item, as far as F needs
    anchor = torch.where(none, span.highest, torch.where(everything, span.lowest, at.anchor))
    offset = torch.where(none, reach, torch.where(everything, -reach, at.offset))
    if not rows.kind.absolute:
        return Threshold(anchor, offset)
    binding = anchor + offset * rows.softness > 0
    return Threshold(torch.where(binding, anchor, 0.0), torch.where(binding, offset, 0.0))


# ---- The operators


def threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool, shards: Shards | None = None
) -> tuple[Tensor, Tensor]:
    """As the reference; of rows of which x (..., m) may be the part of one process, the same on all of them."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:  # n = 0, or no rows
        if check:
            check_empty(k)
        return k.new_zeros(batch, device=x.device), k.new_zeros(batch, device=x.device)
    which, items = KINDS[kind], which_scores(x, KINDS[kind]).reshape(-1, n)
    k, scale = (v.to(x.device).reshape(-1) for v in (k, scale))
    span = row_range(items, shards)
    if check:
        _check(x, k, scale, softness, which, span, shards)
    rows = Rows(items, k, scale, Link.find(link), which, reductions(shards))
    anchor, offset = solve(rows, span, compute_dtype(x))
    return anchor.reshape(batch), offset.reshape(batch)


def which_scores(x: Tensor, kind: Kind) -> Tensor:
    """What is compared with the threshold, in float64."""
    return kind.scores(x.detach()).double()


def _check(x: Tensor, k: Tensor, scale: Tensor, softness: str, kind: Kind, span: Span, shards: Shards | None) -> None:
    """ValueError for contents that no threshold can be found for."""
    if kind.absolute and bool((span.selected > 0).any()):
        row = int((span.selected > 0).nonzero()[0])
        raise ValueError(f"`x` must be finite (0 masks an entry), but row {row} of the flattened batch is not")
    check_contents(x.reshape(-1, x.shape[-1]), k, scale, softness, span, shards)


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool, shards: Shards | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference; of rows of which x (..., m) may be the part of one process."""
    scale = scale.to(x.device)
    at = Threshold(*threshold(x, k, scale, link, kind, softness, check, shards))
    return values(x, scale, at, Link.find(link), KINDS[kind]), *at


def values(x: Tensor, scale: Tensor, at: Threshold, link: Link, kind: Kind) -> Tensor:
    """The map of x with these thresholds; not differentiable."""
    a = which_scores(x, kind)
    y = items_of(a, scale, at, link, kind).value if kind.absolute else kind.distances(a, at, scale, link)
    if not kind.absolute:
        y = link.log_value(y) if kind.log else link.value(y)
    return (y * x.sign() if kind.absolute else y).to(x.dtype).contiguous()


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, kind: str, with_scale: bool,
    shards: Shards | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the reference; of rows of which x (..., m) may be the part of one process."""
    at, which = Threshold(anchor, offset), KINDS[kind]
    grads = derivative(x, scale.to(x.device), at, grad, None, Link.find(link), which, reductions(shards))
    return grads[0].to(x.dtype).contiguous(), grads[1], grads[2] if with_scale else torch.zeros_like(grads[1])


def threshold_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    at, found = Threshold(anchor, offset), Link.find(link)
    grad_x, grad_k, grad_scale = derivative(x, scale.to(x.device), at, None, grad, found, KINDS[kind], WHOLE)
    return grad_x.to(x.dtype).contiguous(), grad_k, grad_scale
