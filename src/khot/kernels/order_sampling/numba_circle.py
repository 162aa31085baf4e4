r"""Units given that k have arrived, from the characteristic function of their number N, for rows with some spread.

Each unit has a rarer fate, of probability s <= 1/2 at the time 0, see :mod:`.numba_logistic`: to have arrived, or, for
units above, to be missing. With R and T such that

.. math:: R_i = \frac{s_i e^{\pm i \varphi}}{1 - s_i + s_i e^{\pm i \varphi}}, \qquad
    T = e^{-i \varphi (k - \text{number above})} \prod_i (1 - s_i + s_i e^{\pm i \varphi}),

and the minus sign above, sums over :math:`\varphi = 2 \pi j / M` give P(N = k) = mean(T), the probability of the rarer
fate of unit i given N = k, mean(T R_i) / mean(T), and its covariance with a sum of such fates. They are exact except
for :math:`P(N = k \pm M), P(N = k \pm 2M), ...`, and large angles are negligible. Unless N has almost no spread no
digits are lost: mean(T) is about one over the standard deviation.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

from ..cpu.loops import inlined, inlined_sum
from .numba_plane import Plane, multiply, plane_of, turn
from .numba_range import BLOCK

LEAST_SPREAD = 0.1  # variance of N above which no digits are lost
SLACK = 3.0  # in addition to the depth, for P(N = k) itself


class Circle(NamedTuple):
    """Numbers for each angle, in whole blocks; those beyond the last angle have weight 0."""

    z: Plane  # cosine and sine
    law: Plane  # T times the weight, divided by P(N = k)
    total: Plane  # for sums over units
    chance: float  # P(N = k)


@inlined
def _angles(count, spread, depth):
    """The number of points on the circle, which is odd, and how many of one half are not negligible."""
    third = (depth + SLACK) / 3
    points = min(count + 1, int(third + math.sqrt(third * third + 6 * third * spread)) + 2) | 1
    share = 3 * third / (2 * spread)  # squared sine of half the angle at which |T| is e^-depth
    most = (points + 1) // 2
    if share < 1:
        most = min(most, int(math.asin(math.sqrt(share)) / math.pi * points) + 2)
    return points, most


@inlined
def _multiply_all(s, start, stop, sign, z, product):
    for j in range(start, stop):
        multiply(1.0 - s[j], s[j], sign, z, product)


@inlined
def walk(sides, depth, of_nodes, s):
    """The :class:`Circle` of a row; writes the probabilities of the rarer fates at the time 0."""
    for j in range(sides.end):
        s[j] = sides.weight[j] / (1.0 + sides.weight[j])
    points, most = _angles(sides.end, sides.curvature, depth)
    nodes = (most + BLOCK - 1) // BLOCK * BLOCK
    z, law = plane_of(of_nodes, 0, nodes), plane_of(of_nodes, 2, nodes)
    turn(2 * math.pi / points, z)
    turn(-2 * math.pi / points * sides.slope, law)
    _multiply_all(s, 0, sides.above, -1.0, z, law)
    _multiply_all(s, sides.above, sides.end, 1.0, z, law)
    total = 0.0
    for j in range(nodes):
        weight = 1.0 if j == 0 else 2.0 if j < most else 0.0
        law.real[j], law.imaginary[j] = law.real[j] * weight, law.imaginary[j] * weight
        total += law.real[j]
    for j in range(nodes):
        law.real[j], law.imaginary[j] = law.real[j] / total, law.imaginary[j] / total
    return Circle(z, law, plane_of(of_nodes, 4, nodes), total / points)


@inlined
def _rarer_fate(small, sign, cosine, sine):
    """Real and imaginary part of R of a unit at an angle."""
    large = 1.0 - small
    scale = small / (1.0 - 2.0 * small * large * (1.0 - cosine))
    return scale * (large * cosine + small), scale * (sign * large * sine)


@inlined_sum
def _fill_means(s, start, stop, sign, z, law, result):
    """mean(T R)."""
    for j in range(start, stop):
        total, small = 0.0, s[j]
        for i in range(z.real.shape[0]):
            r, q = _rarer_fate(small, sign, z.real[i], z.imaginary[i])
            total += law.real[i] * r - law.imaginary[i] * q
        result[j] = total


@inlined
def rarer_given_count(sides, circle, s, rarer):
    """The probability of the rarer fate of each unit given N = k."""
    _fill_means(s, 0, sides.above, -1.0, circle.z, circle.law, rarer)
    _fill_means(s, sides.above, sides.end, 1.0, circle.z, circle.law, rarer)


@inlined
def _add(h, s, start, stop, sign, z, total):
    """sum_j h_j R_j."""
    for j in range(start, stop):
        each, small, large = h[j] * s[j], s[j], 1.0 - s[j]
        for i in range(z.real.shape[0]):
            scale = each / (1.0 - 2.0 * small * large * (1.0 - z.real[i]))
            total.real[i] += scale * (large * z.real[i] + small)
            total.imaginary[i] += scale * (sign * large * z.imaginary[i])


@inlined_sum
def _fill_covariances(h, s, start, stop, sign, z, law, weighted, result):
    """mean(T R (H + h (1 - R))), for given T and T H."""
    for j in range(start, stop):
        total, each, small = 0.0, h[j], s[j]
        for i in range(z.real.shape[0]):
            r, q = _rarer_fate(small, sign, z.real[i], z.imaginary[i])
            a = weighted.real[i] + each * (law.real[i] * (1.0 - r) + law.imaginary[i] * q)
            b = weighted.imaginary[i] + each * (law.imaginary[i] * (1.0 - r) - law.real[i] * q)
            total += r * a - q * b
        result[j] = total


@inlined
def covariances(sides, circle, s, h, rarer, result):
    """Covariances of the rarer fates y with sum_j h_j y_j given N = k."""
    (z, law, total, _), above, end = circle, sides.above, sides.end
    total.real[:], total.imaginary[:] = 0.0, 0.0
    _add(h, s, 0, above, -1.0, z, total)
    _add(h, s, above, end, 1.0, z, total)
    mean = 0.0
    for j in range(end):
        mean += h[j] * rarer[j]
    for i in range(total.real.shape[0]):
        a, b = total.real[i] - mean, total.imaginary[i]
        total.real[i] = law.real[i] * a - law.imaginary[i] * b
        total.imaginary[i] = law.real[i] * b + law.imaginary[i] * a
    _fill_covariances(h, s, 0, above, -1.0, z, law, total, result)
    _fill_covariances(h, s, above, end, 1.0, z, law, total, result)
