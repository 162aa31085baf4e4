"""The trapezoidal rule for many integrals over the real line. Their ranges are found by trial.

The leading dimension is that of the points of the rule, and the others are those of the integrals. The range is a
constant to autograd, so the sum over the nodes is differentiable to any order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from khot._contents import is_dry_run
from khot._torch_internals import all_true, is_mapped

DEPTH = 32.0  # an integrand is cut off at e^-32 of its peak
EPS = 1e-15  # rounding of its logarithm
GRID = 10  # points of one trial
TRIALS = 600  # at most; each reduces the range at best to a quarter
STEP = 0.3  # longest step of the trapezoidal rule; its error is e^(-pi^2 / STEP), for poles and zeros at height pi / 2
RESOLUTION = 40.0  # nodes in a range that is as narrow as a normal density
MAX_NODES = 8192
MAPPED_NODES = 256  # inside a vmap, where numbers cannot be read, except whether this is enough


def _number_of_nodes(wanted: Tensor) -> int:
    """The largest number that some integral needs or, inside a vmap, one that is large enough; at most MAX_NODES."""
    if is_dry_run(wanted):
        return MAPPED_NODES
    if is_mapped(wanted):
        count = MAPPED_NODES
        while count < MAX_NODES and not all_true(wanted <= count):
            count *= 2
        return count
    return min(int(wanted.amax()), MAX_NODES) if wanted.numel() else 0


@torch.no_grad()
def integration_range(
    log_integrand: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, slab: int
) -> tuple[Tensor, Tensor]:
    """The range in which the logarithm of a unimodal integrand is within DEPTH of its peak, found on grids."""
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
            ends = low + half * (inner_low - low), inner_high + half * (high - inner_high)
            low, _, _, high = narrowed(torch.cat(ends))
            break
    return low, high


def trapezoidal(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights for integrands that are analytic up to a height of about pi / 2 and vanish at both ends."""
    width = high - low
    count = _number_of_nodes(torch.hypot(width / STEP, torch.full_like(width, RESOLUTION)).ceil())
    index = torch.arange(count + 1, dtype=low.dtype, device=low.device).view(-1, *[1] * low.ndim)
    return low + index * (width / count), (width / count).expand(count + 1, *width.shape)
