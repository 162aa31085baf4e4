r"""Systems in the covariance C of units given their count, by conjugate gradients, in numba.

C is the Laplacian of a graph: its rows sum to 0. A product with it takes O(n) time per node or count, see
:mod:`.numba_row`. Rows that are not solved are left to other code.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import kernel, over_rows, per_row, summed
from ..cpu.rows import dot, total_of
from .numba_row import count_law, probabilities, times_covariance, workplace
from .numba_units import CLOSE, WORK, balance, gather, rows_of

LARGEST = np.finfo(np.float64).max
CG_STEPS = 100  # 3 to 10 are usual
SMALL, NEGLIGIBLE = 1e-3, 1e-20  # parts of the variance, as in laws.inverse_newton


@summed
def _precondition(residual, inverse, total, out):
    """Writes D^{-1} r minus its mean weighted by D, which is the mean of r; returns the product of the two."""
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
    """Writes the inverse of D, with 0 for units that no others depend on."""
    for i in range(variance.shape[0]):
        common = 1.0 if variance[i] > NEGLIGIBLE * spread else 0.0
        inverse[i], direction[i] = common / (variance[i] * (1 + variance[i] / spread)), 0.0


@per_row
def product(law, work, v, t, out):
    """C v."""
    for i in range(v.shape[0]):
        t[i] = law.p[i] * law.q[i] * v[i]
    times_covariance(law, work, t, out)


@per_row
def _pass_on(law, work, spread, residual, v, variance, t, along):
    """Starts with v of the units of small variance, if a norm would only measure these, and passes on their entries."""
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
    product(law, work, v, t, along)
    excess = 0.0  # the excess of the sum over 0, which no v can remove
    for i in range(v.shape[0]):
        residual[i] -= along[i]
        excess += residual[i]
    for i in range(v.shape[0]):
        residual[i] -= excess / spread * variance[i]


@per_row
def _solve(law, work, tolerance, residual, v, variance, space):
    """Adds the solution of C v = residual to v, up to a constant; returns whether it was found.

    Off its diagonal, C is nearly -v v^T / sum v, with v the variances. With this on the diagonal as well, it would be
    D (1 + v / sum v) minus a rank-one matrix, which handles constants. So this D is the preconditioner. Units of
    negligible variance get their part afterwards.
    """
    inverse, z, direction, along, t, _ = space
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
        product(law, work, direction, t, along)
        _descend(size / dot(direction, along), direction, along, v, residual)
        previous, size = size, _precondition(residual, inverse, total, z)
        _redirect(size / previous, z, direction)
    return False


@summed
def _take_off(b, variance, rounding):
    """Makes the sum of b 0: in proportion to the variances if it is rounding, else evenly; returns their sum.

    The rounding error of the sum is ``rounding``, relative to the sum of absolute values.
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
    units, z, v, rows, space = np.empty(n, np.int64), np.empty(n), np.empty(n), np.empty((6, n)), np.empty((6, n))
    work = workplace(n)
    for r in range(begin, end):
        result[r, :] = 0.0
        m, left = gather(logits[r], k[r], LARGEST, units, z)
        if not 0 < left < m:
            continue
        right, variance, p, q, complement, inclusion = rows_of(rows, m)
        balance(z[:m], left, p, q, CLOSE, 0.0)
        law = count_law(p, q, left, work)
        probabilities(law, work, complement, inclusion)
        for i in range(m):
            right[i], variance[i] = b[r, units[i]], complement[i] * inclusion[i]
        spread = _take_off(right, variance, rounding)
        _pass_on(law, work, spread, right, v[:m], variance, complement, inclusion)
        is_solved = _solve(law, work, tolerance, right, v[:m], variance, rows_of(space, m))
        mean = dot(variance, v[:m]) / spread
        for i in range(m):
            result[r, units[i]] = v[i] - mean if is_solved else np.nan
        lost += not is_solved
    return lost


def covariance_inverse(logits: Tensor, b: Tensor, k: Tensor, tolerance: float, rounding: float) -> Tensor:
    """v ``(R, n)`` with C v = b over the finite logits, and 0 elsewhere.

    b sums to 0 there. A sum of at most ``rounding`` times the sum of absolute values is removed in proportion to the
    diagonal D of C, a larger one evenly. Among the solutions, which differ by constants, v is the one with sum D v = 0.
    It has the relative accuracy ``tolerance``, and is NaN in rows that a kernel could not solve.
    """
    v = torch.empty_like(b, memory_format=torch.contiguous_format)
    given = (x.contiguous().numpy() for x in (logits, b, k))
    over_rows(_covariance_rows, len(k), b.numel() * WORK, *given, tolerance, rounding, v.numpy())
    return v
