r"""Several swaps in one proposal: a path from a k-hot vector to another one, drawn with the slope at its start.

The log joint density is nearly linear for some steps if each changes it little. A path of L swaps then costs as much as
one swap, a single evaluation with its gradient, and is accepted nearly as often [1]. With :math:`d = \partial \log p /
\partial x` at the start, a path takes L units out of x, one after the other in proportion to :math:`e^{-d_i / 2}`, and
L others in, in proportion to :math:`e^{d_j / 2}`: two Plackett-Luce orders i and j, of probability

.. math:: q_d(i, j \mid x) = \prod_{l = 1}^L \frac{e^{-d_{i_l} / 2}}{A - \sum_{m < l} e^{-d_{i_m} / 2}} \cdot
    \prod_{l = 1}^L \frac{e^{d_{j_l} / 2}}{B - \sum_{m < l} e^{d_{j_m} / 2}},

with A and B the sums over all units in x and over all others. The way back takes the same units in the opposite order,
with the slope at the end. Both orders belong to the state of the chain as auxiliary variables, so accepting x' with
probability :math:`\min(1, p(x') q_{d'}(\bar j, \bar i \mid x') / p(x) q_d(i, j \mid x))` leaves p invariant. As for
single swaps, :mod:`.swaps`, paths are drawn from a mixture with uniform ones.

The best length accepts about 0.574 of the paths [1]. :class:`PathLength` adapts it during warm-up. A share of the
proposals are single swaps, because longer paths alone may not reach all vectors: for k = L = n / 2 they only lead from
a vector to its complement and back.

Shapes: ``value`` and ``slope`` are ``(blocks, 1, n)``, for rows of a fixed size.

References:
    [1] Sun, Dai, Xia, Ramamurthy (2022), "Path auxiliary proposal for MCMC in discrete space", ICLR.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .swaps import Point, gumbel, log_mixture

ACCEPTANCE = 0.574
SINGLE_SHARE = 0.1  # share of single swaps among the proposals
SLOWDOWN = 0.6  # the t-th adaptation changes the logarithm of the length by at most t^-0.6


class Path(NamedTuple):
    """Units that leave, and units that enter, each ``(blocks, length)``."""

    leaving: Tensor
    entering: Tensor

    @property
    def reverse(self) -> "Path":
        return Path(self.entering.flip(1), self.leaving.flip(1))

    def of(self, value: Tensor) -> Tensor:
        """The values at the end of the path."""
        return value.scatter(2, self.leaving.unsqueeze(1), 0.0).scatter(2, self.entering.unsqueeze(1), 1.0)

    @classmethod
    def draw(cls, here: Point, length: int, uniform_share: float) -> "Path":
        """A path for each block from the mixture; meaningless in blocks that cannot swap so many units."""
        log_weight = _log_weights(here)
        informed = torch.rand(log_weight.shape[1], 1, dtype=torch.float32, device=log_weight.device) >= uniform_share
        log_weight = torch.where(informed | log_weight.isinf(), log_weight, 0.0)
        return cls(*(log_weight + gumbel(log_weight[0])).topk(length).indices)

    def log_prob(self, start: Point, uniform_share: float) -> Tensor:
        """The log-probability with which the mixture proposes these paths."""
        log_weight, units = _log_weights(start), torch.stack(self)
        chosen = log_weight.gather(2, units)
        # Sums of what is left at each step are taken from the last one backwards: differences would lose all digits.
        others = log_weight.scatter(2, units, -math.inf).logsumexp(2, keepdim=True)
        left = torch.cat((others, chosen.flip(2)), 2).logcumsumexp(2)[..., 1:]
        informed = (chosen.sum(2) - left.sum(2)).sum(0)
        count = log_weight.isfinite().sum(2, keepdim=True) - torch.arange(units.shape[2], device=units.device)
        uniform = count.double().log().sum((0, 2)).neg()
        return log_mixture(uniform, informed, uniform_share)


@dataclass
class PathLength:
    """The number of swaps in a proposal, which warm-up adapts.

    Attributes:
        most: The largest mean number.
        mean: The mean number; apart from single swaps, paths have the integers next to it as their lengths.
        adaptations: How often it was adapted.
    """

    most: float
    mean: float = 1.0
    adaptations: int = 0

    def draw(self) -> int:
        if self.mean > 1 and float(torch.rand((), dtype=torch.float32)) < SINGLE_SHARE:
            return 1
        below = int(self.mean)
        return below if below == self.mean else below + (float(torch.rand((), dtype=torch.float32)) < self.mean - below)

    def adapt(self, acceptance: float, length: int) -> None:
        """Moves towards the length with the best acceptance rate, in smaller and smaller steps.

        Single swaps say nothing about longer paths, and are ignored if there are longer paths.
        """
        if length < int(self.mean):
            return
        self.adaptations += 1
        factor = math.exp((acceptance - ACCEPTANCE) * self.adaptations**-SLOWDOWN)
        self.mean = min(max(self.mean * factor, 1.0), self.most)


def _log_weights(point: Point) -> Tensor:
    """Logarithms of the weights of leaving and of entering, -inf for units that cannot, ``(2, blocks, n)``."""
    half, ones = point.slope.squeeze(1).double() / 2, point.value.squeeze(1) == 1
    return torch.stack((-half, half)).masked_fill_(torch.stack((~ones, ones)), -math.inf)
