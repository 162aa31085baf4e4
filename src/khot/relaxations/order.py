r"""Soft ranks, soft sorting and soft permutations by sums of Laplace distribution functions (LapSum).

All three come from :math:`F(t) = \sum_i \mathrm{Lap}((t - x_i)/s)`, which counts the items below t: ranks are its
values, sorted values its quantiles, and the columns of the permutation the slices of the items between two quantiles.
The scale enters through :math:`z = x/s` alone, and the sums over sorted z through :mod:`khot.relaxations.laplace`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_flag, check_scores, check_softness, check_softness_contents, described
from khot.kernels import order as kernel
from khot.kernels.exact.rows import in_rows_of
from khot.kernels.links.base import Link
from khot.kernels.order.torch_sums import FAR

from . import order_link
from .excluded import filled_below, with_lowest_first
from .laplace import carried, decayed_sums, positions, slice_weights, soft_count_inverse
from .order_map import OrderMap


class _Sorted(NamedTuple):
    """What an :class:`OrderMap` takes."""

    x: Tensor  # with the axis at the end
    values: Tensor  # sorted
    order: Tensor  # where they stand in x
    scale: float | Tensor  # negative for descending order: z = x/s ascends all the same


class _Rows(NamedTuple):
    """What an order map is of."""

    rows: _Sorted
    excluded: Tensor | None  # how many entries of each row are (..., 1), None if none is known to be
    dtype: torch.dtype


def _sorted(x: Tensor, scale: float | Tensor, descending: bool, dim: int) -> _Rows:
    """Checks and sorts."""
    check_scores(x, dim)
    if dim != -1:
        x = x.movedim(dim, -1)
    check_softness("scale", scale, x, x.shape[:-1])
    check_flag("descending", descending)
    dtype, excluded = x.dtype, None
    values, order = x.sort(-1, descending=descending)
    if _may_have_excluded(values, scale):
        filled = filled_below(x, 4 * FAR * in_rows_of(x, scale).unsqueeze(-1))
        x, excluded = filled.x, filled.number
        values, order = x.sort(-1, descending=descending)
    if descending:
        scale = -scale.double() if isinstance(scale, Tensor) else -scale
    return _Rows(_Sorted(x, values, order, scale), excluded, dtype)


def _with_link(x: Tensor, scale: float | Tensor, descending: bool, dim: int, link: Link) -> tuple[Any, ...]:
    """The arguments of the maps of :mod:`.order_link`, checked."""
    if not isinstance(link, Link):
        raise TypeError(f"`link` must be a khot.relaxations.Link or None, but got {described(link, Link)}")
    check_scores(x, dim)
    x = x.movedim(dim, -1)
    check_softness("scale", scale, x, x.shape[:-1])
    check_flag("descending", descending)
    _may_have_excluded(x.sort(-1).values, scale)  # for its checks; sums over all pairs cost more
    return x, scale, descending, link


def _halves(values: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Half the sorted items in float64, whose differences do not overflow, and half the scale of each row (..., 1)."""
    half = values.double() * 0.5
    if isinstance(scale, Tensor):
        return half, (scale.to(values.device, torch.float64) * 0.5).expand(values.shape[:-1]).unsqueeze(-1)
    return half, torch.full((*values.shape[:-1], 1), 0.5 * scale, dtype=torch.float64, device=values.device)


def _may_have_excluded(ordered: Tensor, scale: float | Tensor) -> bool:
    """Whether entries may be -inf; checks contents where it can look at them."""
    if ordered.numel() == 0:
        return False
    if not looks_at_contents(ordered):
        return True
    if isinstance(scale, Tensor) and looks_at_contents(scale):
        check_softness_contents("scale", scale, ordered.dtype)
    ordered = ordered.detach()
    widths = ordered.select(-1, 0) - ordered.select(-1, -1)  # NaN sorts last, or first
    if math.isfinite(widths.sum().item()):  # not so if entries are so far apart that this overflows
        return False
    ends = ordered[..., [0, -1]]
    wrong = ends[~(ends < torch.inf)]
    if wrong.numel():
        raise ValueError(f"`x` must be finite or -inf for soft ranks and sorting, but contains {wrong[0].item()}")
    return bool((ends == -torch.inf).any())


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


