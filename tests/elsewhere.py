"""A device that no machine has, for tests of where tensors are: its numbers lie in the memory of the CPU.

A tensor on an accelerator and one in the memory of the host cannot meet in an operation, unless the latter is a single
number. Here this is an error, too, and code that waits for contents runs, since there are contents. The type of the
device is one that every torch knows and hardly anybody has. Tensors say that they are on a CUDA device, so that the
code asks for Triton's kernels. In their place the definitions compute, on numbers that may come from both places.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map_only

from khot._torch_internals import eager_dispatcher, has_memory, runs_unwatched
from khot.kernels import call, threshold
from khot.kernels.exact.rows import in_rows_of
from khot.kernels.links.base import Link
from khot.kernels.operators.platforms import DEVICES, OBSTACLES
from khot.kernels.registry import Operation, Operator, backend
from khot.kernels.threshold.kinds import Kind, Recipe, Solved
from khot.laws import order_at_once

DEVICE = torch.device("lazy")
aten = torch.ops.aten
_is_recording = False
MOVES = {aten._to_copy.default, aten.copy_.default}  # from one device to another
READS = {
    *(aten._local_scalar_dense.default, aten._is_all_true.default, aten.equal.default, aten.nonzero.default),
    *(aten.masked_select.default, aten._unique2.default, aten.unique_dim.default),
}  # on the host, at least a number of entries
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# Besides those that compute entry by entry, these accept a single number from the host.
WITH_NUMBER = {aten.where.self, aten.masked_fill.Tensor, aten.masked_fill_.Tensor}
# Zeros without memory, which are tangents of constants, cannot be wrapped.
SIMPLER = {aten._efficientzerotensor.default: aten.zeros.default}


class Elsewhere(Tensor):
    """A tensor on the device.

    Attributes:
        here: Its numbers, a tensor on the CPU.
    """

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )

    def __init__(self, here: Tensor) -> None:
        self.here = here

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.here} elsewhere"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]

    def tolist(self) -> Any:  # which torch refuses to subclasses
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the mode of its device")


def there(x: Tensor) -> Tensor:
    """A copy of a tensor there, a leaf that requires a gradient if x does."""
    return Elsewhere(x.detach().clone()).requires_grad_(x.requires_grad)


def numbers(value: Any) -> Any:
    """The same with tensors here, without gradients."""
    return tree_map_only(Tensor, lambda x: (x.here if isinstance(x, Elsewhere) else x).detach(), value)


class _Device(TorchDispatchMode):
    """Operations on tensors there, and those that make some."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = SIMPLER.get(func, func), dict(kwargs or {})
        if func.namespace == "khot":
            function = OPDEFS[func.name().partition(".")[0]]._init_fn.__wrapped__  # type: ignore[attr-defined]
            with _eager_dispatcher(), torch.no_grad():
                return function(*args, **kwargs)
        tensors = list(_tensors(args)) + list(_tensors(kwargs.values()))
        is_there = any(isinstance(x, Elsewhere) for x in tensors)
        if is_there and func not in MOVES:
            _check(func, args, tensors)
        if _is_recording:
            _check_recorded(func, args, kwargs)
        if "device" in kwargs:
            is_there = kwargs["device"] is not None and kwargs["device"].type == DEVICE.type
            kwargs["device"] = torch.device("cpu") if is_there else kwargs["device"]
        elif func is aten.copy_.default:
            is_there = isinstance(args[0], Elsewhere)
        written = {id(x.here): x for x in tensors if isinstance(x, Elsewhere)}
        result = func(*_here(args), **{name: _here(value) for name, value in kwargs.items()})
        return _wrapped(result, written) if is_there else result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, which may be lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _here(value: Any) -> Any:
    """An argument with the numbers of tensors that are there."""
    if type(value) in (list, tuple):
        return type(value)(map(_here, value))
    return value.here if isinstance(value, Elsewhere) else value


def _wrapped(result: Any, written: dict[int, Elsewhere]) -> Any:
    """A result as tensors there; an argument to which an operation wrote is itself."""
    if isinstance(result, list | tuple):
        return type(result)([_wrapped(part, written) for part in result])
    if not isinstance(result, Tensor):
        return result
    return written[id(result)] if id(result) in written else Elsewhere(result)


