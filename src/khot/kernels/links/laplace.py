r"""The link of LapSum top-k: the distribution function of the Laplace law.

Its tails are exponential all the way to the middle, where its density has a kink. The short tail u = exp(-abs(z)) / 2
is also the density: F' = u.
"""

import torch
from torch import Tensor

from .base import LOG_2, Moments, SymmetricLink


class Laplace(SymmetricLink):
    """F(z) = exp(z) / 2 for z <= 0 and 1 - exp(-z) / 2 above."""

    link_id = 1
    reach = 800.0
    moments = Moments(mean=0.0, variance=2.0)
    kernel = "laplace"

    def value(self, z: Tensor) -> Tensor:
        tail = self.slope(z)
        return torch.where(z > 0, 1 - tail, tail)

    def slope(self, z: Tensor) -> Tensor:
        return 0.5 * torch.exp(-z.abs())

    def value_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        tail = self.slope(z)
        return torch.maximum(tail, (1 - tail) * (z > 0)), tail

    def inverse(self, p: Tensor) -> Tensor:
        return torch.where(p <= 0.5, (2 * p).log(), -(2 - 2 * p).log())

    def slope_at(self, p: Tensor) -> Tensor:
        return torch.minimum(p, 1 - p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.where(z <= 0, z.clamp(max=0) - LOG_2, torch.log1p(-0.5 * torch.exp(-z.clamp(min=0))))

    def log_slope(self, z: Tensor) -> Tensor:
        return -z.abs() - LOG_2

    def log_derivative(self, z: Tensor) -> Tensor:
        tail = (-z.clamp(min=0)).exp()
        return tail / (2 - tail)

    def log_decay(self, z: Tensor, beyond: Tensor) -> Tensor:
        return -beyond.abs()

    def log_hazard(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z)


LAPLACE = Laplace()
