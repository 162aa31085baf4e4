"""Rules for many integrals over the real line: the range is found by trial, then trapezoids or Gauss between kinks.

The leading dimension is that of the points of the rule, and the others are those of the integrals. The range is a
constant to autograd, so the sum over the nodes is differentiable to any order.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from khot._contents import is_dry_run
from khot._torch_internals import all_true, is_mapped

DEPTH = 32.0  # an integrand is cut off at e^-32 of its peak
EPS = 1e-15  # rounding of its logarithm
GRID = 10  # points of one trial
TRIALS = 600  # at most; each reduces the range at best to a quarter
STEP = 0.3  # of the trapezoidal rule, at most; its error is e^(-pi^2 / STEP), for poles and zeros at height pi / 2
RESOLUTION = 40.0  # nodes in a range that is as narrow as a normal density
MAX_NODES = 8192
MAPPED_NODES = 256  # inside a vmap, where numbers cannot be read, except whether this is enough
ROUNDING = 1e-9  # error of the ends of a range, relative to the range
MANY_KINKS = 30  # at least this many kinks cut a range into pieces that need fewer points
FINE, COARSE = (8, 12), (6, 40)  # points of Gauss' rule on a piece, and pieces in addition to those between kinks


def _largest(x: Tensor, limit: int, mapped: int) -> int:
    """An integer not below those in x, up to a limit: the largest or, inside a vmap, one that is large enough."""
    if is_dry_run(x):
        return mapped
    if is_mapped(x):
        while mapped < limit and not all_true(x <= mapped):
            mapped *= 2
        return min(mapped, limit)
    return min(max(int(x.amax()), 0), limit) if x.numel() else 0


@torch.no_grad()
def integration_range(
    log_integrand: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, slab: int, passes: int
) -> tuple[Tensor, Tensor]:
    """Where the logarithm of a unimodal integrand is within DEPTH of its peak, narrowed down on grids.

    At the end, each of ``passes`` refines the last interval at both ends.
    """
    fraction = torch.linspace(0, 1, GRID, dtype=low.dtype, device=low.device).view(-1, *[1] * low.ndim)
    index = torch.arange(GRID, device=low.device).view(fraction.shape)

    def narrowed(grid: Tensor) -> Tensor:
        value = torch.cat([log_integrand(s) for s in grid.split(slab)])
        peak = value.amax(0)
        inside = value >= peak - DEPTH - EPS * peak.abs()
        first, last = index.where(inside, GRID).amin(0), index.where(inside, -1).amax(0)
        return grid.gather(0, torch.stack((first - 1, first, last, last + 1)).clamp(0, GRID - 1))

    for _ in range(TRIALS if low.numel() else 0):
        width = high - low
        low, inner_low, inner_high, high = narrowed(low + fraction * width)
        if is_dry_run(low) or all_true(high - low >= width / 2):
            half = fraction[: GRID // 2] * (GRID - 1) / (GRID // 2 - 1)
            for _ in range(passes):
                ends = low + half * (inner_low - low), inner_high + half * (high - inner_high)
                low, inner_low, inner_high, high = narrowed(torch.cat(ends))
            break
    return low, high


def trapezoidal(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights for integrands that are analytic up to a height of about pi / 2 and vanish at both ends."""
    width = high - low
    count = _largest(torch.hypot(width / STEP, torch.full_like(width, RESOLUTION)).ceil(), MAX_NODES, MAPPED_NODES)
    index = torch.arange(count + 1, dtype=low.dtype, device=low.device).view(-1, *[1] * low.ndim)
    return low + index * (width / count), (width / count).expand(count + 1, *width.shape)


def gauss(kinks: Tensor, low: Tensor, high: Tensor, end: Tensor, points: int | None = None) -> tuple[Tensor, Tensor]:
    """Gauss' rule in e^s between the kinks; differentiable in the kinks if these are ends of pieces.

    With ``points`` between any two kinks, it is exact if the integrand with respect to ds is a polynomial of degree
    ``2 * points - 1`` in e^s, divided by e^s. Without, pieces between kinks are cut into smaller ones.
    """
    top = torch.where(end.detach() - high > ROUNDING * (high - low), high, end)
    ordered = kinks.sort(-1).values
    before = (ordered <= low[..., None]).sum(-1, keepdim=True)
    inside = (ordered < top[..., None]).sum(-1, keepdim=True) - before
    most = _largest(inside, kinks.shape[-1], kinks.shape[-1])
    if points is None:
        points, pieces = FINE if most < MANY_KINKS else COARSE
    else:
        pieces = 0
    index = torch.arange(most, device=low.device)
    cuts = ordered.expand(*low.shape, -1).gather(-1, (before + index).clamp(max=kinks.shape[-1] - 1))
    cuts = torch.where(index < inside, cuts, low[..., None])
    fraction = torch.linspace(0, 1, pieces + 1, dtype=low.dtype, device=low.device)[1:-1]
    low, top, scale = low[..., None], top[..., None], top.detach()[..., None]
    even_in_t = (torch.lerp((low - scale).exp(), torch.ones_like(low), fraction).log() + scale).maximum(low)
    cuts = torch.cat((cuts, low, even_in_t, torch.lerp(low, scale, fraction), top), -1).sort(-1).values
    nodes, weights = (torch.from_numpy(a).to(low) for a in np.polynomial.legendre.leggauss(points))
    half = -torch.expm1(-cuts.diff(dim=-1))[..., None] / 2
    t = 1 - half * (1 - nodes)  # relative to the end of the piece
    s = cuts[..., 1:, None] + t.log()
    return s.flatten(-2).movedim(-1, 0), (half * weights / t).flatten(-2).movedim(-1, 0)
