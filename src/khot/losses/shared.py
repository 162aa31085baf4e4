"""The shared part of the losses: reductions, and descriptions of arguments for error messages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._validation import check_positive_contents, check_softness, check_strided

Relaxation = Callable[[Tensor, Any, Any], Tensor]
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda v: v, "mean": torch.mean, "sum": torch.sum}


def describe(value: object) -> str:
    """A noun phrase for what was passed in place of a tensor."""
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}, {value.dtype}"
    return f"a {type(value).__name__}"


def check_softness_for(scores: Tensor, softness: Any) -> None:
    """Checks the softness of a relaxation, which has another name for it in its own messages."""
    check_softness("softness", softness, scores, scores.shape[:-1], advice="")
    check_positive_contents("softness", softness)


def check_like_scores(name: str, value: Any, x: Tensor) -> None:
    """Checks for a real tensor of the shape of the scores."""
    check_strided(name, value)
    if not isinstance(value, Tensor) or value.shape != x.shape:
        raise ValueError(f"`{name}` must be a tensor of the shape {tuple(x.shape)} of `x`, but is {describe(value)}")
    if value.is_complex():
        raise TypeError(f"`{name}` must be real, but is {describe(value)}")
