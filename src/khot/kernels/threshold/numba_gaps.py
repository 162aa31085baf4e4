"""Gaps around a threshold, between the neighbouring items on its left and on its right, in numba.

With k items above a gap that is wide beside the softness, t is known without a search:

* that of a clipped power lies anywhere between the kinks, where all items are zero or capped;
* that of a capped exponential at the item on the right, which is just capped;
* that of a smooth link where the tails of the items on the two sides balance.

Tails and slopes may all underflow there. Relative to the slope of the nearest item on their side, a
:class:`khot.kernels.links.base_numba.FarTail`, they do not; and the two sides weigh as equal sums of tails require. So
the shares of the slopes, of which derivatives are made, stay exact in any gap.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math

import numpy as np

from ..links.base_numba import Compiled, FarTail
from ..numba_math import Real
from ..numba_tools import per_row, specialised
from .numba_counting import counter, neighbours_of, place_of

NEGLIGIBLE = -60.0  # log of a slope that shows beside no other
BALANCING_STEPS = 30  # usual are 1 to 4
FARTHEST = 1e100  # in scales, whose powers are finite
HARD = 1e200  # an inverse of the softness with which only items that are tied with the nearest have a slope


@functools.cache
def _side_of(far: FarTail, name: str, real: Real) -> Compiled:
    """``(x, edge, sign, a, inverse, is_alone, slopes)``: sums of slopes and tails on a side of a gap; slopes if wanted.

    They are relative to the slope of the item at the edge, which is at the distance a from t; the others lie beyond it,
    in the direction of the sign. Usually none is near, and nothing is to be summed.
    """
    log_decay, log_hazard, one = far.log_decay, far.log_hazard, real(1)
    with specialised(f"{name} {real.__name__}"):

        @per_row
        def side(x, edge, sign, a, inverse, is_alone, slopes):
            if is_alone:
                if slopes.shape[0] > 0:
                    slopes[place_of(x, edge)] = one
                return 1.0, math.exp(-log_hazard(a))
            total = tails = 0.0
            for i in range(x.shape[0]):
                beyond = sign * (np.float64(x[i]) - edge)
                if 0 <= beyond < np.inf:
                    decay = log_decay(a, beyond * inverse)
                    if decay > NEGLIGIBLE:
                        slope = math.exp(decay)
                        total += slope
                        tails += slope * math.exp(-log_hazard(a + beyond * inverse))
                        if slopes.shape[0] > 0:
                            slopes[i] = slope
            return total, tails

    return side


def balancer(far: FarTail, name: str, real: Real) -> Compiled:
    """``(x, k, s, left, right)``: anchor and offset in a wide gap of a smooth link, and whether they were found."""
    side, count_above, is_exponential = _side_of(far, name, real), counter(real), far.is_exponential
    log_decay, reach = far.log_decay, far.reach

    @per_row
    def balance(x, k, s, left, right):
        inverse = 1 / s
        left_alone = count_above(x, real(left - reach * s)) <= k + 1
        right_alone = count_above(x, real(right + reach * s)) >= k - 1
        anchor = np.float64(real(0.5 * left + 0.5 * right))
        to_left, to_right = (anchor - left) * inverse, (right - anchor) * inverse
        offset = 0.5 * (to_right - to_left)
        for _ in range(BALANCING_STEPS):
            below, above = to_left + offset, to_right - offset
            slopes_below, tails_below = side(x, left, -1.0, below, inverse, left_alone, x[:0])
            slopes_above, tails_above = side(x, right, 1.0, above, inverse, right_alone, x[:0])
            # log A - log B of the tails below and above; its derivative are their hazards.
            balance = log_decay(above, below - above) + math.log(tails_below / tails_above)
            move = balance / (slopes_below / tails_below + slopes_above / tails_above)
            offset += move
            if is_exponential or move * move <= 1e-16 * (below + above):
                return anchor, offset, below + above < FARTHEST
        return anchor, offset, False

    return balance


def far_shares_of(far: FarTail, compact: bool, name: str, real: Real) -> Compiled:
    """``(x, anchor, offset, s, shares)``: fills in the shares of the slopes around a gap; whether it is one.

    At k = 0 and k = n the gap has one side. The t of a capped exponential is held by the nearest item above alone.
    """
    side, neighbours, count_above = _side_of(far, name, real), neighbours_of(real), counter(real)
    reach, reach_below, zero = 0.0 if compact else far.reach, far.reach, real(0)

    @per_row
    def far_shares(x, anchor, offset, s, shares):
        inverse, t = 1 / s, anchor + offset * s
        cut = real(t)
        if cut > t or (compact and cut == t):
            cut = np.nextafter(cut, real(-np.inf))
        left, right = neighbours(x, cut)
        below, above = (anchor - left) * inverse + offset, (right - anchor) * inverse - offset
        for i in range(shares.shape[0]):
            shares[i] = zero
        if compact and left == -np.inf:
            return True  # without items below nothing holds the threshold
        of_left, of_right, tails_left, tails_right, k = 0.0, 0.0, 1.0, 1.0, count_above(x, cut)
        if left > -np.inf and not (compact and right < np.inf):
            is_alone = count_above(x, real(left - reach_below * s)) <= k + 1
            of_left, tails_left = side(x, np.float64(left), -1.0, below, inverse, is_alone, shares)
        if right < np.inf:
            is_alone = count_above(x, real(right + reach * s)) >= k - 1
            of_right, tails_right = side(
                x, np.float64(right), 1.0, above, HARD if compact else inverse, is_alone, shares
            )
        whole = of_left / tails_left + of_right / tails_right
        for i in range(shares.shape[0]):
            shares[i] *= real(1 / (whole * (tails_right if x[i] > cut else tails_left)))
        return (left == -np.inf or 0 <= below < FARTHEST) and (right == np.inf or 0 <= above < FARTHEST)

    return far_shares
