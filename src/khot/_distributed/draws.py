"""Draws for rows that belong to a larger batch: made from one seed and the number of a row in that batch.

Code that draws asks :func:`draws_of_rows` whether its rows belong to a larger batch. If so, every random number is a
function of the seed and of its draw, row and unit, whatever process and backend computes it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["RowsOfMany", "drawing", "draws_of_rows"]

STRIDE = 0x9E3779B97F4A7C15  # between the seeds of one call: an odd number, so that seeds do not repeat
SEEDS = 2**63 - 1


class RowsOfMany:
    """Rows ``first``, ``first + 1``, ... of a batch that is drawn with one seed.

    Args:
        seed: An int64 tensor ``(1,)``, the same on all processes.
        first: Number of the first row in the whole batch.
        rows: Number of local rows.
        unit: Number of the first local unit, if rows are sharded.
    """

    def __init__(self, seed: Tensor, first: int, rows: int, unit: int = 0) -> None:
        self.seed, self.first, self.rows, self.unit = seed, first, rows, unit
        self._seeds_given = 0

    def next_seed(self) -> Tensor:
        """The seed; further calls give other seeds derived from it."""
        self._seeds_given += 1
        if self._seeds_given == 1:
            return self.seed
        return self.seed.new_full((1,), (int(self.seed.item()) + self._seeds_given * STRIDE) % SEEDS)


class _State(threading.local):
    current: RowsOfMany | None = None


_state = _State()


def draws_of_rows() -> RowsOfMany | None:
    """The rows of a larger batch that this thread draws; None if all rows are local."""
    return _state.current


@contextmanager
def drawing(rows: RowsOfMany) -> Iterator[None]:
    """In this context, draws are those of some rows of a larger batch."""
    _state.current, before = rows, _state.current
    try:
        yield
    finally:
        _state.current = before
