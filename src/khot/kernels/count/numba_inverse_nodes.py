r"""Inverses by the characteristic function of the count, in numba: of rows of any length, without their covariance.

In the notation of :mod:`.numba_nodes`, a product with the covariance C takes O(n) time a node,
systems a few of them by conjugate gradients, and Newton's method on the log-odds of :math:`\pi` a few systems. Every
node is left out that is nothing beside the tolerance. Where terms of these sums take away each other's digits, as in
rows of hardly any open units, a row is left to others.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..numba_math import LOG
from ..numba_rows import dot, total_of
from ..numba_tools import kernel, over_rows, per_row, summed
from .numba_balance import ACCEPTED, CLOSE, EPS, LARGEST, balance, gather, guess, settle, take_off
from .numba_nodes import DEPTH, MOST, NODES, choose_nodes

SAFETY = 8.0  # by which -log of what is left out exceeds that of the tolerance
STEPS, CG_STEPS = 12, 100  # usual are 2 to 4, and 3 to 10
LEAST = math.exp(-8.0)  # part of a unit's chance that its inclusion may be: smaller ones are differences
GAINED = 0.3  # Newton's method that gains less in a step is not where it converges
FORCING = 0.1  # accuracy of a step, relative to the error before it or to that wanted after it
SMALL, NEGLIGIBLE = 1e-3, 1e-20  # parts of the variance, as in laws.inverse_newton
MARGIN = 1e3  # by which a predicted error has to be small enough

log = LOG[np.float64]


@summed
def _at_nodes(p, q, versine, sine, real, imag, law_real, law_imag):
    """Writes y of all units at all nodes, and multiplies the law by their phi."""
    nodes = versine.shape[0]
    for i in range(p.shape[0]):
        lean, spread, chance, at = p[i] - q[i], 2 * p[i] * q[i], p[i], i * nodes
        for t in range(nodes):
            size = 1 / (1 - spread * versine[t])  # of phi, its inverse square
            real[at + t], imag[at + t] = lean * versine[t] * size, sine[t] * size
        for t in range(nodes):
            a, b, c, d = law_real[t], law_imag[t], 1 - chance * versine[t], chance * sine[t]
            law_real[t], law_imag[t] = a * c - b * d, a * d + b * c


@summed
def _moments(p, q, real, imag, law_real, law_imag, slope, bend, own, ratio, variance):
    """Writes pq, delta, the ratio of the odds of inclusion to those of a unit, and what is on the diagonal of C.

    That as a whole, and less what is there by the sums over nodes; returns the least ratio of probabilities.
    """
    nodes, least = law_real.shape[0], 1.0
    for i in range(p.shape[0]):
        first = second = 0.0
        at = i * nodes
        for t in range(nodes):
            a, b = real[at + t], imag[at + t]
            c, d = law_real[t] * a - law_imag[t] * b, law_real[t] * b + law_imag[t] * a
            first += c
            second += c * a - d * b
        one, zero = 1 + q[i] * first, 1 - p[i] * first
        least = min(least, min(one, zero))
        slope[i], bend[i], ratio[i] = p[i] * q[i], first, one / zero
        variance[i] = slope[i] * one * zero
        own[i] = variance[i] - slope[i] * slope[i] * (second - first * first)
    return least


@per_row
def _evaluate(p, q, k, spread, depth, nodes_at, real, imag, units):
    """Makes all that is needed of units of these chances, whose variances add up to ``spread``: rows of ``units``.

    Returns the number of nodes, 0 where digits are lost.
    """
    m = p.shape[0]
    nodes = choose_nodes(spread, k, m, depth, nodes_at[0], nodes_at[1], nodes_at[2], nodes_at[3])
    law_real, law_imag = nodes_at[2, :nodes], nodes_at[3, :nodes]
    _at_nodes(p, q, nodes_at[0, :nodes], nodes_at[1, :nodes], real, imag, law_real, law_imag)
    total = 0.0
    for t in range(nodes):
        total += law_real[t]
    for t in range(nodes):
        law_real[t] /= total
        law_imag[t] /= total
    least = _moments(p, q, real, imag, law_real, law_imag, units[0], units[1], units[2], units[3], units[4])
    return nodes if total > 0 and least > LEAST else 0


@summed
def _times(real, imag, law_real, law_imag, slope, bend, own, v, sum_real, sum_imag, out):
    """C v."""
    nodes, total = law_real.shape[0], 0.0
    for t in range(nodes):
        sum_real[t] = sum_imag[t] = 0.0
    for i in range(v.shape[0]):
        part, at = slope[i] * v[i], i * nodes
        total += bend[i] * part
        for t in range(nodes):
            sum_real[t] += part * real[at + t]
            sum_imag[t] += part * imag[at + t]
    for t in range(nodes):
        a, b = sum_real[t], sum_imag[t]
        sum_real[t], sum_imag[t] = a * law_real[t] - b * law_imag[t], a * law_imag[t] + b * law_real[t]
    for i in range(v.shape[0]):
        part, at = 0.0, i * nodes
        for t in range(nodes):
            part += sum_real[t] * real[at + t] - sum_imag[t] * imag[at + t]
        out[i] = own[i] * v[i] + slope[i] * (part - bend[i] * total)


@summed
def _precondition(residual, inverse, total, out):
    """Writes D^{-1} r, less its mean weighted by D, which is the mean of r; returns the product of the two."""
    mean = size = 0.0
    for i in range(residual.shape[0]):
        mean += residual[i]
    mean /= total
    for i in range(residual.shape[0]):
        out[i] = residual[i] * inverse[i] - mean
        size += residual[i] * out[i]
    return size


@summed
def _descend(step, direction, along, v, residual):
    for i in range(v.shape[0]):
        v[i] += step * direction[i]
        residual[i] -= step * along[i]


@summed
def _redirect(share, z, direction):
    for i in range(z.shape[0]):
        direction[i] = z[i] + share * direction[i]


@summed
def _prepare(variance, spread, inverse, direction):
    """Writes the inverse of D, 0 for units that no others depend on."""
    for i in range(variance.shape[0]):
        common = 1.0 if variance[i] > NEGLIGIBLE * spread else 0.0
        inverse[i], direction[i] = common / (variance[i] * (1 + variance[i] / spread)), 0.0


@per_row
def _pass_on(real, imag, nodes_at, nodes, spread, residual, v, units):
    """Starts with v of the units of small variance, if a norm would see nothing else, and passes on what they have."""
    slope, bend, own, variance, along = units[0], units[1], units[2], units[4], units[8]
    few = many = 0.0
    for i in range(v.shape[0]):
        v[i] = residual[i] / variance[i]
        if variance[i] > SMALL * spread:
            many += residual[i] * v[i]
            v[i] = 0.0
        else:
            few += residual[i] * v[i]
    if not few > many:
        v[:] = 0.0
        return
    _times(
        real, imag, nodes_at[2, :nodes], nodes_at[3, :nodes], slope, bend, own, v, nodes_at[4], nodes_at[5], along
    )  # fmt: skip
    excess = 0.0  # of the sum over 0, which no v can take away
    for i in range(v.shape[0]):
        residual[i] -= along[i]
        excess += residual[i]
    for i in range(v.shape[0]):
        residual[i] -= excess / spread * variance[i]


@per_row
def _solve(real, imag, nodes_at, nodes, tolerance, residual, v, units):
    """Adds to v what solves C v = residual, up to a constant; whether it has been found.

    Off its diagonal C is nearly that of -v v^T / sum v, v the variances: with that on the diagonal, too, it would be
    D (1 + v / sum v) less a matrix of rank one, which takes care of constants. So this D is the preconditioner. Units
    of negligible variance have their part afterwards.
    """
    slope, bend, own, variance = units[0], units[1], units[2], units[4]
    inverse, z, direction, along = units[5], units[6], units[7], units[8]
    spread = total_of(variance)
    total = spread + dot(variance, variance) / spread
    _prepare(variance, spread, inverse, direction)
    size = _precondition(residual, inverse, total, z)
    _redirect(0.0, z, direction)
    goal = tolerance * tolerance * size
    for _ in range(CG_STEPS):
        if not size > goal:
            for i in range(v.shape[0]):
                v[i] += z[i] if inverse[i] > 0 else residual[i] / variance[i]
            return size == size
        _times(
            real, imag, nodes_at[2, :nodes], nodes_at[3, :nodes], slope, bend, own, direction, nodes_at[4],
            nodes_at[5], along,
        )  # fmt: skip
        _descend(size / dot(direction, along), direction, along, v, residual)
        previous, size = size, _precondition(residual, inverse, total, z)
        _redirect(size / previous, z, direction)
    return False


@summed
def _compare(target, z, ratio, variance, right):
    """Writes what the log-odds of inclusion lack; returns the largest, relative to the largest of z, and the mean."""
    error = largest = weight = mean = 0.0
    for i in range(target.shape[0]):
        lack = target[i] - (z[i] + log(ratio[i]))
        right[i] = lack
        error, largest = max(error, abs(lack)), max(largest, abs(z[i]))
        weight += variance[i]
        mean += variance[i] * lack
    return error / (1 + largest), mean / weight


@per_row
def _newton(target, k, goal, z, p, q, right, step, nodes_at, real, imag, units):
    """Writes the z whose log-odds given B = k are the target; returns the error, infinite where it is not found."""
    depth = min(DEPTH, SAFETY - math.log(goal))
    guess(target, p, q, balance(target, k, p, q, 0.0, max(EPS, 1e-3 * goal)), z)
    last = np.inf
    for _ in range(STEPS):
        nodes = _evaluate(p, q, k, balance(z, k, p, q, CLOSE, 0.0), depth, nodes_at, real, imag, units)
        if nodes == 0:
            return np.inf
        error, mean = _compare(target, z, units[3], units[4], right)
        if error <= goal:
            return error
        if not error < GAINED * last:
            return error if error <= ACCEPTED else np.inf
        gain, known = error / last, last < np.inf
        for i in range(z.shape[0]):
            right[i], step[i] = units[4, i] * (right[i] - mean), 0.0
        tolerance = max(FORCING * min(error, FORCING), FORCING * goal / error)
        if not _solve(real, imag, nodes_at, nodes, tolerance, right, step, units):
            return np.inf
        for i in range(z.shape[0]):
            z[i] += step[i]
        if known and gain * gain * error * MARGIN <= goal:
            return goal
        last = error
    return np.inf


@kernel
def _inverse_rows(begin, end, log_odds, k, goal, logits, errors):
    n, lost = log_odds.shape[1], 0
    at, found, nodes_at = np.empty(n, np.int64), np.empty((6, n)), np.empty((6, MOST))
    real, imag, units = np.empty(n * MOST), np.empty(n * MOST), np.empty((9, n))
    for r in range(begin, end):
        m, left, errors[r] = settle(log_odds[r], k[r], at, found[0], logits[r])
        if errors[r] != 0 or not 0 < left < m:
            continue
        target, z, p, q, right, step = (
            found[0, :m], found[1, :m], found[2, :m], found[3, :m], found[4, :m], found[5, :m]
        )  # fmt: skip
        errors[r] = _newton(target, left, goal, z, p, q, right, step, nodes_at, real, imag, units[:, :m])
        mean = z.mean()
        for i in range(m):
            logits[r, at[i]] = z[i] - mean
        if not np.isfinite(mean):
            errors[r] = np.inf
        lost += errors[r] == np.inf
    return lost


@kernel
def _covariance_rows(begin, end, logits, b, k, tolerance, rounding, result):
    n, lost, depth = logits.shape[1], 0, min(DEPTH, SAFETY - math.log(tolerance))
    at, found, nodes_at = np.empty(n, np.int64), np.empty((5, n)), np.empty((6, MOST))
    real, imag, units = np.empty(n * MOST), np.empty(n * MOST), np.empty((9, n))
    for r in range(begin, end):
        result[r, :] = 0.0
        m, left = gather(logits[r], k[r], LARGEST, at, found[0])
        if not 0 < left < m:
            continue
        z, p, q, right, v = found[0, :m], found[1, :m], found[2, :m], found[3, :m], found[4, :m]
        spread, known = balance(z, left, p, q, CLOSE, 0.0), units[:, :m]
        nodes = _evaluate(p, q, left, spread, depth, nodes_at, real, imag, known)
        for i in range(m):
            right[i] = b[r, at[i]]
        spread = take_off(right, known[4], rounding)
        if nodes > 0:
            _pass_on(real, imag, nodes_at, nodes, spread, right, v, known)
        is_solved = nodes > 0 and _solve(real, imag, nodes_at, nodes, tolerance, right, v, known)
        mean = dot(known[4], v) / spread
        for i in range(m):
            result[r, at[i]] = v[i] - mean if is_solved else np.nan
        lost += not is_solved
    return lost


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor, int]:
    """As the reference, with the number of rows that are left to others, of infinite error."""
    logits, errors = torch.empty_like(log_odds), log_odds.new_empty(len(log_odds))
    arguments = (x.numpy() for x in (log_odds, k))
    left = over_rows(
        _inverse_rows, len(logits), logits.numel() * NODES, *arguments, goal, logits.numpy(), errors.numpy()
    )
    return logits, errors, left


def covariance_inverse(logits: Tensor, b: Tensor, k: Tensor, tolerance: float, rounding: float) -> tuple[Tensor, int]:
    """As the reference, with the number of rows that are left to others, which are NaN."""
    v = torch.empty_like(logits)
    arguments = (x.numpy() for x in (logits, b, k))
    return v, over_rows(_covariance_rows, len(v), v.numel() * NODES, *arguments, tolerance, rounding, v.numpy())
