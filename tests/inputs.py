"""Inputs of tests."""

import torch
from torch import Tensor

# Of the small models of Pyro: natural parameters of five units, and what each costs if it is in.
LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1, -0.3], dtype=torch.float64)
COST = torch.tensor([0.3, 1.0, -0.5, 0.2, 0.7], dtype=torch.float64)


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, the same in every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
