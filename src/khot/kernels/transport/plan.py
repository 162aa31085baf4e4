r"""The transport plan of sorted SOFT top-k: n items to the places 0 (largest), ..., k - 1 and one for the rest.

In min <C, P> + eps sum P log P with C_ij = (x_i - a_j)^2, anchors a_j = k - j and row sums 1, the items' duals and all
squares cancel in a softmax over the places. With thresholds t_l between places l and l + 1, and T = eps / 2,

    P_ji = softmax_j(s_ji),  s_ji = sum_{l >= j} z_li,  z_li = (x_i - t_l) / T,

and t is determined by the sums over the items: 1 for each of the k places (that of the rest, n - k, follows; for k = n
there is no such place, and only k - 1 thresholds). Up to a number per item, which the softmax cancels,

    s_ji = sum_{l >= j} min(z_li, 0) - sum_{l < j} max(z_li, 0):

these are terms of one sign, summed outwards from the item's own place, so no digits are lost however far the other
places are. The sums are one product with a matrix of 1, 0 and -1, since places come first.

Layout: x (..., n), T (...); t and g (places - 1, ...), s and P (places, ..., n); all in float64. All functions are
differentiable.
"""

import torch
from torch import Tensor

FAR = 10**6  # clips z for the derivatives: exp(-FAR) is 0, and so is 0 * FAR


def places(k: int, n: int) -> int:
    """Number of rows of the plan."""
    return k + 1 if k < n else n


def outward_sums(count: int, like: Tensor) -> Tensor:
    """The matrix (count, 2 (count - 1)) that maps (min(z, 0), max(z, 0)) to s."""
    ones = like.new_ones(count, count - 1, dtype=torch.float64)
    return torch.cat([ones.triu(), -ones.tril(-1)], -1)


def scores_and_plan(x: Tensor, half: Tensor, t: Tensor, outwards: Tensor) -> tuple[Tensor, Tensor]:
    """s and P, for the matrix of :func:`outward_sums`."""
    z = ((x - t.unsqueeze(-1)) / half.unsqueeze(-1)).clamp(-FAR, FAR)
    below = z.clamp(max=0)
    scores = (outwards @ torch.cat([below, z - below]).flatten(1)).view(len(outwards), *x.shape)
    return scores, torch.softmax(scores, 0)


def rounding_of_sums(count: int) -> float:
    """The usual rounding error of the sums of a plan with so many places, with a margin."""
    return 8 * count * torch.finfo(torch.float64).eps


def solve_dual(plan: Tensor, sums: Tensor, right: Tensor) -> Tensor:
    """The h (places - 1, ...) with Hessian * h = ``right``, the last g fixed, for a plan and its sums over the items.

    The diagonal is increased by the size of rounding errors, so that a vanishing Hessian, as for small eps, stays
    positive. The derivatives that it then multiplies vanish with it.
    """
    inner = plan[:-1].movedim(0, -2)
    diagonal = torch.diag_embed(sums[:-1].movedim(0, -1) * (1 + rounding_of_sums(len(plan))))
    factor, _ = torch.linalg.cholesky_ex(diagonal - inner @ inner.mT)
    return torch.cholesky_solve(right.movedim(0, -1).unsqueeze(-1), factor).squeeze(-1).movedim(-1, 0)


def threshold_steps(g: Tensor) -> Tensor:
    """Steps of the thresholds, in units of T, from those of the duals; the last dual does not change."""
    return torch.cat([g[1:], torch.zeros_like(g[:1])]) - g


def anchors(plan: Tensor) -> Tensor:
    """How many thresholds lie below each place, ds_ji / dz_i, in a shape that multiplies a plan."""
    return torch.arange(len(plan) - 1, -1, -1, dtype=plan.dtype, device=plan.device).view(-1, *[1] * (plan.dim() - 1))


def centred(plan: Tensor, v: Tensor) -> Tensor:
    """Derivative of the softmax over places, P o (v - <P, v>)."""
    return plan * (v - (plan * v).sum(0))


def derivative(
    plan: Tensor, scores: Tensor | None, half: Tensor, grad_plan: Tensor, grad_t: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dL/dx, and dL/dT if there are ``scores``, from dL/dP and dL/dt."""
    right = centred(plan, grad_plan).sum(-1)[:-1]
    if grad_t is not None:  # t_l = T (g_{l+1} - g_l)
        right = right + half * (torch.cat([torch.zeros_like(grad_t[:1]), grad_t[:-1]]) - grad_t)
    shift = solve_dual(plan, plan.sum(-1), right).unsqueeze(-1)
    grad_scores = centred(plan, grad_plan - torch.cat([shift, torch.zeros_like(plan[:1, ..., :1])]))
    grad_x = (anchors(plan) * grad_scores).sum(0) / half.unsqueeze(-1)
    return grad_x, None if scores is None else -(grad_scores * scores).sum((0, -1)) / half


def padded(grad_y: Tensor, count: int) -> Tensor:
    """dL/dP from dL/dy (..., k, n)."""
    k, n = grad_y.shape[-2:]
    grad = grad_y.double().movedim(-2, 0)
    return torch.cat([grad, grad.new_zeros(count - k, *grad.shape[1:-1], n)])
