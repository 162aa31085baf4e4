r"""The inverse of the inclusion probabilities of short rows, and of its derivative, eight rows at a time, in numba.

With z the log-odds of independent units, and p and q their probabilities of one and of zero, the log-odds of inclusion
given B = k are

.. math:: a_i = z_i + \log \frac{P(B_{-i} = k - 1)}{P(B_{-i} = k)}

where :math:`B_{-i}` counts the others. As :math:`B_{-i}` is nearly normal, the explicit map z = M(a) of
:mod:`khot.laws.inverse_newton` nearly inverts this. The residual r, the distance of the log-odds of inclusion of M(a)
from the target up to a constant, is added to a, and Anderson's method combines the last two steps. It gains two digits
or so with every evaluation, however small the variance of B is.

Systems C v = b in the covariance are solved in the same way: :math:`D^{-1} C`, with D the diagonal of C, is the
derivative of a in z, so the derivative of M nearly inverts it, and the target is :math:`D^{-1} b`.

Everything builds on :mod:`.numba_table`. Rows that are not solved are left to other code.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
import torch
from torch import Tensor

from ..cpu.lanes import LANES, at, every, if_positive, put
from ..cpu.loops import kernel, over_rows, per_row, specialised, summed
from ..cpu.maths import LOG
from . import TABLE_OF_INVERSE, numba_table
from .numba_long import fates
from .numba_table import empty_block, is_sound, lanes_of, row_of, widest_of

FARTHEST = 575.0  # e^-575 is 1e-250, as in laws.inverse: log-odds beyond this are infinite
ACCEPTED = 1e-11  # as in laws.inverse_newton: an error that rounding may leave
STEPS = 40  # 2 to 8 are usual
MARGIN = 1e3  # factor by which a predicted error must be small enough

_log = LOG[np.float64]


# Rows of the array with the state of the iteration in a block: vectors of the units, then numbers of its rows.
TARGET, AIM, RESIDUAL, WEIGHT = 0, 1, 2, 3  # what a should be, a, r and D
SCALE = 4  # the inverse of the residual that counts as an error of 1; 0 for units without a choice
LAST_AIM, LAST_RESIDUAL, MOVE, P, Q, LEAN = 5, 6, 7, 8, 9, 10  # q - p
GOING, ERROR, LARGEST, LAST = 11, 12, 13, 14  # positive until the error of a row, infinite before, is known
STATE = 15


@per_row
def _any_is_going(going):
    found = False
    for lane in range(LANES):
        found |= going[lane] > 0
    return found


@per_row
def _judge(search):
    """Subtracts from the residuals the constant by which the target may be off; writes the largest error of a row."""
    scale, residual, weight = search[SCALE], search[RESIDUAL], search[WEIGHT]
    n, zero, total, lack = search.shape[1] // LANES, every(0.0), every(0.0), every(0.0)
    for i in range(n):
        share = if_positive(at(scale, i), at(weight, i), zero)
        total = total + share
        lack = lack + share * if_positive(at(scale, i), at(residual, i), zero)
    mean = lack / total
    largest = mean - mean  # NaN if a residual is
    for i in range(n):
        r = if_positive(at(scale, i), at(residual, i) - mean, zero)
        size = if_positive(r, r, zero - r) * at(scale, i)
        largest = if_positive(size - largest, size, largest)
        put(residual, i, r)
    put(search[LARGEST], 0, largest)


@per_row
def _combine(search, is_first):
    """Moves the aim by a step of Anderson's method: by the residual, corrected by the last move."""
    scale, aim, residual, weight = search[SCALE], search[AIM], search[RESIDUAL], search[WEIGHT]
    last_residual, last_aim, move, going = search[LAST_RESIDUAL], search[LAST_AIM], search[MOVE], search[GOING]
    n, of_both, of_change = search.shape[1] // LANES, every(0.0), every(0.0)
    for i in range(n):
        lack = at(residual, i)
        there = at(aim, i) + lack
        change = lack - at(last_residual, i)
        put(move, i, there - at(last_aim, i))
        put(last_residual, i, lack)
        put(last_aim, i, there)
        scaled = at(weight, i) * at(scale, i) * at(scale, i) * change
        of_both = of_both + scaled * lack
        of_change = of_change + scaled * change
    factor = if_positive(of_change, of_both / of_change, every(0.0))
    for i in range(n):
        new = at(last_aim, i)
        if not is_first:
            new = new - factor * at(move, i)
        put(aim, i, if_positive(at(going, 0) * at(scale, i), new, at(aim, i)))


