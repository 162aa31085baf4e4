r"""The law of the noise at :math:`x = e^{s + \vartheta}` for loops, of its own relative accuracy in both tails."""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np

from ..cpu.loops import inlined
from ..cpu.maths import EXP

SMALL = 0.5  # largest x for which 1 - exp(-x) is computed from the series
BACKWARDS = tuple((-1.0) ** j / math.factorial(j + 1) for j in range(13, -1, -1))  # series of (1 - exp(-x)) / x
LEAST_MISSING = 1e-17  # so that a product of a few has a logarithm
exp = EXP[np.float64]


class LoopNoise(NamedTuple):
    """Functions of x.

    Attributes:
        fates: F, 1 - F and f.
        member: F, h = f / F and the derivative of h by s.
        other: 1 - F and f / (1 - F).
        is_logistic: Whether this is logistic noise.
        is_exponential: Whether 1 - F is exp(-x).
        has_kinks: Whether F has a kink at x = 1.
    """

    fates: Any
    member: Any
    other: Any
    is_logistic: bool = False
    is_exponential: bool = False
    has_kinks: bool = False


@inlined
def _logistic_fates(x):
    missing = 1.0 / (1.0 + x)
    came = x * missing
    return came, missing, came * missing


@inlined
def _logistic_member(x):
    missing = 1.0 / (1.0 + x)
    came = x * missing
    return came, missing, -came * missing


@inlined
def _logistic_other(x):
    missing = 1.0 / (1.0 + x)
    return missing, x * missing


@inlined
def _exponential(x):
    """(1 - exp(-x)) / x and exp(-x)."""
    missing = exp(-x)
    series = 0.0
    for coefficient in BACKWARDS:
        series = series * x + coefficient
    return (series if x < SMALL else (1.0 - missing) / x), missing


@inlined
def _exponential_fates(x):
    share, missing = _exponential(x)
    return share * x, missing, x * missing


@inlined
def _exponential_member(x):
    share, missing = _exponential(x)
    ahead = missing / share
    return share * x, ahead, ahead * (1.0 - x - ahead)


@inlined
def _exponential_other(x):
    return exp(-x), x


@inlined
def _uniform_fates(x):
    return min(x, 1.0), max(1.0 - x, 0.0), x if x < 1.0 else 0.0


@inlined
def _uniform_member(x):
    return min(x, 1.0), 1.0 if x < 1.0 else 0.0, 0.0


@inlined
def _uniform_other(x):
    missing = max(1.0 - x, LEAST_MISSING)
    return missing, x / missing


NOISES = {
    "logistic": LoopNoise(_logistic_fates, _logistic_member, _logistic_other, is_logistic=True),
    "log_exponential": LoopNoise(_exponential_fates, _exponential_member, _exponential_other, is_exponential=True),
    "log_uniform": LoopNoise(_uniform_fates, _uniform_member, _uniform_other, has_kinks=True),
}
