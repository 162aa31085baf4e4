r"""The root behind every relaxed top-k mask: t with sum_i F((x_i - t) / s) = k, row by row.

Residual. Split the row at t itself and let u_i be the short tail, F(z_i) below and 1 - F(z_i) above. With
m = #{x_i > t},

    R(t) = sum_{z_i <= 0} u_i - sum_{z_i > 0} u_i + (m - k),

where m - k is exact: sum F - k would lose every digit where all entries are nearly 0 or 1 and k is an integer.

Step. Write R = A - B with A = P + (m - k)_+, B = Q + (k - m)_+, P and Q the tail sums below and above. Newton's method
on log(A / B) = 2 atanh(R / (A + B)) is exact in one step both where all entries share one exponential tail and inside a
gap of many scales around t, the two places where Newton on R itself fails; near the root it is Newton on R. Its
derivative is estimated from W = -s dR/dt as W / (P + Q) * (P / A + Q / B), which is exact in the tails and at the root.
A compact link takes a step of its own. A bracket guards either, see :mod:`khot.kernels.guarded_newton`.

Layout: x (rows, n), unit last stride; k, scale, t (rows,) in float64. Elementwise arithmetic in float32 or float64. t
carries more digits than a float32 x: z = (x - t_high) - t_low with t_high the float32 nearest to t.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import use_triton
from .guarded_newton import MAX_STEPS, RESOLUTION, Evaluation, guarded_newton
from .links import LOGISTIC, Link, TailSums
from .operator import operator

FIRST_STEPS = 5  # steps on all rows before those that are left get some by themselves
FEW_ITEMS = 2**16  # so few take a step together in less time than it takes to tell those that need it from the others
GAP_STEPS = 6  # Newton on log-tails: one step for exponential tails, quadratic convergence for others
DISTANCES = (2**-20, 2**-10)  # in scales: how far from a kink a threshold is put that zeros and ones leave free
NEAR = 2**-18  # what tells an entry almost at its cap from others, in float32 too
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


def standardise_into(out: Tensor, x: Tensor, threshold: Tensor, scale: Tensor) -> Tensor:
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
    slope = link.slope_(standardise_into(torch.empty_like(rows), rows, threshold.reshape(-1), scale.reshape(-1)))
    total = slope.sum(-1)
    if link.compact and link.reaches_zero:
        total.clamp_(min=torch.finfo(x.dtype).tiny)  # no slope at all gives zeros
    elif bool((total < torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps).any()):
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
    k, scale = (_in_rows_of(x, v) for v in (k, scale))
    return capped_simplex_threshold(x.detach(), k.detach(), scale.detach(), link.key, "scale", False)


def _in_rows_of(x: Tensor, value: Tensor | float) -> Tensor:
    """A float64 tensor of the batch shape; a number is filled in on the device, which need not wait for a copy."""
    if isinstance(value, Tensor):
        return value.to(x.device, torch.float64).expand(x.shape[:-1])
    return torch.full((), value, dtype=torch.float64, device=x.device).expand(x.shape[:-1])


@operator("capped_simplex_threshold")
def capped_simplex_threshold(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> Tensor:
    """:func:`solve_threshold` for k and scale of the batch shape, as an operator that compiled graphs keep whole.

    With ``check``, bad contents raise a ValueError in which the scale goes by the name ``softness``.
    """
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        if check and bool((k != 0).any()):  # n = 0, or no rows
            raise ValueError(f"`k` must be 0 for an empty ground set, but got k={k.max().item():g}")
        return torch.zeros_like(k, memory_format=torch.contiguous_format)
    found = Link.find(link)
    if use_triton(x, found):
        return launch_checked(x, k, scale, found, False, softness, check, with_y=False)[1]
    rows = x.to(compute_dtype(x)).reshape(-1, n)
    k, scale = k.reshape(-1), scale.reshape(-1)
    span = row_range(rows)
    if check:
        check_contents(rows, k, scale, softness, span)
    return solve_rows(rows, k, scale, found, span).reshape(batch)


def launch_checked(
    x: Tensor, k: Tensor, scale: Tensor, link: Link, log: bool, softness: str, check: bool, with_y: bool = True
) -> tuple[Tensor, Tensor]:
    """y or log y, if wanted, and the thresholds, from the Triton kernel; arguments as of the operators."""
    from .capped_simplex_triton import launch_forward

    check = check and not (x.is_cuda and torch.cuda.is_current_stream_capturing())  # a graph cannot look
    y, threshold, sound = launch_forward(x, k, scale, str(link.kernel), link.q, log, with_y, check)
    if sound is not None and not bool(sound.all()):
        rows = x.to(compute_dtype(x)).reshape(-1, x.shape[-1])
        k, scale = (v.to(x.device).reshape(-1) for v in (k, scale))
        check_contents(rows, k, scale, softness, row_range(rows))
    return y, threshold


@capped_simplex_threshold.register_fake
def _(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> Tensor:
    return torch.empty_like(k, memory_format=torch.contiguous_format)


@capped_simplex_threshold.register_vmap
def _(info, in_dims, x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool):  # type: ignore[no-untyped-def]
    x, k, scale = move_batch_first(info.batch_size, in_dims, (x, k, scale))
    return capped_simplex_threshold(x, k, scale, link, softness, False), 0


def move_batch_first(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """For vmap rules: the batch as the first axis of every tensor, expanded where it has none."""
    return [v.expand(size, *v.shape) if d is None else v.movedim(d, 0) for d, v in zip(in_dims, tensors, strict=False)]


def check_contents(x: Tensor, k: Tensor, scale: Tensor, softness: str, span: "Span") -> None:
    """ValueError for rows with a NaN, or a k or scale out of range; the scale goes by the name ``softness``."""
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


def solve_rows(x: Tensor, k: Tensor, scale: Tensor, link: Link, span: "Span") -> Tensor:
    """The thresholds of contiguous rows whose contents are in order."""
    lowest, highest = span.lowest, span.highest
    fraction = ((k - span.selected) / span.finite.clamp(min=1)).clamp(0, 1)
    # F(z) averages to `fraction` when all items are equal, so the root lies within one offset of the extreme items.
    offset = scale * link.inverse(fraction.clamp(1e-300, 1 - 2.0**-53))
    low, high = lowest - offset, highest - offset
    start = torch.maximum(torch.minimum(_first_guess(x, fraction, scale, offset, link), high), low)
    none, everything = fraction == 0, fraction == 1
    t = torch.where(none, highest + link.reach * scale, torch.where(everything, lowest - link.reach * scale, start))
    trivial = none | everything
    rows = _Rows(x, k, scale, link)
    if x.is_cuda:  # no host synchronisation to tell the easy rows
        return _search(rows, t, low, high, trivial)[0]
    if link.compact:
        t, low, high, done = _search(rows, t, low, high, trivial, FIRST_STEPS)
    else:
        t, done = _newton(rows, t, trivial)
    if not bool(done.all()):
        hard = (~done).nonzero().squeeze(-1)
        again = torch.where((t >= low) & (t <= high), t, start)
        t[hard] = _search(rows.take(hard), again[hard], low[hard], high[hard], trivial[hard])[0]
    return t


class _Rows(NamedTuple):
    """Rows to solve: x (rows, n), k and scale (rows,), and their link."""

    x: Tensor
    k: Tensor
    scale: Tensor
    link: Link

    def take(self, rows: Tensor) -> "_Rows":
        return _Rows(self.x[rows], self.k[rows], self.scale[rows], self.link)

    def sums(self, t: Tensor, buffer: Tensor) -> tuple[TailSums, Tensor]:
        """The sums at t in float64, and m - k."""
        sums = self.link.tail_sums(standardise_into(buffer, self.x, t, self.scale))
        sums = TailSums(*(v.double() for v in sums))
        return sums, sums.above - self.k

    def underflow(self, sums: TailSums, excess: Tensor) -> Tensor:
        """Where t lies in a gap that all tails cross with underflow, so that any t there is a root to the eye."""
        limits = torch.finfo(self.x.dtype)
        return (excess == 0) & (sums.total < limits.tiny / limits.eps)

    def at_kink(self, sums: TailSums, excess: Tensor) -> Tensor:
        """Where a compact link's root seems to consist of zeros and ones, with t at the end of its free interval."""
        leaving = (excess == 0) & (sums.total > 0)
        # All z = 1 shows in F' = condition * F, and in what is missing from k.
        reaching = self.link.condition * sums.total >= (1 - NEAR) * sums.slope
        reaching &= (excess < 0) & ((sums.signed + excess).abs() <= NEAR * sums.total)
        return (leaving | reaching) & (excess == excess.round())

    def judge(self, t: Tensor, sums: TailSums, excess: Tensor) -> Evaluation:
        """For :func:`guarded_newton`."""
        step, residual = self.link.newton_step(sums, excess) * self.scale, sums.signed + excess
        if self.link.compact:  # its kinks make the residual the measure, not the step
            rounding = (1 + self.link.condition) * torch.finfo(self.x.dtype).eps
            found = residual.abs() <= rounding * (sums.total + excess.abs())
            return step, residual, found | ((step.abs() <= RESOLUTION * t.abs()) & (sums.slope > 0))
        gap = self.underflow(sums, excess)
        return step.masked_fill(gap, torch.nan), residual, gap | (residual == 0)

    def tolerance(self) -> Tensor | float:
        """The last step: where convergence is quadratic on the link's scale, it leaves an error of about eps."""
        return 0.0 if self.link.compact else self.scale * (0.5 * torch.finfo(self.x.dtype).eps ** 0.5)


