r"""From inclusion probabilities to the law of units given their count, a row at a time, in numba.

With z the log-odds of independent units, p and q their chances of one and of zero, the log-odds of inclusion given
B = k are

.. math:: a_i = z_i + \log \frac{P(B_{-i} = k - 1)}{P(B_{-i} = k)}

where :math:`B_{-i}` counts the others. That is nearly normal if its variance is not small, and Edgeworth's series makes
an explicit map z = M(a) of it, off by the third power of 1 / variance. So the iteration :math:`a \leftarrow a + r`,
r what the exact log-odds of inclusion of M(a) lack, ends after a few evaluations. (A start at the logits of another
known law, such as that of a draw, is no better than M.) Where it gains little, as in rows of few open units, Newton's
method follows: systems in the covariance C given B = k by conjugate gradients, whose products take as long as an
evaluation. All of it stands on :mod:`.numba_row`. Rows that are not solved are left to others.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..numba_math import EXP, LOG
from ..numba_rows import dot, total_of
from ..numba_tools import kernel, over_rows, per_row, summed
from .numba_row import count_law, probabilities, times_covariance, workplace

ACCEPTED = 1e-11  # as in laws.inverse_newton: where rounding ends the progress
CLOSE = 0.2  # of an expected count to k: then windows and nodes are where they should be
EPS, LARGEST = np.finfo(np.float64).eps, np.finfo(np.float64).max
FARTHEST = 575.0  # e^-575 is 1e-250, as in laws.inverse: log-odds beyond are infinite
TILT_STEPS, STEPS, HALVINGS, CG_STEPS = 100, 60, 30, 100  # usual are 1, 2 to 6, none, and 3 to 10
FAST = 0.1  # an iteration that gains less gives way to Newton's method
SPREAD = 2.0  # variance of the count from which on Edgeworth's series is better than its first term
FORCING = 0.1  # accuracy of a step, relative to the error before it or to that wanted after it
SMALL, NEGLIGIBLE = 1e-3, 1e-20  # parts of the variance, as in laws.inverse_newton
MARGIN = 1e3  # by which a predicted error has to be small enough
NODE_WORK = 64  # steps of work a unit, about

exp, log = EXP[np.float64], LOG[np.float64]


# ---- Rows and their open units


@per_row
def _gather(x, k, farthest, units, z):
    """Entries up to the farthest, and where they were; with their number, and how many of them are ones."""
    m, left = 0, k
    for i in range(x.shape[0]):
        if x[i] > farthest:
            left -= 1
        elif x[i] >= -farthest:
            units[m], z[m] = i, x[i]
            m += 1
    return m, left


@summed
def _chances(z, p, q):
    """Writes the chances of one and of zero; returns the sums of the rare ones and zeros, of likely ones, of pq."""
    few_ones = few_zeros = variance = 0.0
    likely = 0
    for i in range(z.shape[0]):
        e = exp(-abs(z[i]))
        s = 1.0 / (1.0 + e)
        few = e * s
        above = z[i] > 0
        p[i], q[i] = s if above else few, few if above else s
        few_zeros += few if above else 0.0
        few_ones += 0.0 if above else few
        likely += above
        variance += few * s
    return few_ones, few_zeros, likely, variance


@per_row
def _balance(z, k, p, q, close, rounding):
    """Shifts z so that the expected count is k, to within ``close`` or that rounding; writes the chances.

    The result is the variance of the count.
    """
    m, done = z.shape[0], 0.0
    low, high = -np.inf, np.inf
    variance = 0.0
    for _ in range(TILT_STEPS):
        few_ones, few_zeros, likely, variance = _chances(z, p, q)
        excess = few_ones - few_zeros + (likely - k)  # no difference of large numbers
        if abs(excess) <= max(close, rounding * (few_ones + few_zeros)):
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


# ---- The explicit map


@summed
def _first_term(aim, p, q, variance, z):
    for i in range(aim.shape[0]):
        z[i] = aim[i] + 0.5 * (q[i] - p[i]) / (variance - p[i] * q[i] + 0.25)


@summed
def _cumulants(p, q, shift):
    """Shifts the chances; returns the second, third and fourth cumulant of the count."""
    second = third = fourth = 0.0
    for i in range(p.shape[0]):
        change = p[i] * q[i] * shift
        p[i], q[i] = p[i] + change, q[i] - change
        spread = p[i] * q[i]
        second += spread
        third += spread * (q[i] - p[i])
        fourth += spread * (1 - 6 * spread)
    return second, third, fourth


@summed
def _two_terms(aim, p, q, second, third, fourth, z):
    of_lean = fourth / (4 * second**3) - third * third / (2 * second**4)
    of_spread = third / (2 * second**3)
    for i in range(aim.shape[0]):
        lean, spread = q[i] - p[i], p[i] * q[i]
        others = 1 / (second - spread)
        z[i] = aim[i] + lean * (0.5 * others + of_lean) - 0.5 * (third - spread * lean) * others * others
        z[i] -= of_spread * spread


@per_row
def _guess(aim, k, p, q, z):
    """Writes M(aim)."""
    few_ones, few_zeros, likely, variance = _chances(aim, p, q)
    _first_term(aim, p, q, variance, z)
    if variance >= SPREAD:
        few_ones, few_zeros, likely, variance = _chances(z, p, q)
        second, third, fourth = _cumulants(p, q, (few_zeros - few_ones + (k - likely)) / variance)
        _two_terms(aim, p, q, second, third, fourth, z)


# ---- Systems in the covariance


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
def _product(p, q, v, k, law, work, t, out):
    """C v."""
    for i in range(v.shape[0]):
        t[i] = p[i] * q[i] * v[i]
    times_covariance(p, q, t, k, law, work, out)


@per_row
def _pass_on(p, q, k, law, work, spread, residual, v, variance, t, along):
    """Starts with v of the units of small variance, if a norm would see nothing else, and passes on what they have."""
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
    _product(p, q, v, k, law, work, t, along)
    excess = 0.0  # of the sum over 0, which no v can take away
    for i in range(v.shape[0]):
        residual[i] -= along[i]
        excess += residual[i]
    for i in range(v.shape[0]):
        residual[i] -= excess / spread * variance[i]


@per_row
def _solve(p, q, k, law, work, tolerance, residual, v, variance, space):
    """Adds to v what solves C v = residual, up to a constant; whether it has been found.

    Off its diagonal C is nearly that of -v v^T / sum v, v the variances: with that on the diagonal, too, it would be
    D (1 + v / sum v) less a matrix of rank one, which takes care of constants. So this D is the preconditioner. Units
    of negligible variance have their part afterwards.
    """
    inverse, z, direction, along, t = space[0], space[1], space[2], space[3], space[4]
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
        _product(p, q, direction, k, law, work, t, along)
        _descend(size / dot(direction, along), direction, along, v, residual)
        previous, size = size, _precondition(residual, inverse, total, z)
        _redirect(size / previous, z, direction)
    return False


# ---- The inverse


@summed
def _compare(target, complement, inclusion, right, variance):
    """Writes what the log-odds of inclusion lack, and pi (1 - pi); returns the largest lack, and the mean of it."""
    error = weight = mean = 0.0
    for i in range(target.shape[0]):
        lack = target[i] - log(inclusion[i] / complement[i])
        right[i], variance[i] = lack, inclusion[i] * complement[i]
        error = max(error, abs(lack))
        weight += variance[i]
        mean += variance[i] * lack
    return error, mean / weight


@summed
def _largest(x):
    found = 0.0
    for i in range(x.shape[0]):
        found = max(found, abs(x[i]))
    return found


@per_row
def _newton_step(p, q, k, law, work, tolerance, mean, found, space):
    """Writes the step of z that makes up for what the log-odds of inclusion lack; whether it has been found."""
    (right, variance), residual, v = found, space[5], space[6]
    for i in range(v.shape[0]):
        residual[i], v[i] = variance[i] * (right[i] - mean), 0.0
    return _solve(p, q, k, law, work, tolerance, residual, v, variance, space)


@per_row
def _search(target, k, goal, rows, found, space, work):
    """Writes the z whose log-odds given B = k are the target, with their chances.

    Returns:
        The error, infinite where it is not found; and the law of the count at z, if ``is_known``.
    """
    aim, z, old, p, q, complement, inclusion = rows
    (right, variance), step = found, space[6]
    _balance(target, k, p, q, 0.0, max(EPS, 1e-3 * goal))
    aim[:] = target
    _guess(aim, k, p, q, z)
    last, halvings, maps, size = np.inf, 0, True, 1 + _largest(target)
    for _ in range(STEPS):
        _balance(z, k, p, q, CLOSE, 0.0)
        law = count_law(p, q, k, work)
        probabilities(p, q, law, work, complement, inclusion)
        error, mean = _compare(target, complement, inclusion, right, variance)
        error /= size
        if error <= goal:
            return error, law, True
        gain = error / last
        if maps and gain > FAST and last < np.inf:
            maps, last = False, np.inf  # Newton's method, from here
        if maps:
            for i in range(z.shape[0]):
                aim[i] += right[i] - mean
            _guess(aim, k, p, q, z)
            if last < np.inf and gain * error * MARGIN <= goal:
                return goal, law, False
            last = error
            continue
        if not error < last:
            halvings += 1
            if math.isnan(error) or halvings > HALVINGS or last <= ACCEPTED:
                if last <= ACCEPTED:
                    z[:] = old
                return last if last <= ACCEPTED else np.inf, law, False
            for i in range(z.shape[0]):
                z[i] = 0.5 * (z[i] + old[i])
            continue
        old[:] = z
        tolerance = max(FORCING * min(error, FORCING), FORCING * goal / error)
        if not _newton_step(p, q, k, law, work, tolerance, mean, found, space):
            return np.inf, law, False
        for i in range(z.shape[0]):
            z[i] += step[i]
        if last < np.inf and gain * gain * error * MARGIN <= goal:
            return goal, law, False
        last, halvings = error, 0
    return np.inf, law, False


@per_row
def _settle(log_odds, k, units, target, logits):
    """Writes the logits of units that k or their log-odds leave no choice, and gathers the others in ``target``.

    Returns how many these are, how many of them are ones, and the error so far: NaN if there is a NaN.
    """
    m, left = _gather(log_odds, k, FARTHEST, units, target)
    certain, error = np.inf if left > 0 else -np.inf, 0.0  # what the others are, if k leaves them no choice
    for i in range(log_odds.shape[0]):
        x = log_odds[i]
        logits[i] = certain if abs(x) <= FARTHEST else x * np.inf
        if x != x:
            error = np.nan
    return m, left, error


@per_row
def _rows_of(space, m):
    """Contiguous rows, which compile to loops that take several numbers at once."""
    return space[0, :m], space[1, :m], space[2, :m], space[3, :m], space[4, :m], space[5, :m], space[6, :m]


@kernel
def _inverse_rows(begin, end, log_odds, k, goal, logits, errors):
    n, lost = log_odds.shape[1], 0
    units, target, rows = np.empty(n, np.int64), np.empty(n), np.empty((7, n))
    found, space, work = np.empty((2, n)), np.empty((7, n)), workplace(n)
    for r in range(begin, end):
        m, left, errors[r] = _settle(log_odds[r], k[r], units, target, logits[r])
        if errors[r] != 0 or not 0 < left < m:
            continue
        kept, here = (found[0, :m], found[1, :m]), _rows_of(space, m)
        errors[r], _, _ = _search(target[:m], left, goal, _rows_of(rows, m), kept, here, work)
        mean = rows[1, :m].mean()
        for i in range(m):
            logits[r, units[i]] = rows[1, i] - mean
        if not np.isfinite(mean):
            errors[r] = np.inf
        lost += errors[r] == np.inf
    return lost


@summed
def _log_odds(probs, out):
    for i in range(probs.shape[0]):
        out[i] = log(probs[i] / (1.0 - probs[i]))


@kernel
def _product_rows(begin, end, probs, k, g, goal, product, errors):
    n, lost = probs.shape[1], 0
    units, target, rows = np.empty(n, np.int64), np.empty(n), np.empty((7, n))
    found, space, work = np.empty((2, n)), np.empty((7, n)), workplace(n)
    for r in range(begin, end):
        _log_odds(probs[r], rows[0])
        m, left, errors[r] = _settle(rows[0], k[r], units, target, product[r])
        product[r, :] = 0.0
        if errors[r] != 0 or not 0 < left < m:
            continue
        kept, here = (found[0, :m], found[1, :m]), _rows_of(space, m)
        errors[r], law, is_known = _search(target[:m], left, goal, _rows_of(rows, m), kept, here, work)
        z, p, q, v, t, along = rows[1, :m], rows[3, :m], rows[4, :m], here[0], here[1], here[2]
        if not is_known:
            _balance(z, left, p, q, CLOSE, 0.0)
            law = count_law(p, q, left, work)
        mean = weight = 0.0  # constants change nothing, but take digits
        for i in range(m):
            v[i] = g[r, units[i]]
            mean += p[i] * q[i] * v[i]
            weight += p[i] * q[i]
        for i in range(m):
            v[i] -= mean / weight
        _product(p, q, v, left, law, work, t, along)
        for i in range(m):
            product[r, units[i]] = along[i]
        lost += errors[r] == np.inf
    return lost


@summed
def _take_off(b, variance, rounding):
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


@kernel
def _covariance_rows(begin, end, logits, b, k, tolerance, rounding, result):
    n, lost = logits.shape[1], 0
    units, rows, space, work = np.empty(n, np.int64), np.empty((7, n)), np.empty((7, n)), workplace(n)
    for r in range(begin, end):
        result[r, :] = 0.0
        m, left = _gather(logits[r], k[r], LARGEST, units, rows[0])
        if not 0 < left < m:
            continue
        z, right, variance, p, q, complement, inclusion = _rows_of(rows, m)
        v = space[5, :m]
        _balance(z, left, p, q, CLOSE, 0.0)
        law = count_law(p, q, left, work)
        probabilities(p, q, law, work, complement, inclusion)
        for i in range(m):
            right[i], variance[i] = b[r, units[i]], complement[i] * inclusion[i]
        spread = _take_off(right, variance, rounding)
        _pass_on(p, q, left, law, work, spread, right, v, variance, space[4, :m], space[3, :m])
        is_solved = _solve(p, q, left, law, work, tolerance, right, v, variance, _rows_of(space, m))
        mean = dot(variance, v) / spread
        for i in range(m):
            result[r, units[i]] = v[i] - mean if is_solved else np.nan
        lost += not is_solved
    return lost


# ---- The operators


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    logits, errors = torch.empty_like(log_odds, memory_format=torch.contiguous_format), log_odds.new_empty(len(k))
    given = (x.contiguous().numpy() for x in (log_odds, k))
    over_rows(_inverse_rows, len(k), logits.numel() * NODE_WORK, *given, goal, logits.numpy(), errors.numpy())
    return logits, errors


def times_covariance_at(probs: Tensor, k: Tensor, g: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    product, errors = torch.empty_like(g, memory_format=torch.contiguous_format), g.new_empty(len(k))
    given = (x.contiguous().numpy() for x in (probs, k, g))
    over_rows(_product_rows, len(k), g.numel() * NODE_WORK, *given, goal, product.numpy(), errors.numpy())
    return product, errors


def covariance_inverse(logits: Tensor, b: Tensor, k: Tensor, tolerance: float, rounding: float) -> Tensor:
    v = torch.empty_like(b, memory_format=torch.contiguous_format)
    given = (x.contiguous().numpy() for x in (logits, b, k))
    over_rows(_covariance_rows, len(k), b.numel() * NODE_WORK, *given, tolerance, rounding, v.numpy())
    return v
