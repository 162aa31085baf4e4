r"""From inclusion probabilities to the law of short rows of units given their count, several rows at a time, in numba.

With z the log-odds of independent units, and p and q their probabilities of one and of zero, the log-odds of inclusion
given B = k are

.. math:: a_i = z_i + \log \frac{P(B_{-i} = k - 1)}{P(B_{-i} = k)}

where :math:`B_{-i}` counts the others. As :math:`B_{-i}` is nearly normal, the explicit map z = M(a) of
:mod:`khot.laws.inverse_newton` nearly inverts this. The residual r, the distance of the log-odds of inclusion of M(a)
from the target up to a constant, is added to a, and Anderson's method combines the last two steps. It gains two digits
or so with every evaluation, however small the variance of B is, whereas Newton's method takes several products with the
covariance.

Everything builds on :mod:`.numba_table`. Rows that are not solved are left to other code.
"""

# mypy: disable-error-code="no-untyped-def"

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
def _place(block, number, log_odds, k, target, free, errors):
    """Places the log-odds of a block and its sizes; marks units that have a choice with 1 in ``free``.

    Errors are NaN in rows with NaN, 0 in rows without a choice and infinite in others.
    """
    rows, n = log_odds.shape
    for lane in range(LANES):
        r = row_of(number, lane, rows)
        is_flipped = counts_zeros(k[r], k[r], n)
        sign, left = (-1.0, n - k[r]) if is_flipped else (1.0, k[r])
        block.sign[lane], block.low[lane], block.high[lane], block.shift[lane] = sign, left, left, 0.0
        units, errors[lane] = 0, np.inf
        for i in range(n):
            x = sign * log_odds[r, i]
            is_free = abs(x) <= FARTHEST
            if x != x:
                errors[lane] = np.nan
            target[i * LANES + lane] = x if is_free else x * np.inf
            free[i * LANES + lane] = 1.0 if is_free else 0.0
            units += is_free
            left -= x > FARTHEST
        if errors[lane] == errors[lane] and (left <= 0 or left >= units):
            errors[lane] = 0.0
            for i in range(n):
                if free[i * LANES + lane] > 0:
                    target[i * LANES + lane], free[i * LANES + lane] = -np.inf if left <= 0 else np.inf, 0.0


@per_row
def _guess(aim, p, q, z):
    """Writes M(aim)."""
    n, spread = aim.shape[0] // LANES, every(0.0)
    _chances(aim, p, q)
    for i in range(n):
        spread = spread + at(p, i) * at(q, i)
    for i in range(n):
        x, y = at(p, i), at(q, i)
        put(z, i, at(aim, i) + every(0.5) * (y - x) / (spread - x * y + every(0.25)))


