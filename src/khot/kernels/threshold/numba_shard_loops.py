"""The loops for rows of which this process holds a part, one for each step between two reductions.

Arithmetic is that of :mod:`khot.kernels.threshold.numba_loops` forward. Backward it is float64, as no process can
centre cotangents a second time without one more reduction.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import NamedTuple

import numpy as np

from ..links.base import Link
from ..links.base_numba import NumbaLink, numba_link, variant_of
from ..numba_math import Real
from ..numba_pieces import number, piece, row_of
from ..numba_rows import CHUNK, REALS_AT, distance, doubles_at, look
from ..numba_tools import inlined, kernel, specialised, summed
from .numba_loops import Compiled, tail_sums


class ShardLoops(NamedTuple):
    """Kernels over pieces, see :func:`khot.kernels.numba_tools.kernel`, of which some differ for the logarithm.

    Attributes:
        sums: ``(..., n, x, t, scale, q, sums)``: what the root finder sums up at t, four numbers a piece.
        values: ``(..., n, x, anchor, offset, scale, q, y)``: y or log y.
        slopes: ``(..., n, x, anchor, offset, scale, q, g, sums)``: with the slopes w and d = w g, or of the logarithm
            d = g F' / F, the sums of w, d, w z and d z.
        gradient: ``(..., n, x, anchor, offset, scale, q, g, mean, grad)``: (d - mean w) / scale.
    """

    sums: Compiled
    values: Compiled
    slopes: Compiled
    gradient: Compiled


def shard_loops(link: Link, real: Real, log: bool) -> ShardLoops:
    """The loops for a link that has a numba piece."""
    return _loops(type(link).__module__, variant_of(link), real, log)


@functools.cache
def _loops(module: str, variant: str, real: Real, log: bool) -> ShardLoops:
    with specialised(f"{variant} {real.__name__}{' log' if log else ''}"):
        backward = _backward(numba_link(module, variant, np.float64), real, log)
    return ShardLoops(_sums(module, variant, real), _values(module, variant, real, log), *backward)


@functools.cache
def spans(real: Real) -> Compiled:
    """``(..., n, x, found)``: what :func:`khot.kernels.numba_rows.look` finds, six numbers a piece.

    Ends of pieces without a finite item are infinite, as those of nothing are.
    """
    reals_at = REALS_AT[real]

    def span(first, last, n, x, found):
        out = doubles_at(found, last, 6)
        for p in range(first, last):
            selected, finite, low, high, mean, variance = look(piece(reals_at, x, n, p), True)
            if finite == 0:
                low, high = np.inf, -np.inf
            out[p, 0], out[p, 1], out[p, 2] = selected, finite, low
            out[p, 3], out[p, 4], out[p, 5] = high, mean, variance
        return 0

    with specialised(real.__name__):
        return kernel(span)


@functools.cache
def _sums(module: str, variant: str, real: Real) -> Compiled:
    reals_at = REALS_AT[real]

    def sums(first, last, n, x, t, scale, q, found):
        out = doubles_at(found, last, 4)
        for p in range(first, last):
            r = row_of(n, p)
            items = piece(reals_at, x, n, p)
            above, signed, total, slope = of_items(items, number(t, r), 1 / number(scale, r), q)
            out[p, 0], out[p, 1], out[p, 2], out[p, 3] = above, signed, total, slope
        return 0

    with specialised(f"{variant} {real.__name__}"):
        of_items = tail_sums(numba_link(module, variant, real), real)
        return kernel(sums)


@functools.cache
def _values(module: str, variant: str, real: Real, log: bool) -> Compiled:
    reals_at = REALS_AT[real]

    def values(first, last, n, x, anchor, offset, scale, q, y):
        for p in range(first, last):
            r = row_of(n, p)
            items, out = piece(reals_at, x, n, p), piece(reals_at, y, n, p)
            a, inverse, c = wide(number(anchor, r)), wide(1 / number(scale, r)), wide(number(offset, r))
            for i in range(items.shape[0]):
                out[i] = value(distance(wide(items[i]), a, inverse, c), q)
        return 0

    with specialised(f"{variant} {real.__name__}{' log' if log else ''}"):
        link = numba_link(module, variant, real)
        value, wide = link.log_value if log else link.value, link.distances or real
        return kernel(values)


def _backward(link: NumbaLink, real: Real, log: bool) -> tuple[Compiled, Compiled]:
    """The loops ``slopes`` and ``gradient``."""
    reals_at, slope, log_derivative = REALS_AT[real], link.slope, link.log_derivative

    if log:

        @inlined
        def direct(x, z, g, w, q):
            return log_derivative(z, q) * g if x > -np.inf else 0.0
    else:

        @inlined
        def direct(x, z, g, w, q):
            return w * g

    @summed
    def of_chunk(x, g, anchor, inverse, offset, q):
        density = pull = first = lever = 0.0
        for i in range(x.shape[0]):
            z = distance(np.float64(x[i]), anchor, inverse, offset)
            w = slope(z, q)
            d = direct(x[i], z, np.float64(g[i]), w, q)
            arm = z if abs(z) < np.inf else 0.0  # of masked items: 0 * z stays 0
            density += w
            pull += d
            first += w * arm
            lever += d * arm
        return density, pull, first, lever

    def slopes(first, last, n, x, anchor, offset, scale, q, g, found):
        out = doubles_at(found, last, 4)
        for p in range(first, last):
            r = row_of(n, p)
            items, cotangents = piece(reals_at, x, n, p), piece(reals_at, g, n, p)
            a, inverse, c = number(anchor, r), 1 / number(scale, r), number(offset, r)
            out[p] = 0.0
            for i in range(0, items.shape[0], CHUNK):
                w, d, wz, dz = of_chunk(items[i : i + CHUNK], cotangents[i : i + CHUNK], a, inverse, c, q)
                out[p, 0] += w
                out[p, 1] += d
                out[p, 2] += wz
                out[p, 3] += dz
        return 0

    def gradient(first, last, n, x, anchor, offset, scale, q, g, mean, grad):
        for p in range(first, last):
            r = row_of(n, p)
            items, cotangents, out = piece(reals_at, x, n, p), piece(reals_at, g, n, p), piece(reals_at, grad, n, p)
            a, inverse, c, b = number(anchor, r), 1 / number(scale, r), number(offset, r), number(mean, r)
            for i in range(items.shape[0]):
                z = distance(np.float64(items[i]), a, inverse, c)
                w = slope(z, q)
                out[i] = (direct(items[i], z, np.float64(cotangents[i]), w, q) - w * b) * inverse
        return 0

    return kernel(slopes), kernel(gradient)
