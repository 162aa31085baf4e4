"""What numba backends share: how loops are compiled, and how they run over the rows on several threads.

A kernel is a serial loop ``kernel(first, last, *arguments)`` over the rows [first, last) that writes into given arrays.
It is compiled, without the GIL, at its first call for each dtype. :func:`over_rows` runs it over shares of the rows on
some threads. As rows are independent, results do not depend on the number of threads. numba's own threads are not used:
they slow down beside other processes, and a child forked after their first use dies. Nor are the OpenMP threads of
torch: a child forked after their first use could not use torch's threads any more.

Within a kernel, code for one item is in an :func:`inlined` function, which keeps the order of its arithmetic, and code
for a row in a :func:`per_row` function. A sum over items is :func:`summed`: the compiler chooses the order of its
terms, which it needs for vectorisation, and the order is the same each time. None of them assumes that there are no
infinities or NaN, and none can be called from Python: they have no wrapper for it, which would take a third of the
compilation time.

A docstring that begins with arguments, as in ``(x, k): the threshold``, describes the function that a factory compiles.
"""

import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock

from .cache import kept_on_disk
from .compiler import Apart, Loop, Part

FUSED = {"contract"}  # products and sums are rounded once
ANY_ORDER = {"contract", "reassoc", "nsz"}
KERNEL: Any = {"fastmath": FUSED, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
PART: Any = {"error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
ITEMS_A_ROW = 2**6  # items that take as long as the fixed work of a row
ITEMS_TO_SHARE = 2**18  # a quarter of a millisecond: less ends sooner on one thread than another one wakes and reports
ITEMS_A_THREAD = 2**14
SHARES_A_THREAD = 4  # more than one, so that a late or slow thread can leave some to the others

_NUMBERS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (ctypes.c_float, np.float32),
    torch.float64: (ctypes.c_double, np.float64),
    torch.int64: (ctypes.c_int64, np.int64),
    torch.bool: (ctypes.c_bool, np.bool_),
}
_names = threading.local()


@contextmanager
def specialised(name: str) -> Iterator[None]:
    """In this context, compiled functions belong to the specialisation ``name``, such as a link and a dtype.

    A factory needs it: numba identifies machine code by the qualified name of its function and a number that is unique
    only in this process. Code from the disk under a name that other code has would run in its place.
    """
    before, _names.current = getattr(_names, "current", ""), name
    try:
        yield
    finally:
        _names.current = before


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(_names, "current", "")
    if "<locals>" in function.__qualname__:
        if not name:
            raise RuntimeError(f"{function.__qualname__} comes from a factory: compile it inside `specialised`")
        function.__qualname__ += f"[{name}]"
    return function


def _part(function: Callable[..., Any], compiler: Any = Part, **options: Any) -> Any:
    """Compiles a function that only compiled functions call, once for each type of its arguments.

    numba would compile it again for every literal argument, as in ``f(x, 0)``. That gains nothing, because LLVM sees
    the literal when it inlines the function.
    """
    found = njit(**options, **PART, pipeline_class=compiler)(_named(function))
    template = found.get_call_template
    found.get_call_template = lambda args, kws: template(tuple(types.unliteral(a) for a in args), kws)
    return found


def inlined(function: Callable[..., Any]) -> Any:
    """Compiles code for one item."""
    return _part(function, fastmath=FUSED, forceinline=True)


def per_row(function: Callable[..., Any]) -> Any:
    """Compiles code for one row, with the arithmetic in the order of the source."""
    return _part(function, fastmath=FUSED)


def summed(function: Callable[..., Any]) -> Any:
    """Compiles sums over the items of a row, in any order. Arrays that it writes may not overlap other arguments."""
    return _part(function, fastmath=ANY_ORDER, compiler=Apart)


def by_lanes(function: Callable[..., Any]) -> Any:
    """Compiles loops over lanes, with the arithmetic in the order of the source in each of them.

    Arrays that it writes may not overlap other arguments.
    """
    return _part(function, fastmath=FUSED, compiler=Apart)


def inlined_sum(function: Callable[..., Any]) -> Any:
    """Compiles sums over a few items into the caller, which costs less than a call."""
    return _part(function, fastmath=ANY_ORDER, forceinline=True, compiler=Apart)


def kernel(function: Callable[..., int]) -> Callable[..., int]:
    """Compiles a loop over rows, ``function(first, last, *arguments)``, and stores it on disk.

    It returns a number, such as the number of rows that it has left.
    """
    found: Callable[..., int] = kept_on_disk(njit(**KERNEL, pipeline_class=Loop)(_named(function)))
    return found


def kernel_for_dtype(factory: Callable[[Any], Callable[..., int]]) -> Callable[[torch.Tensor], Callable[..., int]]:
    """Turns a factory of loops for ``np.float32`` or ``np.float64`` into a function from a tensor to its kernel."""

    @functools.cache
    def kernel_of(real: Any) -> Callable[..., int]:
        with specialised(real.__name__):
            return kernel(factory(real))

    return lambda x: kernel_of(np.float64 if x.dtype == torch.float64 else np.float32)


def array_of(x: torch.Tensor) -> Any:
    """The numbers of a contiguous tensor as a flat array, for as long as somebody keeps the tensor.

    ``Tensor.numpy`` is not used, because the storage could not be resized any more, as FSDP does with parameters.
    """
    kind, dtype = _NUMBERS[x.dtype]
    return np.frombuffer((kind * x.numel()).from_address(x.data_ptr()), dtype)


def array_like(x: torch.Tensor) -> Any:
    """The same as an array of the tensor's shape."""
    kind, dtype = _NUMBERS[x.dtype]
    return np.ndarray(x.shape, dtype, (kind * x.numel()).from_address(x.data_ptr()))


def over_rows(kernel: Callable[..., int], rows: int, items: int, *arguments: Any) -> int:
    """``kernel(first, last, *arguments)`` for all rows, in shares on ``torch.get_num_threads()`` threads.

    Args:
        kernel: From :func:`kernel`.
        rows: Number of rows.
        items: Amount of work, in items of a row; a small amount does not wake a thread.
        arguments: NumPy arrays and numbers.

    Returns:
        The sum of the kernel's results.
    """
    work = items + ITEMS_A_ROW * rows
    threads = 1 if work < ITEMS_TO_SHARE else min(rows, work // ITEMS_A_THREAD, torch.get_num_threads())
    if threads <= 1:
        return kernel(0, rows, *arguments)
    shares, numbers = min(rows, SHARES_A_THREAD * threads), itertools.count()

    def take_shares() -> int:
        total = 0
        while (share := next(numbers)) < shares:
            total += kernel(rows * share // shares, rows * (share + 1) // shares, *arguments)
        return total

    helpers = _submitted(take_shares, threads - 1)
    try:
        total = take_shares()
    finally:  # even if the user interrupts: shares in progress need the arguments until they are done
        wait([helper for helper in helpers if not helper.cancel()])  # nothing is left for those that have not begun
    return total + sum(helper.result() for helper in helpers if not helper.cancelled())


def _submitted(function: Callable[[], int], times: int) -> list[Future[int]]:
    found = list[Future[int]]()
    with suppress(RuntimeError):  # raised while the interpreter shuts down
        for _ in range(times):
            found.append(_executor.submit(function))
    return found


def _start_executor() -> None:
    global _executor
    _executor = ThreadPoolExecutor(os.cpu_count(), "khot")  # starts no more threads than are asked for at once


_executor: ThreadPoolExecutor
_start_executor()
if hasattr(os, "register_at_fork"):
    # A child that is forked while another thread compiles would wait for numba's lock forever.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )
    os.register_at_fork(after_in_child=_start_executor)  # a child has none of the threads
