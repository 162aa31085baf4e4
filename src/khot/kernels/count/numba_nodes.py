r"""The characteristic function of the number of ones of independent units, at the nodes of an integral, in numba.

Units with probabilities :math:`p_i = 1 - q_i`, of which k are expected to be ones, have the characteristic functions
:math:`\varphi_i(t) = q_i + p_i e^{it}`. With :math:`y_i(t) = (e^{it} - 1) / \varphi_i(t)` at N nodes t, of which a few
are enough, and the mean

.. math:: \langle f \rangle = \operatorname{Re} \sum_t w_t f(t), \qquad
    w_t = \frac{e^{-ikt} \prod_l \varphi_l(t)}{N P(B = k)}, \qquad \delta_i = \langle y_i \rangle,

the results for units given B = k are

.. math:: \pi_i = p_i (1 + q_i \delta_i), \quad 1 - \pi_i = q_i (1 - p_i \delta_i), \qquad
    C_{ij} = p_i q_i p_j q_j (\langle y_i y_j \rangle - \delta_i \delta_j), \quad i \ne j.

These sums have terms of both signs, but near the mean a single unit says little about B, so they lose almost no digits
unless B has almost no variance. Rows with less than ``LEAST``, and rows that lose digits nevertheless, are left to the
recursion.

There are two ways to go through the units. Directly, y of all units at all nodes is computed again in each pass. In
longer rows with more variance, :mod:`.numba_series` writes a sum over the nodes as a polynomial of :math:`p_i - q_i`.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import per_row, summed
from ..cpu.rows import dot
from . import numba_series
from .numba_series import terms_of

DEPTH, NODES = 41.4, 31  # as in .characteristic: nodes are cut off at e^-41.4, and there are at most this many
LANES = 4  # nodes are processed in groups of four
MOST = 32
LEAST = 0.25  # variance of B below which rows are left to the recursion
LIKELY = 0.25  # P(B = k) times a deviation of at least a half exceeds this if the expected number is k
DIRECT = 64  # a series does not pay off in rows of fewer units
BENNETT_STEPS = 3


@per_row
def _radius(variance, depth):
    """The distance of B from its mean that has a probability of about e^-depth, from Bennett's inequality."""
    radius = depth / 3 + math.sqrt(depth * depth / 9 + 2 * depth * variance)  # Bernstein's, which is larger
    for _ in range(BENNETT_STEPS):  # Newton's method from above for a convex function
        log = math.log1p(radius / variance)
        radius -= ((radius + variance) * log - radius - depth) / log
    return radius


@per_row
def choose_nodes(variance, k, m, depth, versine, sine, law_real, law_imag):
    """Writes 1 - cos t, sin t and e^{-ikt} times the weight of the nodes; returns the number of nodes.

    Nodes of weight 0 are added to fill up the lanes of a processor.
    """
    most = float(max(k, m - k))
    radius = most if most * most <= depth * variance else min(_radius(variance, depth) + 0.5, most)
    last = math.ceil(radius / 2)
    count = 2 * last + 1
    step = 2 * math.pi / count
    end = 2 * math.asin(min(1.0, math.sqrt(0.5 * depth / variance)))
    nodes = min(min(NODES, last + 1), 1 + math.ceil(end / step))
    turn = k % count * step
    half_cos, half_sin, turn_cos, turn_sin = math.cos(step / 2), math.sin(step / 2), math.cos(turn), math.sin(turn)
    a, b, c, d, size = 1.0, 0.0, 1.0, 0.0, 1.0 / count
    for j in range(nodes):
        versine[j], sine[j] = 2 * b * b, 2 * a * b
        law_real[j], law_imag[j] = size * c, -size * d
        a, b = a * half_cos - b * half_sin, a * half_sin + b * half_cos
        c, d, size = c * turn_cos - d * turn_sin, c * turn_sin + d * turn_cos, 2.0 / count
    padded = (nodes + LANES - 1) // LANES * LANES
    for j in range(nodes, padded):
        versine[j] = sine[j] = law_real[j] = law_imag[j] = 0.0
    return padded


@summed
def _law_at_nodes(p, versine, sine, law_real, law_imag):
    """Multiplies the law by phi of all units."""
    nodes = versine.shape[0]
    for i in range(p.shape[0]):
        chance = p[i]
        for j in range(nodes):
            a, b, c, d = law_real[j], law_imag[j], 1 - chance * versine[j], chance * sine[j]
            law_real[j], law_imag[j] = a * c - b * d, a * d + b * c


