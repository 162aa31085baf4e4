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

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpu.lanes import LANES, at, every, if_positive, put
from ..cpu.loops import inlined, kernel, over_rows, per_row, specialised, summed
from ..cpu.maths import EXP, LOG
from . import TABLE_OF_INVERSE
from .numba_table import (
    Array,
    bend,
    climb,
    counts_zeros,
    descend,
    empty_block,
    is_sound,
    lanes_of,
    row_of,
    tabulate,
    weigh,
    weigh_sizes,
    widest_of,
)

FARTHEST = 575.0  # e^-575 is 1e-250, as in laws.inverse: log-odds beyond this are infinite
ACCEPTED = 1e-11  # as in laws.inverse_newton: an error that rounding may leave
STEPS = 40  # 2 to 8 are usual
MARGIN = 1e3  # factor by which a predicted error must be small enough

_exp, _log = EXP[np.float64], LOG[np.float64]


class _Search(NamedTuple):
    """The state of the iteration in a block of rows: vectors of the units, and numbers of the rows."""

    target: Array
    scale: Array  # the inverse of the residual that counts as an error of 1; 0 for units without a choice
    aim: Array  # a
    residual: Array  # r
    weight: Array  # D, up to a factor
    p: Array
    q: Array
    last_aim: Array
    last_residual: Array
    move: Array
    going: Array  # positive in rows that are not finished
    error: Array  # infinite in these
    largest: Array
    last: Array


@per_row
def _empty_search(n):
    units, numbers = np.zeros((10, n * LANES)), np.empty((4, LANES))
    return _Search(
        units[0], units[1], units[2], units[3], units[4], units[5], units[6], units[7], units[8], units[9],
        numbers[0], numbers[1], numbers[2], numbers[3],
    )  # fmt: skip


@inlined
def _any_is_going(going):
    found = False
    for lane in range(LANES):
        found |= going[lane] > 0
    return found


@inlined
def _judge(search):
    """Subtracts from the residuals the constant by which the target may be off; writes the largest error of a row."""
    n, zero, total, lack = search.aim.shape[0] // LANES, every(0.0), every(0.0), every(0.0)
    for i in range(n):
        weight = if_positive(at(search.scale, i), at(search.weight, i), zero)
        total = total + weight
        lack = lack + weight * if_positive(at(search.scale, i), at(search.residual, i), zero)
    mean = lack / total
    largest = mean - mean  # NaN if a residual is
    for i in range(n):
        r = if_positive(at(search.scale, i), at(search.residual, i) - mean, zero)
        size = if_positive(r, r, zero - r) * at(search.scale, i)
        largest = if_positive(size - largest, size, largest)
        put(search.residual, i, r)
    put(search.largest, 0, largest)


@inlined
def _combine(search, is_first):
    """Moves the aim by a step of Anderson's method: by the residual, corrected by the last move."""
    n, of_both, of_change = search.aim.shape[0] // LANES, every(0.0), every(0.0)
    for i in range(n):
        lack = at(search.residual, i)
        there = at(search.aim, i) + lack
        change = lack - at(search.last_residual, i)
        put(search.move, i, there - at(search.last_aim, i))
        put(search.last_residual, i, lack)
        put(search.last_aim, i, there)
        scaled = at(search.weight, i) * at(search.scale, i) * at(search.scale, i) * change
        of_both = of_both + scaled * lack
        of_change = of_change + scaled * change
    factor = if_positive(of_change, of_both / of_change, every(0.0))
    for i in range(n):
        new = at(search.last_aim, i)
        if not is_first:
            new = new - factor * at(search.move, i)
        put(search.aim, i, if_positive(at(search.going, 0) * at(search.scale, i), new, at(search.aim, i)))


