"""What a backend may have for rows of which each process holds a part."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..links.base import TailSums
from ..links.clipped_power import ClippedPower
from ..rows import Ends, Threshold

LocalSums = Callable[[Tensor, Tensor, Tensor, Any], TailSums]  # the last one a link


class Look(NamedTuple):
    """Of abs(x) of the entries that are here of each row: their ends, how many are not 0, and the smallest of those."""

    ends: Ends
    nonzero: Tensor
    smallest: Tensor


class LocalLoops(NamedTuple):
    """One loop over the entries here for each step between two reductions; not differentiable.

    Attributes:
        take: ``(strength, numbers)``: whether they are accurate for strengths, and largest entries or thresholds.
        look: ``(a, link)``: of rows (rows, m) of absolute values, or None where some number is not ordinary.
        sums: ``(a, t, strength, link)``: what the root finder sums up at t.
        values: ``(x, strength, at, link)``: y.
        slopes: ``(x, strength, at, grad, link)``: sums of which the first two are the weight W and the pull.
        gradient: ``(x, strength, at, grad, mean, sums, link)``: dL/dx, and what the entries here have of dL/dstrength.
    """

    take: Callable[[Tensor, Tensor], bool]
    look: Callable[[Tensor, ClippedPower], Look | None]
    sums: LocalSums
    values: Callable[[Tensor, Tensor, Threshold, ClippedPower], Tensor]
    slopes: Callable[[Tensor, Tensor, Threshold, Tensor, ClippedPower], list[Tensor]]
    gradient: Callable[[Tensor, Tensor, Threshold, Tensor, Tensor, list[Tensor], ClippedPower], tuple[Tensor, Tensor]]
