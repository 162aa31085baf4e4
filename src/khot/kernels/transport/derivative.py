"""The derivative of the sorted transport plan in differentiable operations; see :mod:`khot.kernels.transport`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .solver import solve_dual


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
