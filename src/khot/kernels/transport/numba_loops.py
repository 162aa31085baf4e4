"""The loops of sorted transport in numba, all in float64 but for what they read and write.

The plan of some items at a time, a column each, from the decays :math:`d_l = e^{-|z_l|}` of an item at the thresholds:
:math:`e^{s_j}` is the product of those with :math:`z_l < 0` at places from j on and of those with :math:`z_l > 0`
before j. So an item costs one exponential a threshold, and products of positive numbers lose no digits. Thresholds so
far out of order that these products underflow are left to others, as are rows that take too many steps.

Forward: Newton's method of :mod:`khot.kernels.transport.solver` from the same start, without its first phase.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import kernel, per_row, specialised, summed
from ..cpu.maths import EXP, Real
from ..cpu.rows import REALS_AT, bytes_at, dot, doubles_at, total_of
from .derivative import FAR
from .solver import FAR_OFF, OVERSHOOT

Compiled = Any  # a function that numba has compiled

BLOCK = 128  # items whose plan is made at a time, and stays in a processor's first cache if there are few places
EPS = float(np.finfo(np.float64).eps)
SMALLEST = 1e-200  # sum of an item's products of decays that has all digits
NARROWEST, WIDEST = 1e-150, 1e150  # temperatures with which nothing overflows but what shall

_exp = EXP[np.float64]


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.cpu.loops.kernel`."""

    forward: Compiled
    derivative: Compiled


class Sums(NamedTuple):
    """Sums over the items.

    Attributes:
        plan: Of each place, P 1.
        products: Of pairs of places but the last, P P^T, below the diagonal and on it; then the factor of the Hessian.
    """

    plan: Any
    products: Any


@functools.cache
def loops_of(real: Real) -> Loops:
    """The loops for scores of this dtype."""
    with specialised(real.__name__):
        return Loops(kernel(_forward(real)), kernel(_derivative(real)))


# ---- The plan


@per_row
def _set(values, number):
    for i in range(values.shape[0]):
        values[i] = number


@per_row
def _split_decays(x, threshold, half, after, here, decay):
    """Of one threshold: the products over the places from here on, and what the places after it are multiplied by."""
    for i in range(x.shape[0]):
        z = (x[i] - threshold) / half
        d = _exp(-abs(z))
        here[i] = after[i] * (d if z < 0 else 1.0)
        decay[i] = d if z > 0 else 1.0


@per_row
def _multiply_add(factor, values, total):
    for i in range(values.shape[0]):
        values[i] *= factor[i]
        total[i] += values[i]


@per_row
def _multiply(factor, values):
    for i in range(values.shape[0]):
        values[i] *= factor[i]


@per_row
def _invert(total):
    """In place; and whether all were large enough."""
    enough = True
    for i in range(total.shape[0]):
        enough &= total[i] >= SMALLEST
        total[i] = 1.0 / total[i]
    return enough


@per_row
def _fill_plan(x, t, half, plan, room):
    """The plan (places, items) of some items x; whether it has all digits. ``room`` is as large and two rows more."""
    places, n = plan.shape[0], x.shape[0]
    above, total = room[places, :n], room[places + 1, :n]
    _set(above, 1.0)
    _set(total, 0.0)
    plan[places - 1, :n] = 1.0
    for j in range(places - 2, -1, -1):
        _split_decays(x, t[j], half, plan[j + 1, :n], plan[j, :n], room[j, :n])
    for j in range(places):
        _multiply_add(above, plan[j, :n], total)
        if j < places - 1:
            _multiply(room[j, :n], above)
    enough = _invert(total)
    for j in range(places):
        _multiply(total, plan[j, :n])
    return enough


@per_row
def _clear(sums):
    _set(sums.plan, 0.0)
    for j in range(sums.products.shape[0]):
        _set(sums.products[j], 0.0)


@per_row
def _add_up(plan, n, sums):
    """Adds the sums over n items."""
    places = plan.shape[0]
    sums.plan[places - 1] += total_of(plan[places - 1, :n])
    for j in range(places - 1):
        sums.plan[j] += total_of(plan[j, :n])
        for other in range(j + 1):
            sums.products[j, other] += dot(plan[j, :n], plan[other, :n])


# ---- The dual


