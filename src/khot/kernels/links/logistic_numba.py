"""The logistic link in numba: F(-a) = 1 / (1 + exp(a)), in which rounding keeps the order; far out it is exp(-a)."""

# mypy: disable-error-code="no-untyped-def"

import math

from ..cpu.loops import inlined, per_row
from ..cpu.maths import FLUSHED_EXP, LOG1P, Real
from .base_numba import NumbaLink, smooth_link

FAR = 40  # beyond this 1 + exp(-a) is 1; up to here exp(a) does not overflow


@per_row
def _quantile(p, q):
    return math.log(p / (1 - p))


def numba_link(variant: str, real: Real) -> NumbaLink:
    exp, log1p, zero, one, far = FLUSHED_EXP[real], LOG1P[real], real(0), real(1), real(FAR)

    @inlined
    def tails(a):
        near = a < far
        e = exp(a if near else -a)
        tail = (one if near else e) / (one + e)
        return tail, tail * (one - tail)

    @inlined
    def log_value(z, q):
        return min(z, zero) - log1p(exp(-abs(z)))

    @inlined
    def log_derivative(z, q):
        decay = exp(-abs(z))
        return (decay if z > zero else one) / (one + decay)

    return smooth_link(tails, _quantile, real, log_value, log_derivative)
