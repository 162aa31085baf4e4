"""The points of a sorted row at which its soft count has given values, and their derivatives, as loops of numba."""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, per_row
from ..cpu.maths import LOG
from .numba_scans import STRETCH

FOLLOWING, BETWEEN = 0.5, 1.0  # first values of points that follow the items (1/2, 3/2, ...) or separate them


class SomePoints(NamedTuple):
    """Some consecutive points of a row, one entry each; see :mod:`khot.kernels.order`.

    Attributes:
        excess: d.
        left, right: The masses A and B of the items on either side, seen from the neighbour there.
        product: Of both, times the decay across the gap between the neighbours: d^2 + product = (A' + B')^2 / 4, with
            A' and B' the masses seen from the point.
        anchor: The item from which the point's offset is measured, and its value.
    """

    excess: Any
    left: Any
    right: Any
    product: Any
    anchor: Any


@per_row
def room_for_points():
    return SomePoints(np.empty(STRETCH), np.empty(STRETCH), np.empty(STRETCH), np.empty(STRETCH), np.empty(STRETCH))


@per_row
def find_points(left, right, origin, start, stop, below, at):
    """The points [start, stop) from the sums over the left and right of each item; returns the items below the last.

    The first point of the row has the value ``origin``.

    ``below`` is the number of items below the previous point. Anchors are item numbers. Items are counted at the first
    point above them, a loop that processors predict well.
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


log = LOG[np.float64]


@inlined
def offset_of(excess, left, right, product):
    near = right if excess > 0 else left
    distance = max(log(near / (abs(excess) + math.sqrt(excess * excess + product))), 0.0)
    return -distance if excess > 0 else distance


@per_row
def _weigh(g, at):
    """The weights that each point gives to the items on its left and right, which replace their masses."""
    excess, left, right, product, _ = at
    for i in range(g.shape[0]):
        both = math.sqrt(excess[i] * excess[i] + product[i])
        larger, half = abs(excess[i]) + both, 0.5 * np.float64(g[i])
        share, smaller = half / both, product[i] / larger
        in_middle = excess[i] == 0  # of a gap, across which the masses may have decayed to 0
        left[i] = (half if in_middle else share * (smaller if excess[i] > 0 else larger)) / left[i]
        right[i] = (half if in_middle else share * (larger if excess[i] > 0 else smaller)) / right[i]


@per_row
def _lever(g, at, anchors):
    """Returns the sum of dL/d point times its offset, and adds dL/d point to the derivative of the anchors."""
    excess, left, right, product, anchor = at
    total = 0.0
    for i in range(g.shape[0]):
        total += g[i] * offset_of(excess[i], left[i], right[i], product[i])
        anchors[int(anchor[i])] += g[i]
    return total


@per_row
def pull(left, right, g, origin, at, with_scale, anchors):
    """Writes what the points give to their neighbours, to be passed on to items on the left and right, in their place.

    Returns the :func:`_lever`, if requested.
    """
    n, below, last, lever = left.shape[0], 0, 0, 0.0
    excess, given_left, given_right, _, _ = at
    of_lower = to_left = to_right = 0.0  # what the lower neighbour passes on to the right; and what comes in now
    for start in range(0, g.shape[0], STRETCH):
        part = g[start : start + STRETCH]
        last = find_points(left, right, origin, start, start + part.shape[0], last, at)
        if with_scale:
            lever += _lever(part, at, anchors)
        _weigh(part, at)
        for i in range(part.shape[0]):
            while below < start + i + origin - excess[i]:
                if below > 0:  # no later point uses the sums of the item below
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
