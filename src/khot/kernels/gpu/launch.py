"""Launches of Triton kernels that cost the host little.

For each launch Triton finds out anew which of its compilations fits the arguments. This takes the host some 50 µs,
while many kernels take 5 µs. :func:`launch` remembers the compilation by what Triton looks at: dtypes and alignment of
tensors, and whether an integer fits into 32 bits, is 1, or is divisible by 16. :func:`launch_each` remembers launches
by what their caller knows to be the same. Settings of Triton that change a compilation, such as ``TRITON_DEBUG``, must
be made before the first launch of a kernel.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import Tensor

from .target import compiles_for_cuda

MOST_SERIES = 1024  # that are kept; the number of rows may change from call to call

Grid = tuple[int, int, int]
Launcher = Callable[..., None]  # takes the arguments and constexprs of a kernel

_compiled: dict[tuple[Any, ...], Any] = {}
_series: dict[Hashable, list[tuple[Launcher, tuple[Any, ...]]]] = {}
_remembers = True


def launch(
    kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: tuple[Any, ...], **options: Any
) -> Launcher | None:
    """Launches a kernel on the device of its first argument, which must be the current one.

    Args:
        kernel: A function with ``@triton.jit``.
        grid: Numbers of programs.
        arguments: Its arguments, in order.
        constants: Its constexprs, which come after them.
        options: Triton's, as ``num_warps``.

    Returns:
        What repeats the launch with other arguments of the same kinds; None if Triton has to look at each.
    """
    key = (id(kernel), arguments[0].device, constants, *options.items(), kind_of(arguments))
    found = _compiled.get(key)
    if found is None:
        found = kernel[grid](*arguments, *constants, **options)
        if found is None or not (_remembers and compiles_for_cuda()):  # on ROCm Triton looks at sizes of storages, too
            return None
        _compiled[key] = found
        return found[grid]
    launcher: Launcher = found[grid]
    launcher(*arguments, *constants)
    return launcher


def launch_each(
    kernel: Any,
    arguments: tuple[Any, ...],
    key: Hashable,
    parts: Callable[[], Iterable[tuple[Grid, tuple[Any, ...], dict[str, Any]]]],
) -> None:
    """Launches a kernel several times with the same arguments.

    Args:
        kernel: As for :func:`launch`.
        arguments: As there.
        key: Determines the parts, the device, and the kinds of all arguments.
        parts: Makes the grid, the constants and the options of each launch.
    """
    key = id(kernel), key
    series = _series.get(key)
    if series is not None:
        for launcher, constants in series:
            launcher(*arguments, *constants)
        return
    launched = [
        (launch(kernel, grid, arguments, constants, **options), constants) for grid, constants, options in parts()
    ]
    known = [(launcher, constants) for launcher, constants in launched if launcher is not None]
    if len(known) == len(launched):
        if len(_series) >= MOST_SERIES:
            _series.clear()
        _series[key] = known


def kind_of(value: Any) -> Any:
    """The properties of an argument, or of each of several, for which Triton compiles separately on CUDA devices."""
    kind = type(value)
    if kind is float:
        return kind
    if kind is tuple:
        return tuple([kind_of(each) for each in value])  # a list is faster than a generator
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return kind, -(2**31) <= value < 2**31, value < 2**63, value == 1, value % 16 == 0
    return kind


def forget_launches() -> None:
    """Lets Triton examine all arguments of all later launches: for tools that replace its driver."""
    global _remembers
    _remembers = False
    _compiled.clear()
    _series.clear()
