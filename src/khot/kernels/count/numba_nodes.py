r"""What a row of many open units is given its count, from the characteristic function of that, in numba.

O(n) time for each of 16 to 32 nodes, where a recursion takes it for each count of its window. Its sums have terms of
both signs; but where the count has a variance of ``MANY`` and about the mean k, a single unit says little of it, and
they take away none of each other's digits: each of the two probabilities keeps its relative accuracy. Other rows are
left to the recursion. y is made anew in each pass over the units, as those of all nodes are too many for a processor's
caches.

Units of chances :math:`p_i = 1 - q_i`, k of which are expected to be ones, have the characteristic functions
:math:`\varphi_i(t) = q_i + p_i e^{it}`. With :math:`y_i(t) = (e^{it} - 1) / \varphi_i(t)` at N nodes t, a few of which
are enough, and the mean

.. math:: \langle f \rangle = \operatorname{Re} \sum_t w_t f(t), \qquad
    w_t = \frac{e^{-ikt} \prod_l \varphi_l(t)}{N P(B = k)}, \qquad \delta_i = \langle y_i \rangle,

what belongs to units given B = k are

.. math:: \pi_i = p_i (1 + q_i \delta_i), \quad 1 - \pi_i = q_i (1 - p_i \delta_i), \qquad
    C_{ij} = p_i q_i p_j q_j (\langle y_i y_j \rangle - \delta_i \delta_j), \quad i \ne j.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..numba_rows import dot
from ..numba_tools import per_row, summed

DEPTH, NODES = (
    41.4,
    31,
)  # as in .characteristic: nodes of e^-41.4, and how many there are above that at most
LANES = 4  # nodes are taken by fours
MOST = 32
MANY = 16.0
LIKELY = 0.1  # the square of P(B = k), times the variance, is more, if the expected number is k: 1 / (2 pi)


@per_row
def choose_nodes(variance, k, m, depth, versine, sine, law_real, law_imag):
    """Writes 1 - cos t, sin t and e^{-ikt} times the weight of the nodes; returns how many there are.

    Some of no weight fill up what a processor does at once.
    """
    radius = depth / 3 + math.sqrt(depth * depth / 9 + 2 * depth * variance)
    last = math.ceil(min(radius, float(max(k, m - k))) / 2)
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
    """Of a row, to be used for all: versine and sine of the nodes, real and imaginary part of w, and of a sum."""
    return np.empty((6, MOST))


@per_row
def law_of_count(p, q, k, at):
    """Writes the nodes and w there; returns the number of nodes, 0 for a row to be left, and P(B = k)."""
    variance = dot(p, q)
    if not variance >= MANY:
        return 0, 0.0
    nodes = choose_nodes(variance, k, p.shape[0], DEPTH, at[0], at[1], at[2], at[3])
    law_real, law_imag = at[2, :nodes], at[3, :nodes]
    _law_at_nodes(p, at[0, :nodes], at[1, :nodes], law_real, law_imag)
    chance = 0.0
    for j in range(nodes):
        chance += law_real[j]
    for j in range(nodes):
        law_real[j] /= chance
        law_imag[j] /= chance
    return nodes if chance > 0 and chance * chance * variance > LIKELY else 0, chance


@summed
def _given_count(p, q, versine, sine, law_real, law_imag, complement, inclusion):
    nodes = law_real.shape[0]
    for i in range(p.shape[0]):
        delta, lean, twice = 0.0, p[i] - q[i], 2 * p[i] * q[i]
        for j in range(nodes):
            size = 1 / (1 - twice * versine[j])  # of phi, its inverse square
            delta += (lean * law_real[j] * versine[j] - law_imag[j] * sine[j]) * size
        complement[i], inclusion[i] = q[i] * (1 - p[i] * delta), p[i] * (1 + q[i] * delta)


@per_row
def given_count(p, q, nodes, at, complement, inclusion):
    """Writes the probabilities of units."""
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
def covariance_times(p, q, t, nodes, at, result):
    """Writes C v for the v with ``pq v = t``."""
    _covariance_times(
        p, q, t, at[0, :nodes], at[1, :nodes], at[2, :nodes], at[3, :nodes], at[4, :nodes], at[5, :nodes], result
    )
