"""Which implementation runs, by backend, device, dtype and size; everything that decides stands here.

``KHOT_BACKEND`` in the environment, or :func:`backend` around a piece of code, forces one:

    auto     Triton on accelerators that it supports, and SciPy for isotonic regression on a CPU, where they are
             installed; torch elsewhere (the default)
    torch    plain torch everywhere
    triton   Triton, or an error that says why not; on a CPU only in its interpreter (``TRITON_INTERPRET=1``); plain
             torch for what has no kernel

Blocks and warps: a thread holds up to 16 float32 or 4 float64 entries of a row, which is what the registers have room
for beside the root finder's numbers, so that nothing spills; the longest rows that stay on chip have 32 entries in a
thread. Longer rows are read in tiles; few of them are split over all multiprocessors, which costs a launch for each
step of the root finder.
"""

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .links import Link

BACKENDS = ("auto", "torch", "triton")
MAX_N = 2**31 - 2**15  # columns are counted in int32
OLDEST_CUDA = (8, 0)  # compute capability that current Triton supports

# Up to how many entries a row stays in registers with how many warps, by the dtype of the arithmetic. The derivative
# holds three or four values of each entry at a time.
Table = dict[torch.dtype, tuple[tuple[int, int], ...]]
_DOUBLE = ((128, 1), (512, 4), (1024, 8), (2048, 16))
FORWARD: Table = {
    torch.float32: ((512, 1), (1024, 8), (4096, 8), (8192, 8)),
    torch.float64: ((128, 1), (512, 8), (1024, 8), (2048, 16)),
}
BACKWARD: Table = {torch.float32: ((512, 1), (1024, 4), (4096, 8), (8192, 16)), torch.float64: _DOUBLE}
DRAW: Table = {torch.float32: ((512, 1), (1024, 4), (4096, 8), (8192, 16))}  # ranks, of positions of any dtype
TOURNAMENT: Table = {torch.float64: ((128, 1), (512, 4), (2048, 8), (4096, 16))}
LONGEST_TOURNAMENT = TOURNAMENT[torch.float64][-1][0]  # longer rows would take too long to sort
# The order maps scan rows in float64: soft_sort and the cuts of soft_permutation, and everything else.
POINTS: Table = {torch.float64: _DOUBLE[:-1]}
SCANS: Table = {torch.float64: ((128, 1), (512, 8), (1024, 16))}
RANK_BACKWARD: Table = {torch.float64: ((128, 1), (512, 8), (1024, 8))}
TILE = {torch.float32: (4096, 8), torch.float64: (1024, 8)}  # entries and warps, of rows that are read in tiles
WIDE_TILE = {torch.float32: (4096, 16), torch.float64: (1024, 8)}  # the same for the root finder
SPLIT_ABOVE = 2**16  # shorter rows take about as long as the launches that splitting costs
LONG_DRAW, MANY_DRAWS = 2**17, 32  # a draw of more units is one program's work if there are so many of them
PROGRAMS = 264  # that a split aims at: two for each multiprocessor of a large device

# Trees of up to how many units go through the lowest levels of a product tree with how many rows in a program, entries
# of a level at a time (all have about as many as there are units, the first twice as many), warps, and how many
# programs at most, which share the rows: each has a scratch.
FOREST = ((32, 4, 128, 4, 16 * PROGRAMS), (256, 1, 256, 4, 4 * PROGRAMS), (1024, 1, 512, 16, 2 * PROGRAMS))
FOREST_LEVELS = 10  # what the table reaches
TRITON_WIDTH = 1024  # widest child of a node above those that is convolved directly; from there the FFT is faster

# Sorted transport: at most how many places (k + 1), and up to what length of the row how many warps. Each thread has
# one item of a tile at all places, up to 16 float32 or 8 float64 entries of the plan. A row has one program, which few
# long rows leave without company: those take torch.
MOST_PLACES = {torch.float32: 16, torch.float64: 8}
TRANSPORT_WARPS = ((256, 2), (MAX_N, 4))
LONE_ROW = 2**15  # entries; longer rows want FEW_ROWS of them at least
FEW_ROWS = 16

MIN_SCIPY = 32  # length of row from which SciPy's loop is worth a call per row


class TransportPlan(NamedTuple):
    """How the kernels of sorted transport go through a row.

    Attributes:
        places: Of the plan.
        block_places: The same as a power of 2, at least 8.
        block: Items of a tile, a power of 2.
        warps: Warps of a program.
    """

    places: int
    block_places: int
    block: int
    warps: int


def transport_plan(n: int, k: int) -> TransportPlan:
    """The :class:`TransportPlan` of rows of n."""
    places = min(k + 1, n)
    warps = next(warps for length, warps in TRANSPORT_WARPS if n <= length)
    return TransportPlan(places, max(8, 1 << (places - 1).bit_length()), 32 * warps, warps)


