"""Designs whose parameter is of a half type: each result is that of the same design in float32, rounded.

Rounded probabilities do not sum to k, rounded noise repeats itself, and rounded moments cancel. So such a design
computes nothing itself: its members call those of its twin in float32, and round what they return.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._distributed.shards import row_sums


def rounded(name: str, member: Callable[..., Any]) -> Callable[..., Any]:
    """The member of a design; of one in a half type, that of its twin in float32, rounded."""

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
    """Float32 probabilities that sum to ``k``, of which those given, of a half type, are roundings.

    All entries between 0 and 1 move by the same share of themselves, by no more than rounding can have moved them. Only
    what the sum then still has too much is taken from entries of 1. The gradient is that of ``probs``.
    """
    exact, unit = probs.detach().double(), torch.finfo(probs.dtype).eps / 2
    inner, ones = exact.masked_fill(exact == 1, 0.0), (exact == 1).double()
    total, movable, certain = (part.unsqueeze(-1) for part in row_sums(exact, inner, ones))
    lacking = k.unsqueeze(-1) - total
    share = (lacking / movable.where(movable > 0, 1.0)).clamp(-unit, unit)
    rest = ((lacking - share * movable) / certain.clamp(min=1.0)).clamp(-unit / 2, 0.0)
    return probs.float() + (share * inner + rest * ones).float()
