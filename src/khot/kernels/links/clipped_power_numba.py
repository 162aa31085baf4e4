"""The clipped powers in numba: separate loops for each integer exponent, and one pair of loops for all others."""

# mypy: disable-error-code="no-untyped-def"

import functools

import numpy as np

from ..cpu.loops import inlined, per_row, specialised
from ..cpu.maths import FLUSHED_EXP, LOG, Real
from .base_numba import Compiled, NumbaLink

GENERAL = "clip_power", "clip_power_steep"  # variants for exponents that are not integers, by logarithms
FLAT = "clip", "clip_power", "clip_power_2", "clip_power_3", "clip_power_4"


@per_row
def _quantile(p, q):
    return p ** (1 / q)


@inlined
def _linear_step(signed, total, slope, excess, k, q):
    return (total + excess) / max(slope, 1.0)


@per_row
def _newton_step(signed, total, slope, excess, k, q):
    if not slope > 0:
        return total + excess
    return (q * total * (1 - (-excess / total) ** (1 / q)) if excess <= 0 else total + excess) / slope


@functools.cache
def _product(m: int) -> Compiled:
    """``(z)``: z^m for an integer m > 0, by squaring."""
    if m == 1:
        with specialised("1"):
            return inlined(lambda z: z)
    root = _product(m // 2)
    with specialised(str(m)):  # so that names do not depend on which loop asks first
        return inlined(lambda z: root(z) * root(z) * z) if m % 2 else inlined(lambda z: root(z) * root(z))


def power_below(variant: str, real: Real) -> Compiled:
    """z^(q - 1) for 0 < z < 1."""
    exp, log, one = FLUSHED_EXP[real], LOG[real], real(1)
    if variant == "clip":
        return inlined(lambda z, q: one)
    if variant in GENERAL:
        return inlined(lambda z, q: exp((real(q) - one) * log(z)))
    product = _product(int(variant.removeprefix("clip_power_")) - 1)
    return inlined(lambda z, q: product(z))


def numba_link(variant: str, real: Real) -> NumbaLink:
    """The record of a clipped power. Steep powers have z in float64, because they multiply its rounding."""
    zero, one = real(0), real(1)
    wide = real if variant in FLAT else np.float64
    slope_power = power_below(variant, real)
    # In float32 an exponent near -12 has steps of 1e-6, which are those of the power.
    power = power_below(variant, np.float64 if variant in GENERAL else wide)

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
        return real(q) * slope_power(z, q) if inside else zero

    step = _linear_step if variant == "clip" else _newton_step
    return NumbaLink(terms, value, slope, _quantile, step, distances=wide)