class Plan(NamedTuple):
    """How a kernel goes through rows.

    Attributes:
        block: Entries that a program holds at a time, a power of 2.
        warps: Warps of a program.
        resident: Whether that is the whole row.
        splits: Programs per row.
    """

    block: int
    warps: int
    resident: bool
    splits: int

    def chunks(self, n: int) -> tuple[int, int]:
        """Number and length of the chunks of whole blocks that the programs of a row of n take, the last the rest."""
        length = -(-n // (self.splits * self.block)) * self.block
        return -(-n // length), length


def plan(rows: int, n: int, dtype: torch.dtype, table: Table = FORWARD) -> Plan:
    """The :class:`Plan` for arithmetic in ``dtype``, float32 or float64, by one of the tables above."""
    block = max(32, 1 << (n - 1).bit_length())
    for limit, warps in table[dtype]:
        if block <= limit:
            return Plan(block, warps, True, 1)
    block, warps = (WIDE_TILE if table is FORWARD else TILE)[dtype]
    splits = min(PROGRAMS // rows, -(-n // block)) if n > SPLIT_ABOVE and rows <= PROGRAMS // 2 else 1
    return Plan(block, warps, False, splits)


class ForestPlan(NamedTuple):
    """How a kernel goes through the lowest levels of product trees.

    Attributes:
        rows: Rows that a program takes at a time.
        block: Entries of a level that it makes at a time.
        warps: Warps of a program.
        programs: At most so many.
    """

    rows: int
    block: int
    warps: int
    programs: int


def forest_plan(units: int) -> ForestPlan:
    """For trees of up to ``2**FOREST_LEVELS`` units."""
    return next(ForestPlan(*how) for limit, *how in FOREST if units <= limit)


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, but got {name!r}")
    return name


_backend = _checked(os.environ.get("KHOT_BACKEND", "auto"), "KHOT_BACKEND")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces a backend inside a ``with`` block, for all threads.

    Args:
        name: "auto", "torch" or "triton".

    Raises:
        ValueError: If there is no such backend.

    Example:
        >>> import khot.kernels
        >>> with khot.kernels.backend("torch"):
        ...     sigmoid_topk(torch.zeros(4), 2)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    global _backend
    previous, _backend = _backend, _checked(name, "`name`")
    try:
        yield
    finally:
        _backend = previous


def fused(x: Tensor, link: Link, log: bool = False) -> bool:
    """Whether the map of a link is to be one operator, rather than torch operations that a compiler can fuse."""
    return (x.is_cuda or _backend == "triton") and _has_kernel(link, log)


def _has_kernel(link: Link, log: bool) -> bool:
    return link.kernel is not None and (not log or link.kernel in ("logistic", "laplace"))


def use_triton(x: Tensor, link: Link, log: bool = False) -> bool:
    """:func:`triton_runs` for the kernels of the relaxed masks with this link."""
    return _has_kernel(link, log) and triton_runs(x)


def triton_runs(x: Tensor) -> bool:
    """Whether Triton kernels are to run on the rows of ``x (..., n)``, if there is one for what is to be done.

    Raises:
        RuntimeError: If the backend "triton" is forced where it cannot run.
    """
    wanted = _backend == "triton" or (_backend == "auto" and x.is_cuda)
    if not wanted or x.numel() == 0 or x.shape[-1] > MAX_N:
        return False
    obstacle = _obstacle(x.device)
    if obstacle and _backend == "triton":
        raise RuntimeError(f"backend 'triton' is forced, but {obstacle}")
    return obstacle is None


def isotonic_solver(x: Tensor) -> Callable[..., Any] | None:
    """SciPy's isotonic regression, if that is to run on the rows of ``x (..., n)``."""
    if _backend != "auto" or x.device.type != "cpu" or x.shape[-1] < MIN_SCIPY:
        return None
    return _scipy_isotonic()


@functools.cache
def _scipy_isotonic() -> Callable[..., Any] | None:
    try:
        from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]
    except ImportError:  # no SciPy, or one before 1.12
        return None
    return isotonic_regression


def use_triton_transport(x: Tensor, k: int) -> bool:
    """:func:`triton_runs` for the kernels of sorted transport, where they take ``x (..., n)`` and are worth it."""
    n, places = x.shape[-1], min(k + 1, x.shape[-1])
    most = MOST_PLACES[torch.float64 if x.dtype == torch.float64 else torch.float32]
    fits = 1 < places <= most and places * n <= MAX_N and (n <= LONE_ROW or x.numel() >= FEW_ROWS * n)
    return fits and triton_runs(x)


def fuses(x: Tensor) -> bool:
    """Whether what there is a kernel for is to be one operator: a compiler does not ask whether Triton is there."""
    if torch.compiler.is_compiling():
        return _backend == "triton" or (_backend == "auto" and x.is_cuda)
    return triton_runs(x)


def fuses_draws(x: Tensor, draws: int, longest: int = MAX_N) -> bool:
    """Whether ``draws`` draws for each row of parameters ``x (..., n)`` are to be one operator, up to n = longest.

    One program makes one draw. For few draws of long rows torch, which spreads a row over the device, is faster.
    """
    n, rows = x.shape[-1], math.prod(x.shape[:-1])
    if n > longest or (n > LONG_DRAW and draws * rows < MANY_DRAWS) or _backend == "torch":
        return False
    return fuses(x)


def sorts_on_chip(values: Tensor) -> bool:
    """Whether the order maps of sorted rows are one kernel, which holds a row; other rows take several steps."""
    return triton_runs(values) and values.shape[-1] <= POINTS[torch.float64][-1][0]


@functools.cache
def _obstacle(device: torch.device) -> str | None:
    """What keeps Triton from running on this device."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton is not installed ({error})"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "a CPU tensor needs Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST_CUDA:
        return f"{device} has compute capability {capability}, and Triton needs {OLDEST_CUDA}"
    return None
