r"""The root behind every relaxed top-k mask: t with sum_i F((x_i - t) / s) = k, row by row.

Residual. Split the row at t itself and let u_i be the short tail, F(z_i) below and 1 - F(z_i) above. With
m = #{x_i > t},

    R(t) = sum_{z_i <= 0} u_i - sum_{z_i > 0} u_i + (m - k),

where m - k is exact: sum F - k would lose every digit where all entries are nearly 0 or 1 and k is an integer.

Step. Write R = A - B with A = P + (m - k)_+, B = Q + (k - m)_+, P and Q the tail sums below and above. Newton's method
on log(A / B) = 2 atanh(R / (A + B)) is exact in one step both where all entries share one exponential tail and inside a
gap of many scales around t, the two places where Newton on R itself fails; near the root it is Newton on R. Its
derivative is estimated from W = -s dR/dt as W / (P + Q) * (P / A + Q / B), which is exact in the tails and at the root.
A bracket guards it: a step that leaves the bracket, or does not halve the step before last, becomes a bisection.

Layout: x (rows, n), unit last stride; k, scale, t (rows,) in float64. Elementwise arithmetic in float32 or float64. t
carries more digits than a float32 x: z = (x - t_high) - t_low with t_high the float32 nearest to t.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .links import LOGISTIC, Link, TailSums

MAX_STEPS = (
    100  # bisection alone needs log2(range / (scale * tolerance)) steps; Newton makes it 3 to 6 on ordinary rows
)
NEWTON_STEPS = 5  # unguarded steps before the rows that are left get a bracket
GAP_STEPS = 6  # Newton on log-tails: one step for exponential tails, quadratic convergence for others
STEPS_PER_SYNC = 8  # how often an accelerator's host looks whether all rows are done
SAMPLE_SIZE = 1024  # rows of more than four times this many items start from the root of a sample of about this size


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 and float32 for every other floating dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def standardise(x: Tensor, threshold: Tensor, scale: Tensor) -> Tensor:
    """z = (x - t) / scale in x's dtype, for float64 t and scale of shape (...); differentiable to any order."""
    if x.dtype == threshold.dtype:
        return (x - threshold.unsqueeze(-1)) / scale.unsqueeze(-1)
    high = threshold.detach().to(x.dtype)
    low = (threshold - high).to(x.dtype)
    return (x - high.unsqueeze(-1) - low.unsqueeze(-1)) / scale.to(x.dtype).unsqueeze(-1)


def _standardise_into(out: Tensor, x: Tensor, threshold: Tensor, scale: Tensor) -> Tensor:
    """:func:`standardise` without a fresh buffer, which on a CPU costs more than the arithmetic."""
    high = threshold.to(x.dtype)
    torch.sub(x, high[:, None], out=out)
    if x.dtype != threshold.dtype:
        out.sub_((threshold - high).to(x.dtype)[:, None])
    return out.mul_(scale.reciprocal().to(x.dtype)[:, None])


def mask_gradient(
    x: Tensor, scale: Tensor, threshold: Tensor, grad_y: Tensor, link: Link
) -> tuple[Tensor, Tensor] | None:
    """dL/dx and dL/dk of y = F((x - t) / s), sum y = k, from dL/dy = ``grad_y``, in few passes and fresh buffers.

    With w_i = F'(z_i): dL/dk = <g, w> / sum w and dL/dx_i = w_i (g_i - dL/dk) / s. None if the slopes of a row
    underflow, where only their ratios make sense.
    """
    n = x.shape[-1]
    rows, grad = x.reshape(-1, n), grad_y.reshape(-1, n)
    slope = link.slope_(_standardise_into(torch.empty_like(rows), rows, threshold.reshape(-1), scale.reshape(-1)))
    total = slope.sum(-1)
    if bool((total < torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps).any()):
        return None
    grad_k = (grad * slope).sum(-1) / total  # not vecdot, which autocast would round
    slope.mul_(scale.reshape(-1, 1).reciprocal().to(x.dtype))
    grad_x = (grad - grad_k[:, None]).mul_(slope)
    return grad_x.reshape(x.shape), grad_k.reshape(x.shape[:-1])


def solve_threshold(x: Tensor, k: Tensor | float, scale: Tensor | float = 1.0, link: Link = LOGISTIC) -> Tensor:
    """The t with ``sum(F((x - t) / scale)) = k`` along the last axis; not differentiable (the maps are).

    Args:
        x: Scores (..., n); ``-inf`` excludes an item, ``+inf`` selects it.
        k: Sum, between the numbers of ``+inf`` and of entries above ``-inf``; broadcasts to (...). At either limit,
            where every far enough t will do, the result lies ``link.reach`` scales beyond the scores.
        scale: Positive; broadcasts to (...).
        link: The link function F.

    Returns:
        float64 tensor (...).
    """
    k, scale = (torch.as_tensor(v, dtype=torch.float64, device=x.device).expand(x.shape[:-1]) for v in (k, scale))
    return torch.ops.khot.capped_simplex_threshold(x.detach(), k.detach(), scale.detach(), link.key, "scale", False)


