"""The threads that do shares of the rows beside the caller: they look for work a while longer, and then sleep.

Why this is no executor: to wake a thread of Python and give it the GIL takes some 60 microseconds, as long as many a
loop. A worker that has done its share therefore stays in machine code (:mod:`.shares`) for about as long, and looks for
the next one; a worker that sleeps is woken only for loops that are worth it (:mod:`.workers`). The threads call loops
by their machine code, without Python (:mod:`.entries`).

Every thread, the caller too, takes the next share that nobody has taken, so that a caller never waits for a worker that
has not begun: beside other processes it may do all shares itself. One caller at a time leads the workers, and others do
their rows alone.

OpenMP's threads, which torch has, are not used: a child forked after their first use could not use torch's any more.
numba's own threads have the same fault. After a fork the child starts workers of its own.
"""

from .workers import run_in_shares

__all__ = ["run_in_shares"]
