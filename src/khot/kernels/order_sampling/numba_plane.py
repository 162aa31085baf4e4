"""Complex numbers, one for each angle, as two arrays, and products of characteristic functions, in numba."""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined

Array = np.ndarray[Any, Any]


class Plane(NamedTuple):
    """Complex numbers."""

    real: Array
    imaginary: Array


@inlined
def plane_of(rows, at, count):
    """The first numbers of two neighbouring rows."""
    return Plane(rows[at, :count], rows[at + 1, :count])


@inlined
def turn(angle, z):
    """Writes the powers 0, 1, ... of e^(i angle).

    There are so few powers that the rounding errors of repeated multiplication do not matter.
    """
    a, b = math.cos(angle), math.sin(angle)
    c, d = 1.0, 0.0
    for j in range(z.real.shape[0]):
        z.real[j], z.imaginary[j] = c, d
        c, d = c * a - d * b, c * b + d * a


@inlined
def multiply(usual, rarer, z, product):
    """Multiplies by usual + rarer z."""
    for i in range(z.real.shape[0]):
        a, b = usual + rarer * z.real[i], rarer * z.imaginary[i]
        before = product.real[i]
        product.real[i] = before * a - product.imaginary[i] * b
        product.imaginary[i] = before * b + product.imaginary[i] * a
