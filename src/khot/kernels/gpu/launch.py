"""Launches of Triton kernels that cost the host little.

For each launch Triton finds out anew which of its compilations fits the arguments. This takes the host some 50 µs,
while many kernels take 5 µs. :func:`launch` remembers the compilation by what Triton looks at: dtypes and alignment of
tensors, and whether an integer fits into 32 bits, is 1, or is divisible by 16. Settings of Triton that change a
compilation, such as ``TRITON_DEBUG``, must be made before the first launch of a kernel.
"""

from typing import Any

from torch import Tensor

from .target import compiles_for_cuda

_compiled: dict[tuple[Any, ...], Any] = {}
_remembers = True


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    kind: Any = None,
    **options: Any,
) -> None:
    """Launches a kernel on the device of its first argument, which must be the current one.

    Args:
        kernel: A function with ``@triton.jit``.
        grid: Numbers of programs.
        arguments: Its arguments, in order.
        constants: Its constexprs, which come after them.
        kind: That of the arguments by :func:`kind_of`, if it is needed for several launches.
        options: Triton's, as ``num_warps``.
    """
    key = (id(kernel), arguments[0].device, constants, *options.items(), kind or kind_of(arguments))
    found = _compiled.get(key)
    if found is not None:
        found[grid](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, *constants, **options)
    if _remembers and compiles_for_cuda() and compiled is not None:  # on ROCm Triton looks at sizes of storages, too
        _compiled[key] = compiled


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
