"""The workers of the pool: how they are led, when they sleep, and what happens at a fork and at exit."""

import atexit
import ctypes
import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from .entries import HEADER, entry_of
from .shares import lead, offer, serve

LOOKS = 2**13  # of a worker for the next share before it sleeps: some 0.2 ms
SHARES_A_THREAD = 4  # so that a thread that starts late or is slow takes fewer


class _Workers:
    """The largest number of workers requested so far. A child process starts its own after a fork."""

    def __init__(self) -> None:
        self.closed = False
        self.forget()

    def forget(self) -> None:
        self.lock = threading.Lock()  # held by the thread that leads
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
            serve(job, worker, LOOKS)
            asleep[worker] = True
            serve(job, worker, 1)  # one last look: a caller may have seen this worker awake
            bell.get()
            asleep[worker] = False

    def wake(self, count: int) -> None:
        for asleep, bell in zip(self.asleep[:count], self.bells[:count], strict=True):
            if asleep:
                bell.put(None)

    def close(self) -> None:
        """Called before the interpreter shuts down, which machine code does not notice. Callers then work alone."""
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
    """The sum of the results of ``kernel(first, last, *arguments)`` for shares of the rows.

    Args:
        kernel: A compiled loop.
        rows: Number of rows.
        threads: Largest number of threads, including the caller.
        wake: Whether to wake sleeping threads.
        arguments: NumPy arrays and numbers.

    Returns:
        None, with nothing done, if the caller should work alone: because another thread has the workers, because they
        sleep, or because the loop is not machine code. Also None after an error, so that the caller raises it.
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
            offer(job, rows, min(rows, SHARES_A_THREAD * threads), threads - 1, entry.address, address)
            if wake:
                _workers.wake(threads - 1)
        finally:  # even if the user interrupts: shares in progress need the data until they are done
            lead(job)
    finally:
        _workers.lock.release()
    total, errors = HEADER.unpack_from(data)
    return None if errors else int(total)
