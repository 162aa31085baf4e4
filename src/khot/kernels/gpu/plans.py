"""Blocks and warps: how Triton kernels process rows. Each kernel has its own table.

A thread holds up to 16 float32 or 4 float64 entries of a row. This is what the registers can hold beside the root
finder's numbers without spilling; in the longest rows that stay on chip a thread has 32 entries. Longer rows are read
in tiles. A few of them are split over all multiprocessors, which costs a launch for each step of the root finder.
"""

from typing import NamedTuple

import torch

# For each dtype of the arithmetic: row lengths up to which a row stays in registers, with the number of warps.
Table = dict[torch.dtype, tuple[tuple[int, int], ...]]
DOUBLE = ((128, 1), (512, 4), (1024, 8), (2048, 16))  # for kernels with few numbers besides the row
TILE = {torch.float32: (4096, 8), torch.float64: (1024, 8)}  # entries and warps for rows that are read in tiles
SPLIT_ABOVE = 2**16  # shorter rows take about as long as the launches that splitting costs
PROGRAMS = 264  # number of programs that a split aims at: two for each multiprocessor of a large device


class Plan(NamedTuple):
    """How a kernel processes rows.

    Attributes:
        block: Entries that a program holds at a time, a power of 2.
        warps: Warps of a program.
        resident: Whether a block is the whole row.
        splits: Programs per row.
    """

    block: int
    warps: int
    resident: bool
    splits: int

    def chunks(self, n: int) -> tuple[int, int]:
        """Number and length of the chunks of whole blocks into which a row of n is split; the last has the rest."""
        length = -(-n // (self.splits * self.block)) * self.block
        return -(-n // length), length


def is_split(rows: int, n: int) -> bool:
    """Whether the rows are so few and so long that several programs take one."""
    return n > SPLIT_ABOVE and rows <= PROGRAMS // 2


def plan(rows: int, n: int, dtype: torch.dtype, table: Table) -> Plan:
    """The :class:`Plan` for arithmetic in ``dtype``, float32 or float64, by the table of a kernel."""
    block = max(32, 1 << (n - 1).bit_length())
    for limit, warps in table[dtype]:
        if block <= limit:
            return Plan(block, warps, True, 1)
    block, warps = TILE[dtype]
    splits = min(PROGRAMS // rows, -(-n // block)) if is_split(rows, n) else 1
    return Plan(block, warps, False, splits)
