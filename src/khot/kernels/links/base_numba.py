"""Links in numba: what a loop needs from a link, compiled for one link and one dtype.

A link with loops in numba has the file ``<name>_numba.py`` beside that of its class, with a function
``numba_link(variant, real)`` that returns a record of compiled functions of single numbers. Their constants are numbers
of the dtype ``real``, since for numba the product of a float32 and a Python number is float64. ``q`` is the parameter
of a link, a number at run time.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined, per_row, specialised
from ..cpu.maths import Real
from .base import Link
from .clipped_power import LARGEST_PRODUCT

Compiled = Any  # a function that numba has compiled
NEARLY_BALANCED = 1 / 32


class NumbaLink(NamedTuple):
    """A link for loops: functions of z in the loop's dtype; the quantile and the step are in float64.

    Attributes:
        terms: ``(z, q) -> (above, tail, slope)``: the terms of an item in the sums of a threshold search, 1 above the
            cut and 0 below, its tail and F'(z).
        value: ``(z, q)``: F(z).
        slope: ``(z, q)``: F'(z).
        quantile: ``(p, q)``: the inverse of F, to a few digits.
        newton_step: ``(signed, total, slope, excess, k, q)``: as in the torch link.
        log_value: ``(z, q)``: log F(z), even if F underflows; None if the link has no logarithms here.
        log_derivative: ``(z, q)``: F'(z) / F(z), likewise.
        distances: The dtype of z for the terms and the value, if it is not that of the loop.
        of: The class of the link, for its ``compact``, ``reaches_zero`` and ``reach``.
    """

    terms: Compiled
    value: Compiled
    slope: Compiled
    quantile: Compiled
    newton_step: Compiled
    log_value: Compiled = None
    log_derivative: Compiled = None
    distances: Real = None
    of: Any = None


def variant_of(link: Link) -> str:
    """The name of the loops for a link: that of its piece and, for powers, the kind of the exponent."""
    q = link.q
    if link.kernel != "clip_power" or (not link.is_steep and q != int(q)):
        return str(link.kernel)
    return f"clip_power_{q:g}" if q <= LARGEST_PRODUCT and q == int(q) else "clip_power_steep"


@functools.cache
def numba_link(of: type[Link], variant: str, real: Real) -> NumbaLink:
    """The record of links of this class, from the file beside that of the class."""
    with specialised(f"{variant} {real.__name__}"):  # so that names do not depend on which loop asks first
        found: NumbaLink = import_module(f"{of.__module__}_numba").numba_link(variant, real)
    return found._replace(of=of)


def smooth_link(
    tails: Compiled, quantile: Compiled, real: Real, log_value: Compiled, log_derivative: Compiled
) -> NumbaLink:
    """The record of a link with F(-z) = 1 - F(z), from ``tails(a) -> (F(-a), F'(a))`` for a >= 0."""
    zero, one = real(0), real(1)

    @inlined
    def terms(z, q):
        tail, slope = tails(abs(z))
        return one if z > zero else zero, tail, slope

    @inlined
    def value(z, q):
        tail, _ = tails(abs(z))
        return one - tail if z > zero else tail

    @inlined
    def slope(z, q):
        _, found = tails(abs(z))
        return found

    return NumbaLink(terms, value, slope, quantile, balance_step, log_value, log_derivative)


@per_row
def balance_step(signed, total, slope, excess, k, q):
    """Newton's method for log(A / B); see :mod:`khot.kernels.threshold.residual`."""
    size = total + abs(excess)
    ratio = (signed + excess) / size
    square = ratio * ratio
    if square < NEARLY_BALANCED:  # the series of atanh, accurate to 1e-8, in a tenth of the time
        rate = ratio * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9))))
    else:
        rate = math.atanh(ratio) if square < 1 else math.copysign(np.inf, ratio)
    return rate * (1 - square) / (1 - ratio * signed / total) * size / slope


@per_row
def normal_quantile(p):
    """The quantile to 4.5e-4: formula 26.2.23 of Abramowitz and Stegun, "Handbook of Mathematical Functions"."""
    r = math.sqrt(-2.0 * math.log(min(p, 1.0 - p)))
    size = r - (2.515517 + r * (0.802853 + r * 0.010328)) / (1.0 + r * (1.432788 + r * (0.189269 + r * 0.001308)))
    return -size if p < 0.5 else size


@per_row
def normal_spacing(quantile):
    """The distance between neighbours among n normal numbers at a quantile, in deviations, times n."""
    return math.exp(0.5 * quantile * quantile) * math.sqrt(2 * math.pi)
