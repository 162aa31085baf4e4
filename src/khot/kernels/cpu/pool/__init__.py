"""Threads that do shares of the rows beside the caller: they look for work for a while, and then sleep.

This is not an executor, because waking a Python thread and giving it the GIL takes some 60 microseconds, as long as
many loops. A worker that has done its share therefore stays in machine code (:mod:`.shares`) for about as long, and
looks for the next one. A sleeping worker is woken only for loops that are worth it (:mod:`.workers`). The threads call
loops by their machine code, without Python (:mod:`.entries`).

Every thread, including the caller, takes the next free share, so that a caller never waits for a worker that has not
begun: if other processes are busy, the caller may do all shares itself. Only one caller at a time leads the workers;
other callers process their rows alone.

The OpenMP threads of torch are not used: a child forked after their first use could not use torch's threads any more.
numba's own threads have the same problem. After a fork the child starts its own workers.
"""

from .workers import run_in_shares

__all__ = ["run_in_shares"]
