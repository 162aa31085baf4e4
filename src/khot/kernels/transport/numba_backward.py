"""The derivative of sorted transport of rows as a loop of numba.

With the flow gs_j = dL/ds_j of an item, which adds up to 0 over the places, C_l = sum_{j <= l} gs_j
= -sum_{j > l} gs_j reaches z_l: dL/dx = sum_l C_l / T and dL/dT = -sum_l C_l z_l / T. The sum that goes outwards from
the item's own place has all digits.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import kernel_for_dtype, per_row, summed
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, bytes_at, doubles_at, total_of
from .numba_forward import NARROWEST, WIDEST, copy_row
from .numba_plan import BLOCK, Sums, add_up, factorise, fill_plan, solve
from .solver import FAR


class Room(NamedTuple):
    """Arrays for the derivative of a row.

    Attributes:
        plans: The plan, block by block.
        spare: Work space of :func:`.numba_plan.fill_plan`.
        sums: The sums over the plan.
        values: dL/dP of a block of items (places, items).
        flow: The same after the derivative of the softmax over places.
    """

    plans: Any
    spare: Any
    sums: Any
    values: Any
    flow: Any


@per_row
def _centre(plan, values, n, flow):
    """P (v - <P, v>) for n items; the values (places, items) may lack the last place, where they are then 0."""
    given = values.shape[0]
    mean = flow[plan.shape[0] - 1, :n]
    mean[:] = 0.0
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
    """Adds a place's flow to the outward flow across the next threshold, and that to dL/dx; returns sum C z."""
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
    grad[:], crossing[:] = 0.0, 0.0
    for j in range(places - 1):
        lever += _flow_through(x, t[j], half, -1.0, flow[j, :n], crossing, grad)
    crossing[:] = 0.0
    for j in range(places - 1, 0, -1):
        lever += _flow_through(x, t[j - 1], half, 1.0, flow[j, :n], crossing, grad)
    return lever


@per_row
def _gather(g, first, i, n, values):
    for j in range(values.shape[0]):
        for item in range(n):
            values[j, item] = g[first + j, i + item]


@per_row
def _solve_shift(row, t, half, g, first, room, shift):
    """The plan of a row, and the vector that changes of its duals are multiplied by; returns whether both are right."""
    plans, spare, sums, values, flow = room
    sums.plan[:], sums.products[:], shift[:] = 0.0, 0.0, 0.0
    enough, places = True, flow.shape[0]
    for block, i in enumerate(range(0, row.shape[0], BLOCK)):
        part, plan = row[i : i + BLOCK], plans[block]
        m = part.shape[0]
        enough &= fill_plan(part, t, half, plan, spare)
        add_up(plan, m, sums)
        _gather(g, first, i, m, values)
        _centre(plan, values, m, flow)
        for j in range(places - 1):
            shift[j] += total_of(flow[j, :m])
    enough = enough and factorise(sums)
    if enough:
        solve(sums.products, shift)
    return enough


@per_row
def _gradient(row, t, half, g, first, room, shift, out):
    """Writes dL/dx of a row to ``out``; returns dL/dT."""
    plans, spare, _, values, flow = room
    lever = 0.0
    for block, i in enumerate(range(0, row.shape[0], BLOCK)):
        part = row[i : i + BLOCK]
        m = part.shape[0]
        _gather(g, first, i, m, values)
        for j in range(shift.shape[0]):
            for item in range(m):
                values[j, item] -= shift[j]
        _centre(plans[block], values, m, flow)
        grad = spare[0, :m]
        lever += _pull_back(part, t, half, flow, spare[1, :m], grad)
        for item in range(m):
            out[i + item] = grad[item] / half
    return -lever / half


@kernel_for_dtype
def derivative_loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def derivative(first, last, addresses, n, k, places):
        x, half, t, grad, grad_x, grad_half, left = addresses
        xs, gs, grads = reals_at(x, last, n), reals_at(grad, last * k, n), reals_at(grad_x, last, n)
        halves, ts = doubles_at(half, 1, last)[0], doubles_at(t, last, places - 1)
        is_left, count = bytes_at(left, 1, last)[0], 0
        row, shift = np.empty(n), np.empty(places - 1)
        room = Room(
            np.empty(((n + BLOCK - 1) // BLOCK, places, BLOCK)),
            np.empty((places + 2, BLOCK)),
            Sums(np.empty(places), np.empty((places - 1, places - 1))),
            np.empty((k, BLOCK)),
            np.empty((places, BLOCK)),
        )
        for r in range(first, last):
            at = ts[r], halves[r], gs, r * k, room
            done = copy_row(xs[r], row) and NARROWEST < halves[r] < WIDEST
            done = done and _solve_shift(row, *at, shift)
            if done:
                of_half = _gradient(row, *at, shift, grads[r])
                if grad_half != 0:
                    doubles_at(grad_half, 1, last)[0, r] = of_half
                done = math.isfinite(of_half)
            is_left[r] = not done
            count += not done
        return count

    return derivative
