"""TODO khot.kernels.capped_simplex.__init__."""

from typing import Any

import torch
from torch import Tensor

from ..autograd import move_batch_first
from ..links.base import Link
from ..links.logistic import LOGISTIC
from ..registry import operator, use_triton
from ..rows import Threshold, _in_rows_of, compute_dtype, row_range
from .derivative import derivative, mask_values
from .torch_backend import check_contents, solve_rows


def solve_threshold(x: Tensor, k: Tensor | float, scale: Tensor | float = 1.0, link: Link = LOGISTIC) -> Tensor:
    """The t with ``sum(F((x - t) / scale)) = k`` along the last axis; not differentiable (the maps are).

    Args:
        x: Scores (..., n); ``-inf`` excludes an item, ``+inf`` selects it.
        k: Sum, between the numbers of ``+inf`` and of entries above ``-inf``; broadcasts to (...). At either limit,
            where every far enough t will do, the result lies ``link.reach`` scales beyond the scores.
        scale: Positive; broadcasts to (...).
        link: The link function F.

    Returns:
        float64 tensor (...).
    """
    k, scale = (_in_rows_of(x, v).detach() for v in (k, scale))
    anchor, offset = capped_simplex_threshold(x.detach(), k, scale, link.key, "scale", False)
    return anchor + offset * scale


@operator("capped_simplex_threshold")
def capped_simplex_threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool
) -> tuple[Tensor, Tensor]:
    """Anchor and offset of the :class:`Threshold`, for k and scale of the batch shape; compiled graphs keep it whole.

    With ``check``, bad contents raise a ValueError in which the scale goes by the name ``softness``.
    """
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        if check and bool((k != 0).any()):  # n = 0, or no rows
            raise ValueError(f"`k` must be 0 for an empty ground set, but got k={k.max().item():g}")
        return torch.zeros(batch, dtype=k.dtype, device=x.device), torch.zeros(batch, dtype=k.dtype, device=x.device)
    found = Link.find(link)
    if use_triton(x, found):
        return launch_checked(x, k, scale, found, False, softness, check, with_y=False)[1:]
    rows = x.to(compute_dtype(x)).reshape(-1, n)
    k, scale = k.reshape(-1), scale.reshape(-1)
    span = row_range(rows)
    if check:
        check_contents(rows, k, scale, softness, span)
    anchor, offset = solve_rows(rows, k, scale, found, span)
    return anchor.reshape(batch), offset.reshape(batch)


def launch_checked(
    x: Tensor, k: Tensor, scale: Tensor, link: Link, log: bool, softness: str, check: bool, with_y: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """y or log y, if wanted, anchors and offsets from the Triton kernel; arguments as of the operators."""
    from .triton_forward import launch_forward

    check = check and not (x.is_cuda and torch.cuda.is_current_stream_capturing())  # a graph cannot look
    y, anchor, offset, sound = launch_forward(x, k, scale, link, log, with_y, check)
    if sound is not None and not bool(sound.all()):
        rows = x.to(compute_dtype(x)).reshape(-1, x.shape[-1])
        k, scale = (v.to(x.device).reshape(-1) for v in (k, scale))
        check_contents(rows, k, scale, softness, row_range(rows))
    return y, anchor, offset


@capped_simplex_threshold.register_fake
def _(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> tuple[Tensor, Tensor]:
    of_row = torch.empty_like(k, memory_format=torch.contiguous_format)
    return of_row, torch.empty_like(of_row)


@capped_simplex_threshold.register_vmap
def _(info, in_dims, x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool):  # type: ignore[no-untyped-def]
    x, k, scale = move_batch_first(info.batch_size, in_dims, (x, k, scale))
    return capped_simplex_threshold(x, k, scale, link, softness, False), (0, 0)


@operator("capped_simplex_mask")
def fused_mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, or log y, like ``x (..., n)``, and anchors and offsets of the batch shape; not differentiable.

    ``k`` and ``scale`` of the batch shape may be on the CPU for an ``x`` elsewhere, if they expand one number. With
    ``check``, bad contents raise a ValueError in which the scale goes by the name ``softness``.
    """
    found = Link.find(link)
    if use_triton(x, found, log):
        return launch_checked(x, k, scale, found, log, softness, check)
    k, scale = k.to(x.device), scale.to(x.device)
    anchor, offset = capped_simplex_threshold(x, k, scale, link, softness, check)
    return mask_values(x, scale, Threshold(anchor, offset), found, log).contiguous(), anchor, offset


@fused_mask.register_fake
def _(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    anchor = x.new_empty(x.shape[:-1], dtype=torch.float64)
    return torch.empty_like(x, memory_format=torch.contiguous_format), anchor, torch.empty_like(anchor)


@fused_mask.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool):  # type: ignore[no-untyped-def]
    x, k, scale = move_batch_first(info.batch_size, in_dims, (x, k, scale))
    return fused_mask(x, k, scale, link, log, softness, False), (0, 0, 0)


@operator("capped_simplex_mask_derivative")
def fused_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, log: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx in x's dtype, dL/dk and dL/ds from dL/dy or dL/d log y; not differentiable.

    ``scale`` may be on the CPU as in :func:`fused_mask`.
    """
    found, at = Link.find(link), Threshold(anchor, offset)
    if use_triton(x, found, log):
        from .triton_backward import launch_backward

        return launch_backward(x, scale, at, grad, found, log)
    grad_x, grad_k, grad_scale = derivative(x, scale.to(x.device), at, grad, None, found, log)
    return grad_x.to(x.dtype).contiguous(), grad_k, grad_scale


@fused_derivative.register_fake
def _(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, log: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_row = torch.empty_like(offset, memory_format=torch.contiguous_format)
    return torch.empty_like(x, memory_format=torch.contiguous_format), of_row, torch.empty_like(of_row)


@fused_derivative.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, *rest: Any):  # type: ignore[no-untyped-def]
    tensors = move_batch_first(info.batch_size, in_dims, (x, scale, anchor, offset, grad))
    return fused_derivative(*tensors, *rest), (0, 0, 0)