@per_row
def _factorise(sums):
    """Turns the products into the factor of the Hessian, as in :func:`.solver.solve_dual`; whether there is one."""
    matrix, size = sums.products, sums.products.shape[0]
    raised = 1 + 8 * (size + 1) * EPS
    for j in range(size):
        for other in range(j):
            found = -matrix[j, other]
            for i in range(other):
                found -= matrix[j, i] * matrix[other, i]
            matrix[j, other] = found / matrix[other, other]
        pivot = sums.plan[j] * raised - matrix[j, j]
        for i in range(j):
            pivot -= matrix[j, i] * matrix[j, i]
        if not 0 < pivot < np.inf:
            return False
        matrix[j, j] = math.sqrt(pivot)
    return True


@per_row
def _solve(factor, right):
    """In place."""
    size = right.shape[0]
    for j in range(size):
        for i in range(j):
            right[j] -= factor[j, i] * right[i]
        right[j] /= factor[j, j]
    for j in range(size - 1, -1, -1):
        for i in range(j + 1, size):
            right[j] -= factor[i, j] * right[i]
        right[j] /= factor[j, j]


@per_row
def _evaluate(x, t, half, plan, room, sums):
    _clear(sums)
    enough = True
    for i in range(0, x.shape[0], BLOCK):
        part = x[i : i + BLOCK]
        enough &= _fill_plan(part, t, half, plan, room)
        _add_up(plan, part.shape[0], sums)
    return enough and _factorise(sums)


@per_row
def _largest(values):
    """The largest absolute value; NaN if there is one."""
    found = 0.0
    for v in values:
        if math.isnan(v):
            return v
        found = max(found, abs(v))
    return found


@per_row
def _start(x, largest, t):
    """Halfway between neighbours of the sorted row, of which ``largest`` gets the first."""
    _set(largest, -np.inf)
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
def _descend(x, half, tol, max_iter, plan, room, sums, t):
    """Newton's method from the thresholds t, in place; whether it has ended."""
    size, n = t.shape[0], x.shape[0]
    residual, move, step = np.empty(size), np.empty(size), np.zeros(size)
    rounding = 32 * (size + 1) * EPS * (1 + _largest(t) / half)
    descent = last = np.inf
    for attempt in range(max_iter):
        if not _evaluate(x, t, half, plan, room, sums):
            return False
        for j in range(size):
            residual[j] = move[j] = 1 - sums.plan[j]
        error = _largest(residual)
        if error <= tol or (error <= rounding and error >= 0.5 * last):
            return True
        _solve(sums.products, move)
        close = _largest(move) <= math.sqrt(0.5 * tol)
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
            for j in range(size):  # a slice assigned to a slice would compile numba's strings, for its error
                step[j] = move[j]
            descent = dot(residual, move)
        for j in range(size):
            t[j] += half * ((move[j + 1] if j + 1 < size else 0.0) - move[j])
        if close:
            return math.isfinite(_largest(t))
        last = error
    return False


# ---- Forward


@per_row
def _copy(source, target):
    """And whether all is finite."""
    finite = True
    for i in range(source.shape[0]):
        target[i] = source[i]
        finite &= abs(source[i]) < np.inf
    return finite


