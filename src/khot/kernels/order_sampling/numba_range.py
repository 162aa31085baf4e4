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

from ..cpu.loops import inlined, per_row, summed
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
TRIALS = 60  # most steps of a search, which takes 3 to 12
LONGEST, FARTHEST = 2.0, 8.0  # longest steps of positions and times
ACCURACY, RESOLUTION = 1e-3, 1e-20  # of a position, and rounding of a squared mean
TINY = 1e-300
TAILS = 1.0  # so much deeper than for a probability are ranges, as a gradient sums the tails of many units


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
def density_of(depth, curvature):
    """Nodes per unit of time with which the error of the rule is e^-depth.

    ``curvature`` is minus the second derivative of the logarithm of the integrand at its peak.
    """
    return math.hypot(depth / math.pi**2, math.sqrt(depth * (curvature + RATES) / 2) / math.pi)


@per_row
def density_of_logistic(k, rest, depth):
    r"""The same for logistic noise, where k units arrive and others do not.

    If all positions are equal, which needs the most nodes, the error is the absolute value of :math:`\Gamma(k +
    i\omega) \Gamma(n - k + i\omega)`, divided by that at :math:`\omega = 0`, for :math:`\omega = 2 \pi / \text{step}`.
    With the rates of arrival and their derivatives, k and n - k are larger by 2. Logarithms are those of Stirling.
    """
    a, b, omega = k + 2.0, rest + 2.0, math.sqrt(2.0 * depth * k * rest / (k + rest))
    for _ in range(TRIALS):
        angles, log_error = math.atan(omega / a) + math.atan(omega / b), 0.0
        for c in (a, b):
            log_error -= (c - 0.5) * 0.5 * math.log(1.0 + (omega / c) ** 2)
        step = (depth + 1.0 - log_error - omega * angles) / angles
        omega += step
        if abs(step) < 0.1:
            break
    return omega / (2 * math.pi)


