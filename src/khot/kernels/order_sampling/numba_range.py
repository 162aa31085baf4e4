r"""The range of a one-dimensional integral, and the nodes of the trapezoidal rule, as loops for one row.

The error of the rule is the Fourier transform of the integrand at :math:`2 \pi / \text{step}`. It decreases like that
of a normal density as long as the integrand resembles one. In the end it decreases by :math:`\pi / 2` per unit of
frequency, since there is no pole up to that height, where a tail is as steep as :math:`e^{-e^s}`.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined
from ..cpu.maths import EXP

exp = EXP[np.float64]
GRID = 16  # points of one trial, whole registers of them
TRIALS = 600
BLOCK = 8  # of nodes; a compiler processes this many at once
MOST_NODES = 8192
MARGIN = 60.0  # beyond this distance from all positions the integrand vanishes
RATES = 3.0  # contribution of the rates of arrival to the curvature of a logarithm


@inlined
def gather(theta, k, places, finite):
    """Gathers the finite positions; returns their number, and how many are to be drawn, -1 if there is a NaN."""
    count = 0
    for i in range(theta.shape[0]):
        if np.isfinite(theta[i]):
            places[count], finite[count] = i, theta[i]
            count += 1
        elif theta[i] == np.inf:
            k -= 1
        elif theta[i] != -np.inf:
            return 0, -1
    return count, k


@inlined
def highest_of(values, count):
    highest = values[0]
    for i in range(1, count):
        highest = max(highest, values[i])
    return highest


@inlined
def first_within(values):
    """The first and the last point of a grid with a nonnegative value."""
    first, last = 0, GRID - 1
    while first < GRID - 1 and not values[first] >= 0:
        first += 1
    while last > first and not values[last] >= 0:
        last -= 1
    return first, last


@inlined
def density(depth, curvature):
    """Nodes per unit of time with which the error of the rule is e^-depth.

    ``curvature`` is minus the second derivative of the logarithm of the integrand at its peak.
    """
    return math.hypot(depth / math.pi**2, math.sqrt(depth * (curvature + RATES) / 2) / math.pi)


@inlined
def fill_nodes(low, high, density, points):
    """The nodes of the rule; returns their number, and the weight of each."""
    width = high - low
    blocks = int(min(width * density, MOST_NODES - BLOCK)) // BLOCK + 1  # min first: the int must not overflow
    count = blocks * BLOCK
    step = width / (count - 1)
    for i in range(count):
        points[i] = low + i * step
    return count, step


@inlined
def weigh(values, count, step):
    """Turns logarithms of values, at steps of these lengths, into shares of the integral, and returns its logarithm."""
    peak = highest_of(values, count)
    for i in range(count):
        values[i] = exp(values[i] - peak) * step[i]
    total = 0.0
    for i in range(count):
        total += values[i]
    for i in range(count):
        values[i] /= total
    return math.log(total) + peak
