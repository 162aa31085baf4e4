"""Sorted transport's plan, the sums over it, and the systems of its dual, as functions of numba, in float64.

The plan is computed for some items at a time, one column each, from the decays :math:`d_l = e^{-|z_l|}` of an item at
the thresholds: :math:`e^{s_j}` is the product of those with :math:`z_l < 0` at place j and later ones, and of those
with :math:`z_l > 0` before j. So an item costs one exponential per threshold, and products of positive numbers lose no
digits. If thresholds are so far out of order that these products underflow, the row is left to other code.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import per_row
from ..cpu.maths import EXP
from ..cpu.rows import dot, total_of

BLOCK = 128  # items whose plan is computed at a time, which stays in the first-level cache if there are few places
EPS = float(np.finfo(np.float64).eps)
SMALLEST = 1e-200  # sum of an item's products of decays above which all digits are right

_exp = EXP[np.float64]


class Sums(NamedTuple):
    """Sums over the items.

    Attributes:
        plan: P 1, for each place.
        products: P P^T, for pairs of places without the last, on and below the diagonal; then the factor of the
            Hessian.
    """

    plan: Any
    products: Any


@per_row
def _split_decays(x, threshold, half, after, here, decay):
    """For one threshold: the products over this place and those after it, and the factor of the places after it."""
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
    """Inverts in place; returns whether all were large enough."""
    enough = True
    for i in range(total.shape[0]):
        enough &= total[i] >= SMALLEST
        total[i] = 1.0 / total[i]
    return enough


@per_row
def fill_plan(x, t, half, plan, room):
    """The plan (places, items) of some items x; returns whether it has all digits. ``room`` has two more rows."""
    places, n = plan.shape[0], x.shape[0]
    above, total = room[places, :n], room[places + 1, :n]
    above[:], total[:], plan[places - 1, :n] = 1.0, 0.0, 1.0
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
def add_up(plan, n, sums):
    """Adds the sums over n items."""
    places = plan.shape[0]
    sums.plan[places - 1] += total_of(plan[places - 1, :n])
    for j in range(places - 1):
        sums.plan[j] += total_of(plan[j, :n])
        for other in range(j + 1):
            sums.products[j, other] += dot(plan[j, :n], plan[other, :n])


@per_row
def factorise(sums):
    """Turns the products into the factor of the Hessian, as in :func:`.solver.solve_dual`; returns success."""
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
def solve(factor, right):
    """Solves in place."""
    size = right.shape[0]
    for j in range(size):
        for i in range(j):
            right[j] -= factor[j, i] * right[i]
        right[j] /= factor[j, j]
    for j in range(size - 1, -1, -1):
        for i in range(j + 1, size):
            right[j] -= factor[i, j] * right[i]
        right[j] /= factor[j, j]
