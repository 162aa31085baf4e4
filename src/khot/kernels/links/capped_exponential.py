r"""The link of capped softmax: F(z) = min(1, exp z), exponential below its cap.

argmax of <x, y> - s sum y log y over the capped simplex has log y_i = min(0, (x_i - t) / s).
"""

import torch
from torch import Tensor

from .base import Link, Moments


class CappedExponential(Link):
    """F(z) = min(1, exp z): compact above, exponential below."""

    link_id = 4
    compact = True
    reaches_zero = False
    reach = 800.0  # exp(-800) is 0 in double precision
    moments = Moments(mean=-1.0, variance=1.0)
    kernel = "exp"

    def value(self, z: Tensor) -> Tensor:
        return z.clamp(max=0).exp()

    def complement(self, z: Tensor) -> Tensor:
        return -torch.expm1(z.clamp(max=0))

    def slope(self, z: Tensor) -> Tensor:
        return z.clamp(max=0).exp() * (z < 0)

    def value_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value = self.value(z)
        return value, value * (z < 0)

    def inverse(self, p: Tensor) -> Tensor:
        return p.log()

    def log_value(self, z: Tensor) -> Tensor:
        return z.clamp(max=0)

    def log_slope(self, z: Tensor) -> Tensor:
        return torch.where(z < 0, z, -torch.inf)

    def log_decay(self, z: Tensor, beyond: Tensor) -> Tensor:
        # Among capped items, only those next to the cap reach it when t rises, as it does when k falls.
        return torch.where(z < 0, beyond, torch.where(beyond > 0, -torch.inf, 0.0))

    def log_hazard(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z)


CAPPED_EXPONENTIAL = CappedExponential()
