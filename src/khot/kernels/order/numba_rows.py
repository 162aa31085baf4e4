"""Soft ranks and sorted values of rows, and their derivatives, as loops of numba.

All take the addresses of sorted rows and of the positions that they came from, which ``sort`` ignores; the address of
the scales, or 0 and one scale; then the address of the result, or those of dL/d result, dL/dx and dL/dscale, which is 0
if it is not wanted.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np

from ..cpu.loops import kernel_for_dtype, per_row
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, doubles_at, longs_at
from .numba_points import FOLLOWING, find_points, offset_of, pull, room_for_points
from .numba_scans import STRETCH, inverse_scale, scans_for, stretch


@kernel_for_dtype
def rank_loop(real: Real) -> Any:
    (left, right), reals_at = scans_for("rank", real), REALS_AT[real]

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


@kernel_for_dtype
def rank_derivative_loop(real: Real) -> Any:
    (left, right), reals_at = scans_for("pull", real), REALS_AT[real]

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
                doubles_at(grad_scale, 1, last)[0, r] = factor * stretch(x, inverse, flow)
        return 0

    return rank_derivative


@kernel_for_dtype
def sort_loop(real: Real) -> Any:
    (sums_of_left, sums_of_right), reals_at = scans_for("count", real), REALS_AT[real]

    @per_row
    def place(x, at, inverse, y):
        excess, left, right, product, anchor = at
        for i in range(y.shape[0]):
            anchor[i] = 0.5 * np.float64(x[int(anchor[i])])
        for i in range(y.shape[0]):
            y[i] = 2 * (anchor[i] + offset_of(excess[i], left[i], right[i], product[i]) / inverse)

    def sort(first, last, n, values, order, scale, one_scale, result):
        xs, ys = reals_at(values, last, n), reals_at(result, last, n)
        decay, left, right, points = np.empty(STRETCH), np.empty(n), np.empty(n), room_for_points()
        for r in range(first, last):
            x, y, inverse, below = xs[r], ys[r], inverse_scale(scale, one_scale, r), 0
            sums_of_left(x, x, inverse, decay, left)
            sums_of_right(x, x, inverse, decay, right)
            for start in range(0, n, STRETCH):
                stop = min(start + STRETCH, n)
                below = find_points(left, right, FOLLOWING, start, stop, below, points)
                place(x, points, inverse, y[start:stop])
        return 0

    return sort


@kernel_for_dtype
def sort_derivative_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]
    (ones_of_left, ones_of_right), (sum_left, sum_right) = scans_for("count", real), scans_for("whole", real)

    def sort_derivative(first, last, n, values, order, scale, one_scale, grad, grad_x, grad_scale):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads = reals_at(grad, last, n), reals_at(grad_x, last, n)
        decay, left, right, points = np.empty(STRETCH), np.empty(n), np.empty(n), room_for_points()
        anchors = np.empty(n if grad_scale != 0 else 0)
        for r in range(first, last):
            x, place, out, inverse = xs[r], places[r], grads[r], inverse_scale(scale, one_scale, r)
            ones_of_left(x, x, inverse, decay, left)
            ones_of_right(x, x, inverse, decay, right)
            anchors[:] = 0.0
            lever = pull(left, right, gs[r], FOLLOWING, points, grad_scale != 0, anchors)
            sum_left(x, right, inverse, decay, right)
            sum_right(x, left, inverse, decay, left)
            for i in range(n):
                out[place[i]] = left[i] + right[i]
            if grad_scale != 0:
                for i in range(n):
                    left[i] += right[i] - anchors[i]
                doubles_at(grad_scale, 1, last)[0, r] = lever + stretch(x, inverse, left)
        return 0

    return sort_derivative
