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

from ..numba_tools import kernel, over_rows, per_row, summed
from .numba_backend import balance, exp, gather

DEPTH, NODES = 41.4, 31  # as in khot.laws.characteristic
MOST_STEPS = 200  # of conjugate gradients; usual are 3 to 10
RELIABLE_SHIFT = 8.0  # as in khot.laws.inverse


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
def _multiply_unit(p, q, mean, rest, cos, sin, law_real, law_imag, real, imag):
    """Writes d of a unit at all nodes, and multiplies phi into the law."""
    spread = p * q
    constant, slope = p * p * rest - q * q * mean, spread * (rest - mean)
    for j in range(cos.shape[0]):
        size = 1 / (1 - 2 * spread * (1 - cos[j]))
        real[j], imag[j] = (constant + slope * cos[j]) * size, spread * sin[j] * size
        a, b = q + p * cos[j], p * sin[j]
        law_real[j], law_imag[j] = law_real[j] * a - law_imag[j] * b, law_real[j] * b + law_imag[j] * a


@summed
def _weighted_norm(real, imag, law_real, law_imag):
    """Re sum_t w_t d(t)^2."""
    total = 0.0
    for j in range(real.shape[0]):
        total += law_real[j] * (real[j] * real[j] - imag[j] * imag[j]) - 2 * law_imag[j] * real[j] * imag[j]
    return total


@per_row
def _add(v, real, imag, into_real, into_imag):
    for j in range(real.shape[0]):
        into_real[j] += v * real[j]
        into_imag[j] += v * imag[j]


@summed
def _pair(real, imag, of_real, of_imag):
    total = 0.0
    for j in range(real.shape[0]):
        total += real[j] * of_real[j] - imag[j] * of_imag[j]
    return total


@per_row
def _times(real, imag, law_real, law_imag, own, v, sums, out):
    """C v."""
    nodes = real.shape[1]
    sums[:, :nodes] = 0.0
    for i in range(v.shape[0]):
        _add(v[i], real[i], imag[i], sums[0, :nodes], sums[1, :nodes])
    for j in range(nodes):
        a, b = sums[0, j], sums[1, j]
        sums[0, j], sums[1, j] = a * law_real[j] - b * law_imag[j], a * law_imag[j] + b * law_real[j]
    for i in range(v.shape[0]):
        out[i] = own[i] * v[i] + _pair(real[i], imag[i], sums[0, :nodes], sums[1, :nodes])


@summed
def _dot(a, b):
    total = 0.0
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@per_row
def _precondition(residual, variance, total, out):
    """D^{-1} r, less its mean weighted by D, which is the mean of r."""
    mean = residual.sum() / total
    for i in range(residual.shape[0]):
        out[i] = residual[i] / variance[i] - mean


@per_row
def _conjugate_gradients(
    real, imag, law_real, law_imag, own, variance, tolerance, v, residual, z, direction, along, sums
):
    """Writes the v with C v = residual, up to a constant; whether it has been found."""
    total = variance.sum()
    v[:] = 0.0
    _precondition(residual, variance, total, z)
    direction[:] = z
    size = _dot(residual, z)
    goal = tolerance * tolerance * size
    for _ in range(MOST_STEPS):
        if not size > goal:
            for i in range(v.shape[0]):
                v[i] += z[i]  # a sweep of Jacobi's method for units too improbable for a norm to see
            return size == size
        _times(real, imag, law_real, law_imag, own, direction, sums, along)
        step = size / _dot(direction, along)
        for i in range(v.shape[0]):
            v[i] += step * direction[i]
            residual[i] -= step * along[i]
        _precondition(residual, variance, total, z)
        previous, size = size, _dot(residual, z)
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
    z, odds, p, q, mean, rest, variance, own, right, v, preconditioned, direction, along = np.empty((13, n))
    tables, sums = np.empty((2, n * NODES)), np.empty((2, NODES))
    cos, sin, weight_real, weight_imag, law_real, law_imag = np.empty((6, NODES))
    for r in range(begin, end):
        result[r, :] = 0.0
        m, left = gather(logits[r], k[r], units, z)
        if m == 0:
            continue
        average = 0.0
        for i in range(m):
            odds[i] = log_odds[r, units[i]]
            average += b[r, units[i]] / m
        for i in range(m):
            right[i] = b[r, units[i]] - average
        balance(z[:m], left, p[:m], q[:m])
        if not _means(z[:m], odds[:m], p[:m], q[:m], mean[:m], rest[:m], variance[:m]):
            result[r, :] = np.nan
            continue
        nodes = _choose_nodes(_dot(p[:m], q[:m]), left, m, cos, sin, weight_real, weight_imag)
        real, imag = tables[0, : m * nodes].reshape(m, nodes), tables[1, : m * nodes].reshape(m, nodes)
        law_real[:nodes], law_imag[:nodes] = 1.0, 0.0
        for i in range(m):
            _multiply_unit(
                p[i],
                q[i],
                mean[i],
                rest[i],
                cos[:nodes],
                sin[:nodes],
                law_real[:nodes],
                law_imag[:nodes],
                real[i],
                imag[i],
            )
        total = _pair(law_real[:nodes], law_imag[:nodes], weight_real[:nodes], weight_imag[:nodes])
        for j in range(nodes):
            a, c = law_real[j], law_imag[j]
            law_real[j] = (a * weight_real[j] - c * weight_imag[j]) / total
            law_imag[j] = (a * weight_imag[j] + c * weight_real[j]) / total
        for i in range(m):
            own[i] = variance[i] - _weighted_norm(real[i], imag[i], law_real[:nodes], law_imag[:nodes])
        found = _conjugate_gradients(
            real, imag, law_real[:nodes], law_imag[:nodes], own[:m], variance[:m], tolerance, v[:m], right[:m],
            preconditioned[:m], direction[:m], along[:m], sums,
        )  # fmt: skip
        average = v[:m].mean()
        for i in range(m):
            result[r, units[i]] = v[i] - average if found else np.nan


def covariance_inverse_factored(logits: Tensor, log_odds: Tensor, b: Tensor, k: Tensor, tolerance: float) -> Tensor:
    result = logits.new_empty(logits.shape)
    arguments = (x.contiguous().numpy() for x in (logits, log_odds, b, k))
    over_rows(_long_rows, len(result), result.numel() * NODES, *arguments, tolerance, result.numpy())
    return result
