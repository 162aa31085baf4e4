"""The loops of the order maps, compiled for one dtype.

Sums over the items on the left of each are a recurrence in the decays between neighbours, those over the right one
from the other end. A product of many decays would add up their roundings, so the recurrence starts anew every
``STRETCH`` items, and what lies before comes in through one decay across the whole stretch.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..numba_math import EXP, Real
from ..numba_rows import REALS_AT, doubles_at, longs_at
from ..numba_tools import inlined, kernel, per_row, specialised
from .torch_sums import FAR

STRETCH = 128

Compiled = Any  # a function that numba has compiled


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.numba_tools.kernel`.

    All take the addresses of sorted rows and, but for ``sort``, of the places that they came from; that of the scales,
    or 0 and one scale; then of the result, or of dL/d result, dL/dx and dL/dscale, 0 if that is not wanted.
    """

    rank: Compiled
    rank_derivative: Compiled
    sort: Compiled
    sort_derivative: Compiled


class Scans(NamedTuple):
    """``(x, w, inverse, decay, out)``: sums over the left, or over the right, of each item of a row, in ``out``."""

    left: Compiled
    right: Compiled


@functools.cache
def loops_of(real: Real) -> Loops:
    """The loops for values of this dtype."""
    with specialised(real.__name__):
        fill_decays, decay_across = _decays(real)
    scans = {}
    for name, (value, join) in _KINDS.items():
        with specialised(f"{name} {real.__name__}"):
            scans[name] = _scans(fill_decays, decay_across, value, join)
    with specialised(real.__name__):
        return Loops(
            kernel(_rank(scans["rank"], real)),
            kernel(_rank_derivative(scans["pull"], real)),
            kernel(_sort(scans["count"], real)),
            kernel(_sort_derivative(scans["count"], scans["whole"], real)),
        )


@inlined
def inverse_scale(address, one, r):
    """Of halves of the items of a row; the scale is that of an array, or where that has no address, one for all."""
    return 2 / (one if address == 0 else doubles_at(address, 1, r + 1)[0, r])


def _decays(real: Real) -> tuple[Compiled, Compiled]:
    exp = EXP[np.float64]

    @inlined
    def decay_across(near, far, inverse):
        return exp((0.5 * np.float64(near) - 0.5 * np.float64(far)) * inverse)  # differences of halves do not overflow

    @per_row
    def fill_decays(x, start, stop, inverse, decay):
        """From the item on the left of each of [start, stop)."""
        near, far = x[start - 1 : stop - 1], x[start:stop]
        for i in range(far.shape[0]):
            decay[i] = decay_across(near[i], far[i], inverse)

    return fill_decays, decay_across


# What a scan writes down: the value made of an item's weight and the sums of ones and of weights over one side of it,
# and how that of the left and that of the right are joined.


@inlined
def _ones(ones, weights, weight):
    return ones


@inlined
def _with_own(ones, weights, weight):
    return weight + weights


@inlined
def _pull(ones, weights, weight):
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


_KINDS = {
    "count": (_ones, _apart),
    "rank": (_ones, _halved),
    "pull": (_pull, _added),
    "whole": (_with_own, _apart),  # may overwrite the weights
}


def _scans(fill_decays: Compiled, decay_across: Compiled, value: Compiled, join: Compiled) -> Scans:
    @per_row
    def left(x, w, inverse, decay, out):
        n, ones_before, weights_before = x.shape[0], 1.0, np.float64(w[0])  # of the item before the stretch, with it
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

    return Scans(left, right)


# ---- Ranks


def _rank(scans: Scans, real: Real) -> Any:
    left, right, reals_at = scans.left, scans.right, REALS_AT[real]

    def rank(first, last, n, values, order, scale, one_scale, result):
        xs, places, ys = reals_at(values, last, n), longs_at(order, last, n), reals_at(result, last, n)
        decay, excess = np.empty(STRETCH), np.empty(n)
        for r in range(first, last):
            x, place, y, inverse = xs[r], places[r], ys[r], inverse_scale(scale, one_scale, r)
            left(x, x, inverse, decay, excess)
            right(x, x, inverse, decay, excess)
            for i in range(n):
                y[place[i]] = (i + 1) + excess[i]
        return 0

    return rank


@per_row
def _stretch(x, inverse, flow):
    """-sum of z dL/dz: a gap's length times what crosses it; nothing crosses one that is far."""
    crossing = total = 0.0
    for i in range(1, x.shape[0]):
        crossing += flow[i - 1]
        gap = (0.5 * np.float64(x[i]) - 0.5 * np.float64(x[i - 1])) * inverse
        if gap < FAR:
            total += gap * crossing
    return total


