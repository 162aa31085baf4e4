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
    """The law of a noise in loops.

    Attributes:
        law: A function of x, which returns a :class:`Law`.
        is_logistic: Whether this is logistic noise.
        is_exponential: Whether 1 - F is exp(-x).
        has_kinks: Whether F has a kink at x = 1.
    """

    law: Any
    is_logistic: bool = False
    is_exponential: bool = False
    has_kinks: bool = False


class Law(NamedTuple):
    """Numbers at x; the compiler leaves out those that a loop does not use."""

    came: float  # F
    missing: float  # 1 - F
    rate: float  # f
    ahead: float  # h = f / F
    bend: float  # the derivative of h by s
    behind: float  # f / (1 - F)


@inlined
def _logistic(x):
    missing = 1.0 / (1.0 + x)
    came = x * missing
    return Law(came, missing, came * missing, missing, -came * missing, came)


@inlined
def _exponential(x):
    missing = exp(-x)
    series = 0.0
    for coefficient in BACKWARDS:
        series = series * x + coefficient
    share = series if x < SMALL else (1.0 - missing) / x  # (1 - exp(-x)) / x
    ahead = missing / share
    return Law(share * x, missing, x * missing, ahead, ahead * (1.0 - x - ahead), x)


@inlined
def _uniform(x):
    missing, coming = max(1.0 - x, 0.0), 1.0 if x < 1.0 else 0.0
    return Law(min(x, 1.0), missing, x if x < 1.0 else 0.0, coming, 0.0, x / max(missing, LEAST_MISSING))


NOISES = {
    "logistic": LoopNoise(_logistic, is_logistic=True),
    "log_exponential": LoopNoise(_exponential, is_exponential=True),
    "log_uniform": LoopNoise(_uniform, has_kinks=True),
}
