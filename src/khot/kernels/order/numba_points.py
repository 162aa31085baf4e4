"""The points of a sorted row at which its soft count has given values, and their derivatives, as loops of numba."""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, per_row, summed
from ..cpu.maths import LOG
from .numba_scans import STRETCH

FOLLOWING, BETWEEN = 0.5, 1.0  # first values of points that follow the items (1/2, 3/2, ...) or separate them
LEAST = 1e-100  # decay in place of smaller ones, so that no quotient of decays is 0 / 0


class Points(NamedTuple):
    """At most ``STRETCH`` consecutive points of a row, one entry each; see :mod:`khot.kernels.order`.

    Attributes:
        excess: d.
        near: The mass on the side of the anchor, which is the neighbour above the point if d > 0: B there, else A.
        far: The mass on the other side.
        decay: Across the gap between both.
    """

    excess: Any
    near: Any
    far: Any
    decay: Any


@per_row
def room_for_points():
    return Points(np.empty(STRETCH), np.empty(STRETCH), np.empty(STRETCH), np.empty(STRETCH))


@per_row
def find_gaps(before, after, origin, gaps):
    """The gap of each point, or how many items lie at or below it, from the sums of ones before and after the gaps.

    The first point has the value ``origin``. Each item is counted at the first point above it, in a loop that
    processors predict well.
    """
    gaps[:] = 0
    for i in range(before.shape[0] - 1):
        first = math.ceil(i + 0.5 - origin + 0.5 * (after[i] - before[i + 1]))
        if first < gaps.shape[0]:
            gaps[max(first, 0)] += 1
    below = 0
    for j in range(gaps.shape[0]):
        below += gaps[j]
        gaps[j] = below


@summed
def look_around(decay, before, after, origin, start, gaps, at):
    """Describes the points from number ``start``, which lie in these gaps."""
    excess, near, far, across = at
    for i in range(gaps.shape[0]):
        gap = gaps[i]
        d, a, b = start + i + origin - gap, before[gap], after[gap]
        excess[i], across[i] = d, max(decay[gap], LEAST)
        near[i] = b if d > 0 else a
        far[i] = a if d > 0 else b


log = LOG[np.float64]


@inlined
def _half_both(excess, near, far, decay):
    """(A' + B') / 2 with the masses seen from the point, where d = (B' - A') / 2."""
    return math.sqrt(excess * excess + near * far * decay)


@inlined
def offset_of(excess, near, far, decay):
    distance = max(log(near / (abs(excess) + _half_both(excess, near, far, decay))), 0.0)
    return -distance if excess > 0 else distance


@inlined
def anchor_of(excess, gap):
    """The item from which the offset of a point is measured."""
    return gap if excess > 0 else gap - 1


@per_row
def _weigh(g, at):
    """Replaces the masses by the shares of dL/d point that go to the items on the right and on the left."""
    excess, near, far, decay = at
    for i in range(g.shape[0]):
        half = _half_both(excess[i], near[i], far[i], decay[i])
        larger, mass = abs(excess[i]) + half, near[i]
        part = 0.5 * np.float64(g[i]) / (half * larger * mass)
        to_near, to_far = part * larger * larger, part * mass * mass * decay[i]
        near[i], far[i] = (to_near, to_far) if excess[i] > 0 else (to_far, to_near)


@per_row
def _lever(g, gaps, at, anchors):
    """Returns the sum of dL/d point times its offset, and adds dL/d point to the derivative of the anchors."""
    excess, near, far, decay = at
    total = 0.0
    for i in range(g.shape[0]):
        total += g[i] * offset_of(excess[i], near[i], far[i], decay[i])
        anchors[anchor_of(excess[i], gaps[i])] += g[i]
    return total


@per_row
def pull(sums, g, origin, gaps, at, with_scale, anchors):
    """Writes what the points in a gap give to its right and left neighbour, in place of the sums before and after it.

    Returns the :func:`_lever`, if requested.
    """
    decay, before, after, _ = sums
    lever, gap, to_right, to_left = 0.0, 0, 0.0, 0.0
    for start in range(0, g.shape[0], STRETCH):
        part, here = g[start : start + STRETCH], gaps[start : start + STRETCH]
        look_around(decay, before, after, origin, start, here, at)
        if with_scale:
            lever += _lever(part, here, at, anchors)
        _weigh(part, at)
        last = here[here.shape[0] - 1]
        kept = before[last], after[last]  # kept for points of the next stretch in the same gap
        before[gap:last] = after[gap:last] = 0.0
        before[gap], after[gap] = to_right, to_left
        for i in range(part.shape[0]):
            again = 1.0 if here[i] == gap else 0.0
            gap = here[i]
            to_right, to_left = at.near[i] + again * to_right, at.far[i] + again * to_left
            before[gap], after[gap] = to_right, to_left
        before[last], after[last] = kept
    before[gap:] = after[gap:] = 0.0
    before[gap], after[gap] = to_right, to_left
    return lever
