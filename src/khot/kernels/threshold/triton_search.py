"""The search of the fast path for the thresholds of ordinary rows, as functions of Triton kernels.

There is one loop, in float32: Newton's step for log(A / B) as in :mod:`khot.kernels.threshold.residual`, a step by the
density of the scores if that goes farther, and bisection if neither stays in the bracket or gains enough. A row whose
tails all underflow, or which does not determine the threshold, is ``SPECIAL``, see
:mod:`khot.kernels.threshold.triton_gaps`. A row that is not solved in a number of steps is flagged, see
:mod:`khot.kernels.threshold.triton_flagged`.

The threshold is t = anchor + offset * scale with an anchor of the dtype of the scores, which moves along with t. In the
loop everything in the unit of scores is measured from the anchor, in scales times the link's unit.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from ..gpu.tools import LOG2_E, add2, add3, add4, quotient, reciprocal, rough_log
from ..links.base_triton import against, is_below, tails_and_slopes
from .triton_rows import any_row, converted, distances, load, over, partial_sums, scores

GOING, DONE, SPECIAL, LOST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # states of a row
MAX_STEPS = tl.constexpr(48)
FAR_STEP = tl.constexpr(2.0)  # in scales; a step by density is rough, and never the last
LAST_STEP = tl.constexpr(2.0**-16)  # in scales, for a link with kinks; its effect on entries next to one is negligible
WIDER = tl.constexpr(1.01)  # factor of a bracket, for the rounding of the moments
SERIES_OF_ATANH = tl.constexpr(1e-3)  # r^2 up to which three terms are exact in float32
LARGEST_SQUARE = tl.constexpr(0.5)  # r^2 at which a step can be the last
ALMOST_NONE, ALMOST_ALL = tl.constexpr(2.0**-18), tl.constexpr(1.0 - 2.0**-18)
SLIGHT_REST = tl.constexpr(1e-4)  # sum of the items below up to which expansions in it are exact
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def moments(x_rows, n, TILE: tl.constexpr):
    """First entry of each row, number of its entries above -inf, and the sums of their differences and their squares.

    The variance about any entry of the row is off by at most n eps. A NaN or +inf makes the sums NaN or infinite.
    """
    origin = converted(tl.load(x_rows), TILE.dtype)
    origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
    total, squares = partial_sums(TILE), partial_sums(TILE)
    for start in range(0, n, TILE.size):
        away = load(x_rows, start, n, over(origin), TILE) - over(origin)
        total += tl.sum(away, 0)
        squares += tl.sum(away * away, 0)
    total, squares = tl.reduce((total, squares), 1, add2)
    count = tl.full(total.shape, n, tl.int32)
    if any_row(squares == float("inf")):
        count, total, squares = _moments_of_unmasked(x_rows, n, origin, TILE)
    return origin, count, total, squares


@triton.jit
def _moments_of_unmasked(x_rows, n, origin, TILE: tl.constexpr):
    """The result of :func:`moments`, if some entries are -inf."""
    total, squares = partial_sums(TILE), partial_sums(TILE)
    count = total.to(tl.int32)
    for start in range(0, n, TILE.size):
        x = load(x_rows, start, n, -float("inf"), TILE)
        there = x != -float("inf")
        away = tl.where(there, x - over(origin), 0.0)
        total += tl.sum(away, 0)
        squares += tl.sum(away * away, 0)
        count += tl.sum(there.to(tl.int32), 0)
    return tl.reduce((count, total, squares), 1, add3)


@triton.jit
def _normal_quantile(p, complement):
    """The quantile to 4.5e-4: formula 26.2.23 of Abramowitz and Stegun, "Handbook of Mathematical Functions"."""
    r = tl.sqrt(-2.0 * rough_log(tl.minimum(p, complement)))
    over = 1.0 + r * (1.432788 + r * (0.189269 + r * 0.001308))
    size = r - quotient(2.515517 + r * (0.802853 + r * 0.010328), over)
    return tl.where(p < complement, -size, size)


@triton.jit
def first_guess(origin, count, total, squares, whole, rest, scale, q, law, LINK: tl.constexpr, TILE: tl.constexpr):
    """t, as anchor, a bracket around it in scales, the density of the scores there, and whether there is such a t.

    -t is the quantile of scale * (noise of law F) - x: it has F's shape if x is constant, and is about normal if x is
    wide.
    """
    centre, spread = law[0], law[1]
    number = tl.maximum(count, 1).to(origin.dtype)
    mean, inverse = quotient(total, number), reciprocal(scale)
    variance = tl.maximum(quotient(squares, number) - mean * mean, 0.0)
    p, complement = quotient(whole + rest, number), quotient((count - whole) - rest, number)
    own = spread * scale * scale
    width = tl.sqrt(variance + own)
    quantile = LINK.quantile(p, complement, q, LINK)
    shape = (quantile - centre) * reciprocal(tl.sqrt(spread + 0.0 * scale))
    shape += quotient(variance, variance + own) * (_normal_quantile(p, complement) - shape)
    guess = mean - centre * scale - shape * width
    density = number * INV_SQRT_2PI * tl.exp2(shape * shape * (-0.5 * LOG2_E)) * quotient(scale, width)
    reach = tl.sqrt(variance * number) * WIDER + tl.abs(origin) * TILE.eps  # no entry is farther from the mean
    low = (mean - reach - guess) * inverse - quantile - 1.0
    high = (mean + reach - guess) * inverse - quantile + 1.0
    sound = (p > 0) & (complement > 0) & (scale >= TILE.scales[0]) & (scale <= TILE.scales[1])
    sound = sound & (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
    return origin + guess, low, high, density, sound


@triton.jit
def row_sums(x_rows, n, anchor, off, inverse, q, LINK: tl.constexpr, TILE: tl.constexpr):
    """How many of n entries are above t, and sums of the tails, first with a minus sign above t, and of the slopes."""
    total = partial_sums(TILE)
    signed, slope, below = total, total, total.to(tl.int32)
    for start in range(0, n, TILE.size):
        z = distances(scores(x_rows, start, n, TILE), anchor, off, inverse)
        tail, w = tails_and_slopes(z, q, LINK)
        below += tl.sum(is_below(z, LINK), 0)
        total += tl.sum(tail, 0)
        slope += tl.sum(w, 0)
        if not LINK.compact:
            signed += tl.sum(against(tail, z), 0)
    lanes = tl.cdiv(n, TILE.size) * TILE.size  # lanes beyond the row count as below
    if LINK.compact:
        below, total, slope = tl.reduce((below, total, slope), 1, add3)
        signed = total
    else:
        below, signed, total, slope = tl.reduce((below, signed, total, slope), 1, add4)
    return lanes - below, signed, total, slope


@triton.jit
def _judge(above, signed, total, slope, whole, rest, q, LINK: tl.constexpr, TILE: tl.constexpr):
    """The step in scales, the residual, whether t is the root, and whether it must be moved within a gap."""
    excess = (above - whole).to(total.dtype) - rest
    residual = signed + excess
    if LINK.compact:
        step, found, special = _judge_compact(residual, excess, total, slope, whole, rest, q, LINK, TILE)
    else:
        step, found, special = _judge_smooth(residual, excess, signed, total, slope, TILE)
    return step, residual, found, special


@triton.jit
def _judge_compact(residual, excess, total, slope, whole, rest, q, LINK: tl.constexpr, TILE: tl.constexpr):
    """:func:`_judge` for a link with kinks, where the residual decides and not the step; q is its ``condition``."""
    size = total + tl.abs(excess)
    step = LINK.newton_step(residual, excess, total, slope, whole.to(total.dtype) + rest, q, LINK)
    found = tl.abs(residual) <= (2.0 + q) * size * TILE.eps
    if LINK.reaches_zero:
        leaving = found & (excess == 0)
        reaching = (q * total >= slope * ALMOST_ALL) & (excess < 0) & (tl.abs(residual) <= total * ALMOST_NONE)
        special = leaving | (found & reaching)
    else:  # the items above alone sum to k; the root is just above the lowest of them
        special = (excess == 0) & (total < SLIGHT_REST)
    found = found | special
    near = (excess < 0) & (tl.abs(step) < LAST_STEP) & (~special)
    step = tl.where(found & (~near), 0.0, step)  # a kink is at the current t, not a step further
    found = found | ((tl.abs(step) <= TILE.eps) & (slope > 0) & (excess < 0))
    return step, found, special & (rest == 0)


@triton.jit
def _judge_smooth(residual, excess, signed, total, slope, TILE: tl.constexpr):
    """Newton's method for log(A / B) = 2 atanh(R / (A + B)); no step in a gap in which all tails underflow.

    Where abs(R) equals A + B up to rounding, the step consists of rounding errors, which depend on the products that
    the compiler contracts; such a step is never the last.
    """
    size = total + tl.abs(excess)
    ratio = quotient(residual, size)
    more, less, square = 1.0 + ratio, 1.0 - ratio, ratio * ratio
    atanh = ratio * (1.0 + square * (1.0 / 3.0 + 0.2 * square))
    atanh = tl.where(square < SERIES_OF_ATANH, atanh, 0.5 * rough_log(quotient(more, less)))
    step = quotient(atanh * (more * less) * size, (1.0 - ratio * quotient(signed, total)) * slope)
    unseen = total < TILE.underflow
    gap = unseen & (excess == 0)
    step = tl.where(gap | (residual == 0), 0.0, tl.where(unseen, float("inf"), step))
    return step, gap | ((tl.abs(step) <= TILE.tolerance) & (square < LARGEST_SQUARE)), gap


@triton.jit
def rounded(anchor, TILE: tl.constexpr):
    """An anchor is a number of the computing dtype of the scores, even if steep links use float64."""
    return anchor.to(tl.float32).to(anchor.dtype) if TILE.single else anchor


@triton.jit
def advance(
    above, signed, total, slope, whole, rest, anchor, off, low, high, older, density, scale, q,
    LINK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One step: the new anchor, off, low, high and size of the step, and the state of each row."""
    step, residual, found, special = _judge(above, signed, total, slope, whole, rest, q, LINK, TILE)
    by_density = quotient(residual, tl.maximum(slope, density))
    coarse = (tl.abs(by_density) > FAR_STEP) & ~(tl.abs(by_density) <= tl.abs(step))  # also if there is no step
    step = tl.where(coarse & (~found), by_density, step) * LINK.unit
    low, high = tl.where(residual > 0, off, low), tl.where(residual < 0, off, high)
    to, size = off + step, tl.abs(step)
    trusted = found | ((to > low) & (to < high) & (size <= 0.5 * older))
    to, older = tl.where(trusted, to, 0.5 * (low + high)), tl.where(trusted, size, high - low)
    new = rounded(anchor + to * (scale * (1.0 / LINK.unit)), TILE)
    moved = (new - anchor) * (reciprocal(scale) * LINK.unit)
    state = tl.where(found, tl.where(special, SPECIAL, DONE), GOING)
    state = tl.where(tl.abs(to - moved) < float("inf"), state, LOST)
    return new, to - moved, low - moved, high - moved, older, state


