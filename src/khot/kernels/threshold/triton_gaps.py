"""Gaps in Triton: where a threshold lies between two items that do not determine it, or whose tails all underflow.

:mod:`khot.kernels.threshold.gaps` derives the formulas for exponential tails. A link without tails above its cap has
the threshold just above the items that reach the cap; one without any tails has it anywhere between these and the
others.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from ..gpu.tools import add4, reciprocal
from .triton_rows import distances, load, over, partial_sums, scores
from .triton_search import DONE, SPECIAL, rounded


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
def relative_slopes(x, left, right, inverse, LINK: tl.constexpr):
    """Slopes relative to that of the edge of the gap on the same side, ``left`` or ``right``; which items are above."""
    above = x >= over(right)
    beyond = tl.where(above, x - over(right), over(left) - x) * over(inverse)
    slope = tl.exp(-tl.where(beyond == beyond, beyond, float("inf")))  # NaN if both are infinite
    if LINK.compact:  # among capped entries, only those next to the cap reach it when t rises
        slope = tl.where(above & (beyond > 0), 0.0, slope)
    return slope, above


@triton.jit
def _sides(x_rows, g_rows, n, left, right, inverse, LINK: tl.constexpr, TILE: tl.constexpr):
    """Sums of relative slopes above the gap and below it, and of their products with g."""
    above, below = partial_sums(TILE), partial_sums(TILE)
    pull_above, pull_below = partial_sums(TILE), partial_sums(TILE)
    for start in range(0, n, TILE.size):
        slope, is_above = relative_slopes(scores(x_rows, start, n, TILE), left, right, inverse, LINK)
        pull = slope * load(g_rows, start, n, 0.0, TILE)
        above += tl.sum(tl.where(is_above, slope, 0.0), 0)
        below += tl.sum(tl.where(is_above, 0.0, slope), 0)
        pull_above += tl.sum(tl.where(is_above, pull, 0.0), 0)
        pull_below += tl.sum(tl.where(is_above, 0.0, pull), 0)
    return tl.reduce((above, below, pull_above, pull_below), 1, add4)


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
    else:
        above, below, _, _ = _sides(x_rows, x_rows, n, left, right, inverse, LINK, TILE)
        if LINK.compact:  # the items next to the cap make room for the tails of the others
            share = below * tl.exp((left - right) * inverse) / above
            new, place = right, share * (1.0 - 0.5 * share)  # log(1 + share)
        else:
            new = rounded(0.5 * left + 0.5 * right, TILE)
            place = 0.5 * (((right - new) - (new - left)) * inverse + tl.log(below / above))
    anchor, off = tl.where(special, new, anchor), tl.where(special, place * LINK.unit, off)
    return anchor, off, tl.where(state == SPECIAL, DONE, state)


@triton.jit
def weigh_sides(x_rows, g_rows, n, left, right, inverse, LINK: tl.constexpr, TILE: tl.constexpr):
    """The factors that turn relative slopes above and below into shares, and the sums of shares times g."""
    above, below, pull_above, pull_below = _sides(x_rows, g_rows, n, left, right, inverse, LINK, TILE)
    on_above, on_below = above > 0, below > 0
    if LINK.compact:  # t is next to the cap of the nearest entry above; without entries below nothing holds it
        on_above, on_below = on_above & on_below, on_below & ~on_above
    part = tl.where(on_above & on_below, 0.5, 1.0)
    of_above, of_below = tl.where(on_above, part / above, 0.0), tl.where(on_below, part / below, 0.0)
    return of_above, of_below, pull_above * of_above, pull_below * of_below
