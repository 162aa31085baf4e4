"""The search for rows that the fast path has flagged, in float64, as functions of Triton kernels.

Let u_i be the short tail of item i, F below t and 1 - F above it, and m the number of items above. Then
sum y - k = A - B with A = sum of the tails below + max(m - k, 0) and B = sum of the tails above + max(k - m, 0), both
sums of positive numbers whose logarithms never underflow. g = log A - log B falls in t from inf to -inf, and is almost
linear if tails are exponential, in wide gaps as well as near the root. The search has a bracket that each evaluation
narrows, a secant step in g, and bisection if that fails. It runs first in t, and then in the offset from the item next
to t, so that z keeps all its digits however large |x| / s is. A compact link has no tails above its cap.

Contents are checked here, too: the fast path does not solve rows with invalid contents.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from ..exact.rows import FARTHEST
from ..gpu.tools import FARTHEST_64, LARGEST_64, add3
from ..links.base_triton import log_short_tail
from .triton_gaps import settle
from .triton_rows import any_row, distances, partial_sums, scores
from .triton_search import SPECIAL

MAX_STEPS, ANCHORINGS = tl.constexpr(800), tl.constexpr(4)
FAR_OFF = tl.constexpr(0.5 * FARTHEST[torch.float64])  # an offset as good as infinite
FOUND = tl.constexpr(1e-15)  # a g that is only rounding
RELATIVE, SLACK = tl.constexpr(2.0**-50), tl.constexpr(2.0**-40)
LEAST_SHARE = tl.constexpr(1e-300)  # k / n below which quantiles do not change
HALF_EPS = tl.constexpr(2.0**-53)


@triton.jit
def _ends_of(a0, a1, b0, b1):
    return tl.minimum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _span(x_rows, n, TILE: tl.constexpr):
    """Numbers of finite and of +inf entries, whether there is a NaN, smallest and largest finite entry."""
    lowest = partial_sums(TILE) + float("inf")
    highest, count = -lowest, partial_sums(TILE).to(tl.int32)
    selected, wrong = count, count
    for start in range(0, n, TILE.size):
        x = scores(x_rows, start, n, TILE)
        finite = tl.abs(x) < float("inf")
        count += tl.sum(finite.to(tl.int32), 0)
        selected += tl.sum((x == float("inf")).to(tl.int32), 0)
        wrong += tl.sum((x != x).to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(finite, x, float("inf")), 0))
        highest = tl.maximum(highest, tl.max(tl.where(finite, x, -float("inf")), 0))
    count, selected, wrong = tl.reduce((count, selected, wrong), 1, add3)
    lowest, highest = tl.reduce((lowest, highest), 1, _ends_of)
    return count, selected, wrong > 0, lowest, highest


@triton.jit
def _log_add(a, b):
    """log(exp a + exp b)."""
    larger = tl.maximum(a, b)
    return tl.where(larger > -float("inf"), larger + tl.log(1.0 + tl.exp(tl.minimum(a, b) - larger)), larger)


@triton.jit
def _log_sum(log_sum, logs):
    """log of a sum, with the entries of a tile added to it."""
    larger = tl.maximum(tl.max(tl.max(logs, 2), 0), log_sum)
    base = tl.where(larger > -float("inf"), larger, 0.0)
    return base + tl.log(tl.exp(log_sum - base) + tl.sum(tl.sum(tl.exp(logs - base[None, :, None]), 0), 1))


@triton.jit
def _log_balance(x_rows, n, anchor, off, inverse, whole, rest, q, LINK: tl.constexpr, TILE: tl.constexpr):
    """g = log A - log B at a threshold; 0 if both vanish, as everywhere in a gap of a compact link."""
    below, above, count = 0.0 * inverse - float("inf"), 0.0 * inverse - float("inf"), 0 * whole
    for start in range(0, n, TILE.size):
        z = distances(scores(x_rows, start, n, TILE), anchor, off, inverse)
        tail = log_short_tail(z, q, LINK)
        if LINK.compact:
            up = z >= LINK.cap
        else:
            up = z > 0
            above = _log_sum(above, tl.where(up, tail, -float("inf")))
        below = _log_sum(below, tl.where(up, -float("inf"), tail))
        count += tl.sum(tl.sum(up.to(tl.int32), 0), 1)
    excess = (count - whole).to(tl.float64) - rest
    a = _log_add(below, tl.log(tl.maximum(excess, 0.0)))
    b = _log_add(above, tl.log(tl.maximum(-excess, 0.0)))
    return tl.where(a == b, 0.0, a - b)


@triton.jit
def _ordinal(t):
    """The number of a double in their order; see :func:`khot.kernels.exact.newton.ordinal_mean`."""
    bits = t.to(tl.int64, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFFFFFFFFFF), bits)


@triton.jit
def _of_ordinal(number):
    size = tl.abs(number).to(tl.float64, bitcast=True)
    return tl.where(number < 0, -size, size)


@triton.jit
def _ordinal_mean(low, high):
    a, b = _ordinal(low), _ordinal(high)
    return _of_ordinal((a >> 1) + (b >> 1) + (a & b & 1))


@triton.jit
def _next_anchor(x_rows, n, t, off, TILE: tl.constexpr):
    """The finite entry next to t; the one above or below t if the offset from t is as good as infinite."""
    up, down = off >= FAR_OFF, off <= -FAR_OFF
    below = tl.where(down, _of_ordinal(_ordinal(t) - 1), t)
    left = partial_sums(TILE) - float("inf")
    right = -left
    for start in range(0, n, TILE.size):
        x = scores(x_rows, start, n, TILE)
        finite, above = tl.abs(x) < float("inf"), x > below[None, :, None]
        left = tl.maximum(left, tl.max(tl.where(finite & (~above), x, -float("inf")), 0))
        right = tl.minimum(right, tl.min(tl.where(finite & above, x, float("inf")), 0))
    right, left = tl.reduce((right, left), 1, _ends_of)
    item = tl.where(down | ((t - left <= right - t) & (~up)), left, right)
    return tl.where(tl.abs(item) < float("inf"), item, t)


@triton.jit
def _as_offset(end, side, size):
    """An end of a bracket in scales from an item, with a margin for the rounding of numbers of this size."""
    end = tl.minimum(tl.maximum(end, -FARTHEST_64), FARTHEST_64)
    return end + side * (1.0 + tl.minimum(tl.maximum(tl.abs(end), size), FARTHEST_64)) * SLACK


@triton.jit
def _beyond(end, off, side):
    """The offset of an end in t; the largest doubles stay farthest."""
    return tl.where(side * end >= 0.5 * LARGEST_64, side * FARTHEST_64, off)


@triton.jit
def _search(x_rows, n, low, high, inverse, whole, rest, q, LINK: tl.constexpr, TILE: tl.constexpr):
    """Anchor and offset of the root of g in [low, high], of the only row of a program.

    The search runs in t until the bracket is as narrow as a scale, and then in the offset from the item next to t. It
    begins again if t turns out to be next to another item, because a long offset rounds.
    """
    infinite = tl.full(low.shape, float("inf"), low.dtype)
    t, left, right = 0.5 * low + 0.5 * high, infinite, -infinite
    anchor, side, steps = low, 0.0 * low, 0  # an anchor is set before it is used
    in_offset, anchorings = low > high, 0
    while any_row(low < high) & (steps < MAX_STEPS):
        at, off = tl.where(in_offset, anchor, t), tl.where(in_offset, t, 0.0)
        g = _log_balance(x_rows, n, at, off, inverse, whole, rest, q, LINK, TILE)
        again = side * g > 0  # the same end moves twice: the other counts half (Illinois)
        left, right = tl.where(again & (g < 0), 0.5 * left, left), tl.where(again & (g > 0), 0.5 * right, right)
        low, left = tl.where(g >= 0, t, low), tl.where(g >= 0, g, left)
        high, right = tl.where(g <= 0, t, high), tl.where(g <= 0, g, right)
        side = tl.where(g > 0, 1.0 + 0.0 * g, -1.0)
        middle = 0.5 * low + 0.5 * high
        width = tl.maximum(tl.where(in_offset, 0.0, 1.0 / inverse), tl.abs(middle) * RELATIVE)
        done = (tl.abs(g) <= FOUND) | (high - low <= width) | (middle <= low) | (middle >= high)
        secant = low + (high - low) * (left / (left - right))
        middle = tl.where(steps % 8 == 7, _ordinal_mean(low, high), middle)
        usable = (secant > low) & (secant < high) & (steps % 4 != 3)
        t = tl.where(done, tl.where(tl.abs(left) <= tl.abs(right), low, high), tl.where(usable, secant, middle))
        steps += 1
        if any_row(done):
            away = tl.where(in_offset, t, 0.0)
            far = tl.abs(away) >= FAR_OFF  # the root is next to another item
            place = tl.where(in_offset & (~far), anchor + t / inverse, tl.where(in_offset, anchor, t))
            place = tl.minimum(tl.maximum(place, -0.5 * LARGEST_64), 0.5 * LARGEST_64)  # t may be beyond all scores
            item = _next_anchor(x_rows, n, place, away, TILE)
            nearer = (~in_offset) | ((item != anchor) & (anchorings < ANCHORINGS))
            moved = (anchor - item) * inverse
            first = tl.where(in_offset, t + moved, _beyond(low, (low - item) * inverse, -1.0))
            last = tl.where(in_offset, t + moved, _beyond(high, (high - item) * inverse, 1.0))
            first, last = tl.where(far, -FARTHEST_64, first), tl.where(far, FARTHEST_64, last)
            size = tl.where(in_offset & (~far), tl.abs(moved), 0.0)
            low = tl.where(nearer, _as_offset(first, -1.0, size), t)
            high = tl.where(nearer, _as_offset(last, 1.0, size), t)
            anchor, t = tl.where(nearer, item, anchor), tl.where(nearer, 0.5 * low + 0.5 * high, t)
            left, right, side = infinite, -infinite, 0.0 * side
            in_offset, anchorings = low <= high, anchorings + 1
    return anchor, t


@triton.jit
def solve(x_rows, n, k, scale, q, LINK: tl.constexpr, TILE: tl.constexpr):
    """Anchor, offset in the link's unit, and whether contents are valid; NaN if they are not."""
    count, selected, wrong, lowest, highest = _span(x_rows, n, TILE)
    whole, number = (k + 0.5).to(tl.int32), tl.maximum(count, 1).to(tl.float64)
    p, complement = (k - selected.to(tl.float64)) / number, ((count + selected).to(tl.float64) - k) / number
    normal = (scale >= TILE.factor * TILE.scales[0]) & (scale <= TILE.factor * TILE.scales[1])
    sound = (p >= 0) & (complement >= 0) & normal & (~wrong)
    if any_row(sound & (p > 0) & (complement > 0)):
        quantile = LINK.quantile(tl.maximum(p, LEAST_SHARE), tl.maximum(complement, HALF_EPS), q, LINK)
        reach, rest = (tl.abs(quantile) * 1.01 + 1.0) * scale, k - whole.to(tl.float64)
        low = tl.maximum(lowest - reach - tl.abs(lowest) * RELATIVE, -0.5 * LARGEST_64)
        high = tl.minimum(highest + reach + tl.abs(highest) * RELATIVE, 0.5 * LARGEST_64)
        anchor, off = _search(x_rows, n, low, high, 1.0 / scale, whole, rest, q, LINK, TILE)
        if (LINK.compact and LINK.reaches_zero) & any_row(rest == 0):
            anchor, off, _ = settle(x_rows, n, anchor, off, 0 * whole + SPECIAL, whole, scale, LINK, TILE)
    else:  # beyond the last item, as far as F needs
        anchor, off = tl.where(p <= 0, highest, lowest), tl.where(p <= 0, LINK.reach, -LINK.reach + 0.0 * p)
        anchor = tl.where(sound, tl.where(count > 0, anchor, 0.0), float("nan"))
    return anchor, off * LINK.unit, sound
