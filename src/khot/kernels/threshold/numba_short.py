"""Masks of short rows in numba: ``LANES`` rows side by side, each in a lane of the vectors.

Nothing is summed across lanes, and every lane does the same arithmetic, so that the result of a row depends neither on
its place among the lanes nor on its neighbours.

Lanes of short rows are quickly sorted. If k is an integer, the threshold of a hard mask lies in the gap between the
k-th largest item and the next one; otherwise at one item, a gap of width 0. From there Newton's method takes two to
five steps, however soft the mask is. During the search, z is relative to a place in this gap, and a gap in which all
tails are negligible or exponential is narrowed, so that they do not underflow.

A row that a lane does not solve is left to the loop over rows in :mod:`.numba_loops`.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import by_lanes, inlined
from ..cpu.maths import LOG, Real
from ..cpu.rows import REALS_AT, Origin, bytes_at, distance, doubles_at, of_row
from ..cpu.short_rows import LANES, gather_rows, scatter_rows, sort_rows
from ..links.base_numba import Compiled, NumbaLink
from .numba_masks import HUGE, SMALL, settle, settles
from .numba_root import JUST_ABOVE, LAST_UNITS, NARROWEST, WIDE, WIDEST

SHORT = 32  # items up to which a row is short
STEPS = 16  # two to five are usual
WIDE_OF_POWER = 3.0  # scales of a gap in which the threshold of a power is one scale above the item below


class _Block(NamedTuple):
    """Arrays of one number for each lane. Sums over items have the dtype of z, numbers of a row are float64."""

    k: Any
    s: Any
    offset: Any  # the threshold, first in scales from a place in the gap, finally as an offset from the anchor
    anchor: Any
    low: Any  # the bracket of the search
    high: Any
    is_open: Any  # whether the search goes on
    is_left: Any  # whether the row is left to other code
    size: Any  # k, for comparison with ranks
    inverse: Any  # one over the softness
    right: Any  # the item above the gap
    left: Any  # the item below it
    up: Any  # scales from the place in the gap to the end above
    down: Any  # and to the end below
    shift: Any  # the offset
    above: Any  # the number of items above the threshold
    below: Any  # the sum of tails below the threshold
    beyond: Any  # and above it
    slope: Any


@inlined
def _block(wide):
    a, b, c = np.empty((6, LANES)), np.empty((2, LANES), np.bool_), np.empty((11, LANES), wide)
    return _Block(a[0], a[1], a[2], a[3], a[4], a[5], b[0], b[1],
                  c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10])  # fmt: skip


def _opener(link: NumbaLink, real: Real) -> Compiled:
    """``(x, items, z, at)``: sorts copies of the items of a block, and writes their z from a place in the gap."""
    wide, infinity, reach = link.distances or real, real(np.inf), link.of.reach
    is_power, is_exponential = link.of.reaches_zero and link.of.compact, link.of.compact and not link.of.reaches_zero
    widest = wide(WIDE_OF_POWER if is_power else WIDE)
    start = -0.5 if is_power else JUST_ABOVE if is_exponential else 0.0
    zero, half, one = wide(0), wide(0.5), wide(1)

    @by_lanes
    def open_block(x, items, z, at):
        n, lanes = x.shape
        for i in range(LANES):
            at.above[i] = zero
        for j in range(n):
            for i in range(lanes):  # not LANES, with which a compiler would unroll the loop instead
                items[j, i] = x[j, i]
                at.above[i] += zero if x[j, i] == x[j, i] else one
        sort_rows(items)
        for i in range(LANES):
            k, s = at.k[i], at.s[i]
            first, second = min(max(math.ceil(k) - 1, 0.0), n - 1.0), min(max(math.floor(k), 0.0), n - 1.0)
            right, left = items[int(first), i], items[int(second), i]
            is_end = (k == 0) | (k == n) | ((k == second) & (left == -infinity))
            left = right if is_end else left
            is_finite = (at.above[i] == zero) & (-infinity < left) & (right < infinity)
            good = is_finite & (k >= 0) & (k <= n) & (s > NARROWEST) & (s < WIDEST)
            inverse = wide(1 / s)
            gap = min((wide(right) - wide(left)) * inverse, widest)
            up = zero if is_exponential else half * gap
            offset = (reach if k == 0 else -reach) if is_end else start
            at.right[i], at.left[i], at.up[i], at.down[i] = wide(right), wide(left), up, gap - up
            at.low[i], at.high[i], at.offset[i], at.shift[i] = up - gap - reach, up + reach, offset, wide(offset)
            at.is_left[i], at.is_open[i], at.inverse[i] = not good, good & (not is_end), inverse
        for j in range(n):
            rank = wide(j)
            for i in range(lanes):
                item, is_above = wide(items[j, i]), rank < at.size[i]
                right, left, up, down = at.right[i], at.left[i], at.up[i], at.down[i]
                z[j, i] = (item - (right if is_above else left)) * at.inverse[i] + (up if is_above else -down)

    return open_block


def _step_of(link: NumbaLink, real: Real) -> Compiled:
    """``(below, beyond, slope, excess, k, q)``: a step, a number with the sign of the residual, whether it is the last.

    The formulas are those of :mod:`khot.kernels.threshold.residual`.
    """
    wide = link.distances or real
    log, zero, newton_step, eps = LOG[wide], wide(0), link.newton_step, float(np.finfo(real).eps)
    tolerance, least = 0.5 * eps**0.5, eps / 8

    @inlined
    def of_smooth(below, beyond, slope, excess, k, q):
        a, b = below + max(wide(excess), zero), beyond + max(wide(-excess), zero)
        g = log(a / b)
        move = g * (below + beyond) / (slope * (below / a + beyond / b))
        return move, g, abs(move) <= tolerance

    @inlined
    def of_compact(below, beyond, slope, excess, k, q):
        below, slope = np.float64(below), np.float64(slope)
        residual = below + excess
        move = newton_step(below, below, slope, excess, k, q)
        found = abs(residual) <= max(1 + q, LAST_UNITS) * eps * (below + abs(excess))
        found |= (excess >= 0) & (residual <= least)  # next to a sum of 1 or more
        return 0.0 if found & (excess >= 0) else move, residual, found

    return of_compact if link.of.compact else of_smooth


def _searcher(link: NumbaLink, real: Real) -> Compiled:
    """``(z, at, q)``: the search, up to ``STEPS`` steps."""
    terms, wide, step = link.terms, link.distances or real, _step_of(link, real)

    @by_lanes
    def add_up(z, at, q):
        for i in range(LANES):
            at.above[i] = at.below[i] = at.beyond[i] = at.slope[i] = wide(0)
        for j in range(z.shape[0] - 1, -1, -1):  # small terms first, which a large sum would round away
            for i in range(LANES):
                above, tail, rate = terms(z[j, i] - at.shift[i], q)
                at.above[i] += above
                at.below[i] += tail - above * tail
                at.beyond[i] += above * tail
                at.slope[i] += rate

    @by_lanes
    def take_step(at, q):
        """Returns how many lanes go on."""
        open_lanes = 0
        for i in range(LANES):
            t, excess = np.float64(at.shift[i]), np.float64(at.above[i]) - at.k[i]
            move, residual, found = step(at.below[i], at.beyond[i], at.slope[i], excess, at.k[i], q)
            low, high, before, is_open = at.low[i], at.high[i], at.offset[i], at.is_open[i]
            low, high = t if residual > 0 else low, high if residual > 0 else t
            there = t + move if found | ((low < t + move) & (t + move < high)) else 0.5 * low + 0.5 * high
            at.low[i], at.high[i] = low, high
            there = there if is_open else before
            at.offset[i], at.shift[i] = there, wide(there)
            is_open = is_open & (not found)
            at.is_open[i] = is_open
            open_lanes += is_open
        return open_lanes

    @by_lanes
    def search(z, at, q):
        for _ in range(STEPS):
            add_up(z, at, q)
            if take_step(at, q) == 0:
                break

    return search


def _finisher(link: NumbaLink, log: bool, real: Real) -> Compiled:
    """``(x, at, q)``: thresholds, and values in place of the items."""
    value, wide = link.log_value if log else link.value, link.distances or real
    compact, is_power = link.of.compact, link.of.reaches_zero and link.of.compact
    huge = HUGE[real] if log else np.inf

    @by_lanes
    def finish(x, at, q):
        for i in range(LANES):
            left, right, down = np.float64(at.left[i]), np.float64(at.right[i]), np.float64(at.down[i])
            anchor = left if is_power else right if compact else np.float64(real(0.5 * left + 0.5 * right))
            offset = at.offset[i] + (down if is_power else 0.0)
            if not compact:
                offset += 0.5 * ((left - anchor) + (right - anchor)) / at.s[i]
            at.anchor[i], at.offset[i], at.left[i], at.shift[i] = anchor, offset, wide(anchor), wide(offset)
            is_near = (abs(real(offset)) < np.inf) & (abs(anchor) < huge)  # otherwise z may overflow
            at.is_left[i] = at.is_left[i] | at.is_open[i] | (not is_near)
        for j in range(x.shape[0]):
            for i in range(LANES):
                x[j, i] = value(distance(wide(x[j, i]), Origin(at.left[i], at.inverse[i], at.shift[i])), q)

    return finish


def short_mask(link: NumbaLink, log: bool, real: Real) -> Any:
    """The loop of masks, or of their logarithms, with the arguments of that in :mod:`.numba_loops`."""
    reals_at, wide = REALS_AT[real], link.distances or real
    may_settle = settles(link, log, real)
    open_block, search, finish = _opener(link, real), _searcher(link, real), _finisher(link, log, real)

    def short_rows(first, last, n, x, k, scale, y, threshold, left, law):
        xs, ys = reals_at(x[0], last, n), reals_at(y, last, n if y.size else 0)
        anchors, offsets = doubles_at(threshold[0], 1, last)[0], doubles_at(threshold[1], 1, last)[0]
        is_left, count, at = bytes_at(left, 1, last)[0], 0, _block(wide)
        block, items, z = np.empty((n, LANES), real), np.empty((n, LANES), real), np.empty((n, LANES), wide)
        for start in range(first, last, LANES):
            if start == first or k.size > 1 or scale.size > 1:
                for i in range(LANES):
                    r = min(start + i, last - 1)
                    at.k[i], at.s[i] = of_row(k, r), of_row(scale, r)
                    at.size[i] = wide(at.k[i])
            gather_rows(xs, start, last, block)
            open_block(block, items, z, at)
            search(z, at, law[0])
            finish(block, at, law[0])
            for i in range(min(LANES, last - start)):
                r = start + i
                anchors[r], offsets[r], is_left[r] = at.anchor[i], at.offset[i], at.is_left[i]
                count += at.is_left[i]
            if y.size:
                for i in range(LANES):
                    if may_settle and at.k[i] < SMALL:
                        settle(block[:, i], at.k[i])
                scatter_rows(ys, start, last, block)
        return count

    return short_rows
