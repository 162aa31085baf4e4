"""Isotonic optimisation in plain torch, on any device, for any p, all rows at once."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from khot._validation import check_softness_contents

from ..exact.newton import guarded_newton

NOTICEABLE = 1e-9  # rise of an iterate of the dual ascent, relative to its largest entry
SWEEPS_PER_CHECK = 25  # sweeps of the dual ascent between two tests of the optimality conditions


@dataclass(frozen=True)
class Objective:
    """The sum of h_i over the items of each row; see :mod:`khot.kernels.isotonic`.

    Attributes:
        s, w: Targets and weights (rows, n).
        strength: lambda (rows, 1).
        p: Norm of the regulariser, in (1, 2].
        magnitude: Whether phi(v) is v^2 / 2 (then w >= 0), rather than v.
    """

    s: Tensor
    w: Tensor
    strength: Tensor
    p: float
    magnitude: bool

    def derivatives(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """h_i'(v_i) and h_i''(v_i), for p = 2 multiplied by lambda. Differentiable."""
        if self.p == 2:
            linear, constant = self.quadratic()
            return linear * v - constant, linear.expand_as(v)
        power = 1 / (self.p - 1)  # q - 1
        z = (self.s - v) / self.strength
        zero = z == 0
        size = z.abs().clamp(max=1e290 ** (1 / power)).masked_fill(zero, 1)  # no infinity for large q
        slope = size.pow(power - 1).masked_fill(zero, 0)
        pull = slope * torch.where(zero, z, size.copysign(z))
        if self.magnitude:
            return self.w * v - pull, self.w + power / self.strength * slope
        return self.w - pull, power / self.strength * slope

    def quadratic(self) -> tuple[Tensor, Tensor]:
        """The (u, d) with lambda h_i'(v) = u_i v - d_i, for p = 2."""
        if self.magnitude:
            return 1 + self.strength * self.w, self.s
        return torch.ones_like(self.s), self.s - self.strength * self.w

    def minimiser(self, tilt: Tensor | float = 0.0) -> Tensor:
        """The v_i that minimise h_i(v_i) + tilt_i v_i (for p = 2, lambda h_i)."""
        if self.p == 2:
            linear, constant = self.quadratic()
            return (constant - tilt) / linear
        tilt = self.w + tilt if not self.magnitude else torch.as_tensor(tilt, dtype=self.s.dtype, device=self.s.device)
        v = self.s - self.strength * tilt.sign() * tilt.abs().pow(self.p - 1)
        if not self.magnitude:
            return v

        def tilted(v: Tensor) -> tuple[Tensor, Tensor]:
            first, second = self.derivatives(v)
            return first + tilt, second

        other = torch.where(self.w == 0, v, 0)  # phi pulls towards 0
        return increasing_root(tilted, torch.minimum(v, other), torch.maximum(v, other))

    def items(self, which: slice) -> "Objective":
        """The objective of a slice of the items."""
        return replace(self, s=self.s[:, which], w=self.w[:, which])


