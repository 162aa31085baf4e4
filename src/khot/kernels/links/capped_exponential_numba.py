"""The capped exponential in numba."""

# mypy: disable-error-code="no-untyped-def"

import math

from ..cpu.loops import inlined, per_row
from ..cpu.maths import FLUSHED_EXP, Real
from .base_numba import NumbaLink


@per_row
def _quantile(p, q):
    return math.log(p)


@per_row
def _newton_step(signed, total, slope, excess, k, q):
    return math.log(total / -excess) if excess < 0 else math.log1p((total + excess) / k)


def numba_link(variant: str, real: Real) -> NumbaLink:
    exp, zero, one = FLUSHED_EXP[real], real(0), real(1)

    @inlined
    def terms(z, q):
        below = exp(min(z, zero)) if z < zero else zero
        return zero if z < zero else one, below, below

    @inlined
    def value(z, q):
        return exp(min(z, zero))

    @inlined
    def slope(z, q):
        return exp(min(z, zero)) if z < zero else zero

    return NumbaLink(terms, value, slope, _quantile, _newton_step)