def _forward(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def sorted_transport(first, last, n, x, half, y, t, left, k, places, tol, max_iter):
        xs, ys = reals_at(x, last, n), reals_at(y, last * k, n)
        halves, ts = doubles_at(half, 1, last)[0], doubles_at(t, last, places - 1)
        is_left, count = bytes_at(left, 1, last)[0], 0
        row, largest = np.empty(n), np.empty(places)
        plan, room = np.empty((places, BLOCK)), np.empty((places + 2, BLOCK))
        sums = Sums(np.empty(places), np.empty((places - 1, places - 1)))
        for r in range(first, last):
            done = _copy(xs[r], row) and NARROWEST < halves[r] < WIDEST
            if done:
                _start(row, largest, ts[r])
                done = _descend(row, halves[r], tol, max_iter, plan, room, sums, ts[r])
            if done:
                for i in range(0, n, BLOCK):
                    part = row[i : i + BLOCK]
                    done &= _fill_plan(part, ts[r], halves[r], plan, room)
                    for j in range(k):
                        for item in range(part.shape[0]):
                            ys[r * k + j, i + item] = plan[j, item]
            is_left[r] = not done
            count += not done
        return count

    return sorted_transport


# ---- Backward. With the flow gs_j = dL/ds_j of an item, which adds up to 0 over the places, C_l = sum_{j <= l} gs_j
# = -sum_{j > l} gs_j is what goes to z_l: dL/dx = sum_l C_l / T and dL/dT = -sum_l C_l z_l / T. The sum that goes
# outwards from the item's own place has all digits.


@per_row
def _centre(plan, values, n, flow):
    """P (v - <P, v>) of n items; the values (places, items) may lack the last place, where they are 0 then."""
    given = values.shape[0]
    mean = flow[plan.shape[0] - 1, :n]
    _set(mean, 0.0)
    for j in range(given):
        for i in range(n):
            mean[i] += plan[j, i] * values[j, i]
    for j in range(given):
        for i in range(n):
            flow[j, i] = plan[j, i] * (values[j, i] - mean[i])
    if given < plan.shape[0]:
        for i in range(n):
            mean[i] *= -plan[given, i]


@summed
def _flow_through(x, threshold, half, sign, flow, crossing, grad):
    """Adds a place's flow to what crosses the threshold next to it outwards, and that to dL/dx; returns sum C z."""
    lever = 0.0
    for i in range(x.shape[0]):
        crossing[i] += flow[i]
        z = (x[i] - threshold) / half
        outwards = crossing[i] if (z > 0) == (sign > 0) else 0.0
        grad[i] -= sign * outwards
        lever += min(max(z, -FAR), FAR) * outwards
    return -sign * lever


@per_row
def _pull_back(x, t, half, flow, crossing, grad):
    """T dL/dx of some items, and -T dL/dT."""
    places, n, lever = flow.shape[0], x.shape[0], 0.0
    _set(grad, 0.0)
    _set(crossing, 0.0)
    for j in range(places - 1):
        lever += _flow_through(x, t[j], half, -1.0, flow[j, :n], crossing, grad)
    _set(crossing, 0.0)
    for j in range(places - 1, 0, -1):
        lever += _flow_through(x, t[j - 1], half, 1.0, flow[j, :n], crossing, grad)
    return lever


@per_row
def _gather(g, first, i, n, values):
    for j in range(values.shape[0]):
        for item in range(n):
            values[j, item] = g[first + j, i + item]


@per_row
def _solve_shift(row, t, half, g, first, plans, room, sums, values, flow, shift):
    """The plan of a row, and what its duals' changes are multiplied by; whether all has digits."""
    _clear(sums)
    enough, places = True, flow.shape[0]
    _set(shift, 0.0)
    for block, i in enumerate(range(0, row.shape[0], BLOCK)):
        part, plan = row[i : i + BLOCK], plans[block]
        m = part.shape[0]
        enough &= _fill_plan(part, t, half, plan, room)
        _add_up(plan, m, sums)
        _gather(g, first, i, m, values)
        _centre(plan, values, m, flow)
        for j in range(places - 1):
            shift[j] += total_of(flow[j, :m])
    enough = enough and _factorise(sums)
    if enough:
        _solve(sums.products, shift)
    return enough


@per_row
def _gradient(row, t, half, g, first, plans, room, values, flow, shift, out):
    """dL/dx of a row in ``out``, and dL/dT."""
    lever = 0.0
    for block, i in enumerate(range(0, row.shape[0], BLOCK)):
        part = row[i : i + BLOCK]
        m = part.shape[0]
        _gather(g, first, i, m, values)
        for j in range(shift.shape[0]):
            for item in range(m):
                values[j, item] -= shift[j]
        _centre(plans[block], values, m, flow)
        grad = room[0, :m]
        lever += _pull_back(part, t, half, flow, room[1, :m], grad)
        for item in range(m):
            out[i + item] = grad[item] / half
    return -lever / half


def _derivative(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def derivative(first, last, n, x, half, t, g, grad_x, grad_half, left, k, places):
        xs, gs, grads = reals_at(x, last, n), reals_at(g, last * k, n), reals_at(grad_x, last, n)
        halves, ts = doubles_at(half, 1, last)[0], doubles_at(t, last, places - 1)
        is_left, count = bytes_at(left, 1, last)[0], 0
        row, shift = np.empty(n), np.empty(places - 1)
        plans, room = np.empty(((n + BLOCK - 1) // BLOCK, places, BLOCK)), np.empty((places + 2, BLOCK))
        values, flow = np.empty((k, BLOCK)), np.empty((places, BLOCK))
        sums = Sums(np.empty(places), np.empty((places - 1, places - 1)))
        for r in range(first, last):
            at = ts[r], halves[r], gs, r * k, plans, room
            done = _copy(xs[r], row) and NARROWEST < halves[r] < WIDEST
            done = done and _solve_shift(row, *at, sums, values, flow, shift)
            if done:
                of_half = _gradient(row, *at, values, flow, shift, grads[r])
                if grad_half != 0:
                    doubles_at(grad_half, 1, last)[0, r] = of_half
                done = math.isfinite(of_half)
            is_left[r] = not done
            count += not done
        return count

    return derivative
