r"""From inclusion probabilities to the law of short rows of units given their count, several rows at a time, in numba.

With z the log-odds of independent units, and p and q their probabilities of one and of zero, the log-odds of inclusion
given B = k are

.. math:: a_i = z_i + \log \frac{P(B_{-i} = k - 1)}{P(B_{-i} = k)}

where :math:`B_{-i}` counts the others. As :math:`B_{-i}` is nearly normal, the explicit map z = M(a) of
:mod:`khot.laws.inverse_newton` nearly inverts this. The residual r, the distance of the log-odds of inclusion of M(a)
from the target, is added to a, and Anderson's method combines the last two steps. It gains two digits or so with every
evaluation, however small the variance of B is, whereas Newton's method takes several products with the covariance.

If B may lie in a range, z are such that the target and the units have the same expected count, and the sizes s get
weights :math:`e^{t s}`, with the t for which they have this mean: the logits are then z + t. M corrects less, in
proportion to how much less B varies than that of independent units.

Everything builds on :mod:`.numba_table`. Rows that are not solved are left to other code.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..cpu.lanes import LANES, at, every, if_positive, put
from ..cpu.loops import inlined, kernel, over_rows, per_row, summed
from ..cpu.maths import EXP, LOG
from . import TABLE_OF_INVERSE
from .numba_table import climb, counts_zeros, descend, empty_block, lanes_of, row_of, weigh, weigh_sizes, widest_of

FARTHEST = 575.0  # e^-575 is 1e-250, as in laws.inverse: log-odds beyond this are infinite
ACCEPTED = 1e-11  # as in laws.inverse_newton: an error that rounding may leave
STEPS = 40  # 2 to 8 are usual
MARGIN = 1e3  # factor by which a predicted error must be small enough
TILT_STEPS = 50  # 1 to 4 are usual
BALANCE_STEPS, UNBALANCED = 10, 1e-10  # 1 or 2 steps are usual; a larger one after these is more than rounding
NEAR_END = 1e-6  # the distance of the mean size from an end, relative to the range, below which it has few digits

_exp, _log = EXP[np.float64], LOG[np.float64]


@summed
def _chances(z, p, q):
    for i in range(z.shape[0]):
        e = _exp(-abs(z[i]))
        s = 1.0 / (1.0 + e)
        p[i] = s if z[i] > 0 else e * s
        q[i] = e * s if z[i] > 0 else s


@summed
def _residuals(target, out, included, residual):
    for i in range(target.shape[0]):
        residual[i] = target[i] - _log(included[i] / out[i])


@per_row
def _place(block, number, log_odds, low, high, target, free, errors):
    """Places the log-odds of a block and its sizes; marks units that have a choice with 1 in ``free``.

    Errors are NaN in rows with NaN, 0 in rows without a choice and infinite in others.
    """
    rows, n = log_odds.shape
    for lane in range(LANES):
        r = row_of(number, lane, rows)
        is_flipped = counts_zeros(low[r], high[r], n)
        sign = -1.0 if is_flipped else 1.0
        few, many = (n - high[r], n - low[r]) if is_flipped else (low[r], high[r])
        block.sign[lane], block.low[lane], block.high[lane], block.shift[lane] = sign, few, many, 0.0
        units, errors[lane] = 0, np.inf
        for i in range(n):
            x = sign * log_odds[r, i]
            is_free = abs(x) <= FARTHEST
            if x != x:
                errors[lane] = np.nan
            target[i * LANES + lane] = x if is_free else x * np.inf
            free[i * LANES + lane] = 1.0 if is_free else 0.0
            units += is_free
            few -= x > FARTHEST
            many -= x > FARTHEST
        if errors[lane] == errors[lane] and (many <= 0 or few >= units):
            errors[lane] = 0.0
            for i in range(n):
                if free[i * LANES + lane] > 0:
                    target[i * LANES + lane], free[i * LANES + lane] = -np.inf if many <= 0 else np.inf, 0.0


@inlined
def _is_open(error):
    return error == np.inf


@per_row
def _balance(block, target, free, p, q, rounding, errors, mean):
    """Shifts the target so that the expected count is that of the row; writes the means of ranges of sizes.

    A row that takes too many steps, or whose mean is nearly an end, gets the error 1.
    """
    n = target.shape[0] // LANES
    for _ in range(BALANCE_STEPS):
        _chances(target, p, q)
        few = many = spread = none = every(0.0)  # the first is a sum of small numbers, the second an integer
        for i in range(n):
            x, y, z = at(p, i), at(q, i), at(target, i)
            few = few + if_positive(z, none - y, x)
            many = many + if_positive(z, every(1.0), none)
            spread = spread + x * y
        for lane in range(LANES):
            mean[lane] = block.low[lane]
        put(mean, 1, few + (many - at(mean, 0)))
        put(mean, 0, few + many)
        put(mean, 2, spread)
        going = False
        for lane in range(LANES):
            excess, variance, width = mean[LANES + lane], mean[2 * LANES + lane], block.high[lane] - block.low[lane]
            mean[LANES + lane] = 0.0
            if _is_open(errors[lane]) and width > 0:
                if not NEAR_END * width < excess < (1 - NEAR_END) * width:
                    errors[lane] = 1.0
            elif _is_open(errors[lane]) and abs(excess) > rounding * variance:
                mean[LANES + lane] = excess / variance
                going = True
        if not going:
            return
        for i in range(n):
            put(target, i, at(target, i) - at(mean, 1))
    for lane in range(LANES):
        if abs(mean[LANES + lane]) > UNBALANCED:
            errors[lane] = 1.0


@per_row
def _guess(aim, p, q, share, z):
    """Writes M(aim), with a share of the correction of a single size."""
    n, spread = aim.shape[0] // LANES, every(0.0)
    _chances(aim, p, q)
    for i in range(n):
        spread = spread + at(p, i) * at(q, i)
    for i in range(n):
        x, y = at(p, i), at(q, i)
        put(z, i, at(aim, i) + at(share, 0) * (y - x) / (spread - x * y + every(0.25)))


@per_row
def _tilt_sizes(block, n, mean, spread):
    """Finds the tilts for which the sizes have their means, and writes the variances of the sizes.

    Newton's method is for the log-odds of the mean between both ends, which are nearly linear in the tilt.
    """
    width = 3
    for lane in range(LANES):
        width = max(width, block.high[lane] + 3)
    for lane in range(LANES):
        low, high = block.low[lane], block.high[lane]
        block.shift[lane] = spread[lane] = 0.0
        if low == high:
            continue
        tilt, middle, step = 0.0, int(mean[lane]), np.inf
        for _ in range(TILT_STEPS):
            total = above = below = square = 0.0
            for m in range(low, high + 1):
                mass = _exp(tilt * (m - middle)) * block.table[(n * width + 1 + m) * LANES + lane]
                total += mass
                above += mass * (m - low)
                below += mass * (high - m)
                square += mass * (m - middle) * (m - middle)
            above, below = above / total, below / total
            variance = square / total - (above + low - middle) ** 2
            spread[lane] = variance
            if abs(step) <= 1e-12 * (1 + abs(tilt)):
                break
            wanted = math.log((mean[lane] - low) / (high - mean[lane]))
            step = (wanted - math.log(above / below)) * above * below / (variance * (high - low))
            tilt += step
        block.shift[lane] = block.sign[lane] * tilt


@per_row
def _largest(x, free, result):
    found = every(0.0)
    for i in range(x.shape[0] // LANES):
        value = at(x, i)
        size = if_positive(at(free, i), if_positive(value, value, every(0.0) - value), every(0.0))
        found = if_positive(size - found, size, found)
    put(result, 0, found)


@per_row
def _evaluate(block, n, target, free, residual, weight, numbers):
    """Writes the residuals and the variances of units, and for each row the largest residual and the weighted mean."""
    climb(block, n)
    weigh_sizes(block, n)
    descend(block, n)
    _residuals(target, block.out, block.included, residual)
    total = mean = every(0.0)
    for i in range(n):
        out, included, unit = at(block.out, i), at(block.included, i), at(free, i)
        size = out + included
        variance, lack = if_positive(unit, out * included / (size * size), every(0.0)), at(residual, i)
        put(residual, i, if_positive(unit, lack, every(0.0)))
        put(weight, i, variance)
        total = total + variance
        mean = mean + variance * at(residual, i)
    _largest(residual, free, numbers[0])
    put(numbers[1], 0, mean / total)


@per_row
def _combine(residual, mean, weight, free, aim, last_residual, last_aim, move, going, is_first):
    """Moves the aim by a step of Anderson's method: by the residual, corrected by the last move."""
    n, of_both, of_change = aim.shape[0] // LANES, every(0.0), every(0.0)
    for i in range(n):
        lack = at(residual, i) - at(mean, 0)
        there = at(aim, i) + lack
        change = lack - at(last_residual, i)
        put(move, i, there - at(last_aim, i))
        put(last_residual, i, lack)
        put(last_aim, i, there)
        of_both = of_both + at(weight, i) * change * lack
        of_change = of_change + at(weight, i) * change * change
    factor = if_positive(of_change, of_both / of_change, every(0.0))
    for i in range(n):
        new = at(last_aim, i)
        if not is_first:
            new = new - factor * at(move, i)
        put(aim, i, if_positive(at(going, 0) * at(free, i), new, at(aim, i)))


