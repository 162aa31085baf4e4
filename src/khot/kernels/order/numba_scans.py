r"""Sums that decay along a sorted row, as loops of numba.

Gap c of a row of n items is on the left of item c, and gap n on the right of the last one. With the decay
:math:`d_c = e^{-h_c}` across gap c, which is 0 for gaps 0 and n, the sums of weights w over the items on either side,

.. math:: a_{c+1} = w_c + d_c a_c, \qquad b_c = w_c + d_{c+1} b_{c+1},

are those of the neighbour on the left of a gap, itself included, and of the one on its right. Both recurrences run at
once, from the two ends, because each waits for its last product. A product of many decays would accumulate rounding
errors, so every ``STRETCH`` items they continue from one decay across the whole stretch.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, per_row, specialised
from ..cpu.maths import FLUSHED_EXP
from ..cpu.rows import doubles_at
from .sums import FAR

STRETCH = 128

Compiled = Any  # a function that numba has compiled

_exp = FLUSHED_EXP[np.float64]


class Sums(NamedTuple):
    """Room for one row: decays across its gaps, sums before and after them, and the weights 1 of its items."""

    decay: Any
    before: Any
    after: Any
    ones: Any


@per_row
def room_for_sums(n):
    return Sums(np.empty(n + 1), np.empty(n + 1), np.empty(n + 1), np.ones(n, np.int8))


@inlined
def scale_of(scale, r):
    """The scale of a row, from an address and a number: an entry of an array, or the number if the address is 0."""
    address, one = scale
    return one if address == 0 else doubles_at(address, 1, r + 1)[0, r]


@inlined
def inverse_scale(scale, r):
    """1 / scale for halves of items."""
    return 2 / scale_of(scale, r)


@inlined
def _decay_across(near, far, inverse):
    return _exp((0.5 * np.float64(near) - 0.5 * np.float64(far)) * inverse)  # differences of halves do not overflow


@per_row
def _find_decays(x, inverse, decay):
    """The decay across each of the n + 1 gaps."""
    n = x.shape[0]
    near, far, between = x[: n - 1], x[1:], decay[1:n]
    decay[0] = decay[n] = 0.0
    for i in range(between.shape[0]):
        between[i] = _decay_across(near[i], far[i], inverse)


@inlined
def _sum(old, decay, weight, total):
    return total


@inlined
def _pull(old, decay, weight, total):
    return decay * (weight * old - total)


def _scan_of(value: Compiled) -> Compiled:
    """A scan that writes ``value(old, decay, weight, total)``, where ``old`` is the number that it overwrites."""

    @per_row
    def scan_stretch(decay, back, w_before, w_back, a, b, before, after_back, across, across_back):
        own_a, own_b, all_a, all_b = 0.0, 0.0, a, b  # sums over the items of the stretch, and over those before it, too
        for i in range(decay.shape[0]):
            d, e, v, w = decay[i], back[i], np.float64(w_before[i]), np.float64(w_back[i])
            before[i], after_back[i] = value(before[i], d, v, all_a), value(after_back[i], e, w, all_b)
            own_a, own_b = v + d * own_a, w + e * own_b
            all_a, all_b = v + d * all_a, w + e * all_b
        return own_a + across * a, own_b + across_back * b

    @per_row
    def scan(x, inverse, decay, w_before, w_after, before, after):
        n, a, b = x.shape[0], 1.0, 1.0
        back, w_back, after_back, across, across_back = decay[::-1], w_after[::-1], after[::-1], 0.0, 0.0
        for start in range(0, n, STRETCH):
            here = slice(start, min(start + STRETCH, n))
            if start > 0:
                across = _decay_across(x[start - 1], x[here.stop - 1], inverse)
                across_back = _decay_across(x[n - here.stop], x[n - start], inverse)
            a, b = scan_stretch(
                decay[here], back[here], w_before[here], w_back[here],
                a, b, before[here], after_back[here], across, across_back,
            )  # fmt: skip
        before[n], after[0] = a, b

    return scan


# Functions (x, inverse, decay, w_before, w_after, before, after) of weights of the n items. ``sums_of`` writes the sums
# of ``w_before`` on the left and of ``w_after`` on the right of each of the n + 1 gaps; those beyond the ends, which no
# decay lets through, are 1. ``pulls_of`` replaces such sums of ones with the sums of e^-|z_i - z_j| (w_i - w_j) over
# the items j beyond the gap from item i. Weights may be in the place of the results, w_before[i] in that of before[i],
# and w_after[i] in that of after[i + 1].
with specialised("sums"):
    sums_of = _scan_of(_sum)
with specialised("pulls"):
    pulls_of = _scan_of(_pull)


@per_row
def sum_ones(x, inverse, sums):
    """The decays of a row, and the sums of ones."""
    decay, before, after, ones = sums
    _find_decays(x, inverse, decay)
    sums_of(x, inverse, decay, ones, ones, before, after)


@per_row
def stretch(x, inverse, flow):
    """-sum of z dL/dz, as a sum over the gaps, each times the flow across it; a very wide gap has no flow."""
    crossing = total = 0.0
    for i in range(1, x.shape[0]):
        crossing += flow[i - 1]
        gap = (0.5 * np.float64(x[i]) - 0.5 * np.float64(x[i - 1])) * inverse
        if gap < FAR:
            total += gap * crossing
    return total
