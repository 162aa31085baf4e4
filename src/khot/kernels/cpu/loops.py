"""What numba backends share: how loops are compiled, and run over the rows on several threads.

A kernel is a serial loop ``kernel(first, last, *arguments)`` over the rows [first, last) that writes into arrays given
to it. It is compiled, without the GIL, at its first call for each dtype. :func:`over_rows` runs it over shares of the
rows on the threads of :mod:`.pool`; as no row knows of another, results do not depend on their number. numba's
own threads are not used: they slow down beside other processes, and a child forked after their first use dies.

Within a kernel, what is done to one item is an :func:`inlined` function, which keeps the order of its arithmetic, and
what is done to a row a :func:`per_row` function. A sum over items is :func:`summed`: the compiler chooses the order of
its terms, without which it could not take several at once, and it is the same order each time. None of them assumes
that there are no infinities or NaN, and none is for Python to call: they have no wrapper for it, which would take a
third of the time to compile.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock

from .cache import kept_on_disk
from .compilers import ApartCompiler, PartCompiler
from .pool import run_in_shares

FUSED = {"contract"}  # products and sums rounded once
ANY_ORDER = {"contract", "reassoc", "nsz"}
KERNEL: Any = {"fastmath": FUSED, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
PART: Any = {"error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
WITH_CALLER: Any = {"pipeline_class": PartCompiler}
APART: Any = {"pipeline_class": ApartCompiler}
ITEMS_A_ROW = 2**6  # that take as long as what is done once a row
ITEMS_A_THREAD = 2**11  # fewer are done before another thread has seen them
ITEMS_A_WAKING = 2**14  # fewer are done before another thread has woken up

_names = threading.local()


@contextmanager
def specialised(name: str) -> Iterator[None]:
    """Inside, compiled functions are those of the specialisation ``name``, such as a link and a dtype.

    A factory needs it: numba knows machine code by the qualified name of its function and a number that is unique in
    this process only. Code from the disk under a name that other code has would be run in its place.
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


def _part(function: Callable[..., Any], **options: Any) -> Any:
    """Compiles what only compiled functions call: once for all numbers of a type.

    numba would compile it again for every number that stands in a call, as in ``f(x, 0)``, though LLVM, which sees the
    number when it puts the function into its caller, makes the same machine code of it.
    """
    found = njit(**options, **PART)(_named(function))
    template = found.get_call_template
    found.get_call_template = lambda args, kws: template(tuple(types.unliteral(a) for a in args), kws)
    return found


def inlined(function: Callable[..., Any]) -> Any:
    """Compiles what is done to an item."""
    return _part(function, fastmath=FUSED, forceinline=True, **WITH_CALLER)


def per_row(function: Callable[..., Any]) -> Any:
    """Compiles what is done to a row, in the order that is written down."""
    return _part(function, fastmath=FUSED, **WITH_CALLER)


def summed(function: Callable[..., Any]) -> Any:
    """Compiles sums over the items of a row, in any order; before its caller is, or some loops are not vectorised.

    What it writes may overlap no other argument.
    """
    return _part(function, fastmath=ANY_ORDER, **APART)


def inlined_sum(function: Callable[..., Any]) -> Any:
    """Compiles sums over a few items into what calls them, which costs less than the call."""
    return _part(function, fastmath=ANY_ORDER, forceinline=True, **APART)


def kernel(function: Callable[..., int]) -> Callable[..., int]:
    """Compiles a loop over rows, ``function(first, last, *arguments)``, kept on disk.

    It returns a number, such as that of the rows that it has left to others.
    """
    found: Callable[..., int] = kept_on_disk(njit(**KERNEL)(_named(function)))
    return found


def over_rows(kernel: Callable[..., int], rows: int, items: int, *arguments: Any) -> int:
    """``kernel(first, last, *arguments)`` for all rows, in shares on ``torch.get_num_threads()`` threads.

    Args:
        kernel: From :func:`kernel`.
        rows: How many there are.
        items: How many steps of work they are, in items of a row: few are not worth waking a thread.
        arguments: NumPy arrays and numbers.

    Returns:
        The sum of what the kernel returns.
    """
    work = items + ITEMS_A_ROW * rows
    threads = min(rows, work // ITEMS_A_THREAD)
    if threads > 1:
        threads = min(threads, torch.get_num_threads())
    if threads > 1:
        total = run_in_shares(kernel, rows, threads, work >= 2 * ITEMS_A_WAKING, arguments)
        if total is not None:
            return total
    return kernel(0, rows, *arguments)


if hasattr(os, "register_at_fork"):
    # A child that is forked while another thread compiles would wait for numba's lock for ever.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )
