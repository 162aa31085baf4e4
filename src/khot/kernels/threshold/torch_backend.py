"""The mask, its threshold and its derivative in plain torch, for every link, dtype and device."""

import torch
from torch import Tensor

from khot._distributed.shards import Shards

from ..contents import check_contents, check_empty
from ..links.base import Link
from ..rows import Threshold, compute_dtype, row_range
from .derivative import derivative, mask_values, plain_derivative
from .local_loops import LocalLoops
from .search import SLIGHT, SMALL, solve_rows


def threshold(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> tuple[Tensor, Tensor]:
    return threshold_of_parts(x, k, scale, Link.find(link), softness, check, None)


def threshold_of_parts(
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    link: Link,
    softness: str,
    check: bool,
    shards: Shards | None,
    loops: LocalLoops | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`threshold` of rows of which x (..., m) may be the part of one process; the same on all of them."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:  # n = 0, or no rows
        if check:
            check_empty(k)
        return torch.zeros(batch, dtype=k.dtype, device=x.device), torch.zeros(batch, dtype=k.dtype, device=x.device)
    rows = x.to(compute_dtype(x)).reshape(-1, n)
    k, scale = k.reshape(-1), scale.reshape(-1)
    rows, ends = (rows, None) if loops is None else (rows.contiguous(), loops.ends(rows.contiguous()))
    span = row_range(rows, shards, ends)
    if check:
        check_contents(rows, k, scale, softness, span, shards)
    anchor, offset = solve_rows(rows, k, scale, link, span, shards, None if loops is None else loops.sums)
    return anchor.reshape(batch), offset.reshape(batch)


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    k, scale = k.to(x.device), scale.to(x.device)
    at = Threshold(*threshold(x, k, scale, link, softness, check))
    y = mask_values(x.to(compute_dtype(x)), scale, at, Link.find(link), log)
    y = y if log or y.dtype != torch.float32 or y.numel() == 0 else _settled(y, k)
    return y.to(x.dtype).contiguous(), *at


def _settled(y: Tensor, k: Tensor) -> Tensor:
    """Float32 masks with k so small that no entry can reach its cap, scaled to sum to k as exactly as they round.

    They lie far out in one tail, where they share the rounding of z, and where a change of the threshold multiplies all
    by about the same.
    """
    small = k < SMALL
    if not (y.is_cuda or bool(small.any())):
        return y
    rate = k / y.sum(-1, dtype=torch.float64) - 1
    rate = torch.where(small & (rate.abs() < SLIGHT), rate, 0.0).to(y.dtype)
    return torch.addcmul(y, y, rate.unsqueeze(-1))


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, log: bool, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scale, at, found = scale.to(x.device), Threshold(anchor, offset), Link.find(link)
    if x.is_cuda:  # where nobody looks at contents, as the short way does
        grad_x, grad_k, grad_scale = derivative(x, scale, at, grad, None, found, log)
    else:
        grad_x, grad_k, of_scale = plain_derivative(x, scale, at, grad, found, log, with_scale)
        grad_scale = torch.zeros_like(grad_k) if of_scale is None else of_scale
    return grad_x.to(x.dtype).contiguous(), grad_k, grad_scale


def threshold_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str
) -> tuple[Tensor, Tensor, Tensor]:
    at, of_offset = Threshold(anchor, offset), grad * scale  # t = anchor + offset * scale
    grad_x, grad_k, grad_scale = derivative(x, scale, at, None, of_offset, Link.find(link), False)
    return grad_x.to(x.dtype).contiguous(), grad_k, grad_scale + grad * offset