def _check(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Raises a RuntimeError if a tensor here takes part in an operation there, as torch does."""
    hosts = [x for x in tensors if not isinstance(x, Elsewhere)]
    if torch.Tag.pointwise in func.tags or func in WITH_NUMBER:
        hosts = [x for x in hosts if x.dim() > 0 or (func._schema.is_mutable and x is args[0])]
    if func in INDEXING:
        indices = {id(x) for x in args[1]}
        hosts = [x for x in hosts if id(x) not in indices]
    if hosts:
        shapes = [tuple(x.shape) for x in hosts]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got tensors {shapes} of the CPU")


def _check_recorded(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises a RuntimeError for what a CUDA graph cannot record."""
    is_there = [isinstance(x, Elsewhere) for x in _tensors(args)]
    moves = func in READS and any(is_there)
    if func is aten._to_copy.default and kwargs.get("device") is not None:
        moves = is_there[0] != (kwargs["device"].type == DEVICE.type)
    elif func is aten.copy_.default:
        moves = is_there[0] != is_there[1]
    elif func in INDEXING and is_there[0]:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        moves = any(x.dtype == torch.bool or not isinstance(x, Elsewhere) for x in indices)
    if moves:
        raise RuntimeError(f"operation not permitted when stream is capturing: {func}")


@contextmanager
def recording() -> Iterator[None]:
    """In this context, inside :func:`elsewhere`, a CUDA graph records what happens."""
    global _is_recording
    with (
        patch.object(torch.cuda, "is_initialized", lambda: True),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        _is_recording = True
        try:
            yield
        finally:
            _is_recording = False


def _launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors here as one that runs there."""

    @functools.wraps(function)
    def launch(*args: Any) -> Any:
        for value in args:
            single = not isinstance(value, Tensor) or isinstance(value, Elsewhere) or not any(value.stride())
            assert single, "a kernel takes only single numbers from the host"
        with _disable_current_modes():
            results = function(*_here(args))
        return _wrapped(results, {})

    return launch


_load = Operation.load


def _code(self: Operation, name: str, *asked: Any) -> Any:
    """The definition in the place of a kernel in Triton; nothing for launchers that have none."""
    if name != "triton":
        return _load(self, name, *asked)
    if self is threshold.recipes:
        return _recipe
    return _launched(self.plain) if isinstance(self, Operator) else None


def _recipe(link: Link, kind: Kind, dtype: torch.dtype) -> Recipe:
    def mask(x: Tensor, k: float, scale: float) -> Solved:
        sizes, scales = (in_rows_of(x, value) for value in (k, scale))
        y, *at = threshold.mask.plain(x, sizes, scales, *link.key, kind.name, "softness", False, True)
        return y, torch.stack(at)

    def gradient(x: Tensor, scale: float, at: Tensor, grad: Tensor) -> Tensor:
        arguments = x, in_rows_of(x, scale), at[0], at[1], grad, *link.key, kind.name, False
        found: Tensor = threshold.mask_derivative.plain(*arguments)[0]
        return found

    return Recipe(_launched(mask), _launched(gradient))


@contextmanager
def elsewhere() -> Iterator[None]:
    """In this context tensors may be elsewhere, and calls with them are as plain as those on real devices."""
    with (
        patch.dict(DEVICES, triton=DEVICE.type),
        patch.dict(OBSTACLES, triton=lambda device: None),
        patch.object(Operation, "load", _code),
        backend("auto"),  # which forgets what is known
        patch.object(call, "has_memory", lambda x: type(x) is Elsewhere or has_memory(x)),
        patch.object(call, "runs_unwatched", _runs_unwatched),
        patch.object(order_at_once, "eager_dispatcher", _eager_dispatcher),
        _Device(),
        _tensors_are_moved(),
    ):
        yield


@contextmanager
def _tensors_are_moved() -> Iterator[None]:
    """torch.tensor makes tensors on the CPU first, and moves them in an operation that a mode sees."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextmanager
def _eager_dispatcher() -> Iterator[None]:
    """The state of torch's dispatcher for code that is not traced, with the device."""
    with _disable_current_modes(), eager_dispatcher(), _Device():  # the first mode of all tells the dispatcher
        yield


def _runs_unwatched(forward_mode: bool = False) -> bool:
    """Whether nothing but the mode of the device is active."""
    if not all(isinstance(mode, _Device) for mode in _get_current_dispatch_mode_stack()):
        return False
    with _disable_current_modes():
        return runs_unwatched(forward_mode)