def _solver(name, guess, evaluate):
    """(block, n, goal, search): brings z from the guess for the target to the solution; writes the errors of rows."""
    with specialised(name):

        @per_row
        def solve(block, n, goal, search):
            going, errors, last = search.going, search.error, search.last
            for c in range(n * LANES):  # an assignment of whole arrays would take seconds to compile
                search.aim[c] = search.target[c]
            for lane in range(LANES):
                last[lane], going[lane] = np.inf, 1.0 if errors[lane] == np.inf else -1.0
            for step in range(STEPS):
                guess(block, n, search)
                if not _any_is_going(going):
                    return
                evaluate(block, n, search)
                _judge(search)
                for lane in range(LANES):
                    error = search.largest[lane]
                    if going[lane] > 0 and not error < np.inf:
                        errors[lane], going[lane] = 1.0, -1.0
                    elif going[lane] > 0 and (error <= goal or (last[lane] <= ACCEPTED and not error < last[lane])):
                        errors[lane], going[lane] = error, -1.0  # the latter is where rounding ends the progress
                if not _any_is_going(going):
                    return
                _combine(search, step == 0)
                for lane in range(LANES):
                    error = search.largest[lane]
                    if going[lane] > 0 and step > 0 and error * error / last[lane] * MARGIN <= goal:
                        errors[lane], going[lane] = goal, -1.0
                    last[lane] = error

    return solve


@summed
def _chances(z, p, q):
    for i in range(z.shape[0]):
        e = _exp(-abs(z[i]))
        s = 1.0 / (1.0 + e)
        p[i] = s if z[i] > 0 else e * s
        q[i] = e * s if z[i] > 0 else s


@inlined
def _guess(block, n, search):
    """Writes z = M(a)."""
    spread = every(0.25)
    _chances(search.aim, search.p, search.q)
    for i in range(n):
        spread = spread + at(search.p, i) * at(search.q, i)
    for i in range(n):
        p, q = at(search.p, i), at(search.q, i)
        put(block.z, i, at(search.aim, i) + every(0.5) * (q - p) / (spread - p * q))


@summed
def _residuals(target, out, included, residual, weight):
    for i in range(target.shape[0]):
        residual[i] = target[i] - _log(included[i] / out[i])
        size = out[i] + included[i]
        weight[i] = out[i] * included[i] / (size * size)


@inlined
def _evaluate(block, n, search):
    weigh(block.z, block.zero, block.one)
    climb(block, n)
    weigh_sizes(block, n)
    descend(block, n)
    _residuals(search.target, block.out, block.included, search.residual, search.weight)


@per_row
def _place(block, number, log_odds, k, search):
    """Places the log-odds and the sizes of a block.

    Errors are NaN in rows with NaN, 0 in rows without a choice and infinite in others.
    """
    (rows, n), target, scale = log_odds.shape, search.target, search.scale
    for lane in range(LANES):
        r = row_of(number, lane, rows)
        sign, left = (-1.0, n - k[r]) if counts_zeros(k[r], k[r], n) else (1.0, k[r])
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
        search.error[lane] = error


_solve = _solver("logits", _guess, _evaluate)


