r"""The threshold of any row, exactly, in plain torch and float64.

Newton's method in plain sums solves ordinary rows. The others go to a guarded search in t, on the exact values of
doubles, with the residual in logarithms of :mod:`khot.kernels.threshold.residual`. If scores are many scales from 0, a
double t does not determine z, and two neighbouring doubles may not locate the root. The search then continues in the
offset c of t = anchor + c * sigma from the nearest item. Then x - anchor is exact for the items near t, and z keeps its
digits.
"""

import torch
from torch import Tensor
from torch.linalg import vecdot

from ..exact.newton import MAX_STEPS, Evaluation, Root, arithmetic_mean, guarded_newton
from ..exact.reductions import WHOLE, Whole
from ..exact.row_slabs import IN_CACHE, in_cache
from ..exact.rows import Span, Threshold, compute_dtype, row_range
from ..links.base import Link
from .contents import check_contents, check_empty
from .derivatives import MapRows, derivative
from .kinds import KINDS, Kind, inverse_of, root_of, shrink
from .residual import EPS, FARTHEST, TOLERANCE, Rows, evaluate, plain_step

PLAIN_STEPS = 8  # in plain sums
FIRST_STEPS = 8  # of the rows that these leave, before the remaining rows are separated again
# In scales: the precision of thresholds from plain sums, and the last step of Newton's method there, about its root.
PRECISION = {torch.float32: (2.0**-40, 2.0**-20), torch.float64: (2.0**-48, TOLERANCE)}
GUESSES, LOWEST_GUESS = 3, 0.05  # of a magnitude: how often the guess is repeated; its lower limit, in means
TINY = torch.finfo(torch.float64).tiny
WIDENINGS = 14  # the most widenings of a bracket; each squares its width in scales, and 2^1024 is beyond all doubles
MARGIN = 2.0**-10  # relative, added to a bracket for rounding and inaccurate inverses
ANCHORINGS = 3  # searches in the offset, repeated if another item turns out to be nearer
LARGE_SCALE, LARGE_SCORE = 2.0**500, 2.0**1022  # above these, differences might overflow, so rows are scaled down
SHRINKAGE, QUARTER = 2.0**-600, 0.25  # the former for large scales only; a quarter is enough for scores
LEAST_SHARE = 1e-300


# ---- The search


