"""The pivotal method: duels between units that preserve inclusion probabilities, in an order shuffled for each draw.

:mod:`khot.kernels.draws` plays the duels. Arguments are not checked here.

References:
    [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method",
        Biometrika 85(1).
    [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", Bernoulli 18(4).
"""

import torch
from torch import Tensor

from khot.kernels.draws import balance, missing_share, tournament

from .once import Once, or_new

KEPT_UNITS = 2**17  # beyond this, balanced probabilities take too much memory


def sample(
    probs: Tensor, k: Tensor, draws: int, generator: torch.Generator | None = None, kept: Once | None = None
) -> Tensor:
    """Draws ``(draws, ..., n)`` for probabilities ``(..., n)``; designs that share ``kept`` balance them once."""
    if probs.numel() <= KEPT_UNITS:
        return tournament(or_new(kept).made_if_constant("balanced", balance, probs, k), draws, generator)
    return tournament(probs, draws, generator, missing_share(probs, k))
