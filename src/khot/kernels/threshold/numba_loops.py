"""The loops of the numba backend over rows, compiled for one link, one kind and one dtype.

A loop marks the rows that it has ``left`` to the exact path: those with NaN, with numbers or a softness near the limits
of the dtype, with what is to become an error, and those that the search of :mod:`.numba_root` does not solve.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any, NamedTuple

import numpy as np

from ..links.base import Link
from ..links.base_numba import Compiled, NumbaLink, numba_link, variant_of
from ..numba_math import Real
from ..numba_rows import CHUNK, REALS_AT, bytes_at, doubles_at, gather_finite, highest, of_row, scatter
from ..numba_tools import kernel, specialised
from ..rows import SAMPLE_SIZE
from . import numba_magnitudes as magnitudes
from . import numba_masks as masks
from .numba_root import FOUND, INFINITE, LOST, NARROWEST, NO_QUANTILES, WIDEST, Shape, fixed_scale, solver


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.numba_tools.kernel`."""

    mask: Compiled
    derivative: Compiled


class Kind(NamedTuple):
    """What differs between masks, their logarithms, signed masks and magnitudes.

    Attributes:
        solve: See :func:`.numba_root.solver`.
        fill: See :func:`.numba_masks.filler`.
        gradient: See :func:`.numba_masks.gradient_of`.
        absolute: Whether it is the absolute values of x that are compared with the threshold.
        grows: Whether the scale grows with the threshold.
        ends: The values for -inf and +inf.
    """

    solve: Compiled
    fill: Compiled
    gradient: Compiled
    absolute: bool
    grows: bool
    ends: tuple[Real, Real]


def loops_of(link: Link, kind: str, real: Real) -> Loops:
    """The loops for a link that has a numba piece."""
    shape = Shape(link.compact, link.reaches_zero, link.reach)
    return _loops(type(link).__module__, variant_of(link), shape, kind, real)


@functools.cache
def _loops(module: str, variant: str, shape: Shape, kind: str, real: Real) -> Loops:
    with specialised(f"{variant} {kind} {real.__name__}"):
        link, precise = numba_link(module, variant, real), numba_link(module, variant, np.float64)
        found = _kind(link, precise, variant, shape, kind, real)
        return Loops(kernel(_mask(found, real)), kernel(_derivative(found, real)))


@functools.cache
def _solver(link: NumbaLink, variant: str, shape: Shape, grows: bool, real: Real) -> Compiled:
    name = f"{variant}{' growing' if grows else ''}"
    with specialised(f"{name} {real.__name__}"):
        scale = magnitudes.growing_scale(variant, name, real) if grows else fixed_scale(name, link, shape, real)
        return solver(scale, link, shape, real)


def _kind(link: NumbaLink, precise: NumbaLink, variant: str, shape: Shape, kind: str, real: Real) -> Kind:
    solve = _solver(link, variant, shape, kind == "magnitude", real)
    if kind == "magnitude":
        fill, gradient = magnitudes.filler(link, variant, real), magnitudes.gradient_of(link, variant, real)
    elif kind == "log_mask":
        fill, gradient = masks.filler(link, shape, kind, real), masks.log_gradient_of(link, precise, variant, real)
    else:
        fill, gradient = masks.filler(link, shape, kind, real), masks.gradient_of(link, shape, kind, variant, real)
    ends = (real(-np.inf), real(0)) if kind == "log_mask" else (real(0), real(1))
    return Kind(solve, fill, gradient, kind in ("signed", "magnitude"), kind == "magnitude", ends)


def _mask(kind: Kind, real: Real) -> Any:
    (solve, fill, _, absolute, grows, ends), reals_at = kind, REALS_AT[real]

    def mask(first, last, n, x, k, one_k, scale, one_scale, y, anchor, offset, left, q, centre, spread):
        xs, ys = reals_at(x, last, n), reals_at(y, last, n if y != 0 else 0)
        anchors, offsets = doubles_at(anchor, 1, last)[0], doubles_at(offset, 1, last)[0]
        is_left, known, count = bytes_at(left, 1, last)[0], NO_QUANTILES, 0
        buffer = np.empty(n + 2 * SAMPLE_SIZE, real)
        items, sample = buffer[:n], buffer[n:]
        for r in range(first, last):
            row, size, s, finite = xs[r], of_row(k, one_k, r), of_row(scale, one_scale, r), n
            if absolute:
                for i in range(n):
                    items[i] = abs(xs[r, i])
                row = items
            a, c, how, known = solve(row, size, s, q, centre, spread, sample, known)
            if how == INFINITE and not absolute:
                # By its finite items alone, so that the others change no bit of their values.
                finite, selected = gather_finite(row, items)
                if finite > 0:
                    row, size = items[:finite], size - selected
                    a, c, how, known = solve(row, size, s, q, centre, spread, sample, known)
            if grows:
                how = how if (a > magnitudes.SMALLEST or a == 0) and highest(items) < magnitudes.LARGEST else LOST
            elif absolute and a + c * s <= 0:
                a = c = 0.0
            if how == FOUND and y != 0:
                if finite < n:
                    fill(row, size, a, c, s, q, row)
                    scatter(xs[r], row, ends, ys[r])
                else:
                    fill(xs[r], size, a, c, s, q, ys[r])
            anchors[r], offsets[r], is_left[r] = a, c, how != FOUND
            count += how != FOUND
        return count

    return mask


def _derivative(kind: Kind, real: Real) -> Any:
    gradient, grows, reals_at = kind.gradient, kind.grows, REALS_AT[real]

    def derivative(first, last, n, x, scale, one_scale, anchor, offset, g, grad_x, grad_k, grad_scale, left, q):
        xs, gs, grads = reals_at(x, last, n), reals_at(g, last, n), reals_at(grad_x, last, n)
        count, is_left, buffer = 0, bytes_at(left, 1, last)[0], np.empty(min(n, CHUNK) if grows else 0, real)
        for r in range(first, last):
            s, a, c = of_row(scale, one_scale, r), of_row(anchor, 0.0, r), of_row(offset, 0.0, r)
            of_k, of_scale, done = 0.0, 0.0, NARROWEST < s < WIDEST and real(a) == a
            if done:
                with_k, with_scale = grad_k != 0, grad_scale != 0
                of_k, of_scale, done = gradient(xs[r], gs[r], a, c, s, q, with_k, with_scale, buffer, grads[r])
            is_left[r] = not done
            count += not done
            if grad_k != 0:
                doubles_at(grad_k, 1, last)[0, r] = of_k
            if grad_scale != 0:
                doubles_at(grad_scale, 1, last)[0, r] = of_scale
        return count

    return derivative
