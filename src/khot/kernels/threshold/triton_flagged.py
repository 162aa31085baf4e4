"""Rows that the fast path has flagged: their threshold, mask and derivative in float64, by one plain kernel each.

The kernels are launched after every call, a program for each row, and end at once where no flag is set.

Search. Let u_i be the short tail of item i, F below t and 1 - F above it, and m the number of items above. Then
sum y - k = A - B with A = sum of the tails below + max(m - k, 0) and B = sum of the tails above + max(k - m, 0), both
sums of positive numbers whose logarithms never underflow. g = log A - log B falls in t from inf to -inf, and is close
to linear where tails are exponential, in wide gaps as well as near the root. A bracket that each evaluation narrows, a
secant step in g, bisection where that does not do: first in t, and then in the offset from the item next to t, so that
z keeps all its digits however large |x| / s is. A compact link has no tails above its cap.

Derivative. Where all slopes underflow, t lies in a gap that takes digits of x from z. Then the slopes on one side are
taken relative to that of the nearest item there, from differences of scores, and the two sides weigh as the tails
require, whose sums are equal: k is the number of items above.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from ..links.base import Link
from ..links.base_triton import log_derivative, log_short_tail, tails_and_slopes, triton_link, value
from ..triton_tools import FARTHEST_64, LARGEST_64
from .triton_rows import TINY_64, UNDERFLOW_32, Numbers, converted, is_normal, per_row

MAX_STEPS = tl.constexpr(400)
FOUND = tl.constexpr(1e-15)  # a g that is nothing but rounding
RELATIVE, SLACK = tl.constexpr(2.0**-50), tl.constexpr(2.0**-40)
LEAST_SHARE = tl.constexpr(1e-300)  # k / n, below which quantiles tell no more than from there
HALF_EPS = tl.constexpr(2.0**-53)
UNSOUND = tl.constexpr(1)
SHRUNK, GROWN = tl.constexpr(2.0**-32), tl.constexpr(2.0**32)
BLOCK, WARPS = 256, 4


@triton.jit
def load_block(x_ptr, start, n, other, BLOCK: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    return converted(tl.load(x_ptr + cols, mask=cols < n, other=other), tl.float64)


@triton.jit
def distances(x, anchor, off, twice):
    """z, from twice the inverse of the scale: differences of halves do not overflow."""
    return (0.5 * x - 0.5 * anchor) * twice - off


@triton.jit
def _finite(z):
    return tl.minimum(tl.maximum(z, -FARTHEST_64), FARTHEST_64)


@triton.jit
def _span_of(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, tl.minimum(a2, b2), tl.maximum(a3, b3)


@triton.jit
def _span(x_ptr, n, BLOCK: tl.constexpr):
    """Number of the finite entries and of +inf, smallest and largest finite entry, and whether there is a NaN."""
    count, selected, nan = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    lowest, highest = tl.full((), float("inf"), tl.float64), tl.full((), -float("inf"), tl.float64)
    for start in range(0, n, BLOCK):
        x = load_block(x_ptr, start, n, -float("inf"), BLOCK)
        finite = tl.abs(x) < float("inf")
        first, last = tl.where(finite, x, float("inf")), tl.where(finite, x, -float("inf"))
        finites, infinites, first, last = tl.reduce(
            (finite.to(tl.int32), (x == float("inf")).to(tl.int32), first, last), 0, _span_of
        )
        count, selected = count + finites, selected + infinites
        lowest, highest = tl.minimum(lowest, first), tl.maximum(highest, last)
        nan = tl.maximum(nan, tl.max((x != x).to(tl.int32), 0))
    return count, selected, lowest, highest, nan > 0


@triton.jit
def _log_add(a, b):
    """log(exp a + exp b)."""
    larger = tl.maximum(a, b)
    return tl.where(larger > -float("inf"), larger + tl.log(1.0 + tl.exp(tl.minimum(a, b) - larger)), larger)


@triton.jit
def _log_sum(log_sum, logs):
    """log of a sum and of what a block adds to it."""
    larger = tl.maximum(tl.max(logs, 0), log_sum)
    base = tl.where(larger > -float("inf"), larger, 0.0)
    return base + tl.log(tl.exp(log_sum - base) + tl.sum(tl.exp(logs - base), 0))


@triton.jit
def _log_balance(x_ptr, n, anchor, off, whole, rest, twice, q, LINK: tl.constexpr, BLOCK: tl.constexpr):
    """g = log A - log B at t = anchor + off * scale; 0 where both are nothing, as all of a gap of a compact link is."""
    below, above = tl.full((), -float("inf"), tl.float64), tl.full((), -float("inf"), tl.float64)
    count = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        z = distances(load_block(x_ptr, start, n, -float("inf"), BLOCK), anchor, off, twice)
        if LINK.compact:
            up = z >= LINK.cap
            below = _log_sum(below, tl.where(up, -float("inf"), log_short_tail(z, q, LINK)))
        else:
            up, tail = z > 0, log_short_tail(z, q, LINK)
            below = _log_sum(below, tl.where(up, -float("inf"), tail))
            above = _log_sum(above, tl.where(up, tail, -float("inf")))
        count += tl.sum(up.to(tl.int32), 0)
    excess = (count - whole).to(tl.float64) - rest
    a = _log_add(below, tl.log(tl.maximum(excess, 0.0)))
    b = _log_add(above, tl.log(tl.maximum(-excess, 0.0)))
    return tl.where(a == b, 0.0, a - b)


@triton.jit
def _ordinal(t):
    """The number of a double in their order; see :func:`khot.kernels.newton.ordinal_mean`."""
    bits = t.to(tl.int64, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFFFFFFFFFF), bits)


@triton.jit
def _ordinal_mean(low, high):
    a, b = _ordinal(low), _ordinal(high)
    middle = (a >> 1) + (b >> 1) + (a & b & 1)
    size = tl.abs(middle).to(tl.float64, bitcast=True)
    return tl.where(middle < 0, -size, size)


@triton.jit
def _nearest_item(x_ptr, n, t, BLOCK: tl.constexpr):
    """The finite entry next to t."""
    item, distance = tl.zeros((), tl.float64), tl.full((), float("inf"), tl.float64)
    for start in range(0, n, BLOCK):
        x = load_block(x_ptr, start, n, float("inf"), BLOCK)
        away = tl.where(tl.abs(x) < float("inf"), tl.abs(0.5 * x - 0.5 * t), float("inf"))
        least = tl.min(away, 0)
        found = tl.max(tl.where(away == least, x, -float("inf")), 0)
        item, distance = tl.where(least < distance, found, item), tl.minimum(least, distance)
    return item


@triton.jit
def _search(x_ptr, n, low, high, whole, rest, twice, q, LINK: tl.constexpr, BLOCK: tl.constexpr):
    """Anchor and offset of the root of g in [low, high].

    The search runs in t until the bracket is as narrow as a scale, and then in the offset from the item next to t.
    """
    t, left, right = 0.5 * low + 0.5 * high, low * 0.0 + float("inf"), low * 0.0 - float("inf")
    anchor, side, steps = low * 0.0, low * 0.0, 0
    in_offset, going = tl.full((), 0, tl.int1), tl.full((), 1, tl.int1)
    while going & (steps < MAX_STEPS):
        g = _log_balance(
            x_ptr, n, tl.where(in_offset, anchor, t), tl.where(in_offset, t, 0.0), whole, rest, twice, q, LINK, BLOCK
        )
        again = side * g > 0  # the same end moves twice: the other counts half (Illinois)
        left, right = tl.where(again & (g < 0), 0.5 * left, left), tl.where(again & (g > 0), 0.5 * right, right)
        low, left = tl.where(g >= 0, t, low), tl.where(g >= 0, g, left)
        high, right = tl.where(g <= 0, t, high), tl.where(g <= 0, g, right)
        side = tl.where(g > 0, 1.0 + 0.0 * side, -1.0)
        middle = 0.5 * low + 0.5 * high
        width = tl.where(in_offset, 0.0, 2.0 / twice)
        closed = (high - low <= tl.maximum(width, tl.abs(middle) * RELATIVE)) | (middle <= low) | (middle >= high)
        done = (tl.abs(g) <= FOUND) | closed
        secant = low + (high - low) * (left / (left - right))
        middle = tl.where(steps % 8 == 7, _ordinal_mean(low, high), middle)
        usable = (secant > low) & (secant < high) & (steps % 4 != 3)
        t = tl.where(done, tl.where(tl.abs(left) <= tl.abs(right), low, high), tl.where(usable, secant, middle))
        steps, going = steps + 1, ~(done & in_offset)
        if done & ~in_offset:
            anchor = _nearest_item(x_ptr, n, t, BLOCK)
            low, high = _offset_of(low, anchor, -1.0, twice), _offset_of(high, anchor, 1.0, twice)
            t, left, right = 0.5 * low + 0.5 * high, low * 0.0 + float("inf"), low * 0.0 - float("inf")
            in_offset, side = ~in_offset, 0.0 * side
    return anchor, t


@triton.jit
def _offset_of(end, anchor, side, twice):
    """An end of a bracket in t as one in offsets, with room for rounding; none has been looked for beyond doubles."""
    off = _finite(distances(end, anchor, 0.0, twice))
    off = tl.where(side * end >= LARGEST_64, side * FARTHEST_64, off)
    return off + side * (1.0 + tl.abs(off)) * SLACK


@triton.jit
def edges(x_ptr, n, anchor, off, twice, cut, BLOCK: tl.constexpr):
    """The largest finite entry with z below a cut, the smallest of the other finite ones, and the number of others."""
    left, right = tl.full((), -float("inf"), tl.float64), tl.full((), float("inf"), tl.float64)
    count = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        x = load_block(x_ptr, start, n, -float("inf"), BLOCK)
        above = distances(x, anchor, off, twice) >= cut
        left = tl.maximum(left, tl.max(tl.where(above, -float("inf"), x), 0))
        right = tl.minimum(right, tl.min(tl.where(above, x, float("inf")), 0))
        count += tl.sum(above.to(tl.int32), 0)
    return left, right, count


@triton.jit
def _leave_kink(x_ptr, n, anchor, off, twice, whole, BLOCK: tl.constexpr):
    """Where the mask consists of zeros and ones that leave the threshold free, puts it away from either end."""
    left, right, count = edges(x_ptr, n, anchor, off, twice, 0.5, BLOCK)
    room = (0.5 * right - 0.5 * left) * twice - 1.0
    free = (count == whole) & (room >= 0)
    return tl.where(free, left, anchor), tl.where(free, tl.minimum(0.5 * room, 1.0), off)


@triton.jit
def _solve(x_ptr, n, k, scale, q, LINK: tl.constexpr, BLOCK: tl.constexpr):
    """Anchor, offset, and whether contents are in order; NaN if they are not."""
    count, selected, lowest, highest, nan = _span(x_ptr, n, BLOCK)
    whole, number = (k + 0.5).to(tl.int32), tl.maximum(count, 1).to(tl.float64)
    p, complement = (k - selected.to(tl.float64)) / number, ((count + selected).to(tl.float64) - k) / number
    sound = (p >= 0) & (complement >= 0) & (~nan) & is_normal(scale, x_ptr.dtype.element_ty)
    if sound & (p > 0) & (complement > 0):
        quantile = LINK.quantile(tl.maximum(p, LEAST_SHARE), tl.maximum(complement, HALF_EPS), q, LINK)
        reach = (tl.abs(quantile) * 1.01 + 1.0) * scale
        low = tl.maximum(lowest - reach - tl.abs(lowest) * RELATIVE, -LARGEST_64)
        high = tl.minimum(highest + reach + tl.abs(highest) * RELATIVE, LARGEST_64)
        rest = k - whole.to(tl.float64)
        anchor, off = _search(x_ptr, n, low, high, whole, rest, 2.0 / scale, q, LINK, BLOCK)
        if (LINK.compact and LINK.reaches_zero) & (rest == 0):
            anchor, off = _leave_kink(x_ptr, n, anchor, off, 2.0 / scale, whole, BLOCK)
    else:  # beyond the last item, as far as F needs
        reach = tl.full((), LINK.reach, tl.float64)
        anchor, off = tl.where(p <= 0, highest, lowest), tl.where(p <= 0, reach, -reach)
        anchor = tl.where(sound, tl.where(count > 0, anchor, 0.0), float("nan"))
    return anchor, off, sound


@triton.jit(do_not_specialize=["stride_k", "stride_scale", "stride_x", "n", "rows"])
def _flagged_fwd(
    x_ptr, y_ptr, at, sizes, k_number: tl.float64, scale_number: tl.float64, stride_k, stride_scale, stride_x, rows, n,
    q_number: tl.float64, LINK: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, if it is flagged."""
    row = tl.program_id(0).to(tl.int64)
    anchor_ptr, offset_ptr, flag_ptr = at
    if tl.load(flag_ptr + row) == 0:
        return
    k, scale = per_row(row, sizes[0], k_number, stride_k), per_row(row, sizes[1], scale_number, stride_scale)
    q, x_ptr = tl.full((), q_number, tl.float64), x_ptr + row * stride_x
    anchor, off, sound = _solve(x_ptr, n, k, scale, q, LINK, BLOCK)
    tl.store(anchor_ptr + row, anchor)
    tl.store(offset_ptr + row, off)
    if not sound:
        tl.store(flag_ptr + rows, UNSOUND)
    if KIND != "threshold":
        twice = 2.0 / per_row(row, sizes[1], scale_number, stride_scale)  # again, rather than kept through all that
        for start in range(0, n, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = distances(load_block(x_ptr, start, n, -float("inf"), BLOCK), anchor, off, twice)
            y = value(z * LINK.unit, q, LINK, KIND == "log_mask")
            tl.store(y_ptr + row * n + cols, converted(y, y_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def _terms(x, g, anchor, off, twice, q, LINK: tl.constexpr, LOG: tl.constexpr):
    """z, F' and g times the derivative of the result."""
    z = distances(x, anchor, off, twice)
    tail, w = tails_and_slopes(z * LINK.unit, q, LINK)
    if LOG:
        d = tl.where(x > -float("inf"), g * log_derivative(z * LINK.unit, w, tail, LINK), 0.0)
    else:
        d = g * w
    return z, w, d


@triton.jit
def _relative_slopes(x, left, right, first, last, twice, LINK: tl.constexpr):
    """Slopes of a block above and below a gap, relative to those of the items at its edges, and tails likewise.

    The edges are ``left`` and ``right``, with the distances ``last`` and ``first`` from t.
    """
    finite, above = tl.abs(x) < float("inf"), x >= right
    beyond = tl.where(finite, tl.where(above, 0.5 * x - 0.5 * right, 0.5 * left - 0.5 * x) * twice, 0.0)
    start = tl.where(above, first, last)
    if LINK.compact:  # of capped entries only those next to the cap reach it when t rises
        slope = tl.where(above, tl.where(beyond > 0, 0.0, 1.0), tl.exp(LINK.log_decay(start, beyond, LINK)))
        tail = slope
    else:
        slope = tl.exp(LINK.log_decay(start, beyond, LINK))
        tail = slope / LINK.hazard(start + beyond, 0.0, LINK)
    slope, tail = tl.where(finite, slope, 0.0), tl.where(finite, tail, 0.0)
    return slope, tail, above


@triton.jit
def _weights_of_sides(x_ptr, g_ptr, n, left, right, first, last, twice, LINK: tl.constexpr, BLOCK: tl.constexpr):
    """What relative slopes above and below a gap are multiplied by to be shares, and sum of share * g above and below."""
    zero = tl.zeros((), tl.float64)
    slope_above, slope_below, tail_above, tail_below, pull_above, pull_below = zero, zero, zero, zero, zero, zero
    for start in range(0, n, BLOCK):
        x, g = load_block(x_ptr, start, n, -float("inf"), BLOCK), load_block(g_ptr, start, n, 0.0, BLOCK)
        slope, tail, above = _relative_slopes(x, left, right, first, last, twice, LINK)
        slope_above += tl.sum(tl.where(above, slope, 0.0), 0)
        slope_below += tl.sum(tl.where(above, 0.0, slope), 0)
        tail_above += tl.sum(tl.where(above, tail, 0.0), 0)
        tail_below += tl.sum(tl.where(above, 0.0, tail), 0)
        pull_above += tl.sum(tl.where(above, slope * g, 0.0), 0)
        pull_below += tl.sum(tl.where(above, 0.0, slope * g), 0)
    # The tails on both sides have the same sum; those of a side without entries are nothing.
    of_above = tl.where(tail_above > 0, 1.0 / tail_above, 0.0)
    of_below = tl.where(tail_below > 0, 1.0 / tail_below, 0.0)
    if LINK.compact:  # t is next to the cap of the nearest entry above; without entries below nothing holds it
        of_below = tl.where(tail_above > 0, 0.0, of_below)
        of_above = tl.where(tail_below > 0, of_above, 0.0)
    total = slope_above * of_above + slope_below * of_below
    of_above, of_below = tl.where(total > 0, of_above / total, 0.0), tl.where(total > 0, of_below / total, 0.0)
    return of_above, of_below, pull_above * of_above, pull_below * of_below


@triton.jit
def _grad_scale(lever, scale):
    """dL/dscale from 2^-32 sum z dL/dz, of which neither z nor the scale let a product overflow on the way."""
    root = tl.sqrt(scale)
    return -lever / root * GROWN / root


@triton.jit(do_not_specialize=["stride_scale", "stride_x", "stride_g", "n"])
def _flagged_bwd(
    x_ptr, g_ptr, out_ptr, at, scale_ptr, scale_number: tl.float64, stride_scale, stride_x, stride_g, n,
    q_number: tl.float64, LINK: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, if it is flagged."""
    row = tl.program_id(0).to(tl.int64)
    anchor_ptr, offset_ptr, grad_k_ptr, grad_scale_ptr, flag_ptr = at
    if tl.load(flag_ptr + row) == 0:
        return
    scale, q = per_row(row, scale_ptr, scale_number, stride_scale), tl.full((), q_number, tl.float64)
    anchor, off = tl.load(anchor_ptr + row), tl.load(offset_ptr + row)
    x_ptr, g_ptr, out_ptr = x_ptr + row * stride_x, g_ptr + row * stride_g, out_ptr + row * n
    twice, weight, direct, direct_below = 2.0 / scale, 0.0 * off, 0.0 * off, 0.0 * off
    for start in range(0, n, BLOCK):
        x, g = load_block(x_ptr, start, n, -float("inf"), BLOCK), load_block(g_ptr, start, n, 0.0, BLOCK)
        z, w, d = _terms(x, g, anchor, off, twice, q, LINK, LOG)
        weight += tl.sum(w, 0)
        direct += tl.sum(d, 0)
        direct_below += tl.sum(tl.where(z > 0, 0.0, d), 0)
    held = tl.maximum(weight, TINY_64)
    mean, left, right, first, last, of_above, of_below = direct / held, off, off, off, off, off, off
    grad_k, far = mean, False
    if not (LINK.heavy or (LINK.compact and LINK.reaches_zero)):
        far = weight < UNDERFLOW_32
        if far:
            cut = LINK.cap if LINK.compact else 0.0
            left, right, _ = edges(x_ptr, n, anchor, off, twice, cut, BLOCK)
            first, last = distances(right, anchor, off, twice), -distances(left, anchor, off, twice)
            of_above, of_below, above, below = _weights_of_sides(
                x_ptr, g_ptr, n, left, right, first, last, twice, LINK, BLOCK
            )
            if LOG:
                mean, grad_k = direct, above + direct_below / held
            else:
                mean, grad_k = above + below, above + below
    tl.store(grad_k_ptr + row, grad_k)
    lever = tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x, g = load_block(x_ptr, start, n, -float("inf"), BLOCK), load_block(g_ptr, start, n, 0.0, BLOCK)
        z, w, d = _terms(x, g, anchor, off, twice, q, LINK, LOG)
        if LOG:
            if far:
                slope, _, above = _relative_slopes(x, left, right, first, last, twice, LINK)
                w = slope * tl.where(above, of_above, of_below)
            grad = d - w * mean
        else:
            grad = w * (g - mean)
        tl.store(out_ptr + cols, converted(grad / scale, out_ptr.dtype.element_ty), mask=cols < n)
        lever += tl.sum(grad * (_finite(z) * SHRUNK), 0)
    tl.store(grad_scale_ptr + row, _grad_scale(lever, scale))


def launch_flagged(
    x: Tensor, y: Tensor | None, at: tuple[Tensor, ...], numbers: Numbers, link: Link, kind: str
) -> None:
    """Solves the flagged rows of x (rows, n): into y, unless ``kind`` is "threshold", and ``at``."""
    rows, n = x.shape
    _flagged_fwd[(rows,)](
        x, y, at, *numbers, x.stride(0), rows, n, float(link.q), LINK=triton_link(link), KIND=kind, BLOCK=BLOCK,
        num_warps=WARPS,
    )  # fmt: skip


def launch_flagged_backward(
    x: Tensor, g: Tensor, grad_x: Tensor, at: tuple[Tensor, ...], scale: tuple[Tensor | int, float, int], link: Link, kind: str
) -> None:
    """The derivatives of the flagged rows of x (rows, n); ``at`` are anchor, offset, dL/dk, dL/dscale and flags."""
    rows, n = x.shape
    _flagged_bwd[(rows,)](
        x, g, grad_x, at, *scale, x.stride(0), g.stride(0), n, float(link.q),
        LINK=triton_link(link), LOG=kind == "log_mask", BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
