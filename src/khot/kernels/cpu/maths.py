"""exp and log of one number, for loops that a compiler should vectorise, which it cannot do with math.exp.

Results are off by at most 2 units in the last place, with gradual underflow. The polynomials are interpolated at
Chebyshev points. A factory of loops takes those of its dtype from :data:`EXP`, :data:`LOG` and :data:`LOG1P`, or from
:data:`FLUSHED_EXP`, which is 0 where exp is subnormal: a subnormal number takes a processor a hundred cycles.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, float64, int32, int64
from numba.extending import intrinsic

from .loops import inlined

Real = Any  # np.float32 or np.float64


def _bit_cast(result, argument, to):
    """An intrinsic that reinterprets the bits of its argument as a number of another type."""

    @intrinsic
    def cast(context, x):
        return result(argument), lambda _, builder, __, args: builder.bitcast(args[0], to)

    return cast


_float32_of = _bit_cast(float32, int32, ir.FloatType())
_float64_of = _bit_cast(float64, int64, ir.DoubleType())
_bits_of_32 = _bit_cast(int32, float32, ir.IntType(32))
_bits_of_64 = _bit_cast(int64, float64, ir.IntType(64))

# log 2 in two parts; the first has so few digits that its products with exponents are exact.
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.1219444005469058277e-4
# Adding this, 1.5 times the smallest power of 2 without fractions, leaves the rounded number in the lowest bits.
ROUNDER_32, ROUNDER_64 = np.float32(1.5 * 2**23), 1.5 * 2**52
NEAR_UNDERFLOW_32, NEAR_UNDERFLOW_64 = np.float32(-86), -700.0  # exp of these is still a normal number
LIFT = 64  # binary orders by which smaller results are scaled up during the computation
LOWEST_32, LOWEST_64 = np.float32(-104), -746.0  # exp of these is 0
LOWEST_NORMAL_32, LOWEST_NORMAL_64 = np.float32(-87), -708.0  # exp of these is about the smallest normal number
HIGHEST_32, HIGHEST_64 = np.float32(88.3), 709.0

_E32 = tuple(map(np.float32, (0.1666657699, 0.04166655462, 0.008363179053, 0.001392618359)))
_E64 = (
    0.166666666666666675, 0.0416666666666241279, 0.00833333333333006183, 0.00138888889172137169,
    0.000198412698630536169, 0.0000248015212959543751, 2.75572684599970648e-6, 2.76200884454097482e-7,
    2.51003854955103191e-8,
)  # fmt: skip


@inlined
def _exp32(v):
    v = min(max(v, LOWEST_32), HIGHEST_32)
    shifted = v * np.float32(1 / math.log(2)) + ROUNDER_32
    n = shifted - ROUNDER_32
    r = (v - n * np.float32(LOG2_HIGH)) - n * np.float32(LOG2_LOW)
    p = ((_E32[3] * r + _E32[2]) * r + _E32[1]) * r + _E32[0]
    p = (p * r + np.float32(0.5)) * (r * r) + r + np.float32(1)
    low = v < NEAR_UNDERFLOW_32
    exponent = _bits_of_32(shifted) + np.int32(127 + LIFT if low else 127)
    return p * _float32_of(exponent << np.int32(23)) * np.float32(2.0**-LIFT if low else 1)


@inlined
def _flushed_exp32(v):
    a = min(max(v, LOWEST_NORMAL_32), HIGHEST_32)
    shifted = a * np.float32(1 / math.log(2)) + ROUNDER_32
    n = shifted - ROUNDER_32
    r = (a - n * np.float32(LOG2_HIGH)) - n * np.float32(LOG2_LOW)
    p = ((_E32[3] * r + _E32[2]) * r + _E32[1]) * r + _E32[0]
    p = (p * r + np.float32(0.5)) * (r * r) + r + np.float32(1)
    scale = _float32_of((_bits_of_32(shifted) + np.int32(127)) << np.int32(23))
    return p * scale if v >= LOWEST_NORMAL_32 else np.float32(0)


@inlined
def _exp64(v):
    v = min(max(v, LOWEST_64), HIGHEST_64)
    shifted = v * (1 / math.log(2)) + ROUNDER_64
    n = shifted - ROUNDER_64
    r = (v - n * LOG2_HIGH) - n * LOG2_LOW
    p = ((_E64[8] * r + _E64[7]) * r + _E64[6]) * r + _E64[5]
    p = (((p * r + _E64[4]) * r + _E64[3]) * r + _E64[2]) * r + _E64[1]
    p = ((p * r + _E64[0]) * r + 0.5) * (r * r) + r + 1.0
    low = v < NEAR_UNDERFLOW_64
    exponent = _bits_of_64(shifted) + np.int64(1023 + LIFT if low else 1023)
    return p * _float64_of(exponent << np.int64(52)) * (2.0**-LIFT if low else 1.0)


@inlined
def _flushed_exp64(v):
    a = min(max(v, LOWEST_NORMAL_64), HIGHEST_64)
    shifted = a * (1 / math.log(2)) + ROUNDER_64
    n = shifted - ROUNDER_64
    r = (a - n * LOG2_HIGH) - n * LOG2_LOW
    p = ((_E64[8] * r + _E64[7]) * r + _E64[6]) * r + _E64[5]
    p = (((p * r + _E64[4]) * r + _E64[3]) * r + _E64[2]) * r + _E64[1]
    p = ((p * r + _E64[0]) * r + 0.5) * (r * r) + r + 1.0
    scale = _float64_of((_bits_of_64(shifted) + np.int64(1023)) << np.int64(52))
    return p * scale if v >= LOWEST_NORMAL_64 else 0.0


# log x = n log 2 + log(1 + f) with 1 + f between sqrt(1/2) and sqrt 2. With s = f / (2 + f), log(1 + f) = 2 atanh s is
# 2 s + s^3 R(s^2), and 2 s = f - s f = f - f^2 / 2 + s f^2 / 2, in which f is exact.
_L32 = tuple(map(np.float32, (0.6666668505, 0.3998877828, 0.2958005305)))
_L64 = (
    0.666666666666666665, 0.400000000000008776, 0.2857142857080323, 0.222222223918004755, 0.181817956308842364,
    0.153862402058364716, 0.132687596680396505, 0.1308676701466913,
)  # fmt: skip
BITS_OF_SQRT_HALF_32, BITS_OF_SQRT_HALF_64 = np.int32(0x3F3504F3), np.int64(0x3FE6A09E667F3BCD)
SMALLEST_32, SMALLEST_64 = np.float32(2.0**-126), 2.0**-1022


@inlined
def _log_of_positive_32(x):
    low = x < SMALLEST_32
    bits = _bits_of_32(x * np.float32(2.0**LIFT if low else 1)) - BITS_OF_SQRT_HALF_32
    n = np.float32(bits >> np.int32(23)) - np.float32(LIFT if low else 0)
    f = _float32_of((bits & np.int32(0x7FFFFF)) + BITS_OF_SQRT_HALF_32) - np.float32(1)
    s = f / (np.float32(2) + f)
    v = s * s
    half = np.float32(0.5) * f * f
    small = s * (half + v * ((_L32[2] * v + _L32[1]) * v + _L32[0]))
    return n * np.float32(LOG2_HIGH) + (f - (half - (small + n * np.float32(LOG2_LOW))))


@inlined
def _log_of_positive_64(x):
    low = x < SMALLEST_64
    bits = _bits_of_64(x * (2.0**LIFT if low else 1.0)) - BITS_OF_SQRT_HALF_64
    n = np.float64(bits >> np.int64(52)) - (float(LIFT) if low else 0.0)
    f = _float64_of((bits & np.int64(0xFFFFFFFFFFFFF)) + BITS_OF_SQRT_HALF_64) - 1.0
    s = f / (2.0 + f)
    v = s * s
    half = 0.5 * f * f
    series = ((_L64[7] * v + _L64[6]) * v + _L64[5]) * v + _L64[4]
    series = (((series * v + _L64[3]) * v + _L64[2]) * v + _L64[1]) * v + _L64[0]
    small = s * (half + v * series)
    return n * LOG2_HIGH + (f - (half - (small + n * LOG2_LOW)))


@inlined
def _log32(x):
    return _log_of_positive_32(x) if x > 0 else np.float32(-np.inf)


@inlined
def _log64(x):
    return _log_of_positive_64(x) if x > 0 else -np.inf


@inlined
def _log1p32(x):
    y = np.float32(1) + x
    return _log_of_positive_32(y) + (x - (y - np.float32(1))) / y


@inlined
def _log1p64(x):
    y = 1.0 + x
    return _log_of_positive_64(y) + (x - (y - 1.0)) / y


EXP = {np.float32: _exp32, np.float64: _exp64}
FLUSHED_EXP = {np.float32: _flushed_exp32, np.float64: _flushed_exp64}
LOG = {np.float32: _log32, np.float64: _log64}  # for finite x >= 0
LOG1P = {np.float32: _log1p32, np.float64: _log1p64}  # for finite x > -1
