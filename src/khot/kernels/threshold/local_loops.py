"""What a backend may have for rows of which each process holds a part."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..links.base import Link, TailSums
from ..rows import Ends, Threshold

LocalSums = Callable[[Tensor, Tensor, Tensor, Link], TailSums]


class LocalLoops(NamedTuple):
    """One loop over the items here for each step between two reductions; not differentiable.

    Attributes:
        take: ``(scale)``: whether they are accurate for this softness.
        ends: ``(x)``: what the range of rows (rows, m) is made of, or None where some number is not ordinary.
        sums: ``(x, t, scale, link)``: what the root finder sums up at t.
        values: ``(x, scale, at, link, log)``: y or log y.
        slopes: ``(x, scale, at, grad, link, log)``: the sums of w, d, w z and d z.
        gradient: ``(x, scale, at, grad, b, link, log)``: dL/dx.
    """

    take: Callable[[Tensor], bool]
    ends: Callable[[Tensor], Ends | None]
    sums: LocalSums
    values: Callable[[Tensor, Tensor, Threshold, Link, bool], Tensor]
    slopes: Callable[[Tensor, Tensor, Threshold, Tensor, Link, bool], list[Tensor]]
    gradient: Callable[[Tensor, Tensor, Threshold, Tensor, Tensor, Link, bool], Tensor]
