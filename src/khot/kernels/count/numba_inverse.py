r"""Newton's method for rows of a few units, in numba; of more, where :mod:`.numba_inverse_nodes` loses digits.

Units of log-odds z, p and q their chances of one and of zero, of which k shall be ones. With F_i the law of the count
of the first i of them, and :math:`G_i(c)` the chance that k are ones if c of the first i are,

.. math:: P(B = k \mid x_i = 1) = \sum_c F_i(c)\, G_{i+1}(c + 1), \qquad
    -C_{ij} = p_i q_i p_j q_j \frac{P_{10} P_{01} - P_{11} P_{00}}{P(B = k)^2}

where :math:`P_{ab}` is the chance of B = k given the values of the two units. All of it is sums of positive numbers but
for one difference. The covariance C is the Laplacian of a graph with the weights :math:`-C_{ij} \ge 0`, and systems
with it are solved by taking out one unit after the other, which lays new edges between its neighbours: positive numbers
again, so that no digits are lost where units hardly know of each other, however rare.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
import torch
from torch import Tensor

from ..numba_math import LOG
from ..numba_rows import dot
from ..numba_tools import kernel, over_rows, per_row
from . import numba_inverse_nodes
from .numba_balance import ACCEPTED, CLOSE, EPS, LARGEST, balance, gather, guess, settle, take_off

SHORT, LONGEST = 11, 32  # units of rows that are all done by this, and of those that may be: O(n^3) time
STEPS, HALVINGS = 60, 30
MARGIN = 1e3  # by which a predicted error has to be small enough

log = LOG[np.float64]


@per_row
def _arrange(units, z, k):
    """Puts the smallest entry last, and counts zeros if they are fewer; returns their number and -1 then, else k and 1.

    The entries are log-odds of what is counted, about k of which are expected to be ones. The last unit is where the
    rounding of all others ends up, which is too much for a rare one.
    """
    m, last = z.shape[0], 0
    for i in range(m):
        if abs(z[i]) < abs(z[last]):
            last = i
    units[last], units[m - 1] = units[m - 1], units[last]
    z[last], z[m - 1] = z[m - 1], z[last]
    if 2 * k <= m:
        return k, 1.0
    for i in range(m):
        z[i] = -z[i]
    return m - k, -1.0


@per_row
def _evaluate(p, q, k, first, rest, zero, one):
    """Fills the tables F and G and writes P(B = k | x_i = 0) and P(B = k | x_i = 1); returns P(B = k)."""
    m = p.shape[0]
    first[0, : k + 1], rest[m, : k + 2] = 0.0, 0.0
    first[0, 0] = rest[m, k] = 1.0
    for i in range(m):
        first[i + 1, 0] = q[i] * first[i, 0]
        for c in range(1, k + 1):
            first[i + 1, c] = q[i] * first[i, c] + p[i] * first[i, c - 1]
    for i in range(m - 1, -1, -1):
        out = included = 0.0
        for c in range(k + 1):
            out += first[i, c] * rest[i + 1, c]
            included += first[i, c] * rest[i + 1, c + 1]
            rest[i, c] = q[i] * rest[i + 1, c] + p[i] * rest[i + 1, c + 1]
        rest[i, k + 1] = 0.0
        zero[i], one[i] = out, included
    return rest[0, 0]


@per_row
def _edges(p, q, k, first, rest, total, without, having, weights):
    """Writes -C_ij for i < j."""
    m = p.shape[0]
    for i in range(m - 1):
        having[0] = 0.0
        for c in range(k + 1):
            without[c], having[c + 1] = first[i, c], first[i, c]
        spread = p[i] * q[i] / total / total
        for j in range(i + 1, m):
            p00 = p01 = p10 = p11 = 0.0
            for c in range(k + 1):
                more, same = rest[j + 1, c + 1], rest[j + 1, c]
                p00 += without[c] * same
                p01 += without[c] * more
                p10 += having[c] * same
                p11 += having[c] * more
            weights[i, j] = max(p10 * p01 - p11 * p00, 0.0) * spread * p[j] * q[j]
            for c in range(k, 0, -1):
                without[c] = q[j] * without[c] + p[j] * without[c - 1]
                having[c] = q[j] * having[c] + p[j] * having[c - 1]
            without[0] *= q[j]
            having[0] *= q[j]


@per_row
def _eliminate(weights, m):
    """Takes the units out one by one: what they leave to each other, and on the diagonal the sums of the weights."""
    for i in range(m - 1):
        degree = 0.0
        for j in range(i + 1, m):
            degree += weights[i, j]
        weights[i, i] = degree
        for j in range(i + 1, m):
            share = weights[i, j] / degree
            for other in range(j + 1, m):
                weights[j, other] += share * weights[i, other]


@per_row
def _substitute(weights, b, v):
    """v with C v = b, the last one 0, from what :func:`_eliminate` has left; b is used up."""
    m = b.shape[0]
    for i in range(m - 1):
        share = b[i] / weights[i, i]
        for j in range(i + 1, m):
            b[j] += share * weights[i, j]
    v[m - 1] = 0.0
    for i in range(m - 2, -1, -1):
        total = b[i]
        for j in range(i + 1, m):
            total += weights[i, j] * v[j]
        v[i] = total / weights[i, i]


@per_row
def _compare(target, z, p, q, zero, one, total, right, variance):
    """Writes what the log-odds given B = k lack, and pi (1 - pi).

    Returns:
        The largest of what they lack, relative to the largest of z, and its mean weighted by pi (1 - pi).
    """
    error = largest = weight = mean = 0.0
    for i in range(target.shape[0]):
        right[i] = target[i] - (z[i] + log(one[i] / zero[i]))
        error, largest = max(error, abs(right[i])), max(largest, abs(z[i]))
        variance[i] = (p[i] * one[i] / total) * (q[i] * zero[i] / total)
        weight += variance[i]
        mean += variance[i] * right[i]
    return error / (1 + largest), mean / weight


@per_row
def _mix(a, x, b, y, out):
    for i in range(out.shape[0]):
        out[i] = a * x[i] + b * y[i]


@per_row
def _newton(target, k, goal, z, old, step, p, q, zero, one, right, first, rest, without, having, weights):
    """Writes the z whose log-odds given B = k are the target; returns the error."""
    variance = balance(target, k, p, q, 0.0, max(EPS, 1e-3 * goal))
    guess(target, p, q, variance, z)
    last, halvings = np.inf, 0
    for _ in range(STEPS):
        balance(z, k, p, q, CLOSE, 0.0)
        total = _evaluate(p, q, k, first, rest, zero, one)
        if not total > 0:
            return np.inf
        error, mean = _compare(target, z, p, q, zero, one, total, right, step)
        if error <= goal:
            return error
        if not error < last:
            _mix(0.5, z, 0.5, old, z)
            halvings += 1
            if last > ACCEPTED and halvings <= HALVINGS:
                continue
            _mix(0.0, z, 1.0, old, z)
            return last
        for i in range(target.shape[0]):
            right[i] = step[i] * (right[i] - mean)
        _mix(0.0, z, 1.0, z, old)
        gain = error / last
        linear, quadratic = gain * error * MARGIN <= goal, gain * gain * error * MARGIN <= goal
        known = last < np.inf
        if not (known and linear):  # else the matrix of the last step will do
            _edges(p, q, k, first, rest, total, without, having, weights)
            _eliminate(weights, target.shape[0])
        _substitute(weights, right, step)
        _mix(1.0, z, 1.0, step, z)
        if known and quadratic:
            return goal
        last, halvings = error, 0
    return np.inf


@kernel
def _inverse_rows(begin, end, log_odds, k, goal, logits, errors):
    n = log_odds.shape[1]
    units = np.empty(n, np.int64)
    target, z, old, step, p, q, zero, one, right = np.empty((9, n))
    first, rest = np.zeros((n + 1, n // 2 + 2)), np.zeros((n + 1, n // 2 + 2))
    without, having, weights = np.zeros(n // 2 + 3), np.zeros(n // 2 + 3), np.empty((n, n))
    for r in range(begin, end):
        m, left, errors[r] = settle(log_odds[r], k[r], units, target, logits[r])
        if errors[r] != 0 or not 0 < left < m:
            continue
        left, sign = _arrange(units[:m], target[:m], left)
        errors[r] = _newton(
            target[:m], left, goal, z[:m], old[:m], step[:m], p[:m], q[:m], zero, one, right[:m],
            first, rest, without, having, weights,
        )  # fmt: skip
        mean = z[:m].mean()
        for i in range(m):
            logits[r, units[i]] = sign * (z[i] - mean)
        if not np.isfinite(mean):
            errors[r] = np.inf
    return 0


@kernel
def _covariance_rows(begin, end, logits, b, k, rounding, result):
    n = logits.shape[1]
    units = np.empty(n, np.int64)
    z, p, q, zero, one, right, v, variance = np.empty((8, n))
    first, rest = np.zeros((n + 1, n // 2 + 2)), np.zeros((n + 1, n // 2 + 2))
    without, having, weights = np.zeros(n // 2 + 3), np.zeros(n // 2 + 3), np.empty((n, n))
    for r in range(begin, end):
        result[r, :] = 0.0
        m, left = gather(logits[r], k[r], LARGEST, units, z)
        if m == 0:
            continue
        balance(z[:m], left, p[:m], q[:m], CLOSE, 0.0)
        left, _ = _arrange(units[:m], z[:m], left)
        balance(z[:m], left, p[:m], q[:m], CLOSE, 0.0)
        total = _evaluate(p[:m], q[:m], left, first, rest, zero, one)
        for i in range(m):
            right[i], variance[i] = b[r, units[i]], (p[i] * one[i] / total) * (q[i] * zero[i] / total)
        spread = take_off(right[:m], variance[:m], rounding)
        _edges(p[:m], q[:m], left, first, rest, total, without, having, weights)
        _eliminate(weights, m)
        _substitute(weights, right[:m], v[:m])
        mean = dot(variance[:m], v[:m]) / spread
        for i in range(m):
            result[r, units[i]] = v[i] - mean
    return 0


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    log_odds, k = log_odds.contiguous(), k.contiguous()
    if log_odds.shape[-1] <= SHORT:
        return _by_recursion(log_odds, k, goal)
    logits, errors, left = numba_inverse_nodes.inclusion_inverse(log_odds, k, goal)
    if left and log_odds.shape[-1] <= LONGEST:
        lost = errors.isinf()
        logits[lost], errors[lost] = _by_recursion(log_odds[lost], k[lost], goal)
    return logits, errors


def _by_recursion(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    rows, n = log_odds.shape
    logits, errors = torch.empty_like(log_odds), log_odds.new_empty(rows)
    over_rows(
        _inverse_rows, rows, rows * n**3, *(x.numpy() for x in (log_odds, k)), goal, logits.numpy(), errors.numpy()
    )
    return logits, errors


def covariance_inverse(logits: Tensor, b: Tensor, k: Tensor, tolerance: float, rounding: float) -> Tensor:
    logits, b, k = logits.contiguous(), b.contiguous(), k.contiguous()
    if logits.shape[-1] <= SHORT:
        return _system_by_recursion(logits, b, k, rounding)
    v, left = numba_inverse_nodes.covariance_inverse(logits, b, k, tolerance, rounding)
    if left and logits.shape[-1] <= LONGEST:
        lost = v.isnan().any(-1)
        v[lost] = _system_by_recursion(logits[lost], b[lost], k[lost], rounding)
    return v


def _system_by_recursion(logits: Tensor, b: Tensor, k: Tensor, rounding: float) -> Tensor:
    v = torch.empty_like(logits)
    arguments = (x.numpy() for x in (logits, b, k))
    over_rows(_covariance_rows, len(v), v.numel() * v.shape[-1] ** 2, *arguments, rounding, v.numpy())
    return v
