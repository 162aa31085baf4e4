"""The root finder of :mod:`khot.kernels.threshold` for one row, as functions of Triton kernels.

As in the reference, the threshold is a pair, t = high + off * scale, ``high`` a number of the elements' dtype. Usual
rows take a few unguarded Newton steps, all of whose arithmetic is that of the elements. What is left after them goes on
with a bracket and float64 numbers per row, which some devices have to emulate slowly. k is an integer and a rest, so
that m - k loses nothing.

A row and its scale are shrunk by a power of two, ``factor``, for which see :func:`shrinkage`.

For the first steps a row is in registers, ``tile`` (IN_REGISTERS), or is read from ``x_ptr`` in tiles of BLOCK at every
evaluation; for the others always the latter, since float64 numbers and a row together do not fit. Lanes beyond a row
hold -inf.

``LINK`` is the record of a link, see :mod:`khot.kernels.links.base_triton`, and ``q`` its parameter.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from ..links.base_triton import bounded, limit_of, tail_sums
from ..links.normal_triton import normal_quantile
from ..newton import NEAR
from ..triton_tools import farthest, inverse_scale, load_tile

COARSE = 2**-50  # relative, a few doubles
LARGE_SCALE = {torch.float32: 2.0**64, torch.float64: 2.0**500}  # above which t might overflow, and rows are shrunk
SHRINKAGE = {torch.float32: 2.0**-100, torch.float64: 2.0**-600}  # what it takes from small x is nothing to the scale

FIRST_STEPS = tl.constexpr(6)
NEWTON_STEPS = tl.constexpr(36)  # of each search, before it bisects the doubles
ROUNDS = tl.constexpr(4)  # searches: the first in t, the others in the offset from an anchor
MAX_STEPS = tl.constexpr(102 * 4)
GAP_STEPS = tl.constexpr(6)

ALMOST_ALL = tl.constexpr(1.0 - NEAR)
ALMOST_NONE = tl.constexpr(NEAR)
COARSELY = tl.constexpr(COARSE)
ROOM = tl.constexpr(2.0**-10)  # relative, that a bracket leaves to rough quantiles and to rounding
NEARER = tl.constexpr(0.9)  # by how much an anchor has to be, not to go back and forth
LEAST_SHARE = tl.constexpr(0.02)  # of a bracket that a cut takes off
LEAST_FRACTION = tl.constexpr(1e-300)  # k / n, below which quantiles tell no more than from there
HALF_EPS = tl.constexpr(2.0**-53)
SERIES_OF_ATANH = tl.constexpr(1e-3)  # up to which r^2 three terms are exact in float32

_SINGLE, _DOUBLE = torch.finfo(torch.float32), torch.finfo(torch.float64)
EPS_32, EPS_64 = tl.constexpr(_SINGLE.eps), tl.constexpr(_DOUBLE.eps)
UNDERFLOW_32, UNDERFLOW_64 = tl.constexpr(_SINGLE.tiny / _SINGLE.eps), tl.constexpr(_DOUBLE.tiny / _DOUBLE.eps)
TOLERANCE_32, TOLERANCE_64 = tl.constexpr(0.5 * _SINGLE.eps**0.5), tl.constexpr(0.5 * _DOUBLE.eps**0.5)
TINY_32, TINY_64 = tl.constexpr(_SINGLE.tiny), tl.constexpr(_DOUBLE.tiny)
MAX_32, MAX_64 = tl.constexpr(_SINGLE.max), tl.constexpr(_DOUBLE.max)
LARGE_32, LARGE_64 = tl.constexpr(LARGE_SCALE[torch.float32]), tl.constexpr(LARGE_SCALE[torch.float64])
SHRINKAGE_32, SHRINKAGE_64 = tl.constexpr(SHRINKAGE[torch.float32]), tl.constexpr(SHRINKAGE[torch.float64])


@triton.jit
def _eps(DTYPE: tl.constexpr):
    if DTYPE == tl.float64:
        return EPS_64
    else:
        return EPS_32


@triton.jit
def _underflow(DTYPE: tl.constexpr):
    """The smallest normal number divided by eps."""
    if DTYPE == tl.float64:
        return UNDERFLOW_64
    else:
        return UNDERFLOW_32


@triton.jit
def _tolerance(DTYPE: tl.constexpr):
    """A last step, in scales, after which quadratic convergence leaves about eps."""
    if DTYPE == tl.float64:
        return TOLERANCE_64
    else:
        return TOLERANCE_32


@triton.jit
def shrinkage(scale, DTYPE: tl.constexpr):
    """1/2, so that differences do not overflow, and much less where t might: then what it takes from x is nothing."""
    half = tl.full((), 0.5, tl.float64)
    if DTYPE == tl.float64:
        return tl.where(scale > LARGE_64, half * (2.0 * SHRINKAGE_64), half)
    else:
        return tl.where(scale > LARGE_32, half * (2.0 * SHRINKAGE_32), half)


@triton.jit
def largest(factor, DTYPE: tl.constexpr):
    """The largest number of a dtype, shrunk; an anchor is no larger."""
    if DTYPE == tl.float64:
        return (factor * MAX_64).to(DTYPE)
    else:
        return (factor * MAX_32).to(DTYPE)


@triton.jit
def distances(x, high, off, inv_scale):
    """z = (x - t) / scale."""
    return (x - high) * inv_scale - off


@triton.jit
def load_threshold(anchor_ptr, offset_ptr, row, scale, DTYPE: tl.constexpr):
    """high and off of a row, what to shrink its entries by, and the inverse of the scale so shrunk."""
    factor = shrinkage(scale, DTYPE)
    high = (tl.load(anchor_ptr + row) * factor).to(DTYPE)
    return high, tl.load(offset_ptr + row).to(DTYPE), factor, inverse_scale(scale * factor, DTYPE)


@triton.jit
def load_shrunk(x_ptr, start, n, factor, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return load_tile(x_ptr, start, n, BLOCK, DTYPE) * factor.to(DTYPE)


@triton.jit
def row_sums(x_ptr, n, high, off, factor, inv_scale, q, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """:func:`tail_sums` of n entries in memory."""
    above = tl.zeros((), tl.int32)
    signed, total, slope = tl.zeros((), tl.float64), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        x = load_shrunk(x_ptr, start, n, factor, BLOCK, DTYPE)
        m, s, u, w = tail_sums(distances(x, high, off, inv_scale), q, LINK)
        above += m
        signed += s.to(tl.float64)  # adding up many tiles in float32 would round too often
        total += u.to(tl.float64)
        slope += w.to(tl.float64)
    return above, signed, total, slope


@triton.jit
def _atanh(r):
    square = r * r
    series = r * (1.0 + square * (1.0 / 3.0 + 0.2 * square))
    return tl.where(square < SERIES_OF_ATANH, series, 0.5 * tl.log((1.0 + r) / (1.0 - r)))


@triton.jit
def judge(above, signed, total, slope, k_whole, k_rest, q, LINK: tl.constexpr, DTYPE: tl.constexpr):
    """The step in scales, the residual, whether t is the root, and whether it needs to be moved off a kink or gap.

    ``Link.newton_step``, ``_Rows.judge``, ``underflow`` and ``at_kink`` of the reference, in the dtype of the sums.
    """
    excess = (above - k_whole).to(signed.dtype) - k_rest
    residual = signed + excess
    if LINK.compact:
        step, found, special = _judge_compact(residual, excess, total, slope, k_whole, k_rest, q, LINK, DTYPE)
    else:
        step, found, special = _judge_smooth(residual, excess, signed, total, slope, DTYPE)
    return step, residual, found, special


@triton.jit
def _judge_compact(
    residual, excess, total, slope, k_whole, k_rest, q, LINK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Of a link whose kinks make the residual the measure, not the step; q is also its ``condition``."""
    step = LINK.newton_step(residual, excess, total, slope, k_whole.to(total.dtype) + k_rest, q, LINK)
    found = tl.abs(residual) <= (2.0 + q) * _eps(DTYPE) * (total + tl.abs(excess))
    if LINK.reaches_zero:
        leaving = (excess == 0) & (slope > 0)
        reaching = q * total >= slope * ALMOST_ALL
        reaching = reaching & (excess < 0) & (tl.abs(residual) <= total * ALMOST_NONE)
        special = (leaving | reaching) & (k_rest == 0)
    else:
        special = found & False  # its tail leaves the threshold no freedom
    step = tl.where(found, 0.0, step)  # a kink is where it is to be seen, not a step further
    return step, found | ((tl.abs(step) <= _eps(DTYPE)) & (slope > 0) & (excess < 0)), special


