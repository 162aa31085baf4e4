r"""Soft ranks, sorted values and permutations of sorted items, from sums over them that decay with distance.

With items :math:`z_1 \le \dots \le z_n` (in units of the scale) the order maps need

.. math:: \ell_j(v) = \sum_{i<j} e^{z_i - z_j} v_i, \qquad r_j(v) = \sum_{i>j} e^{z_j - z_i} v_i .

They depend only on the gaps :math:`h_j = z_j - z_{j-1}`, which are differences of neighbours. So distant items cost no
digits, and beyond ``FAR`` scales the exact distance makes no difference. A wider gap is replaced by ``FAR``, in z too,
so that nothing overflows.

A cumulative sum of :math:`e^{z_i} v_i`, divided by :math:`e^{z_j}`, gives the sums in O(n) while no exponential over-
or underflows: in double precision as long as the items spread over at most 256 scales. Beyond that, and on an
accelerator, where reading the spread would stall, the sums double their reach log2(n) times with products of the decays
:math:`e^{-h_j} \le 1`, which work for any gaps.

Between neighbouring items the soft count of those below t, :math:`F(t) = \sum_i \mathrm{Lap}(t - z_i)`, is a constant
plus two exponentials. With p items at or below t, :math:`A = 1 + \ell_p(1)` and :math:`B = 1 + r_{p+1}(1)`,

.. math:: 2 (F(t) - p) = B e^{t - z_{p+1}} - A e^{z_p - t},

a quadratic equation in :math:`e^t`. With :math:`q = |d| + \sqrt{d^2 + A B e^{-h_{p+1}}}` the root of F(t) = p + d
is :math:`t = z_{p+1} - \log(B/q)` if d > 0 and :math:`t = z_p + \log(A/q)` if d < 0, without cancellation or further
iteration. If d = 0 it is :math:`z_p + \tfrac12 (h_{p+1} + \log(A/B))`, however wide the gap. Points are stored as
offsets from these items.

Layout: z, h, v (..., n) in float64. h_1 is ``FAR``: nothing is to the left of the first item.

References:
    [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..registry import Operation, Operator, only_if
from . import slices, sums
from .sums import Points, number_of_points

__all__ = [
    "Points",
    "RowMap",
    "decayed_sums",
    "permutahedron_rank",
    "permutahedron_sort",
    "slice_weights",
    "slice_weights_derivative",
    "soft_count_inverse",
    "soft_permutation",
    "soft_rank",
    "soft_sort",
    "sorted_positions",
    "sorted_rows",
]


class RowMap(NamedTuple):
    """A map of sorted values, their original positions (..., n) and the scale, with its derivative.

    The scale is a number, or float64 (...).

    Attributes:
        forward: Maps these to the result.
        backward: Maps these, dL/d result, and whether dL/dscale is wanted, to dL/dx and dL/dscale in float64.
    """

    forward: Callable[[Tensor, Tensor, Tensor | float], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor | float, Tensor, bool], tuple[Tensor, Tensor | None]]


def _like_twice(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _like_points(z: Tensor, gap: Tensor, between: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*z.shape[:-1], number_of_points(z.shape[-1], between))
    return z.new_empty(shape), z.new_empty(shape, dtype=torch.long), z.new_empty(shape, dtype=torch.long)


def _like_slices(values: Tensor, *rest: Any) -> Tensor:
    return values.new_empty((*values.shape, values.shape[-1]), dtype=rest[-1])


def _like_gradients(values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, grad: Tensor) -> Any:
    return values.new_empty(values.shape), offset.new_empty(offset.shape)


sorted_positions = Operator("sorted_positions", sums.sorted_positions, fake=_like_twice)
decayed_sums = Operator("decayed_sums", sums.decayed_sums, fake=_like_twice)
soft_count_inverse = Operator("soft_count_inverse", sums.soft_count_inverse, fake=_like_points)
slice_weights = Operator("slice_weights", slices.slice_weights, fake=_like_slices)
slice_weights_derivative = Operator("slice_weights_derivative", slices.slice_weights_derivative, fake=_like_gradients)

FEW = 2**11  # numbers that torch sorts before NumPy's sort is set up

_sort_rows = Operation(__name__, "sort_rows")
_sort_rows.backend(
    "numba", module=".numba_sort", takes=only_if(lambda x, many: many, "torch sorts a few numbers sooner")
)


def sorted_rows(call: Call, x: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sorted values and their positions along the last axis, as constants. On a CPU, ties stay in their order."""
    x = x.detach()
    if call.is_plain and x.is_cpu:
        sort = _sort_rows.find(x, x.numel() >= FEW)
        found = sort(x, descending) if sort else x.sort(dim=-1, descending=descending, stable=True)
    else:
        found = x.sort(-1, descending=descending)
    return found[0], found[1]


# Whole maps and their first derivatives, each a :class:`RowMap`; other calls are composed of the operators above.
soft_rank = Operation(__name__, "SOFT_RANK")
soft_sort = Operation(__name__, "SOFT_SORT")
soft_permutation = Operation(__name__, "SOFT_PERMUTATION")
permutahedron_rank = Operation(__name__, "PERMUTAHEDRON_RANK")
permutahedron_sort = Operation(__name__, "PERMUTAHEDRON_SORT")
for _map in (soft_rank, soft_sort, soft_permutation, permutahedron_rank, permutahedron_sort):
    _map.backend("numba", module=".numba_maps")
