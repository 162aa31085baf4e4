"""The threads that do shares of the rows beside the caller: they look for work a while longer, and then sleep.

To wake a thread of Python and give it the GIL takes some 60 microseconds, as long as many a loop. A worker that has
done its share therefore stays in machine code for about as long, and looks for the next; one that sleeps is woken only
for loops that are worth it. Every thread, the caller too, takes the next share that nobody has taken, so that a caller
never waits for a worker that has not begun: beside other processes it may do all shares itself.

A job is a few 64-bit numbers in memory. ``TICKET`` counts jobs in its upper half and the shares taken of the present
one in its lower; who has raised it by one owns a share, and with it the other numbers, until ``DONE`` counts it.
OpenMP's threads, which torch has, are not used: a child forked after their first use could not use torch's any more.
"""

# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"

import atexit
import ctypes
import os
import platform
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import boolean, int64, njit, void
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from .numba_cache import kept_on_disk
from .numba_entries import ENTRY, HEADER, INT, entry_of

TICKET, SHARES, ROWS, CODE, DATA, DONE, WORKERS = range(0, 56, 8)  # places of the numbers of a job
TAKEN = 2**32 - 1  # the lower half of a ticket
LOOKS = 2**13  # of a worker for the next share before it sleeps: some 0.2 ms
SHARES_A_THREAD = 4  # so that who begins late or is slow takes fewer
LOOP: Any = {"error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")


def _at(builder, address):
    return builder.inttoptr(address, INT.as_pointer())


@intrinsic
def _load(context, address):
    def build(context, builder, signature, args):
        return builder.load_atomic(_at(builder, args[0]), "acquire", 8)

    return int64(int64), build


@intrinsic
def _store(context, address, value):
    def build(context, builder, signature, args):
        builder.store_atomic(args[1], _at(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return void(int64, int64), build


@intrinsic
def _raise_from(context, address, value):
    """Adds one, if the number is ``value``; whether it was."""

    def build(context, builder, signature, args):
        one_more = builder.add(args[1], INT(1))
        found = builder.cmpxchg(_at(builder, args[0]), args[1], one_more, "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return boolean(int64, int64), build


@intrinsic
def _count(context, address):
    def build(context, builder, signature, args):
        return builder.atomic_rmw("add", _at(builder, args[0]), INT(1), "acq_rel")

    return int64(int64), build


@intrinsic
def _call(context, code, data, first, last):
    def build(context, builder, signature, args):
        builder.call(builder.inttoptr(args[0], ENTRY.as_pointer()), args[1:])
        return context.get_dummy_value()

    return void(int64, int64, int64, int64), build


@intrinsic
def _wait(context):
    def build(context, builder, signature, args):
        if HAS_PAUSE:
            pause = get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause")
            builder.call(pause, [])
        return context.get_dummy_value()

    return void(), build


@njit(**LOOP)
def _do_share(job):
    """Takes the next share and does it; False if there is none."""
    ticket = _load(job + TICKET)
    share, shares = ticket & TAKEN, _load(job + SHARES)
    if share >= shares:
        return False
    if _raise_from(job + TICKET, ticket):
        rows = _load(job + ROWS)
        _call(_load(job + CODE), _load(job + DATA), rows * share // shares, rows * (share + 1) // shares)
        _count(job + DONE)
    return True


@kept_on_disk
@njit(**LOOP)
def _serve(job, worker, looks):
    """A worker's turn, until it has looked for a share ``looks`` times in vain."""
    left = looks
    while left > 0:
        if worker < _load(job + WORKERS) and _do_share(job):
            left = looks
        else:
            left -= 1
            _wait()
    return 0


@kept_on_disk
@njit(**LOOP)
def _offer(job, rows, shares, workers, code, data):
    _store(job + TICKET, _load(job + TICKET) | TAKEN)  # nobody takes a share of a job that is half written
    _store(job + DONE, 0)
    _store(job + ROWS, rows)
    _store(job + CODE, code)
    _store(job + DATA, data)
    _store(job + WORKERS, workers)
    _store(job + SHARES, shares)
    _store(job + TICKET, _load(job + TICKET) + 1)
    return 0


@kept_on_disk
@njit(**LOOP)
def _lead(job):
    """The caller's turn, until all shares are done."""
    while _do_share(job):
        pass
    while _load(job + DONE) < _load(job + SHARES):
        _wait()
    return 0


class _Workers:
    """As many as ever were asked for; others in a child after a fork, which takes no threads along."""

    def __init__(self) -> None:
        self.closed = False
        self.forget()

    def forget(self) -> None:
        self.lock = threading.Lock()  # of who leads
        self.job = np.zeros(7, np.int64)
        self.threads: list[threading.Thread] = []
        self.bells: list[SimpleQueue[None]] = []
        self.asleep: list[bool] = []

    def start(self, count: int) -> None:
        while len(self.threads) < count and not self.closed:
            worker = len(self.threads)
            self.bells.append(SimpleQueue())
            self.asleep.append(False)
            self.threads.append(threading.Thread(target=self._work, args=(worker,), name=f"khot {worker}", daemon=True))
            self.threads[-1].start()

    def _work(self, worker: int) -> None:
        job, bell, asleep = self.job.ctypes.data, self.bells[worker], self.asleep
        while not self.closed:
            _serve(job, worker, LOOKS)
            asleep[worker] = True
            _serve(job, worker, 1)  # for who had seen it awake
            bell.get()
            asleep[worker] = False

    def wake(self, count: int) -> None:
        for asleep, bell in zip(self.asleep[:count], self.bells[:count], strict=True):
            if asleep:
                bell.put(None)

    def close(self) -> None:
        """Before the interpreter shuts down, which threads in machine code do not notice; callers are alone then."""
        with self.lock:
            self.closed = True
            for bell in self.bells:
                bell.put(None)
            for thread in self.threads:
                thread.join()
            self.forget()


_workers = _Workers()
atexit.register(_workers.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.forget)


def run_in_shares(kernel: Any, rows: int, threads: int, wake: bool, arguments: Sequence[Any]) -> int | None:
    """The sum of what ``kernel(first, last, *arguments)`` returns for shares of the rows.

    Args:
        kernel: A compiled loop.
        rows: How many there are.
        threads: How many there may be, with the caller.
        wake: Whether sleeping ones are worth it.
        arguments: NumPy arrays and numbers.

    Returns:
        None, and nothing is done, where the caller does better alone: another thread has the workers, or they sleep, or
        the loop is no machine code. None after an error, too, for the caller to meet it.
    """
    if not _workers.lock.acquire(blocking=False):
        return None
    try:
        _workers.start(threads - 1)
        if not wake and all(_workers.asleep[: threads - 1]):
            return None
        entry = entry_of(kernel, arguments)
        data = entry and entry.pack(arguments)
        if entry is None or data is None:
            return None
        job, address = _workers.job.ctypes.data, ctypes.addressof(ctypes.c_char.from_buffer(data))
        try:
            _offer(job, rows, min(rows, SHARES_A_THREAD * threads), threads - 1, entry.address, address)
            if wake:
                _workers.wake(threads - 1)
        finally:  # also where the user interrupts: shares that others do need the data until they are done
            _lead(job)
    finally:
        _workers.lock.release()
    total, errors = HEADER.unpack_from(data)
    return None if errors else int(total)