@triton.jit
def _judge_smooth(residual, excess, signed, total, slope, DTYPE: tl.constexpr):
    """Newton's method on log(A / B) = 2 atanh(R / (A + B)); in a gap that all tails cross with underflow, no step."""
    size = total + tl.abs(excess)
    ratio = residual / size
    step = _atanh(ratio) * (1.0 - ratio * ratio) / (1.0 - ratio * (signed / total)) * (size / slope)
    gap = (excess == 0) & (total < _underflow(DTYPE))
    step = tl.where(gap, float("nan"), step)
    return step, gap | (residual == 0) | (tl.abs(step) <= _tolerance(DTYPE)), gap


@triton.jit
def newton(
    x_ptr, tile, n, high, off, k_whole, k_rest, scale, factor, q,
    LINK: tl.constexpr, BLOCK: tl.constexpr, IN_REGISTERS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A few unguarded steps; returns the threshold, whether it is the root, and ``special``."""
    done, special = tl.full((), 0, tl.int1), tl.full((), 0, tl.int1)
    steps, inv_scale = tl.zeros((), tl.int32), inverse_scale(scale, DTYPE)
    while steps < FIRST_STEPS:
        if IN_REGISTERS:
            above, signed, total, slope = tail_sums(distances(tile, high, off, inv_scale), q, LINK)
        else:
            above, signed, total, slope = row_sums(x_ptr, n, high, off, factor, inv_scale, q, LINK, BLOCK, DTYPE)
        high, off, done, going, special = advance(
            high, off, above, signed, total, slope, k_whole, k_rest, scale, factor, q, LINK, DTYPE
        )
        steps = tl.where(going, steps + 1, FIRST_STEPS)
    return high, off, done, special


@triton.jit
def advance(
    high, off, above, signed, total, slope, k_whole, k_rest, scale, factor, q, LINK: tl.constexpr, DTYPE: tl.constexpr
):
    """One unguarded step: the threshold, whether it is the root now, whether to go on, and ``special``."""
    step, _, found, special = judge(above, signed, total, slope, k_whole, k_rest, q, LINK, DTYPE)
    legal = tl.abs(step) < float("inf")  # a gap has no such step
    part = off + tl.where(legal, step, 0.0).to(DTYPE)
    limit = largest(factor, DTYPE)
    new = tl.minimum(tl.maximum(high + part * scale.to(DTYPE), -limit), limit)
    off = part - (new - high) * inverse_scale(scale, DTYPE)
    legal = legal & (tl.abs(off) < float("inf"))
    done = found & legal
    return new, off, done, legal & (~done), special


@triton.jit
def _merge_spans(s0, c0, i0, l0, h0, s1, c1, i1, l1, h1):
    return s0 + s1, c0 + c1, i0 + i1, tl.minimum(l0, l1), tl.maximum(h0, h1)


@triton.jit
def tile_span(x):
    """Sum and number of the finite entries of a tile, number of +inf, smallest and largest finite entry.

    A NaN is none of these, and makes the sum NaN.
    """
    infinite = float("inf")
    finite = tl.abs(x) < infinite
    return tl.reduce(
        (
            tl.where(tl.abs(x) == infinite, 0.0, x),
            tl.where(finite, 1, 0),
            tl.where(x == infinite, 1, 0),
            tl.where(finite, x, infinite),
            tl.where(finite, x, -infinite),
        ),
        0,
        _merge_spans,
    )


@triton.jit
def row_span(x_ptr, n, factor, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """:func:`tile_span` of a row in memory, without the sum."""
    count, selected = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    lowest, highest = tl.full((), float("inf"), DTYPE), tl.full((), -float("inf"), DTYPE)
    for start in range(0, n, BLOCK):
        _, c, i, first, last = tile_span(load_shrunk(x_ptr, start, n, factor, BLOCK, DTYPE))
        count += c
        selected += i
        lowest = tl.minimum(lowest, first)
        highest = tl.maximum(highest, last)
    return count, selected, lowest, highest


@triton.jit
def first_guess(
    x, total, count, lowest, highest, p, complement, scale, q, centre, spread, LINK: tl.constexpr
):  # fmt: skip
    """Where the tile's mean and variance put the threshold, see the reference; in the tile's dtype.

    ``centre`` and ``spread`` are those of ``Link.start``.
    """
    mean = total / count.to(x.dtype)
    deviation = tl.where(tl.abs(x) < float("inf"), x - mean, 0.0)
    variance = tl.sum(deviation * deviation, 0) / count.to(x.dtype)
    own = spread * scale * scale
    offset = LINK.quantile(p, complement, q, LINK) * scale
    share = variance / (variance + own)
    shape = (offset - centre * scale) / tl.sqrt(own)
    quantile = shape + share * (normal_quantile(p, complement) - shape)
    guess = mean - centre * scale - quantile * tl.sqrt(variance + own)
    guess = tl.where(tl.abs(guess) < float("inf"), guess, mean)
    guess = tl.minimum(tl.maximum(guess, lowest - offset), highest - offset)
    return tl.where(tl.abs(guess) < float("inf"), guess, 0.0)


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
def _clamp(value, limit):
    return tl.minimum(tl.maximum(value, -limit), limit)


@triton.jit
def _nearest(t, factor, DTYPE: tl.constexpr):
    """The number of the dtype next to t, finite and in float64."""
    return _clamp(t, largest(factor, DTYPE).to(tl.float64)).to(DTYPE).to(tl.float64)


@triton.jit
def _propose(t, step, low, high, r_low, r_high, older, local):
    """Newton's next point, or a cut of the bracket where that is not to be trusted, and how far it may have gone."""
    proposal, size = t + step, tl.abs(step)
    share = tl.minimum(tl.maximum(r_low / (r_low - r_high), LEAST_SHARE), 1.0 - LEAST_SHARE)
    cut = tl.where(local % 2 == 0, (1.0 - share) * low + share * high, 0.5 * low + 0.5 * high)
    cut = tl.where(local < NEWTON_STEPS, cut, _ordinal_mean(low, high))
    trusted = (proposal > low) & (proposal < high) & (size <= 0.5 * older) & (local < NEWTON_STEPS)
    return tl.where(trusted, proposal, cut), tl.where(trusted, size, high - low)


@triton.jit
def _next_anchor(anchor, off, first, final, rounds, scale, factor, far, DTYPE: tl.constexpr):
    """The anchor of the next round, where in offsets from it that starts, and whether it is near enough to be one."""
    beyond = (tl.abs(off) > far) & (rounds > 0)
    new, start = anchor, 0.0 * off
    if rounds > 0:
        root = tl.where(beyond, tl.where(off > 0, final, first), anchor + off * scale)
        new = _nearest(root, factor, DTYPE)
        start = tl.where(beyond, start, (anchor - new) / scale + off)
    nearer = (tl.abs(start) < tl.abs(off) * NEARER) | beyond
    return new, start, (rounds == 0) | (nearer & (rounds < ROUNDS))


@triton.jit
def _first_bracket(lowest, highest, p, complement, scale, q, LINK: tl.constexpr):
    """The ends of where the root is, in t, and how many scales beyond the items that reaches."""
    quantile = LINK.quantile(tl.maximum(p, LEAST_FRACTION), tl.maximum(complement, HALF_EPS), q, LINK)
    width = tl.abs(quantile) * (1.0 + ROOM) + 1.0
    lowest, highest = lowest.to(tl.float64), highest.to(tl.float64)
    low = lowest - width * scale - tl.abs(lowest) * COARSELY
    return low, highest + width * scale + tl.abs(highest) * COARSELY, width


@triton.jit
def _bracket_around(anchor, first, final, width, scale, far):
    """A bracket in t as one in offsets from an anchor, with room for rounding."""
    low, high = _clamp((first - anchor) / scale, far), _clamp((final - anchor) / scale, far)
    return low - (tl.abs(low) * ROOM + width), high + (tl.abs(high) * ROOM + width)


@triton.jit
def _judge_row(
    x_ptr, n, anchor, off, k_whole, k_rest, scale, factor, q,
    LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """:func:`judge` of a row in memory, with float64 for anchor and offset."""
    above, signed, total, slope = row_sums(
        x_ptr, n, anchor.to(DTYPE), off.to(DTYPE), factor, inverse_scale(scale, DTYPE), q, LINK, BLOCK, DTYPE
    )
    return judge(above, signed, total, slope, k_whole, k_rest, q.to(tl.float64), LINK, DTYPE)


@triton.jit
def search(
    x_ptr, n, t, lowest, highest, p, complement, k_whole, k_rest, scale, factor, q,
    LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """:func:`khot.kernels.newton.guarded_newton` for one row: anchor, offset and ``special``, in float64.

    The first round runs in t; where two neighbouring doubles do not tell the root, those after it in the offset from an
    anchor, until that is the number next to the root.
    """
    k, far = k_whole.to(tl.float64) + k_rest, farthest(DTYPE)
    low, high, width = _first_bracket(lowest, highest, p, complement, scale, q, LINK)
    first, final, last, older = low, high, high - low, high - low  # first and final: low and high when t ends
    r_low, r_high = n - k, -k
    t = tl.where((t >= low) & (t <= high), t, 0.5 * low + 0.5 * high)
    anchor, off, unit = 0.0 * t, 0.0 * t, scale
    done, special = tl.full((), 0, tl.int1), tl.full((), 0, tl.int1)
    steps, local, rounds = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while (steps < MAX_STEPS) & (~done):
        if rounds == 0:
            anchor = _nearest(t, factor, DTYPE)
            off = _clamp((t - anchor) / scale, far)
        else:
            off = t
        step, residual, done, special = _judge_row(
            x_ptr, n, anchor, off, k_whole, k_rest, scale, factor, q, LINK, BLOCK, DTYPE
        )
        low, r_low = tl.where(residual > 0, t, low), tl.where(residual > 0, residual, r_low)
        high, r_high = tl.where(residual < 0, t, high), tl.where(residual < 0, residual, r_high)
        t, size = _propose(t, step * unit, low, high, r_low, r_high, older, local)
        older, last, local, steps = last, size, local + 1, steps + 1
        off = tl.where(done & (tl.abs(step) < float("inf")), off + step, off)
        closed = _ordinal(low) >= _ordinal(high) - 1  # their difference may overflow
        if (closed & (~done)) | (done & (rounds > 0)):  # on to the next round, if its anchor is nearer
            first, final = tl.where(rounds == 0, low, first), tl.where(rounds == 0, high, final)
            new, start, nearer = _next_anchor(anchor, off, first, final, rounds, scale, factor, far, DTYPE)
            done = ~nearer
            if nearer:
                anchor, t, unit = new, start, 0.0 * start + 1.0
                low, high = _bracket_around(new, first, final, width, scale, far)
                older, last, local, rounds = high - low, high - low, 0 * local, rounds + 1
    return anchor, off, special & done


@triton.jit
def _tile_neighbours(z, x, cut):
    """The largest entry of a tile whose z is not above a cut, the smallest whose is, and how many are."""
    above = z > cut
    left, right = tl.where(above, -float("inf"), x), tl.where(above, x, float("inf"))
    return tl.max(left, 0), tl.min(right, 0), tl.sum(tl.where(above, 1, 0), 0)


@triton.jit
def _neighbours(x_ptr, n, high, off, factor, inv_scale, cut, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """:func:`_tile_neighbours` of a row in memory, in float64."""
    left, right = tl.full((), -float("inf"), DTYPE), tl.full((), float("inf"), DTYPE)
    count = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        x = load_shrunk(x_ptr, start, n, factor, BLOCK, DTYPE)
        below, above, m = _tile_neighbours(distances(x, high, off, inv_scale), x, cut)
        left, right, count = tl.maximum(left, below), tl.minimum(right, above), count + m
    return left.to(tl.float64), right.to(tl.float64), count


@triton.jit
def leave_kink(x_ptr, n, anchor, off, k_whole, scale, factor, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Where the mask consists of zeros and ones that leave the threshold free, puts it away from either end."""
    left, right, count = _neighbours(
        x_ptr, n, anchor.to(DTYPE), off.to(DTYPE), factor, inverse_scale(scale, DTYPE), 0.5, BLOCK, DTYPE
    )
    room = (right - left) / scale - 1.0
    free = (count == k_whole) & (room >= 0)
    return tl.where(free, left, anchor), tl.where(free, tl.minimum(0.5 * room, 1.0), off)


@triton.jit
def _tile_balance(x, high, off, nearest, inv_scale, LINK: tl.constexpr):
    """Sums of signed tails, tails and slopes of a tile, divided by about the largest tail."""
    z = bounded(distances(x, high, off, inv_scale), LINK)
    tail, slope = LINK.shifted_tails(tl.abs(z), nearest, LINK)
    return tl.sum(tl.where(z > 0, -tail, tail), 0), tl.sum(tail, 0), tl.sum(slope, 0)


@triton.jit
def balance_gap(x_ptr, n, anchor, off, scale, factor, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The root in a gap where all tails underflow: they balance, seen up to a common factor."""
    inv_scale, far = inverse_scale(scale, DTYPE), farthest(DTYPE)
    left, right, _ = _neighbours(x_ptr, n, anchor.to(DTYPE), off.to(DTYPE), factor, inv_scale, 0.0, BLOCK, DTYPE)
    anchor = (0.5 * left + 0.5 * right).to(DTYPE).to(tl.float64)
    left_end, right_end = _clamp((left - anchor) / scale, far), _clamp((right - anchor) / scale, far)
    off = 0.5 * (left_end + right_end)
    high, steps = anchor.to(DTYPE), tl.zeros((), tl.int32)
    while steps < GAP_STEPS:
        low = off.to(DTYPE)
        nearest = tl.minimum(right_end - off, off - left_end).to(DTYPE)
        nearest = tl.minimum(tl.maximum(nearest, 0.0), limit_of(LINK, DTYPE))
        signed, total, slope = tl.zeros((), DTYPE), tl.zeros((), DTYPE), tl.zeros((), DTYPE)
        for start in range(0, n, BLOCK):
            x = load_shrunk(x_ptr, start, n, factor, BLOCK, DTYPE)
            s, u, w = _tile_balance(x, high, low, nearest, inv_scale, LINK)
            signed += s
            total += u
            slope += w
        move = (_atanh(signed / total) * (total / slope)).to(tl.float64)
        off = tl.where(tl.abs(move) < float("inf"), off + move, off)
        off = tl.maximum(tl.minimum(off, right_end), left_end)
        steps += 1
    return anchor, off


@triton.jit
def tile_root(
    tile, k, scale, factor, q, centre, spread, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """The root of a tile, shrunk like its scale, by unguarded steps from the first guess.

    Returns what :func:`newton` does, and whether contents but the scale are in order.
    """
    total, count, selected, lowest, highest = tile_span(tile)
    p, complement, none, everything = fractions(k, count, selected)
    least = _eps(DTYPE) * _eps(DTYPE)
    centre, spread = tl.full((), centre, DTYPE), tl.full((), spread, DTYPE)
    guess = first_guess(
        tile, total, tl.maximum(count, 1), lowest, highest, tl.maximum(p, least).to(DTYPE),
        tl.maximum(complement, least).to(DTYPE), scale.to(DTYPE), q, centre, spread, LINK,
    )  # fmt: skip
    whole, rest = split_k(k)
    high, off, done, special = newton(
        tile, tile, BLOCK, guess, 0.0 * guess, whole, rest.to(DTYPE), scale, factor, q, LINK, BLOCK, True, DTYPE
    )
    sound = (p >= 0) & (complement >= 0) & (total == total)
    return high, off, done & (~(none | everything)), special, sound


@triton.jit
def normal_scale(scale, DTYPE: tl.constexpr):
    """Whether a scale is a normal number of the dtype."""
    if DTYPE == tl.float64:
        return (scale >= TINY_64) & (scale <= MAX_64)
    else:
        return (scale >= TINY_32) & (scale <= MAX_32)


@triton.jit
def row_root(
    x_ptr, sample, n, k, scale, factor, q, centre, spread,
    LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The root of a row in memory by unguarded steps, from that of a sample of BLOCK of its entries."""
    share = BLOCK / n.to(tl.float64)
    high, off, _, _, _ = tile_root(sample, k * share, scale, factor, q, centre, spread, LINK, BLOCK, DTYPE)
    whole, rest = split_k(k)
    high, off, done, special = newton(
        x_ptr, sample, n, high, off, whole, rest.to(DTYPE), scale, factor, q, LINK, BLOCK, False, DTYPE
    )
    return high, off, done, special


@triton.jit
def split_k(k):
    """A float64 k as the nearest integer and a rest, which keeps its digits in float32."""
    whole = (k + 0.5).to(tl.int32)
    return whole, k - whole.to(tl.float64)


@triton.jit
def fractions(k, count, selected):
    """(k - selected) / count and its complement, and whether either is 0, in float64."""
    number = tl.maximum(count, 1).to(tl.float64)
    p = (k - selected.to(tl.float64)) / number
    complement = ((count + selected).to(tl.float64) - k) / number
    return p, complement, p <= 0, (complement <= 0) & (p > 0)


@triton.jit
def finish_row(
    x_ptr, n, k, scale, factor, q, high, low, done, special,
    LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The threshold of a row that the unguarded steps have not ``done`` or have left on a kink or in a gap."""
    k_whole, k_rest = split_k(k)
    anchor, off = high.to(tl.float64), low.to(tl.float64)
    if ~done:
        count, selected, lowest, highest = row_span(x_ptr, n, factor, BLOCK, DTYPE)
        lowest, highest = tl.where(count > 0, lowest, 0.0), tl.where(count > 0, highest, 0.0)
        p, complement, none, everything = fractions(k, count, selected)
        if none | everything:  # beyond the last item, as far as F needs
            reach = tl.full((), LINK.reach, tl.float64)
            anchor = tl.where(none, highest, lowest).to(tl.float64)
            off = tl.where(none, reach, -reach)
            special = tl.full((), 0, tl.int1)
        else:
            anchor, off, special = search(
                x_ptr, n, anchor + off * scale, lowest, highest, p, complement, k_whole, k_rest, scale, factor, q,
                LINK, BLOCK, DTYPE,
            )  # fmt: skip
    if special:
        if LINK.compact:
            anchor, off = leave_kink(x_ptr, n, anchor, off, k_whole, scale, factor, BLOCK, DTYPE)
        else:
            anchor, off = balance_gap(x_ptr, n, anchor, off, scale, factor, LINK, BLOCK, DTYPE)
    return anchor.to(DTYPE), off.to(DTYPE)
