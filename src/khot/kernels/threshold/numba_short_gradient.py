"""Derivatives of masks of short rows in numba, side by side as in :mod:`.numba_short`.

The formulas are those of :mod:`.numba_masks`. A row in a gap whose slopes underflow is left to the loop over rows if
they matter, and so is a row of logarithms in which much cancels.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import numpy as np

from ..cpu.lanes import at, every, if_positive, put
from ..cpu.loops import by_lanes, inlined
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, Origin, bytes_at, distance, doubles_at, of_row
from ..cpu.short_rows import LANES, gather_rows, scatter_rows
from ..links.base_numba import Compiled, NumbaLink
from .numba_masks import CANCELLED, DOMINANT, HUGE
from .numba_root import NARROWEST, WIDEST


class _Block(NamedTuple):
    """Arrays of one number for each lane; of the dtype of the items unless it says otherwise."""

    anchor: Any
    inverse: Any  # one over the softness
    offset: Any
    factor: Any  # of the derivatives: the same, or 1 if their levers are wanted
    total: Any  # the sum of slopes
    pull: Any  # the sum of slopes times cotangents
    largest: Any  # the largest slope
    farthest: Any  # the largest size of a derivative
    mean: Any  # the quotient of pull and total
    rest: Any  # what remains of it after it has been subtracted
    lever: Any  # the sum of z dL/dz, float64
    is_left: Any  # bool


@inlined
def _block(real):
    a = np.empty((10, LANES), real)
    return _Block(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], np.empty(LANES), np.empty(LANES, np.bool_)
    )


def _slopes_of(link: NumbaLink, log: bool, real: Real) -> Compiled:
    """``(x, g, w, block, q)``: writes slopes w; cotangents of logarithms become those of the values."""
    slope, log_derivative, zero = link.slope, link.log_derivative, real(0)

    @by_lanes
    def find_slopes(x, g, w, block, q):
        for j in range(x.shape[0]):
            for i in range(x.shape[1]):  # not LANES, with which a compiler would unroll the loop instead
                z = distance(x[j, i], Origin(block.anchor[i], block.inverse[i], block.offset[i]))
                w[j, i] = slope(z, q)
                if log:
                    g[j, i] = log_derivative(z, q) * g[j, i] if x[j, i] > -np.inf else zero

    return find_slopes


def _differentiator(link: NumbaLink, log: bool, real: Real) -> Compiled:
    """``(g, w, block, with_k)``: dL/dz times a factor in place of w; which rows are left."""
    smallest, dominant = real(np.finfo(real).tiny / np.finfo(real).eps), real(DOMINANT)
    vanishes, nothing = link.of.compact and link.of.reaches_zero, real(0)

    @by_lanes
    def differentiate(g, w, block, with_k):
        total = pull = largest = rest = others = farthest = zero = every(nothing)
        least = every(nothing if log or (with_k and not vanishes) else smallest)
        for j in range(g.shape[0]):
            f = at(w, j)
            total = total + f
            pull = pull + (at(g, j) if log else f * at(g, j))
            if log:
                largest = if_positive(f - largest, f, largest)
        total = if_positive(total - least, total, least)
        mean, top, factor = pull / total, every(dominant) * total, at(block.factor, 0)
        if not log:  # again, since nearly equal cotangents lose digits in the first pass
            for j in range(g.shape[0]):
                rest = rest + at(w, j) * (at(g, j) - mean)
            rest = rest / total
        for j in range(g.shape[0]):
            f = at(w, j)
            move = (at(g, j) - f * mean if log else f * ((at(g, j) - mean) - rest)) * factor
            others = others + if_positive(f - top, zero, move)
            put(g, j, move)
            if log:
                move = if_positive(move, move, zero - move)
                farthest = if_positive(move - farthest, move, farthest)
        for j in range(g.shape[0]):
            put(w, j, if_positive(at(w, j) - top, zero - others, at(g, j)))
        put(block.total, 0, total)
        put(block.pull, 0, pull)
        put(block.largest, 0, largest)
        put(block.farthest, 0, farthest)
        put(block.mean, 0, mean)
        put(block.rest, 0, rest)

    return differentiate


@by_lanes
def _pull_levers(x, w, block):
    """The sums of z dL/dz in float64, in which no product overflows; infinite items have no slope."""
    for i in range(LANES):
        block.lever[i] = 0.0
    for j in range(x.shape[0]):
        for i in range(x.shape[1]):
            z = np.float64(distance(x[j, i], Origin(block.anchor[i], block.inverse[i], block.offset[i])))
            block.lever[i] += (z if abs(z) < np.inf else 0.0) * np.float64(w[j, i])
            w[j, i] *= block.inverse[i]


def short_derivative(link: NumbaLink, log: bool, real: Real) -> Any:
    """The loop of the derivatives of masks, or of their logarithms, with the arguments of that in numba_loops."""
    reals_at, huge, one = REALS_AT[real], HUGE[real] if log else np.inf, real(1)
    smallest, cancelled = float(np.finfo(real).tiny) / float(np.finfo(real).eps), real(CANCELLED)
    find_slopes, differentiate = _slopes_of(link, log, real), _differentiator(link, log, real)

    def short_rows(first, last, n, x, scale, threshold, g, results, left, q):
        grad_x, grad_k, grad_scale = results
        xs, gs, grads = reals_at(x[0], last, n), reals_at(g, last, n), reals_at(grad_x, last, n)
        anchors, offsets = doubles_at(threshold[0], 1, last)[0], doubles_at(threshold[1], 1, last)[0]
        is_left, count, block = bytes_at(left, 1, last)[0], 0, _block(real)
        with_k, with_scale, blocks = grad_k.size > 0, grad_scale.size > 0, np.empty((3, n, LANES), real)
        items, pushes, slopes = blocks[0], blocks[1], blocks[2]
        for start in range(first, last, LANES):
            for i in range(LANES):
                r = min(start + i, last - 1)
                s, a = of_row(scale, r), anchors[r]
                block.anchor[i], block.inverse[i], block.offset[i] = real(a), real(1 / s), real(offsets[r])
                block.factor[i] = one if with_scale else block.inverse[i]
                block.is_left[i] = not ((s > NARROWEST) & (s < WIDEST) & (real(a) == a) & (abs(a) < huge))
            gather_rows(xs, start, last, items)
            gather_rows(gs, start, last, pushes)
            find_slopes(items, pushes, slopes, block, q)
            differentiate(pushes, slopes, block, with_k)
            if with_scale:
                _pull_levers(items, slopes, block)
            scatter_rows(grads, start, last, slopes)
            for i in range(min(LANES, last - start)):
                r = start + i
                if with_k:
                    doubles_at(grad_k, 1, last)[0, r] = np.float64(block.mean[i]) + np.float64(block.rest[i])
                if with_scale:
                    doubles_at(grad_scale, 1, last)[0, r] = -block.lever[i] / of_row(scale, r)
                is_lost = block.is_left[i] | (not (block.total[i] >= smallest))
                if log:
                    size = cancelled * block.factor[i] * (block.largest[i] / block.total[i]) * abs(block.pull[i])
                    is_lost |= block.farthest[i] < size
                is_left[r] = is_lost
                count += is_lost
        return count

    return short_rows
