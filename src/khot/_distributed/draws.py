"""Draws of rows that are some of many: made from one seed and the place of a row among all rows.

Whoever draws asks :func:`draws_of_rows` whether its rows are part of a larger batch. If so, every random number is that
of the seed for its draw, row and unit, whichever process makes it, on whatever backend.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["RowsOfMany", "drawing", "draws_of_rows"]

STRIDE = 0x9E3779B97F4A7C15  # between the seeds of one call, an odd number that no sequence of seeds repeats
SEEDS = 2**63 - 1


class RowsOfMany:
    """Rows ``first``, ``first + 1``, ... of a batch that is drawn with one seed.

    Args:
        seed: An int64 tensor ``(1,)``, the same on all processes.
        first: Number of the first row among all.
        rows: How many rows there are here.
        unit: Number of the first unit that is here, where rows are cut.
    """

    def __init__(self, seed: Tensor, first: int, rows: int, unit: int = 0) -> None:
        self.seed, self.first, self.rows, self.unit = seed, first, rows, unit
        self._seeds_given = 0

    def next_seed(self) -> Tensor:
        """The seed; to those who ask again, others made of it."""
        self._seeds_given += 1
        if self._seeds_given == 1:
            return self.seed
        return self.seed.new_full((1,), (int(self.seed.item()) + self._seeds_given * STRIDE) % SEEDS)


class _State(threading.local):
    current: RowsOfMany | None = None


_state = _State()


def draws_of_rows() -> RowsOfMany | None:
    """Which rows of many this thread draws; None where all rows are here."""
    return _state.current


@contextmanager
def drawing(rows: RowsOfMany) -> Iterator[None]:
    """In this block draws are those of some rows of many."""
    _state.current, before = rows, _state.current
    try:
        yield
    finally:
        _state.current = before