@per_row
def fill_nodes(low, high, density, node, width):
    """Writes the nodes of a row and their weights; their number, -1 if there is no room for so many."""
    needed = (high - low) * density
    if not needed < node.shape[0] - 2 * BLOCK:
        return -1
    count = (int(needed) // BLOCK + 1) * BLOCK
    step = (high - low) / (count - 1)
    for i in range(count):
        node[i], width[i] = low + i * step, step
    return count


class Row(NamedTuple):
    """The units of a row."""

    weight: Array  # their positions as exponentials
    k: int


@per_row
def fill_weights(theta, origin, weight):
    for i in range(theta.shape[0]):
        weight[i] = exp(theta[i] - origin)


class _Tilted(NamedTuple):
    """Sums over the units at a time, for the law of N weighted by z^N."""

    mean: float
    rest: float  # the mean of n - N
    variance: float
    log_sum: float  # log E z^N
    slope: float  # its derivative in the time
    rate: float  # the sum of the f


@functools.cache
def tilted_of(law):

    @summed
    def tilted(weight, up, z):
        mean = rest = variance = log_sum = slope = rate = 0.0
        for i in range(weight.shape[0]):
            at = law(weight[i] * up)
            both = at.missing + at.came * z
            came, missing = at.came * z / both, at.missing / both
            mean += came
            rest += missing
            variance += came * missing
            log_sum += log(both)
            slope += at.rate * (z - 1.0) / both
            rate += at.rate
        return _Tilted(mean, rest, variance, log_sum, slope, rate)

    return tilted


@functools.cache
def search_for_peak(tilted):
    """The search for a time, between two others, at which about k units are expected to have arrived."""

    @per_row
    def find_peak(row, first, last):
        n, peak = row.weight.shape[0], 0.5 * (first + last)
        for _ in range(TRIALS):
            at = tilted(row.weight, math.exp(peak), 1.0)
            if _is_near(at, row.k):
                break
            first, last = (peak, last) if at.mean < row.k else (first, peak)
            step = _excess(at, n, row.k) / (n * max(at.rate, TINY))
            peak -= min(max(step, -FARTHEST), FARTHEST)
            if not first < peak < last:
                peak = 0.5 * (first + last)
        return peak

    return find_peak


def range_by_chernoff(law):
    """The search for the range of the integral, which ends where Chernoff's bound of P(N = k) is e^-depth.

    The bound is :math:`z^{-k} E z^N` for any z > 0, and least if the mean of the weighted law is k. A z is given by the
    position of a unit that has even chances under these weights, for that changes little from one time to another.
    """
    tilted = tilted_of(law)
    find_peak = search_for_peak(tilted)

    @per_row
    def bound(row, time, even):
        """The logarithm of the bound, its derivative in the time, and the position of a unit with even chances."""
        n, k, lowest, highest = row.weight.shape[0], row.k, -ROOM - time, math.log(ROOM) - time
        even = min(max(even, lowest), highest)
        for _ in range(TRIALS):
            unit = law(math.exp(time + even))
            z = unit.missing / unit.came
            at = tilted(row.weight, math.exp(time), z)
            if _is_near(at, k) or highest - lowest < ACCURACY:
                break
            lowest, highest = (even, highest) if at.mean > k else (lowest, even)
            step = _excess(at, n, k) / (n * at.variance) * (unit.came * unit.missing / unit.rate)
            even += min(max(step, -LONGEST), LONGEST)
            if not lowest < even < highest:
                even = 0.5 * (lowest + highest)
        return at.log_sum - k * math.log(z), at.slope, even

    @per_row
    def end(row, inside, outside, time, depth):
        """The time between two others, starting from a third, where the bound is less than e^-depth by a factor e."""
        even, is_last = -inside, outside > inside
        for _ in range(TRIALS):
            value, slope, even = bound(row, time, even)
            inside, outside = (time, outside) if value > -depth else (inside, time)
            if 0 <= -depth - value < 1:
                break
            step = (-depth - 0.5 - value) / slope
            time += math.log(max(1.0 + step, 0.1)) if is_last else step  # in the end, the bound is linear in e^time
            if not (inside - time) * (time - outside) > 0:
                time = 0.5 * (inside + outside)
        return outside

    @per_row
    def find_range(row, low, high, depth):
        peak, deep = find_peak(row, low, high), depth + TAILS
        before = 0.3 + 0.9 * deep / row.k  # where k units of one position are too few
        low, high = end(row, peak, low, peak - before, deep), end(row, peak, high, peak + 1.0, deep)
        curvature = 0.0  # of normal densities with the moments of N, at the peak and half-way to the ends
        for time in (0.5 * (low + peak), peak, 0.5 * (peak + high)):
            at = tilted(row.weight, math.exp(time), 1.0)
            curvature = max(curvature, at.rate * at.rate / max(at.variance, TINY))
        return low, high, density_of(depth, curvature), peak

    return find_range


@inlined
def _excess(at, n, k):
    """Newton's step for the logarithm of mean / rest, which is nearly linear in log-odds, times a derivative."""
    return (math.log(at.mean / k + TINY) - math.log(at.rest / (n - k) + TINY)) * at.mean * at.rest


@inlined
def _is_near(at, k):
    """Whether a mean is so near k that the bound is off by less than 0.05, and the peak by 0.3 deviations."""
    return (at.mean - k) ** 2 <= 0.1 * at.variance + RESOLUTION


@functools.cache
def fill_range_of(find_range):
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
        deep = depth + TAILS
        # Chernoff's bounds of P(N = k), as F <= x and 1 - F <= 1 / x
        begin, end = math.log(k / total) - 1.0 - deep / k, math.log(inverse / (n - k)) + 1.0 + deep / (n - k)
        first, last, density, peak = find_range(row, begin, end, depth)
        when[0], when[1], when[2], when[3] = first - peak, last - peak, density, middle - peak
        fill_weights(theta, when[3], weight)
        return fill_nodes(when[0], when[1], density, room.node, room.width)

    return fill_range
