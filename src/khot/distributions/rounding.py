"""Designs with a parameter of a half type: each result is that of the same design in float32, rounded.

Rounded probabilities do not sum to k, rounded noise has ties, and rounded moments cancel. So such a design computes
nothing itself: its members call those of its counterpart in float32 and round the results.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rounded(name: str, member: Callable[..., Any]) -> Callable[..., Any]:
    """The member of a design; in a half type, the member of its counterpart in float32, rounded."""

    @functools.wraps(member)
    def call(design: Any, *args: Any, **kwargs: Any) -> Any:
        twin = design.in_float32
        if twin is design:
            return member(design, *args, **kwargs)
        found = getattr(twin, name)
        result: Tensor = found(*args, **kwargs) if callable(found) else found
        return result.to(design.dtype) if result.dtype == torch.float32 else result

    return call


def unrounded(probs: Tensor, k: Tensor) -> Tensor:
    """Float32 probabilities that sum to ``k`` and round to the given ones, which have a half type.

    All entries between 0 and 1 change in the same proportion, by no more than rounding can have changed them. Any
    remaining excess of the sum is taken from entries of 1. The gradient is that of ``probs``.
    """
    exact, unit = probs.detach().double(), torch.finfo(probs.dtype).eps / 2
    inner, ones = exact.masked_fill(exact == 1, 0.0), (exact == 1).double()
    total, movable, certain = (part.sum(-1, keepdim=True) for part in (exact, inner, ones))
    lacking = k.unsqueeze(-1) - total
    share = (lacking / movable.where(movable > 0, 1.0)).clamp(-unit, unit)
    rest = ((lacking - share * movable) / certain.clamp(min=1.0)).clamp(-unit / 2, 0.0)
    return probs.float() + (share * inner + rest * ones).float()
