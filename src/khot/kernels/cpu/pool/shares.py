"""A job that threads share in machine code: each takes the next free share.

A job consists of a few 64-bit numbers in memory. The upper half of ``TICKET`` counts jobs, and the lower half the
shares taken from the current job. A thread that has raised it by one owns a share, and the other numbers stay valid for
it until ``DONE`` counts the share.
"""

# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"

import platform
from typing import Any

from llvmlite import ir
from numba import boolean, int64, njit, void
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from ..cache import kept_on_disk
from .entries import ENTRY, INT

TICKET, SHARES, ROWS, CODE, DATA, DONE, WORKERS = range(0, 56, 8)  # offsets of the numbers of a job
TAKEN = 2**32 - 1  # the lower half of a ticket
LOOP: Any = {"error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")


def _at(builder, address):
    return builder.inttoptr(address, INT.as_pointer())


@intrinsic
def load(context, address):
    def build(context, builder, signature, args):
        return builder.load_atomic(_at(builder, args[0]), "acquire", 8)

    return int64(int64), build


@intrinsic
def store(context, address, value):
    def build(context, builder, signature, args):
        builder.store_atomic(args[1], _at(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return void(int64, int64), build


@intrinsic
def _raise_from(context, address, value):
    """Adds one if the number is ``value``; returns whether it was."""

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
    ticket = load(job + TICKET)
    share, shares = ticket & TAKEN, load(job + SHARES)
    if share >= shares:
        return False
    if _raise_from(job + TICKET, ticket):
        rows = load(job + ROWS)
        _call(load(job + CODE), load(job + DATA), rows * share // shares, rows * (share + 1) // shares)
        _count(job + DONE)
    return True


@kept_on_disk
@njit(**LOOP)
def serve(job, worker, looks):
    """A worker's turn, which ends when it has looked for a share ``looks`` times in vain."""
    left = looks
    while left > 0:
        if worker < load(job + WORKERS) and _do_share(job):
            left = looks
        else:
            left -= 1
            _wait()
    return 0


@kept_on_disk
@njit(**LOOP)
def offer(job, rows, shares, workers, code, data):
    store(job + TICKET, load(job + TICKET) | TAKEN)  # no thread may take a share of a half-written job
    store(job + DONE, 0)
    store(job + ROWS, rows)
    store(job + CODE, code)
    store(job + DATA, data)
    store(job + WORKERS, workers)
    store(job + SHARES, shares)
    store(job + TICKET, load(job + TICKET) + 1)
    return 0


@kept_on_disk
@njit(**LOOP)
def lead(job):
    """The caller's turn, which ends when all shares are done."""
    while _do_share(job):
        pass
    while load(job + DONE) < load(job + SHARES):
        _wait()
    return 0
