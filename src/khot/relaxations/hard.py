"""The hard top-k mask, the limit of the relaxed ones, and the positions of its ones."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._contents import checks_contents
from khot._distributed.boundary import of_rows
from khot._distributed.shards import Shards
from khot._validation import check_broadcasts, check_k, check_rows, checked_int, in_wide_dtype
from khot.kernels import selection
from khot.kernels.call import Call
from khot.kernels.exact.rows import compute_dtype, in_rows_of, with_an_item
from khot.kernels.selection import exact

from .axes import as_axes, as_rows


@of_rows(sharded=True, needs_float64=False)
def topk_mask(_call: Call, x: Tensor, k: int | Tensor, *, dim: int | tuple[int, ...] = -1) -> Tensor:
    r"""Marks the k largest entries with ones.

    .. math:: y = \arg\max_{y \in \{0,1\}^n, \sum y = k} \langle x, y \rangle

    Exactly ``k`` entries are marked. Among equal scores, earlier entries win, on every device and for sharded rows too.
    The result carries no gradient. The entries are found by counting in O(n) time, without sorting.

    Args:
        x: Real scores with ``n`` entries along ``dim``; infinities are ordinary scores here.
        k: Number of ones, an integer or an integer tensor that broadcasts with the batch shape, ``0 <= k <= n``.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x`` of zeros and ones, with ``k`` ones along ``dim``.

    Raises:
        ValueError: If ``k`` is out of range, or ``x`` contains NaN. See :mod:`khot.relaxations`.
        TypeError: If ``k`` is not an integer, or ``x`` is not a floating-point tensor.

    Example:
        >>> topk_mask(torch.tensor([0.3, 2.0, -1.0, 0.9]), 2)
        tensor([0., 1., 0., 1.])
    """
    check_rows(x, dim, joint=True)
    k = checked_whole(k)
    rows = as_rows(x.detach(), dim)
    if isinstance(_call.over, Shards):
        return as_axes(_mask_of_parts(rows, k, _call.over), x, dim)
    batch, n = rows.shape[:-1], rows.shape[-1]
    check_k(k, x, batch, n)
    if isinstance(k, Tensor):
        sizes = k.detach().to(x.device, torch.int64).expand(batch)
    elif _call.is_compiling:
        sizes = rows.new_full(batch, k, dtype=torch.int64)  # a DTensor if the rows are
    else:
        sizes = torch.full((), k, dtype=torch.int64, device=x.device).expand(batch)
    if _call.is_exporting:
        return as_axes(exact.mask_of_largest(rows, sizes, n if isinstance(k, Tensor) else k), x, dim)
    return as_axes(selection.topk_mask.within(_call, rows, sizes, checks_contents(x)), x, dim)


@of_rows(needs_float64=False)
def topk_indices(
    _call: Call,
    x: Tensor,
    k: int,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill: int = -1,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    r"""Finds the positions of the k largest entries, in increasing order.

    Among equal scores, earlier entries win, on every device and in compiled and exported programs, where the order of
    ``torch.topk`` is undefined. If a row has k entries above ``-inf``, the result is the row of
    ``topk_mask(x, k).nonzero()``.

    Each row can have its own part ``[start, start + length)``, such as the keys of a causal or a padded sequence; what
    lies outside the row is ignored. Entries of ``-inf`` are never selected. Rows with fewer than ``k`` entries give all
    they have, then ``fill``. The result carries no gradient. The entries are found by counting in O(n) time, without
    sorting.

    Args:
        x: Real scores ``(..., n)``; ``inf`` is the largest score.
        k: Number of positions, which may exceed n.
        starts: First positions of the parts, an integer tensor that broadcasts with the batch shape; by default 0.
        lengths: Lengths of the parts, an integer tensor that broadcasts with the batch shape; by default to the end.
        fill: The entry that stands for a missing position.
        dtype: ``torch.int64`` or ``torch.int32``.

    Returns:
        Tensor ``(..., k)`` of positions in the whole row.

    Raises:
        ValueError: If ``k`` is negative, shapes do not fit, or there is NaN in a part. See :mod:`khot.relaxations`.
        TypeError: If an argument has the wrong type.

    Example:
        >>> topk_indices(torch.tensor([0.3, 2.0, -1.0, 0.9]), 2)
        tensor([1, 3])
        >>> topk_indices(torch.zeros(3, 5), 2, lengths=torch.tensor([1, 2, 3]))  # causal
        tensor([[ 0, -1],
                [ 0,  1],
                [ 0,  1]])
    """
    check_rows(x, -1)
    if checked_int("k", k) < 0:
        raise ValueError(f"`k` must be at least 0, but got {k}")
    if dtype not in (torch.int64, torch.int32):
        raise TypeError(f"`dtype` must be torch.int64 or torch.int32, but got {dtype}")
    limits, fill = torch.iinfo(dtype), checked_int("fill", fill)
    if not limits.min <= fill <= limits.max:
        raise ValueError(f"`fill` must lie in [{limits.min}, {limits.max}] for dtype={dtype}, but got {fill}")
    x, n = x.detach(), x.shape[-1]
    begins = ends = None
    if starts is not None:
        starts = _checked_bounds("starts", starts, x, _call).clamp(-_FAR, n)
        begins = starts.clamp(min=0)
    if lengths is not None:
        ends = _checked_bounds("lengths", lengths, x, _call).clamp(0, _FAR)
        ends = (ends if starts is None else starts + ends).clamp(0, n)
    return _positions(_call, x, k, begins, ends, skips=True, fill=fill).to(dtype)


_FAR = 2**62  # sums of two of these do not overflow


def _checked_bounds(name: str, value: Any, x: Tensor, call: Call) -> Tensor:
    if not isinstance(value, Tensor) or value.is_floating_point():
        raise TypeError(f"`{name}` must be an integer tensor or None, but got {value!r}")
    check_broadcasts(name, value, x, x.shape[:-1])
    return in_wide_dtype(value.detach()).to(x.device).expand(x.shape[:-1])


def _positions(
    call: Call, x: Tensor, k: int, begins: Tensor | None, ends: Tensor | None, skips: bool, fill: int
) -> Tensor:
    first, end = selection.bounds_of(x)
    bounds = first if begins is None else begins, end if ends is None else ends
    if call.is_exporting:
        return exact.topk_indices(x, k, *bounds, skips, fill, False)
    return selection.topk_indices.within(call, x, k, *bounds, skips, fill, checks_contents(x))


@of_rows(needs_float64=False)
def indices_of_largest(_call: Call, x: Tensor, k: int) -> Tensor:
    """The indices of the k largest entries of each row of x (..., n), in increasing order, for ``0 <= k <= n``.

    If there are too few, they include the first entries excluded by ``-inf``.
    """
    check_k(k, x, x.shape[:-1], x.shape[-1])
    return _positions(_call, x.detach(), k, None, None, skips=False, fill=-1)


def _mask_of_parts(x: Tensor, k: int | Tensor, shards: Shards) -> Tensor:
    """The hard mask of the items x (..., m) of this process. Ties go to the lower-numbered processes.

    Every process sends its k largest items, or all of them if it has fewer, in one collective.
    """
    size = in_rows_of(x, k).long()
    if size.numel() == 0:  # no rows on any of these processes
        return torch.zeros_like(x)
    items = with_an_item(x.detach().to(compute_dtype(x)), -torch.inf)
    sent = max(1, min(int(size.amax()), max(shards.lengths)))
    best = items.topk(min(sent, items.shape[-1]), -1).values
    candidates = shards.gather(pad(best, (0, sent - best.shape[-1]), value=-torch.inf))
    ordered = candidates.movedim(0, -1).flatten(-2)
    if checks_contents(x) and bool(ordered.isnan().any()):  # NaN counts as the largest
        raise ValueError("`x` must not contain NaN")
    ordered = ordered.sort(-1, descending=True).values
    last = ordered.gather(-1, (size - 1).clamp(0, ordered.shape[-1] - 1).unsqueeze(-1))
    real = torch.arange(sent, device=x.device) < torch.tensor(shards.lengths, device=x.device).unsqueeze(-1)
    real = real.view(-1, *(1,) * size.dim(), sent)  # False for padding
    tied = ((candidates == last) & real).sum(-1)
    left = size - (ordered > last).sum(-1) - tied[: shards.own].sum(0)  # for ties on this process and later ones
    ties = items == last
    mask = (items > last) | (ties & (ties.cumsum(-1) <= left.unsqueeze(-1)))
    mask &= (size > 0).unsqueeze(-1)
    return mask[..., : x.shape[-1]].to(x.dtype)


def checked_whole(k: Any, what: str = "a hard mask") -> int | Tensor:
    """``k`` as an int or an integer tensor; its value is checked elsewhere."""
    what = f"an int or an integer tensor for {what}"
    if not isinstance(k, Tensor):
        return checked_int("k", k, what)
    if k.is_floating_point():
        raise TypeError(f"`k` must be {what}, but got {k!r}")
    return in_wide_dtype(k)
