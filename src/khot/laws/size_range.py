r"""Sizes in a range: the preparations of the conditional Poisson law of several sizes for its product tree.

The law is that of independent Bernoulli units of log-odds :math:`\theta_i`, given that their number of ones B is in a
range. With :math:`z_i = \theta_i + c` and any size :math:`k_0`,

.. math:: P(x) = \prod_i \mathrm{Bernoulli}(x_i; \sigma(z_i)) \, w_{|x|} \Big/ \sum_s w_s\, P_z(B = s), \qquad
    w_s = e^{-c (s - k_0)}

If the expected size :math:`\sum_i \sigma(\theta_i)` is in the range, c is 0. Otherwise c is such that the expected size
is the nearer end of the range, which is then :math:`k_0`: no weight exceeds 1, and the sum is not small.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from khot._contents import can_look
from khot.kernels.threshold import solve_threshold

SUM_ROUNDING = 1e-12  # of a sum of probabilities


class SizeRange(NamedTuple):
    """The sizes from ``low`` to ``high``, ``0 <= low <= high <= n``; both ints or both integer tensors."""

    low: int | Tensor
    high: int | Tensor

    def bound(self, n: int) -> int:
        """A Python number, at least 1 and the largest possible count of the rarer value, ones or zeros, in any row."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return max(1, min(self.high, n - self.low))
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        if high.device.type == "cpu" and high.numel() and can_look(low, high):
            return max(1, int(high.minimum(n - low).max()))
        return n


class Centred(NamedTuple):
    """How rows of logits are shifted for their ranges, all ``(*batch,)``."""

    shift: Tensor  # c
    size: Tensor  # k_0, an integer within a half of the expected size
    low: Tensor  # the ends of the range, without sizes that infinite logits make impossible
    high: Tensor


def centred(logits: Tensor, low: Tensor, high: Tensor) -> Centred:
    """c and k_0 of rows of logits ``(*batch, n)`` and their ranges, constants to autograd."""
    logits = logits.detach()
    certain, possible = (logits == torch.inf).sum(-1), (logits > -torch.inf).sum(-1)
    low, high = low.maximum(certain), high.minimum(possible)
    mean = torch.sigmoid(logits).sum(-1)
    end = mean.maximum(low.double()).minimum(high.double())
    # Not if all units except the infinite ones are zeros, or ones: this takes an infinite c.
    target = end.maximum(certain + 0.5).minimum(possible - 0.5)
    outside = (end != mean) & (certain < possible)
    shift = -solve_threshold(logits, torch.where(outside, target, mean)).nan_to_num(0.0, 0.0, 0.0)
    return Centred(shift.masked_fill(~outside, 0.0), end.round().long(), low, high)


def sizes_around(probs: Tensor, low: Tensor, high: Tensor) -> SizeRange:
    """The range of sizes of a law with these inclusion probabilities; a single end, if their sum rounds to it.

    In a wider range, no finite logits have this mean; with that end alone, they do.
    """
    total = probs.detach().double().sum(-1)
    rounding = SUM_ROUNDING * total.clamp(min=1.0)
    at_low, at_high = total <= low + rounding, total >= high - rounding
    return SizeRange(torch.where(at_high & ~at_low, high, low), torch.where(at_low, low, high))
