"""Gaps in Triton: where a threshold lies between two items that do not determine it, or whose tails all underflow.

Tails and slopes on either side are computed relative to the slope of the nearest item there, from differences of
scores, because z has lost their digits. The sums of the tails on both sides are equal. This gives the position of the
threshold, and the relative weights of the slopes on the two sides. A link without tails above its cap has the threshold
just above the items that reach the cap; one without any tails has it anywhere between these and the others.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from ..gpu.tools import add3, reciprocal
from .triton_rows import any_row, distances, load, over, partial_sums, scores
from .triton_search import DONE, SPECIAL, rounded

MAX_STEPS = tl.constexpr(8)


@triton.jit
def _larger_smaller_sum(a0, a1, a2, b0, b1, b2):
    return tl.maximum(a0, b0), tl.minimum(a1, b1), a2 + b2


@triton.jit
def neighbours(x_rows, n, anchor, off, inverse, cut, TILE: tl.constexpr):
    """The largest entry with z below a cut, the smallest of the others, and their number, at t."""
    left = partial_sums(TILE) - float("inf")
    right, count = -left, partial_sums(TILE).to(tl.int32)
    for start in range(0, n, TILE.size):
        x = scores(x_rows, start, n, TILE)
        above = distances(x, anchor, off, inverse) >= cut
        left = tl.maximum(left, tl.max(tl.where(above, -float("inf"), x), 0))
        right = tl.minimum(right, tl.min(tl.where(above, x, float("inf")), 0))
        count += tl.sum(above.to(tl.int32), 0)
    return tl.reduce((left, right, count), 1, _larger_smaller_sum)


@triton.jit
def relative_slopes(x, left, right, first, last, inverse, LINK: tl.constexpr):
    """Slopes and tails of a tile, relative to the slope of the edge of the gap on the same side, and which are above.

    The edges are ``left`` and ``right``, with the distances ``last`` and ``first`` from t.
    """
    above, finite = x >= over(right), tl.abs(x) < float("inf")
    beyond = tl.where(finite, tl.where(above, x - over(right), over(left) - x) * over(inverse), float("inf"))
    edge = tl.where(above, over(first), over(last))
    slope = tl.exp(LINK.log_decay(edge, beyond, LINK))
    if LINK.compact:  # among capped entries, only those next to the cap reach it when t rises
        slope = tl.where(above, tl.where(beyond > 0, 0.0, 1.0), slope)
        tail = slope
    else:
        tail = tl.where(slope > 0, slope / LINK.hazard(edge + beyond, 0.0, LINK), 0.0)
    return slope, tail, above


@triton.jit
def _sides(
    x_rows, g_rows, n, left, right, first, last, inverse, LINK: tl.constexpr, WITH_G: tl.constexpr, TILE: tl.constexpr
):
    """Sums over the entries above the gap of relative slopes, tails and slopes times g, and over those below it."""
    slope_above, tail_above, pull_above = partial_sums(TILE), partial_sums(TILE), partial_sums(TILE)
    slope_below, tail_below, pull_below = slope_above, tail_above, pull_above
    for start in range(0, n, TILE.size):
        x = scores(x_rows, start, n, TILE)
        slope, tail, above = relative_slopes(x, left, right, first, last, inverse, LINK)
        slope_above += tl.sum(tl.where(above, slope, 0.0), 0)
        slope_below += tl.sum(tl.where(above, 0.0, slope), 0)
        tail_above += tl.sum(tl.where(above, tail, 0.0), 0)
        tail_below += tl.sum(tl.where(above, 0.0, tail), 0)
        if WITH_G:
            pull = slope * load(g_rows, start, n, 0.0, TILE)
            pull_above += tl.sum(tl.where(above, pull, 0.0), 0)
            pull_below += tl.sum(tl.where(above, 0.0, pull), 0)
    above, below = (slope_above, tail_above, pull_above), (slope_below, tail_below, pull_below)
    return tl.reduce(above, 1, add3), tl.reduce(below, 1, add3)


@triton.jit
def settle(x_rows, n, anchor, off, state, whole, scale, LINK: tl.constexpr, TILE: tl.constexpr):
    """Anchor, offset and state, after the treatment of ``SPECIAL`` rows, whose threshold is between two neighbours."""
    special, inverse = state == SPECIAL, reciprocal(scale)
    if LINK.compact:
        cut = 0.5 * LINK.cap * LINK.unit
    else:
        cut = 0.0
    left, right, count = neighbours(x_rows, n, anchor, off, inverse * LINK.unit, cut, TILE)
    if LINK.compact and LINK.reaches_zero:  # zeros and ones do not determine t: it is moved away from both ends
        room = (right - left) * inverse - LINK.cap
        special = special & (count == whole) & (room >= 0)
        new, place = left, tl.minimum(0.5 * room, 1.0)
    elif LINK.compact:  # the items next to the cap make room for the tails of the others
        gap = (right - left) * inverse
        above, below = _sides(x_rows, x_rows, n, left, right, gap, 0.0 * gap, inverse, LINK, False, TILE)
        share = below[1] * tl.exp(-gap) / above[1]
        new, place = right, share * (1.0 - 0.5 * share)  # log(1 + share)
    else:
        new = rounded(0.5 * left + 0.5 * right, TILE)
        place = _balance(x_rows, n, new, left, right, special, inverse, LINK, TILE)
    anchor, off = tl.where(special, new, anchor), tl.where(special, place * LINK.unit, off)
    return anchor, off, tl.where(state == SPECIAL, DONE, state)


@triton.jit
def _balance(x_rows, n, anchor, left, right, special, inverse, LINK: tl.constexpr, TILE: tl.constexpr):
    """Where between two neighbours the tails below and above are equal, in scales from the anchor.

    Found by Newton's method for the logarithm of their ratio.
    """
    first_end, last_end = (right - anchor) * inverse, (left - anchor) * inverse
    off, steps, going = 0.5 * (first_end + last_end), 0, special
    off = tl.where(tl.abs(off) < float("inf"), off, 0.0)  # an end may be at infinity
    while any_row(going) & (steps < MAX_STEPS):
        first, last = first_end - off, off - last_end
        above, below = _sides(x_rows, x_rows, n, left, right, first, last, inverse, LINK, False, TILE)
        log_ratio = LINK.log_decay(first, last - first, LINK) + tl.log(below[1] / above[1])
        move = log_ratio / (below[0] / below[1] + above[0] / above[1])
        going = going & (tl.abs(move) < float("inf")) & (tl.abs(move) > (first + last) * TILE.eps)
        off = tl.maximum(tl.minimum(tl.where(going, off + move, off), first_end), last_end)
        steps += 1
    return off


@triton.jit
def weigh_sides(x_rows, g_rows, n, left, right, first, last, inverse, LINK: tl.constexpr, TILE: tl.constexpr):
    """The factors that turn relative slopes above and below into shares, and the sums of shares times g."""
    above, below = _sides(x_rows, g_rows, n, left, right, first, last, inverse, LINK, True, TILE)
    # The tails on both sides have the same sum; a side without entries contributes nothing.
    of_above = tl.where(above[1] > 0, 1.0 / above[1], 0.0)
    of_below = tl.where(below[1] > 0, 1.0 / below[1], 0.0)
    if LINK.compact:  # t is next to the cap of the nearest entry above; without entries below nothing holds it
        of_below = tl.where(above[1] > 0, 0.0, of_below)
        of_above = tl.where(below[1] > 0, of_above, 0.0)
    total = above[0] * of_above + below[0] * of_below
    of_above = tl.where(total > 0, of_above / total, 0.0)
    of_below = tl.where(total > 0, of_below / total, 0.0)
    return of_above, of_below, above[2] * of_above, below[2] * of_below
