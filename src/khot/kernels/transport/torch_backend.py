"""Sorted transport in plain torch, all in float64: for every k, dtype and device."""

import torch
from torch import Tensor

from .derivative import derivative
from .solver import check_contents, scores_and_plan, sorted_transport_thresholds


def sorted_transport(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    rows, half = x.double(), half.to(x.device)
    if check:
        check_contents(rows.reshape(-1, x.shape[-1]), 2 * half.reshape(-1))
    t = sorted_transport_thresholds(rows, half, k, tol, max_iter)
    plan = scores_and_plan(rows, half, t)[1]
    return plan[..., :k, :].to(x.dtype, copy=True, memory_format=torch.contiguous_format), t


def sorted_transport_derivative(
    x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool
) -> tuple[Tensor, Tensor]:
    half = half.to(x.device)
    scores, plan = scores_and_plan(x, half, t)
    grad_x, grad_half = derivative(plan, scores if with_half else None, half, grad_y, None)
    return grad_x.to(x.dtype), torch.zeros_like(grad_x[..., 0]) if grad_half is None else grad_half
