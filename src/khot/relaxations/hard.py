"""The hard top-k mask that the relaxed ones tend to."""

from typing import Any

import torch
from torch import Tensor

from khot._distributed.boundary import of_rows
from khot._distributed.shards import shards_of_rows
from khot._validation import check_k, check_scores, checked_int, looks_at_contents, tensors_among

from .axes import as_axes, as_rows
from .in_parts import topk_mask_of_parts


@of_rows(in_parts=True, needs_float64=False)
def topk_mask(x: Tensor, k: int | Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    r"""Marks the k largest entries with ones.

    .. math:: y = \arg\max_{y \in \{0,1\}^n, \sum y = k} \langle x, y \rangle

    Exactly ``k`` entries are marked, ties or not; which of tied entries is unspecified. Not differentiable: the result
    carries no gradient.

    Args:
        x: Real scores with ``n`` entries along ``dim``; infinities are ordinary scores here.
        k: Number of ones, an integer or an integer tensor that broadcasts with the batch shape, ``0 <= k <= n``.
        dim: Axis of the ground set, or axes that are one ground set together.

    Returns:
        Tensor like ``x`` of zeros and ones, with ``k`` ones along ``dim``.

    Raises:
        ValueError: If ``k`` is out of range, or ``x`` contains NaN. Details: :mod:`khot.relaxations`.
        TypeError: If ``k`` is not an integer, or ``x`` not a floating-point tensor.

    Example:
        >>> topk_mask(torch.tensor([0.3, 2.0, -1.0, 0.9]), 2)
        tensor([0., 1., 0., 1.])
    """
    check_scores(x, dim, joint=True)
    k = checked_whole(k)
    rows = as_rows(x.detach(), dim)
    if not torch.compiler.is_compiling() and (shards := shards_of_rows()) is not None:
        return as_axes(topk_mask_of_parts(rows, k, shards), x, dim)
    batch, n = rows.shape[:-1], rows.shape[-1]
    check_k(k, x, batch, n)
    readable = x.numel() > 0 and looks_at_contents(*tensors_among(x, k))
    if readable:
        check_ranked(rows, k)
    if not isinstance(k, Tensor):
        return as_axes(torch.zeros_like(rows).scatter(-1, rows.topk(k, -1, sorted=False).indices, 1.0), x, dim)
    order = rows.topk(int(k.max()) if readable else n, -1).indices
    marks = torch.arange(order.shape[-1], device=x.device) < k.to(x.device).expand(batch).unsqueeze(-1)
    return as_axes(torch.zeros_like(rows).scatter(-1, order, marks.to(x.dtype)), x, dim)


def checked_whole(k: Any, what: str = "a hard mask") -> int | Tensor:
    """``k`` of an integer type: an int, or a tensor; its value is checked elsewhere."""
    what = f"an int or an integer tensor for {what}"
    if not isinstance(k, Tensor):
        return checked_int("k", k, what)
    if k.is_floating_point():
        raise TypeError(f"`k` must be {what}, but got {k!r}")
    return k


def check_ranked(x: Tensor, k: int | Tensor) -> None:
    """Contents of the rows of x (..., n), which may be infinite, and of k."""
    if bool(x.amax(-1).isnan().any()):
        raise ValueError("`x` must not contain NaN")
    if isinstance(k, Tensor) and bool(((k < 0) | (k > x.shape[-1])).any()):
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k in [{k.min()}, {k.max()}] with n={x.shape[-1]}")
