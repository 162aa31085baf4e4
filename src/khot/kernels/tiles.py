"""TODO khot.kernels.tiles."""

from typing import NamedTuple

import torch

MAX_N = 2**31 - 2**15  # columns are counted in int32

# Up to how many entries a row stays in registers with how many warps, by the dtype of the arithmetic. The derivative
# holds three or four values of each entry at a time.
Table = dict[torch.dtype, tuple[tuple[int, int], ...]]
_DOUBLE = ((128, 1), (512, 4), (1024, 8), (2048, 16))
FORWARD: Table = {torch.float32: ((512, 1), (1024, 8), (4096, 8), (8192, 8)), torch.float64: _DOUBLE}
BACKWARD: Table = {torch.float32: ((512, 1), (1024, 4), (4096, 8), (8192, 16)), torch.float64: _DOUBLE}
DRAW: Table = {torch.float32: ((512, 1), (1024, 4), (4096, 8), (8192, 16))}  # ranks, of positions of any dtype
TOURNAMENT: Table = {torch.float64: ((128, 1), (512, 4), (2048, 8), (4096, 16))}
LONGEST_TOURNAMENT = TOURNAMENT[torch.float64][-1][0]  # longer rows would take too long to sort
# The order maps scan rows in float64: soft_sort and the cuts of soft_permutation, and everything else.
POINTS: Table = {torch.float64: _DOUBLE[:-1]}
SCANS: Table = {torch.float64: ((128, 1), (512, 8), (1024, 16))}
TILE = {torch.float32: (4096, 16), torch.float64: (1024, 8)}  # entries and warps, of rows that are read in tiles
SPLIT_ABOVE = 2**16  # shorter rows take about as long as the launches that splitting costs
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
    block, warps = TILE[dtype]
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
