r"""The thresholds of the sorted transport plan, and the plan and its first derivative for any number of rows.

The dual is convex in g_j = -sum_{l >= j} t_l / T, with gradient P 1 - 1 and Hessian diag(P 1) - P P^T. Start halfway
between neighbours in the sorted row, which is right for eps -> 0. If this is far off, take one step of Sinkhorn's
method, which is right for eps -> infinity. Continue with Newton's method. This takes 2 to 15 evaluations of P, where
Sinkhorn's method alone needs hundreds. A Newton step that crosses the minimum along its own direction is shortened
until it does not.

Items far below all thresholds do not count: each place gets a share of about exp(z) of them. So the search is among
the largest items, and is repeated with all of them for rows whose thresholds end up near those that were left out.
"""

import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from .plan import (
    derivative,
    outward_sums,
    padded,
    places,
    rounding_of_sums,
    scores_and_plan,
    solve_dual,
    threshold_steps,
)

FAR_OFF = 1.0  # error of a column's sum above which the first step is Sinkhorn's
OVERSHOOT = 0.1  # largest slope after a step, relative to the slope before it
MOVE = 5.0  # units of T by which the last threshold may sink during the search before items were left out wrongly
SLAB = 2**17  # entries of plans that a CPU computes at a time, so that they stay in its caches


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


def _search(x: Tensor, half: Tensor, t: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Tensor]:
    """The thresholds, from a start t (places - 1, rows), and the errors (rows,) of those that are not found, else 0."""
    rest, outwards = x.shape[-1] - len(t), outward_sums(len(t) + 1, x)
    rounding = 4 * rounding_of_sums(len(t) + 1) * (1 + t.abs().amax(0) / half)  # in the sums and in the thresholds
    step = descent = error = torch.full_like(half, torch.inf)
    done, before = torch.zeros_like(half, dtype=torch.bool), t
    for i in range(max_iter):
        plan = scores_and_plan(x, half, t, outwards)[1]
        sums, last = plan.sum(-1), error
        residual = 1 - sums[:-1]
        error = residual.abs().amax(0)
        stalled = (error <= rounding) & (error >= 0.5 * last)
        t = torch.where(stalled & (error > last), before, t)  # the last step was noise
        done |= (error <= tol) | stalled
        if bool(done.all()):
            break
        move = solve_dual(plan, sums, residual)
        close = move.abs().amax(0) <= (tol / 2) ** 0.5  # a small Newton step h leaves an error below 2 max(h)^2
        if i == 0:
            step = move = torch.where(error > FAR_OFF, (sums[-1] / rest / sums[:-1]).log(), move)
            descent = (residual * move).sum(0)
        else:
            move, step, descent = _shortened(residual, move, step, descent, close)
        before, t = t, torch.where(done, t, t + half * threshold_steps(move))
        done |= close
    return t, error.masked_fill_(done, 0.0)


def _shortened(
    residual: Tensor, move: Tensor, step: Tensor, descent: Tensor, close: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The next move, the full step that it shortens, and the descent along it, for rows that are not ``close``.

    Before the last step, the slope of the dual along it was -descent. If it is clearly positive now, the step is
    shortened to where the slope would vanish if it were linear.
    """
    slope, ahead = -(residual * step).sum(0), (residual * move).sum(0)
    too_far = (slope > OVERSHOOT * descent) & ~close
    if not bool(too_far.any()):
        return move, move, ahead
    share = (descent / (descent + slope)).clamp(0.1, 0.7)
    back = torch.where(too_far, share, 1.0) * step
    return (
        torch.where(too_far, back - step, move),
        torch.where(too_far, back, move),
        torch.where(too_far, share * descent, ahead),
    )


def _thresholds(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int) -> tuple[Tensor, Tensor]:
    """The result of :func:`_search`, among the items that count."""
    n, size = x.shape[-1], places(k, x.shape[-1])
    top = x.topk(size, -1).values.mT
    start = top[:-1] / 2 + top[1:] / 2
    if size == 1 or not len(x):
        return start, torch.zeros_like(half)
    reach = math.log(n / tol) + 3  # units of T below the thresholds; all items beyond add less than the tolerance
    counts = x >= (top[-1] - (reach + MOVE) * half).unsqueeze(-1)
    count = max(size, int(counts.sum(-1).max()))
    if 4 * count > 3 * n:
        return _search(x, half, start, tol, max_iter)
    items = x.topk(count, -1).values
    t, error = _search(items, half, start, tol, max_iter)
    wrong = ~(items[:, -1] <= t.amin(0) - reach * half)
    if bool(wrong.any()):
        t[:, wrong], error[wrong] = _search(x[wrong], half[wrong], start[:, wrong], tol, max_iter)
    return t, error


def _slabs(x: Tensor, count: int) -> Iterator[slice]:
    """Parts of the rows x (rows, n) for plans of ``count`` places: on a CPU small ones, otherwise one."""
    rows = max(1, SLAB // (count * x.shape[-1])) if x.device.type == "cpu" else max(1, len(x))
    return (slice(first, first + rows) for first in range(0, len(x), rows))


def sorted_transport(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    """y (..., k, n) in the dtype of ``x (..., n)``, and the float64 thresholds.

    Args:
        x: Finite scores.
        half: Half of epsilon, float64 of the batch shape.
        k: Number of places, at least 1.
        tol: Error of a place's sum at which to stop.
        max_iter: Number of steps after which to stop with a warning.
        check: Whether bad contents raise a ValueError.
    """
    *batch, n = x.shape
    rows, halves, count = x.reshape(-1, n).double(), half.reshape(-1), places(k, n)
    if check:
        check_contents(rows, 2 * halves)
    y, t, error = x.new_empty(len(rows), k, n), halves.new_empty(len(rows), count - 1), torch.empty_like(halves)
    outwards = outward_sums(count, rows)
    for part in _slabs(rows, count):
        found, error[part] = _thresholds(rows[part], halves[part], k, tol, max_iter)
        y[part] = scores_and_plan(rows[part], halves[part], found, outwards)[1][:k].movedim(0, 1)
        t[part] = found.mT
    if bool((error != 0).any()):
        warnings.warn(
            f"sorted_transport_topk: sums of {int((error != 0).sum())} of {len(rows)} rows were off by up to "
            f"{error.max().item():.1e} before the last of max_iter={max_iter} steps, more than tol={tol:g}",
            RuntimeWarning,
            stacklevel=2,
        )
    return y.view(*batch, k, n), t.view(*batch, count - 1)


def sorted_transport_derivative(
    x: Tensor, half: Tensor, t: Tensor, grad_y: Tensor, with_half: bool
) -> tuple[Tensor, Tensor]:
    """dL/dx in x's dtype and dL/dhalf, zeros if it is not wanted, from dL/dy (..., k, n)."""
    (k, n), count = grad_y.shape[-2:], t.shape[-1] + 1
    rows, halves, grads = x.reshape(-1, n), half.reshape(-1), grad_y.reshape(-1, k, n)
    at = t.reshape(len(rows), count - 1)  # no thresholds for n = 1, so that -1 would be ambiguous
    grad_x, grad_half, outwards = rows.new_empty(rows.shape), torch.zeros_like(halves), outward_sums(count, t)
    for part in _slabs(rows, count):
        scores, plan = scores_and_plan(rows[part].double(), halves[part], at[part].mT, outwards)
        given = padded(grads[part], count)
        grad_x[part], of_half = derivative(plan, scores if with_half else None, halves[part], given, None)
        if of_half is not None:
            grad_half[part] = of_half
    return grad_x.view(x.shape), grad_half.view(half.shape)
