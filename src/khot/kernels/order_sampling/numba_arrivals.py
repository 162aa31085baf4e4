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
about k are expected to have arrived. The integrals end where bounds on P(N = k) are e^-depth: with m the mean of N and
d = |m - k|, those of Bernstein, :math:`e^{-d^2 / (2 v + 2 d / 3)}`, and of Chernoff, for the units that have arrived
and for those that have not.

Logistic noise has a faster method, :mod:`.numba_inclusion`.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum, kernel, specialised
from ..cpu.maths import EXP
from .numba_log_exponential import fate
from .numba_plane import multiply, plane_of, turn
from .numba_range import BLOCK, gather
from .numba_times import TINY, walk_of

Array = np.ndarray[Any, Any]

exp = EXP[np.float64]
WIDEST = 600.0  # distance of positions whose exponentials are still representable
MOST_ANGLES = 128
SLACK = 3.0  # in addition to the depth, for P(N = k) itself
MOST_NODES = 4096


@inlined
def _of_exponential(x):
    came, missing = fate(x)
    return came * x if x < 0.5 else 1.0 - missing, missing, x * missing


@inlined
def _of_uniform(x):
    return min(x, 1.0), max(1.0 - x, 0.0), x if x < 1.0 else 0.0


@inlined
def _of_logistic(x):
    missing = 1.0 / (1.0 + x)
    came = x * missing
    return came, missing, came * missing


# F, 1 - F and f at x = e^(s + theta), by the name of the noise, and whether F has a kink at x = 1.
FATES = {
    "log_exponential": (_of_exponential, False),
    "log_uniform": (_of_uniform, True),
    "logistic": (_of_logistic, False),
}


class Space(NamedTuple):
    """Arrays for units, nodes and angles."""

    weight: Array  # e^theta, relative to the middle of the positions
    came: Array  # F
    missing: Array  # 1 - F
    rate: Array  # f
    fewer: Array  # u
    node: Array
    width: Array
    of_angles: Array


@inlined
def _space(n):
    return Space(
        np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(n),
        np.empty(MOST_NODES), np.empty(MOST_NODES), np.empty((14, MOST_ANGLES)),
    )  # fmt: skip


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
def _factor(came, missing):
    """The factor of a unit; divided by z if it has more likely arrived than not, so certain units change nothing."""
    return (missing, came, 1.0, 0) if came <= 0.5 else (came, missing, -1.0, 1)


@inlined
def _divide(x, z, to):
    """Writes x / z."""
    for i in range(x.real.shape[0]):
        a, b = x.real[i], x.imaginary[i]
        to.real[i] = a * z.real[i] + b * z.imaginary[i]
        to.imaginary[i] = b * z.real[i] - a * z.imaginary[i]


@inlined_sum
def _mean_without(large, small, sign, z, law):
    total = 0.0
    for i in range(z.real.shape[0]):
        a, b = large + small * z.real[i], sign * small * z.imaginary[i]
        total += (law.real[i] * a + law.imaginary[i] * b) / (a * a + b * b)
    return total


@inlined
def add_inclusion(space, k, law, width, depth, result):
    """Adds the contribution of a node to the probabilities."""
    came, missing, rate, fewer, rows = space.came, space.missing, space.rate, space.fewer, space.of_angles
    n = result.shape[0]
    points, count = _angles(float(n), k, law[0], law[1], 1 - k + law[2], depth, rows)
    z, product = plane_of(rows, 0, count), plane_of(rows, 2, count)
    for i in range(n):
        large, small, sign, _ = _factor(came[i], missing[i])
        multiply(large, small, sign, z, product)
    _divide(product, z, plane_of(rows, 4, count))
    total, scale = 0.0, width / points
    for i in range(n):
        large, small, sign, at = _factor(came[i], missing[i])
        chance = _mean_without(large, small, sign, z, plane_of(rows, 2 + 2 * at, count))
        fewer[i] = rate[i] * (chance * scale)
        total += fewer[i]
    for i in range(n):
        result[i] += came[i] * (total + fewer[i])


@inlined
def _multiply_and_add(factor, f, fg, z, product, a_sum, b_sum):
    """:func:`.numba_plane.multiply`, which also adds f and fg, divided by the factor, to the two sums."""
    large, small, sign, _ = factor
    for i in range(z.real.shape[0]):
        a, b = large + small * z.real[i], sign * small * z.imaginary[i]
        before = product.real[i]
        product.real[i] = before * a - product.imaginary[i] * b
        product.imaginary[i] = before * b + product.imaginary[i] * a
        inverse = 1.0 / (a * a + b * b)
        x, y = a * inverse, b * inverse
        a_sum.real[i] += f * x
        a_sum.imaginary[i] -= f * y
        b_sum.real[i] += fg * x
        b_sum.imaginary[i] -= fg * y


