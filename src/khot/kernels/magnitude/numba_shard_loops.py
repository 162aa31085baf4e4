"""The loops of the magnitudes for rows of which this process holds a part, one for each step between two reductions.

They run over pieces of rows, see :mod:`khot.kernels.numba_pieces`, with the arithmetic of the loops over whole rows.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any, NamedTuple

import numpy as np

from ..numba_math import Real
from ..numba_pieces import number, piece, row_of
from ..numba_rows import CHUNK, REALS_AT, doubles_at
from ..numba_tools import kernel, specialised
from .numba_loops import Chunks, Compiled, chunks_of


class ShardLoops(NamedTuple):
    """Kernels over pieces, see :func:`khot.kernels.numba_tools.kernel`.

    Attributes:
        look: ``(..., n, x, q, found)``: five numbers a piece, a :class:`~.numba_loops.Row`.
        sums: ``(..., n, x, t, strength, q, found)``: capped entries, and the sums of F and F' of the others.
        values: ``(..., n, x, anchor, offset, strength, q, y)``.
        slopes: ``(..., n, x, anchor, offset, strength, q, g, found)``: the weight W and the pull <f, g>.
        gradient: ``(..., n, x, anchor, offset, strength, q, g, mean, grad, found)``: dL/dx, a share of dL/dstrength.
    """

    look: Compiled
    sums: Compiled
    values: Compiled
    slopes: Compiled
    gradient: Compiled


@functools.cache
def shard_loops(variant: str, real: Real) -> ShardLoops:
    """The loops for exponents of a variant, see :func:`khot.kernels.magnitude.numba_loops.variant_of`."""
    chunks = chunks_of(variant, real)
    with specialised(f"{variant} {real.__name__}"):
        loops = *_forward(chunks, real), *_backward(chunks, real)
        return ShardLoops(*map(kernel, loops))


def _forward(chunks: Chunks, real: Real) -> tuple[Any, Any, Any]:
    """``look``, ``sums`` and ``values``."""
    reals_at, (look_at, sums_of, place, fill_roots, fill, _, _) = REALS_AT[real], chunks

    def look(first, last, n, x, q, found):
        out = doubles_at(found, last, 5)
        for p in range(first, last):
            row = look_at(piece(reals_at, x, n, p))
            out[p, 0], out[p, 1], out[p, 2] = row.nonzero, row.smallest, row.largest
            out[p, 3], out[p, 4] = row.mean, row.variance
        return 0

    def sums(first, last, n, x, t, strength, q, found):
        out = doubles_at(found, last, 3)
        for p in range(first, last):
            r = row_of(n, p)
            above, total, slope = sums_of(piece(reals_at, x, n, p), number(t, r), number(strength, r), q)
            out[p, 0], out[p, 1], out[p, 2] = above, total, slope
        return 0

    def values(first, last, n, x, anchor, offset, strength, q, y):
        for p in range(first, last):
            r = row_of(n, p)
            s, entries, out = number(strength, r), piece(reals_at, x, n, p), piece(reals_at, y, n, p)
            t, at = place(number(anchor, r), number(offset, r), s, q)
            for i in range(0, entries.shape[0], CHUNK):
                some, result = entries[i : i + CHUNK], out[i : i + CHUNK]
                fill_roots(some, real(s), real(q), result)
                fill(some, at, real(t), real(s), q, result)
        return 0

    return look, sums, values


def _backward(chunks: Chunks, real: Real) -> tuple[Any, Any]:
    """``slopes`` and ``gradient``."""
    reals_at, (_, _, place, fill_roots, _, slopes_of, pull_back) = REALS_AT[real], chunks

    def slopes(first, last, n, x, anchor, offset, strength, q, g, found):
        out, scratch = doubles_at(found, last, 2), np.empty(min(n, CHUNK), real)
        for p in range(first, last):
            r = row_of(n, p)
            s, entries, cotangents = number(strength, r), piece(reals_at, x, n, p), piece(reals_at, g, n, p)
            t, at = place(number(anchor, r), number(offset, r), s, q)
            ratio = s * t ** (1 / q - 1) if t > 0 else 1.0
            out[p] = 0.0
            for i in range(0, entries.shape[0], CHUNK):
                some = entries[i : i + CHUNK]
                total, shares, pull = slopes_of(some, at, cotangents[i : i + CHUNK], q, scratch[: some.shape[0]])
                out[p, 0] += total + ratio * shares
                out[p, 1] += pull
        return 0

    def gradient(first, last, n, x, anchor, offset, strength, q, g, mean, grad, found):
        of_strength, roots = doubles_at(found, last, 1), np.empty(min(n, CHUNK), real)
        for p in range(first, last):
            r = row_of(n, p)
            s, entries, cotangents = number(strength, r), piece(reals_at, x, n, p), piece(reals_at, g, n, p)
            t, at = place(number(anchor, r), number(offset, r), s, q)
            rate = real(t ** (1 - 1 / q) / s) if t > 0 else real(1)
            out, levers, own = piece(reals_at, grad, n, p), 0.0, 0.0
            for i in range(0, entries.shape[0], CHUNK):
                some, given, result = entries[i : i + CHUNK], cotangents[i : i + CHUNK], out[i : i + CHUNK]
                u = roots[: some.shape[0]]
                slopes_of(some, at, given, q, result)
                fill_roots(some, real(s), real(q), u)
                v, w = pull_back(some, at, given, u, real(number(mean, r)), rate, real(s), real(q), result)
                levers += v
                own += w
            of_strength[p, 0] = -(t / s) * levers - own
        return 0

    return slopes, gradient
