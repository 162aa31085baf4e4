"""The soft permutation of rows and its derivative as loops of numba, see :mod:`khot.kernels.order.slices`.

The arguments are those of :mod:`.numba_rows`; results are matrices.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, kernel_for_dtype, per_row, summed
from ..cpu.maths import FLUSHED_EXP, Real
from ..cpu.rows import REALS_AT, doubles_at, longs_at
from .numba_points import BETWEEN, anchor_of, find_gaps, log, look_around, offset_of, pull, room_for_points
from .numba_scans import STRETCH, inverse_scale, room_for_sums, stretch, sum_ones, sums_of
from .sums import FAR


class Cuts(NamedTuple):
    """The cuts between the slices of a row, one entry each.

    Attributes:
        near: Half of an item near the cut.
        offset: Offset of the cut from there, in scales.
        below: How many items lie at or below the cut.
    """

    near: Any
    offset: Any
    below: Any


@per_row
def _room_for_cuts(n):
    return Cuts(np.empty(n - 1), np.empty(n - 1), np.empty(n - 1, np.int32))


@per_row
def _find_cuts(x, inverse, sums, at, cuts):
    decay, before, after, _ = sums
    find_gaps(before, after, BETWEEN, cuts.below)
    for start in range(0, x.shape[0] - 1, STRETCH):
        here = cuts.below[start : start + STRETCH]
        look_around(decay, before, after, BETWEEN, start, here, at)
        for i in range(here.shape[0]):
            excess, near, far, j = at.excess[i], at.near[i], at.far[i], start + i
            half = 0.5 * np.float64(x[anchor_of(excess, here[i])])
            if excess == 0:  # right for a gap of any width
                gap = (0.5 * np.float64(x[here[i]]) - half) * inverse
                cuts.offset[j] = 0.5 * (min(gap, FAR) + log(near / far))
            else:
                cuts.offset[j] = offset_of(excess, near, far, at.decay[i])
            cuts.near[j] = half


@inlined
def _distance(near, offset, half, inverse):
    """Distance of a cut from an item: t - z."""
    return (near - half) * inverse + offset


@per_row
def _weigh_slices(cuts, inverse, weight):
    """Half of 1 - exp(-width)."""
    for j in range(weight.shape[0]):
        width = _distance(cuts.near[j + 1], cuts.offset[j + 1], cuts.near[j], inverse) - cuts.offset[j]
        weight[j] = -0.5 * math.expm1(-width)


@per_row
def _own_slice(half, inverse, cuts, j):
    """How much of an item's law lies in the slice around it, which is the one before cut j."""
    found, last = 0.0, cuts.near.shape[0]
    for cut, sign in ((j, 1.0), (j - 1, -1.0)):
        if 0 <= cut < last:
            distance = sign * _distance(cuts.near[cut], cuts.offset[cut], half, inverse)
            found -= 0.5 * math.expm1(-distance)
        else:
            found += 0.5
    return found


@kernel_for_dtype
def permutation_loop(real: Real) -> Any:
    reals_at, exp = REALS_AT[real], FLUSHED_EXP[real]

    @per_row
    def fill(half, inverse, lower, lower_offset, upper, upper_offset, weight, y):
        """The slices with two ends, as products."""
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

    def permutation(first, last, n, values, order, scale, result):
        xs, places, ys = reals_at(values, last, n), longs_at(order, last, n), reals_at(result, last * n, n)
        sums = room_for_sums(n)
        points, cuts, weight = room_for_points(), _room_for_cuts(n), np.empty(max(n - 2, 0))
        for r in range(first, last):
            x, inverse = xs[r], inverse_scale(scale, r)
            sum_ones(x, inverse, sums)
            _find_cuts(x, inverse, sums, points, cuts)
            _weigh_slices(cuts, inverse, weight)
            fill_rows(x, places[r], inverse, cuts, weight, ys, r * n)
        return 0

    return permutation


@kernel_for_dtype
def permutation_derivative_loop(real: Real) -> Any:
    reals_at, exp = REALS_AT[real], FLUSHED_EXP[real]

    @summed
    def flow_through(half, inverse, near, offset, g, above, of_cuts):
        """Adds twice the flow through each cut to the derivative in it; returns the sum, minus that of the item."""
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

    def permutation_derivative(first, last, n, values, order, scale, grad, grad_x, grad_scale):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads = reals_at(grad, last * n, n), reals_at(grad_x, last, n)
        sums = room_for_sums(n)
        points, cuts, of_items, of_cuts = room_for_points(), _room_for_cuts(n), np.empty(n), np.empty(n - 1)
        for r in range(first, last):
            x, place, out, inverse = xs[r], places[r], grads[r], inverse_scale(scale, r)
            sum_ones(x, inverse, sums)
            _find_cuts(x, inverse, sums, points, cuts)
            pull_back(x, place, inverse, cuts, gs, r * n, of_items, of_cuts)
            pull(sums, of_cuts, BETWEEN, cuts.below, points, False, of_cuts)
            sums_of(x, inverse, sums.decay, sums.before, sums.after[1:], sums.before, sums.after)
            for i in range(n):
                of_items[i] += sums.before[i + 1] + sums.after[i]
                out[place[i]] = 0.5 * inverse * of_items[i]
            if grad_scale != 0:
                doubles_at(grad_scale, 1, last)[0, r] = 0.5 * inverse * stretch(x, inverse, of_items)
        return 0

    return permutation_derivative
