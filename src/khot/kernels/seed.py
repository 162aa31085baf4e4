"""Seeds of the random numbers that kernels make themselves."""

import torch
from torch import Tensor


def draw_seed(device: torch.device) -> Tensor:
    """An int64 seed ``(1,)`` from torch's generator of the device, where it stays: nobody waits for it."""
    return torch.randint(2**63 - 1, (1,), device=device)
