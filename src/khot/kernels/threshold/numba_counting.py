"""Where a threshold has to lie, by counting the items above some number: a tenth of the time that a sum of F takes.

With more than k items above u, the threshold t is not far above u, since each of them has F >= F(0) there; with fewer
than k, it is not far below. Between two such numbers with fewer and fewer items between them the search of
:mod:`.numba_root` begins. Where exactly k items are above u, t lies in the gap around u: see :mod:`.numba_gaps`.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math

import numpy as np

from ..links.base_numba import Compiled
from ..numba_math import Real
from ..numba_rows import highest, lowest, minimum
from ..numba_tools import per_row, specialised, summed

PASSES = 64  # usual are 2 to 10, and 20 beside numbers that are many orders larger than the others
UNBOUNDED = 3  # passes after which both ends of the bracket are finite
FEW = 2**20  # items that are counted at a time in float32, which is exact and fastest
STEEP = 4.0  # ratio of the ends of a bracket from which its middle is that of their logarithms


@functools.cache
def counter(real: Real) -> Compiled:
    """``(x, u)``: how many items are above u, a float64."""
    zero, one = real(0), real(1)
    with specialised(real.__name__):

        @summed
        def of_few(x, u):
            above = zero
            for i in range(x.shape[0]):
                above += one if x[i] > u else zero
            return above

        @per_row
        def count_above(x, u):
            above = 0.0
            for i in range(0, x.shape[0], FEW):
                above += of_few(x[i : i + FEW], u)
            return above

    return count_above


@functools.cache
def neighbours_of(real: Real) -> Compiled:
    """``(x, u)``: the largest item that is not above u and the smallest that is, or infinite."""
    nothing = real(np.inf)
    with specialised(real.__name__):

        @summed
        def neighbours(x, u):
            left = right = nothing
            for i in range(x.shape[0]):
                v = x[i]
                above = v > u
                right = minimum(right, v if above else nothing)
                left = minimum(left, nothing if above else -v)
            return -left, right

    return neighbours


@per_row
def place_of(x, value):
    """Of the first item that is equal to the value."""
    for i in range(x.shape[0]):
        if x[i] == value:
            return i
    return 0


@per_row
def _middle(low, high):
    """A number between two: in the logarithm, where they differ by much."""
    if low < 0 < high:
        return 0.0
    near, far = min(abs(low), abs(high)), max(abs(low), abs(high))
    if far < STEEP * near:
        return 0.5 * low + 0.5 * high
    return math.copysign(math.sqrt(near) * math.sqrt(far) if near > 0 else far / 1024, low + high)


@functools.cache
def encloser(scale_at: Compiled, real: Real, name: str) -> Compiled:
    """``(x, k, u, step, s, q)``: low and high, numbers of items that are at least and at most above them, in a gap.

    t is a little above low, if at all, and a little below high: at least ``above_low > k`` items are low or above it,
    at most ``above_high < k`` above high. The search starts at u; k / n of the items are expected to be ``step`` apart.
    """
    count_above, neighbours = counter(real), neighbours_of(real)
    with specialised(name):

        @per_row
        def enclose(x, k, u, step, s, q):
            n = x.shape[0]
            low, high, above_low, above_high = -np.inf, np.inf, float(n), 0.0
            for i in range(PASSES):
                cut = real(u)
                above = count_above(x, cut)
                missing = k - above
                if abs(missing) < 1:
                    left, right = neighbours(x, cut)
                    if missing == 0:
                        return np.float64(left), np.float64(right), k + 1, k - 1, True
                    item = np.float64(right if missing < 0 else left)
                    return item, item, math.ceil(k), math.floor(k), False
                stays = above == (above_low if missing < 0 else above_high)
                if missing < 0:
                    low, above_low = np.float64(cut), above
                else:
                    high, above_high = np.float64(cut), above
                bounded = math.isfinite(low) and math.isfinite(high)
                if not bounded and (i >= UNBOUNDED or not math.isfinite(step)):
                    low, high, bounded = max(low, np.float64(lowest(x))), min(high, np.float64(highest(x))), True
                if not bounded:
                    u += math.copysign(step * (1 + abs(missing)), -missing)
                    step *= 2
                elif high - low <= scale_at(max(low, 0.0), s, q):
                    break
                elif not stays and i % 3 < 2:
                    u = low + (high - low) * (above_low - k) / (above_low - above_high)
                else:
                    u = _middle(low, high)
                if not low < real(u) < high:
                    u = 0.5 * low + 0.5 * high
                    if not low < real(u) < high:  # equal items
                        _, right = neighbours(x, real(low))
                        item = np.float64(right if right <= high else low)
                        return item, item, above_low, above_high, False
            return low, high, above_low, above_high, False

    return enclose
