"""The log-odds of a relaxed mask, from its scores: exact even where the mask itself has rounded to 0 or 1."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot.kernels.call import call_of
from khot.kernels.threshold.kinds import MASK

from .engine import ThresholdMap
from .linked import link_of, scale_of


def mask_log_odds(
    relaxation: Callable[..., Any], x: Tensor, k: float | Tensor, softness: float | Tensor
) -> Tensor | None:
    """Float64 log-odds of ``relaxation(x, k, softness)`` along the last axis; infinite if x is, or all are certain.

    Differentiable to any order in x, k and the softness. Returns None for a relaxation without a known link, or with
    one that reaches 0 and 1, because log-odds do not exist there.
    """
    link = link_of(relaxation)
    if link is None or link.compact:
        return None
    x, softness = x.double(), scale_of(relaxation, softness)
    z = link.log_odds(ThresholdMap(link, "softness", MASK).distances(call_of(x, k, softness), x, k, softness))
    finite = x.isfinite()
    size = k.unsqueeze(-1) if isinstance(k, Tensor) else k
    included, count = (which.sum(-1, keepdim=True) for which in (x == torch.inf, finite))
    left = size - included
    z = z.masked_fill((left <= 0) & finite, -torch.inf)
    z = z.masked_fill((left >= count) & finite, torch.inf)
    return torch.where(finite, z, x.detach())
