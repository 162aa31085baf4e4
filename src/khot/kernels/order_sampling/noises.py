"""The noise of order sampling: its law, and how it is computed from uniform numbers.

Graphs and Triton kernels refer to a noise by name; :mod:`khot.laws.order_sampling` integrates over its law.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SURE = 500.0  # finite log-odds of a certain event
LARGEST = 300.0  # its exponential is the hazard of a unit that has certainly arrived
SMALL, LATE = -60.0, 10.0  # bounds within which powers of exp(z) are finite in second derivatives


class Law(NamedTuple):
    """The law of the noise at z; each value has its own relative accuracy in both tails."""

    log_cdf: Tensor
    log_sf: Tensor  # log(1 - F)
    ahead: Tensor  # f / F
    behind: Tensor  # f / (1 - F)


class Noise(ABC):
    """The law of the noise, whose distribution function F is analytic.

    Attributes:
        name: Its name in operators and Triton kernels.
        reach: The z beyond which 1 - F is less than e^-SURE.
        shifts_log_odds: Whether the log-odds of F(z) are z itself.
    """

    name: str
    reach: float
    shifts_log_odds = False

    @abstractmethod
    def law(self, z: Tensor) -> Law:
        """Distribution function and hazards at z."""

    @abstractmethod
    def from_uniform_(self, u: Tensor) -> Tensor:
        """The exponential of the noise, from numbers uniform on (0, 1), which it overwrites."""


class _Logistic(Noise):
    name = "logistic"
    reach = SURE
    shifts_log_odds = True

    def law(self, z: Tensor) -> Law:
        log_cdf, log_sf = F.logsigmoid(z), F.logsigmoid(-z)
        return Law(log_cdf, log_sf, log_sf.exp(), log_cdf.exp())

    def from_uniform_(self, u: Tensor) -> Tensor:
        return u.div_(1 - u)


class _LogExponential(Noise):
    name = "log_exponential"
    reach = math.log(SURE)

    def law(self, z: Tensor) -> Law:
        x = z.clamp(-SURE, LARGEST).exp()
        inner = z.clamp(SMALL, LATE)  # below, log F equals z to all digits; above, F is 1
        y = inner.exp()
        cdf = -torch.expm1(-y)
        return Law(cdf.log() + (z - inner).clamp(max=0), -x, y * torch.exp(-y) / cdf, x)

    def from_uniform_(self, u: Tensor) -> Tensor:
        return u.log_().neg_()


LOGISTIC, LOG_EXPONENTIAL = _Logistic(), _LogExponential()
NOISES = {noise.name: noise for noise in (LOGISTIC, LOG_EXPONENTIAL)}
