"""The Laplace link in numba: F(-a) = F'(a) = exp(-a) / 2."""

# mypy: disable-error-code="no-untyped-def"

import math

from ..cpu.loops import inlined, per_row
from ..cpu.maths import FLUSHED_EXP, LOG1P, Real
from .base import LOG_2
from .base_numba import NumbaLink, smooth_link


@per_row
def _quantile(p, q):
    return math.log(2 * p) if p <= 0.5 else -math.log(2 - 2 * p)


def numba_link(variant: str, real: Real) -> NumbaLink:
    exp, log1p = FLUSHED_EXP[real], LOG1P[real]
    zero, half, one, two, log_2 = map(real, (0, 0.5, 1, 2, LOG_2))

    @inlined
    def tails(a):
        tail = half * exp(-a)
        return tail, tail

    @inlined
    def log_value(z, q):
        return z - log_2 if z <= zero else log1p(-half * exp(-abs(z)))

    @inlined
    def log_derivative(z, q):
        decay = exp(-abs(z))
        return decay / (two - decay) if z > zero else one

    return smooth_link(tails, _quantile, real, log_value, log_derivative)
