"""Argument checks that the distributions share."""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from khot._contents import can_look
from khot._distributed.placements import refuse_dtensor
from khot._host import has_float64
from khot._shapes import broadcast_shapes
from khot._validation import SOFTNESS_LIMITS, check_floating, check_strided, checked_integer

RANGE_ADVICE = "ConditionalPoisson(logits=logits, k=(low, high)) takes a range of sizes"


class Vector(constraints.Constraint):
    """Like ``constraints.independent(base, 1)``, which fails on empty batches."""

    event_dim = 1

    def __init__(self, base: constraints.Constraint) -> None:
        self.base = base
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return self.base.check(value).all(-1)

    def __repr__(self) -> str:
        return f"vector of {self.base}"


def refuse_unknown(kind: Any, names: Set[str]) -> None:
    """Raises a TypeError about arguments that a class of designs does not take, if there is advice beyond Python's."""
    relaxes, name = getattr(kind, "_relaxes", None), kind.__name__
    if relaxes is not None and "n" in names:
        raise TypeError(
            f"{name} takes no `n`, which is the length of a row; the number of ones is `k`. For probabilities in "
            f"proportion to sizes, write {name}(probs=capped_softmax(sizes.log(), k))"
        )
    for argument in names & {"relaxation", "temperature"} if relaxes is False else ():
        raise TypeError(
            f"{name} takes no `{argument}`, as its `logits` are natural parameters: divide them by a temperature, or "
            "pass inclusion probabilities, probs=sigmoid_topk(logits, k, temperature), to a design that takes `probs`"
        )


def checked_param(name: str, value: Any) -> Tensor:
    is_usual = isinstance(value, Tensor) and value.dtype in SOFTNESS_LIMITS and value.layout is torch.strided
    if not is_usual or value.is_nested:
        check_floating(name, value, are_scores=name == "logits")
    if value.dim() < 1 or value.shape[-1] < 1:
        raise ValueError(f"`{name}` must have shape (..., n) with n >= 1, but got shape {tuple(value.shape)}")
    if not (value.is_cpu or has_float64(value)):
        raise NotImplementedError(
            f"designs are computed in float64, which {value.device.type} devices do not support: pass "
            f"{name}.cpu(), through which gradients flow, and move the draws to the device"
        )
    return value


def with_size(name: str, param: Tensor, k: Any) -> tuple[Tensor, int | Tensor]:
    """The parameter of this name, and k, as an int, or as a tensor if it is one; both with their common batch shape."""
    n = param.shape[-1]
    if type(k) is int and 0 <= k <= n:
        return param, k
    if isinstance(k, tuple):
        raise TypeError(f"`k` must be an int or an integer tensor, but got k={k!r}; {RANGE_ADVICE}")
    size = checked_integer("k", k)
    if isinstance(size, Tensor):
        return broadcast_with_k(name, param, size.to(param.device))
    if not 0 <= size <= n:
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={k} with n={n}")
    return param, size


def in_rows(size: int | Tensor, param: Tensor) -> Tensor:
    """A size as a tensor of the batch shape of the parameter."""
    if isinstance(size, Tensor):
        return size
    return torch.full(param.shape[:-1], size, device=param.device)  # avoids a copy from the host and its wait


def check_sizes(k: Any, n: int) -> None:
    """Checks the contents of k, if it is a tensor."""
    if isinstance(k, Tensor) and not ((k >= 0) & (k <= n)).all():
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k from {k.min()} to {k.max()} with n={n}")


def checked_range(k: tuple[Any, ...], n: int) -> tuple[int | Tensor, int | Tensor]:
    """The smallest and the largest size of a range; ints satisfy ``0 <= low <= high <= n``."""
    if len(k) != 2:
        raise ValueError(f"a range of sizes must be k=(low, high) or k=(low, high, log_prior), but got k={k!r}")
    for i, end in enumerate(k):
        refuse_dtensor(f"k[{i}]", end)
    low, high = (checked_integer(f"k[{i}]", end) for i, end in enumerate(k))
    ints = [end for end in (low, high) if isinstance(end, int)]
    if ints != sorted(ints) or not all(0 <= end <= n for end in ints):
        raise ValueError(f"`k` must satisfy 0 <= low <= high <= n, but got k={k!r} with n={n}")
    return low, high


def broadcast_with_k(name: str, param: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The parameter ``(*batch, n)`` and ``k``, both expanded to their common batch shape."""
    own_shape = param.shape[:-1]
    try:
        batch_shape = broadcast_shapes(own_shape, k.shape)
    except RuntimeError:
        raise ValueError(
            f"`k` must broadcast with the batch shape {tuple(own_shape)} of `{name}`, but got shape {tuple(k.shape)}"
        ) from None
    if batch_shape != own_shape:
        param = param.expand(*batch_shape, -1)
    return param, k.expand(batch_shape)


def broadcast_with_prior(param: Tensor, k: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Logits ``(*batch, n)`` and the log-prior of ``k = (low, high, log_prior)``, with their common batch shape."""
    low, high, log_prior = k
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise TypeError(f"a prior over the size needs ints as the ends of its range, but got k={k!r}")
    if not isinstance(log_prior, Tensor) or not log_prior.is_floating_point():
        got = f"a tensor of dtype {log_prior.dtype}" if isinstance(log_prior, Tensor) else repr(log_prior)
        raise TypeError(f"`k[2]`, the log-probabilities of the sizes, must be a floating-point tensor, but got {got}")
    check_strided("k[2]", log_prior)
    refuse_dtensor("k[2]", log_prior)
    shape, own_shape = log_prior.shape, param.shape[:-1]
    number = high - low + 1
    try:
        batch_shape = broadcast_shapes(own_shape, shape[:-1])
    except RuntimeError:
        batch_shape = None
    if batch_shape is None or shape[-1:] != (number,):
        raise ValueError(
            f"`k[2]`, the log-probabilities of the sizes, must have shape (..., {number}) for k from {low} to {high} "
            f"and broadcast with the batch shape {tuple(own_shape)}, but got shape {tuple(shape)}"
        )
    param = param.expand(*batch_shape, -1) if batch_shape != own_shape else param
    return param, log_prior.to(param.device).expand(*batch_shape, -1)


def in_short(value: Any) -> Any:
    """A setting as ``repr`` shows it: a number, a name, or the shape of a tensor."""
    if isinstance(value, Tensor) and (value.numel() != 1 or not can_look(value)):
        return tuple(value.shape)
    if isinstance(value, tuple):
        return tuple(map(in_short, value))
    return getattr(value, "__name__", value)
