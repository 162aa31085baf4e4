"""The derivative of the sorted transport plan in differentiable operations: :mod:`khot.kernels.transport`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .solver import solve_dual

FAR = 1e6  # clips z for the derivatives: exp(-FAR) is 0, and 0 * FAR is, too


def place_scores(z: Tensor) -> Tensor:
    """s (..., places, n) of z (..., places - 1, n); differentiable."""
    above = z.relu()
    below = (z - above).flip(-2).cumsum(-2).flip(-2)
    return pad(below, (0, 0, 0, 1)) - pad(above.cumsum(-2), (0, 0, 1, 0))


def threshold_distances(x: Tensor, t: Tensor, half: Tensor) -> Tensor:
    """z (..., places - 1, n), clipped where a place is out of reach; differentiable."""
    return ((x.unsqueeze(-2) - t.unsqueeze(-1)) / half[..., None, None]).clamp(-FAR, FAR)


def scores_and_plan(x: Tensor, half: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """s and P (..., places, n) in float64; differentiable."""
    scores = place_scores(threshold_distances(x.double(), t, half))
    return scores, torch.softmax(scores, -2)


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
