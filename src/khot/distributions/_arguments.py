"""Checks of the arguments that the distributions have in common."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from khot._tracing import shape_of, untraced
from khot._validation import expanded


class Vector(constraints.Constraint):
    """``constraints.independent(base, 1)``, which fails on empty batches."""

    event_dim = 1

    def __init__(self, base: constraints.Constraint) -> None:
        self.base = base
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return self.base.check(value).all(-1)

    def __repr__(self) -> str:
        return f"vector of {self.base}"


@untraced
def checked_param(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"`{name}` must have a floating-point dtype, but got {value.dtype}")
    if value.dim() < 1 or value.shape[-1] < 1:
        raise ValueError(f"`{name}` must have shape (..., n) with n >= 1, but got shape {tuple(value.shape)}")
    return value


def checked_size(k: Any, param: Tensor) -> Tensor:
    shape = shape_of(param)
    n = shape[-1]
    if isinstance(k, Tensor):
        if k.is_floating_point() or k.is_complex() or k.dtype == torch.bool:
            raise TypeError(f"`k` must be an int or an integer tensor, but got a tensor of dtype {k.dtype}")
    elif isinstance(k, bool) or not hasattr(k, "__index__"):
        raise TypeError(f"`k` must be an int or an integer tensor, but got k={k!r}")
    elif not 0 <= k <= n:
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={k} with n={n}")
    if isinstance(k, Tensor):
        return expanded("k", k.to(param.device, torch.long), shape[:-1])
    return torch.full(shape[:-1], operator.index(k), device=param.device)  # no copy from the host to wait for


def checked_order(order: Any) -> str:
    if order not in ("fixed", "random"):
        raise ValueError(f"`order` must be 'fixed' or 'random', but got {order!r}")
    return order


def in_short(value: Any) -> Any:
    """A setting as ``repr`` shows it: numbers, names, and shapes of tensors."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_meta):
        return tuple(value.shape)
    return getattr(value, "__name__", value)
