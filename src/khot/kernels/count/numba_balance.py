"""What the inverses of both kinds need of a row: its open units, shifted so that k ones are expected; in numba."""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from ..numba_math import EXP, LOG
from ..numba_tools import per_row

TILT_STEPS = 200
ACCEPTED = 1e-11  # as in laws.inverse_newton: where rounding ends the progress
CLOSE = 1e-3  # of an expected count to k
EPS, LARGEST = np.finfo(np.float64).eps, np.finfo(np.float64).max
FARTHEST = 575.0  # e^-575 is 1e-250, as in laws.inverse: log-odds beyond are infinite

exp, log = EXP[np.float64], LOG[np.float64]


@per_row
def gather(x, k, farthest, units, z):
    """Entries up to the farthest, and where they were; with their number, and how many of them are ones."""
    m, left = 0, k
    for i in range(x.shape[0]):
        if x[i] > farthest:
            left -= 1
        elif x[i] >= -farthest:
            units[m], z[m] = i, x[i]
            m += 1
    return m, left


@per_row
def chances(z, k, p, q):
    """Writes the chances of one and of zero.

    Returns:
        By how much the expected count exceeds k, without a difference of large numbers; how large the terms of that
        were; and the variance of the count.
    """
    few_ones = few_zeros = variance = 0.0
    likely = 0
    for i in range(z.shape[0]):
        e = exp(-abs(z[i]))
        s = 1.0 / (1.0 + e)
        few = e * s
        if z[i] > 0:
            p[i], q[i] = s, few
            few_zeros += few
            likely += 1
        else:
            p[i], q[i] = few, s
            few_ones += few
        variance += few * s
    return few_ones - few_zeros + (likely - k), few_ones + few_zeros, variance


@per_row
def balance(z, k, p, q, close, rounding):
    """Shifts z so that the expected count is k, to within ``close`` or that rounding; writes the chances.

    The result is the variance of the count.
    """
    m, done = z.shape[0], 0.0
    low, high = -np.inf, np.inf
    variance = 0.0
    for _ in range(TILT_STEPS):
        excess, terms, variance = chances(z, k, p, q)
        if abs(excess) <= max(close, rounding * terms):
            break
        if low == -np.inf:
            lowest = highest = z[0]
            for i in range(m):
                lowest, highest = min(lowest, z[i]), max(highest, z[i])
            low, high = -highest - log(float(m)), -lowest + log(float(m))  # shifts with fewer and with more
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
    return variance


@per_row
def guess(target, p, q, variance, z):
    """As in laws.inverse_newton."""
    for i in range(target.shape[0]):
        z[i] = target[i] + (q[i] - p[i]) / (2 * (variance - p[i] * q[i] + 0.25))


@per_row
def settle(log_odds, k, units, target, logits):
    """Writes the logits of units that k or their log-odds leave no choice, and gathers the others in ``target``.

    Returns how many these are, how many of them are ones, and the error so far: NaN if there is a NaN.
    """
    m, left = gather(log_odds, k, FARTHEST, units, target)
    certain, error = np.inf if left > 0 else -np.inf, 0.0  # what the others are, if k leaves them no choice
    for i in range(log_odds.shape[0]):
        x = log_odds[i]
        logits[i] = certain if abs(x) <= FARTHEST else x * np.inf
        if x != x:
            error = np.nan
    return m, left, error


@per_row
def take_off(b, variance, rounding):
    """Makes the sum of b 0: in proportion to the variances if it is rounding, else evenly; returns their sum.

    Its rounding is ``rounding``, relative to the sum of sizes.
    """
    excess = size = spread = 0.0
    for i in range(b.shape[0]):
        excess += b[i]
        size += abs(b[i])
        spread += variance[i]
    if abs(excess) > rounding * size:
        mean, excess = excess / b.shape[0], 0.0
        for i in range(b.shape[0]):
            b[i] -= mean
            excess += b[i]
    for i in range(b.shape[0]):
        b[i] -= excess / spread * variance[i]
    return spread
