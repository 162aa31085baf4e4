"""Ranks and sorted values by projection onto a permutahedron, and their derivatives, as loops of numba.

With s and w ascending, the projection is y = (s - mean s) / strength + mean w, with means over the blocks of the
isotonic solution. For ranks, s are the items and w the places 1, ..., n; for sorted values the other way round.

The arguments are those of :mod:`.numba_rows`, and whether results are ranks.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np

from ..cpu.loops import kernel_for_dtype, per_row
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, doubles_at, longs_at, pool, total_of
from .numba_scans import scale_of


@per_row
def _solve(x, strength, of_ranks, items, constants, slopes, starts):
    """Writes the items and the starts of the blocks; returns how many there are."""
    of_s, of_w = min(1 / strength, 1.0), min(strength, 1.0)  # no product overflows
    of_item, of_place = (-of_s, of_w) if of_ranks else (of_w, -of_s)
    middle = 0.5 * np.float64(x[0]) + 0.5 * np.float64(x[-1]) if of_ranks else 0.0  # keeps the digits of differences
    for i in range(x.shape[0]):
        items[i] = np.float64(x[i]) - middle
        constants[i], slopes[i] = of_item * items[i] + of_place * (i + 1), 1.0
    return pool(constants, slopes, starts)


@per_row
def _average(v, of_places, starts, count, strength, of_ranks):
    """Replaces the items by the projection or, if ``of_places`` is 0, dL/d projection by dL/d items."""
    stop, inverse = v.shape[0], 1 / strength
    for block in range(count - 1, -1, -1):
        start = starts[block]
        mean, middle = total_of(v[start:stop]) / (stop - start), 0.5 * (start + 1 + stop)
        for i in range(start, stop):
            of_s, of_w = (v[i] - mean, of_places * middle) if of_ranks else (of_places * (i + 1 - middle), mean)
            v[i] = of_s * inverse + of_w
        stop = start


@kernel_for_dtype
def projection_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def projection(first, last, n, values, order, scale, result, of_ranks):
        xs, places, ys = reals_at(values, last, n), longs_at(order, last, n), reals_at(result, last, n)
        items, constants, slopes, starts = np.empty(n), np.empty(n), np.empty(n), np.empty(n, np.int64)
        for r in range(first, last):
            strength = scale_of(scale, r)
            count = _solve(xs[r], strength, of_ranks, items, constants, slopes, starts)
            _average(items, 1.0, starts, count, strength, of_ranks)
            for i in range(n):
                ys[r, places[r, i] if of_ranks else i] = items[i]
        return 0

    return projection


@kernel_for_dtype
def projection_derivative_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def projection_derivative(first, last, n, values, order, scale, grad, grad_x, grad_scale, of_ranks):
        xs, places = reals_at(values, last, n), longs_at(order, last, n)
        gs, grads, flow = reals_at(grad, last, n), reals_at(grad_x, last, n), np.empty(n)
        items, constants, slopes, starts = np.empty(n), np.empty(n), np.empty(n), np.empty(n, np.int64)
        for r in range(first, last):
            place, g, strength, lever = places[r], gs[r], scale_of(scale, r), 0.0
            count = _solve(xs[r], strength, of_ranks, items, constants, slopes, starts)
            for i in range(n):
                flow[i] = g[place[i] if of_ranks else i]
            _average(flow, 0.0, starts, count, strength, of_ranks)
            for i in range(n):
                grads[r, place[i]] = flow[i]
                lever += flow[i] * items[i] if of_ranks else (g[i] - flow[i]) * (i + 1)
            if grad_scale != 0:
                doubles_at(grad_scale, 1, last)[0, r] = -lever / strength / (1.0 if of_ranks else strength)
        return 0

    return projection_derivative
