"""Sorted transport in plain torch, all in float64: for every k, dtype and device. See :mod:`khot.kernels.transport`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .solver import check_contents, scores_and_plan, solve_dual, sorted_transport_thresholds


def anchors(plan: Tensor) -> Tensor:
    """How many thresholds lie below each place, ds_ji / dz_i: (places, 1)."""
    return torch.arange(plan.shape[-2] - 1, -1, -1, dtype=plan.dtype, device=plan.device).unsqueeze(-1)


def centred(plan: Tensor, v: Tensor) -> Tensor:
    """Derivative of the softmax over places, P o (v - <P, v>)."""
    return plan * (v - (plan * v).sum(-2, keepdim=True))


def derivative(
    plan: Tensor, scores: Tensor | None, half: Tensor, grad_y: Tensor | None, grad_t: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dL/dx, and dL/dT if there are ``scores``, from dL/dy and dL/dt; in float64, differentiable."""
    if grad_y is None:
        grad_plan = torch.zeros_like(plan)
    else:
        grad_plan = pad(grad_y.double(), (0, 0, 0, plan.shape[-2] - grad_y.shape[-2]))
    right = centred(plan, grad_plan).sum(-1)[..., :-1]
    if grad_t is not None:  # t_l = T (g_{l+1} - g_l)
        right = right + half.unsqueeze(-1) * -pad(grad_t, (1, 0)).diff(dim=-1)
    shift = pad(solve_dual(plan, right), (0, 1)).unsqueeze(-1)
    grad_scores = centred(plan, grad_plan - shift)
    grad_x = (anchors(plan) * grad_scores).sum(-2) / half.unsqueeze(-1)
    return grad_x, None if scores is None else -(grad_scores * scores).sum((-2, -1)) / half


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
