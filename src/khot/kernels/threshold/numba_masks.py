"""Masks of one row at its threshold in numba, and their first derivatives: formulas of :mod:`khot.kernels.threshold`.

The signed mask is the mask of abs(x) with the signs of x, whose threshold is idle, and no function of x, where it is 0.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..links.base_numba import Compiled, NumbaLink
from ..numba_math import Real
from ..numba_rows import CHUNK, difference, distance, dot, highest, lowest, total_of
from ..numba_tools import inlined, per_row, summed
from .numba_counting import place_of
from .numba_gaps import far_shares_of
from .numba_root import Shape

CANCELLED = 2**-6  # of what is pulled: how much has to be left of it in float32
DOMINANT = 0.75  # share of the slopes above which what an item pulls itself may cancel what it is pulled
SMALL = 0.5  # a sum k so small that no entry which is scaled to make up for rounding gets to 1
SLIGHT = 2**-10  # relative, at most, what is made up for


def filler(link: NumbaLink, shape: Shape, kind: str, real: Real) -> Compiled:
    """``(x, k, anchor, offset, s, q, y)``: the mask of finite items."""
    value, wide = link.log_value if kind == "log_mask" else link.value, link.distances or real
    settles = real is np.float32 and kind == "mask" and not (shape.compact and shape.reaches_zero)
    signed = kind == "signed"

    @per_row
    def fill(x, k, anchor, offset, s, q, y):
        a, inverse, c = wide(anchor), wide(1 / s), wide(offset)
        for i in range(x.shape[0]):
            if signed:
                y[i] = math.copysign(value(distance(wide(abs(x[i])), a, inverse, c), q), x[i])
            else:
                y[i] = value(distance(wide(x[i]), a, inverse, c), q)
        if settles and k < SMALL:
            _settle(y, k)

    return fill


@per_row
def _settle(y, k):
    """Scales a mask so small that no entry can reach its cap, and far out in a tail, where all share the rounding of z.

    There a change of the threshold multiplies the entries of one tail by about the same.
    """
    rate = np.float32(k / total_of(y) - 1)
    if 0 < abs(rate) < SLIGHT:
        for i in range(y.shape[0]):
            y[i] += rate * y[i]


# ---- Derivatives


def _finisher(kind: str, real: Real) -> Compiled:
    """``(x, anchor, inverse, offset, top, with_scale, out)``: dL/ds; dL/dx in ``out``, in the place of dL/dz.

    The sum of dL/dz is 0, and the entry ``top`` minus the sum of the others, if there is one that has nearly all of the
    slopes: by itself it may be the difference of two numbers that agree in all their digits.
    """
    signed, zero = kind == "signed", real(0)

    @summed
    def lever(x, anchor, inverse, offset, grad):
        """The sum of z dL/dz in float64, where no product overflows; infinite items have no slope."""
        total = 0.0
        for i in range(x.shape[0]):
            z = np.float64(distance(abs(x[i]) if signed else x[i], anchor, inverse, offset))
            total += (z if abs(z) < np.inf else 0.0) * np.float64(grad[i])
        return total

    @per_row
    def finish(x, anchor, inverse, offset, top, with_scale, out):
        if top >= 0:
            out[top] = zero
            out[top] = -total_of(out)
        of_scale = 0.0
        if with_scale:
            of_scale = -inverse * lever(x, real(anchor), real(inverse), real(offset), out)
            for i in range(out.shape[0]):
                out[i] *= real(inverse)
        if signed:
            for i in range(out.shape[0]):
                out[i] = math.copysign(real(1), x[i]) * out[i]
        return of_scale

    return finish


def gradient_of(link: NumbaLink, shape: Shape, kind: str, name: str, real: Real) -> Compiled:
    """``(x, g, anchor, offset, s, q, with_k, with_scale, buffer, out)``: dL/dk, dL/ds, whether all is done.

    dL/dx is in ``out``. Where all slopes underflow, dL/dx is nothing but for log masks, and dL/dk is only found if it
    is wanted.
    """
    slope, smallest = link.slope, float(np.finfo(real).tiny) / float(np.finfo(real).eps)
    signed, vanishes, finish = kind == "signed", shape.compact and shape.reaches_zero, _finisher(kind, real)
    fill_shares: Compiled = None if vanishes else far_shares_of(link.far, shape.compact, name, real)

    @inlined
    def inward(x, g):
        return math.copysign(real(1), x) * g if signed else g

    @summed
    def slopes(x, anchor, inverse, offset, g, q, out):
        total = pull = real(0)
        for i in range(x.shape[0]):
            w = slope(distance(abs(x[i]) if signed else x[i], anchor, inverse, offset), q)
            out[i] = w
            total += w
            pull += w * inward(x[i], g[i])
        return total, pull

    @summed
    def rest(x, g, w, mean):
        total = real(0)
        for i in range(g.shape[0]):
            total += w[i] * difference(inward(x[i], g[i]), mean)
        return total

    @per_row
    def gradient(x, g, anchor, offset, s, q, with_k, with_scale, buffer, out):
        n, total, pull, left, size, inverse = x.shape[0], 0.0, 0.0, 0.0, 1.0, 1 / s
        for i in range(0, n, CHUNK):
            part, given, weights = x[i : i + CHUNK], g[i : i + CHUNK], out[i : i + CHUNK]
            t, p = slopes(part, real(anchor), real(inverse), real(offset), given, q, weights)
            total += t
            pull += p
        idle = signed and anchor == 0 and offset == 0
        if idle:
            pull, total = 0.0, 1.0
        elif total < smallest:
            if vanishes or not with_k:
                total = smallest
            else:
                if not fill_shares(x, anchor, offset, s, out):
                    return 0.0, 0.0, False
                size, total, pull = total, 1.0, dot(out, g)
        if not total >= smallest:
            return 0.0, 0.0, False
        mean, largest = real(pull / total), highest(out)
        top = place_of(out, largest) if largest > DOMINANT * total and not idle else -1
        for i in range(0, 0 if idle else n, CHUNK):  # nearly equal cotangents lose digits once
            left += rest(x[i : i + CHUNK], g[i : i + CHUNK], out[i : i + CHUNK], mean)
        left /= total
        factor, remainder = real(size if with_scale else size * inverse), real(left)
        for i in range(n):
            out[i] = out[i] * ((inward(x[i], g[i]) - mean) - remainder) * factor
        of_scale = finish(x, anchor, inverse, offset, top, with_scale, out)
        return np.float64(mean) + left, of_scale, True

    return gradient


def _exact_log_gradient(link: NumbaLink, real: Real) -> Compiled:
    """``(x, g, anchor, offset, s, q, factor, out)``: dL/dz times the factor, in float64, for what cancels; dL/dk."""
    slope, log_derivative = link.slope, link.log_derivative

    @inlined
    def of_item(x, anchor, inverse, offset, g, q):
        z = (np.float64(x) - anchor) * inverse - offset
        return slope(z, q), log_derivative(z, q) * g if x > -np.inf else 0.0

    @per_row
    def gradient(x, g, anchor, offset, s, q, factor, out):
        total = pull = 0.0
        for i in range(x.shape[0]):
            w, direct = of_item(x[i], anchor, 1 / s, offset, g[i], q)
            total += w
            pull += direct
        for i in range(x.shape[0]):
            w, direct = of_item(x[i], anchor, 1 / s, offset, g[i], q)
            out[i] = (direct - w * (pull / total)) * factor
        return pull / total

    return gradient


def log_gradient_of(link: NumbaLink, precise: NumbaLink, name: str, real: Real) -> Compiled:
    """:func:`gradient_of` the logarithm, from the link in this dtype and in float64."""
    slope, log_derivative, finish = link.slope, link.log_derivative, _finisher("log_mask", real)
    limits, single, fill_shares = np.finfo(real), real is np.float32, far_shares_of(link.far, False, name, real)
    again = _exact_log_gradient(precise, real)
    tiny, smallest = float(limits.tiny), float(limits.tiny) / float(limits.eps)

    @inlined
    def direct(x, z, g, q):
        return log_derivative(z, q) * g if x > -np.inf else real(0)

    @summed
    def slopes(x, anchor, inverse, offset, g, q, out):
        total = pull = real(0)
        for i in range(x.shape[0]):
            z = distance(x[i], anchor, inverse, offset)
            w = slope(z, q)
            out[i] = w
            total += w
            pull += direct(x[i], z, g[i], q)
        return total, pull

    @per_row
    def pull_in_gap(x, anchor, inverse, offset, g, q, shares, total):
        """dL/dk = sum g_i omega_i / F(z_i): above the gap F is 1, and below omega / F' is 1 / sum F'."""
        pull = 0.0
        for i in range(x.shape[0]):
            z = distance(x[i], real(anchor), real(inverse), real(offset))
            pull += g[i] * shares[i] if z > 0 else direct(x[i], z, g[i], q) / max(total, tiny)
        return pull

    @per_row
    def gradient(x, g, anchor, offset, s, q, with_k, with_scale, buffer, out):
        n, total, pull, inverse = x.shape[0], 0.0, 0.0, 1 / s
        a, b, c = real(anchor), real(inverse), real(offset)
        for i in range(0, n, CHUNK):
            t, p = slopes(x[i : i + CHUNK], a, b, c, g[i : i + CHUNK], q, out[i : i + CHUNK])
            total += t
            pull += p
        of_k = pull / total
        if total < smallest:
            if not fill_shares(x, anchor, offset, s, out):
                return 0.0, 0.0, False
            of_k, total = pull_in_gap(x, anchor, inverse, offset, g, q, out, total), 1.0
        if not total >= smallest:
            return 0.0, 0.0, False
        largest, mean = np.float64(highest(out)), real(pull / total)
        top, factor = place_of(out, largest) if largest > DOMINANT * total else -1, real(1 if with_scale else inverse)
        for i in range(n):
            out[i] = (direct(x[i], distance(x[i], a, b, c), g[i], q) - out[i] * mean) * factor
        if single:  # what cancels so far that the rounding of z would show
            farthest = max(np.float64(highest(out)), -np.float64(lowest(out)))
            if farthest < CANCELLED * factor * (largest / total) * abs(pull):
                of_k = again(x, g, anchor, offset, s, q, 1.0 if with_scale else inverse, out)
        return of_k, finish(x, anchor, inverse, offset, top, with_scale, out), True

    return gradient
