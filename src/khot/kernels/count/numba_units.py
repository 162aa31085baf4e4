"""Preparations of a row for the inverses, in numba: its open units, shifted so that k ones are expected, and a guess.

See :mod:`.numba_inverse` for the map M, from the log-odds of inclusion to about the log-odds of the units.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from ..cpu.loops import per_row, summed
from ..cpu.maths import EXP, LOG

EPS = np.finfo(np.float64).eps
FARTHEST = 575.0  # e^-575 is 1e-250, as in laws.inverse: log-odds beyond this are infinite
CLOSE = 0.2  # largest distance of the expected count from k for which windows and nodes are well placed
WORK = 64  # items that take as long as one unit
TILT_STEPS = 100  # 1 to 3 are usual

exp, log = EXP[np.float64], LOG[np.float64]


@per_row
def gather(x, k, farthest, units, z):
    """Gathers the entries up to the farthest and their positions; returns their number, and how many are ones."""
    m, left = 0, k
    for i in range(x.shape[0]):
        if x[i] > farthest:
            left -= 1
        elif x[i] >= -farthest:
            units[m], z[m] = i, x[i]
            m += 1
    return m, left


@per_row
def settle(log_odds, k, units, target, logits):
    """Writes the logits of units without a choice, due to k or their log-odds, and gathers the others in ``target``.

    Returns the number of the others, how many of them are ones, and the error so far: NaN if there is a NaN.
    """
    m, left = gather(log_odds, k, FARTHEST, units, target)
    certain, error = np.inf if left > 0 else -np.inf, 0.0  # the logit of the others, if k leaves them no choice
    for i in range(log_odds.shape[0]):
        x = log_odds[i]
        logits[i] = certain if abs(x) <= FARTHEST else x * np.inf
        if x != x:
            error = np.nan
    return m, left, error


@per_row
def rows_of(space, m):
    """Contiguous rows, which compile to vectorised loops."""
    return space[0, :m], space[1, :m], space[2, :m], space[3, :m], space[4, :m], space[5, :m]


@summed
def chances(z, k, p, q):
    """Writes the probabilities of one and of zero; returns the expected count minus k, and its variance."""
    rare = likely = variance = 0.0  # the first is a sum of small numbers, the second an integer
    for i in range(z.shape[0]):
        e = exp(-abs(z[i]))
        s = 1.0 / (1.0 + e)
        few = e * s
        p[i], q[i] = s if z[i] > 0 else few, few if z[i] > 0 else s
        rare += -few if z[i] > 0 else few
        likely += 1.0 if z[i] > 0 else 0.0
        variance += few * s
    return rare + (likely - k), variance


@per_row
def balance(z, k, p, q, close, rounding):
    """Shifts z so that the expected count is k, to within ``close`` or this rounding; writes the probabilities."""
    m, done = z.shape[0], 0.0
    low, high = -np.inf, np.inf
    for _ in range(TILT_STEPS):
        excess, variance = chances(z, k, p, q)
        if abs(excess) <= max(close, rounding * variance):
            break
        if low == -np.inf:
            lowest = highest = z[0]
            for i in range(m):
                lowest, highest = min(lowest, z[i]), max(highest, z[i])
            low, high = -highest - log(float(m)), -lowest + log(float(m))  # shifts at which fewer and more are expected
        if excess > 0:
            high = done
        else:
            low = done
        shift = done - excess / variance
        if not low < shift < high:
            shift = (low + high) / 2
        if shift == done:
            break
        for i in range(m):
            z[i] += shift - done
        done = shift


@summed
def _add_correction(aim, p, q, variance, z):
    for i in range(aim.shape[0]):
        z[i] = aim[i] + 0.5 * (q[i] - p[i]) / (variance - p[i] * q[i] + 0.25)


@per_row
def guess(aim, k, p, q, z):
    """Writes M(aim)."""
    _, variance = chances(aim, k, p, q)
    _add_correction(aim, p, q, variance, z)