def _newton(rows: _Rows, t: Tensor, trivial: Tensor, steps: int = FIRST_STEPS) -> tuple[Tensor, Tensor]:
    """A few unguarded steps, enough for almost all rows; returns the thresholds and which rows are done."""
    buffer, tolerance, fixed = torch.empty_like(rows.x), rows.tolerance(), t
    done = trivial
    for remaining in reversed(range(steps)):
        step = rows.link.newton_step(*rows.sums(t, buffer)) * rows.scale
        t = t + step
        done = trivial | (step.abs() <= tolerance)
        left = len(done) - int(done.sum())
        if remaining and 0 < 2 * left <= len(done) and buffer.numel() > FEW_ITEMS:  # the others have no more work
            rest = (~done).nonzero().squeeze(-1)
            t[rest], done[rest] = _newton(rows.take(rest), t[rest], done[rest], remaining)
            break
        if not left:
            break
    return torch.where(trivial, fixed, t), done


def _search(
    rows: _Rows, t: Tensor, low: Tensor, high: Tensor, done: Tensor, max_steps: int = MAX_STEPS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Newton guarded by the bracket ``[low, high]``, on all rows that are not ``done``; see :func:`guarded_newton`."""
    buffer, skip = torch.empty_like(rows.x), done
    latest: tuple[TailSums, Tensor] | None = None

    def evaluate(t: Tensor) -> Evaluation:
        nonlocal latest
        latest = rows.sums(t, buffer)
        return rows.judge(t, *latest)

    bracket, residuals = (low, high), (rows.x.shape[-1] - rows.k, -rows.k)
    t, low, high, done = guarded_newton(evaluate, t, bracket, residuals, done, rows.tolerance(), max_steps=max_steps)
    if latest is None:  # nothing to do
        return t, low, high, done
    if rows.link.compact and not rows.link.reaches_zero:
        return t, low, high, done
    if rows.link.compact:
        special, settle = done & ~skip & rows.at_kink(*latest), _leave_kink
    else:
        special, settle = ~skip & rows.underflow(*rows.sums(t, buffer)), _balance_gap
    if t.is_cuda:
        t = torch.where(special, settle(rows, t), t)
    elif bool(special.any()):
        t[special] = settle(rows.take(special), t[special])
    return t, low, high, done


def _leave_kink(rows: _Rows, t: Tensor) -> Tensor:
    """Away from where the last entry reaches 0 or 1, if it shall stay there, so that rounding cannot bring it back."""
    buffer = torch.empty_like(rows.x)
    sums, excess = rows.sums(t, buffer)
    direction, best = torch.where(sums.signed + excess > 0, 1.0, -1.0) * rows.scale, t
    for distance in DISTANCES:
        beyond = t + distance * direction
        sums, excess = rows.sums(beyond, buffer)
        best = torch.where(sums.signed + excess == 0, beyond, best)
    return best


def _balance_gap(rows: _Rows, t: Tensor) -> Tensor:
    """The root where k items lie above ``t`` and all tails underflow: they balance, seen up to a common factor."""
    x, _, scale, link = rows
    above = x > t[:, None]
    left = torch.where(above, -torch.inf, x).amax(-1).double()
    right = torch.where(above, x, torch.inf).amin(-1).double()
    t, z = 0.5 * (left + right), torch.empty_like(x)
    for _ in range(GAP_STEPS):
        _, signed, total, slope = link.scaled_tail_sums(standardise_into(z, x, t, scale))
        t = t + scale * (torch.atanh(signed / total) * total / slope).nan_to_num(0.0, 0.0, 0.0)
        t = torch.maximum(torch.minimum(t, right), left)
    return t


class Span(NamedTuple):
    """Of each row: smallest and largest finite entry, number of finite and of +inf entries, whether there is a NaN."""

    lowest: Tensor
    highest: Tensor
    finite: Tensor
    selected: Tensor
    nan: Tensor


def row_range(x: Tensor) -> Span:
    """The :class:`Span` of each row of x (rows, n)."""
    lowest, highest = x.amin(-1).double(), x.amax(-1).double()
    nan = highest.isnan()
    n = torch.full_like(highest, x.shape[-1])
    if not x.is_cuda and bool((highest - lowest).isfinite().all()):
        return Span(lowest, highest, n, torch.zeros_like(n), nan)
    finite, selected = x.isfinite(), (x == torch.inf).sum(-1)
    lowest = torch.where(finite, x, torch.inf).amin(-1).double()
    highest = torch.where(finite, x, -torch.inf).amax(-1).double()
    count = finite.sum(-1)
    return Span(
        lowest.masked_fill(count == 0, 0), highest.masked_fill(count == 0, 0), count.double(), selected.double(), nan
    )


def _first_guess(x: Tensor, fraction: Tensor, scale: Tensor, offset: Tensor, link: Link) -> Tensor:
    """A start: the root of a sample of a long row; of a short one, what its mean and variance say."""
    n = x.shape[-1]
    if n >= 4 * SAMPLE_SIZE:
        sample = x[:, :: n // SAMPLE_SIZE].contiguous()
        span = row_range(sample)
        return solve_rows(sample, span.selected + fraction * span.finite, scale, link, span)
    centre = x.mean(-1).double()
    variance = (torch.linalg.vector_norm(x, dim=-1).double().square() / n - centre.square()).clamp(min=0)
    mean, own = link.moments[0] * scale, link.moments[1] * scale.square()
    # -t is the quantile of scale * (noise of law F) - x: of F's own shape if x is constant, about normal if x is wide.
    share = variance / (variance + own)
    quantile = torch.lerp((offset - mean) / own.sqrt(), torch.special.ndtri(fraction), share)
    return (centre - mean - quantile * (variance + own).sqrt()).nan_to_num(0.0)
