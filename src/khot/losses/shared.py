"""The shared part of the losses: reductions, and descriptions of arguments for error messages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Relaxation = Callable[[Tensor, Any, Any], Tensor]
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda v: v, "mean": torch.mean, "sum": torch.sum}


def describe(value: object) -> str:
    """A noun phrase for what was passed in place of a tensor."""
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}, {value.dtype}"
    return f"a {type(value).__name__}"
