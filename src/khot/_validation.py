"""Argument checks shared by the packages: what is checked when, and in which words."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from ._tracing import is_tracing


def checks_contents(tensor: Tensor) -> bool:
    """Whether to look at the contents of this tensor.

    Always on a CPU; elsewhere, where a look stalls the device, only while validation is on
    (``torch.distributions.Distribution.set_default_validate_args``).
    """
    return tensor.device.type == "cpu" or (Distribution._validate_args and not tensor.is_meta)


def looks_at_contents(*tensors: Tensor) -> bool:
    """:func:`checks_contents` for plain Python code, which under tracing and torch.func transforms cannot look."""
    return not (torch.compiler.is_compiling() or is_tracing()) and all(
        checks_contents(t) and not torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors
    )


def check_scores(x: Any, dim: Any) -> None:
    """``x`` is a real floating tensor that has the axis ``dim``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` must be a torch.Tensor, but got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"`x` must have a floating-point dtype, but got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("`x` must have at least one dimension, the ground set, but got a scalar")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"`dim` must be an int in [{-x.dim()}, {x.dim() - 1}] for `x` of shape {tuple(x.shape)}, but got {dim}"
        )


def _check_broadcasts(name: str, value: Tensor, x: Tensor, batch_shape: torch.Size) -> None:
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"`{name}` must be real, but got a tensor of dtype {value.dtype}")
    if value.device != x.device and value.dim() > 0:
        raise ValueError(f"`{name}` must be on the device of `x`, {x.device}, but is on {value.device}")
    try:
        value.expand(batch_shape)
    except RuntimeError:
        raise ValueError(
            f"`{name}` of shape {tuple(value.shape)} must broadcast to the batch shape {tuple(batch_shape)} "
            f"of `x` of shape {tuple(x.shape)}; expand `x` first for a larger batch"
        ) from None


def check_k(k: float | Tensor, x: Tensor, batch_shape: torch.Size, n: int) -> None:
    """``k`` is a number in [0, n] or a tensor that broadcasts with the batch; a tensor's contents are not looked at."""
    if isinstance(k, Tensor):
        _check_broadcasts("k", k, x, batch_shape)
    elif isinstance(k, bool) or not isinstance(k, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"`k` must be a real number or a torch.Tensor, but got {type(k).__name__}")
    elif not 0 <= k <= n:
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={k} with n={n} (`x` of shape {tuple(x.shape)})")


def check_softness(name: str, value: float | Tensor, x: Tensor, batch_shape: torch.Size) -> None:
    """The softness is a positive finite number or a tensor that broadcasts with the batch, contents not looked at."""
    if isinstance(value, Tensor):
        _check_broadcasts(name, value, x, batch_shape)
    elif isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"`{name}` must be a real number or a torch.Tensor, but got {type(value).__name__}")
    elif not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, but got {value}")


def check_maskable(x: Tensor, k: float | Tensor, name: str, softness: float | Tensor) -> None:
    """Contents of the rows of x (..., n), where only ``-inf`` may be infinite, of ``k`` and of the softness."""
    if x.numel() == 0:
        return
    highest, unmasked = x.amax(-1), (x > -torch.inf).sum(-1)
    if bool((highest.isnan() | (highest == torch.inf)).any()):
        raise ValueError("`x` must not contain NaN or +inf")
    if not bool(((k >= torch.zeros_like(unmasked)) & (k <= unmasked)).all()):
        raise ValueError(
            f"`k` must satisfy 0 <= k <= n and not exceed the number of entries above -inf, at least "
            f"{int(unmasked.min())} with n={x.shape[-1]}, but got k={k}"
        )
    value = torch.as_tensor(softness)
    if not bool(((value > 0) & (value < torch.inf)).all()):
        raise ValueError(f"`{name}` must be positive and finite, but got {softness}")


def expanded(name: str, value: Tensor, batch_shape: torch.Size) -> Tensor:
    try:
        return value.expand(batch_shape)
    except RuntimeError:
        message = f"`{name}` must broadcast to the batch shape {tuple(batch_shape)}, but got shape {tuple(value.shape)}"
        raise ValueError(message) from None


def checked_positive(name: str, value: Any, batch_shape: torch.Size) -> float | Tensor:
    """A positive finite number as it is, or a tensor expanded to the batch shape, contents not looked at."""
    if isinstance(value, Tensor):
        return expanded(name, value, batch_shape)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a real number or a tensor, but got {value!r}")
    number = float(value)  # NumPy's numbers are real ones, too
    if not 0 < number < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, but got {value}")
    return number


def check_count(name: str, value: Any) -> None:
    """A Python integer, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, but got {value!r}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, but got {value}")
