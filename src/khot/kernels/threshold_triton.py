"""The root finder of :mod:`khot.kernels.capped_simplex` for one row, as functions of Triton kernels.

Usual rows take a few unguarded Newton steps, all of whose arithmetic is that of the elements: for float32 the threshold
is a pair ``high + low``, which has 48 bits. What is left after them goes on with a bracket and float64 numbers per row,
which some devices have to emulate slowly. k is an integer and a rest, so that m - k loses nothing.

For the first steps a row is in registers, ``tile`` (IN_REGISTERS), or is read from ``x_ptr`` in tiles of BLOCK at every
evaluation; for the others always the latter, since float64 numbers and a row together do not fit. Lanes beyond a row
hold -inf.
"""

import triton
import triton.language as tl

from .links_triton import is_compact, is_power, is_smooth, shifted_tails, tail_sums

FIRST_STEPS = tl.constexpr(6)
MAX_STEPS = tl.constexpr(100)
GAP_STEPS = tl.constexpr(6)
RESOLUTION = tl.constexpr(4e-16)
NEAR = tl.constexpr(2.0**-18)
KINK_DISTANCE = tl.constexpr(2.0**-20)
KINK_GROWTH = tl.constexpr(2.0**10)
REACH = tl.constexpr(800.0)  # of smooth links; 40 would do for the normal one
BRACKET_SLACK = tl.constexpr(2e-3)  # in scales: more than what the approximate quantile is off


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
    largest = 1e300 if DTYPE == tl.float64 else 3e38
    return tl.minimum(1.0 / scale, largest).to(DTYPE)


