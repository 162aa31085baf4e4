"""Gaps around a threshold, between the neighbouring items on its left and on its right, in numba.

If k items are above a gap that is wide compared with the softness, t is known without a search:

* for a clipped power, it lies anywhere between the kinks, where all items are zero or capped;
* for a capped exponential, at the item on the right, which is just capped;
* for a smooth link, where the tails of the items on the two sides balance.

Tails and slopes may all underflow there. Relative to the slope of the nearest item on their side, a
:class:`khot.kernels.links.base_numba.FarTail`, they do not, and the weights of the two sides follow from equal sums of
tails. So the shares of the slopes, from which derivatives are computed, stay exact in any gap.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined, per_row, summed
from ..cpu.maths import FLUSHED_EXP, Real
from ..links.base_numba import Compiled, FarTail, NumbaLink
from ..selection.numba_counting import count_above, neighbours
from .numba_counting import place_of
from .numba_scale import Scale

NEGLIGIBLE = -60.0  # log of a slope that is negligible beside any other, but whose float32 is not yet subnormal
EXPONENTIAL_GAP = 80.0  # scales of a gap around t beyond which a capped exponential vanishes
BALANCING_STEPS = 30  # 1 to 4 are usual
FARTHEST = 1e100  # in scales; its powers are finite
HARD = 1e200  # an inverse softness with which only items that are tied with the nearest one have a slope


def gap_closer(scale: Scale, link: NumbaLink, real: Real) -> Compiled:
    """``(x, k, s, q, left, right)``: whether t is known in this gap, with k items above it; anchor and offset."""
    scale_at, grows = scale.at, scale.grows

    @per_row
    def of_power(x, k, s, q, left, right):
        room = (right - left) / scale_at(left, s, q) - 1
        if grows:  # at the largest zero, which rounding cannot bring back
            return left > 0 and room >= 0, left, 0.0
        return room >= 0, left, min(0.5 * room, 1.0)

    @inlined
    def of_exponential(x, k, s, q, left, right):
        return right - left > EXPONENTIAL_GAP * s, right, 0.0

    if link.of.compact:
        return of_power if link.of.reaches_zero else of_exponential
    return _balancer(link.far, real)


def _sides_of(far: FarTail, real: Real) -> Compiled:
    """``(x, k, sign, edge, a, inverse, slopes)``: sums of slopes and tails on a side of a gap with k items above it.

    They are relative to the slope of the item at the edge, at distance a from t; the others lie beyond it, in the
    direction of the sign. The slopes are written, if wanted. Usually no other item is near.
    """
    log_decay, mills, reach, exp = far.log_decay, far.mills, far.reach, FLUSHED_EXP[np.float64]

    @summed
    def of_all(x, sign, edge, a, inverse, slopes):
        total = tails = 0.0
        for i in range(x.shape[0]):
            beyond = sign * (np.float64(x[i]) - edge) * inverse
            there = (beyond >= 0) & (beyond < np.inf)
            beyond = beyond if there else 0.0
            decay = log_decay(a, beyond)
            slope = exp(decay) if there & (decay > NEGLIGIBLE) else 0.0
            total += slope
            tails += slope * mills(a + beyond)
            if slopes.shape[0] > 0:
                slopes[i] = slope if there else slopes[i]
        return total, tails

    @per_row
    def side(x, k, sign, edge, a, inverse, slopes):
        nearer = count_above(x, real(edge + sign * reach / inverse))
        if (nearer >= k - 1 and sign > 0) or (nearer <= k + 1 and sign < 0):
            if slopes.shape[0] > 0:
                slopes[place_of(x, real(edge))] = 1
            return 1.0, mills(a)
        return of_all(x, sign, edge, a, inverse, slopes)

    return side


def _balancer(far: FarTail, real: Real) -> Compiled:
    """:func:`gap_closer` for a smooth link."""
    side, log_decay, width, is_exponential = _sides_of(far, real), far.log_decay, far.gap, far.is_exponential

    @per_row
    def balance(x, k, s, q, left, right):
        if right - left < width * s:
            return False, 0.0, 0.0
        inverse, anchor = 1 / s, np.float64(real(0.5 * left + 0.5 * right))
        to_left, to_right = (anchor - left) * inverse, (right - anchor) * inverse
        offset = 0.5 * (to_right - to_left)
        for _ in range(BALANCING_STEPS):
            below, above = to_left + offset, to_right - offset
            slopes_below, tails_below = side(x, k, -1.0, left, below, inverse, x[:0])
            slopes_above, tails_above = side(x, k, 1.0, right, above, inverse, x[:0])
            # log A - log B of the tails below and above, which falls with t by the sum of their hazards.
            balance = log_decay(above, below - above) + math.log(tails_below / tails_above)
            move = balance / (slopes_below / tails_below + slopes_above / tails_above)
            offset += move
            if is_exponential or move * move <= 1e-16 * (below + above):
                return below + above < FARTHEST, anchor, offset
        return False, 0.0, 0.0

    return balance


def far_shares_of(link: NumbaLink, real: Real) -> Compiled:
    """``(x, place, shares)``: writes the shares of the slopes around a gap; returns whether it is one.

    At k = 0 and k = n the gap has one side. The t of a capped exponential is held only by the nearest item above.
    """
    side, compact = _sides_of(link.far, real), link.of.compact

    @per_row
    def far_shares(x, place, shares):
        anchor, offset, s, _ = place
        inverse, t = 1 / s, anchor + offset * s
        cut = real(t)
        if cut > t or (compact and cut == t):
            cut = np.nextafter(cut, real(-np.inf))
        k, (left, right) = count_above(x, cut), neighbours(x, cut)
        below, above = (anchor - left) * inverse + offset, (right - anchor) * inverse - offset
        of_left, of_right, tails_left, tails_right = 0.0, 0.0, 1.0, 1.0
        for i in range(shares.shape[0]):
            shares[i] = 0
        if left == -np.inf and (compact or right == np.inf):
            return True  # nothing holds the threshold: there are no items, or for a compact link none below
        if left > -np.inf and not (compact and right < np.inf):
            of_left, tails_left = side(x, k, -1.0, np.float64(left), below, inverse, shares)
        if right < np.inf:
            of_right, tails_right = side(x, k, 1.0, np.float64(right), above, HARD if compact else inverse, shares)
        whole = of_left / tails_left + of_right / tails_right
        on_left, on_right = real(1 / (whole * tails_left)), real(1 / (whole * tails_right))
        for i in range(shares.shape[0]):
            shares[i] *= on_right if x[i] > cut else on_left
        return (left == -np.inf or 0 <= below < FARTHEST) and (right == np.inf or 0 <= above < FARTHEST)

    return far_shares
