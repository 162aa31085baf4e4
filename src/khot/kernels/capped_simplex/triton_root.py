"""The root finder of :mod:`khot.kernels.capped_simplex` for one row, as functions of Triton kernels.

As in the reference, the threshold is a pair, t = high + off * scale, ``high`` a number of the elements' dtype. Usual
rows take a few unguarded Newton steps, all of whose arithmetic is that of the elements. What is left after them goes on
with a bracket and float64 numbers per row, which some devices have to emulate slowly. k is an integer and a rest, so
that m - k loses nothing.

A row and its scale are shrunk by a power of two, ``factor``, for which see :func:`shrinkage`.

For the first steps a row is in registers, ``tile`` (IN_REGISTERS), or is read from ``x_ptr`` in tiles of BLOCK at every
evaluation; for the others always the latter, since float64 numbers and a row together do not fit. Lanes beyond a row
hold -inf.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from ..links.tails_triton import is_compact, is_power, is_smooth, shifted_tails, tail_sums

FIRST_STEPS = tl.constexpr(6)
NEWTON_STEPS = tl.constexpr(36)  # of each search, before it bisects the doubles
ROUNDS = tl.constexpr(4)  # searches: the first in t, the others in the offset from an anchor
MAX_STEPS = tl.constexpr(102 * 4)
GAP_STEPS = tl.constexpr(6)
NEAR = tl.constexpr(2.0**-18)
COARSE = tl.constexpr(2.0**-50)  # relative, a few doubles
REACH = tl.constexpr(800.0)  # of smooth links; 40 would do for the normal one


@triton.jit
def _eps(DTYPE: tl.constexpr):
    if DTYPE == tl.float64:
        return 2.220446049250313e-16
    else:
        return 1.1920929e-07


@triton.jit
def _underflow(DTYPE: tl.constexpr):
    """The smallest normal number divided by eps."""
    if DTYPE == tl.float64:
        return 1.0020841800044864e-292
    else:
        return 9.860761e-32


@triton.jit
def _tolerance(DTYPE: tl.constexpr):
    """Half the square root of eps: a last step, in scales, after which quadratic convergence leaves about eps."""
    if DTYPE == tl.float64:
        return 7.450580596923828e-09
    else:
        return 1.7263349e-04


@triton.jit
def standardise(x, high, low, inv_scale):
    return ((x - high) - low) * inv_scale


@triton.jit
def split_threshold(t, DTYPE: tl.constexpr):
    """A float64 t as high + low in DTYPE."""
    high = t.to(DTYPE)
    return high, (t - high.to(tl.float64)).to(DTYPE)


@triton.jit
def inverse_scale(scale, DTYPE: tl.constexpr):
    """1 / scale, finite, of a float64 scale."""
    limit = 1.7e308 if DTYPE == tl.float64 else 3.4e38
    return tl.minimum(1.0 / scale, limit).to(DTYPE)


@triton.jit
def load_tile(x_ptr, start, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    return tl.load(x_ptr + cols, mask=cols < n, other=-float("inf")).to(DTYPE)  # (BLOCK,)


@triton.jit
def shrinkage(scale, DTYPE: tl.constexpr):
    """1/2, so that differences do not overflow, and much less where t might: then what it takes from x is nothing."""
    half = tl.full((), 0.5, tl.float64)
    if DTYPE == tl.float64:
        return tl.where(scale > 3.2733906078961419e150, half * 4.8198397302057678e-181, half)  # 2^500 and 2^-599
    else:
        return tl.where(scale > 1.8446744073709552e19, half * 1.5777218104420236e-30, half)  # 2^64 and 2^-99


@triton.jit
def largest(factor, DTYPE: tl.constexpr):
    """The largest number of a dtype, shrunk; an anchor is no larger."""
    if DTYPE == tl.float64:
        return (1.7976931348623157e308 * factor).to(DTYPE)
    else:
        return (3.4028234663852886e38 * factor).to(DTYPE)


@triton.jit
def _farthest(DTYPE: tl.constexpr):
    """In scales, as good as infinite."""
    if DTYPE == tl.float64:
        return 1e306
    else:
        return 1e37


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
    return tl.where(square < 1e-3, r * (1.0 + square * (1.0 / 3.0 + 0.2 * square)), 0.5 * tl.log((1.0 + r) / (1.0 - r)))


@triton.jit
def judge(above, signed, total, slope, k_whole, k_rest, q, LINK: tl.constexpr, DTYPE: tl.constexpr):
    """The step in scales, the residual, whether t is the root, and whether it needs to be moved off a kink or gap.

    ``Link.newton_step``, ``_Rows.judge``, ``underflow`` and ``at_kink`` of the reference, in the dtype of the sums.
    """
    excess = (above - k_whole).to(signed.dtype) - k_rest
    residual = signed + excess
    size = total + tl.abs(excess)
    if is_compact(LINK):
        if LINK == "clip":
            step = residual / tl.maximum(slope, 1.0)
            condition = 1.0
        elif LINK == "exp":
            k = k_whole.to(signed.dtype) + k_rest
            step = tl.where(excess < 0, tl.log(total / -excess), tl.log(1.0 + residual / k))
            condition = 1.0
        else:
            tl.static_assert(LINK == "clip_power", "unknown link")
            ratio = tl.maximum(-excess, 0.0) / total
            root = tl.exp2(tl.log2(ratio) / q)
            step = tl.where(excess <= 0, q * total * (1.0 - root), residual) / slope
            step = tl.where(slope > 0, step, residual)
            condition = q
        found = tl.abs(residual) <= (2.0 + condition) * _eps(DTYPE) * size
        leaving = (excess == 0) & (slope > 0)
        reaching = condition * total >= slope * (1.0 - NEAR)
        reaching = reaching & (excess < 0) & (tl.abs(residual) <= total * NEAR)
        special = (leaving | reaching) & (k_rest == 0)
        step = tl.where(found, 0.0, step)  # a kink is where it is to be seen, not a step further
        found = found | ((tl.abs(step) <= _eps(DTYPE)) & (slope > 0) & (excess < 0))
        if LINK == "exp":  # its tail leaves the threshold no freedom
            special = special & False
    else:
        tl.static_assert(is_smooth(LINK), "unknown link")
        ratio = residual / size
        step = _atanh(ratio) * (1.0 - ratio * ratio) / (1.0 - ratio * (signed / total)) * (size / slope)
        special = (excess == 0) & (total < _underflow(DTYPE))
        step = tl.where(special, float("nan"), step)
        found = special | (residual == 0) | (tl.abs(step) <= _tolerance(DTYPE))
    return step, residual, found, special


@triton.jit
def newton(
    x_ptr,
    tile,
    n,
    high,
    off,
    k_whole,
    k_rest,
    scale,
    factor,
    q,
    LINK: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    DTYPE: tl.constexpr,
):
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
def _normal_quantile(p, complement):
    """To 4.5e-4: formula 26.2.23 of Abramowitz and Stegun, "Handbook of Mathematical Functions"."""
    r = tl.sqrt(-2.0 * tl.log(tl.minimum(p, complement)))
    size = r - (2.515517 + r * (0.802853 + r * 0.010328)) / (1.0 + r * (1.432788 + r * (0.189269 + r * 0.001308)))
    return tl.where(p < complement, -size, size)


@triton.jit
def _quantile(p, complement, q, LINK: tl.constexpr):
    """Inverse of F at p = 1 - complement, roughly."""
    if LINK == "logistic":
        return tl.log(p / complement)
    elif LINK == "laplace":
        return tl.where(p < complement, tl.log(2.0 * p), -tl.log(2.0 * complement))
    elif LINK == "normal":
        return _normal_quantile(p, complement)
    elif LINK == "exp":
        return tl.log(p)
    elif LINK == "clip":
        return p
    else:
        tl.static_assert(LINK == "clip_power", "unknown link")
        return tl.exp2(tl.log2(p) / q)


@triton.jit
def first_guess(x, total, count, lowest, highest, p, complement, scale, q, LINK: tl.constexpr):
    """Where the tile's mean and variance put the threshold, see the reference; in the tile's dtype."""
    if LINK == "logistic":
        centre, spread = 0.0, 3.289868133696453
    elif LINK == "laplace":
        centre, spread = 0.0, 2.0
    elif LINK == "normal":
        centre, spread = 0.0, 1.0
    elif LINK == "exp":
        centre, spread = -1.0, 1.0
    else:
        tl.static_assert(is_power(LINK), "unknown link")
        centre = q / (q + 1.0)
        spread = q / ((q + 1.0) * (q + 1.0) * (q + 2.0))
    mean = total / count.to(x.dtype)
    deviation = tl.where(tl.abs(x) < float("inf"), x - mean, 0.0)
    variance = tl.sum(deviation * deviation, 0) / count.to(x.dtype)
    own = spread * scale * scale
    offset = _quantile(p, complement, q, LINK) * scale
    share = variance / (variance + own)
    shape = (offset - centre * scale) / tl.sqrt(own)
    quantile = shape + share * (_normal_quantile(p, complement) - shape)
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
def search(
    x_ptr,
    n,
    t,
    lowest,
    highest,
    p,
    complement,
    k_whole,
    k_rest,
    scale,
    factor,
    q,
    LINK: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """:func:`khot.kernels.newton.guarded_newton` for one row: anchor, offset and ``special``, in float64.

    The first round runs in t; where two neighbouring doubles do not tell the root, those after it in the offset from an
    anchor, until that is the number next to the root.
    """
    k, far = k_whole.to(tl.float64) + k_rest, _farthest(DTYPE)
    width = tl.abs(_quantile(tl.maximum(p, 1e-300), tl.maximum(complement, 1e-16), q, LINK)) + 1.0
    low = lowest.to(tl.float64) - width * scale - tl.abs(lowest.to(tl.float64)) * COARSE
    high = highest.to(tl.float64) + width * scale + tl.abs(highest.to(tl.float64)) * COARSE
    r_low, r_high = n - k, -k
    t = tl.where((t >= low) & (t <= high), t, 0.5 * low + 0.5 * high)
    last, older = high - low, high - low
    anchor, off, unit = 0.0 * t, 0.0 * t, scale
    first, final = low, high  # of the bracket in t, when that has closed
    done, special = tl.full((), 0, tl.int1), tl.full((), 0, tl.int1)
    steps, local, rounds = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while (steps < MAX_STEPS) & (~done):
        if rounds == 0:
            anchor = _nearest(t, factor, DTYPE)
            off = _clamp((t - anchor) / scale, far)
        else:
            off = t
        above, signed, total, slope = row_sums(
            x_ptr, n, anchor.to(DTYPE), off.to(DTYPE), factor, inverse_scale(scale, DTYPE), q, LINK, BLOCK, DTYPE
        )
        step, residual, found, special = judge(
            above, signed, total, slope, k_whole, k_rest, q.to(tl.float64), LINK, DTYPE
        )
        low, r_low = tl.where(residual > 0, t, low), tl.where(residual > 0, residual, r_low)
        high, r_high = tl.where(residual < 0, t, high), tl.where(residual < 0, residual, r_high)
        proposal, size = t + step * unit, tl.abs(step * unit)
        share = tl.minimum(tl.maximum(r_low / (r_low - r_high), 0.02), 0.98)
        cut = tl.where(local % 2 == 0, (1.0 - share) * low + share * high, 0.5 * low + 0.5 * high)
        cut = tl.where(local < NEWTON_STEPS, cut, _ordinal_mean(low, high))
        trusted = (proposal > low) & (proposal < high) & (size <= 0.5 * older) & (local < NEWTON_STEPS)
        older, last = last, tl.where(trusted, size, high - low)
        off = tl.where(found & (tl.abs(step) < float("inf")), off + step, off)
        closed = _ordinal(low) >= _ordinal(high) - 1  # their difference may overflow
        done = found
        if (closed & (~found)) | (found & (rounds > 0)):  # on to the next round, if its anchor is nearer
            beyond = (tl.abs(off) > far) & (rounds > 0)
            new, start = anchor, 0.0 * t
            if rounds == 0:
                first, final = low, high
            else:
                root = tl.where(beyond, tl.where(off > 0, final, first), anchor + off * scale)
                new = _nearest(root, factor, DTYPE)
                start = tl.where(beyond, start, (anchor - new) / scale + off)
            nearer = (rounds == 0) | (((tl.abs(start) < 0.9 * tl.abs(off)) | beyond) & (rounds < ROUNDS))
            done = ~nearer
            if nearer:
                anchor, t, unit = new, start, 0.0 * t + 1.0
                low, high = _clamp((first - new) / scale, far), _clamp((final - new) / scale, far)
                low -= tl.abs(low) * 0.0009765625 + width
                high += tl.abs(high) * 0.0009765625 + width
                last, older = high - low, high - low
                local, rounds = local * 0, rounds + 1
        else:
            t = tl.where(trusted, proposal, cut)
            local += 1
        steps += 1
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
    z = tl.minimum(tl.maximum(distances(x, high, off, inv_scale), -1e18), 1e18)
    tail, slope = shifted_tails(tl.abs(z), nearest, LINK)
    return tl.sum(tl.where(z > 0, -tail, tail), 0), tl.sum(tail, 0), tl.sum(slope, 0)


@triton.jit
def balance_gap(x_ptr, n, anchor, off, scale, factor, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The root in a gap where all tails underflow: they balance, seen up to a common factor."""
    inv_scale, far = inverse_scale(scale, DTYPE), _farthest(DTYPE)
    left, right, _ = _neighbours(x_ptr, n, anchor.to(DTYPE), off.to(DTYPE), factor, inv_scale, 0.0, BLOCK, DTYPE)
    anchor = (0.5 * left + 0.5 * right).to(DTYPE).to(tl.float64)
    left_end, right_end = _clamp((left - anchor) / scale, far), _clamp((right - anchor) / scale, far)
    off = 0.5 * (left_end + right_end)
    high, steps = anchor.to(DTYPE), tl.zeros((), tl.int32)
    while steps < GAP_STEPS:
        low = off.to(DTYPE)
        nearest = tl.minimum(right_end - off, off - left_end).to(DTYPE)
        nearest = tl.minimum(tl.maximum(nearest, 0.0), 1e18)
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
def tile_root(tile, k, scale, factor, q, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The root of a tile, shrunk like its scale, by unguarded steps from the first guess.

    Returns what :func:`newton` does, and whether contents but the scale are in order.
    """
    total, count, selected, lowest, highest = tile_span(tile)
    p, complement, none, everything = fractions(k, count, selected)
    least = _eps(DTYPE) * _eps(DTYPE)
    guess = first_guess(
        tile,
        total,
        tl.maximum(count, 1),
        lowest,
        highest,
        tl.maximum(p, least).to(DTYPE),
        tl.maximum(complement, least).to(DTYPE),
        scale.to(DTYPE),
        q,
        LINK,
    )
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
        return (scale >= 2.2250738585072014e-308) & (scale <= 1.7976931348623157e308)
    else:
        return (scale >= 1.1754943508222875e-38) & (scale <= 3.4028234663852886e38)


@triton.jit
def row_root(x_ptr, sample, n, k, scale, factor, q, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The root of a row in memory by unguarded steps, from that of a sample of BLOCK of its entries."""
    high, off, _, _, _ = tile_root(sample, k * (BLOCK / n.to(tl.float64)), scale, factor, q, LINK, BLOCK, DTYPE)
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
    x_ptr,
    n,
    k,
    scale,
    factor,
    q,
    high,
    low,
    done,
    special,
    LINK: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The threshold of a row that the unguarded steps have not ``done`` or have left on a kink or in a gap."""
    k_whole, k_rest = split_k(k)
    anchor, off = high.to(tl.float64), low.to(tl.float64)
    if ~done:
        count, selected, lowest, highest = row_span(x_ptr, n, factor, BLOCK, DTYPE)
        lowest, highest = tl.where(count > 0, lowest, 0.0), tl.where(count > 0, highest, 0.0)
        p, complement, none, everything = fractions(k, count, selected)
        if none | everything:
            if is_power(LINK):
                reach = tl.full((), 1.0, tl.float64)
            else:
                reach = tl.full((), REACH, tl.float64)
            anchor = tl.where(none, highest, lowest).to(tl.float64)
            off = tl.where(none, reach, -reach)
            special = tl.full((), 0, tl.int1)
        else:
            anchor, off, special = search(
                x_ptr, n, anchor + off * scale, lowest, highest, p, complement, k_whole, k_rest, scale, factor, q,
                LINK, BLOCK, DTYPE,
            )  # fmt: skip
    if special:
        if is_compact(LINK):
            anchor, off = leave_kink(x_ptr, n, anchor, off, k_whole, scale, factor, BLOCK, DTYPE)
        else:
            anchor, off = balance_gap(x_ptr, n, anchor, off, scale, factor, LINK, BLOCK, DTYPE)
    return anchor.to(DTYPE), off.to(DTYPE)
