"""The logistic link in numba: F(-a) = e / (1 + e) with e = exp(-a)."""

# mypy: disable-error-code="no-untyped-def"

import math

from ..numba_math import EXP, LOG1P, Real
from ..numba_tools import inlined, per_row
from .base_numba import NumbaLink, smooth_link


@per_row
def _quantile(p, q):
    return math.log(p / (1 - p))


def numba_link(variant: str, real: Real) -> NumbaLink:
    exp, log1p, zero, one = EXP[real], LOG1P[real], real(0), real(1)

    @inlined
    def tails(a):
        decay = exp(-a)
        tail = decay / (one + decay)
        return tail, tail / (one + decay)

    @inlined
    def log_value(z, q):
        return min(z, zero) - log1p(exp(-abs(z)))

    @inlined
    def log_derivative(z, q):
        decay = exp(-abs(z))
        return (decay if z > zero else one) / (one + decay)

    return smooth_link(tails, _quantile, real, log_value=log_value, log_derivative=log_derivative)
