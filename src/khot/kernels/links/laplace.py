r"""The link of LapSum top-k: the distribution function of the Laplace law.

Its tails are exponentials all the way to the middle, where its density has a kink. The short tail u = exp(-abs(z)) / 2
is the density, too: F' = u.
"""

import torch
from torch import Tensor

from .base import LOG_2, Link, Moments, TailSums, _exp_, _step


class Laplace(Link, name="laplace"):
    """F(z) = exp(z) / 2 for z <= 0 and 1 - exp(-z) / 2 above."""

    reach = 800.0
    moments = Moments(mean=0.0, variance=2.0)
    kernel, kernel_has_log = "laplace", True

    def value(self, z: Tensor) -> Tensor:
        tail = z.abs().mul_(-1 / LOG_2).sub_(1).exp2_()
        return _step(z).sub_(tail).abs_()  # 1 - tail above 0, tail below

    def complement(self, z: Tensor) -> Tensor:
        return self.value(-z)

    def slope(self, z: Tensor) -> Tensor:
        return 0.5 * torch.exp(-z.abs())

    def inverse(self, p: Tensor) -> Tensor:
        return torch.where(p <= 0.5, (2 * p).log(), -(2 - 2 * p).log())

    def slope_at(self, p: Tensor) -> Tensor:
        return torch.minimum(p, 1 - p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.where(z <= 0, z.clamp(max=0) - LOG_2, torch.log1p(-0.5 * torch.exp(-z.clamp(min=0))))

    def log_complement(self, z: Tensor) -> Tensor:
        return self.log_value(-z)

    def log_slope(self, z: Tensor) -> Tensor:
        return -z.abs() - LOG_2

    def log_derivative(self, z: Tensor) -> Tensor:
        tail = (-z.clamp(min=0)).exp()
        return tail / (2 - tail)

    def log_tail(self, z: Tensor) -> Tensor:
        return z.abs().neg_().sub_(LOG_2)

    def log_decay(self, z: Tensor, beyond: Tensor) -> Tensor:
        return -beyond.abs()

    def log_hazard(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z)

    def limits_at_ends(self, z: Tensor, beyond: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        return -z.sign(), torch.zeros_like(z)

    def normalised_slope(self, z: Tensor) -> Tensor:
        return torch.softmax(-z.abs(), -1)

    def log_slope_(self, z: Tensor) -> Tensor:
        return z.abs_().neg_().sub_(LOG_2)

    def normalised_slope_(self, z: Tensor) -> Tensor:
        return torch.softmax(self.log_slope_(z), -1)

    def slope_(self, z: Tensor) -> Tensor:
        return _exp_(z.abs_().neg_()).mul_(0.5)

    def tail_sums(self, z: Tensor) -> TailSums:
        # u = F' = exp(-|z|) / 2.
        above = torch.gt(z, 0, out=torch.empty_like(z))
        count = above.sum(-1)
        tail = _exp_(z.abs_().neg_())
        total = 0.5 * tail.sum(-1)
        return TailSums(count, total - tail.mul_(above).sum(-1), total, total)


LAPLACE = Laplace()
