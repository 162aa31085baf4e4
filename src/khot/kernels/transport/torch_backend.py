"""Sorted transport in plain torch, all in float64: for every k, dtype and device."""

import torch
from torch import Tensor

from .derivative import derivative, scores_and_plan
from .solver import check_contents, sorted_transport_plan, sorted_transport_thresholds


def sorted_transport(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    rows, half = x.double(), half.to(x.device)
    if check:
        check_contents(rows.reshape(-1, x.shape[-1]), 2 * half.reshape(-1))
    t = sorted_transport_thresholds(rows, half, k, tol, max_iter)
    return sorted_transport_plan(rows, t, half, k, x.dtype), t


def sorted_transport_derivative(
    x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool
) -> tuple[Tensor, Tensor]:
    rows, half, scores = x.double(), half.to(x.device), None
    if with_half:
        scores, plan = scores_and_plan(rows, half, t)
    else:
        plan = sorted_transport_plan(rows, t, half, t.shape[-1] + 1, torch.float64)
    grad_x, grad_half = derivative(plan, scores, half, grad_y, None)
    return grad_x.to(x.dtype), torch.zeros_like(grad_x[..., 0]) if grad_half is None else grad_half
