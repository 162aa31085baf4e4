r"""A shift of log-odds with which about k of the units of a row are expected to be ones, in numba.

It consists of an anchor and an offset, :math:`z_i = (\theta_i - a) + b`: exact for units near it even if others are
far.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined, per_row, summed
from ..cpu.maths import EXP

FAR = 200.0  # e^-100 is negligible compared with 1
CLOSE_MEAN = 0.25  # largest distance of the expected number of ones from k; windows of a recursion need less than 1/2
NEWTON_STEPS = 200  # more than halving takes

_exp = EXP[np.float64]


@inlined
def tilted(theta, anchor, offset):
    return (theta - anchor) + offset  # must not be reordered


@summed
def _moments(theta, anchor, offset):
    """Expected number of ones and its variance."""
    mean = variance = 0.0
    for i in range(theta.shape[0]):
        e = _exp(-abs(tilted(theta[i], anchor, offset)))
        s = 1.0 / (1.0 + e)
        few = e * s
        mean += s if tilted(theta[i], anchor, offset) > 0 else few
        variance += few * s
    return mean, variance


@per_row
def _range(theta):
    """Smallest and largest finite logit, the numbers of finite and of infinite ones; and whether one is NaN."""
    low, high, finite, included, is_nan = np.inf, -np.inf, 0, 0, False
    for i in range(theta.shape[0]):
        x = theta[i]
        if x == np.inf:
            included += 1
        elif x > -np.inf:
            finite += 1
            low, high = min(low, x), max(high, x)
        elif x != -np.inf:
            is_nan = True
    return low, high, finite, included, is_nan


@per_row
def _guess(theta, low, high, odds):
    """Offset from the lowest finite logit as if the logits were normal variables, with its least and largest value."""
    total = squares = 0.0
    n = 0
    for i in range(theta.shape[0]):
        if abs(theta[i]) < np.inf:
            d = theta[i] - low
            total += d
            squares += d * d
            n += 1
    mean = total / n
    spread = max(squares / n - mean * mean, 0.0)
    return odds * math.sqrt(1.0 + math.pi / 8 * spread) - mean, odds - (high - low), odds


@per_row
def _neighbours(x, at):
    """The entries at a place >= 1 of x in increasing order and before it, by selection, which rearranges x.

    numba's own sort takes two seconds to compile.
    """
    low, high = 0, x.shape[0] - 1
    while low < high:
        pivot, i, j = x[(low + high) // 2], low, high
        while i <= j:
            while x[i] < pivot:
                i += 1
            while x[j] > pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i += 1
                j -= 1
        if at <= j:
            high = j
        elif at >= i:
            low = i
        else:
            break
    below = x[0]
    for i in range(at):
        below = max(below, x[i])
    return x[at], below


@per_row
def solve_tilt(theta, k):
    """Anchor and offset with ``sum sigmoid((theta - anchor) + offset)`` close to k; NaN if there are none."""
    n = theta.shape[0]
    low, high, finite, included, is_nan = _range(theta)
    left = k - included
    if is_nan or left < 0 or left > finite:
        return 0.0, np.nan
    if finite == 0:
        return 0.0, 0.0
    if left == 0:
        return high, -FAR
    if left == finite:
        return low, FAR
    if high - low <= FAR:
        anchor = low
        offset, least, most = _guess(theta, low, high, math.log(left / (finite - left)))
        offset = min(max(offset, least), most)
    else:
        # The anchor is the smallest of the k largest: at offset -log(n - k) fewer than k ones are expected, and at log
        # k beyond the gap to the next, more.
        anchor, below = _neighbours(theta.copy(), n - k)
        gap = anchor - below
        if gap > FAR:
            return anchor, min(gap / 2, 1e300)
        least, most = -math.log(finite - left), gap + math.log(left)
        offset = (least + most) / 2
    for _ in range(NEWTON_STEPS):
        mean, variance = _moments(theta, anchor, offset)
        excess = mean - k
        if abs(excess) <= CLOSE_MEAN:
            break
        if excess > 0:
            most = offset
        else:
            least = offset
        offset -= excess / variance
        if not least < offset < most:
            offset = (least + most) / 2
    return anchor, offset
