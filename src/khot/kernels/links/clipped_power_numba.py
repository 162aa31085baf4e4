"""The clipped powers in numba: separate loops for q = 1; all other powers are computed by logarithms."""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from ..cpu.loops import inlined, per_row
from ..cpu.maths import FLUSHED_EXP, LOG, Real
from .base_numba import Compiled, NumbaLink


@per_row
def _quantile(p, q):
    return p ** (1 / q)


@per_row
def _newton_step(signed, total, slope, excess, k, q):
    residual = total + excess
    if q == 1:
        return residual / max(slope, 1.0)
    if not slope > 0:
        return residual
    return (q * total * (1 - (-excess / total) ** (1 / q)) if excess <= 0 else residual) / slope


def power_below(variant: str, real: Real) -> Compiled:
    """z^(q - 1) for 0 < z < 1."""
    exp, log, one = FLUSHED_EXP[real], LOG[real], real(1)
    if variant == "clip":
        return inlined(lambda z, q: one)
    return inlined(lambda z, q: exp((real(q) - one) * log(z)))


def numba_link(variant: str, real: Real) -> NumbaLink:
    """The record of a clipped power. Steep powers have z in float64, because they multiply its rounding."""
    zero, one = real(0), real(1)
    wide = np.float64 if variant == "clip_power_steep" else real
    power = power_below(variant, real)

    @inlined
    def powers(z, q):
        """z^(q - 1) and z^q."""
        below = power(z, q)
        return below, below * z

    @inlined
    def steep_powers(z, q):
        high = real(z)
        below = power(high, q)
        return below, below * (high + real(q) * real(z - high))

    if variant == "clip_power_steep":
        powers = steep_powers

    @inlined
    def terms(z, q):
        inside = (z > wide(0)) & (z < wide(1))  # not `and`, a branch that prevents vectorisation
        rate, tail = powers(z if inside else wide(1), q)
        return wide(0) if z < wide(1) else wide(1), tail if inside else wide(0), wide(q) * (rate if inside else wide(0))

    @inlined
    def value(z, q):
        return powers(min(max(z, wide(0)), wide(1)), q)[1]

    @inlined
    def slope(z, q):
        inside = (z > zero) & (z < one)  # not `and`, a branch that prevents vectorisation
        return real(q) * power(z, q) if inside else zero

    return NumbaLink(terms, value, slope, _quantile, _newton_step, distances=wide)