@triton.jit
def search_row(x_rows, n, whole, rest, scale, q, law, LINK: tl.constexpr, TILE: tl.constexpr):
    """Anchor, offset in the link's unit, and state of each row; the width of the first bracket in the same unit.

    Also the density of the scores at the first guess, and whether there was one.
    """
    origin, count, total, squares = moments(x_rows, n, TILE)
    anchor, low, high, density, sound = first_guess(
        origin, count, total, squares, whole, rest, scale, q, law, LINK, TILE
    )
    inverse = reciprocal(scale) * LINK.unit
    low, high, off = low * LINK.unit, high * LINK.unit, 0.0 * low
    width = high - low
    older, steps, state = width, 0, tl.where(sound, GOING, LOST)
    while any_row(state == GOING) & (steps < MAX_STEPS):
        above, signed, total, slope = row_sums(x_rows, n, anchor, off, inverse, q, LINK, TILE)
        next_anchor, next_off, next_low, next_high, next_older, next_state = advance(
            above, signed, total, slope, whole, rest, anchor, off, low, high, older, density, scale, q,
            LINK, TILE,
        )  # fmt: skip
        going = state == GOING
        anchor, off = tl.where(going, next_anchor, anchor), tl.where(going, next_off, off)
        low, high, older, state = next_low, next_high, next_older, tl.where(going, next_state, state)
        steps += 1
    return anchor, off, state, width, density, sound
