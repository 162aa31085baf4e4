"""The loops of the numba backend over rows, for one link, one dtype, and masks, their logarithms or magnitudes.

A loop computes the rows that are marked, and unmarks all except those that it leaves to the exact path: rows with NaN,
with numbers or a softness near the limits of the dtype, with contents that will raise an error, and those that the
search of :mod:`.numba_root` does not solve. The loops of short rows, if there are any, come before the others.

Its arguments are numbers and flat arrays, empty ones for results that are not wanted. k and the softness are arrays
of one number or of one for each row. Tuples group arguments that belong together: the scores and whether their
absolute values count, as signed masks share the loops of masks; the anchors and the offsets of the thresholds; the
results of a derivative; the law of the link, see :attr:`khot.kernels.links.base.Link.numbers`.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import kernel, specialised
from ..cpu.maths import Real
from ..cpu.rows import CHUNK, REALS_AT, bytes_at, doubles_at, gather_finite, highest, of_row, scatter
from ..links.base import Link
from ..links.base_numba import Compiled, numba_link, variant_of
from . import numba_magnitudes as magnitudes
from . import numba_masks as masks
from .kinds import KINDS, MASK, SIGNED, Kind
from .numba_root import FOUND, INFINITE, LOST, NARROWEST, NO_QUANTILES, SAMPLE_SIZE, WIDEST, Place, fixed_scale, solver
from .numba_short import short_mask
from .numba_short_gradient import short_derivative


class Loops(NamedTuple):
    """Kernels, see :func:`khot.kernels.cpu.loops.kernel`."""

    mask: Compiled
    derivative: Compiled
    gradient: Compiled  # the derivative in the scores alone
    threshold: Compiled = None  # the derivative of the offset, for masks
    short_mask: Compiled = None  # of short rows, all of them; it leaves some to the other loop
    short_derivative: Compiled = None


def loops_of(link: Link, kind: str, real: Real) -> Loops:
    """The loops for a link that has a numba piece."""
    if kind == SIGNED.name:
        return _loops(type(link), variant_of(link), MASK, real)._replace(short_mask=None, short_derivative=None)
    return _loops(type(link), variant_of(link), KINDS[kind], real)


@functools.cache
def _loops(of: type[Link], variant: str, kind: Kind, real: Real) -> Loops:
    link, precise = numba_link(of, variant, real), numba_link(of, variant, np.float64)
    solve = _solver(of, variant, kind.grows, real)
    name = f"{variant} {kind.name} {real.__name__}"
    with specialised(name):
        if kind.grows:
            fill, gradient = magnitudes.filler(link, variant, real), magnitudes.gradient_of(link, variant, real)
        else:
            fill = masks.filler(link, kind.log, real)
            gradient = masks.log_gradient_of(link, precise, real) if kind.log else masks.gradient_of(link, real, False)
        mask, derivative = kernel(_mask(solve, fill, kind, real)), kernel(_derivative(gradient, kind, real))
        found = Loops(mask, derivative, derivative)
        if not kind.grows and real is np.float32:
            short = kernel(short_mask(link, kind.log, real)), kernel(short_derivative(link, kind.log, real))
            found = found._replace(short_mask=short[0], short_derivative=short[1])
    if kind == MASK:
        with specialised(f"{name} of the threshold"):
            gradient = masks.threshold_gradient_of(precise, real)
            found = found._replace(threshold=kernel(_derivative(gradient, kind, real, of_items=False)))
    if kind == MASK and not (of.compact and of.reaches_zero):
        with specialised(f"{name} of scores"):
            found = found._replace(gradient=kernel(_derivative(masks.gradient_of(link, real, True), kind, real)))
    return found


@functools.cache
def _solver(of: type[Link], variant: str, grows: bool, real: Real) -> Compiled:
    link, name = numba_link(of, variant, real), f"{variant} growing" if grows else variant
    with specialised(f"{name} {real.__name__}"):
        scale = magnitudes.growing_scale(variant, name, real) if grows else fixed_scale(name, link, real)
        return solver(scale, link, real)


def _mask(solve: Compiled, fill: Compiled, kind: Kind, real: Real) -> Any:
    """The loop of a map. For odd maps the row consists of absolute values, and the results get the signs."""
    grows, reals_at, is_ordinary = kind.grows, REALS_AT[real], magnitudes.ordinary_place(real)
    ends, huge = (real(-np.inf), real(0)) if kind.log else (real(0), real(1)), masks.HUGE[real] if kind.log else np.inf

    def mask(first, last, n, x, k, scale, y, threshold, left, law):
        absolute = x[1]
        xs, ys = reals_at(x[0], last, n), reals_at(y, last, n if y.size else 0)
        anchors, offsets = doubles_at(threshold[0], 1, last)[0], doubles_at(threshold[1], 1, last)[0]
        is_left, known, count = bytes_at(left, 1, last)[0], NO_QUANTILES, 0
        buffer = np.empty(n + 2 * SAMPLE_SIZE, real)
        items, sample = buffer[:n], buffer[n:]
        for r in range(first, last):
            if not is_left[r]:
                continue
            row, size, s, finite = xs[r], of_row(k, r), of_row(scale, r), n
            if absolute:
                for i in range(n):
                    items[i] = abs(xs[r, i])
                row = items
            a, c, how, known = solve(row, size, s, law, sample, known)
            if how == INFINITE and not absolute:
                # From its finite items only, so that the others change no bit of the values.
                finite, selected = gather_finite(row, items)
                if finite > 0:
                    row, size = items[:finite], size - selected
                    a, c, how, known = solve(row, size, s, law, sample, known)
            if grows:
                how = how if is_ordinary(a, s, law[0]) and highest(items) < magnitudes.LARGEST else LOST
            elif absolute and a + c * s <= 0:
                a = c = 0.0
            if not (abs(real(c)) < np.inf and abs(a) < huge):  # z may overflow in this dtype
                how = LOST
            if how == FOUND and y.size:
                fill(row, size, Place(a, c, s, law[0]), ys[r, :finite])
                if finite < n:
                    scatter(xs[r], finite, ends, ys[r])
                if absolute:
                    for i in range(n):
                        ys[r, i] = ys[r, i] if xs[r, i] > 0 else -ys[r, i]
            anchors[r], offsets[r], is_left[r] = a, c, how != FOUND
            count += how != FOUND
        return count

    return mask


def _derivative(gradient: Compiled, kind: Kind, real: Real, of_items: bool = True) -> Any:
    """The loop of the derivatives of a map, from a cotangent for each item, or of the offset."""
    grows, reals_at, huge = kind.grows, REALS_AT[real], masks.HUGE[real] if kind.log else np.inf

    def derivative(first, last, n, x, scale, threshold, g, results, left, q):
        absolute, (grad_x, grad_k, grad_scale) = x[1], results
        xs, gs = reals_at(x[0], last, n), reals_at(g, last, n) if of_items else doubles_at(g, last, 1)
        grads = reals_at(grad_x, last, n)
        anchors, offsets = doubles_at(threshold[0], 1, last)[0], doubles_at(threshold[1], 1, last)[0]
        count, is_left, with_k, with_scale = 0, bytes_at(left, 1, last)[0], grad_k.size > 0, grad_scale.size > 0
        buffer = np.empty(2 * n + CHUNK if absolute else 0, real)
        items, pushes, roots = buffer[:n], buffer[n : 2 * n], buffer[2 * n :]
        for r in range(first, last):
            if not is_left[r]:
                continue
            row, push, out = xs[r], gs[r], grads[r]
            if absolute:
                for i in range(n):
                    items[i] = abs(row[i])
                row = items
                if of_items:
                    for i in range(n):
                        pushes[i] = push[i] if xs[r, i] > 0 else -push[i]
                    push = pushes
            s, a, c = of_row(scale, r), anchors[r], offsets[r]
            idle = absolute and not grows and a == 0 and c == 0
            done = NARROWEST < s < WIDEST and real(a) == a and abs(a) < huge
            if done:
                place = Place(a, c, s, q)
                of_k, of_scale, done = gradient(row, push, place, idle, with_k, with_scale, roots, out)
                if with_k:
                    doubles_at(grad_k, 1, last)[0, r] = of_k
                if with_scale:
                    doubles_at(grad_scale, 1, last)[0, r] = of_scale
            if absolute:
                for i in range(n):
                    out[i] = out[i] if xs[r, i] > 0 else -out[i]
            is_left[r] = not done
            count += not done
        return count

    return derivative
