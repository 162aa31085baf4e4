"""Student's t links in numba, by r = sqrt(df + a^2) and m = 1 - a / r = df / (r (r + a)), for a >= 0.

The tail F(-a) is atan(1 / a) / pi for 1 degree of freedom, m / 2 for 2 and m^2 (3 - m) / 4 for 4. The arc tangent is
computed from a quarter of the angle, found by halving it twice: tan(angle / 2) = 1 / (r + a), since r = sqrt(1 + a^2).
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cpu.loops import inlined, per_row, specialised
from ..cpu.maths import LOG, LOG1P, Real
from .base_numba import Compiled, FarTail, NumbaLink, smooth_link
from .student_t import DENSITY

FAR = {np.float32: 1e18, np.float64: 1e150}  # its square is finite; beyond it a equals r up to rounding

# 4 atan(v) / (pi v) as a polynomial in v^2, for v up to tan(pi / 8), interpolated at Chebyshev points, highest power
# first; the relative error is 1e-7 in float32 and 2e-16 in float64, most of it rounding.
ARC_32 = tuple(
    map(np.float32, (-0.0767293012, 0.13457924, -0.181303361, 0.254624775, -0.424412845, 1.27323954)),
)
ARC_64 = (
    0.026910392897109125, -0.055361120236235441, 0.072426311798369192, -0.084546084265149201, 0.097911528886723161,
    -0.1157473177105974, 0.1414709977470778, -0.18189136220003134, 0.25464790893245535, -0.42441318157832524,
    1.2732395447351626,
)  # fmt: skip


@per_row
def _quantile_1(p, q):
    return -1 / math.tan(math.pi * p)


@per_row
def _quantile_2(p, q):
    return (2 * p - 1) / math.sqrt(2 * p * (1 - p))


@per_row
def _quantile_4(p, q):
    phi = 2 / 3 * math.asin(math.sqrt(min(p, 1 - p)))
    m = 2 * math.sin(0.5 * phi) ** 2 + math.sqrt(3) * math.sin(phi)
    return math.copysign(2 * (1 - m) / math.sqrt(m * (2 - m)), p - 0.5)


QUANTILES = {1: _quantile_1, 2: _quantile_2, 4: _quantile_4}


def _arc(coefficients: Sequence[Any]) -> Compiled:
    """``(square)``: 4 atan(v) / (pi v) in float64, from v^2."""
    doubles = tuple(map(float, coefficients))

    @inlined
    def arc(square):
        p = doubles[0]
        for c in doubles[1:]:
            p = p * square + c
        return p

    return arc


def _ends(df: int, real: Real) -> tuple[Any, Any]:
    """The radii of about the least normal tail and slope; subnormal numbers take a processor 100 times as long."""
    tiny = 8 * float(np.finfo(real).tiny)
    return real(tiny ** (-1 / df)), real((DENSITY[df] / tiny) ** (1 / (df + 1)))


def _scaled_tail(df: int, real: Real) -> Compiled:
    """``(a, r)``: F(-a) r^df, which is of the order of 1 for all a."""
    one, two, three, four = map(real, (1, 2, 3, 4))
    coefficients = ARC_32 if real is np.float32 else ARC_64
    least = real(10 * float(np.finfo(real).tiny) ** 0.5)  # its square is normal, and next to nothing beside 1

    @inlined
    def of_1(a, r):
        s = (one / r) / (one + a / r)
        half = one + math.sqrt(one + s * s)
        v = max(s / half, least)
        p = coefficients[0]
        for c in coefficients[1:]:
            p = p * (v * v) + c
        return p / ((one + a / r) * half)

    @inlined
    def of_2(a, r):
        return one / (one + a / r)

    @inlined
    def of_4(a, r):
        both = one + a / r
        missing = (two / r) * (two / r) / both
        return four * (three - missing) / (both * both)

    return {1: of_1, 2: of_2, 4: of_4}[df]


@functools.cache
def _far_tail(df: int) -> FarTail:
    degrees, density, log1p = float(df), DENSITY[df], LOG1P[np.float64]
    with specialised(f"student_t_{df} far"):
        scaled_tail = _scaled_tail(df, np.float64)

        @inlined
        def log_decay(a, beyond):
            return -0.5 * (degrees + 1) * log1p((2 * a + beyond) * beyond / (degrees + a * a))

        @inlined
        def mills(a):
            r = math.sqrt(degrees + a * a)
            return scaled_tail(a, r) * r / density

        return FarTail(log_decay, mills, gap=1e7, reach=math.inf)


def numba_link(variant: str, real: Real) -> NumbaLink:
    df = int(variant.removeprefix("student_t_"))
    log, log1p, (end, steep) = LOG[real], LOG1P[real], _ends(df, real)
    zero, one, two, degrees, density, far, infinity = map(real, (0, 1, 2, df, DENSITY[df], FAR[real], math.inf))
    scaled_tail, arc = _scaled_tail(df, real), _arc(ARC_32 if real is np.float32 else ARC_64)

    @inlined
    def radius(a):
        return math.sqrt(degrees + a * a) if a < far else a

    @inlined
    def power(inverse):
        """r^-df."""
        square = inverse * inverse
        return inverse if df == 1 else square if df == 2 else square * square

    @inlined
    def tails(a):
        bounded = min(a, end)
        r = radius(bounded)
        tail = scaled_tail(bounded, r) * power(one / r)
        slope = density * power(one / min(r, steep)) / min(r, steep)
        return tail if a < end else zero, slope if r < steep else zero

    @inlined
    def ordered_tail(a):
        """Every rounding keeps the order; the polynomials, which might not, are evaluated in float64."""
        bounded = min(a, end)
        r = radius(bounded)
        if df == 1:
            w = r + bounded
            v = np.float64(one / (w + (math.sqrt(one + w * w) if w < far else w)))
            tail = real(v * arc(v * v))
        elif df == 2:
            tail = (one / r) * (one / (r + bounded))
        else:
            m = np.float64((two / r) * (two / (r + bounded)))
            tail = real(0.25 * m * m * (3.0 - m))
        return tail if a < end else zero

    @inlined
    def log_value(z, q):
        a = min(abs(z), far * far)
        r = radius(a)
        tail = scaled_tail(a, r)
        decay = power(one / r) if z < infinity else zero
        below = log(tail) - degrees * log(r) if z > -infinity else z
        return log1p(-tail * decay) if z > zero else below

    @inlined
    def log_derivative(z, q):
        a = min(abs(z), far * far)
        r = radius(a)
        tail = scaled_tail(a, r)
        decay = power(one / r)
        rate = (decay if z > zero else one) * density / (r * (one - tail * decay if z > zero else tail))
        return rate if abs(z) < infinity else zero

    logarithms = {"log_value": log_value, "log_derivative": log_derivative}
    return smooth_link(tails, QUANTILES[df], _far_tail(df), real, ordered_tail, **logarithms)
