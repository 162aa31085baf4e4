r"""Soft ranks, sorted values and permutations of sorted items, from sums over them that decay with distance.

With items :math:`z_1 \le \dots \le z_n` (in units of the scale) the order maps need

.. math:: \ell_j(v) = \sum_{i<j} e^{z_i - z_j} v_i, \qquad r_j(v) = \sum_{i>j} e^{z_j - z_i} v_i .

They depend only on the gaps :math:`h_j = z_j - z_{j-1}`, which are differences of neighbours. So distant items cost no
digits, and beyond ``FAR`` scales the exact distance makes no difference. A wider gap is replaced by ``FAR``, in z too,
so that nothing overflows.

A cumulative sum of :math:`e^{z_i} v_i`, divided by :math:`e^{z_j}`, gives the sums in O(n) while no exponential over-
or underflows: in double precision as long as the items spread over at most 256 scales. Beyond that, and on accelerators
without Triton, where reading the spread would stall, the sums double their reach log2(n) times with products of the
decays :math:`e^{-h_j} \le 1`, which work for any gaps.

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

from ..registry import Backends, Operator, only_if
from . import reference
from .reference import number_of_points

LONGEST_ON_CHIP = 1024  # items of a row that one program holds


class Points(NamedTuple):
    """Points among sorted items, all (..., points).

    Attributes:
        offset: Offset of a point from an item near it.
        anchor: The number of that item (int64).
        below: How many items lie at or below the point (int64): the anchor or the one after it.
    """

    offset: Tensor
    anchor: Tensor
    below: Tensor


class RowMap(NamedTuple):
    """A map of sorted values, their original positions (..., n), and the scale in float64 (...), with its derivative.

    Attributes:
        forward: Maps these to a tuple of the result and of values that the derivative needs.
        backward: Maps these, dL/d result, whether dL/dscale is wanted, and the values that the derivative needs, to
            dL/dx and dL/dscale in float64.
        takes_number: Whether the scale of all rows may be a number.
    """

    forward: Callable[[Tensor, Tensor, Any], tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, Tensor | None]]
    takes_number: bool = False


def _like_twice(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _like_points(z: Tensor, gap: Tensor, between: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*z.shape[:-1], number_of_points(z.shape[-1], between))
    return z.new_empty(shape), z.new_empty(shape, dtype=torch.long), z.new_empty(shape, dtype=torch.long)


def _like_slices(values: Tensor, *rest: Any) -> Tensor:
    return values.new_empty((*values.shape, values.shape[-1]), dtype=rest[-1])


def _like_gradients(values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, grad: Tensor) -> Any:
    return values.new_empty(values.shape), offset.new_empty(offset.shape)


sorted_positions = Operator("sorted_positions", reference.sorted_positions, fake=_like_twice)
sorted_positions.backend("torch", module=".torch_sums")

decayed_sums = Operator("decayed_sums", reference.decayed_sums, fake=_like_twice)
decayed_sums.backend("triton", module=".triton_scans")
decayed_sums.backend("torch", module=".torch_sums")

soft_count_inverse = Operator("soft_count_inverse", reference.soft_count_inverse, fake=_like_points)
soft_count_inverse.backend("torch", module=".torch_sums")

slice_weights = Operator("slice_weights", reference.slice_weights, fake=_like_slices)
slice_weights.backend("triton", module=".triton_slices")
slice_weights.backend("torch", module=".torch_slices")

slice_weights_derivative = Operator(
    "slice_weights_derivative", reference.slice_weights_derivative, fake=_like_gradients
)
slice_weights_derivative.backend("triton", module=".triton_slices")
slice_weights_derivative.backend("torch", module=".torch_slices")


_on_chip = only_if(
    lambda values: values.shape[-1] <= LONGEST_ON_CHIP,
    f"a program has no room for a row of more than {LONGEST_ON_CHIP} items",
)

# Whole maps and their first derivatives, each a :class:`RowMap`; other calls are composed of the operators above.
soft_rank = Backends(__name__, "SOFT_RANK")
soft_rank.backend("triton", module=".triton_rank", takes=_on_chip)
soft_rank.backend("numba", module=".numba_maps")

soft_sort = Backends(__name__, "SOFT_SORT")
soft_sort.backend("triton", module=".triton_points", takes=_on_chip)
soft_sort.backend("numba", module=".numba_maps")

soft_permutation = Backends(__name__, "SOFT_PERMUTATION")
soft_permutation.backend("triton", module=".triton_points", takes=_on_chip)
soft_permutation.backend("numba", module=".numba_maps")