def _rank_derivative(scans: Scans, real: Real) -> Any:
    left, right, reals_at = scans.left, scans.right, REALS_AT[real]

    def rank_derivative(first, last, n, values, order, scale, one_scale, grad, grad_x, grad_scale):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads = reals_at(grad, last, n), reals_at(grad_x, last, n)
        decay, sorted_g, flow = np.empty(STRETCH), np.empty(n, real), np.empty(n)
        for r in range(first, last):
            x, place, g, out, inverse = xs[r], places[r], gs[r], grads[r], inverse_scale(scale, one_scale, r)
            for i in range(n):
                sorted_g[i] = g[place[i]]
            left(x, sorted_g, inverse, decay, flow)
            right(x, sorted_g, inverse, decay, flow)
            factor = 0.25 * inverse
            for i in range(n):
                out[place[i]] = flow[i] * factor
            if grad_scale != 0:
                doubles_at(grad_scale, 1, last)[0, r] = factor * _stretch(x, inverse, flow)
        return 0

    return rank_derivative


# ---- Sorted values


@inlined
def _near_and_far(excess, left, right, lower, upper):
    """The anchor of a point, A or B there, and what the items on the other side of the anchor add up to."""
    if excess > 0:
        return upper, 1 + right[upper], left[upper]
    return lower, 1 + left[lower], right[lower]


@inlined
def _offset(excess, near, far):
    distance = math.log(near / (abs(excess) + math.sqrt(excess * excess + near * far)))
    return math.copysign(max(distance, 0.0), -excess)


def _sort(scans: Scans, real: Real) -> Any:
    sums_of_left, sums_of_right, reals_at = scans.left, scans.right, REALS_AT[real]

    def sort(first, last, n, values, scale, one_scale, result):
        xs, ys = reals_at(values, last, n), reals_at(result, last, n)
        decay, left, right = np.empty(STRETCH), np.empty(n), np.empty(n)
        for r in range(first, last):
            x, y, inverse, below = xs[r], ys[r], inverse_scale(scale, one_scale, r), 0
            sums_of_left(x, x, inverse, decay, left)
            sums_of_right(x, x, inverse, decay, right)
            for j in range(n):
                while below < n and below + 1 + 0.5 * (right[below] - left[below]) <= j + 1:
                    below += 1
                excess = j + 0.5 - below
                anchor, near, far = _near_and_far(excess, left, right, max(below - 1, 0), min(below, n - 1))
                y[j] = 2 * (0.5 * np.float64(x[anchor]) + _offset(excess, near, far) / inverse)
        return 0

    return sort


def _sort_derivative(counts: Scans, whole: Scans, real: Real) -> Any:
    reals_at = REALS_AT[real]
    ones_of_left, ones_of_right, sum_left, sum_right = counts.left, counts.right, whole.left, whole.right

    @per_row
    def pull(left, right, g, offsets, anchors):
        """What each point gives to its neighbours, to go on to the items on their left and right, in their place.

        At a point both sides weigh S - d and S + d, in units of which S = sqrt(d^2 + near * far).
        """
        n, below, to_left, to_right, to_right_before = g.shape[0], 0, 0.0, 0.0, 0.0
        lever = 0.0
        for j in range(n):
            while below < n and below + 1 + 0.5 * (right[below] - left[below]) <= j + 1:
                if below > 0:  # no other point looks at the item below the neighbours
                    left[below - 1], right[below - 1] = to_left, to_right_before
                to_right_before, to_left, to_right = to_right, 0.0, 0.0
                below += 1
            lower, upper, excess = max(below - 1, 0), min(below, n - 1), j + 0.5 - below
            anchor, near, far = _near_and_far(excess, left, right, lower, upper)
            both = math.sqrt(excess * excess + near * far)
            larger = abs(excess) + both
            share = 0.5 * np.float64(g[j]) / both
            # The mass on the anchor's side is near, that on the other far over the decay across the gap.
            of_near = share * larger / near
            if excess > 0:
                to_right += of_near
                to_left += share * far / larger * near / (1 + left[lower])
            else:
                to_left += of_near
                to_right += share * far / larger * near / (1 + right[upper])
            if offsets:
                anchors[anchor] += g[j]
                lever += g[j] * _offset(excess, near, far)
        if below > 0:
            left[below - 1], right[below - 1] = to_left, to_right_before
        if below < n:
            left[below], right[below] = 0.0, to_right
            left[below + 1 :], right[below + 1 :] = 0.0, 0.0
        return lever

    def sort_derivative(first, last, n, values, order, scale, one_scale, grad, grad_x, grad_scale):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads = reals_at(grad, last, n), reals_at(grad_x, last, n)
        decay, left, right = np.empty(STRETCH), np.empty(n), np.empty(n)
        anchors = np.empty(n if grad_scale != 0 else 0)
        for r in range(first, last):
            x, place, out, inverse = xs[r], places[r], grads[r], inverse_scale(scale, one_scale, r)
            ones_of_left(x, x, inverse, decay, left)
            ones_of_right(x, x, inverse, decay, right)
            anchors[:] = 0.0
            lever = pull(left, right, gs[r], grad_scale != 0, anchors)
            sum_left(x, right, inverse, decay, right)
            sum_right(x, left, inverse, decay, left)
            for i in range(n):
                out[place[i]] = left[i] + right[i]
            if grad_scale != 0:
                for i in range(n):
                    left[i] += right[i] - anchors[i]
                doubles_at(grad_scale, 1, last)[0, r] = lever + _stretch(x, inverse, left)
        return 0

    return sort_derivative