def increasing_root(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor, size: Tensor | None = None
) -> Tensor:
    """Elementwise root in [low, high] of an increasing function, ``evaluate(t) -> (value, slope)``, by guarded Newton.

    ``size`` is the magnitude of the numbers whose rounding limits the resolution; by default that of the bracket's
    ends.
    """
    resolution = 4 * torch.finfo(low.dtype).eps * (torch.maximum(low.abs(), high.abs()) if size is None else size)

    def decreasing(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, slope = evaluate(t)
        step = -value / slope
        return step, -value, (value == 0) | (step.abs() <= resolution)

    residuals = torch.ones_like(low), -torch.ones_like(low)
    closed = high - low <= resolution
    return guarded_newton(decreasing, 0.5 * (low + high), (low, high), residuals, closed, resolution)[0]


def block_sums(x: Tensor, blocks: Tensor) -> Tensor:
    """For each item the sum of ``x`` over its block; differentiable."""
    return torch.zeros_like(x).scatter_add(-1, blocks, x).gather(-1, blocks)


def block_minimiser(objective: Objective, blocks: Tensor) -> Tensor:
    """The value of each block for which its h_i' sum to zero, repeated for each of its items."""
    if objective.p == 2:
        linear, constant = objective.quadratic()
        return block_sums(constant, blocks) / block_sums(linear, blocks)

    def evaluate(v: Tensor) -> tuple[Tensor, Tensor]:
        first, second = objective.derivatives(v)
        return block_sums(first, blocks), block_sums(second, blocks)

    alone = objective.minimiser()
    low, high = (
        torch.zeros_like(alone).scatter_reduce(-1, blocks, alone, kind, include_self=False).gather(-1, blocks)
        for kind in ("amin", "amax")
    )
    return increasing_root(evaluate, low, high)


def pool_by_halves(objective: Objective) -> Tensor:
    """The blocks of the solution, numbered from 0 along each row: int64 (rows, n)."""
    rows, n = objective.s.shape
    size = 1 << (n - 1).bit_length()
    v = objective.minimiser()
    if size > n:  # padding to the right of all others and below them, so that it stays out of all blocks
        s, w = (torch.nn.functional.pad(x, (0, size - n)) for x in (objective.s, objective.w))
        padded = replace(objective, s=s, w=w)
        v, objective = torch.cat([v, v.amin(-1, keepdim=True).expand(rows, size - n)], -1), padded
    joined = torch.zeros_like(v, dtype=torch.bool)  # with the previous item
    half = 1
    while half < n:
        shape = (rows * size // (2 * half), 2 * half)
        values, links = v.view(shape), joined.view(shape)
        meet = (values[:, half - 1] < values[:, half]).nonzero().squeeze(-1)
        if len(meet):
            s, w = objective.s.reshape(shape)[meet], objective.w.reshape(shape)[meet]
            part = replace(objective, s=s, w=w, strength=objective.strength[meet // (size // (2 * half))])
            old = values[meet]
            level = _bridge(part, old)
            begin = half - (old[:, :half] < level).sum(-1, keepdim=True)
            end = half + (old[:, half:] > level).sum(-1, keepdim=True)
            place = torch.arange(2 * half, device=v.device)
            values[meet] = torch.where((place >= begin) & (place < end), level, old)
            links[meet] |= (place > begin) & (place < end)
        half *= 2
    return (~joined[:, :n]).cumsum(-1) - 1


def _bridge(objective: Objective, v: Tensor) -> Tensor:
    """The root of G, given the solution ``v`` of both halves of each row: (rows, 1)."""
    half = v.shape[-1] // 2

    def evaluate(level: Tensor) -> tuple[Tensor, Tensor]:
        inside = torch.cat([v[:, :half] < level, v[:, half:] > level], -1)
        first, second = objective.derivatives(level.expand_as(v))
        return (first * inside).sum(-1, keepdim=True), (second * inside).sum(-1, keepdim=True)

    return increasing_root(evaluate, v[:, half - 1 : half], v[:, half : half + 1], v.abs().amax(-1, keepdim=True))


def dual_ascent(objective: Objective, max_iter: int) -> tuple[Tensor, Tensor]:
    """The solution and its blocks by at most ``max_iter`` sweeps over the odd and the even constraints."""
    rows, n = objective.s.shape
    multiplier = torch.zeros(rows, n + 1, dtype=objective.s.dtype, device=objective.s.device)  # [:, i]: v_i >= v_{i+1}
    for sweep in range(1, max_iter + 1):
        for first in (1, 2):
            _improve(objective, multiplier, first)
        if sweep % SWEEPS_PER_CHECK == 0 or sweep == max_iter:
            blocks = (multiplier[:, :-1] <= 0).cumsum(-1) - 1
            v = block_minimiser(objective, blocks)
            optimal = _is_optimal(objective, v)
            if bool(optimal.all()):
                return v, blocks
    v = torch.where(optimal, v, objective.minimiser(-multiplier.diff(dim=-1)))
    _warn_of_rises(v, max_iter)
    return v, blocks


def _warn_of_rises(v: Tensor, max_iter: int) -> None:
    """Warns by how much rows that dual ascent has not finished rise where they should not."""
    rise = v.diff(dim=-1, append=v[:, -1:]).amax(-1) / v.abs().amax(-1).clamp(min=torch.finfo(v.dtype).tiny)
    open_rows = int((rise > NOTICEABLE).sum())
    if open_rows:
        warnings.warn(
            f"dual ascent: {open_rows} of {len(v)} rows still rise by up to {rise.max().item():.1e} of their size "
            f"after the last of max_iter={max_iter} sweeps",
            RuntimeWarning,
            stacklevel=2,
        )


def _improve(objective: Objective, multiplier: Tensor, first: int) -> None:
    """Maximises the dual over every second multiplier, starting with number ``first``."""
    n = objective.s.shape[-1]
    pairs = (n + 1 - first) // 2
    if not pairs:
        return
    upper = objective.items(slice(first - 1, first - 1 + 2 * pairs, 2))
    lower = objective.items(slice(first, first + 2 * pairs, 2))
    before = multiplier[:, first - 1 : first - 1 + 2 * pairs : 2]
    after = multiplier[:, first + 1 : first + 1 + 2 * pairs : 2]
    if objective.p == 2:
        (u_upper, d_upper), (u_lower, d_lower) = upper.quadratic(), lower.quadratic()
        new = (u_upper * (d_lower + after) - u_lower * (d_upper - before)) / (u_upper + u_lower)
    else:
        high, low = lower.minimiser(-after), upper.minimiser(before)

        def evaluate(v: Tensor) -> tuple[Tensor, Tensor]:
            (f, f_slope), (g, g_slope) = upper.derivatives(v), lower.derivatives(v)
            return f + g + before - after, f_slope + g_slope

        level = increasing_root(evaluate, low, torch.maximum(low, high))
        new = (upper.derivatives(level)[0] + before).masked_fill(low >= high, 0)
    multiplier[:, first : first + 2 * pairs : 2] = new.clamp(min=0)


def _is_optimal(objective: Objective, v: Tensor) -> Tensor:
    """Whether v is in order and the multipliers that it implies are nonnegative, up to rounding; (rows, 1)."""
    first, _ = objective.derivatives(v)
    slack = 1e-12 * (first.abs().sum(-1, keepdim=True) + torch.finfo(v.dtype).tiny)
    return (v.diff(dim=-1) <= 0).all(-1, keepdim=True) & (first.cumsum(-1) >= -slack).all(-1, keepdim=True)


def check_contents(targets: Tensor, weights: Tensor, names: list[str], strength: Tensor, magnitude: bool) -> None:
    """Raises a ValueError with these names if targets or weights are not finite or out of range."""
    for name, value in zip(names, (targets, weights), strict=True):
        if not bool(value.isfinite().all()):
            raise ValueError(f"`{name}` must be finite, but contains {value[~value.isfinite()][0].item()}")
    check_softness_contents("strength", strength, targets.dtype)
    if magnitude and bool((weights < 0).any()):
        raise ValueError(f"`w` must not be negative for kind='magnitude', but contains {weights.min().item():g}")


def isotonic(
    s: Tensor, w: Tensor, strength: Tensor, p: float, magnitude: bool, dual: bool, max_iter: int, names: str
) -> tuple[Tensor, Tensor]:
    """The solution (float64) and its blocks (int64) along the last axis, for s and w (..., n), strength (...).

    Args:
        s: Targets.
        w: Weights of phi, nonnegative for magnitudes.
        strength: Positive.
        p: Norm of the regulariser, in (1, 2].
        magnitude: Whether phi(v) is v^2 / 2, rather than v.
        dual: Whether to find the solution by dual ascent.
        max_iter: Largest number of sweeps of it.
        names: Such as "s,w": bad contents raise a ValueError that calls s and w by these names. Empty for no check.
    """
    if s.numel() == 0:
        return torch.zeros_like(s, dtype=torch.float64), torch.zeros_like(s, dtype=torch.long)
    if names:
        check_contents(s, w, names.split(","), strength, magnitude)
    n = s.shape[-1]
    rows, weights = (v.double().reshape(-1, n).contiguous() for v in (s, w))  # views of halves follow
    objective = Objective(rows, weights, strength.double().reshape(-1, 1), p, magnitude)
    if dual:
        v, blocks = dual_ascent(objective, max_iter)
    else:
        blocks = pool_by_halves(objective)
        v = block_minimiser(objective, blocks)
    return v.reshape(s.shape), blocks.reshape(s.shape)
