"""Counts rows that are not k-hot, in one pass."""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

from torch import Tensor

from ..cpu.loops import kernel_for_dtype, over_rows
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT


@kernel_for_dtype
def _loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def others(first, last, n, value, low, high):
        rows, found = reals_at(value, last, n), 0
        for r in range(first, last):
            ones, zeros = 0, 0
            for i in range(n):
                ones += rows[r, i] == 1
                zeros += rows[r, i] == 0
            found += ones + zeros < n or ones < low or ones > high
        return found

    return others


def rows_not_k_hot(value: Tensor, low: int, high: int) -> int:
    """The number of rows that have other entries than 0 and 1, or fewer ones than ``low`` or more than ``high``."""
    items, n = value.contiguous(), value.shape[-1]
    return over_rows(_loop(items), items.numel() // n, items.numel(), n, items.data_ptr(), low, high)
