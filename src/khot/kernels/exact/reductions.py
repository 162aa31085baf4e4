"""How numbers of rows are combined: as they are, or over all processes that hold a part of a row.

The exact path sums over local items, and these few reductions, an argument ``over``, are its only knowledge of sharded
rows. Decisions about the control flow depend on reduced numbers, which are the same on all processes.
"""

from torch import Tensor


class Whole:
    """Rows that are whole on this process, and the interface of those that are not.

    Attributes:
        is_whole: Whether no other process holds items of these rows.
    """

    is_whole = True

    def length(self, x: Tensor) -> int:
        """The number of items of a row, including those that x (..., m) lacks."""
        return x.shape[-1]

    def sum(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Sums over all parts, from sums over the local items; differentiable."""
        return numbers

    def max(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Maxima over all parts."""
        return numbers

    def seen(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Numbers of rows as the local items use them; their gradient is the sum over the items of all parts."""
        return numbers

    def logsumexp(self, *items: Tensor) -> tuple[Tensor, ...]:
        """Logarithms of sums of exponentials of items over the last axis; not differentiable."""
        return tuple(v.logsumexp(-1) for v in items)


WHOLE = Whole()
