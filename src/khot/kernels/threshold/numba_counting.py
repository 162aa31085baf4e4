"""Locates a threshold by counting the items above some numbers, in a tenth of the time of a sum of F.

With more than k items above u, the threshold t is not far below u, or the sum of F would exceed k. With fewer than k, t
is not far above u, or the sum would be less than k. The search of :mod:`.numba_root` begins between two such numbers,
which enclose fewer and fewer items. If exactly k items are above u, t lies in the gap around u: see
:mod:`.numba_gaps`.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math

import numpy as np

from ..cpu.loops import per_row, specialised, summed
from ..cpu.maths import Real
from ..cpu.rows import highest, lowest
from ..links.base_numba import Compiled
from ..selection.numba_counting import count_above, neighbours

PASSES = 64  # 2 to 10 are usual, and 20 if some numbers are many orders of magnitude larger than the others
UNBOUNDED = 3  # passes after which both ends of the bracket are finite
SMALL = 0.15  # softness, in deviations of the items, below which counting comes first
FOCUSED = 1 / 16  # share of the variance that remains without distant items
STEEP = 4.0  # ratio of the ends of a bracket above which its middle is that of their logarithms


@per_row
def place_of(x, value):
    """The index of the first item that is equal to the value."""
    for i in range(x.shape[0]):
        if x[i] == value:
            return i
    return 0


@per_row
def _middle(low, high):
    """A number between two others; in the logarithm, if they differ by much."""
    if low < 0 < high:
        return 0.0
    near, far = min(abs(low), abs(high)), max(abs(low), abs(high))
    if far < STEEP * near:
        return 0.5 * low + 0.5 * high
    return math.copysign(math.sqrt(near) * math.sqrt(far) if near > 0 else far / 1024, low + high)


@summed
def _sums_between(x, low, high):
    total = squares = 0.0
    for i in range(x.shape[0]):
        v = np.float64(x[i]) if (x[i] > low) & (x[i] <= high) else 0.0
        total += v
        squares += v * v
    return total, squares


@per_row
def focus(x, k, s, mean, variance):
    """Mean, variance and number of the items around t, and the number of those above them.

    These are all items, unless some distant ones, such as masks at -1e9, make up most of the variance: those carry no
    information about t.
    """
    infinity = x.dtype.type(np.inf)
    low, high, above, count = -infinity, infinity, 0.0, float(x.shape[0])
    while s * s < SMALL * SMALL * variance < np.inf:
        cut = x.dtype.type(mean)
        higher = float(count_above(x, cut))
        if higher > k:
            low, most, least = cut, higher - above, above
        else:
            high, most, least = cut, above + count - higher, higher
        total, squares = _sums_between(x, low, high)
        centre = total / most
        rest = max(squares / most - centre * centre, 0.0)
        if not (least < k < least + most and rest < FOCUSED * variance):
            break
        mean, variance, above, count = centre, rest, least, most
    return mean, variance, above, count


@functools.cache
def encloser(name: str, scale_at: Compiled, real: Real) -> Compiled:
    """``(x, k, u, step, s, q)``: low and high, the numbers of items above them, and whether they enclose a gap.

    t is at most a little below low, and at most a little above high: at least ``above_low > k`` items are low or above
    it, and at most ``above_high < k`` are above high. The search starts at u, where the expected distance of
    neighbouring items is ``step``. The scale of this name is a function ``(t, s, q)``.
    """
    with specialised(f"{name} {real.__name__}"):

        @per_row
        def enclose(x, k, u, step, s, q):
            low, high, above_low, above_high = -np.inf, np.inf, float(x.shape[0]), 0.0
            for i in range(PASSES):
                cut = real(u)
                above = float(count_above(x, cut))
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
                if not (math.isfinite(low) and math.isfinite(high)):
                    if i < UNBOUNDED and math.isfinite(step):
                        u += math.copysign(step * (1 + abs(missing)), -missing)
                        step *= 2
                        continue
                    low, high = max(low, np.float64(lowest(x))), min(high, np.float64(highest(x)))
                if high - low <= scale_at(max(low, 0.0), s, q):
                    break
                if not stays and i % 3 < 2:
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
