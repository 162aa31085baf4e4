r"""The threshold of any row, exactly, in plain torch and float64, with one residual and one guarded search.

A first search runs in t, on the exact values of doubles, with the residual of :mod:`khot.kernels.threshold.residual`.
If scores are many scales from 0, a double t does not determine z, and two neighbouring doubles may not locate the root.
The search then continues in the offset c of t = anchor + c * sigma from the nearest item. Then x - anchor is exact for
the items near t, and z keeps its digits.
"""

import torch
from torch import Tensor

from ..exact.newton import MAX_STEPS, Evaluation, Root, arithmetic_mean, guarded_newton
from ..exact.reductions import WHOLE, Whole
from ..exact.rows import Span, Threshold, compute_dtype, row_range
from ..links.base import Link
from .contents import check_contents, check_empty
from .derivatives import MapRows, derivative, items_of
from .kinds import KINDS, Kind, inverse_of, root_of
from .residual import EPS, FARTHEST, Rows, evaluate

FIRST_STEPS = 8  # on all rows, before the remaining rows are separated
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
    """Which rows have nothing or everything in the mask, and for the others a first guess inside a bracket.

    Also returns how many scales beyond the items the root may be.
    """
    link, finite = rows.link, span.finite.clamp(min=1)
    share = ((rows.k - span.selected) / finite).clamp(LEAST_SHARE, 1 - 2.0**-53)
    none = rows.k <= span.selected
    centre, variance = span.moments or _moments(rows.x, finite)
    if rows.kind.grows:
        (nonzero,) = rows.over.sum((rows.x > 0).sum(-1).double())
        (smallest,) = rows.over.max(torch.where(rows.x > 0, -rows.x, -torch.inf).amax(-1))
        # At `low` every nonzero entry is capped: half of it is above t, half above the scale at t.
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
    """Ends at which g is positive and negative, widened until it is: the inverse of a user's link may be rough."""
    largest = torch.finfo(torch.float64).max
    for _ in range(WIDENINGS):
        low = (span.lowest - width * rows.softness - 4 * EPS * span.lowest.abs()).clamp(-largest, largest)
        high = (span.highest + width * rows.softness + 4 * EPS * span.highest.abs()).clamp(-largest, largest)
        if rows.link.link_id is not None:
            break
        nothing = torch.zeros_like(low)
        at_low, at_high = (evaluate(rows, Threshold(end, nothing))[1] for end in (low, high))
        missed = ((at_low < 0) & (low > -largest)) | ((at_high > 0) & (high < largest))
        if not bool(missed.any()):
            break
        width = torch.where(missed, width * width.clamp(min=4), width)
    return low, high, width


def _search(
    rows: Rows, start: Tensor, low: Tensor, high: Tensor, width: Tensor, done: Tensor, steps: int, dtype: torch.dtype
) -> tuple[Threshold, Tensor]:
    """The threshold from a search in t and, if steps are left, in the offset; and which rows are done."""
    nothing = torch.zeros_like(start)

    def at_threshold(t: Tensor) -> Evaluation:
        step, g, found = evaluate(rows, Threshold(t, nothing))
        return rows.moved(t, step), g.clamp(-1 / EPS, 1 / EPS), found

    middle = _geometric_mean if rows.kind.grows else arithmetic_mean
    root = guarded_newton(at_threshold, start, (low, high), (1 + nothing, nothing - 1), done, None, middle, steps)
    anchor = _rounded(root.t, dtype)
    if rows.kind.grows:  # the offset is at most 0 then, and t at least 0
        higher = torch.nextafter(anchor.to(dtype), torch.tensor(torch.inf, dtype=dtype, device=anchor.device)).double()
        anchor = torch.where((anchor - root.t < root.rest) & higher.isfinite(), higher, anchor)
    at = Threshold(anchor, ((root.t - anchor) + root.rest) / rows.scale(root.t))
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


def threshold(
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    link: int,
    q: float,
    kind: str,
    softness: str,
    check: bool,
    *,
    over: Whole = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Anchor and offset of the threshold t = anchor + offset * sigma of each row of x (..., n).

    Args:
        x: Scores.
        k: Sum, float64 of the batch shape, like the scale; for signed masks a bound of the sum.
        scale: Positive softness s; sigma is s, or s t^(p-1) for magnitudes.
        link: The number of the link F, see :attr:`khot.kernels.links.base.Link.key`.
        q: Its parameter.
        kind: Name of the kind of map, see :mod:`khot.kernels.threshold.kinds`.
        softness: The name of the scale in errors.
        check: Whether bad contents raise a ValueError.
        over: Sums over the items of a row, including those on other processes; all processes get the same result.
    """
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:  # n = 0, or no rows
        if check:
            check_empty(k)
        return k.new_zeros(batch, device=x.device), k.new_zeros(batch, device=x.device)
    which, items = KINDS[kind], KINDS[kind].scores(x.detach()).double().reshape(-1, n)
    k, scale = (v.to(x.device).reshape(-1) for v in (k, scale))
    span = row_range(items, over)
    if check:
        check_contents(x, k, scale, softness, which, span, over)
    rows = Rows(items, k, scale, Link.find(link, q), which, over)
    anchor, offset = solve(rows, span, compute_dtype(x))
    return anchor.reshape(batch), offset.reshape(batch)


def mask(
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    link: int,
    q: float,
    kind: str,
    softness: str,
    check: bool,
    *,
    over: Whole = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x (..., n), and anchors and offsets; the arguments are those of :func:`threshold`.

    k and scale may be on the CPU for x elsewhere, if they expand one number.
    """
    scale = scale.to(x.device)
    at = Threshold(*threshold(x, k, scale, link, q, kind, softness, check, over=over))
    return values(x, scale, at, Link.find(link, q), KINDS[kind]), *at


def values(x: Tensor, scale: Tensor, at: Threshold, link: Link, kind: Kind) -> Tensor:
    """The map of x with these thresholds; not differentiable."""
    if kind.absolute:
        y = items_of(MapRows.of(x, scale, at, link, kind)).value * x.sign()
    else:
        z = kind.distances(x.double(), at, scale, link)
        y = link.log_value(z) if kind.log else link.value(z)
    y = y.to(x.dtype)
    return (y + 0.0 if kind.log else y).contiguous()  # 0, not -0


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
    """dL/dx in x's dtype, dL/dk and dL/ds, zeros if that is not wanted, from dL/dy."""
    rows = MapRows.of(x, scale.to(x.device), Threshold(anchor, offset), Link.find(link, q), KINDS[kind], over)
    grad_x, grad_k, grad_scale = derivative(rows, grad, None)
    return grad_x.to(x.dtype).contiguous(), grad_k, grad_scale if with_scale else torch.zeros_like(grad_k)


def threshold_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: int, q: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in x's dtype, dL/dk and dL/ds from dL/d offset of the thresholds of masks; 0 if no slope holds one."""
    rows = MapRows.of(x, scale.to(x.device), Threshold(anchor, offset), Link.find(link, q), KINDS[kind])
    grad_x, grad_k, grad_scale = derivative(rows, None, grad)
    return grad_x.to(x.dtype).contiguous(), grad_k, grad_scale
