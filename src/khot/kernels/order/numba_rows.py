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
from .numba_points import FOLLOWING, anchor_of, find_gaps, look_around, offset_of, pull, room_for_points
from .numba_scans import STRETCH, inverse_scale, pulls_of, room_for_sums, stretch, sum_ones, sums_of


@kernel_for_dtype
def rank_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def rank(first, last, n, values, order, scale, result):
        xs, places, ys = reals_at(values, last, n), longs_at(order, last, n), reals_at(result, last, n)
        sums = room_for_sums(n)
        before, after = sums.before, sums.after
        for r in range(first, last):
            x, place, y, inverse = xs[r], places[r], ys[r], inverse_scale(scale, r)
            sum_ones(x, inverse, sums)
            for i in range(n):
                y[place[i]] = (i + 1) + 0.5 * (after[i] - before[i + 1])
        return 0

    return rank


@kernel_for_dtype
def rank_derivative_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def rank_derivative(first, last, n, values, order, scale, grad, grad_x, grad_scale):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads = reals_at(grad, last, n), reals_at(grad_x, last, n)
        sums, sorted_g = room_for_sums(n), np.empty(n, real)
        decay, before, after, _ = sums
        for r in range(first, last):
            x, place, g, out, inverse = xs[r], places[r], gs[r], grads[r], inverse_scale(scale, r)
            for i in range(n):
                sorted_g[i] = g[place[i]]
            sum_ones(x, inverse, sums)
            pulls_of(x, inverse, decay, sorted_g, sorted_g, before, after)
            factor = 0.25 * inverse
            for i in range(n):
                before[i] += after[i + 1]
                out[place[i]] = before[i] * factor
            if grad_scale != 0:
                doubles_at(grad_scale, 1, last)[0, r] = factor * stretch(x, inverse, before)
        return 0

    return rank_derivative


@kernel_for_dtype
def sort_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    @per_row
    def place(x, gaps, at, half_scale, half, y):
        excess, near, far, decay = at
        for i in range(y.shape[0]):
            half[i] = 0.5 * np.float64(x[anchor_of(excess[i], gaps[i])])
        for i in range(y.shape[0]):
            y[i] = 2 * (half[i] + offset_of(excess[i], near[i], far[i], decay[i]) * half_scale)

    def sort(first, last, n, values, order, scale, result):
        xs, ys = reals_at(values, last, n), reals_at(result, last, n)
        sums = decay, before, after, _ = room_for_sums(n)
        gaps, points, half = np.empty(n, np.int32), room_for_points(), np.empty(STRETCH)
        for r in range(first, last):
            x, y, inverse = xs[r], ys[r], inverse_scale(scale, r)
            sum_ones(x, inverse, sums)
            find_gaps(before, after, FOLLOWING, gaps)
            for start in range(0, n, STRETCH):
                here = gaps[start : start + STRETCH]
                look_around(decay, before, after, FOLLOWING, start, here, points)
                place(x, here, points, 1 / inverse, half, y[start : start + STRETCH])
        return 0

    return sort


@kernel_for_dtype
def sort_derivative_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def sort_derivative(first, last, n, values, order, scale, grad, grad_x, grad_scale):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads = reals_at(grad, last, n), reals_at(grad_x, last, n)
        sums = decay, before, after, _ = room_for_sums(n)
        gaps, points, anchors = np.empty(n, np.int32), room_for_points(), np.empty(n if grad_scale != 0 else 0)
        for r in range(first, last):
            x, place, g, out, inverse = xs[r], places[r], gs[r], grads[r], inverse_scale(scale, r)
            sum_ones(x, inverse, sums)
            find_gaps(before, after, FOLLOWING, gaps)
            anchors[:] = 0.0
            lever = pull(sums, g, FOLLOWING, gaps, points, grad_scale != 0, anchors)
            sums_of(x, inverse, decay, before, after[1:], before, after)
            for i in range(n):
                out[place[i]] = before[i + 1] + after[i]
            if grad_scale != 0:
                for i in range(n):
                    anchors[i] = before[i + 1] + after[i] - anchors[i]
                doubles_at(grad_scale, 1, last)[0, r] = lever + stretch(x, inverse, anchors)
        return 0

    return sort_derivative
