"""The hard top-k mask, the limit of the relaxed ones."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._contents import can_look, checks_contents
from khot._distributed.shards import Shards
from khot._torch_internals import is_exporting
from khot._validation import check_k, check_scores, checked_int, in_wide_dtype
from khot.kernels import selection
from khot.kernels.call import Call
from khot.kernels.exact.rows import compute_dtype, in_rows_of, with_an_item
from khot.kernels.selection.exact import mask_of_largest

from .axes import as_axes, as_rows
from .boundary import with_call


@with_call(in_parts=True, needs_float64=False)
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
    check_scores(x, dim, joint=True, reads_layouts=_call.reads_layouts)
    k = checked_whole(k)
    rows = as_rows(x.detach(), dim)
    if _call.shards is not None:
        return as_axes(_mask_of_parts(rows, k, _call.shards), x, dim)
    batch, n = rows.shape[:-1], rows.shape[-1]
    check_k(k, x, batch, n, reads_layouts=_call.reads_layouts)
    if isinstance(k, Tensor):
        sizes = k.detach().to(x.device, torch.int64).expand(batch)
    elif _call.is_compiling:
        sizes = rows.new_full(batch, k, dtype=torch.int64)  # a DTensor if the rows are
    else:
        sizes = torch.full((), k, dtype=torch.int64, device=x.device).expand(batch)
    if _call.writes_onnx or (_call.is_compiling and is_exporting()):  # a program that runs without this library
        return as_axes(mask_of_largest(rows, sizes, n if isinstance(k, Tensor) else k), x, dim)
    return as_axes(selection.topk_mask.within(_call, rows, sizes, checks_contents(x)), x, dim)


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


def positions(value: Tensor, k: int) -> Tensor:
    """The indices of the ones of k-hot vectors ``(..., n)``, as ``(..., k)`` in increasing order."""
    if can_look(value) and value.device.type == "cpu":
        return value.nonzero()[:, -1].view(*value.shape[:-1], k)
    return value.topk(k, sorted=False).indices.sort(-1).values  # a shape that does not depend on the contents
