r"""The transport plan of sorted SOFT top-k: n items to the places 0 (largest), ..., k - 1 and one for the rest.

Plan. In min <C, P> + eps sum P log P with C_ij = (x_i - a_j)^2, anchors a_j = k - j and row sums 1, the items' duals
and all squares cancel in a softmax over the places. With thresholds t_l between places l and l + 1, and T = eps / 2,

    P_ji = softmax_j(s_ji),  s_ji = sum_{l >= j} z_li,  z_li = (x_i - t_l) / T,

and t is determined by the sums over the items: 1 for each of the k places (that of the rest, n - k, follows; for k = n
there is no such place, and only k - 1 thresholds). Up to a number per item, which the softmax cancels,

    s_ji = sum_{l >= j} min(z_li, 0) - sum_{l < j} max(z_li, 0):

these are terms of one sign, summed outwards from the item's own place, so no digits are lost however far the other
places are.

Solve. The dual is convex in g_j = -sum_{l >= j} t_l / T, with gradient P 1 - 1 and Hessian diag(P 1) - P P^T. Start
halfway between neighbours in the sorted row, which is right for eps -> 0. If this is far off, take one step of
Sinkhorn's method, which is right for eps -> infinity. Continue with Newton's method. This takes 2 to 15 evaluations of
P, where Sinkhorn's method alone needs hundreds. A Newton step that crosses the minimum along its own direction is
shortened until it does not.

Layout: x (..., n), T (...), t (..., places - 1), P (..., places, n), unit last stride, all in float64.
"""

import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad

from .reference import places

FAR = 1e6  # clips z for the derivatives: exp(-FAR) is 0, and so is 0 * FAR
FAR_OFF = 1.0  # error of a column's sum above which the first step is Sinkhorn's
OVERSHOOT = 0.1  # largest slope after a step, relative to the slope before it


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


def rounding_of_sums(plan: Tensor) -> float:
    """The usual rounding error of the plan's sums, with a margin."""
    return 8 * plan.shape[-2] * torch.finfo(plan.dtype).eps


def solve_dual(plan: Tensor, right: Tensor) -> Tensor:
    """The h (..., places - 1) with Hessian * h = ``right``, the last g fixed; differentiable.

    The diagonal is increased by the size of rounding errors, so that a vanishing Hessian, as for small eps, stays
    positive. The derivatives that it then multiplies vanish with it.
    """
    inner = plan[..., :-1, :]
    diagonal = inner.sum(-1) * (1 + rounding_of_sums(plan))
    hessian = torch.diag_embed(diagonal) - inner @ inner.mT
    factor, _ = torch.linalg.cholesky_ex(hessian)
    return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)


def check_contents(x: Tensor, epsilon: Tensor) -> None:
    """Raises a ValueError for rows of x (rows, n) that are not finite, or an epsilon (rows,) out of range."""
    finite, positive = x.isfinite().all(-1), (epsilon > 0) & (epsilon < torch.inf)
    if not bool(finite.all()):
        raise ValueError(f"`x` must be finite, but row {int((~finite).nonzero()[0])} of the flattened batch is not")
    if not bool(positive.all()):
        row = int((~positive).nonzero()[0])
        raise ValueError(
            f"`epsilon` must be positive and finite, but got {epsilon[row].item():g} (row {row} of the batch)"
        )


def warn_of_errors(number: int, rows: int, error: float, max_iter: int, tol: float) -> None:
    """Warns that Newton's method has not converged."""
    warnings.warn(
        f"sorted_transport_topk: sums of {number} of {rows} rows were off by up to {error:.1e} before "
        f"the last of max_iter={max_iter} steps, more than tol={tol:g}",
        RuntimeWarning,
        stacklevel=2,
    )


def sorted_transport_thresholds(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int) -> Tensor:
    """The thresholds (..., places - 1) of the plan; not differentiable (the map is).

    Args:
        x: Finite scores (..., n), float64.
        half: Half of epsilon, positive (...), float64.
        k: Number of sorted places, ``1 <= k <= n``.
        tol: Largest deviation of a sum over the items from 1 at which to stop.
        max_iter: Number of steps after which to give up, with a warning.
    """
    n, size = x.shape[-1], places(k, x.shape[-1])
    top = x.topk(size, -1).values
    t = top[..., :-1] / 2 + top[..., 1:] / 2
    if t.numel() == 0:
        return t
    step, error = torch.zeros_like(t), torch.full_like(half, torch.inf)
    descent, done = error, torch.zeros_like(half, dtype=torch.bool)
    for i in range(max_iter):
        plan = scores_and_plan(x, half, t)[1]
        sums, last = plan.sum(-1), error
        residual = 1 - sums[..., :-1]
        error = residual.abs().amax(-1)
        if i == 0:  # rounding of the sums, and of the thresholds themselves
            rounding = 4 * rounding_of_sums(plan) * (1 + t.abs().amax(-1) / half)
        move = solve_dual(plan, residual)
        close = move.abs().amax(-1) <= (tol / 2) ** 0.5  # a small Newton step h leaves an error below 2 max(h)^2
        there = (error <= tol) | ((error <= rounding) & (error >= 0.5 * last))
        if i == 0:
            sinkhorn = (sums[..., -1:] / (n - size + 1) / sums[..., :-1]).log()
            move = torch.where((error > FAR_OFF).unsqueeze(-1), sinkhorn, move)
        # Before the last step, the slope of the dual along it was -descent. If it is clearly positive now, the step is
        # shortened to where the slope would vanish if it were linear.
        slope = -(residual * step).sum(-1)
        too_far = (slope > OVERSHOOT * descent) & ~close
        share = torch.where(too_far, (descent / (descent + slope)).clamp(0.1, 0.7), 1.0)
        descent = torch.where(too_far, share * descent, (residual * move).sum(-1))
        shortened = share.unsqueeze(-1) * step
        move = torch.where(too_far.unsqueeze(-1), shortened - step, move)
        step = torch.where(too_far.unsqueeze(-1), shortened, move)
        stays = (done | there).unsqueeze(-1)
        t = torch.where(stays, t, t + half.unsqueeze(-1) * pad(move, (0, 1)).diff(dim=-1))
        done = done | there | close
        if bool(done.all()):
            return t
    warn_of_errors(int((~done).sum()), done.numel(), error[~done].max().item(), max_iter, tol)
    return t
