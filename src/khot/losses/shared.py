"""What the losses have in common: how they are reduced, and how messages name what they were given."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Relaxation = Callable[[Tensor, Any, Any], Tensor]
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda v: v, "mean": torch.mean, "sum": torch.sum}


def describe(value: object) -> str:
    """What was given in the place of a tensor, as a noun."""
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}, {value.dtype}"
    return f"a {type(value).__name__}"
