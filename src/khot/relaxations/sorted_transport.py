r"""Sorted SOFT top-k, as a differentiable function of scores and epsilon.

Forward: the plan P of :mod:`khot.kernels.sorted_transport`, a softmax over places of :math:`s_{ji}(x, t, T)`.

Derivatives, by the implicit function theorem. With ds the change of s at fixed thresholds and dg that of the places'
duals, which keep the sums over the items as they are,

.. math:: dP = P \circ (ds + dg - \langle P, ds + dg\rangle), \qquad
    H\,dg = -\textstyle\sum_i P_{\cdot i} \circ (ds_{\cdot i} - \langle P_{\cdot i}, ds_{\cdot i}\rangle),

with the (places - 1)-square Hessian H of the dual. They are written in differentiable operations of x, T and t, and t
is itself an output of the function, so derivatives of every order follow. Saved are x and the thresholds.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from khot._validation import check_k, check_scores, check_softness, checks_contents
from khot.kernels.capped_simplex import move_batch_first
from khot.kernels.forward_mode import with_forward_mode
from khot.kernels.sorted_transport import (
    place_scores,
    solve_dual,
    sorted_transport_plan,
    sorted_transport_thresholds,
    threshold_distances,
)

MASS_TOLERANCE = {torch.float64: 1e-13}  # of a column's sum; coarser dtypes round the result by more than 1e-9
MASS_TOLERANCE_COARSE = 1e-9


def _anchors(plan: Tensor) -> Tensor:
    """How many thresholds lie below each place, ds_ji / dz_i: (places, 1)."""
    return torch.arange(plan.shape[-2] - 1, -1, -1, dtype=plan.dtype, device=plan.device).unsqueeze(-1)


def _centred(plan: Tensor, v: Tensor) -> Tensor:
    """Derivative of the softmax over places, P o (v - <P, v>)."""
    return plan * (v - (plan * v).sum(-2, keepdim=True))


def _scores_and_plan(x: Tensor, half: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    scores = place_scores(threshold_distances(x, t, half))
    return scores, torch.softmax(scores, -2)


class _SortedTransport(Function):
    """(x, T) -> (P, t) for float64 x of shape (..., n) and T = eps / 2 of shape (...)."""

    @staticmethod
    def forward(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
        t = sorted_transport_thresholds(x, 2 * half, k, tol, max_iter, check)
        return sorted_transport_plan(x, t, half), t

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, half, *_ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, half, output[1])
        ctx.save_for_forward(x, half, output[1])

    @staticmethod
    def backward(ctx: Any, grad_plan: Tensor | None, grad_t: Tensor | None) -> tuple[Tensor | None, ...]:
        x, half, t = ctx.saved_tensors
        scores = plan = None
        if ctx.needs_input_grad[1] or torch.is_grad_enabled():
            scores, plan = _scores_and_plan(x, half, t)
        else:
            plan = sorted_transport_plan(x, t, half)
        if grad_plan is None:
            grad_plan = torch.zeros_like(plan)
        right = _centred(plan, grad_plan).sum(-1)[..., :-1]
        if grad_t is not None:  # t_l = T (g_{l+1} - g_l)
            right = right + half.unsqueeze(-1) * -pad(grad_t, (1, 0)).diff(dim=-1)
        shift = pad(solve_dual(plan, right), (0, 1)).unsqueeze(-1)
        grad_scores = _centred(plan, grad_plan - shift)
        grad_x = (_anchors(plan) * grad_scores).sum(-2) / half.unsqueeze(-1)
        grad_half = None if scores is None else -(grad_scores * scores).sum((-2, -1)) / half
        return grad_x, grad_half, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        x, half = move_batch_first(info.batch_size, in_dims, args[:2])
        k, tol, max_iter, _ = args[2:]
        return _apply(x, half, k, tol, max_iter, False), (0, 0)


def _jvp(ctx: Any, saved: list[Tensor], dx: Tensor | None, dhalf: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    x, half, t = saved
    scores, plan = _scores_and_plan(x, half, t)
    moved = torch.zeros_like(plan)
    if dx is not None:
        moved = moved + _anchors(plan) * (dx / half.unsqueeze(-1)).unsqueeze(-2)
    if dhalf is not None:
        moved = moved - scores * (dhalf / half)[..., None, None]
    dg = pad(-solve_dual(plan, _centred(plan, moved).sum(-1)[..., :-1]), (0, 1))
    dt = half.unsqueeze(-1) * dg.diff(dim=-1)
    return _centred(plan, moved + dg.unsqueeze(-1)), dt


_apply = with_forward_mode(_SortedTransport, _jvp)


def _check_sorted(k: object, tol: object, max_iter: object) -> None:
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise TypeError(f"`k` must be an int, the number of columns of the result, but got {type(k).__name__}")
    if tol is not None and not (isinstance(tol, (int, float)) and 0 < tol < math.inf):
        raise ValueError(f"`tol` must be None or a positive number, but got {tol}")
    if isinstance(max_iter, bool) or not isinstance(max_iter, int) or max_iter < 1:
        raise ValueError(f"`max_iter` must be a positive int, but got {max_iter}")


def sorted_transport_topk(
    x: Tensor,
    k: int,
    epsilon: float | Tensor = 0.1,
    dim: int = -1,
    *,
    tol: float | None = None,
    max_iter: int = 1000,
) -> Tensor:
    r"""Relaxes the k largest entries, in order, by entropic optimal transport to k sorted places.

    .. math:: y = n\,\Gamma_{\cdot,\,:k}, \quad \Gamma = \arg\min_{\Gamma \ge 0} \langle C, \Gamma\rangle
        + \varepsilon \textstyle\sum_{ij} \Gamma_{ij} \log \Gamma_{ij}, \quad \Gamma 1 = \tfrac{1}{n} 1, \quad
        \Gamma^\top 1 = (\tfrac1n, \dots, \tfrac1n, \tfrac{n-k}{n}), \quad C_{ij} = (x_i - (k - j))^2

    Column j is a soft indicator of the (j+1)-th largest entry: columns sum to 1, rows to at most 1, and ``y.mT @ x`` is
    a soft version of the k largest values. Tends to the hard indicators as ``epsilon -> 0``, to ``1 / n`` as it grows.
    Permutation-equivariant, invariant to ``x + c``; ``epsilon`` is absolute, see :func:`transport_topk`.
    Differentiable to any order, forwards and backwards, in ``x`` and ``epsilon``. Newton's method on the k+1 duals
    takes 2 to 15 steps of O(nk) time and O(nk^2) multiplications; saves ``x`` and k numbers per row.

    Args:
        x: Finite scores with ``n`` entries along ``dim``.
        k: Number of columns, an int, ``0 <= k <= n``.
        epsilon: Positive softness; a number, or a tensor that broadcasts with the batch shape.
        dim: Axis of the ground set.
        tol: Deviation of a column's sum from 1 at which to stop, by default about the rounding error of the dtype.
        max_iter: Number of Newton steps after which to stop with a RuntimeWarning.

    Returns:
        Tensor of dtype and shape of ``x`` with an axis of length ``k`` appended, in ``[0, 1]``. Computed in float64.

    Raises:
        ValueError: If ``k`` or ``epsilon`` is out of range, ``epsilon`` does not broadcast, or ``x`` is not finite.
            Contents of tensors are checked as in :func:`capped_simplex_map`.
        TypeError: If an argument has the wrong type or dtype.

    References:
        [1] Xie et al. (2020), "Differentiable Top-k with Optimal Transport", arXiv:2002.06504: sorted SOFT top-k.

    Example:
        >>> sorted_transport_topk(torch.tensor([0.0, 1.0, 2.0]), 2, 1.0)
        tensor([[0.0138, 0.2332],
                [0.2332, 0.5336],
                [0.7530, 0.2332]])
    """
    check_scores(x, dim)
    _check_sorted(k, tol, max_iter)
    dim = dim % x.dim()
    rows = x.movedim(dim, -1)
    batch, n = rows.shape[:-1], rows.shape[-1]
    check_k(k, x, batch, n)
    check_softness("epsilon", epsilon, x, batch)
    if k == 0:
        return x.unsqueeze(-1)[..., :0]
    if tol is None:
        tol = MASS_TOLERANCE.get(x.dtype, MASS_TOLERANCE_COARSE)
    epsilon = torch.as_tensor(epsilon, dtype=torch.float64, device=x.device).expand(batch)
    plan, _ = _apply(rows.double(), epsilon / 2, k, tol, max_iter, checks_contents(x))
    return plan.narrow(-2, 0, k).to(x.dtype).movedim(-1, dim)
