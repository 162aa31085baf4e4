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

from ..cpu.loops import inlined, kernel, per_row, specialised, summed
from ..cpu.maths import EXP, LOG, Real
from ..cpu.rows import REALS_AT, doubles_at, longs_at
from .torch_sums import FAR

STRETCH = 128

Compiled = Any  # a function that numba has compiled


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.cpu.loops.kernel`.

    All take the addresses of sorted rows and, but for ``sort``, of the places that they came from; that of the scales,
    or 0 and one scale; then of the result, or of dL/d result, dL/dx and dL/dscale, 0 if that is not wanted.
    Results are rows, those of ``permutation`` matrices.
    """

    rank: Compiled
    rank_derivative: Compiled
    sort: Compiled
    sort_derivative: Compiled
    permutation: Compiled
    permutation_derivative: Compiled


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
            kernel(_permutation(scans["count"], real)),
            kernel(_permutation_derivative(scans["count"], scans["whole"], real)),
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


_KINDS = {
    "count": (_ones, _apart),
    "rank": (_ones, _halved),
    "pull": (_against, _added),
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

FOLLOWING, BETWEEN = 0.5, 1.0  # the first point of a row: they follow the items at 1/2, 3/2, ..., or cut them apart


class Points(NamedTuple):
    """Some of the points of a row, each one after the one before, one entry each, see :mod:`khot.kernels.order`.

    Attributes:
        excess: d.
        left, right: The masses A and B of the items on either side, seen from the neighbour there.
        product: Of both, times the decay across the gap between the neighbours: d^2 + product = (A' + B')^2 / 4, with
            A' and B' the masses seen from the point.
        anchor: The item from which the point's offset counts, and its value.
    """

    excess: Any
    left: Any
    right: Any
    product: Any
    anchor: Any


@per_row
def _room_for_points():
    return Points(np.empty(STRETCH), np.empty(STRETCH), np.empty(STRETCH), np.empty(STRETCH), np.empty(STRETCH))


@per_row
def _find_points(left, right, origin, start, stop, below, at):
    """The points [start, stop) from the sums over the left and right of each item; how many items are below the last.

    The first point of the row is ``origin``.

    ``below`` is that number for the point before. The anchors are numbers of items. Items are counted at the first
    point above them, which no processor need guess.
    """
    n, size, (excesses, lefts, rights, products, anchors) = left.shape[0], stop - start, at
    excesses[:size] = 0.0
    for item in range(below, n):
        first = math.ceil(item + 1.5 - origin + 0.5 * (right[item] - left[item])) - 1
        if first >= stop:
            break
        excesses[max(first - start, 0)] += 1
    for i in range(size):
        below += int(excesses[i])
        excesses[i] = start + i + origin - below
    for i in range(size):
        excess = excesses[i]
        count = int(start + i + origin - excess)
        lower, upper = max(count - 1, 0), min(count, n - 1)
        to_lower, to_upper, mass_left, mass_right = right[lower], left[upper], 1 + left[lower], 1 + right[upper]
        lefts[i], rights[i] = mass_left, mass_right
        products[i] = mass_right * to_upper if excess > 0 else mass_left * to_lower
        anchors[i] = upper if excess > 0 else lower
    return below


_log = LOG[np.float64]


@inlined
def _offset(excess, left, right, product):
    near = right if excess > 0 else left
    distance = max(_log(near / (abs(excess) + math.sqrt(excess * excess + product))), 0.0)
    return -distance if excess > 0 else distance


def _sort(scans: Scans, real: Real) -> Any:
    sums_of_left, sums_of_right, reals_at = scans.left, scans.right, REALS_AT[real]

    @per_row
    def place(x, at, inverse, y):
        excess, left, right, product, anchor = at
        for i in range(y.shape[0]):
            anchor[i] = 0.5 * np.float64(x[int(anchor[i])])
        for i in range(y.shape[0]):
            y[i] = 2 * (anchor[i] + _offset(excess[i], left[i], right[i], product[i]) / inverse)

    def sort(first, last, n, values, scale, one_scale, result):
        xs, ys = reals_at(values, last, n), reals_at(result, last, n)
        decay, left, right, points = np.empty(STRETCH), np.empty(n), np.empty(n), _room_for_points()
        for r in range(first, last):
            x, y, inverse, below = xs[r], ys[r], inverse_scale(scale, one_scale, r), 0
            sums_of_left(x, x, inverse, decay, left)
            sums_of_right(x, x, inverse, decay, right)
            for start in range(0, n, STRETCH):
                stop = min(start + STRETCH, n)
                below = _find_points(left, right, FOLLOWING, start, stop, below, points)
                place(x, points, inverse, y[start:stop])
        return 0

    return sort


@per_row
def _weigh(g, at):
    """What each point gives to the items on its left and on its right, in place of their masses."""
    excess, left, right, product, _ = at
    for i in range(g.shape[0]):
        both = math.sqrt(excess[i] * excess[i] + product[i])
        larger, half = abs(excess[i]) + both, 0.5 * np.float64(g[i])
        share, smaller = half / both, product[i] / larger
        in_middle = excess[i] == 0  # of a gap, across which nothing need reach
        left[i] = (half if in_middle else share * (smaller if excess[i] > 0 else larger)) / left[i]
        right[i] = (half if in_middle else share * (larger if excess[i] > 0 else smaller)) / right[i]


@per_row
def _lever(g, at, anchors):
    """Sum of dL/d point times its offset; and adds dL/d point to that of the anchors."""
    excess, left, right, product, anchor = at
    total = 0.0
    for i in range(g.shape[0]):
        total += g[i] * _offset(excess[i], left[i], right[i], product[i])
        anchors[int(anchor[i])] += g[i]
    return total


@per_row
def _pull(left, right, g, origin, at, with_scale, anchors):
    """What the points give to their neighbours, to go on to the items on the left and right of these, in their place.

    Returns the :func:`_lever`, if asked for.
    """
    n, below, last, lever = left.shape[0], 0, 0, 0.0
    excess, given_left, given_right, _, _ = at
    of_lower = to_left = to_right = 0.0  # what the lower neighbour goes on with to the right; and what comes in now
    for start in range(0, g.shape[0], STRETCH):
        part = g[start : start + STRETCH]
        last = _find_points(left, right, origin, start, start + part.shape[0], last, at)
        if with_scale:
            lever += _lever(part, at, anchors)
        _weigh(part, at)
        for i in range(part.shape[0]):
            while below < start + i + origin - excess[i]:
                if below > 0:  # no later point looks at the sums of the item below
                    left[below - 1], right[below - 1] = to_left, of_lower
                of_lower, to_left, to_right = to_right, 0.0, 0.0
                below += 1
            to_left += given_left[i]
            to_right += given_right[i]
    if below > 0:
        left[below - 1], right[below - 1] = to_left, of_lower
    if below < n:
        left[below:] = right[below:] = 0.0
        right[below] = to_right
    return lever


def _sort_derivative(counts: Scans, whole: Scans, real: Real) -> Any:
    reals_at = REALS_AT[real]
    ones_of_left, ones_of_right, sum_left, sum_right = counts.left, counts.right, whole.left, whole.right

    def sort_derivative(first, last, n, values, order, scale, one_scale, grad, grad_x, grad_scale):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads = reals_at(grad, last, n), reals_at(grad_x, last, n)
        decay, left, right, points = np.empty(STRETCH), np.empty(n), np.empty(n), _room_for_points()
        anchors = np.empty(n if grad_scale != 0 else 0)
        for r in range(first, last):
            x, place, out, inverse = xs[r], places[r], grads[r], inverse_scale(scale, one_scale, r)
            ones_of_left(x, x, inverse, decay, left)
            ones_of_right(x, x, inverse, decay, right)
            anchors[:] = 0.0
            lever = _pull(left, right, gs[r], FOLLOWING, points, grad_scale != 0, anchors)
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


# ---- The soft permutation, see :mod:`khot.kernels.order.torch_slices`


class Cuts(NamedTuple):
    """The cuts between the slices of a row, one entry each.

    Attributes:
        near: Half of an item near to the cut.
        offset: Of the cut from there, in scales.
        below: How many items lie at or below the cut.
    """

    near: Any
    offset: Any
    below: Any


@per_row
def _room_for_cuts(n):
    return Cuts(np.empty(n - 1), np.empty(n - 1), np.empty(n - 1, np.int64))


@per_row
def _find_cuts(x, inverse, left, right, at, cuts):
    n, last = x.shape[0], 0
    for start in range(0, n - 1, STRETCH):
        stop = min(start + STRETCH, n - 1)
        last = _find_points(left, right, BETWEEN, start, stop, last, at)
        for i in range(stop - start):
            excess, anchor, j = at.excess[i], int(at.anchor[i]), start + i
            if excess == 0:  # however wide the gap is
                gap = (0.5 * np.float64(x[anchor + 1]) - 0.5 * np.float64(x[anchor])) * inverse
                cuts.offset[j] = 0.5 * (min(gap, FAR) + _log(at.left[i] / at.right[i]))
            else:
                cuts.offset[j] = _offset(excess, at.left[i], at.right[i], at.product[i])
            cuts.near[j] = 0.5 * np.float64(x[anchor])
            cuts.below[j] = int(j + BETWEEN - excess)


@inlined
def _distance(near, offset, half, inverse):
    """Of a cut from an item: t - z."""
    return (near - half) * inverse + offset


@per_row
def _weigh_slices(cuts, inverse, weight):
    """Half of 1 - exp(-width)."""
    for j in range(weight.shape[0]):
        width = _distance(cuts.near[j + 1], cuts.offset[j + 1], cuts.near[j], inverse) - cuts.offset[j]
        weight[j] = -0.5 * math.expm1(-width)


@per_row
def _own_slice(half, inverse, cuts, j):
    """How much of an item's law lies in the slice around it, the one before the cut j."""
    found, last = 0.0, cuts.near.shape[0]
    for cut, sign in ((j, 1.0), (j - 1, -1.0)):
        if 0 <= cut < last:
            distance = sign * _distance(cuts.near[cut], cuts.offset[cut], half, inverse)
            found -= 0.5 * math.expm1(-distance)
        else:
            found += 0.5
    return found


def _permutation(scans: Scans, real: Real) -> Any:
    left_of, right_of, reals_at, exp = scans.left, scans.right, REALS_AT[real], EXP[real]

    @per_row
    def fill(half, inverse, lower, lower_offset, upper, upper_offset, weight, y):
        """The slices that have two ends, as products."""
        for j in range(y.shape[0]):
            beyond = _distance(lower[j], lower_offset[j], half, inverse)
            before = -_distance(upper[j], upper_offset[j], half, inverse)
            y[j] = real(weight[j]) * exp(-real(beyond if beyond > before else before))

    @per_row
    def fill_rows(x, places, inverse, cuts, weight, ys, top):
        n, around = x.shape[0], 0
        near, offset, half_mass = cuts.near, cuts.offset, real(0.5)
        for i in range(n):
            half, y = 0.5 * np.float64(x[i]), ys[top + places[i]]
            if n > 1:
                y[0] = half_mass * exp(real(_distance(near[0], offset[0], half, inverse)))
                y[n - 1] = half_mass * exp(real(-_distance(near[n - 2], offset[n - 2], half, inverse)))
            if n > 2:
                fill(half, inverse, near[: n - 2], offset[: n - 2], near[1:], offset[1:], weight, y[1 : n - 1])
            while around < n - 1 and cuts.below[around] <= i:
                around += 1
            y[around] = _own_slice(half, inverse, cuts, around)

    def permutation(first, last, n, values, order, scale, one_scale, result):
        xs, places, ys = reals_at(values, last, n), longs_at(order, last, n), reals_at(result, last * n, n)
        decay, left, right, points = np.empty(STRETCH), np.empty(n), np.empty(n), _room_for_points()
        cuts, weight = _room_for_cuts(n), np.empty(max(n - 2, 0))
        for r in range(first, last):
            x, inverse = xs[r], inverse_scale(scale, one_scale, r)
            left_of(x, x, inverse, decay, left)
            right_of(x, x, inverse, decay, right)
            _find_cuts(x, inverse, left, right, points, cuts)
            _weigh_slices(cuts, inverse, weight)
            fill_rows(x, places[r], inverse, cuts, weight, ys, r * n)
        return 0

    return permutation


def _permutation_derivative(counts: Scans, whole: Scans, real: Real) -> Any:
    reals_at, exp = REALS_AT[real], EXP[real]
    ones_of_left, ones_of_right, sum_left, sum_right = counts.left, counts.right, whole.left, whole.right

    @summed
    def flow_through(half, inverse, near, offset, g, above, of_cuts):
        """Adds twice what flows through each cut to the derivative in it; the sum is that of the item, but its sign."""
        total = 0.0
        for j in range(near.shape[0]):
            density = exp(-abs(real(_distance(near[j], offset[j], half, inverse))))
            flow = np.float64((g[j] - above[j]) * density)
            of_cuts[j] += flow
            total += flow
        return total

    @per_row
    def pull_back(x, places, inverse, cuts, gs, top, of_items, of_cuts):
        """The direct derivatives in the items and the cuts."""
        n = x.shape[0]
        for j in range(n - 1):
            of_cuts[j] = 0.0
        for i in range(n):
            g = gs[top + places[i]]
            total = flow_through(0.5 * np.float64(x[i]), inverse, cuts.near, cuts.offset, g[: n - 1], g[1:], of_cuts)
            of_items[i] = -0.5 * total
        for j in range(n - 1):
            of_cuts[j] *= 0.5

    def permutation_derivative(first, last, n, values, order, scale, one_scale, grad, grad_x, grad_scale):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads = reals_at(grad, last * n, n), reals_at(grad_x, last, n)
        decay, left, right, points = np.empty(STRETCH), np.empty(n), np.empty(n), _room_for_points()
        cuts, of_items, of_cuts, nothing = _room_for_cuts(n), np.empty(n), np.empty(n - 1), np.empty(0)
        for r in range(first, last):
            x, place, out, inverse = xs[r], places[r], grads[r], inverse_scale(scale, one_scale, r)
            ones_of_left(x, x, inverse, decay, left)
            ones_of_right(x, x, inverse, decay, right)
            _find_cuts(x, inverse, left, right, points, cuts)
            pull_back(x, place, inverse, cuts, gs, r * n, of_items, of_cuts)
            _pull(left, right, of_cuts, BETWEEN, points, False, nothing)
            sum_left(x, right, inverse, decay, right)
            sum_right(x, left, inverse, decay, left)
            for i in range(n):
                of_items[i] += left[i] + right[i]
                out[place[i]] = 0.5 * inverse * of_items[i]
            if grad_scale != 0:
                doubles_at(grad_scale, 1, last)[0, r] = 0.5 * inverse * _stretch(x, inverse, of_items)
        return 0

    return permutation_derivative