@torch.library.custom_op("khot::capped_simplex_threshold", mutates_args=())
def _threshold(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> Tensor:
    """:func:`solve_threshold` for k and scale of the batch shape, as an operator that compiled graphs keep whole.

    With ``check``, bad contents raise a ValueError in which the scale goes by the name ``softness``.
    """
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        if check and bool((k != 0).any()):  # n = 0, or no rows
            raise ValueError(f"`k` must be 0 for an empty ground set, but got k={k.max().item():g}")
        return torch.zeros_like(k, memory_format=torch.contiguous_format)
    rows = x.to(compute_dtype(x)).reshape(-1, n)
    k, scale = k.reshape(-1), scale.reshape(-1)
    span = _row_range(rows)
    if check:
        _check_contents(rows, k, scale, softness, span)
    return _solve_rows(rows, k, scale, Link.find(link), span).reshape(batch)


@_threshold.register_fake
def _(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> Tensor:
    return torch.empty_like(k, memory_format=torch.contiguous_format)


@_threshold.register_vmap
def _(info, in_dims, x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool):  # type: ignore[no-untyped-def]
    x, k, scale = move_batch_first(info.batch_size, in_dims, (x, k, scale))
    return _threshold(x, k, scale, link, softness, False), 0


def move_batch_first(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """For vmap rules: the batch as the first axis of every tensor, expanded where it has none."""
    return [v.expand(size, *v.shape) if d is None else v.movedim(d, 0) for d, v in zip(in_dims, tensors, strict=False)]


def _check_contents(x: Tensor, k: Tensor, scale: Tensor, softness: str, span: "_Span") -> None:
    n = x.shape[-1]
    feasible = (k >= span.selected) & (k <= span.selected + span.finite)
    positive = (scale > 0) & (scale < torch.inf)
    real = ~span.nan
    if bool((feasible & positive & real).all()):
        return
    row = int((~(feasible & positive & real)).nonzero()[0])
    if not real[row]:
        raise ValueError(f"`x` must not contain NaN, but row {row} of the flattened batch does")
    if not positive[row]:
        raise ValueError(
            f"`{softness}` must be positive and finite, but got {scale[row].item():g} (row {row} of the batch)"
        )
    limits = f"0 <= k <= n, but got k={k[row].item():g} with n={n}"
    if 0 <= k[row] <= n:
        selected, masked = int((x[row] == torch.inf).sum()), int((x[row] == -torch.inf).sum())
        limits = (
            f"lie between the number of +inf entries, {selected}, and of entries above -inf, {n - masked}, "
            f"but got k={k[row].item():g} with n={n}"
        )
        raise ValueError(f"`k` must {limits} (row {row} of the batch)")
    raise ValueError(f"`k` must satisfy {limits} (row {row} of the batch)")


def _solve_rows(x: Tensor, k: Tensor, scale: Tensor, link: Link, span: "_Span") -> Tensor:
    lowest, highest = span.lowest, span.highest
    fraction = ((k - span.selected) / span.finite.clamp(min=1)).clamp(0, 1)
    # F(z) averages to `fraction` when all items are equal, so the root lies within one offset of the extreme items.
    offset = scale * link.inverse(fraction.clamp(1e-300, 1 - 2.0**-53))
    low, high = lowest - offset, highest - offset
    start = torch.maximum(torch.minimum(_first_guess(x, fraction, scale, offset, link), high), low)
    none, everything = fraction == 0, fraction == 1
    t = torch.where(none, highest + link.reach * scale, torch.where(everything, lowest - link.reach * scale, start))
    trivial = none | everything
    if x.is_cuda:  # no host synchronisation to tell the easy rows
        return _search(x, t, low, high, trivial, k, scale, link)
    t, done = _newton(x, t, trivial, k, scale, link)
    if not bool(done.all()):
        hard = (~done).nonzero().squeeze(-1)
        start = torch.where((t >= low) & (t <= high), t, start)
        rest = (v[hard] for v in (start, low, high, trivial, k, scale))
        t[hard] = _search(x[hard], *rest, link)
    return t


def _tolerance(x: Tensor, scale: Tensor) -> Tensor:
    """The step after which to stop: quadratic convergence on the link's scale leaves an error of about eps."""
    return scale * (0.5 * torch.finfo(x.dtype).eps ** 0.5)


def _newton_step(sums: TailSums, k: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The step of the module's docstring, the residual and m - k; NaN or infinite where the bracket has to decide."""
    signed, total, slope = sums.signed.double(), sums.total.double(), sums.slope.double()
    excess = sums.above - k
    residual, size = signed + excess, total + excess.abs()
    ratio = residual / size
    step = torch.atanh(ratio) * (1 - ratio * ratio) / (1 - ratio * signed / total)
    return step * size / slope * scale, residual, excess


def _newton(x: Tensor, t: Tensor, trivial: Tensor, k: Tensor, scale: Tensor, link: Link) -> tuple[Tensor, Tensor]:
    """A few unguarded steps, enough for almost all rows; returns the thresholds and which rows are done."""
    z, tolerance, fixed = torch.empty_like(x), _tolerance(x, scale), t
    done = trivial
    for _ in range(NEWTON_STEPS):
        step = _newton_step(link.tail_sums(_standardise_into(z, x, t, scale)), k, scale)[0]
        t = t + step
        done = trivial | (step.abs() <= tolerance)
        if bool(done.all()):
            break
    return torch.where(trivial, fixed, t), done


def _search(
    x: Tensor, t: Tensor, low: Tensor, high: Tensor, done: Tensor, k: Tensor, scale: Tensor, link: Link
) -> Tensor:
    """Newton guarded by the bracket ``[low, high]``, on all rows that are not ``done``."""
    z, tolerance = torch.empty_like(x), _tolerance(x, scale)
    r_low, r_high = x.shape[-1] - k, -k
    last = older = high - low
    gap = torch.zeros_like(done)
    for i in range(MAX_STEPS):
        if (not x.is_cuda or i % STEPS_PER_SYNC == 0) and bool(done.all()):
            break
        sums = link.tail_sums(_standardise_into(z, x, t, scale))
        newton, residual, excess = _newton_step(sums, k, scale)
        low, r_low = torch.where(residual > 0, t, low), torch.where(residual > 0, residual, r_low)
        high, r_high = torch.where(residual < 0, t, high), torch.where(residual < 0, residual, r_high)
        # Between items many scales apart the sum is a staircase: its secant across the bracket gets near, bisection
        # guarantees.
        share = (r_low / (r_low - r_high)).clamp(0.02, 0.98) if i % 2 == 0 else 0.5
        proposal = t + newton
        # A step below the resolution of t is no progress, unless it is the last.
        progress = (proposal != t) | (newton.abs() <= tolerance)
        trusted = progress & (proposal >= low) & (proposal <= high) & (newton.abs() <= 0.5 * older)
        proposal = torch.where(trusted, proposal, low + share * (high - low))
        step = (proposal - t).abs()

        gap |= ~done & (excess == 0) & (sums.total < torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps)
        stay = done | gap | (residual == 0)
        t = torch.where(stay, t, proposal)
        done = stay | (step <= tolerance + 4e-16 * proposal.abs())
        older, last = last, step
    if link.compact:
        return t
    if x.is_cuda:
        return torch.where(gap, _balance_gap(x, t, scale, link), t)
    rows = gap.nonzero().squeeze(-1)
    return t.index_copy(0, rows, _balance_gap(x[rows], t[rows], scale[rows], link)) if len(rows) else t


def _balance_gap(x: Tensor, t: Tensor, scale: Tensor, link: Link) -> Tensor:
    """The root where k items lie above ``t`` and all tails underflow: they balance, seen up to a common factor."""
    above = x > t[:, None]
    left = torch.where(above, -torch.inf, x).amax(-1).double()
    right = torch.where(above, x, torch.inf).amin(-1).double()
    t, z = 0.5 * (left + right), torch.empty_like(x)
    for _ in range(GAP_STEPS):
        _, signed, total, slope = link.scaled_tail_sums(_standardise_into(z, x, t, scale))
        t = t + scale * (torch.atanh(signed / total) * total / slope).nan_to_num(0.0, 0.0, 0.0)
        t = torch.maximum(torch.minimum(t, right), left)
    return t


class _Span(NamedTuple):
    """Of each row: smallest and largest finite entry, number of finite and of +inf entries, whether there is a NaN."""

    lowest: Tensor
    highest: Tensor
    finite: Tensor
    selected: Tensor
    nan: Tensor


def _row_range(x: Tensor) -> _Span:
    lowest, highest = x.amin(-1).double(), x.amax(-1).double()
    nan = highest.isnan()
    n = torch.full_like(highest, x.shape[-1])
    if not x.is_cuda and bool((highest - lowest).isfinite().all()):
        return _Span(lowest, highest, n, torch.zeros_like(n), nan)
    finite, selected = x.isfinite(), (x == torch.inf).sum(-1)
    lowest = torch.where(finite, x, torch.inf).amin(-1).double()
    highest = torch.where(finite, x, -torch.inf).amax(-1).double()
    count = finite.sum(-1)
    return _Span(
        lowest.masked_fill(count == 0, 0), highest.masked_fill(count == 0, 0), count.double(), selected.double(), nan
    )


def _first_guess(x: Tensor, fraction: Tensor, scale: Tensor, offset: Tensor, link: Link) -> Tensor:
    """A start: the root of a sample of a long row; of a short one, the exact root if its items were logistic."""
    n = x.shape[-1]
    if n >= 4 * SAMPLE_SIZE:
        sample = x[:, :: n // SAMPLE_SIZE].contiguous()
        span = _row_range(sample)
        return _solve_rows(sample, span.selected + fraction * span.finite, scale, link, span)
    mean = x.mean(-1).double()
    variance = (torch.linalg.vector_norm(x, dim=-1).double().square() / n - mean.square()).clamp(min=0)
    spread = (1 + variance / scale.square() * (3 / torch.pi**2)).sqrt()  # a standard logistic has variance pi^2 / 3
    return (mean - offset * spread).nan_to_num(0.0)
