r"""The link of normal top-k: the standard normal distribution function.

F(z) = erfc(-z / sqrt 2) / 2 and F'(z) = exp(-z^2 / 2) / sqrt(2 pi). Such light tails underflow 38 scales from the
threshold, or 13 in float32: log F and the shares of the slopes are computed from z, relative to the smallest abs(z).
"""

import math

import torch
from torch import Tensor

from .base import Moments, SymmetricLink

SQRT_HALF = math.sqrt(0.5)
INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)


class Normal(SymmetricLink):
    """F(z) = erfc(-z / sqrt 2) / 2, the standard normal distribution function."""

    link_id = 2
    reach = 40.0  # erfc(40 / sqrt 2) is 0 in double precision
    moments = Moments(mean=0.0, variance=1.0)

    def value(self, z: Tensor) -> Tensor:
        return 0.5 * torch.erfc(-SQRT_HALF * z)

    def slope(self, z: Tensor) -> Tensor:
        return INV_SQRT_2PI * torch.exp(-0.5 * z * z)

    def inverse(self, p: Tensor) -> Tensor:
        return torch.special.ndtri(p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.special.log_ndtr(z)

    def log_slope(self, z: Tensor) -> Tensor:
        return -0.5 * z * z + math.log(INV_SQRT_2PI)

    def log_decay(self, z: Tensor, beyond: Tensor) -> Tensor:
        return -(z + 0.5 * beyond) * beyond

    def log_hazard(self, z: Tensor) -> Tensor:
        return 0.5 * math.log(2 / math.pi) - torch.special.erfcx(SQRT_HALF * z.abs()).log()


NORMAL = Normal()
