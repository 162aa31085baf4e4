r"""The link of normal top-k: the standard normal distribution function.

F(z) = erfc(-z / sqrt 2) / 2 and F'(z) = exp(-z^2 / 2) / sqrt(2 pi). Tails as light as these underflow 38 scales from
the threshold, in float32 13: log F and the shares of the slopes come from z itself, relative to the smallest abs(z).
"""

import math

import torch
from torch import Tensor

from .base import INFINITE, Link, Moments, TailSums, _exp_

SQRT_HALF = math.sqrt(0.5)
INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)


class Normal(Link, name="normal"):
    """F(z) = erfc(-z / sqrt 2) / 2, the standard normal distribution function."""

    reach = 40.0  # erfc(40 / sqrt 2) is 0 in double precision
    moments = Moments(mean=0.0, variance=1.0)
    kernel = "normal"

    def value(self, z: Tensor) -> Tensor:
        return (z * -SQRT_HALF).erfc_().mul_(0.5)

    def complement(self, z: Tensor) -> Tensor:
        return self.value(-z)

    def slope(self, z: Tensor) -> Tensor:
        return INV_SQRT_2PI * torch.exp(-0.5 * z * z)

    def inverse(self, p: Tensor) -> Tensor:
        return torch.special.ndtri(p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.special.log_ndtr(z)

    def log_complement(self, z: Tensor) -> Tensor:
        return self.log_value(-z)

    def log_slope(self, z: Tensor) -> Tensor:
        return -0.5 * z * z + math.log(INV_SQRT_2PI)

    def log_tail(self, z: Tensor) -> Tensor:
        below = z.abs().neg_()
        return torch.special.log_ndtr(below, out=below)

    def log_decay(self, z: Tensor, beyond: Tensor) -> Tensor:
        return -(z + 0.5 * beyond) * beyond

    def log_hazard(self, z: Tensor) -> Tensor:
        return 0.5 * math.log(2 / math.pi) - torch.special.erfcx(SQRT_HALF * z.abs()).log()

    def limits_at_ends(self, z: Tensor, beyond: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        return -z, (-INFINITE * beyond).clamp(-INFINITE, INFINITE)  # r = -z; items that are not tied have no limit

    def normalised_slope(self, z: Tensor) -> Tensor:
        # Relative to the largest, where |z| = m: exp((m^2 - z^2) / 2), factored so that no square overflows first.
        distance = z.abs()
        nearest = distance.detach().amin(-1, keepdim=True)
        weight = torch.exp(-0.5 * (distance - nearest) * (distance + nearest))
        return weight / weight.sum(-1, keepdim=True)

    def normalised_slope_(self, z: Tensor) -> Tensor:
        distance = z.abs_()
        nearest = distance.amin(-1, keepdim=True)
        weight = (distance - nearest).mul_(distance.add_(nearest)).mul_(-0.5).exp_()
        return weight.div_(weight.sum(-1, keepdim=True))

    def slope_(self, z: Tensor) -> Tensor:
        return _exp_(z.mul_(z).mul_(-0.5)).mul_(INV_SQRT_2PI)

    def tail_sums(self, z: Tensor) -> TailSums:
        above = torch.gt(z, 0, out=torch.empty_like(z))
        count = above.sum(-1)
        tail = torch.erfc(z.abs_().mul_(SQRT_HALF))
        slope = _exp_(z.mul_(z).neg_()).sum(-1)
        total = 0.5 * tail.sum(-1)
        return TailSums(count, total - tail.mul_(above).sum(-1), total, INV_SQRT_2PI * slope)


NORMAL = Normal()
