r"""Systems with the covariance of the units of a long row, in numba: conjugate gradients, without that matrix.

As in :mod:`khot.laws.characteristic` the covariance is, off its diagonal, a product of two matrices with a column for
each node of an integral, of which a few dozen are enough:

.. math:: C_{ij} = \operatorname{Re} \sum_t w_t\, d_i(t)\, d_j(t), \qquad
    d_i(t) = \frac{E[(x_i - \pi_i)\, e^{itx_i}]}{\varphi_i(t)}, \quad
    w_t = \frac{e^{-ikt} \prod_l \varphi_l(t)}{N P(B = k)} .
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
from torch import Tensor

from ..numba_rows import dot, total_of
from ..numba_tools import inlined, kernel, over_rows, per_row, summed
from .numba_backend import CLOSE, LARGEST, balance, exp, gather

DEPTH, NODES = 41.4, 31  # as in khot.laws.characteristic
MOST_STEPS = 200  # of conjugate gradients; usual are 3 to 10
RELIABLE_SHIFT = 8.0  # as in khot.laws.inverse_newton


@per_row
def _choose_nodes(variance, k, m, cos, sin, weight_real, weight_imag):
    """Writes cos t, sin t and e^{-ikt} times the weight of the nodes; returns how many there are."""
    radius = DEPTH / 3 + math.sqrt(DEPTH * DEPTH / 9 + 2 * DEPTH * variance)
    last = math.ceil(min(radius, float(max(k, m - k))) / 2)
    count = 2 * last + 1
    step = 2 * math.pi / count
    end = 2 * math.asin(min(1.0, math.sqrt(0.5 * DEPTH / variance)))
    nodes = min(min(NODES, last + 1), 1 + math.ceil(end / step))
    for j in range(nodes):
        cos[j], sin[j] = math.cos(j * step), math.sin(j * step)
        turn, size = j * k % count * step, (1.0 if j == 0 else 2.0) / count
        weight_real[j], weight_imag[j] = size * math.cos(turn), -size * math.sin(turn)
    return nodes


@per_row
def _node(p, q, spread, constant, slope, cos, sin, real, imag):
    """Writes d of all units at a node; returns the product of their phi."""
    for i in range(p.shape[0]):
        size = 1 / (1 - 2 * spread[i] * (1 - cos))
        real[i], imag[i] = (constant[i] + slope[i] * cos) * size, spread[i] * sin * size
    a, b = 1.0, 0.0
    for i in range(p.shape[0]):
        c, d = q[i] + p[i] * cos, p[i] * sin
        a, b = a * c - b * d, a * d + b * c
    return a, b


@summed
def _sums(real, imag, v):
    """sum_i d_i v_i at a node."""
    a = b = 0.0
    for i in range(v.shape[0]):
        a += real[i] * v[i]
        b += imag[i] * v[i]
    return a, b


@inlined
def _add(real, imag, a, b, out):
    """Adds Re (a + ib) d_i."""
    for i in range(out.shape[0]):
        out[i] += a * real[i] - b * imag[i]


@per_row
def _times(real, imag, law_real, law_imag, own, v, out):
    """C v."""
    m = v.shape[0]
    for i in range(m):
        out[i] = own[i] * v[i]
    for j in range(law_real.shape[0]):
        a, b = _sums(real[j * m : (j + 1) * m], imag[j * m : (j + 1) * m], v)
        c, d = a * law_real[j] - b * law_imag[j], a * law_imag[j] + b * law_real[j]
        _add(real[j * m : (j + 1) * m], imag[j * m : (j + 1) * m], c, d, out)


@per_row
def _make_factors(p, q, mean, rest, k, spread, constant, slope, cos, sin, law_real, law_imag, real, imag, own):
    """Writes d of all units at all nodes, w, and the variances less what C has on its diagonal by them."""
    m, variance = p.shape[0], 0.0
    for i in range(m):
        spread[i] = p[i] * q[i]
        constant[i], slope[i] = p[i] * p[i] * rest[i] - q[i] * q[i] * mean[i], spread[i] * (rest[i] - mean[i])
        variance += spread[i]
    nodes = _choose_nodes(variance, k, m, cos, sin, law_real, law_imag)
    total = 0.0
    for j in range(nodes):
        at = slice(j * m, (j + 1) * m)
        a, b = _node(p, q, spread, constant, slope, cos[j], sin[j], real[at], imag[at])
        c, d = law_real[j], law_imag[j]
        law_real[j], law_imag[j] = a * c - b * d, a * d + b * c
        total += law_real[j]
    for i in range(m):
        own[i] = mean[i] * rest[i]
    for j in range(nodes):
        law_real[j] /= total
        law_imag[j] /= total
        for i in range(m):
            a, b = real[j * m + i], imag[j * m + i]
            own[i] -= law_real[j] * (a * a - b * b) - 2 * law_imag[j] * a * b
    return nodes


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


@per_row
def _conjugate_gradients(
    real, imag, law_real, law_imag, own, variance, tolerance, v, residual, inverse, z, direction, along
):
    """Writes the v with C v = residual, up to a constant; whether it has been found.

    Off its diagonal C is nearly that of -v v^T / sum v, v the variances: with that on the diagonal, too, it would be
    D (1 + v / sum v) less a matrix of rank one, which takes care of constants. So this D is the preconditioner.
    """
    total = total_of(variance)
    total += dot(variance, variance) / total
    spread = total_of(variance)
    for i in range(v.shape[0]):
        v[i], inverse[i] = 0.0, 1 / (variance[i] * (1 + variance[i] / spread))
    size = _precondition(residual, inverse, total, z)
    for i in range(v.shape[0]):
        direction[i] = z[i]
    goal = tolerance * tolerance * size
    for _ in range(MOST_STEPS):
        if not size > goal:
            for i in range(v.shape[0]):
                v[i] += z[i]  # a sweep of Jacobi's method for units too improbable for a norm to see
            return size == size
        _times(real, imag, law_real, law_imag, own, direction, along)
        step = size / dot(direction, along)
        for i in range(v.shape[0]):
            v[i] += step * direction[i]
            residual[i] -= step * along[i]
        previous, size = size, _precondition(residual, inverse, total, z)
        share = size / previous
        for i in range(v.shape[0]):
            direction[i] = z[i] + share * direction[i]
    return False


@per_row
def _means(z, odds, p, q, mean, rest, variance):
    """Writes the inclusion probabilities from their log-odds; whether these are near enough to those of the units."""
    total = shift = 0.0
    for i in range(z.shape[0]):
        e = exp(-abs(odds[i]))
        s = 1.0 / (1.0 + e)
        few = e * s
        mean[i], rest[i] = (s, few) if odds[i] > 0 else (few, s)
        variance[i] = few * s
        total += variance[i]
        shift += variance[i] * (odds[i] - z[i])
    shift /= total
    farthest = 0.0
    for i in range(z.shape[0]):
        farthest = max(farthest, abs(odds[i] - z[i] - shift))
    return farthest <= RELIABLE_SHIFT


@kernel
def _long_rows(begin, end, logits, log_odds, b, k, tolerance, result):
    n = logits.shape[1]
    units = np.empty(n, np.int64)
    z, odds, p, q, mean, rest, variance, own, right, v, inverse, preconditioned, direction, along = np.empty((14, n))
    spread, constant, slope = np.empty((3, n))
    real, imag = np.empty((2, n * NODES))
    cos, sin, law_real, law_imag = np.empty((4, NODES))
    for r in range(begin, end):
        result[r, :] = 0.0
        m, left = gather(logits[r], k[r], LARGEST, units, z)
        if m == 0:
            continue
        average = 0.0
        for i in range(m):
            odds[i] = log_odds[r, units[i]]
            average += b[r, units[i]] / m
        for i in range(m):
            right[i] = b[r, units[i]] - average
        balance(z[:m], left, p[:m], q[:m], CLOSE, 0.0)
        if not _means(z[:m], odds[:m], p[:m], q[:m], mean[:m], rest[:m], variance[:m]):
            result[r, :] = np.nan
            continue
        nodes = _make_factors(
            p[:m], q[:m], mean, rest, left, spread, constant, slope, cos, sin, law_real, law_imag, real, imag, own
        )
        found = _conjugate_gradients(
            real, imag, law_real[:nodes], law_imag[:nodes], own, variance[:m], tolerance, v[:m], right[:m],
            inverse, preconditioned[:m], direction[:m], along[:m],
        )  # fmt: skip
        average = v[:m].mean()
        for i in range(m):
            result[r, units[i]] = v[i] - average if found else np.nan
    return 0


def covariance_inverse_factored(logits: Tensor, log_odds: Tensor, b: Tensor, k: Tensor, tolerance: float) -> Tensor:
    result = logits.new_empty(logits.shape)
    arguments = (x.contiguous().numpy() for x in (logits, log_odds, b, k))
    over_rows(_long_rows, len(result), result.numel() * NODES, *arguments, tolerance, result.numpy())
    return result