@per_row
def _largest(x, free, result):
    found = every(0.0)
    for i in range(x.shape[0] // LANES):
        value = at(x, i)
        size = if_positive(at(free, i), if_positive(value, value, every(0.0) - value), every(0.0))
        found = if_positive(size - found, size, found)
    put(result, 0, found)


@per_row
def _evaluate(block, n, target, free, residual, weight, largest, mean):
    """Writes residuals and variances of units, and for each row the largest residual and the weighted mean.

    The mean, a constant by which the target may be off, is subtracted from the residuals.
    """
    climb(block, n)
    weigh_sizes(block, n)
    descend(block, n)
    _residuals(target, block.out, block.included, residual)
    total = lack = every(0.0)
    for i in range(n):
        out, included, unit = at(block.out, i), at(block.included, i), at(free, i)
        size = out + included
        variance = if_positive(unit, out * included / (size * size), every(0.0))
        put(residual, i, if_positive(unit, at(residual, i), every(0.0)))
        put(weight, i, variance)
        total = total + variance
        lack = lack + variance * at(residual, i)
    put(mean, 0, lack / total)
    for i in range(n):
        put(residual, i, if_positive(at(free, i), at(residual, i) - at(mean, 0), every(0.0)))
    _largest(residual, free, largest)


@per_row
def _combine(residual, weight, free, aim, last_residual, last_aim, move, going, is_first):
    """Moves the aim by a step of Anderson's method: by the residual, corrected by the last move."""
    n, of_both, of_change = aim.shape[0] // LANES, every(0.0), every(0.0)
    for i in range(n):
        lack = at(residual, i)
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


@inlined
def _any_is_going(going):
    found = False
    for lane in range(LANES):
        found |= going[lane] > 0
    return found


@per_row
def _solve(block, n, goal, units, numbers, errors):
    """Finds the log-odds z of a block for its target; writes the errors of rows whose error is infinite."""
    target, free, p, q, aim, residual, weight = units[0], units[1], units[2], units[3], units[4], units[5], units[6]
    largest, mean, going, last, size = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    _largest(target, free, size)
    for c in range(n * LANES):  # an assignment of whole arrays would take seconds to compile
        aim[c] = target[c]
    for lane in range(LANES):
        last[lane], going[lane] = np.inf, 1.0 if errors[lane] == np.inf else -1.0
    for step in range(STEPS):
        _guess(aim, p, q, block.z)
        if not _any_is_going(going):
            return
        weigh(block.z, block.zero, block.one)
        _evaluate(block, n, target, free, residual, weight, largest, mean)
        for lane in range(LANES):
            error = largest[lane] / (1 + size[lane])
            if going[lane] > 0 and (not error < np.inf or mean[lane] != mean[lane]):
                errors[lane], going[lane] = 1.0, -1.0
            elif going[lane] > 0 and (error <= goal or (last[lane] <= ACCEPTED and not error < last[lane])):
                errors[lane], going[lane] = error, -1.0  # the latter is where rounding ends the progress
        if not _any_is_going(going):
            return
        _combine(residual, weight, free, aim, units[7], units[8], units[9], going, step == 0)
        for lane in range(LANES):
            error = largest[lane] / (1 + size[lane])
            if going[lane] > 0 and step > 0 and error * error / last[lane] * MARGIN <= goal:
                errors[lane], going[lane] = goal, -1.0
            last[lane] = error


@kernel
def _inverse_blocks(begin, end, log_odds, k, goal, logits, tilts, results):
    rows, n = log_odds.shape
    block, units = empty_block(n, widest_of(k, k, n), False), np.empty((10, n * LANES))
    numbers, errors = np.empty((5, LANES)), np.empty(LANES)
    target, free = units[0], units[1]
    for number in range(begin, end):
        _place(block, number, log_odds, k, target, free, errors)
        _solve(block, n, goal, units, numbers, errors)
        for lane in range(lanes_of(number, rows)):
            r, total, count = number * LANES + lane, 0.0, 0.0
            for i in range(n):
                total += block.z[i * LANES + lane] if free[i * LANES + lane] > 0 else 0.0
                count += free[i * LANES + lane]
            mean = total / max(count, 1.0)
            for i in range(n):
                logits[r, i] = block.sign[lane] * (block.z[i * LANES + lane] - mean)
            tilts[r] = -block.sign[lane] * mean
            results[r] = errors[lane] if abs(mean) < np.inf or errors[lane] != errors[lane] else 1.0
    return 0


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``(R, n)`` with mean 0, their tilts ``(R,)``, and the errors ``(R,)`` relative to the largest logit.

    Args:
        log_odds: Float64 ``(R, n)``, those of the inclusion probabilities up to a constant of each row; infinite ones
            fix a unit and are returned unchanged.
        k: Integers ``(R,)``, the sizes.
        goal: Error that is small enough. A larger error in the result means that the row is not solved.
    """
    rows, n = log_odds.shape
    logits, tilts, errors = (
        torch.empty_like(log_odds, memory_format=torch.contiguous_format),
        *log_odds.new_ones(2, rows),
    )
    width = min(int(k.max()), n - int(k.min()))
    if n * width <= TABLE_OF_INVERSE:
        blocks, given = -(-rows // LANES), (x.contiguous().numpy() for x in (log_odds, k))
        arguments = *given, goal, *(x.numpy() for x in (logits, tilts, errors))
        over_rows(_inverse_blocks, blocks, blocks * n * 16 * (8 + width), *arguments)
    return logits, tilts, errors
