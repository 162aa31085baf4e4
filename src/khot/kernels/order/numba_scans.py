"""Sums over the items on the left and on the right of each item of a sorted row, as loops of numba.

The sums over the left are a recurrence in the decays between neighbours, and those over the right are one from the
other end. A product of many decays would accumulate rounding errors, so the recurrence restarts every ``STRETCH``
items, and everything before enters through one decay across the whole stretch.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any

import numpy as np

from ..cpu.loops import inlined, per_row, specialised
from ..cpu.maths import EXP, Real
from ..cpu.rows import doubles_at
from .sums import FAR

STRETCH = 128

Compiled = Any  # a function that numba has compiled


@functools.cache
def scans_for(kind: str, real: Real) -> tuple[Compiled, Compiled]:
    """Sums over the left, and over the right, of each item of a row, of a kind, a key of ``KINDS``.

    Both are functions ``(x, w, inverse, decay, out)``, for values of this dtype.
    """
    with specialised(real.__name__):
        fill_decays, decay_across = _decays_of(real)
    with specialised(f"{kind} {real.__name__}"):
        return _scans(fill_decays, decay_across, *KINDS[kind])


@inlined
def inverse_scale(address, one, r):
    """1 / scale for halves of items; the scale is an entry of an array, or one number if its address is 0."""
    return 2 / (one if address == 0 else doubles_at(address, 1, r + 1)[0, r])


@functools.cache
def _decays_of(real: Real) -> tuple[Compiled, Compiled]:
    exp = EXP[np.float64]

    @inlined
    def decay_across(near, far, inverse):
        return exp((0.5 * np.float64(near) - 0.5 * np.float64(far)) * inverse)  # differences of halves do not overflow

    @per_row
    def fill_decays(x, start, stop, inverse, decay):
        """The decays from the left neighbour of each item in [start, stop)."""
        near, far = x[start - 1 : stop - 1], x[start:stop]
        for i in range(far.shape[0]):
            decay[i] = decay_across(near[i], far[i], inverse)

    return fill_decays, decay_across


# The output of a scan: the value made of an item's weight and the sums of ones and of weights over one side of it, and
# how the values of the left and the right are joined.


@inlined
def _ones(ones, weights, weight):
    return ones


@inlined
def _with_own(ones, weights, weight):
    return weight + weights


@inlined
def _against(ones, weights, weight):
    return weight * ones - weights


@inlined
def _apart(left, right):
    return right


@inlined
def _added(left, right):
    return left + right


@inlined
def _halved(left, right):
    return 0.5 * (right - left)


KINDS = {
    "count": (_ones, _apart),
    "rank": (_ones, _halved),
    "pull": (_against, _added),
    "whole": (_with_own, _apart),  # may overwrite the weights
}


def _scans(fill_decays: Compiled, decay_across: Compiled, value: Compiled, join: Compiled) -> tuple[Compiled, Compiled]:
    @per_row
    def left(x, w, inverse, decay, out):
        n, ones_before, weights_before = x.shape[0], 1.0, np.float64(w[0])  # up to the item before the stretch
        out[0] = value(0.0, 0.0, w[0])
        for start in range(1, n, STRETCH):
            stop = min(start + STRETCH, n)
            fill_decays(x, start, stop, inverse, decay)
            across, ones, weights = 1.0, 0.0, 0.0  # of the items of the stretch up to here
            for i in range(start, stop):
                d, weight = decay[i - start], np.float64(w[i])
                across *= d
                ones *= d
                weights *= d
                out[i] = value(ones + across * ones_before, weights + across * weights_before, weight)
                ones += 1.0
                weights += weight
            across = decay_across(x[start - 1], x[stop - 1], inverse)
            ones_before = ones + across * ones_before
            weights_before = weights + across * weights_before

    @per_row
    def right(x, w, inverse, decay, out):
        stop = x.shape[0]
        ones_after, weights_after = 1.0, np.float64(w[stop - 1])
        out[stop - 1] = join(out[stop - 1], value(0.0, 0.0, w[stop - 1]))
        while stop > 1:
            start = max(stop - STRETCH, 1)
            fill_decays(x, start, stop, inverse, decay)
            across, ones, weights = 1.0, 0.0, 0.0
            for i in range(stop - 2, start - 2, -1):
                d, weight = decay[i + 1 - start], np.float64(w[i])
                across *= d
                ones *= d
                weights *= d
                new = value(ones + across * ones_after, weights + across * weights_after, weight)
                out[i] = join(out[i], new)
                ones += 1.0
                weights += weight
            across = decay_across(x[start - 1], x[stop - 1], inverse)
            ones_after = ones + across * ones_after
            weights_after = weights + across * weights_after
            stop = start

    return left, right


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
