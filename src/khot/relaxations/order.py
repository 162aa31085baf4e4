r"""Soft ranks, soft sorting and soft permutations by sums of Laplace distribution functions (LapSum).

All three come from :math:`F(t) = \sum_i \mathrm{Lap}((t - x_i)/s)`, which counts the items below t. Ranks are values of
F, sorted values are its quantiles, and the columns of the permutation matrix are the slices of the items between two
quantiles. The scale enters only through :math:`z = x/s`, and sums over sorted z come from
:mod:`khot.relaxations.laplace`.
"""

import torch
from torch import Tensor

from khot._distributed.boundary import of_rows
from khot.kernels import order as kernel
from khot.kernels.call import Call

from .excluded import with_lowest_first
from .laplace import carried, decayed_sums, positions, slice_weights, soft_count_inverse
from .order_map import OrderMap, sorted_scores


def _halves(values: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Half the sorted items in float64, whose differences cannot overflow, and half the scale of each row (..., 1)."""
    half = values.double() * 0.5
    if isinstance(scale, Tensor):
        return half, (scale.to(values.device, torch.float64) * 0.5).expand(values.shape[:-1]).unsqueeze(-1)
    return half, torch.full((*values.shape[:-1], 1), 0.5 * scale, dtype=torch.float64, device=values.device)


def _rank(values: Tensor, order: Tensor, scale: float | Tensor) -> Tensor:
    z, gap = positions(*_halves(values, scale))
    before, after = decayed_sums(z, gap, torch.ones_like(z), torch.ones_like(z))
    rank = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device) + 0.5 * (after - before)
    return torch.zeros_like(rank).scatter(-1, order, rank).to(values.dtype)


def _sort(values: Tensor, order: Tensor, scale: float | Tensor) -> Tensor:
    half, column = _halves(values, scale)
    z, gap = positions(half, column)
    t, points = soft_count_inverse(z, gap, False)
    offset = carried(points.offset, t - z.gather(-1, points.anchor))
    return ((half.gather(-1, points.anchor) + column * offset) * 2).to(values.dtype)


def _permutation(values: Tensor, order: Tensor, scale: float | Tensor) -> Tensor:
    half, column = _halves(values, scale)
    z, gap = positions(half, column)
    t, points = soft_count_inverse(z, gap, True)
    half, column = half.detach(), column.detach()
    cuts = half.gather(-1, points.anchor)
    return slice_weights(z, t, half, column, order, cuts, points.offset, points.below, values.dtype)


_RANK = OrderMap(_rank, kernel.soft_rank)
_SORT = OrderMap(_sort, kernel.soft_sort)
_PERMUTATION = OrderMap(_permutation, kernel.soft_permutation)


@of_rows()
def soft_rank(
    _call: Call, x: Tensor, scale: float | Tensor = 1.0, descending: bool = False, *, dim: int = -1
) -> Tensor:
    r"""Relaxes the ranks of the entries, from 1 to n (second argument: ``scale``; ``dim`` by keyword).

    .. math:: r_i &= \tfrac12 + \sum_j \mathrm{Lap}((x_i - x_j)/s), \\
        \mathrm{Lap}(u) &= \tfrac12 e^{u} \text{ for } u < 0, \; 1 - \tfrac12 e^{-u} \text{ else}

    Tends to the ranks as ``scale -> 0``, where ties share their mean rank, and to ``(n + 1) / 2`` as it grows. The sum
    is always ``n (n + 1) / 2``. The map is permutation-equivariant, keeps the order of ``x`` and is invariant to
    ``x + c``. It is differentiable to any order in ``x`` and ``scale``, in reverse and forward mode; at ties the second
    derivative jumps, as the Laplace density has a kink. Distant entries, and scales much smaller than the
    entries, do not reduce the accuracy of the others.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        scale: Positive softness.
        descending: Whether the largest entry has rank 1, rather than the smallest.
        dim: Axis of the entries.

    Returns:
        Tensor like ``x``, in ``[1, n]``.

    Raises:
        ValueError: If ``scale`` is not positive, or ``x`` contains NaN or ``inf``. See :mod:`khot.relaxations`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> soft_rank(torch.tensor([0.0, 3.0, 1.0]), scale=0.1)
        tensor([1.0000, 3.0000, 2.0000])
    """
    rows, _ = sorted_scores(_call, x, scale, descending, dim)
    y = _RANK(_call, *rows).to(x.dtype)
    return y if dim == -1 else y.movedim(-1, dim)


@of_rows()
def soft_sort(
    _call: Call, x: Tensor, scale: float | Tensor = 1.0, descending: bool = False, *, dim: int = -1
) -> Tensor:
    r"""Relaxes sorting (second argument: ``scale``; ``dim`` by keyword).

    .. math:: y_j &= F^{-1}(j - \tfrac12), \quad j = 1 \dots n, \\ F(t) &= \sum_i \mathrm{Lap}((t - x_i)/s)

    Tends to the sorted entries as ``scale -> 0``, and spreads beyond their range as it grows. The result increases with
    j, does not depend on the order of ``x``, and shifts by c with ``x + c``. It is differentiable in ``x`` and
    ``scale`` as :func:`soft_rank` is. For each j, the derivatives with respect to the entries are nonnegative and sum
    to one. The cost is that of :func:`soft_rank`.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        scale: Positive softness.
        descending: Whether the largest entry comes first.
        dim: Axis of the entries, and of the sorted entries.

    Returns:
        Tensor like ``x``.

    Raises:
        ValueError: As for :func:`soft_rank`.
        TypeError: As for :func:`soft_rank`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> soft_sort(torch.tensor([0.0, 3.0, 1.0]), scale=0.5)
        tensor([-0.0646,  1.0534,  3.0103])
    """
    rows, filled = sorted_scores(_call, x, scale, descending, dim)
    y = _SORT(_call, *rows).to(x.dtype)
    if filled is not None:
        y = with_lowest_first(y, filled.number, descending)
    return y if dim == -1 else y.movedim(-1, dim)


@of_rows(batch_first=True)
def soft_permutation(
    _call: Call, x: Tensor, scale: float | Tensor = 1.0, descending: bool = False, *, dim: int = -1
) -> Tensor:
    r"""Relaxes the permutation matrix that sorts the entries (second argument: ``scale``; ``dim`` by keyword).

    .. math:: P_{ij} &= \mathrm{Lap}((b_j - x_i)/s) - \mathrm{Lap}((b_{j-1} - x_i)/s), \\ b_j &= F^{-1}(j),
        \quad b_0 = -\infty,\ b_n = \infty

    with F as in :func:`soft_sort`. The matrix is nonnegative, and its rows (items) and columns (positions) sum to one;
    column j is the difference of two LapSum top-k masks. As ``scale -> 0`` it tends to the permutation matrix for which
    :math:`P^\top x` is sorted, and as it grows to ``1 / n``. Rows permute with ``x``; the matrix is invariant to
    ``x + c``. It is differentiable in ``x`` and ``scale`` as :func:`soft_rank` is. Takes O(n^2) time, one product per
    entry, and saves O(n) numbers.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        scale: Positive softness.
        descending: Whether position 1 belongs to the largest entry.
        dim: Axis of the entries.

    Returns:
        Tensor of the shape of ``x`` without ``dim``, followed by ``(n, n)``: items, positions. Its entries are computed
            in the dtype of ``x`` (float16 and bfloat16 in float32) from items and cuts in float64. Rows and columns sum
            to one up to the rounding of that dtype, however far the entries spread.

    Raises:
        ValueError: As for :func:`soft_rank`.
        TypeError: As for :func:`soft_rank`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> soft_permutation(torch.tensor([0.0, 3.0, 1.0]), scale=0.1).round()
        tensor([[1., 0., 0.],
                [0., 0., 1.],
                [0., 1., 0.]])
    """
    rows, _ = sorted_scores(_call, x, scale, descending, dim)
    return _PERMUTATION(_call, *rows).to(x.dtype)
