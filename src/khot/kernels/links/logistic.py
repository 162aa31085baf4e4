r"""The link of sigmoid top-k and of unsorted SOFT top-k: the logistic function.

argmax of <x, y> + s sum H_b(y) over the capped simplex, with the binary entropy
H_b(y) = -y log y - (1 - y) log(1 - y), has log(y_i / (1 - y_i)) = (x_i - t) / s.
"""

import math

import torch
from torch import Tensor

from .base import Link, Moments


class Logistic(Link):
    """The logistic link of :func:`~khot.sigmoid_topk`, F(z) = 1 / (1 + exp(-z))."""

    link_id = 0
    reach = 800.0  # exp(-800) is 0 in double precision
    moments = Moments(mean=0.0, variance=math.pi**2 / 3)
    kernel = "logistic"

    def value(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def complement(self, z: Tensor) -> Tensor:
        return torch.sigmoid(-z)

    def slope(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) * torch.sigmoid(-z)

    def value_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.sigmoid(z)
        return value, value - value * value

    def inverse(self, p: Tensor) -> Tensor:
        return torch.logit(p)

    def slope_at(self, p: Tensor) -> Tensor:
        return p * (1 - p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z)

    def log_complement(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(-z)

    def log_odds(self, z: Tensor) -> Tensor:
        return z

    def log_slope(self, z: Tensor) -> Tensor:
        return self.log_value(z) + self.log_value(-z)

    def log_derivative(self, z: Tensor) -> Tensor:
        return torch.sigmoid(-z)

    def log_decay(self, z: Tensor, beyond: Tensor) -> Tensor:
        return -beyond.abs()

    def log_hazard(self, z: Tensor) -> Tensor:
        return self.log_value(z.abs())


LOGISTIC = Logistic()
