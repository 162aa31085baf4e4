"""How the distances z = (x - t) / sigma of items depend on the threshold t, in numba.

The scale sigma is the softness s, or s t^(p-1) for magnitudes, for which see :mod:`.numba_magnitudes`.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import numpy as np

from ..cpu.loops import inlined
from ..cpu.maths import Real
from ..links.base_numba import Compiled, NumbaLink


class Place(NamedTuple):
    """The threshold of a row, and the numbers that give its scale."""

    anchor: float
    offset: float
    s: float
    q: float


class Scale(NamedTuple):
    """How z = (x - t) / sigma of items depends on t; functions of float64 numbers.

    Attributes:
        name: Distinguishes the compiled functions below from others.
        at: ``(t, s, q)``: sigma.
        threshold: ``(u, z, s, q)``: the t at which the item u has this z.
        step: ``(signed, total, slope, excess, k, q, t, sigma)``: the step of t by Newton's method.
        split: ``(base, t, rest, s, q)``: anchor and offset of base + t + rest.
        grows: Whether sigma grows with t.
    """

    name: str
    at: Compiled
    threshold: Compiled
    step: Compiled
    split: Compiled
    grows: bool


def fixed_scale(name: str, link: NumbaLink, real: Real) -> Scale:
    """The scale of masks, sigma = s."""
    newton_step = link.newton_step

    @inlined
    def at(t, s, q):
        return s

    @inlined
    def threshold(u, z, s, q):
        return u - z * s

    @inlined
    def step(signed, total, slope, excess, k, q, t, sigma):
        return newton_step(signed, total, slope, excess, k, q) * sigma

    @inlined
    def split(base, t, rest, s, q):
        anchor = np.float64(real(base + t))
        return anchor, (((base - anchor) + t) + rest) / s

    return Scale(name, at, threshold, step, split, False)
