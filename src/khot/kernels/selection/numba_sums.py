"""Counts the rows outside of the capped simplex, or those that are not k-hot, in one pass."""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

from torch import Tensor

from ..cpu.loops import kernel_for_dtype, over_rows
from ..cpu.maths import Real
from ..cpu.rows import REALS_AT, highest, lowest, total_of


@kernel_for_dtype
def _loop(real: Real) -> Any:
    reals_at = REALS_AT[real]

    def outside(first, last, n, values, low, high, is_binary):
        rows, found = reals_at(values, last, n), 0
        for r in range(first, last):
            row = rows[r]
            if is_binary:
                ones, zeros = 0, 0
                for i in range(n):
                    ones += row[i] == 1
                    zeros += row[i] == 0
                fits = ones + zeros == n and low <= ones <= high
            else:
                fits = low <= total_of(row) <= high and lowest(row) >= 0 and highest(row) <= 1
            found += not fits
        return found

    return outside


def rows_outside(value: Tensor, low: float, high: float, is_binary: bool) -> int:
    """The number of rows with entries outside of [0, 1], or of {0, 1} if they are binary, or a sum out of range."""
    items, n = value.contiguous(), value.shape[-1]
    arguments = items.data_ptr(), float(low), float(high), is_binary
    return over_rows(_loop(items), items.numel() // n, items.numel(), n, *arguments)
