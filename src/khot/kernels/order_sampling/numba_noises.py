r"""The law of the noise at :math:`x = e^{s + \vartheta}` for loops, of its own relative accuracy in both tails."""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np

from ..cpu.loops import inlined
from ..cpu.maths import EXP

SMALL = 0.5  # largest x for which 1 - exp(-x) is computed from the series
BACKWARDS = tuple((-1.0) ** j / math.factorial(j + 1) for j in range(13, -1, -1))  # series of (1 - exp(-x)) / x
exp = EXP[np.float64]


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


LAWS = {"logistic": _logistic, "log_exponential": _exponential}  # by the name of the noise
