"""Inputs of tests."""

import torch
from torch import Tensor


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, the same in every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
