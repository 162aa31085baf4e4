"""exp and log of one number, for loops that a compiler should vectorise, which it cannot do with math.exp.

Results are off by at most 2 units in the last place, with gradual underflow. The polynomials are interpolated at
Chebyshev points. A factory of loops takes those of its dtype from :data:`EXP`, :data:`LOG` and :data:`LOG1P`, or from
:data:`FLUSHED_EXP`, which is 0 where exp is subnormal: a subnormal number takes a processor a hundred cycles.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, int64
from numba.extending import intrinsic

from .loops import inlined, specialised

Real = Any  # np.float32 or np.float64

# log 2 in two parts; the first has so few digits that its products with exponents are exact.
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.1219444005469058277e-4
LIFT = 64  # binary orders by which smaller numbers are scaled up during the computation


def _bit_cast(result, argument):
    """An intrinsic that reinterprets the bits of its argument as a number of another type."""

    @intrinsic
    def cast(context, x):
        return result(argument), lambda c, builder, __, args: builder.bitcast(args[0], c.get_value_type(result))

    return cast


# The class of integers of the same size, and functions that reinterpret numbers as such integers and back.
BITS = {
    np.float32: (np.int32, _bit_cast(int32, float32), _bit_cast(float32, int32)),
    np.float64: (np.int64, _bit_cast(int64, float64), _bit_cast(float64, int64)),
}


def _polynomial(real, coefficients):
    """A polynomial with these coefficients, those of high powers first."""
    first, *others = map(real, coefficients)
    rest = tuple(others)

    @inlined
    def polynomial(x):
        value = first
        for c in rest:
            value = value * x + c
        return value

    return polynomial


def _exponentials(real, lowest, highest, *coefficients):
    """exp and flushed exp; exp(lowest) is 0, and exp(highest) is still finite."""
    (integer, bits_of, of_bits), limits, lowest, highest = BITS[real], np.finfo(real), real(lowest), real(highest)
    lowest_normal = real(math.ceil(math.log(limits.tiny)))
    half, one, bias, shift = real(0.5), real(1), limits.maxexp - 1, integer(limits.nmant)
    rounder = real(1.5 * 2**limits.nmant)  # adding this leaves the rounded number in the lowest bits
    per_log2, log2_high, log2_low = real(1 / math.log(2)), real(LOG2_HIGH), real(LOG2_LOW)
    polynomial = _polynomial(real, coefficients)

    @inlined
    def reduce(v):
        """Bits that end in an integer n, and e^v / 2^n."""
        shifted = v * per_log2 + rounder
        n = shifted - rounder
        r = (v - n * log2_high) - n * log2_low
        return bits_of(shifted), (polynomial(r) * r + half) * (r * r) + r + one

    @inlined
    def exp(v):
        v = min(max(v, lowest), highest)
        n, p = reduce(v)
        low = v < lowest_normal
        return p * of_bits((n + integer(bias + LIFT if low else bias)) << shift) * real(2.0**-LIFT if low else 1.0)

    @inlined
    def flushed_exp(v):
        n, p = reduce(min(max(v, lowest_normal), highest))
        return p * of_bits((n + integer(bias)) << shift) if v >= lowest_normal else real(0)

    return exp, flushed_exp


def _logarithms(real, *coefficients):
    """log x for finite x >= 0, and log(1 + x) for finite x > -1.

    log x = n log 2 + log(1 + f) with 1 + f between sqrt(1/2) and sqrt 2. With s = f / (2 + f), log(1 + f) = 2 atanh s
    is 2 s + s^3 R(s^2), and 2 s = f - s f = f - f^2 / 2 + s f^2 / 2, in which f is exact.
    """
    (integer, bits_of, of_bits), limits, smallest = BITS[real], np.finfo(real), np.finfo(real).tiny
    sqrt_half, fraction, shift = np.sqrt(real(0.5)).view(integer), integer(2**limits.nmant - 1), integer(limits.nmant)
    half, one, two, log2_high, log2_low = map(real, (0.5, 1, 2, LOG2_HIGH, LOG2_LOW))
    polynomial = _polynomial(real, coefficients)

    @inlined
    def log_of_positive(x):
        low = x < smallest
        bits = bits_of(x * real(2.0**LIFT if low else 1.0)) - sqrt_half
        n = real(bits >> shift) - real(LIFT if low else 0)
        f = of_bits((bits & fraction) + sqrt_half) - one
        s = f / (two + f)
        v = s * s
        square = half * f * f
        small = s * (square + v * polynomial(v))
        return n * log2_high + (f - (square - (small + n * log2_low)))

    @inlined
    def log(x):
        return log_of_positive(x) if x > 0 else real(-np.inf)

    @inlined
    def log1p(x):
        y = one + x
        return log_of_positive(y) + (x - (y - one)) / y

    return log, log1p


with specialised("exp float32"):
    _exps = _exponentials(np.float32, -104, 88.3, 0.001392618359, 0.008363179053, 0.04166655462, 0.1666657699)
with specialised("exp float64"):
    _exps64 = _exponentials(
        np.float64, -746, 709, 2.51003854955103191e-8, 2.76200884454097482e-7, 2.75572684599970648e-6,
        0.0000248015212959543751, 0.000198412698630536169, 0.00138888889172137169, 0.00833333333333006183,
        0.0416666666666241279, 0.166666666666666675,
    )  # fmt: skip
with specialised("log float32"):
    _logs = _logarithms(np.float32, 0.2958005305, 0.3998877828, 0.6666668505)
with specialised("log float64"):
    _logs64 = _logarithms(
        np.float64, 0.1308676701466913, 0.132687596680396505, 0.153862402058364716, 0.181817956308842364,
        0.222222223918004755, 0.2857142857080323, 0.400000000000008776, 0.666666666666666665,
    )  # fmt: skip
EXP, FLUSHED_EXP = ({np.float32: single, np.float64: double} for single, double in zip(_exps, _exps64, strict=True))
LOG, LOG1P = ({np.float32: single, np.float64: double} for single, double in zip(_logs, _logs64, strict=True))
