r"""The logits of units whose chances of being ones, given their count, are known: of rows that are not short, in numba.

The iteration of :mod:`khot.laws.inverse_newton`, whose map M nearly inverts these chances' log-odds. It takes no
matrix, and gains as much with every step; where that is little, as in rows of few open units, a row is left to others.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
from torch import Tensor

from ..numba_math import EXP, LOG
from ..numba_tilt import solve_tilt
from ..numba_tools import kernel, over_rows, per_row, summed
from .numba_recursion import chances, descend, plan, with_rows

FAST, MARGIN = 0.1, 100.0  # as in khot.laws.inverse_newton
STEPS = 30

exp, log = EXP[np.float64], LOG[np.float64]


@summed
def _spread(aim, variance, lean):
    """Writes p q and |q - p| / 2 of units of these log-odds; returns the variance of their count."""
    total = 0.0
    for i in range(aim.shape[0]):
        e = exp(-abs(aim[i]))
        s = 1 / (1 + e)
        variance[i], lean[i] = e * s * s, 0.5 * s * (1 - e)
        total += variance[i]
    return total


@per_row
def _guess(aim, variance, lean, theta):
    """M, as in khot.laws.inverse_newton."""
    total = _spread(aim, variance, lean) + 0.25
    for i in range(aim.shape[0]):
        half = lean[i] / (total - variance[i])
        theta[i] = aim[i] - (half if aim[i] > 0 else -half)


@summed
def _advance(target, complement, inclusion, lack, aim):
    """Writes what the log-odds lack, and adds it to the aim; the sum is NaN if any of it is."""
    total = 0.0
    for i in range(target.shape[0]):
        is_open = abs(target[i]) < np.inf
        odds = inclusion[i] / complement[i] if is_open else 1.0
        lack[i] = target[i] - log(odds) if is_open else 0.0
        aim[i] += lack[i]
        total += lack[i]
    return total


@per_row
def _error(lack, theta):
    """The largest of what the log-odds lack, relative to the largest of the finite logits."""
    error = largest = 0.0
    for i in range(lack.shape[0]):
        error = max(error, abs(lack[i]))
        if abs(theta[i]) < np.inf:
            largest = max(largest, abs(theta[i]))
    return error / (1 + largest)


@per_row
def _centre(theta):
    """Takes the mean off the finite entries."""
    total, count = 0.0, 0
    for i in range(theta.shape[0]):
        if abs(theta[i]) < np.inf:
            total += theta[i]
            count += 1
    for i in range(theta.shape[0]):
        theta[i] -= total / max(count, 1)


@kernel
def _rows(begin, end, log_odds, k, goal, logits, errors):
    n = log_odds.shape[1]
    aim, p, q, complement, inclusion, lack = np.empty((6, n))
    first, last_count = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    table, marks, rest = np.empty(0), np.empty(0), np.empty(0)
    for r in range(begin, end):
        for i in range(n):
            aim[i] = log_odds[r, i]
        before, error = np.inf, np.inf
        for _ in range(STEPS):
            _guess(aim, p, q, logits[r])
            if error < before < np.inf and error / before * error * MARGIN <= goal:  # what this step leaves
                error = goal
                break
            anchor, offset = solve_tilt(logits[r], k[r])
            before = error
            error = np.inf
            if not abs(offset) < np.inf:
                break
            chances(logits[r], anchor, offset, p, q)
            _, length, stride, table, marks = plan(p, q, k[r], first, last_count, table, marks)
            rest = with_rows(rest, 2, stride)
            descend(p, q, first, last_count, length, stride, table, marks, rest, complement, inclusion)
            total = _advance(log_odds[r], complement, inclusion, lack, aim)
            error = _error(lack, logits[r]) if total == total else np.inf
            if error <= goal or not error <= FAST * before:
                break
        _centre(logits[r])
        errors[r] = error
    return 0


def bernoulli_count_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    log_odds, k = log_odds.contiguous(), k.contiguous()
    logits, errors = log_odds.new_empty(log_odds.shape), log_odds.new_empty(len(log_odds))
    arguments = (x.numpy() for x in (log_odds, k))
    over_rows(_rows, len(logits), logits.numel() * 64, *arguments, goal, logits.numpy(), errors.numpy())
    return logits, errors
