"""Loops over pieces of rows: for what a process does with its parts of rows between two reductions.

Pieces have a fixed length, so that one long row keeps all threads busy, and what a loop finds does not depend on how
many they are.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .numba_math import Real
from .numba_rows import doubles_at
from .numba_tools import inlined, over_rows
from .rows import compute_dtype

PIECE = 2**15  # items


# ---- In a loop


@inlined
def row_of(n, p):
    """The row of a piece."""
    return p // ((n + PIECE - 1) // PIECE)


@inlined
def piece(reals_at, x, n, p):
    """Items of the piece p of rows (..., n) at the address x."""
    pieces = (n + PIECE - 1) // PIECE
    r, start = p // pieces, (p % pieces) * PIECE
    return reals_at(x, r + 1, n)[r, start : min(start + PIECE, n)]


@inlined
def number(address, r):
    """That of a row."""
    return doubles_at(address, 1, r + 1)[0, r]


# ---- Around it


def real_of(x: Tensor) -> Real:
    """NumPy's name of the computing dtype."""
    return np.float64 if compute_dtype(x) == torch.float64 else np.float32


def rows_of(x: Tensor) -> Tensor:
    """As contiguous rows of the computing dtype."""
    return x.detach().to(compute_dtype(x)).reshape(-1, x.shape[-1]).contiguous()


def over_pieces(loop: Any, x: Tensor, *arguments: Any) -> None:
    """``loop(first, last, n, x, *arguments)`` for all pieces of the rows x (rows, n)."""
    rows, n = x.shape
    over_rows(loop, rows * -(-n // PIECE), rows * n, n, x.data_ptr(), *arguments)


def addresses(*values: Tensor) -> list[int]:
    """Where contiguous tensors, which have to be kept alive, lie."""
    return [value.data_ptr() for value in values]


def flat(*values: Tensor) -> list[Tensor]:
    """Numbers of rows in float64, one after another."""
    return [value.detach().double().reshape(-1).contiguous() for value in values]


def new_sums(x: Tensor, numbers: int) -> Tensor:
    """Room for so many numbers of each piece of the rows x, ``(rows, pieces, numbers)``."""
    rows, n = x.shape
    return x.new_empty((rows, -(-n // PIECE), numbers), dtype=torch.float64)
