r"""The characteristic function of the number of ones of independent units, at the nodes of an integral, in numba.

Units with probabilities :math:`p_i = 1 - q_i`, and k ones on average, have the characteristic functions
:math:`\varphi_i(t) = q_i + p_i e^{it}`. With :math:`y_i(t) = (e^{it} - 1) / \varphi_i(t)` at a few nodes t, N in all,
and the mean

.. math:: \langle f \rangle = \operatorname{Re} \sum_t w_t f(t), \qquad
    w_t = \frac{e^{-ikt} \prod_l \varphi_l(t)}{N P(B = k)}, \qquad \delta_i = \langle y_i \rangle,

the results for units given B = k are

.. math:: \pi_i = p_i (1 + q_i \delta_i), \quad 1 - \pi_i = q_i (1 - p_i \delta_i), \qquad
    C_{ij} = p_i q_i p_j q_j (\langle y_i y_j \rangle - \delta_i \delta_j), \quad i \ne j.

These sums have terms of both signs, but near the mean a single unit says little about B, so they lose almost no digits
unless B has almost no variance. Rows with less than ``LEAST``, and rows that lose digits nevertheless, are left to
other code.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import per_row, summed
from ..cpu.rows import dot

DEPTH, NODES = 41.4, 31  # nodes are cut off at e^-41.4 = 1e-18, and there are at most this many
LANES = 4  # nodes are processed in groups of four
MOST = 32
LEAST = 0.25  # variance of B below which rows are left to other code
LIKELY = 0.25  # P(B = k) times a deviation of at least a half exceeds this if the expected number is k
BLOCK = 256  # units that go through all nodes at a time, in the first-level cache of a processor
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
    """Arrays for a row, reused for all: versine and sine of the nodes, real and imaginary part of w."""
    return np.empty((4, MOST))


@per_row
def law_of_count(p, q, k, at):
    """Writes the nodes and w; returns the number of nodes and P(B = k).

    The number of nodes is 0 for a row that is left to other code.
    """
    variance = dot(p, q)
    if not variance >= LEAST:
        return 0, 0.0
    nodes = choose_nodes(variance, k, p.shape[0], DEPTH, at[0], at[1], at[2], at[3])
    law_real, law_imag, chance = at[2, :nodes], at[3, :nodes], 0.0
    _law_at_nodes(p, at[0, :nodes], at[1, :nodes], law_real, law_imag)
    for j in range(nodes):
        chance += law_real[j]
    for j in range(nodes):
        law_real[j] /= chance
        law_imag[j] /= chance
    return nodes if chance * math.sqrt(max(variance, 0.25)) > LIKELY else 0, chance


@summed
def _add_two(p, q, w, delta):
    """Adds the terms of two nodes to delta, with a single division."""
    for i in range(p.shape[0]):
        lean, twice = p[i] - q[i], 2 * p[i] * q[i]
        one, other = 1 - twice * w[0], 1 - twice * w[3]
        delta[i] += ((lean * w[1] - w[2]) * other + (lean * w[4] - w[5]) * one) / (one * other)


@summed
def _finish(p, q, delta, complement, inclusion):
    for i in range(p.shape[0]):
        out, included = q[i] * (1 - p[i] * delta[i]), p[i] * (1 + q[i] * delta[i])
        complement[i] = out if out < 0.5 else 1 - included  # next to 1, a few digits are lost
        inclusion[i] = included if out >= 0.5 else 1 - out


@per_row
def given_count(p, q, nodes, at, complement, inclusion):
    """Writes the probabilities of units."""
    delta, weights = np.empty(BLOCK), np.empty((nodes, 3))
    for j in range(nodes):
        weights[j, 0], weights[j, 1], weights[j, 2] = at[0, j], at[2, j] * at[0, j], at[3, j] * at[1, j]
    pairs = weights.reshape(nodes // 2, 6)
    for start in range(0, p.shape[0], BLOCK):
        stop = min(start + BLOCK, p.shape[0])
        one, zero, found = p[start:stop], q[start:stop], delta[: stop - start]
        found[:] = 0.0
        for pair in pairs:
            _add_two(one, zero, pair, found)
        _finish(one, zero, found, complement[start:stop], inclusion[start:stop])


@summed
def _sums_at_node(p, q, t, versine, size):
    """Writes the inverse square of phi; returns its sums with t and with (p - q) t."""
    total = moment = 0.0
    for i in range(p.shape[0]):
        size[i] = 1 / (1 - 2 * p[i] * q[i] * versine)
        total += t[i] * size[i]
        moment += (p[i] - q[i]) * t[i] * size[i]
    return total, moment


@summed
def _add_two_products(p, q, size, other, w, sums):
    """Adds the terms of two nodes with weights w to those of delta, of <y_i y_i> and of <Y y_i>."""
    first, second, third = sums[0], sums[1], sums[2]
    for i in range(p.shape[0]):
        lean, x, y = p[i] - q[i], size[i], other[i]
        first[i] += x * (w[0] * lean - w[1]) + y * (w[7] * lean - w[8])
        second[i] += x * x * ((w[2] * lean - w[3]) * lean - w[4]) + y * y * ((w[9] * lean - w[10]) * lean - w[11])
        third[i] += x * (w[5] * lean - w[6]) + y * (w[12] * lean - w[13])


@summed
def _assemble(p, q, t, sums, mean, result):
    first, second, third = sums[0], sums[1], sums[2]
    for i in range(p.shape[0]):
        spread = p[i] * q[i]
        own = (1 + q[i] * first[i]) * (1 - p[i] * first[i]) - spread * (second[i] - first[i] * first[i])
        result[i] = own * t[i] + spread * (third[i] - first[i] * mean)


@per_row
def covariance_times(p, q, t, nodes, at, sizes, result):
    """Writes C v for the v with ``pq v = t``; ``sizes`` is room for a number of each unit at each node."""
    mean, weights, sums = 0.0, np.empty((nodes, 7)), np.empty((3, BLOCK))
    for j in range(nodes):
        c, s, x, y, w = at[0, j], at[1, j], at[2, j], at[3, j], weights[j]
        total, moment = _sums_at_node(p, q, t, c, sizes[j])
        a, b = moment * c, total * s
        a, b = a * x - b * y, a * y + b * x
        mean += a  # of sum t_i delta_i
        w[0], w[1], w[2], w[3], w[4], w[5], w[6] = x * c, y * s, x * c * c, 2 * y * c * s, x * s * s, a * c, b * s
    pairs = weights.reshape(nodes // 2, 14)
    for start in range(0, p.shape[0], BLOCK):
        stop = min(start + BLOCK, p.shape[0])
        one, zero, found = p[start:stop], q[start:stop], sums[:, : stop - start]
        found[:, :] = 0.0
        for j in range(0, nodes, 2):
            _add_two_products(one, zero, sizes[j, start:stop], sizes[j + 1, start:stop], pairs[j // 2], found)
        _assemble(one, zero, t[start:stop], found, mean, result[start:stop])
