"""Sorted transport of rows as a loop of numba: Newton's method of :mod:`.solver` from the same start, then the plan.

Rows that take too many steps, or whose plan the products of :mod:`.numba_plan` cannot give, are left to other code.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any

import numpy as np

from ..cpu.loops import kernel_for_dtype, per_row
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, bytes_at, dot, doubles_at
from .numba_plan import BLOCK, EPS, Sums, add_up, factorise, fill_plan, solve
from .solver import FAR_OFF, OVERSHOOT

NARROWEST, WIDEST = 1e-150, 1e150  # temperatures between which only infinite results overflow


@per_row
def _evaluate(x, t, half, plan, room, sums):
    sums.plan[:], sums.products[:] = 0.0, 0.0
    enough = True
    for i in range(0, x.shape[0], BLOCK):
        part = x[i : i + BLOCK]
        enough &= fill_plan(part, t, half, plan, room)
        add_up(plan, part.shape[0], sums)
    return enough and factorise(sums)


@per_row
def largest_size(values):
    """The largest absolute value; NaN if there is one."""
    found = 0.0
    for v in values:
        if math.isnan(v):
            return v
        found = max(found, abs(v))
    return found


@per_row
def start_between(x, largest, t):
    """Thresholds halfway between neighbours of the sorted row, whose first entries are written to ``largest``."""
    largest[:] = -np.inf
    places = largest.shape[0]
    for v in x:
        if v > largest[places - 1]:
            j = places - 1
            while j > 0 and largest[j - 1] < v:
                largest[j] = largest[j - 1]
                j -= 1
            largest[j] = v
    for j in range(places - 1):
        t[j] = 0.5 * largest[j] + 0.5 * largest[j + 1]


@per_row
def descend(x, half, tol, max_iter, plan, room, sums, t):
    """Newton's method from the thresholds t, in place; returns whether it has ended."""
    size, n = t.shape[0], x.shape[0]
    residual, move, step = np.empty(size), np.empty(size), np.zeros(size)
    rounding = 32 * (size + 1) * EPS * (1 + largest_size(t) / half)
    descent = last = np.inf
    for attempt in range(max_iter):
        if not _evaluate(x, t, half, plan, room, sums):
            return False
        for j in range(size):
            residual[j] = move[j] = 1 - sums.plan[j]
        error = largest_size(residual)
        if error <= tol or (error <= rounding and error >= 0.5 * last):
            return True
        solve(sums.products, move)
        close = largest_size(move) <= math.sqrt(0.5 * tol)
        if attempt == 0 and error > FAR_OFF:
            for j in range(size):
                move[j] = math.log(sums.plan[size] / (n - size) / sums.plan[j])
        slope = -dot(residual, step)
        if slope > OVERSHOOT * descent and not close:
            share = min(max(descent / (descent + slope), 0.1), 0.7)
            for j in range(size):
                move[j] = (share - 1) * step[j]
                step[j] *= share
            descent *= share
        else:
            for j in range(size):  # assigning a slice to a slice would compile numba's strings, for its error
                step[j] = move[j]
            descent = dot(residual, move)
        for j in range(size):
            t[j] += half * ((move[j + 1] if j + 1 < size else 0.0) - move[j])
        if close:
            return math.isfinite(largest_size(t))
        last = error
    return False


@per_row
def copy_row(source, target):
    """Copies a row; returns whether all is finite."""
    finite = True
    for i in range(source.shape[0]):
        target[i] = source[i]
        finite &= abs(source[i]) < np.inf
    return finite


@kernel_for_dtype
def forward_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def sorted_transport(first, last, addresses, n, k, places, tol, max_iter):
        x, half, y, t, left = addresses
        xs, ys = reals_at(x, last, n), reals_at(y, last * k, n)
        halves, ts = doubles_at(half, 1, last)[0], doubles_at(t, last, places - 1)
        is_left, count = bytes_at(left, 1, last)[0], 0
        row, largest = np.empty(n), np.empty(places)
        plan, room = np.empty((places, BLOCK)), np.empty((places + 2, BLOCK))
        sums = Sums(np.empty(places), np.empty((places - 1, places - 1)))
        for r in range(first, last):
            done = copy_row(xs[r], row) and NARROWEST < halves[r] < WIDEST
            if done:
                start_between(row, largest, ts[r])
                done = descend(row, halves[r], tol, max_iter, plan, room, sums, ts[r])
            if done:
                for i in range(0, n, BLOCK):
                    part = row[i : i + BLOCK]
                    done &= fill_plan(part, ts[r], halves[r], plan, room)
                    for j in range(k):
                        for item in range(part.shape[0]):
                            ys[r * k + j, i + item] = plan[j, item]
            is_left[r] = not done
            count += not done
        return count

    return sorted_transport