@inlined_sum
def _mean_of_two(factor, g, z, a_sum, b_sum):
    large, small, sign, _ = factor
    total = 0.0
    for i in range(z.real.shape[0]):
        a, b = large + small * z.real[i], sign * small * z.imaginary[i]
        real, imaginary = g * a_sum.real[i] - b_sum.real[i], g * a_sum.imaginary[i] - b_sum.imaginary[i]
        total += (real * a + imaginary * b) / (a * a + b * b)
    return total


@inlined
def add_product(space, k, law, width, depth, vector, result):
    """Adds the contribution of a node to the product of the Jacobian with a vector."""
    came, missing, rate, rows = space.came, space.missing, space.rate, space.of_angles
    n = result.shape[0]
    points, count = _angles(float(n), k, law[0], law[1], 1 - k + law[2], depth, rows)
    z, product, turned = plane_of(rows, 0, count), plane_of(rows, 2, count), plane_of(rows, 12, count)
    rows[4:12, :count] = 0.0
    for i in range(n):
        factor = _factor(came[i], missing[i])
        a_sum, b_sum = plane_of(rows, 4 + 4 * factor[3], count), plane_of(rows, 6 + 4 * factor[3], count)
        _multiply_and_add(factor, rate[i], rate[i] * vector[i], z, product, a_sum, b_sum)
    for row in (4, 6):
        whole, other = plane_of(rows, row, count), plane_of(rows, row + 4, count)
        _divide(other, z, turned)
        for i in range(count):
            x, y = whole.real[i] + turned.real[i], whole.imaginary[i] + turned.imaginary[i]
            whole.real[i] = x * product.real[i] - y * product.imaginary[i]
            whole.imaginary[i] = x * product.imaginary[i] + y * product.real[i]
        _divide(whole, z, other)
    scale = width / points
    for i in range(n):
        factor = _factor(came[i], missing[i])
        a_sum, b_sum = plane_of(rows, 4 + 4 * factor[3], count), plane_of(rows, 6 + 4 * factor[3], count)
        result[i] += rate[i] * (_mean_of_two(factor, vector[i], z, a_sum, b_sum) * scale)


def _inclusion_loop(bounds, nodes, fill_fates):
    def rows(first, last, theta, k, depth, ends, curvature, result):
        n, skipped = theta.shape[1], 0
        places, finite, found, space = np.empty(n, np.int64), np.empty(n), np.empty(n), _space(n)
        for r in range(first, last):
            count, size = gather(theta[r], k[r], places, finite)
            for i in range(n):
                result[r, i] = 1.0 if theta[r, i] > 0 and size >= 0 else 0.0 if size >= 0 else np.nan
            if not 0 < size < count:
                for j in range(count):
                    result[r, places[j]] = 1.0 if size > 0 else 0.0
                continue
            row, weight = finite[:count], space.weight[:count]
            nodes_of_row = -1
            if row.max() - row.min() <= WIDEST:
                ends[r, 0], ends[r, 1], curvature[r] = bounds(row, size, depth, weight)
                nodes_of_row = nodes(row, ends[r], curvature[r], depth, space)
            if nodes_of_row < 0:
                ends[r, 0] = np.nan
                skipped += 1
                continue
            found[:count] = 0.0
            for node in range(nodes_of_row):
                law = fill_fates(weight, exp(space.node[node]), space.came, space.missing, space.rate)
                add_inclusion(space, size, law, space.width[node], depth, found[:count])
            for j in range(count):
                result[r, places[j]] = min(found[j], 1.0)
        return skipped

    return kernel(rows)


def _product_loop(nodes, fill_fates):
    def rows(first, last, theta, k, depth, ends, curvature, vector, result):
        n = theta.shape[1]
        places, finite, found, g, space = np.empty(n, np.int64), np.empty(n), np.empty(n), np.empty(n), _space(n)
        for r in range(first, last):
            count, size = gather(theta[r], k[r], places, finite)
            result[r, :] = 0.0
            if np.isnan(ends[r, 0]) or not 0 < size < count:
                continue
            row, weight, mean_of_g = finite[:count], space.weight[:count], 0.0
            low, half = row.min(), 0.5 * (row.max() - row.min())
            for j in range(count):
                weight[j] = exp(row[j] - low - half)
                g[j] = vector[r, places[j]]
                mean_of_g += g[j] / count
            for j in range(count):
                g[j] -= mean_of_g
            nodes_of_row = nodes(row, ends[r], curvature[r], depth, space)
            found[:count] = 0.0
            for node in range(nodes_of_row):
                law = fill_fates(weight, exp(space.node[node]), space.came, space.missing, space.rate)
                add_product(space, size, law, space.width[node], depth, g, found[:count])
            for j in range(count):
                result[r, places[j]] = found[j]
        return 0

    return kernel(rows)


@functools.cache
def loops(noise: str) -> tuple[Any, Any]:
    """The loops of inclusion probabilities and of products for a noise."""
    with specialised(noise):
        bounds, nodes, fill_fates = walk_of(*FATES[noise])
        return _inclusion_loop(bounds, nodes, fill_fates), _product_loop(nodes, fill_fates)