def solve(rows: Rows, span: Span, dtype: torch.dtype) -> Threshold:
    """The thresholds of rows with valid contents, with anchors that are numbers of this dtype."""
    wide, far = rows.softness > LARGE_SCALE, torch.maximum(-span.lowest, span.highest) > LARGE_SCORE
    if bool((wide | far).any()) and not rows.kind.grows:
        factor = torch.ones_like(rows.softness).masked_fill(far, QUARTER).masked_fill(wide, SHRINKAGE)
        small = rows._replace(x=rows.x * factor.unsqueeze(-1), softness=rows.softness * factor)
        at = solve(small, span._replace(lowest=span.lowest * factor, highest=span.highest * factor), torch.float64)
        anchor = _rounded(at.anchor / factor, dtype)
        return Threshold(anchor, at.offset + (at.anchor - anchor * factor) / small.softness)
    none, everything = rows.k <= span.selected, rows.k >= span.selected + span.finite
    if rows.kind.grows:
        everything = rows.k >= rows.over.sum((rows.x > 0).sum(-1).double())[0]
    wrong = ~((rows.k >= span.selected) & (rows.k <= span.selected + span.finite)) | span.nan
    share = ((rows.k - span.selected) / span.finite.clamp(min=1)).clamp(LEAST_SHARE, 1 - 2.0**-53)
    start, skipped = _first_guess(rows, span, share), none | everything | wrong
    t, rest, done = _search_plainly(rows, span, start, skipped, PRECISION[dtype])
    at = _stored(rows, t, rest, dtype)
    together = max(1, IN_CACHE // max(1, rows.over.length(rows.x)))
    for steps in (FIRST_STEPS, MAX_STEPS):
        for hard in (~done).nonzero().squeeze(-1).split(together):
            if len(hard):
                some = rows.take(hard)
                ends = _bracket(some, span.lowest[hard], span.highest[hard], share[hard])
                again, done[hard] = _search(some, at.anchor[hard], *ends, steps, dtype)
                at.anchor[hard], at.offset[hard] = again.anchor, again.offset
    at = _at_the_ends(rows, span, at, none, everything)
    return Threshold(at.anchor, at.offset.masked_fill(wrong, torch.nan))


def _first_guess(rows: Rows, span: Span, share: Tensor) -> Tensor:
    """The threshold if scores were normal and F a normal distribution function of the same moments."""
    centre, variance = span.moments or _moments(rows, span)
    middle, spread = rows.link.start(rows.x.device)
    quantile = torch.special.ndtri(share)

    def guess(scale: Tensor) -> Tensor:
        return centre - middle * scale - (variance + spread * scale.square()).sqrt() * quantile

    if not rows.kind.grows:
        return guess(rows.softness)
    t = centre
    for _ in range(GUESSES):
        t = torch.maximum(guess(rows.scale(t)), LOWEST_GUESS * centre)
    return t


def _search_plainly(
    rows: Rows, span: Span, start: Tensor, skipped: Tensor, precision: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method in plain sums: t, its distance from the root, and which rows need no other search."""
    t, rest, found = start, torch.zeros_like(start), skipped
    settled = precision[0 if rows.link.compact else 1]
    for _ in range(PLAIN_STEPS):
        t = torch.where(found, t, t / (1 - (rest / t).clamp(max=0.75)) if rows.kind.grows else t + rest)
        step, there = plain_step(rows, span, t, *precision)
        found, rest = there | skipped, rows.moved(t, step)
        if bool((found | (step.abs() <= settled)).all()):
            break
    near = found | (step.abs() < 1)
    return torch.where(near, t, start), rest, found


def _moments(rows: Rows, span: Span) -> tuple[Tensor, Tensor]:
    masked = not bool((span.finite == rows.x.shape[-1]).all())

    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.where(x.isfinite(), x, 0.0).double() if masked else x.double()
        return x.sum(-1), vecdot(x, x)

    n, (total, squares) = span.finite.clamp(min=1), in_cache(sums, rows.x)
    mean = total / n
    return mean, (squares / n - mean.square()).clamp(min=0)


def _inside(guess: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(guess.nan_to_num(0.0), high), low)


def _bracket(rows: Rows, lowest: Tensor, highest: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ends at which g is positive and negative, and how many scales beyond the items the root may be."""
    link, largest = rows.link, torch.finfo(torch.float64).max
    if rows.kind.grows:
        (smallest,) = rows.over.max(torch.where(rows.x > 0, -rows.x, -torch.inf).amax(-1))
        # At `low` every nonzero entry is capped: half of it is above t, half above the scale at t.
        low = torch.minimum(-smallest / 2, (-smallest / rows.softness / 2) ** link.q).clamp(min=TINY)
        return low, torch.maximum(highest, low), torch.zeros_like(low)
    # F is the share everywhere if all items are equal, so the root lies within its quantile of the extreme items.
    width = (1 + MARGIN) * link.inverse(share).abs().nan_to_num(0.0) + 1
    for _ in range(WIDENINGS):  # the inverse of a user's link may be rough
        low = (lowest - width * rows.softness - 4 * EPS * lowest.abs()).clamp(-largest, largest)
        high = (highest + width * rows.softness + 4 * EPS * highest.abs()).clamp(-largest, largest)
        if link.link_id is not None:
            break
        nothing = torch.zeros_like(low)
        at_low, at_high = (evaluate(rows, Threshold(end, nothing))[1] for end in (low, high))
        missed = ((at_low < 0) & (low > -largest)) | ((at_high > 0) & (high < largest))
        if not bool(missed.any()):
            break
        width = torch.where(missed, width * width.clamp(min=4), width)
    return low, high, width


def _search(
    rows: Rows, start: Tensor, low: Tensor, high: Tensor, width: Tensor, steps: int, dtype: torch.dtype
) -> tuple[Threshold, Tensor]:
    """The threshold from a search in t and, if steps are left, in the offset; and which rows are done."""
    nothing = torch.zeros_like(start)

    def at_threshold(t: Tensor) -> Evaluation:
        step, g, found = evaluate(rows, Threshold(t, nothing))
        return rows.moved(t, step), g.clamp(-1 / EPS, 1 / EPS), found

    middle = _geometric_mean if rows.kind.grows else arithmetic_mean
    ends = (low, high), (1 + nothing, nothing - 1)
    root = guarded_newton(at_threshold, _inside(start, low, high), *ends, nothing > 0, None, middle, steps)
    at = _stored(rows, root.t, root.rest, dtype)
    if steps == MAX_STEPS:
        lost = (~root.found).nonzero().squeeze(-1)
        if len(lost):
            again = _search_offset(rows.take(lost), Root(*(v[lost] for v in root)), width[lost], dtype)
            at.anchor[lost], at.offset[lost] = again.anchor, again.offset
        if not bool(root.done.all()):
            raise RuntimeError(f"found no threshold: {rows.link} must increase from 0 to 1, and must not be NaN")
    if rows.link.compact and rows.link.reaches_zero:
        at, free = _leave_kink(rows, at)
        return at, root.found | free
    return at, root.found


def _stored(rows: Rows, t: Tensor, rest: Tensor, dtype: torch.dtype) -> Threshold:
    """The threshold t + rest, with an anchor of this dtype."""
    anchor = _rounded(t, dtype)
    if rows.kind.grows:  # the offset is at most 0 then, and t at least 0
        higher = torch.nextafter(anchor.to(dtype), torch.tensor(torch.inf, dtype=dtype, device=anchor.device)).double()
        anchor = torch.where((anchor - t < rest) & higher.isfinite(), higher, anchor)
    return Threshold(anchor, ((t - anchor) + rest) / rows.scale(t))


def _geometric_mean(low: Tensor, high: Tensor) -> Tensor:
    return torch.where(high > 4 * low, low.sqrt() * high.sqrt(), arithmetic_mean(low, high))


def _rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The finite number of a dtype next to t, in float64."""
    largest = torch.finfo(dtype).max
    return t.clamp(-largest, largest).to(dtype).double()


def _search_offset(rows: Rows, root: Root, width: Tensor, dtype: torch.dtype) -> Threshold:
    """The thresholds between two neighbouring doubles, from the distances to the nearest item.

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

        def at_offset(c: Tensor, at: Tensor = anchor) -> Evaluation:
            step, g, found = evaluate(rows, Threshold(at, c))
            return step, g.clamp(-1 / EPS, 1 / EPS), found

        one, nothing = torch.ones_like(t), torch.zeros_like(t, dtype=torch.bool)
        found = guarded_newton(at_offset, _inside((t - anchor) / scale, low, high), (low, high), (one, -one), nothing)
        offset = found.t + found.rest
        t = anchor + offset * scale
        if rows.kind.grows:
            t = t.clamp(min=TINY)  # a smaller one may round to a negative number, at which there is no scale
    nearer = _rounded(t, dtype)
    rest = offset + (0.5 * anchor - 0.5 * nearer) * (2 / scale)
    better = (rest.abs() < offset.abs()) & (not rows.kind.grows)
    return Threshold(torch.where(better, nearer, anchor), torch.where(better, rest, offset))


def _leave_kink(rows: Rows, at: Threshold) -> tuple[Threshold, Tensor]:
    """Moves the thresholds of masks of zeros and ones away from the ends of their range; returns which these are.

    For magnitudes, whose scale depends on the threshold, it is the largest zero, which rounding cannot bring back.
    """
    left, right, count = rows.neighbours(rows.distances(at) > 0.5)
    if rows.kind.grows:
        room = (right - left) * (1 / rows.softness) * inverse_of(root_of(left.clamp(min=0), rows.link.q)) - 1
        free, beyond = (count == rows.k) & (room >= 0) & (left > 0), torch.zeros_like(room)
    else:
        room = (0.5 * right - 0.5 * left) * (2 / rows.softness) - 1
        free, beyond = (count == rows.k) & (room >= 0), (0.5 * room).clamp(max=1)
        if rows.link.link_id is None:  # a user's own, whose ends may lie elsewhere than at 0 and 1
            free &= (rows.link.value(-beyond) == 0) & (rows.link.complement(1 + room - beyond) == 0)
    return Threshold(torch.where(free, left, at.anchor), torch.where(free, beyond, at.offset)), free


def _at_the_ends(rows: Rows, span: Span, at: Threshold, none: Tensor, everything: Tensor) -> Threshold:
    """Sets the thresholds of rows that have nothing or everything in the mask; for odd maps they are at least 0."""
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


def mask(
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    link: int,
    q: float,
    kind: str,
    softness: str,
    check: bool,
    with_values: bool,
    *,
    over: Whole = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x (..., n), and the anchors and offsets of the thresholds t = anchor + offset * sigma.

    Args:
        x: Scores.
        k: Sum, float64 of the batch shape, like the scale; for signed masks a bound of the sum. Both may be on the CPU
            for x elsewhere, if they expand one number.
        scale: Positive softness s; sigma is s, or s t^(p-1) for magnitudes.
        link: The number of the link F, see :attr:`khot.kernels.links.base.Link.key`.
        q: Its parameter.
        kind: Name of the kind of map, see :mod:`khot.kernels.threshold.kinds`.
        softness: The name of the scale in errors.
        check: Whether bad contents raise a ValueError.
        with_values: Whether y is wanted; otherwise it is empty (..., 0).
        over: Sums over the items of a row, including those on other processes; all processes get the same result.
    """
    batch, n, which, found = x.shape[:-1], x.shape[-1], KINDS[kind], Link.find(link, q)
    k, scale = (v.to(x.device).reshape(-1) for v in (k, scale))
    if x.numel() > 0:
        rows = Rows(which.scores(x.detach()).reshape(-1, n), k, scale, found, which, over)
        span = row_range(rows.x, over)
        if check:
            check_contents(x, k, scale, softness, which, span, over)
        at = solve(rows, span, compute_dtype(x))
    else:
        if check:
            check_empty(k)
        at = Threshold(torch.zeros_like(k), torch.zeros_like(k))
    at, scale = Threshold(at.anchor.reshape(batch), at.offset.reshape(batch)), scale.reshape(batch)
    return values(x, scale, at, found, which) if with_values else x.new_empty((*batch, 0)), *at


def values(x: Tensor, scale: Tensor, at: Threshold, link: Link, kind: Kind) -> Tensor:
    """The map of x (..., n) with these thresholds; not differentiable."""

    def of_rows(x: Tensor, scale: Tensor, *numbers: Tensor) -> tuple[Tensor]:
        at, a = Threshold(*numbers), kind.scores(x).double()
        if kind.grows:
            y = _magnitudes(a, scale, at, link, kind)
        else:
            z = kind.distances(a, at, scale, link)
            y = link.log_value(z) + 0.0 if kind.log else link.value(z)  # 0, not -0
        return ((y * x.sign() if kind.absolute else y).to(x.dtype).contiguous(),)

    return in_cache(of_rows, x, scale, *at)[0]


def _magnitudes(a: Tensor, scale: Tensor, at: Threshold, link: Link, kind: Kind) -> Tensor:
    """The pooled magnitude t z^q, with t^(1/q) z = (a - t) / s, or the capped one, which is smaller beyond the cap."""
    (s, anchor), root = (v.unsqueeze(-1) for v in (scale, at.anchor)), root_of(kind.threshold(at, scale, link), link.q)
    pooled = ((a - anchor) / s - (at.offset * root).unsqueeze(-1)).clamp(min=0) ** link.q
    return torch.minimum(pooled, shrink(a, s, link.q)[0])


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
    *,
    over: Whole = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in x's dtype, dL/dk and dL/ds, zeros if that is not wanted, from dL/dy.

    A cotangent ``grad`` of the batch shape is that of the offsets.
    """
    of, which = Link.find(link, q), KINDS[kind]

    def of_rows(x: Tensor, grad: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        rows = MapRows.of(x, scale, Threshold(anchor, offset), of, which, over)
        of_y, of_offset = (None, grad) if grad.dim() < x.dim() else (grad, None)
        grad_x, grad_k, grad_scale = derivative(rows, of_y, of_offset, with_scale)
        return grad_x.to(x.dtype).contiguous(), grad_k, grad_scale

    rows = x, grad, scale.to(x.device), anchor, offset
    grad_x, grad_k, grad_scale = in_cache(of_rows, *rows) if over.is_whole else of_rows(*rows)
    return grad_x, grad_k, grad_scale