@triton.jit
def load_tile(x_ptr, start, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    return tl.load(x_ptr + cols, mask=cols < n, other=-float("inf")).to(DTYPE)  # (BLOCK,)


@triton.jit
def row_sums(x_ptr, n, high, low, inv_scale, q, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """:func:`tail_sums` at t = high + low of n entries in memory."""
    above = tl.zeros((), tl.int32)
    signed, total, slope = tl.zeros((), tl.float64), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        x = load_tile(x_ptr, start, n, BLOCK, DTYPE)
        m, s, u, w = tail_sums(standardise(x, high, low, inv_scale), q, LINK)
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
        leaving = (excess == 0) & (total > 0)
        reaching = condition * total >= slope * (1.0 - NEAR)
        reaching = reaching & (excess < 0) & (tl.abs(residual) <= total * NEAR)
        special = (leaving | reaching) & (k_rest == 0)
        if LINK == "exp":  # its tail leaves the threshold no freedom
            special = special & False
    else:
        tl.static_assert(is_smooth(LINK), "unknown link")
        ratio = residual / size
        step = _atanh(ratio) * (1.0 - ratio * ratio) / (1.0 - ratio * (signed / total)) * (size / slope)
        special = (excess == 0) & (total < _underflow(DTYPE))
        step = tl.where(special, float("nan"), step)
        found = special | (residual == 0)
    return step, residual, found, special


@triton.jit
def newton(
    x_ptr,
    tile,
    n,
    high,
    low,
    k_whole,
    k_rest,
    scale,
    inv_scale,
    q,
    LINK: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A few unguarded steps from high + low; returns the threshold, whether it is the root, and ``special``."""
    done, special = tl.full((), 0, tl.int1), tl.full((), 0, tl.int1)
    steps = tl.zeros((), tl.int32)
    while steps < FIRST_STEPS:
        if IN_REGISTERS:
            above, signed, total, slope = tail_sums(standardise(tile, high, low, inv_scale), q, LINK)
        else:
            above, signed, total, slope = row_sums(x_ptr, n, high, low, inv_scale, q, LINK, BLOCK, DTYPE)
        high, low, done, going, special = advance(
            high, low, above, signed, total, slope, k_whole, k_rest, scale, q, LINK, DTYPE
        )
        steps = tl.where(going, steps + 1, FIRST_STEPS)
    return high, low, done, special


@triton.jit
def advance(high, low, above, signed, total, slope, k_whole, k_rest, scale, q, LINK: tl.constexpr, DTYPE: tl.constexpr):
    """One unguarded step: the threshold, whether it is the root now, whether to go on, and ``special``."""
    step, _, found, special = judge(above, signed, total, slope, k_whole, k_rest, q, LINK, DTYPE)
    legal = tl.abs(step) < float("inf")
    if is_compact(LINK):
        done = found | ((tl.abs(step * scale) <= tl.abs(high) * RESOLUTION) & (slope > 0))
    else:  # a gap has no legal step
        done = legal & (tl.abs(step) <= _tolerance(DTYPE))
    move = tl.where(legal, step * scale, 0.0).to(DTYPE)
    if DTYPE == tl.float64:
        high += move
    else:
        part = low + move
        new = high + part
        back = new - high
        low = (high - (new - back)) + (part - back)  # the rounding error of high + part
        high = new
    return high, low, done, legal & (~done), special


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
def row_span(x_ptr, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """:func:`tile_span` of a row in memory, without the sum."""
    count, selected = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    lowest, highest = tl.full((), float("inf"), DTYPE), tl.full((), -float("inf"), DTYPE)
    for start in range(0, n, BLOCK):
        _, c, i, smallest, largest = tile_span(load_tile(x_ptr, start, n, BLOCK, DTYPE))
        count += c
        selected += i
        lowest = tl.minimum(lowest, smallest)
        highest = tl.maximum(highest, largest)
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
    inv_scale,
    q,
    LINK: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """:func:`khot.kernels.guarded_newton.guarded_newton` for one row: t and ``special``, numbers in float64."""
    k = k_whole.to(tl.float64) + k_rest
    reach = _quantile(tl.maximum(p, 1e-300), tl.maximum(complement, 1e-16), q, LINK)
    low = lowest.to(tl.float64) - (reach + BRACKET_SLACK) * scale
    high = highest.to(tl.float64) - (reach - BRACKET_SLACK) * scale
    r_low, r_high = n - k, -k
    if is_compact(LINK):
        tolerance = 0.0 * scale
    else:
        tolerance = _tolerance(DTYPE) * scale
    t = tl.where((t >= low) & (t <= high), t, 0.5 * low + 0.5 * high)
    last, older = high - low, high - low
    done, special = tl.full((), 0, tl.int1), tl.full((), 0, tl.int1)
    steps = tl.zeros((), tl.int32)
    while (steps < MAX_STEPS) & (~done):
        t_high, t_low = split_threshold(t, DTYPE)
        above, signed, total, slope = row_sums(x_ptr, n, t_high, t_low, inv_scale, q, LINK, BLOCK, DTYPE)
        move, residual, found, special = judge(
            above, signed, total, slope, k_whole, k_rest, q.to(tl.float64), LINK, DTYPE
        )
        move = move * scale
        low, r_low = tl.where(residual > 0, t, low), tl.where(residual > 0, residual, r_low)
        high, r_high = tl.where(residual < 0, t, high), tl.where(residual < 0, residual, r_high)
        share = tl.minimum(tl.maximum(r_low / (r_low - r_high), 0.02), 0.98)
        cut = low + tl.where(steps % 2 == 0, share, 0.5) * (high - low)
        size, proposal = tl.abs(move), t + move
        if is_compact(LINK):
            found = found | ((size <= tl.abs(t) * RESOLUTION) & (slope > 0))
        progress = (proposal != t) | (size <= tolerance)
        trusted = progress & (proposal >= low) & (proposal <= high) & (size <= 0.5 * older)
        proposal = tl.where(trusted, proposal, tl.where(found, t, cut))
        step = tl.abs(proposal - t)
        t = proposal
        done = found | (step <= tolerance + tl.abs(proposal) * RESOLUTION)
        older, last = last, tl.where(trusted, step, high - low)
        steps += 1
    return t, special & done


@triton.jit
def leave_kink(
    x_ptr, n, t, k_whole, k_rest, scale, inv_scale, q, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """Away from where the last entry reaches 0 or 1, if it shall stay there, so that rounding cannot bring it back."""
    best, distance, direction = t, tl.zeros((), tl.float64), scale
    steps = tl.zeros((), tl.int32)
    while steps < 3:
        beyond = t + distance * direction
        high, low = split_threshold(beyond, DTYPE)
        above, signed, _, _ = row_sums(x_ptr, n, high, low, inv_scale, q, LINK, BLOCK, DTYPE)
        residual = signed + ((above - k_whole).to(tl.float64) - k_rest)
        if steps == 0:
            direction = tl.where(residual > 0, scale, -scale)
            distance = tl.full((), KINK_DISTANCE, tl.float64)
        else:
            best = tl.where(residual == 0, beyond, best)
            distance = distance * KINK_GROWTH
        steps += 1
    return best


@triton.jit
def _tile_gap(x, t_high, t_low):
    """The largest entry of a tile that is not above t, and the smallest that is."""
    above = ((x - t_high) - t_low) > 0
    return tl.max(tl.where(above, -float("inf"), x), 0), tl.min(tl.where(above, x, float("inf")), 0)


@triton.jit
def _tile_balance(x, high, low, nearest, inv_scale, LINK: tl.constexpr):
    """Sums of signed tails, tails and slopes of a tile, divided by about the largest tail."""
    z = tl.minimum(tl.maximum(standardise(x, high, low, inv_scale), -1e18), 1e18)
    tail, slope = shifted_tails(tl.abs(z), nearest, LINK)
    return tl.sum(tl.where(z > 0, -tail, tail), 0), tl.sum(tail, 0), tl.sum(slope, 0)


@triton.jit
def balance_gap(x_ptr, n, t, scale, inv_scale, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The root in a gap where all tails underflow: they balance, seen up to a common factor."""
    high, low = split_threshold(t, DTYPE)
    left, right = tl.full((), -float("inf"), DTYPE), tl.full((), float("inf"), DTYPE)
    for start in range(0, n, BLOCK):
        below, above = _tile_gap(load_tile(x_ptr, start, n, BLOCK, DTYPE), high, low)
        left, right = tl.maximum(left, below), tl.minimum(right, above)
    left_end, right_end = left.to(tl.float64), right.to(tl.float64)
    t = 0.5 * left_end + 0.5 * right_end
    steps = tl.zeros((), tl.int32)
    while steps < GAP_STEPS:
        high, low = split_threshold(t, DTYPE)
        nearest = tl.minimum(standardise(right, high, low, inv_scale), -standardise(left, high, low, inv_scale))
        nearest = tl.minimum(tl.maximum(nearest, 0.0), 1e18)
        signed, total, slope = tl.zeros((), DTYPE), tl.zeros((), DTYPE), tl.zeros((), DTYPE)
        for start in range(0, n, BLOCK):
            x = load_tile(x_ptr, start, n, BLOCK, DTYPE)
            s, u, w = _tile_balance(x, high, low, nearest, inv_scale, LINK)
            signed += s
            total += u
            slope += w
        move = (_atanh(signed / total) * (total / slope)).to(tl.float64) * scale
        t = tl.where(tl.abs(move) < float("inf"), t + move, t)
        t = tl.maximum(tl.minimum(t, right_end), left_end)
        steps += 1
    return t


@triton.jit
def tile_root(tile, k, scale, q, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The root of a tile by unguarded steps from the first guess, and whether contents are in order.

    Returns what :func:`newton` does, and the latter.
    """
    total, count, selected, lowest, highest = tile_span(tile)
    p, complement, none, everything = fractions(k, count, selected)
    least = _eps(DTYPE) * _eps(DTYPE)
    unit = scale.to(DTYPE)
    guess = first_guess(
        tile,
        total,
        tl.maximum(count, 1),
        lowest,
        highest,
        tl.maximum(p, least).to(DTYPE),
        tl.maximum(complement, least).to(DTYPE),
        unit,
        q,
        LINK,
    )
    whole, rest = split_k(k)
    high, low, done, special = newton(
        tile, tile, BLOCK, guess, 0.0 * guess, whole, rest.to(DTYPE), unit, inverse_scale(scale, DTYPE), q,
        LINK, BLOCK, True, DTYPE,
    )  # fmt: skip
    sound = (p >= 0) & (complement >= 0) & (scale > 0) & (scale < float("inf")) & (total == total)
    return high, low, done & (~(none | everything)), special, sound


@triton.jit
def row_root(x_ptr, sample, n, k, scale, q, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The root of a row in memory by unguarded steps, from that of a sample of BLOCK of its entries."""
    high, low, _, _, _ = tile_root(sample, k * (BLOCK / n.to(tl.float64)), scale, q, LINK, BLOCK, DTYPE)
    whole, rest = split_k(k)
    high, low, done, special = newton(
        x_ptr, sample, n, high, low, whole, rest.to(DTYPE), scale.to(DTYPE), inverse_scale(scale, DTYPE), q,
        LINK, BLOCK, False, DTYPE,
    )  # fmt: skip
    return high, low, done, special


@triton.jit
def split_k(k):
    """A float64 k as an integer and a rest."""
    whole = k.to(tl.int32)
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
    x_ptr, n, k, scale, q, high, low, done, special, LINK: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """The threshold of a row that the unguarded steps have not ``done`` or have left on a kink or in a gap."""
    inv_scale = inverse_scale(scale, DTYPE)
    k_whole, k_rest = split_k(k)
    t = high.to(tl.float64) + low.to(tl.float64)
    if ~done:
        count, selected, lowest, highest = row_span(x_ptr, n, BLOCK, DTYPE)
        lowest, highest = tl.where(count > 0, lowest, 0.0), tl.where(count > 0, highest, 0.0)
        p, complement, none, everything = fractions(k, count, selected)
        if none | everything:
            if is_power(LINK):
                reach = scale
            else:
                reach = scale * REACH
            t = tl.where(none, highest.to(tl.float64) + reach, lowest.to(tl.float64) - reach)
            special = tl.full((), 0, tl.int1)
        else:
            t, special = search(
                x_ptr, n, t, lowest, highest, p, complement, k_whole, k_rest, scale, inv_scale, q, LINK, BLOCK, DTYPE
            )
    if special:
        if is_compact(LINK):
            t = leave_kink(x_ptr, n, t, k_whole, k_rest, scale, inv_scale, q, LINK, BLOCK, DTYPE)
        else:
            t = balance_gap(x_ptr, n, t, scale, inv_scale, LINK, BLOCK, DTYPE)
    return split_threshold(t, DTYPE)