def _solver(name, guess, evaluate):
    """(block, n, goal, search): brings z from the guess for the target to the solution; writes the errors of rows."""
    with specialised(name):

        @per_row
        def solve(block, n, goal, search):
            going, errors, largest, last = search[GOING], search[ERROR], search[LARGEST], search[LAST]
            target, aim = search[TARGET], search[AIM]
            for c in range(n * LANES):  # an assignment of whole arrays would take seconds to compile
                aim[c] = target[c]
            for lane in range(LANES):
                last[lane], going[lane] = np.inf, 1.0 if errors[lane] == np.inf else -1.0
            for step in range(STEPS):
                guess(block, n, search)
                if not _any_is_going(going):
                    return
                evaluate(block, n, search)
                _judge(search)
                for lane in range(LANES):
                    error = largest[lane]
                    if going[lane] > 0 and not error < np.inf:
                        errors[lane], going[lane] = 1.0, -1.0
                    elif going[lane] > 0 and (error <= goal or (last[lane] <= ACCEPTED and not error < last[lane])):
                        errors[lane], going[lane] = error, -1.0  # the latter is where rounding ends the progress
                if not _any_is_going(going):
                    return
                _combine(search, step == 0)
                for lane in range(LANES):
                    error = largest[lane]
                    if going[lane] > 0 and step > 0 and error * error / last[lane] * MARGIN <= goal:
                        errors[lane], going[lane] = goal, -1.0
                    last[lane] = error

    return solve


@per_row
def _guess(block, n, search):
    """Writes z = M(a)."""
    aim, ones, zeros, spread = search[AIM], search[P], search[Q], every(0.25)
    fates(aim, 0.0, ones, zeros)
    for i in range(n):
        spread = spread + at(ones, i) * at(zeros, i)
    for i in range(n):
        p, q = at(ones, i), at(zeros, i)
        put(block.z, i, at(aim, i) + every(0.5) * (q - p) / (spread - p * q))


@summed
def _residuals(target, out, included, residual, weight):
    for i in range(target.shape[0]):
        residual[i] = target[i] - _log(included[i] / out[i])
        size = out[i] + included[i]
        weight[i] = out[i] * included[i] / (size * size)


@per_row
def _evaluate(block, n, search):
    numba_table.weigh(block.z, block.zero, block.one)
    numba_table.climb(block, n)
    numba_table.weigh_sizes(block, n)
    numba_table.descend(block, n)
    _residuals(search[TARGET], block.out, block.included, search[RESIDUAL], search[WEIGHT])


@per_row
def _place(block, number, log_odds, k, search):
    """Places the log-odds and the sizes of a block.

    Errors are NaN in rows with NaN, 0 in rows without a choice and infinite in others.
    """
    (rows, n), target, scale = log_odds.shape, search[TARGET], search[SCALE]
    for lane in range(LANES):
        r = row_of(number, lane, rows)
        sign, left = (-1.0, n - k[r]) if numba_table.counts_zeros(k[r], k[r], n) else (1.0, k[r])
        block.sign[lane], block.low[lane], block.high[lane], block.shift[lane] = sign, left, left, 0.0
        units, size, error = 0, 1.0, np.inf
        for i in range(n):
            x = sign * log_odds[r, i]
            is_free = abs(x) <= FARTHEST
            if x != x:
                error = np.nan
            target[i * LANES + lane] = x if is_free else x * np.inf
            units += is_free
            size = max(size, 1.0 + abs(x)) if is_free else size
            left -= x > FARTHEST
        if error == error and (left <= 0 or left >= units):
            error = 0.0
        for c in range(lane, n * LANES, LANES):
            scale[c] = 1.0 / size if abs(target[c]) < np.inf else 0.0
            if error == 0 and scale[c] > 0:
                target[c], scale[c] = -np.inf if left <= 0 else np.inf, 0.0
        search[ERROR][lane] = error


_solve = _solver("logits", _guess, _evaluate)