@of_rows
def soft_rank(
    x: Tensor, scale: float | Tensor = 1.0, descending: bool = False, dim: int = -1, *, link: Link | None = None
) -> Tensor:
    r"""Relaxes the ranks 1 ... n of the entries (second argument: ``scale``; ``dim`` by keyword).

    .. math:: r_i = \tfrac12 + \sum_j \mathrm{Lap}((x_i - x_j)/s), \qquad
        \mathrm{Lap}(u) = \tfrac12 e^{u} \text{ for } u < 0, \; 1 - \tfrac12 e^{-u} \text{ else}

    Tends to the ranks as ``scale -> 0``, where ties share their mean rank, and to ``(n + 1) / 2`` as it grows; sums to
    ``n (n + 1) / 2`` always. Permutation-equivariant, keeps the order of ``x``, invariant to ``x + c``. Differentiable
    in ``x`` and ``scale``, forwards and backwards, to any order; at ties the second derivative jumps, with the density
    of the Laplace law. An entry far away costs the others no digit, nor do scales far smaller than the entries. One
    sort and O(n) more (O(n log n) in plain torch where entries spread over more than 256 scales, and on accelerators);
    saves O(n) numbers. On a CPU with numba both passes take at most 8 times the memory of ``x`` (of half types more:
    the places of the sort take 8 bytes each).

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        scale: Positive softness.
        descending: Whether the largest entry has rank 1, rather than the smallest.
        dim: Axis of the entries.
        link: The distribution function F to take instead of Lap, at O(n^2) time and memory. It should be symmetric,
            ``F(0) = 1/2``, for ranks to tend to the ranks.

    Returns:
        Tensor like ``x``, in ``[1, n]``.

    Raises:
        ValueError: If ``scale`` is not positive, or ``x`` contains NaN or ``inf``. Details: :mod:`khot.relaxations`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> soft_rank(torch.tensor([0.0, 3.0, 1.0]), scale=0.1)
        tensor([1.0000, 3.0000, 2.0000])
    """
    if link is not None:
        return order_link.rank(*_with_link(x, scale, descending, dim, link)).movedim(-1, dim)
    rows, _, dtype = _sorted(x, scale, descending, dim)
    y = _RANK(*rows).to(dtype)
    return y if dim == -1 else y.movedim(-1, dim)


@of_rows
def soft_sort(
    x: Tensor, scale: float | Tensor = 1.0, descending: bool = False, dim: int = -1, *, link: Link | None = None
) -> Tensor:
    r"""Relaxes sorting (second argument: ``scale``; ``dim`` by keyword).

    .. math:: y_j = F^{-1}(j - \tfrac12), \qquad F(t) = \sum_i \mathrm{Lap}((t - x_i)/s), \quad j = 1 \dots n

    Tends to the sorted entries as ``scale -> 0``; spreads beyond their range as it grows. Increasing in j, invariant to
    permutations of ``x``; ``x + c`` moves it by c. Differentiable in ``x`` and ``scale`` as :func:`soft_rank` is; the
    derivatives with respect to the entries are nonnegative and sum to one for each j. Costs as :func:`soft_rank`.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        scale: Positive softness.
        descending: Whether to begin with the largest.
        dim: Axis of the entries, and of the sorted ones.
        link: The distribution function to take instead of Lap, at O(n^2) time and memory.

    Returns:
        Tensor like ``x``.

    Raises:
        ValueError: As :func:`soft_rank`.
        TypeError: As :func:`soft_rank`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> soft_sort(torch.tensor([0.0, 3.0, 1.0]), scale=0.5)
        tensor([-0.0646,  1.0534,  3.0103])
    """
    if link is not None:
        return order_link.sort(*_with_link(x, scale, descending, dim, link)).movedim(-1, dim)
    rows, excluded, dtype = _sorted(x, scale, descending, dim)
    y = _SORT(*rows).to(dtype)
    if excluded is not None:
        y = with_lowest_first(y, excluded, descending)
    return y if dim == -1 else y.movedim(-1, dim)


@of_rows(batch_first=True)
def soft_permutation(
    x: Tensor, scale: float | Tensor = 1.0, descending: bool = False, dim: int = -1, *, link: Link | None = None
) -> Tensor:
    r"""Relaxes the permutation matrix that sorts the entries (second argument: ``scale``; ``dim`` by keyword).

    .. math:: P_{ij} = \mathrm{Lap}((b_j - x_i)/s) - \mathrm{Lap}((b_{j-1} - x_i)/s), \qquad b_j = F^{-1}(j),
        \quad b_0 = -\infty,\ b_n = \infty

    with F as in :func:`soft_sort`. Nonnegative; its rows (items) and columns (positions) sum to one; column j is the
    difference of two LapSum top-k masks. Tends to the matrix with :math:`P^\top x` sorted as ``scale -> 0``, to
    ``1 / n`` as it grows. Rows permute with ``x``; invariant to ``x + c``. Differentiable in ``x`` and ``scale`` as
    :func:`soft_rank` is. O(n^2) time, at which each entry is a product; saves O(n) numbers.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        scale: Positive softness.
        descending: Whether position 1 is that of the largest entry.
        dim: Axis of the entries.
        link: The distribution function to take instead of Lap.

    Returns:
        Tensor of the shape of ``x`` without ``dim``, followed by ``(n, n)``: items, positions. Its
            entries are computed in the dtype of ``x``, float16 and bfloat16 in float32, from items and cuts in float64:
            rows and columns sum to one up to that dtype's rounding, however far the entries spread.

    Raises:
        ValueError: As :func:`soft_rank`.
        TypeError: As :func:`soft_rank`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> soft_permutation(torch.tensor([0.0, 3.0, 1.0]), scale=0.1).round()
        tensor([[1., 0., 0.],
                [0., 0., 1.],
                [0., 1., 0.]])
    """
    if link is not None:
        return order_link.permutation(*_with_link(x, scale, descending, dim, link))
    rows, _, dtype = _sorted(x, scale, descending, dim)
    return _PERMUTATION(*rows).to(dtype)
