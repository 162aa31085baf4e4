r"""From inclusion probabilities to the law of units given their count, a row at a time, in numba.

With z the log-odds of independent units, and p and q their probabilities of one and of zero, the log-odds of inclusion
given B = k are

.. math:: a_i = z_i + \log \frac{P(B_{-i} = k - 1)}{P(B_{-i} = k)}

where :math:`B_{-i}` counts the others. An explicit map z = M(a) nearly inverts this. If B has some variance V it is
nearly normal, and Edgeworth's series gives M to the third power of 1 / V; if it has almost none, it is nearly the
difference of two Poisson variables. The residual r, the distance of the log-odds of inclusion of M(a) from the target,
is added to a, and Anderson's method combines the last three steps. It gains two or three digits with every evaluation,
however small V is, whereas Newton's method takes several products with the covariance. (A start from the logits of
another known law, such as the one from which the probabilities are halfway to a draw, is no better than M.)

Everything builds on :mod:`.numba_row`. Rows that are not solved are left to other code.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import kernel, over_rows, per_row, summed
from ..cpu.maths import LOG
from ..cpu.rows import larger
from .numba_row import count_law, probabilities, workplace
from .numba_units import CLOSE, EPS, WORK, balance, guess, rows_of, settle

ACCEPTED = 1e-11  # as in laws.inverse_newton: an error that rounding may leave
STEPS = 40  # 2 to 8 are usual
INDEPENDENT = 1e-10  # relative to a product of squares, above which two steps are independent
MARGIN = 1e3  # factor by which a predicted error must be small enough

log = LOG[np.float64]


@summed
def _compare(target, complement, inclusion, right, variance):
    """Writes the residual of the log-odds of inclusion, and pi (1 - pi); returns its largest entry and its mean."""
    error = weight = mean = 0.0
    for i in range(target.shape[0]):
        lack = target[i] - log(inclusion[i] / complement[i])
        right[i], variance[i] = lack, inclusion[i] * complement[i]
        error = larger(error, abs(lack))
        weight += variance[i]
        mean += variance[i] * lack
    return error, mean / weight


@summed
def _largest(x):
    found = 0.0
    for i in range(x.shape[0]):
        found = larger(found, abs(x[i]))
    return found


@summed
def _products(weight, first, second, right):
    """The weighted scalar products for a least-squares fit of ``right``."""
    aa = ab = bb = ar = br = 0.0
    for i in range(right.shape[0]):
        a, b, w = first[i], second[i], weight[i]
        aa += w * a * a
        ab += w * a * b
        bb += w * b * b
        ar += w * a * right[i]
        br += w * b * right[i]
    return aa, ab, bb, ar, br


@summed
def _shift_history(right, aim, mean, last_right, last_aim, change, move, older_change, older_move):
    """Updates the last two steps: the changes of r and of a + r."""
    for i in range(right.shape[0]):
        lack = right[i] - mean
        older_change[i], older_move[i] = change[i], move[i]
        change[i], move[i] = lack - last_right[i], aim[i] + lack - last_aim[i]
        last_right[i], last_aim[i] = lack, aim[i] + lack


@summed
def _combine(last_aim, share, move, older_share, older_move, aim):
    for i in range(aim.shape[0]):
        aim[i] = last_aim[i] - share * move[i] - older_share * older_move[i]


@per_row
def _next_aim(at, right, mean, weight, aim, history):
    """Anderson's step: a + r, minus the combination of the last two steps for which r is smallest."""
    last_right, last_aim, change, move, older_change, older_move = history
    _shift_history(right, aim, mean, *history)
    share = older_share = 0.0
    if at > 0:
        aa, ab, bb, ar, br = _products(weight, change, older_change, last_right)
        determinant = aa * bb - ab * ab
        if at > 1 and determinant > INDEPENDENT * aa * bb:
            share, older_share = (ar * bb - br * ab) / determinant, (br * aa - ar * ab) / determinant
        elif aa > 0:
            share = ar / aa
    _combine(last_aim, share, move, older_share, older_move, aim)


@per_row
def _search(target, k, goal, rows, right, weight, history, work):
    """Writes the z whose log-odds given B = k are the target, with their probabilities.

    Returns the error, infinite if z was not found.
    """
    aim, z, p, q, complement, inclusion = rows
    variance = balance(target, k, p, q, 0.0, max(EPS, 1e-3 * goal))
    for i in range(aim.shape[0]):  # copying a whole array makes numba compile 20 more functions
        aim[i] = target[i]
    guess(aim, k, variance, p, q, z)
    last, size = np.inf, 1 + _largest(target)
    for at in range(STEPS):
        balance(z, k, p, q, CLOSE, 0.0)
        law = count_law(p, q, k, work)
        probabilities(law, work, complement, inclusion)
        error, mean = _compare(target, complement, inclusion, right, weight)
        error /= size
        if error <= goal:
            return error
        if not error < np.inf or math.isnan(mean):
            break
        if last <= ACCEPTED and not error < last:
            return error if error <= ACCEPTED else np.inf  # where rounding ends the progress
        _next_aim(at, right, mean, weight, aim, history)
        guess(aim, k, variance, p, q, z)
        gain = error / last
        if at > 0 and gain * error * MARGIN <= goal:
            return goal
        last = error
    return np.inf


@kernel
def _inverse_rows(begin, end, log_odds, k, goal, logits, tilts, errors):
    n, lost = log_odds.shape[1], 0
    units, target, right, weight, work = np.empty(n, np.int64), np.empty(n), np.empty(n), np.empty(n), workplace(n)
    rows, space = np.empty((6, n)), np.zeros((6, n))
    for r in range(begin, end):
        m, left, errors[r] = settle(log_odds[r], k[r], units, target, logits[r])
        tilts[r, :] = 0.0
        if errors[r] != 0 or not 0 < left < m:
            continue
        of_row, history = rows_of(rows, m), rows_of(space, m)
        errors[r] = _search(target[:m], left, goal, of_row, right[:m], weight[:m], history, work)
        _, z, p, q, _, _ = of_row
        balance(z, left, p, q, CLOSE, 0.0)
        mean = tilts[r, 1] = z.mean()
        for i in range(m):
            logits[r, units[i]] = z[i] - mean
        if not np.isfinite(mean):
            errors[r] = np.inf
        lost += errors[r] == np.inf
    return lost


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor, Tensor]:
    logits, rows = torch.empty_like(log_odds, memory_format=torch.contiguous_format), len(k)
    results = logits, log_odds.new_empty(rows, 2), log_odds.new_empty(rows)
    given = (x.contiguous().numpy() for x in (log_odds, k))
    over_rows(_inverse_rows, rows, logits.numel() * WORK, *given, goal, *(x.numpy() for x in results))
    return results