@kernel
def _inverse_blocks(begin, end, log_odds, k, goal, logits, tilts, results):
    rows, n = log_odds.shape
    block, search = empty_block(n, widest_of(k, k, n), False), np.zeros((STATE, n * LANES))
    scale, errors = search[SCALE], search[ERROR]
    for number in range(begin, end):
        _place(block, number, log_odds, k, search)
        _solve(block, n, goal, search)
        for lane in range(lanes_of(number, rows)):
            r, sign, error, total, count = number * LANES + lane, block.sign[lane], errors[lane], 0.0, 0
            for c in range(lane, n * LANES, LANES):
                total += block.z[c] if scale[c] > 0 else 0.0
                count += scale[c] > 0
            mean = total / max(count, 1)
            for i in range(n):
                logits[r, i] = sign * (block.z[i * LANES + lane] - mean)
            tilts[r] = -sign * mean
            results[r] = error if abs(mean) < np.inf or error != error else 1.0
    return 0


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``(R, n)`` with mean 0, their tilts ``(R,)``, and the errors ``(R,)`` relative to the largest logit.

    Args:
        log_odds: Float64 ``(R, n)``, those of the inclusion probabilities up to a constant of each row; infinite ones
            fix a unit and are returned unchanged.
        k: Integers ``(R,)``, the sizes.
        goal: Error that is small enough. A larger error in the result means that the row is not solved.
    """
    logits = torch.empty_like(log_odds, memory_format=torch.contiguous_format)
    tilts, errors = log_odds.new_ones(2, len(k))
    _over_blocks(_inverse_blocks, 16, log_odds, k, goal, logits, tilts, errors)
    return logits, tilts, errors


def _over_blocks(kernel, items, x, k, *arguments):
    """Runs a kernel over blocks of rows, with so many items for an entry of a table, if that is small enough."""
    (rows, n), width = x.shape, min(int(k.max()), x.shape[1] - int(k.min()))
    if n * width <= TABLE_OF_INVERSE:
        blocks = -(-rows // LANES)
        arrays = (v.contiguous().numpy() if isinstance(v, Tensor) else v for v in (x, k, *arguments))
        over_rows(kernel, blocks, blocks * n * items * (8 + width), *arrays)


@per_row
def _place_system(block, number, logits, b, rounding, search):
    """Writes pi and D^{-1} b in units that have a choice; errors are NaN in rows that have no sound law."""
    (rows, n), target, scale, weight, lean = logits.shape, search[TARGET], search[SCALE], search[WEIGHT], search[LEAN]
    for lane in range(LANES):
        r, units = row_of(number, lane, rows), 0
        excess = size = spread = 0.0
        for i in range(n):
            c = i * LANES + lane
            whole = block.out[c] + block.included[c]
            block.out[c] /= whole
            block.included[c] /= whole
            lean[c] = block.out[c] - block.included[c]
            weight[c] = block.out[c] * block.included[c] if abs(logits[r, i]) < np.inf else 0.0
            spread += weight[c]
            units += weight[c] > 0
            excess += b[r, i] if weight[c] > 0 else 0.0
            size += abs(b[r, i]) if weight[c] > 0 else 0.0
        mean = excess / units if units > 0 and abs(excess) > rounding * size else 0.0
        for i in range(n):
            c = i * LANES + lane
            target[c] = (b[r, i] - mean) / weight[c] if weight[c] > 0 else 0.0
            # Next to the entry of a rare unit, its residual is rounding. What others depend on is the sum of all b.
            scale[c] = 1.0 / (size / spread + abs(target[c])) if weight[c] > 0 and size > 0 else 0.0
        search[ERROR][lane] = (0.0 if size == 0 else np.inf) if is_sound(block.total[lane]) else np.nan


@per_row
def _guess_system(block, n, search):
    """Writes the change of M(a) for a change of a."""
    aim, lean, weight, spread, total = search[AIM], search[LEAN], search[WEIGHT], every(0.25), every(0.0)
    for i in range(n):
        spread = spread + at(weight, i)
        total = total + at(lean, i) * at(weight, i) * at(aim, i)
    for i in range(n):
        change, others = at(weight, i) * at(aim, i), spread - at(weight, i)
        correction = change + every(0.5) * at(lean, i) * (total - at(lean, i) * change) / others
        put(block.z, i, at(aim, i) - correction / others)


@per_row
def _evaluate_system(block, n, search):
    target, residual, weight = search[TARGET], search[RESIDUAL], search[WEIGHT]
    for i in range(n):
        put(residual, i, at(block.z, i))
    numba_table.weigh_sizes(block, n)
    numba_table.bend(block, n)
    for i in range(n):
        v, product = at(residual, i), at(block.z, i)
        put(block.z, i, v)
        put(residual, i, at(target, i) - product / at(weight, i))


_solve_system = _solver("system", _guess_system, _evaluate_system)


@kernel
def _covariance_blocks(begin, end, logits, k, b, none, tolerance, rounding, result):
    rows, n = logits.shape
    block, search = empty_block(n, widest_of(k, k, n), True), np.zeros((STATE, n * LANES))
    scale, weight, errors = search[SCALE], search[WEIGHT], search[ERROR]
    for number in range(begin, end):
        numba_table.tabulate(block, number, logits, k, k, none)
        numba_table.descend(block, n)
        _place_system(block, number, logits, b, rounding, search)
        _solve_system(block, n, tolerance, search)
        for lane in range(lanes_of(number, rows)):
            r, total, spread = number * LANES + lane, 0.0, 0.0
            for c in range(lane, n * LANES, LANES):
                total += weight[c] * block.z[c]
                spread += weight[c]
            known = 1.0 if errors[lane] <= max(tolerance, ACCEPTED) else np.nan
            for i in range(n):
                c = i * LANES + lane
                result[r, i] = known * (block.z[c] - total / spread if scale[c] > 0 else 0.0)
    return 0


def covariance_inverse(logits: Tensor, b: Tensor, k: Tensor, tolerance: float, rounding: float) -> Tensor:
    """v ``(R, n)`` with C v = b over the finite logits, and 0 elsewhere.

    b sums to 0 there. A sum of at most ``rounding`` times the sum of absolute values is removed in proportion to the
    diagonal D of C, a larger one evenly. Among the solutions, which differ by constants, v is the one with sum D v = 0.
    It has the relative accuracy ``tolerance``, and is NaN in rows that a kernel could not solve.
    """
    v = torch.full_like(b, torch.nan, memory_format=torch.contiguous_format)
    _over_blocks(_covariance_blocks, 32, logits, k, b, b.new_empty(0), tolerance, rounding, v)
    return v
