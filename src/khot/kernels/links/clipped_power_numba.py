"""The clipped powers in numba: loops of their own for the exponents 1 to 4, one pair of loops for all others."""

# mypy: disable-error-code="no-untyped-def"

from ..numba_math import EXP, LOG, Real
from ..numba_tools import inlined, per_row
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
    exp, log, one = EXP[real], LOG[real], real(1)
    if variant == "clip_power":
        return inlined(lambda z, q: exp((real(q) - one) * log(z)))
    powers = {
        "clip": lambda z, q: one,
        "clip_power_2": lambda z, q: z,
        "clip_power_3": lambda z, q: z * z,
        "clip_power_4": lambda z, q: z * z * z,
    }
    return inlined(powers[variant])


def numba_link(variant: str, real: Real) -> NumbaLink:
    power, zero, one = power_below(variant, real), real(0), real(1)

    @inlined
    def terms(z, q):
        inside = (z > zero) & (z < one)  # not `and`, a branch that keeps a loop from being vectorised
        rate = power(z if inside else one, q)
        rate = rate if inside else zero
        return zero if z < one else one, rate * z if inside else zero, real(q) * rate

    @inlined
    def value(z, q):
        z = min(max(z, zero), one)
        return power(z, q) * z

    @inlined
    def slope(z, q):
        inside = (z > zero) & (z < one)  # not `and`, a branch that keeps a loop from being vectorised
        return real(q) * power(z, q) if inside else zero

    return NumbaLink(terms, value, slope, _quantile, _newton_step)