@kernel
def _inverse_blocks(begin, end, log_odds, low, high, goal, logits, tilts, results):
    rows, n = log_odds.shape
    block, units, numbers = (
        empty_block(n, widest_of(low, high, n), False),
        np.empty((9, n * LANES)),
        np.empty((9, LANES)),
    )
    target, free, p, q, aim, residual, weight, last_residual, last_aim = (
        units[0], units[1], units[2], units[3], units[4], units[5], units[6], units[7], units[8]
    )  # fmt: skip
    move, found, share, spread, going, last, size = (
        np.empty(n * LANES), numbers[0:2], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]
    )  # fmt: skip
    errors, mean = np.empty(LANES), np.empty(3 * LANES)
    for number in range(begin, end):
        _place(block, number, log_odds, low, high, target, free, errors)
        _balance(block, target, free, p, q, max(2.3e-16, 1e-3 * goal), errors, mean)
        _largest(target, free, size)
        for c in range(n * LANES):
            block.z[c] = aim[c] = target[c]
        ranges = False
        for lane in range(LANES):
            share[lane], last[lane], going[lane] = 0.5, np.inf, 1.0 if _is_open(errors[lane]) else -1.0
            ranges |= block.low[lane] < block.high[lane]
        if ranges:
            weigh(block.z, block.zero, block.one)
            climb(block, n)
            _tilt_sizes(block, n, mean, spread)
            for lane in range(LANES):
                total = 0.0
                for i in range(n):
                    total += p[i * LANES + lane] * q[i * LANES + lane]
                share[lane] *= 1 - spread[lane] / total if block.low[lane] < block.high[lane] else 1.0
        _guess(aim, p, q, share, block.z)
        for step in range(STEPS):
            weigh(block.z, block.zero, block.one)
            if ranges:
                climb(block, n)
                _tilt_sizes(block, n, mean, spread)
            _evaluate(block, n, target, free, residual, weight, found)
            left = False
            for lane in range(LANES):
                if not going[lane] > 0:
                    continue
                error = found[0, lane] / (1 + size[lane])
                if error <= goal or (last[lane] <= ACCEPTED and not error < last[lane]):
                    errors[lane], going[lane] = error, -1.0  # the latter is where rounding ends the progress
                elif not error < np.inf or found[1, lane] != found[1, lane]:
                    errors[lane], going[lane] = 1.0, -1.0
                left |= going[lane] > 0
            if not left:
                break
            _combine(residual, found[1], weight, free, aim, last_residual, last_aim, move, going, step == 0)
            _guess(aim, p, q, share, block.z)
            left = False
            for lane in range(LANES):
                if going[lane] > 0:
                    error = found[0, lane] / (1 + size[lane])
                    if step > 0 and error * error / last[lane] * MARGIN <= goal and block.low[lane] == block.high[lane]:
                        errors[lane], going[lane] = goal, -1.0
                    last[lane] = error
                left |= going[lane] > 0
            if not left:
                break
        for lane in range(lanes_of(number, rows)):
            r, total, count = number * LANES + lane, 0.0, 0
            for i in range(n):
                if free[i * LANES + lane] > 0:
                    total += block.z[i * LANES + lane]
                    count += 1
            shift = (
                total / max(count, 1) if block.low[lane] == block.high[lane] else -block.sign[lane] * block.shift[lane]
            )
            for i in range(n):
                logits[r, i] = block.sign[lane] * (block.z[i * LANES + lane] - shift)
            tilts[r] = -block.sign[lane] * shift
            results[r] = errors[lane] if np.isfinite(shift) or errors[lane] != errors[lane] else 1.0
    return 0


def inclusion_inverse(log_odds: Tensor, low: Tensor, high: Tensor, goal: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``(R, n)``, their tilts ``(R,)``, and the errors ``(R,)`` relative to the largest logit.

    Logits have mean 0 in rows of one size.

    Args:
        log_odds: Float64 ``(R, n)``, those of the inclusion probabilities, in rows of one size up to a constant;
            infinite ones fix a unit and are returned unchanged.
        low: Integers ``(R,)``, the smallest sizes.
        high: The largest ones. If they are larger, the inclusion probabilities have a sum between the two.
        goal: Error that is small enough. A larger error in the result means that the row is not solved.
    """
    rows, n = log_odds.shape
    logits, tilts, errors = (
        torch.empty_like(log_odds, memory_format=torch.contiguous_format),
        *log_odds.new_ones(2, rows),
    )
    width = min(int(high.max()), n - int(low.min()))
    if n * width <= TABLE_OF_INVERSE:
        given = (x.contiguous().numpy() for x in (log_odds, low, high))
        blocks = -(-rows // LANES)
        arguments = *given, goal, *(x.numpy() for x in (logits, tilts, errors))
        over_rows(_inverse_blocks, blocks, blocks * n * 16 * (8 + width), *arguments)
    return logits, tilts, errors
