r"""Units given that k of them have come, from the characteristic function of their number N, for rows with some spread.

Each unit has a rarer fate, of probability s <= 1/2 at the time 0, see :mod:`.numba_logistic`: to have come, or, for
units above, to be missing. With R and T such that

.. math:: R_i = \frac{s_i e^{\pm i \varphi}}{1 - s_i + s_i e^{\pm i \varphi}}, \qquad
    T = e^{-i \varphi (k - \text{number above})} \prod_i (1 - s_i + s_i e^{\pm i \varphi}),

and the minus sign above, sums over :math:`\varphi = 2 \pi j / M` give P(N = k) = mean(T), the probability of the rarer
fate of unit i given N = k, mean(T R_i) / mean(T), and its covariance with a sum of such fates. They are exact except
for
:math:`P(N = k \pm M), P(N = k \pm 2M), ...`, and large angles are negligible. Unless N has almost no spread no digits
are lost: mean(T) is about one over the standard deviation.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, inlined_sum
from .numba_range import BLOCK

Array = np.ndarray[Any, Any]

LEAST_SPREAD = 0.1  # variance of N above which no digits are lost
SLACK = 3.0  # in addition to the depth, for P(N = k) itself


class Circle(NamedTuple):
    """Numbers for each angle, in whole blocks; those beyond the last angle have weight 0."""

    cosine: Array
    sine: Array
    real: Array  # T times the weight, divided by P(N = k)
    imaginary: Array
    # Arrays for sums over units.
    other_real: Array
    other_imaginary: Array
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
def _multiply(s, start, stop, sign, cosine, sine, real, imaginary):
    for j in range(start, stop):
        small, large = s[j], 1.0 - s[j]
        for i in range(real.shape[0]):
            a, b = large + small * cosine[i], sign * small * sine[i]
            before = real[i]
            real[i] = before * a - imaginary[i] * b
            imaginary[i] = before * b + imaginary[i] * a


@inlined
def _turn(angle, cosine, sine):
    """Cosines and sines of multiples of an angle; few enough not to lose digits from one to the next."""
    a, b = math.cos(angle), math.sin(angle)
    c, d = 1.0, 0.0
    for j in range(cosine.shape[0]):
        cosine[j], sine[j] = c, d
        c, d = c * a - d * b, c * b + d * a


@inlined
def walk(sides, depth, of_nodes, s):
    """The :class:`Circle` of a row; writes the probabilities of the rarer fates at the time 0."""
    for j in range(sides.end):
        s[j] = sides.weight[j] / (1.0 + sides.weight[j])
    points, most = _angles(sides.end, sides.curvature, depth)
    nodes = (most + BLOCK - 1) // BLOCK * BLOCK
    cosine, sine = of_nodes[0, :nodes], of_nodes[1, :nodes]
    real, imaginary = of_nodes[2, :nodes], of_nodes[3, :nodes]
    _turn(2 * math.pi / points, cosine, sine)
    _turn(-2 * math.pi / points * sides.slope, real, imaginary)
    _multiply(s, 0, sides.above, -1.0, cosine, sine, real, imaginary)
    _multiply(s, sides.above, sides.end, 1.0, cosine, sine, real, imaginary)
    total = 0.0
    for j in range(nodes):
        weight = 1.0 if j == 0 else 2.0 if j < most else 0.0
        real[j], imaginary[j] = real[j] * weight, imaginary[j] * weight
        total += real[j]
    for j in range(nodes):
        real[j], imaginary[j] = real[j] / total, imaginary[j] / total
    return Circle(cosine, sine, real, imaginary, of_nodes[4, :nodes], of_nodes[5, :nodes], total / points)


@inlined_sum
def _fill_means(s, start, stop, sign, cosine, sine, real, imaginary, result):
    """mean(T R)."""
    for j in range(start, stop):
        total, small, large = 0.0, s[j], 1.0 - s[j]
        for i in range(real.shape[0]):
            scale = small / (1.0 - 2.0 * small * large * (1.0 - cosine[i]))
            r, q = scale * (large * cosine[i] + small), scale * (sign * large * sine[i])
            total += real[i] * r - imaginary[i] * q
        result[j] = total


@inlined
def rarer_given_count(sides, circle, s, rarer):
    """The probability of the rarer fate of each unit given N = k."""
    cosine, sine, real, imaginary = circle.cosine, circle.sine, circle.real, circle.imaginary
    _fill_means(s, 0, sides.above, -1.0, cosine, sine, real, imaginary, rarer)
    _fill_means(s, sides.above, sides.end, 1.0, cosine, sine, real, imaginary, rarer)


@inlined
def _add(h, s, start, stop, sign, cosine, sine, real, imaginary):
    """sum_j h_j R_j."""
    for j in range(start, stop):
        each, small, large = h[j] * s[j], s[j], 1.0 - s[j]
        for i in range(real.shape[0]):
            scale = each / (1.0 - 2.0 * small * large * (1.0 - cosine[i]))
            real[i] += scale * (large * cosine[i] + small)
            imaginary[i] += scale * (sign * large * sine[i])


@inlined_sum
def _fill_covariances(h, s, start, stop, sign, cosine, sine, real, imaginary, sum_real, sum_imaginary, result):
    """mean(T R (H + h (1 - R))), for given T and T H."""
    for j in range(start, stop):
        total, each, small, large = 0.0, h[j], s[j], 1.0 - s[j]
        for i in range(real.shape[0]):
            scale = small / (1.0 - 2.0 * small * large * (1.0 - cosine[i]))
            r, q = scale * (large * cosine[i] + small), scale * (sign * large * sine[i])
            a = sum_real[i] + each * (real[i] * (1.0 - r) + imaginary[i] * q)
            b = sum_imaginary[i] + each * (imaginary[i] * (1.0 - r) - real[i] * q)
            total += r * a - q * b
        result[j] = total


@inlined
def covariances(sides, circle, s, h, rarer, result):
    """Covariances of the rarer fates y with sum_j h_j y_j given N = k."""
    cosine, sine = circle.cosine, circle.sine
    real, imaginary, a, b = circle.real, circle.imaginary, circle.other_real, circle.other_imaginary
    above, end = sides.above, sides.end
    a[:], b[:] = 0.0, 0.0
    _add(h, s, 0, above, -1.0, cosine, sine, a, b)
    _add(h, s, above, end, 1.0, cosine, sine, a, b)
    mean = 0.0
    for j in range(end):
        mean += h[j] * rarer[j]
    for i in range(a.shape[0]):
        sum_real, sum_imaginary = a[i] - mean, b[i]
        a[i] = real[i] * sum_real - imaginary[i] * sum_imaginary
        b[i] = real[i] * sum_imaginary + imaginary[i] * sum_real
    _fill_covariances(h, s, 0, above, -1.0, cosine, sine, real, imaginary, a, b, result)
    _fill_covariances(h, s, above, end, 1.0, cosine, sine, real, imaginary, a, b, result)