@kernel
def _inverse_blocks(begin, end, log_odds, k, goal, logits, tilts, errors):
    rows, n = log_odds.shape
    block, search = empty_block(n, widest_of(k, k, n), False), _empty_search(n)
    for number in range(begin, end):
        _place(block, number, log_odds, k, search)
        _solve(block, n, goal, search)
        for lane in range(lanes_of(number, rows)):
            r, sign, total, count = number * LANES + lane, block.sign[lane], 0.0, 0
            for c in range(lane, n * LANES, LANES):
                total += block.z[c] if search.scale[c] > 0 else 0.0
                count += search.scale[c] > 0
            mean, error = total / max(count, 1), search.error[lane]
            for i in range(n):
                logits[r, i] = sign * (block.z[i * LANES + lane] - mean)
            tilts[r] = -sign * mean
            errors[r] = error if abs(mean) < np.inf or error != error else 1.0
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
    """Runs a kernel over the blocks of rows, with so many items for each entry of a table, if a table is small enough.

    The first arguments are given, and the others are results.
    """
    (rows, n), width = x.shape, min(int(k.max()), x.shape[1] - int(k.min()))
    if n * width <= TABLE_OF_INVERSE:
        blocks = -(-rows // LANES)
        arrays = (v.contiguous().numpy() if isinstance(v, Tensor) else v for v in (x, k, *arguments))
        over_rows(kernel, blocks, blocks * n * items * (8 + width), *arrays)


@per_row
def _place_system(block, number, logits, b, rounding, search):
    """Writes pi and D^{-1} b in units that have a choice; errors are NaN in rows that have no sound law."""
    (rows, n), p, q, weight = logits.shape, search.p, search.q, search.weight
    for lane in range(LANES):
        r, units = row_of(number, lane, rows), 0
        excess = size = spread = 0.0
        for i in range(n):
            c = i * LANES + lane
            whole = block.out[c] + block.included[c]
            block.out[c] /= whole
            block.included[c] /= whole
            p[c], q[c] = block.included[c], block.out[c]
            weight[c] = p[c] * q[c] if abs(logits[r, i]) < np.inf else 0.0
            spread += weight[c]
            units += weight[c] > 0
            excess += b[r, i] if weight[c] > 0 else 0.0
            size += abs(b[r, i]) if weight[c] > 0 else 0.0
        mean = excess / units if units > 0 and abs(excess) > rounding * size else 0.0
        for i in range(n):
            c = i * LANES + lane
            search.target[c] = (b[r, i] - mean) / weight[c] if weight[c] > 0 else 0.0
            # Next to the entry of a rare unit, its residual is rounding. What others depend on is the sum of all b.
            search.scale[c] = 1.0 / (size / spread + abs(search.target[c])) if weight[c] > 0 and size > 0 else 0.0
        search.error[lane] = (np.inf if size > 0 else 0.0) if is_sound(block.total[lane]) else np.nan


@inlined
def _guess_system(block, n, search):
    """Writes the change of M(a) for a change of a."""
    spread, total = every(0.25), every(0.0)
    for i in range(n):
        p, q, change = at(search.p, i), at(search.q, i), at(search.weight, i) * at(search.aim, i)
        spread = spread + at(search.weight, i)
        total = total + (q - p) * change
    for i in range(n):
        lean, weight, aim = at(search.q, i) - at(search.p, i), at(search.weight, i), at(search.aim, i)
        others = spread - weight
        correction = weight * aim + every(0.5) * lean * (total - lean * weight * aim) / others
        put(block.z, i, aim - correction / others)


@inlined
def _evaluate_system(block, n, search):
    for i in range(n):
        put(search.residual, i, at(block.z, i))
    weigh_sizes(block, n)
    bend(block, n)
    for i in range(n):
        v, product = at(search.residual, i), at(block.z, i)
        put(block.z, i, v)
        put(search.residual, i, at(search.target, i) - product / at(search.weight, i))


_solve_system = _solver("system", _guess_system, _evaluate_system)


@kernel
def _covariance_blocks(begin, end, logits, k, b, none, tolerance, rounding, result):
    rows, n = logits.shape
    block, search = empty_block(n, widest_of(k, k, n), True), _empty_search(n)
    for number in range(begin, end):
        tabulate(block, number, logits, k, k, none)
        descend(block, n)
        _place_system(block, number, logits, b, rounding, search)
        _solve_system(block, n, tolerance, search)
        for lane in range(lanes_of(number, rows)):
            r, total, spread = number * LANES + lane, 0.0, 0.0
            for c in range(lane, n * LANES, LANES):
                total += search.weight[c] * block.z[c]
                spread += search.weight[c]
            known = 1.0 if search.error[lane] <= max(tolerance, ACCEPTED) else np.nan
            for i in range(n):
                c = i * LANES + lane
                result[r, i] = known * (block.z[c] - total / spread if search.scale[c] > 0 else 0.0)
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
