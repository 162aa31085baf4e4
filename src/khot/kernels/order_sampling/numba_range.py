r"""The range of a one-dimensional integral, and the nodes of a rule, as loops for one row.

The error of the trapezoidal rule is the Fourier transform of the integrand at :math:`2 \pi / \text{step}`. It
decreases like that of a normal density as long as the integrand resembles one. In the end it decreases by
:math:`\pi / 2` per unit of frequency, since there is no pole up to that height, where a tail is as steep as
:math:`e^{-e^s}`.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, per_row
from ..cpu.maths import EXP, LOG
from ..cpu.rows import highest, lowest
from ..selection.numba_counting import ANYWHERE, SUSPECT, cut, neighbours

Array = np.ndarray[Any, Any]

exp, log = EXP[np.float64], LOG[np.float64]
BLOCK = 8  # so many nodes are processed at once
MOST_NODES = 4096 + 72  # rows that begin at equal offsets of a page cause false conflicts in a processor
RATES = 4.5  # contribution of the rates of arrival to the curvature of a logarithm
WIDEST = 300.0  # distance of positions for which products of two exponentials are finite
SETTLED = 745.0  # exp(-SETTLED) is about 0 in double precision
ROOM = 600.0  # logarithm of a product of doubles


@per_row
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


@per_row
def leave_out_certain(finite, places, count, k, result):
    """Leaves out units that are certainly among the k, or certainly not, and writes which.

    A unit stays out if all of the k largest arrive before it, which is certain in double precision if it is ``SETTLED``
    below the k-th largest. It is drawn if all but the k largest arrive after it, which is certain if it is ``SETTLED``
    above the next. The others can still be farther apart than ``WIDEST``. Returns how many units remain, and how many
    of them to draw.
    """
    row, rest = finite[:count], 0
    if not 0 < k < count or highest(row) - lowest(row) <= WIDEST:
        return count, k
    t, above = cut(row, k, ANYWHERE, SUSPECT)
    next_one, last = neighbours(row, t) if above == k else (t, t)
    for j in range(count):
        if max(last - finite[j], finite[j] - next_one) < SETTLED:
            places[rest], finite[rest] = places[j], finite[j]
            rest += 1
        else:
            result[places[j]] = 1.0 if finite[j] >= last else 0.0
            k -= finite[j] >= last
    return rest, k


@inlined
def take_logarithm(product, values):
    for i in range(product.shape[0]):
        values[i] += log(product[i])
        product[i] = 1.0


@inlined
def _density(depth, curvature):
    """Nodes per unit of time with which the error of the rule is e^-depth.

    ``curvature`` is minus the second derivative of the logarithm of the integrand at its peak.
    """
    return math.hypot(depth / math.pi**2, math.sqrt(depth * (curvature + RATES) / 2) / math.pi)


@inlined
def _density_of_logistic(depth, n):
    r"""The same for a short row of logistic noise: its poles are at a height of pi.

    At a smaller height y, a factor F or 1 - F grows by at most 1 / cos(y / 2), so the error with steps h is at most
    :math:`2 \cos(y/2)^{-n} e^{-2 \pi y / h}`, here for y = 2.
    """
    return (depth + (n + RATES) * -math.log(math.cos(1.0))) / (4 * math.pi)


@functools.cache
def nodes_of(noise):
    """A function that writes the nodes of a row and their weights."""
    is_logistic = noise.is_logistic

    @per_row
    def nodes(n, low, high, curvature, depth, node, width):
        """The number of nodes for a row of n units, -1 if there is no room for so many."""
        density = _density(depth, curvature)
        if is_logistic:
            density = min(density, _density_of_logistic(depth, n))
        needed = (high - low) * density
        if not needed < node.shape[0] - 2 * BLOCK:
            return -1
        count = (int(needed) // BLOCK + 1) * BLOCK
        step = (high - low) / (count - 1)
        for i in range(count):
            node[i], width[i] = low + i * step, step
        return count

    return nodes


class Row(NamedTuple):
    """The units of a row."""

    weight: Array  # their positions as exponentials
    k: int


@per_row
def fill_weights(theta, origin, weight):
    for i in range(theta.shape[0]):
        weight[i] = exp(theta[i] - origin)


@functools.cache
def fill_range_of(find_range, nodes_of_row):
    """``(theta, k, depth, weight, room, when)``: writes the range of an integral, its nodes, and the weights.

    It returns the number of nodes, -1 if the row is left. ``when`` is described in :class:`.Integrals`.
    """

    @inlined
    def fill_range(theta, k, depth, weight, room, when):
        low, high = lowest(theta), highest(theta)
        if high - low > WIDEST:
            return -1
        n, middle, row = theta.shape[0], low + 0.5 * (high - low), Row(weight, k)
        fill_weights(theta, middle, weight)
        total = inverse = 0.0
        for i in range(n):
            total += weight[i]
            inverse += 1.0 / weight[i]
        deep = depth + 1.0  # one nat deeper than a probability needs: a gradient sums the tails of many units
        # Chernoff's bounds of P(N = k), as F <= x and 1 - F <= 1 / x
        begin, end = math.log(k / total) - 1.0 - deep / k, math.log(inverse / (n - k)) + 1.0 + deep / (n - k)
        first, last, curvature, peak = find_range(row, begin, end, deep)
        when[0], when[1], when[2], when[3] = first - peak, last - peak, curvature, middle - peak
        fill_weights(theta, when[3], weight)
        return nodes_of_row(n, when[0], when[1], curvature, depth, room.node, room.width)

    return fill_range
