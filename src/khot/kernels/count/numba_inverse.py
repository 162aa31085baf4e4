r"""From inclusion probabilities to the law of units given their count, a row at a time, in numba.

With z the log-odds of independent units, and p and q their probabilities of one and of zero, the log-odds of inclusion
given B = k are

.. math:: a_i = z_i + \log \frac{P(B_{-i} = k - 1)}{P(B_{-i} = k)}

where :math:`B_{-i}` counts the others. As :math:`B_{-i}` is nearly normal, an explicit map z = M(a) nearly inverts
this, that of :mod:`khot.laws.inverse_newton`. The residual r, the distance of the log-odds of inclusion of M(a) from
the target, is added to a, and Anderson's method combines the last two steps. It gains two digits or so with every
evaluation, however small the variance of B is, whereas Newton's method takes several products with the covariance.
Better maps, such as Edgeworth's next term or the difference of two Poisson variables for small variances, and a start
from the logits of another known law, save less than an evaluation.

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
def _change(right, mean, weight, aim, last_right, last_aim, move):
    """Updates the last r and a + r, and the change of the latter; returns scalar products for a fit of r."""
    of_both = of_change = 0.0
    for i in range(right.shape[0]):
        lack = right[i] - mean
        change, move[i] = lack - last_right[i], aim[i] + lack - last_aim[i]
        last_right[i], last_aim[i] = lack, aim[i] + lack
        of_both += weight[i] * change * lack
        of_change += weight[i] * change * change
    return of_both, of_change


@summed
def _combine(last_aim, share, move, aim):
    for i in range(aim.shape[0]):
        aim[i] = last_aim[i] - share * move[i]


@per_row
def _search(target, k, goal, rows, space, work):
    """Writes the z whose log-odds given B = k are the target, with their probabilities.

    Returns the error, infinite if z was not found.
    """
    aim, z, p, q, complement, inclusion = rows
    right, weight, last_right, last_aim, move, _ = space
    balance(target, k, p, q, 0.0, max(EPS, 1e-3 * goal))
    for i in range(aim.shape[0]):  # copying a whole array makes numba compile 20 more functions
        aim[i], last_right[i], last_aim[i] = target[i], 0.0, 0.0
    guess(aim, k, p, q, z)
    last, size = np.inf, 1 + _largest(target)
    for at in range(STEPS):
        balance(z, k, p, q, CLOSE, 0.0)
        probabilities(count_law(p, q, k, work), work, complement, inclusion)
        error, mean = _compare(target, complement, inclusion, right, weight)
        error /= size
        if error <= goal:
            return error
        if not error < np.inf or math.isnan(mean):
            break
        if last <= ACCEPTED and not error < last:
            return error if error <= ACCEPTED else np.inf  # where rounding ends the progress
        of_both, of_change = _change(right, mean, weight, aim, last_right, last_aim, move)
        _combine(last_aim, of_both / of_change if at > 0 and of_change > 0 else 0.0, move, aim)
        guess(aim, k, p, q, z)
        gain = error / last
        if at > 0 and gain * error * MARGIN <= goal:
            return goal
        last = error
    return np.inf


@kernel
def _inverse_rows(begin, end, log_odds, k, goal, logits, tilts, errors):
    n, lost = log_odds.shape[1], 0
    units, target, work = np.empty(n, np.int64), np.empty(n), workplace(n)
    rows, space = np.empty((6, n)), np.empty((6, n))
    for r in range(begin, end):
        m, left, errors[r] = settle(log_odds[r], k[r], units, target, logits[r])
        tilts[r] = 0.0
        if errors[r] != 0 or not 0 < left < m:
            continue
        _, z, p, q, _, _ = rows_of(rows, m)
        errors[r] = _search(target[:m], left, goal, rows_of(rows, m), rows_of(space, m), work)
        balance(z, left, p, q, CLOSE, 0.0)
        mean = z.mean()
        tilts[r] = -mean
        for i in range(m):
            logits[r, units[i]] = z[i] - mean
        if not np.isfinite(mean):
            errors[r] = np.inf
        lost += errors[r] == np.inf
    return lost


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``(R, n)`` of mean 0, their tilts ``(R,)``, and the errors ``(R,)`` relative to the largest logit.

    Args:
        log_odds: Float64 ``(R, n)``, those of the inclusion probabilities up to a constant in each row; infinite ones
            fix a unit and are returned unchanged.
        k: Integers ``(R,)``, the sums of the inclusion probabilities.
        goal: Error that is small enough. A larger error in the result means that the row is not solved.
    """
    logits, rows = torch.empty_like(log_odds, memory_format=torch.contiguous_format), len(k)
    results = logits, log_odds.new_empty(rows), log_odds.new_empty(rows)
    given = (x.contiguous().numpy() for x in (log_odds, k))
    over_rows(_inverse_rows, rows, logits.numel() * WORK, *given, goal, *(x.numpy() for x in results))
    return results