@per_row
def room():
    """Arrays for a row, reused for all: versine and sine of the nodes, real and imaginary part of w, and of a sum."""
    return np.empty((6, MOST))


@per_row
def law_of_count(p, q, k, at, series):
    """Writes the nodes and w; returns the number of nodes, the number of terms, and P(B = k).

    The number of nodes is 0 for a row that is left to other code.

    ``series`` is from :func:`khot.kernels.count.numba_series.room`; without terms the row is processed directly.
    """
    variance = dot(p, q)
    if not variance >= LEAST:
        return 0, 0, 0.0
    nodes = choose_nodes(variance, k, p.shape[0], DEPTH, at[0], at[1], at[2], at[3])
    law_real, law_imag, terms = at[2, :nodes], at[3, :nodes], 0
    if p.shape[0] >= DIRECT:
        terms = terms_of(variance, float(p.shape[0]), at[0, :nodes])
    if terms:
        numba_series.law_at_nodes(p, q, at[0, :nodes], terms, law_real, law_imag, series)
        terms = terms_of(variance, 1.0, at[0, :nodes])  # for a single unit
    else:
        _law_at_nodes(p, at[0, :nodes], at[1, :nodes], law_real, law_imag)
    chance = 0.0
    for j in range(nodes):
        chance += law_real[j]
    for j in range(nodes):
        law_real[j] /= chance
        law_imag[j] /= chance
    return nodes if chance * math.sqrt(max(variance, 0.25)) > LIKELY else 0, terms, chance


@summed
def _given_count(p, q, versine, sine, law_real, law_imag, complement, inclusion):
    nodes = law_real.shape[0]
    for i in range(p.shape[0]):
        delta, lean, twice = 0.0, p[i] - q[i], 2 * p[i] * q[i]
        for j in range(nodes):
            size = 1 / (1 - twice * versine[j])  # of phi, its inverse square
            delta += (lean * law_real[j] * versine[j] - law_imag[j] * sine[j]) * size
        out, included = q[i] * (1 - p[i] * delta), p[i] * (1 + q[i] * delta)
        complement[i] = out if out < 0.5 else 1 - included  # with the digits that are left next to 1
        inclusion[i] = included if out >= 0.5 else 1 - out


@per_row
def given_count(p, q, nodes, terms, at, series, complement, inclusion):
    """Writes the probabilities of units."""
    if terms:
        numba_series.given_count(
            p, q, at[0, :nodes], at[2, :nodes], at[3, :nodes], terms, series, complement, inclusion
        )
    else:
        _given_count(p, q, at[0, :nodes], at[1, :nodes], at[2, :nodes], at[3, :nodes], complement, inclusion)


@summed
def _covariance_times(p, q, t, versine, sine, law_real, law_imag, sum_real, sum_imag, result):
    nodes = law_real.shape[0]
    for j in range(nodes):
        sum_real[j] = sum_imag[j] = 0.0
    for i in range(p.shape[0]):
        lean, twice = p[i] - q[i], 2 * p[i] * q[i]
        for j in range(nodes):
            size = t[i] / (1 - twice * versine[j])
            sum_real[j] += lean * versine[j] * size
            sum_imag[j] += sine[j] * size
    mean = 0.0  # of sum t_i delta_i
    for j in range(nodes):
        a, b = sum_real[j], sum_imag[j]
        sum_real[j], sum_imag[j] = a * law_real[j] - b * law_imag[j], a * law_imag[j] + b * law_real[j]
        mean += sum_real[j]
    for i in range(p.shape[0]):
        first = second = others = 0.0
        lean, spread = p[i] - q[i], p[i] * q[i]
        for j in range(nodes):
            size = 1 / (1 - 2 * spread * versine[j])
            a, b = lean * versine[j] * size, sine[j] * size
            c, d = law_real[j] * a - law_imag[j] * b, law_real[j] * b + law_imag[j] * a
            first += c
            second += c * a - d * b
            others += sum_real[j] * a - sum_imag[j] * b
        own = (1 + q[i] * first) * (1 - p[i] * first) - spread * (second - first * first)
        result[i] = own * t[i] + spread * (others - first * mean)


@per_row
def covariance_times(p, q, t, nodes, terms, at, series, result):
    """Writes C v for the v with ``pq v = t``."""
    if terms:
        numba_series.covariance_times(p, q, t, at[0, :nodes], at[2, :nodes], at[3, :nodes], terms, series, result)
    else:
        _covariance_times(
            p, q, t, at[0, :nodes], at[1, :nodes], at[2, :nodes], at[3, :nodes], at[4, :nodes], at[5, :nodes], result
        )
