r"""The sorted transport plan and its first derivative as one operator each, for which accelerators have kernels.

Forward: y, the first k rows of the plan P of :mod:`khot.kernels.sorted_transport`, a softmax over places of
:math:`s_{ji}(x, t, T)`, T half the epsilon.

Derivatives, by the implicit function theorem. With ds the change of s at fixed thresholds and dg that of the places'
duals, which keep the sums over the items as they are,

.. math:: dP = P \circ (ds + dg - \langle P, ds + dg\rangle), \qquad
    H\,dg = -\textstyle\sum_i P_{\cdot i} \circ (ds_{\cdot i} - \langle P_{\cdot i}, ds_{\cdot i}\rangle),

with the (places - 1)-square Hessian H of the dual.

The torch versions here, all in float64, are the definition, and take what the kernels do not: many places, no Triton.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..autograd import move_batch_first
from ..registry import operator, use_triton_transport
from .torch_backend import (
    check_contents,
    places,
    solve_dual,
    sorted_transport_plan,
    sorted_transport_thresholds,
    warn_of_errors,
)

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


@operator("sorted_transport")
def sorted_transport(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    """y (..., k, n) in the dtype of ``x (..., n)``, and the float64 thresholds; not differentiable.

    ``half`` of the batch shape, half the epsilon in float64, may be on the CPU for an ``x`` elsewhere if it expands one
    number. With ``check``, bad contents raise a ValueError; without it, accelerators do not warn of ``max_iter`` steps
    that are not enough.
    """
    if use_triton_transport(x, k):
        return _launch_checked(x, half, k, tol, max_iter, check)
    rows, half = x.double(), half.to(x.device)
    if check:
        check_contents(rows.reshape(-1, x.shape[-1]), 2 * half.reshape(-1))
    t = sorted_transport_thresholds(rows, half, k, tol, max_iter)
    return sorted_transport_plan(rows, t, half, k, x.dtype), t


def _launch_checked(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    from .triton_forward import launch_forward

    check = check and not (x.is_cuda and torch.cuda.is_current_stream_capturing())  # a graph cannot look
    y, t, error = launch_forward(x, half, k, tol, max_iter, check)
    if error is not None and bool((error != 0).any()):
        check_contents(x.double().reshape(-1, x.shape[-1]), 2 * half.to(x.device).reshape(-1))
        warn_of_errors(int((error != 0).sum()), len(error), error.max().item(), max_iter, tol)
    return y, t


@sorted_transport.register_fake
def _(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    *batch, n = x.shape
    return x.new_empty(*batch, k, n), x.new_empty(*batch, places(k, n) - 1, dtype=torch.float64)


@sorted_transport.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> Any:
    x, half = move_batch_first(info.batch_size, in_dims, (x, half))
    return sorted_transport(x, half, k, tol, max_iter, False), (0, 0)


@operator("sorted_transport_derivative")
def sorted_transport_derivative(
    x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool
) -> tuple[Tensor, Tensor]:
    """dL/dx in x's dtype and dL/dhalf, unless it is not wanted, from dL/dy (..., k, n); not differentiable.

    ``half`` may be on the CPU as in :func:`sorted_transport`.
    """
    if use_triton_transport(x, grad_y.shape[-2]):
        from .triton_backward import launch_backward

        return launch_backward(x, half, t, grad_y)
    rows, half, scores = x.double(), half.to(x.device), None
    if with_half:
        scores, plan = scores_and_plan(rows, half, t)
    else:
        plan = sorted_transport_plan(rows, t, half, t.shape[-1] + 1, torch.float64)
    grad_x, grad_half = derivative(plan, scores, half, grad_y, None)
    return grad_x.to(x.dtype), torch.zeros_like(grad_x[..., 0]) if grad_half is None else grad_half


@sorted_transport_derivative.register_fake
def _(x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[:-1], dtype=torch.float64)


@sorted_transport_derivative.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool) -> Any:
    x, half, t, grad_y = move_batch_first(info.batch_size, in_dims, (x, half, t, grad_y))
    return sorted_transport_derivative(x, half, t, grad_y, with_half), (0, 0)
