r"""The transport plan behind sorted SOFT top-k: n items to the places 0 (largest), ..., k - 1 and one for the rest.

Plan. In min <C, P> + eps sum P log P with C_ij = (x_i - a_j)^2, anchors a_j = k - j and row sums 1, the items' duals
and all squares cancel in a softmax over the places. With thresholds t_l between places l and l + 1, and T = eps / 2,

    P_ji = softmax_j(s_ji),  s_ji = sum_{l >= j} z_li,  z_li = (x_i - t_l) / T,

and t is fixed by the sums over the items: 1 for each of the k places (the rest, n - k, follows; for k = n there is no
place for the rest, and k - 1 thresholds). Up to a number per item, which the softmax forgets,

    s_ji = sum_{l >= j} min(z_li, 0) - sum_{l < j} max(z_li, 0):

terms of one sign, summed outwards from the item's own place, so that no digit is lost however far the other places are.

Solve. The dual is convex in g_j = -sum_{l >= j} t_l / T, with gradient P 1 - 1 and Hessian diag(P 1) - P P^T. Start
halfway between neighbours in the sorted row, which is right for eps -> 0; take one step of Sinkhorn's where that is far
off, which is right for eps -> infinity; go on with Newton's method, first in float32 and with s_ji = u_i (k - j) + g_j,
then, mostly twice, exactly. That is 2 to 15 evaluations of P where Sinkhorn's alone needs hundreds. A Newton step
across the minimum along its own direction is shortened until it is not.

Layout: x (..., n), T (...), t (..., places - 1), P (..., places, n), unit last stride, all in float64.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from .reference import places

CACHED = 2**17  # entries of P that a CPU works on at a time
FAR_OFF = 1.0  # error of a column's sum above which the first step is Sinkhorn's
OVERSHOOT = 0.1  # largest slope after a step, relative to the slope before it
ROUGH = 1e-2  # largest error of float32 for which the first phase is worth while
ROUGH_STEPS = 10  # rows that take more there start anew in the second phase


def _rounding(plan: Tensor) -> float:
    """The usual rounding error of the plan's sums, generously."""
    return 8 * plan.shape[-2] * torch.finfo(plan.dtype).eps


def solve_dual(plan: Tensor, right: Tensor) -> Tensor:
    """The h (..., places - 1) with Hessian * h = ``right``, the last g kept fixed; differentiable.

    The diagonal is raised by the size of rounding errors, so that a Hessian that vanishes, as it does for small eps,
    stays positive. It then multiplies derivatives that vanish with it.
    """
    inner = plan[..., :-1, :]
    diagonal = inner.sum(-1) * (1 + _rounding(plan))
    hessian = torch.diag_embed(diagonal) - inner @ inner.mT
    factor, _ = torch.linalg.cholesky_ex(hessian)
    return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)


