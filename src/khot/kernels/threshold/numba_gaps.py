"""Gaps around a threshold that are many scales wide, in numba: :mod:`khot.kernels.threshold.gaps` has the formulas."""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import per_row, summed
from ..cpu.maths import FLUSHED_EXP
from ..links.base_numba import Compiled, NumbaLink
from ..selection.numba_counting import neighbours

HARD = 1e200  # an inverse softness with which only items that are tied with the nearest one count

exp = FLUSHED_EXP[np.float64]


@summed
def sides(x, left, right, inverse, inverse_above, slopes):
    """Sums of exp(-b) below and above a gap, and of b exp(-b), with the distances b from its ends in scales.

    Infinite items do not count. Each exp(-b) is written to ``slopes``, if that is not empty.
    """
    below = above = lever_below = lever_above = 0.0
    for i in range(x.shape[0]):
        item = np.float64(x[i])
        is_above = item >= right
        b = (item - right) * inverse_above if is_above else (left - item) * inverse
        there = (b >= 0) & (b < np.inf)
        b = b if there else 0.0
        slope = exp(-b) if there else 0.0
        below += 0.0 if is_above else slope
        above += slope if is_above else 0.0
        lever_below += 0.0 if is_above else b * slope
        lever_above += b * slope if is_above else 0.0
        if slopes.shape[0] > 0:
            slopes[i] = slope
    return below, above, lever_below, lever_above


def gap_shares_of(link: NumbaLink) -> Compiled:
    """``(x, place, shares)``: the mean z, and whether t is in a gap, in which all slopes underflow; writes the shares.

    At k = 0 and k = n the gap has one side. The t of a capped exponential is held only by the nearest item above.
    """
    compact = link.of.compact

    @per_row
    def gap_shares(x, place, shares):
        inverse, t, mean = 1 / place.s, place.anchor + place.offset * place.s, 0.0
        cut = x.dtype.type(t)
        if cut > t or (compact and cut == t):
            cut = np.nextafter(cut, x.dtype.type(-np.inf))
        left, right = neighbours(x, cut)
        low, high = np.float64(left), np.float64(right)
        to_low, to_high = (place.anchor - low) * inverse + place.offset, (high - place.anchor) * inverse - place.offset
        below, above, lever_below, lever_above = sides(x, low, high, inverse, HARD if compact else inverse, shares)
        found = (below == 0 or 0 <= to_low < np.inf) and (above == 0 or 0 <= to_high < np.inf)
        of_low = 0.0 if below == 0 or (compact and above > 0) else 1 / below
        of_high = 0.0 if above == 0 or (compact and below == 0) else 1 / above
        if of_low > 0 and of_high > 0:
            of_low, of_high = 0.5 * of_low, 0.5 * of_high
            mean = 0.5 * math.log(above / below) + of_high * lever_above - of_low * lever_below
        elif of_high > 0:
            mean = to_high + of_high * lever_above
        elif of_low > 0:
            mean = -to_low - of_low * lever_below
        for i in range(shares.shape[0]):
            shares[i] *= x.dtype.type(of_high if x[i] > cut else of_low)
        return mean, found

    return gap_shares
