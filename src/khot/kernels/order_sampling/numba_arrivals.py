r"""Inclusion probabilities of order sampling, and products with their Jacobian, for noise of any law, row by row.

By time s unit i has arrived with probability :math:`F_i`, a function of :math:`x_i = e^{s + \vartheta_i}`; it arrives
at the rate :math:`f_i`. The number N of units that have arrived is a sum of independent Bernoulli variables.
Probabilities of N with some units left out are sums over its characteristic function. With
:math:`\varphi_i = 1 - F_i + F_i z` and :math:`T = z^{1 - k} \prod_i \varphi_i` at M points z of the unit circle,

.. math:: u_i = P(N_{-i} = k - 1) = \operatorname{mean} \frac{T}{\varphi_i}, \qquad
    \pi_i = \int F_i \Big( \sum_j f_j u_j + f_i u_i \Big) ds, \qquad
    (J g)_i = \int f_i \operatorname{mean} \frac{T}{\varphi_i}
    \Big( g_i \sum_j \frac{f_j}{\varphi_j} - \sum_j \frac{f_j g_j}{\varphi_j} \Big) ds.

The means are exact except for counts that differ from k by M or more, and points of large angle are negligible:
:math:`|\prod \varphi_i| \le \exp(-2 v \sin^2(\text{angle} / 2))` with v the variance of N. The k-th unit arrives while
about k are expected to have arrived. The integrals end where Chernoff's bound of P(N = k) is e^-depth, see
:mod:`.numba_range`.

Logistic noise has a faster method, :mod:`.numba_same_design`, which needs the characteristic function only once. Short
rows have recursions, :mod:`.numba_tables` and :mod:`.numba_short_rows`.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum
from ..cpu.maths import EXP
from .numba_range import BLOCK, MOST_NODES, TINY, Array, range_by_chernoff

exp = EXP[np.float64]
MOST_ANGLES = 128
SLACK = 3.0  # in addition to the depth, for P(N = k) itself


class Space(NamedTuple):
    """Arrays for units, nodes and angles."""

    came: Array  # F
    missing: Array  # 1 - F
    rate: Array  # f
    fewer: Array  # u
    node: Array
    width: Array
    of_nodes: Array
    of_angles: Array


class Plane(NamedTuple):
    """Complex numbers."""

    real: Array
    imaginary: Array


@inlined
def plane_of(rows, at, count):
    """The first numbers of two neighbouring rows."""
    return Plane(rows[at, :count], rows[at + 1, :count])


@inlined
def turn(angle, z):
    """Writes the powers 0, 1, ... of e^(i angle).

    There are so few powers that the rounding errors of repeated multiplication do not matter.
    """
    a, b = math.cos(angle), math.sin(angle)
    c, d = 1.0, 0.0
    for j in range(z.real.shape[0]):
        z.real[j], z.imaginary[j] = c, d
        c, d = c * a - d * b, c * b + d * a


@inlined
def multiply(usual, rarer, z, product):
    """Multiplies by usual + rarer z."""
    for i in range(z.real.shape[0]):
        a, b = usual + rarer * z.real[i], rarer * z.imaginary[i]
        before = product.real[i]
        product.real[i] = before * a - product.imaginary[i] * b
        product.imaginary[i] = before * b + product.imaginary[i] * a


@inlined
def space_for(n, k, has_vector):
    units, nodes = np.empty((4, n)), np.empty((8, MOST_NODES))
    return Space(units[0], units[1], units[2], units[3], nodes[6], nodes[7], nodes[:6], np.empty((8, MOST_ANGLES)))


@inlined
def _angles(n, k, mean, variance, turns, depth, rows):
    """The number of points on the circle, and how many of one half are not negligible, in whole blocks.

    Also writes their cosines and sines, with those of ``turns`` times the angle, twice if they represent conjugates.
    """
    third = (depth + SLACK) / 3
    points = int(min(n + 1.0, abs(k - mean) + third + math.sqrt(third * third + 6 * third * variance) + 2.0)) | 1
    most, share = (points + 1) // 2, 3 * third / (2 * variance + TINY)
    if share < 1:
        most = min(most, int(math.asin(math.sqrt(share)) / math.pi * points) + 2)
    most = min(most, MOST_ANGLES)
    blocks = (most + BLOCK - 1) // BLOCK * BLOCK
    angle = 2 * math.pi / points
    turn(angle, plane_of(rows, 0, blocks))
    turn(turns % points * angle, plane_of(rows, 2, blocks))
    for j in range(1, blocks):
        weight = 2.0 if j < most else 0.0
        rows[2, j], rows[3, j] = weight * rows[2, j], weight * rows[3, j]
    for j in range(most, blocks):
        rows[0, j], rows[1, j] = 1.0, 0.0
    return points, blocks


@inlined
def rarer_fates(space, n, k):
    """The probabilities of the fate that fewer units have, and of the other: few powers of z lose few digits."""
    return (space.missing, space.came) if 2 * k > n else (space.came, space.missing)


@inlined
def walk(space, n, k, turns, mean, variance, depth):
    """The quadrature points z and T times their weights, for the time of the fates in ``space``."""
    rarer, usual = rarer_fates(space, n, k)
    points, count = _angles(float(n), k, mean, variance, turns, depth, space.of_angles)
    z, product = plane_of(space.of_angles, 0, count), plane_of(space.of_angles, 2, count)
    for i in range(n):
        multiply(usual[i], rarer[i], z, product)
    return points, z, product


@inlined_sum
def _sums_without(rarer, usual, i, j, z, law):
    """The sums of T / phi for two units. LLVM unrolls a loop for one unit so far that few angles stay scalar."""
    first = second = 0.0
    r, u, v, w = rarer[i], usual[i], rarer[j], usual[j]
    for at in range(z.real.shape[0]):
        a, b, c, d = u + r * z.real[at], r * z.imaginary[at], w + v * z.real[at], v * z.imaginary[at]
        first += (law.real[at] * a + law.imaginary[at] * b) / (a * a + b * b)
        second += (law.real[at] * c + law.imaginary[at] * d) / (c * c + d * d)
    return first, second


@inlined
def fill_fewer(space, n, k, mean, variance, depth):
    """Writes the u: without unit i, k - 1 units have arrived, or n - k are missing."""
    rarer, usual = rarer_fates(space, n, k)
    points, z, law = walk(space, n, k, k - n if 2 * k > n else 1 - k, mean, variance, depth)
    for i in range(0, n, 2):
        j = min(i + 1, n - 1)
        first, second = _sums_without(rarer, usual, i, j, z, law)
        space.fewer[i], space.fewer[j] = first / points, second / points


@inlined
def _add_inclusion(space, k, mean, variance, width, depth, result):
    """Adds the contribution of a node to the probabilities."""
    came, fewer, total, n = space.came, space.fewer, 0.0, result.shape[0]
    fill_fewer(space, n, k, mean, variance, depth)
    for i in range(n):
        fewer[i] *= space.rate[i] * width
        total += fewer[i]
    for i in range(n):
        result[i] += came[i] * (total + fewer[i])


@inlined
def _add(rarer, usual, f, g, z, a_sum, b_sum):
    """Adds f and f g, divided by the factor of a unit, to two sums."""
    for i in range(z.real.shape[0]):
        a, b = usual + rarer * z.real[i], rarer * z.imaginary[i]
        scale = f / (a * a + b * b)
        x, y = a * scale, b * scale
        a_sum.real[i] += x
        a_sum.imaginary[i] -= y
        b_sum.real[i] += g * x
        b_sum.imaginary[i] -= g * y


@inlined
def times_law(law, z):
    for i in range(z.real.shape[0]):
        x, y = z.real[i], z.imaginary[i]
        z.real[i] = x * law.real[i] - y * law.imaginary[i]
        z.imaginary[i] = x * law.imaginary[i] + y * law.real[i]


@inlined_sum
def _mean_of_two(rarer, usual, g, z, a_sum, b_sum):
    total = 0.0
    for i in range(z.real.shape[0]):
        a, b = usual + rarer * z.real[i], rarer * z.imaginary[i]
        real, imaginary = g * a_sum.real[i] - b_sum.real[i], g * a_sum.imaginary[i] - b_sum.imaginary[i]
        total += (real * a + imaginary * b) / (a * a + b * b)
    return total


@inlined
def _add_product(space, k, mean, variance, width, depth, vector, result):
    """Adds the contribution of a node to the product of the Jacobian with a vector."""
    rate, rows, n = space.rate, space.of_angles, result.shape[0]
    rarer, usual = rarer_fates(space, n, k)
    points, z, law = walk(space, n, k, 1 - min(k, n - k), mean, variance, depth)
    count = z.real.shape[0]
    a_sum, b_sum = plane_of(rows, 4, count), plane_of(rows, 6, count)
    rows[4:, :count] = 0.0
    for i in range(n):
        _add(rarer[i], usual[i], rate[i], vector[i], z, a_sum, b_sum)
    times_law(law, a_sum)
    times_law(law, b_sum)
    scale = width / points
    for i in range(n):
        result[i] += rate[i] * (_mean_of_two(rarer[i], usual[i], vector[i], z, a_sum, b_sum) * scale)


def fill_fates_of(law):
    """The fates of the units at a time; the mean of N and its variance."""

    @inlined_sum
    def fill_fates(weight, up, came, missing, rate):
        mean = variance = 0.0
        for i in range(weight.shape[0]):
            at = law(weight[i] * up)
            came[i], missing[i], rate[i] = at.came, at.missing, at.rate
            mean += at.came
            variance += at.came * at.missing
        return mean, variance

    return fill_fates


def of_rows_by_nodes(law):
    """The functions of a row for noise of any law, whose nodes are in the space: its range, its results, products."""
    fill_fates = fill_fates_of(law)

    @inlined
    def inclusion(space, weight, k, nodes, when, depth, given, result):
        result[:] = 0.0
        for node in range(nodes):
            mean, variance = fill_fates(weight, exp(space.node[node]), space.came, space.missing, space.rate)
            _add_inclusion(space, k, mean, variance, space.width[node], depth, result)

    @inlined
    def product(space, weight, k, nodes, when, depth, given, vector, result):
        result[:] = 0.0
        for node in range(nodes):
            mean, variance = fill_fates(weight, exp(space.node[node]), space.came, space.missing, space.rate)
            _add_product(space, k, mean, variance, space.width[node], depth, vector, result)

    return space_for, range_by_chernoff(law), inclusion, product