def _chunks(x: Tensor, size: int) -> list[slice]:
    """Rows whose plans a CPU handles in its cache; an accelerator takes all at once."""
    rows = max(1, len(x) if x.is_cuda else CACHED // (size * x.shape[-1] + 1))
    return [slice(i, i + rows) for i in range(0, len(x), rows)]


def sorted_transport_plan(x: Tensor, t: Tensor, half: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The first ``rows`` rows of the plan in ``dtype``, in few passes and buffers; not differentiable."""
    batch, n, size = x.shape[:-1], x.shape[-1], t.shape[-1] + 1
    x, half = x.reshape(-1, n), half.reshape(-1)
    t = t.reshape(len(x), size - 1)
    result = x.new_empty(len(x), rows, n, dtype=dtype)
    for part in _chunks(x, size):
        plan = x.new_empty(len(x[part]), size, n)
        result[part] = _plan_into(plan, torch.empty_like(plan[:, 1:]), x[part], t[part], half[part])[:, :rows]
    return result.reshape(*batch, rows, n)


def sorted_transport_thresholds(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int) -> Tensor:
    """The thresholds (..., places - 1) of the plan; not differentiable (the map is).

    Args:
        x: Finite scores (..., n), float64.
        half: Half the epsilon, positive (...), float64.
        k: Number of sorted places, ``1 <= k <= n``.
        tol: Largest deviation of a sum over the items from 1 at which to stop.
        max_iter: Number of steps after which to give up, with a warning.
    """
    batch, n, size = x.shape[:-1], x.shape[-1], places(k, x.shape[-1])
    rows, half = x.reshape(-1, n), half.reshape(-1)
    t = x.new_empty(len(rows), size - 1)
    with torch.autocast(x.device.type, enabled=False):  # it would round the float32 phase
        for part in _chunks(rows, size):
            t[part] = _solve_rows(rows[part], half[part], size, tol, max_iter)
    return t.reshape(*batch, size - 1)


def check_contents(x: Tensor, epsilon: Tensor) -> None:
    """ValueError for rows of x (rows, n) that are not finite, or an epsilon (rows,) out of range."""
    finite, positive = x.isfinite().all(-1), (epsilon > 0) & (epsilon < torch.inf)
    if not bool(finite.all()):
        raise ValueError(f"`x` must be finite, but row {int((~finite).nonzero()[0])} of the flattened batch is not")
    if not bool(positive.all()):
        row = int((~positive).nonzero()[0])
        raise ValueError(
            f"`epsilon` must be positive and finite, but got {epsilon[row].item():g} (row {row} of the batch)"
        )


def _plan_into(plan: Tensor, z: Tensor, x: Tensor, t: Tensor, half: Tensor) -> Tensor:
    """The plan of x (rows, n) into the first rows of ``plan``, with ``z`` as a workspace."""
    plan, z = plan[: len(x)], z[: len(x)]
    torch.sub(x[:, None], t[:, :, None], out=z).div_(half[:, None, None])
    plan[:, 0] = 0
    torch.clamp(z, min=0, out=plan[:, 1:])
    torch.cumsum(plan, 1, out=plan)
    below = z.clamp_(max=0).flip(1)
    plan[:, :-1] -= torch.cumsum(below, 1, out=below).flip(1)
    return torch.softmax(plan.neg_(), 1, out=plan)


def _rough_plan_into(plan: Tensor, z: Tensor, u: Tensor, t: Tensor, half: Tensor) -> Tensor:
    """The plan of u in units of T, with fewer passes and digits."""
    plan = plan[: len(u)]
    anchors = torch.arange(t.shape[-1], -1, -1, dtype=u.dtype, device=u.device)
    g = -pad(t.flip(-1).cumsum(-1).flip(-1), (0, 1))
    torch.mul(u[:, None], anchors[:, None], out=plan).add_(g.to(u.dtype)[:, :, None])
    return torch.softmax(plan, 1, out=plan)


def _solve_rows(x: Tensor, half: Tensor, size: int, tol: float, max_iter: int) -> Tensor:
    """The thresholds of x (rows, n)."""
    top = x.topk(size, -1).values
    start = top[:, :-1] / 2 + top[:, 1:] / 2
    if len(x) == 0 or size == 1:
        return start
    t = _rough(x, half, start, top[:, size // 2])
    t, open_rows, error = _descend(x, half, t, _plan_into, tol, max_iter)
    if len(open_rows):
        warn_of_errors(len(open_rows), len(x), error, max_iter, tol)
    return t


def warn_of_errors(number: int, rows: int, error: float, max_iter: int, tol: float) -> None:
    """Says that Newton's method has not ended."""
    warnings.warn(
        f"sorted_transport_topk: sums of {number} of {rows} rows were off by up to {error:.1e} before "
        f"the last of max_iter={max_iter} steps, more than tol={tol:g}",
        RuntimeWarning,
        stacklevel=2,
    )


def _rough(x: Tensor, half: Tensor, start: Tensor, centre: Tensor) -> Tensor:
    """Thresholds that are right to about ROUGH; the ``start`` where float32 does not get there."""
    unit, centre = half[:, None], centre[:, None]
    t = (start - centre) / unit
    rows = (_rounding(t.float()) * t.abs().amax(-1) <= ROUGH).nonzero().squeeze(-1)
    if not len(rows):
        return start
    bound = torch.finfo(torch.float32).max ** 0.5
    u = ((x - centre) / unit)[rows].clamp(-bound, bound).float()
    t, failed, _ = _descend(u, torch.ones_like(half[rows]), t[rows], _rough_plan_into, 0.1 * ROUGH, ROUGH_STEPS)
    t = (centre[rows] + unit[rows] * t).index_copy(0, failed, start[rows[failed]])
    return start.index_copy(0, rows, t)


def _descend(
    x: Tensor, half: Tensor, t: Tensor, plan_into: Callable[..., Tensor], tol: float, max_iter: int
) -> tuple[Tensor, Tensor, float]:
    """Thresholds, the indices of rows that are not right to ``tol``, and their error; done rows take no more steps."""
    (rows, n), size = x.shape, t.shape[-1] + 1
    plan, workspace = x.new_empty(rows, size, n), x.new_empty(rows, size - 1, n)
    result, open_rows, step = t, torch.arange(rows, device=x.device), torch.zeros_like(t)
    descent, last = torch.full_like(half, torch.inf), torch.full_like(half, torch.inf)
    rounding = 4 * _rounding(plan) * (1 + t.abs().amax(-1) / half)  # of sums, and of the thresholds themselves
    for i in range(max_iter):
        current = plan_into(plan, workspace, x, t, half)
        sums = current.sum(-1).double()
        residual = 1 - sums[:, :-1]
        error = residual.abs().amax(-1)
        move = solve_dual(current, residual.to(x.dtype)).double()
        close = move.abs().amax(-1) <= (tol / 2) ** 0.5  # a small Newton step h leaves an error below 2 max(h)^2
        there = (error <= tol) | ((error <= rounding) & (error >= 0.5 * last))
        if i == 0:
            sinkhorn = (sums[:, -1:] / (n - size + 1) / sums[:, :-1]).log()
            move = torch.where((error > FAR_OFF)[:, None], sinkhorn, move)
        # The slope of the dual along the last step was -descent before it. Where it is clearly positive now, the step
        # is shortened to where the slope would vanish were it linear.
        slope = -(residual * step).sum(-1)
        too_far = (slope > OVERSHOOT * descent) & ~close
        new_step, new_descent = move, (residual * move).sum(-1)
        if bool(too_far.any()):
            share = (descent / (descent + slope)).clamp(0.1, 0.7)
            new_step = torch.where(too_far[:, None], share[:, None] * step, move)
            new_descent = torch.where(too_far, share * descent, new_descent)
            move = torch.where(too_far[:, None], new_step - step, move)
        moved = t + half[:, None] * pad(move, (0, 1)).diff(dim=-1)
        done = there | close
        if bool(done.any()):
            result = result.index_copy(0, open_rows, torch.where(there[:, None], t, moved))
            if bool(done.all()):
                return result, open_rows[:0], 0.0
            state = (x, half, moved, new_step, new_descent, error, rounding, open_rows)
            x, half, moved, new_step, new_descent, error, rounding, open_rows = (v[~done] for v in state)
        t, step, descent, last = moved, new_step, new_descent, error
    return result.index_copy(0, open_rows, t), open_rows, last.max().item()
