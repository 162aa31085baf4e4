"""Devices without float64, such as Apple's: calls that need it run on the host."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

__all__ = ["has_float64", "is_moved_to_host", "on_host", "on_host_without_float64"]

P = ParamSpec("P")
R = TypeVar("R")

WITHOUT_FLOAT64 = {"mps"}  # device types


def has_float64(x: Tensor) -> bool:
    """Whether the device of a tensor has float64."""
    return x.device.type not in WITHOUT_FLOAT64


def on_host_without_float64(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: tensors on a device without float64 are moved to the host, and the result back."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not is_moved_to_host(args, kwargs):
            return function(*args, **kwargs)
        return cast(R, on_host(function, args, kwargs))

    return call


def is_moved_to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that needs float64 runs on the host because its device has none."""
    return _device_without_float64(args, kwargs) is not None


def on_host(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the call on the host and moves the result back to the device, from double to single precision."""
    device = _device_without_float64(args, kwargs)
    result = function(*map(_to_host, args), **{name: _to_host(value) for name, value in kwargs.items()})
    results = result if isinstance(result, tuple) else (result,)
    back = tuple((y.float() if y.dtype == torch.float64 else y).to(device) for y in results)
    return back if isinstance(result, tuple) else back[0]


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _device_without_float64(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device without float64 of the first tensor that is on one."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor) and not has_float64(value):
            return value.device
    return None
