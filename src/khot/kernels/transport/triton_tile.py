"""What the solver and the derivative of sorted optimal transport share in Triton: tiles of the plan, the dual's step.

A tile is (PLACES, BLOCK), all places of BLOCK items, computed in registers from x and the thresholds. A pass over a row
gives sums over the items and the weights W = P P^T between places. Small numbers never come from subtraction: the
Hessian is the Laplacian of W, of which only the entries between different places are used. Its diagonal is their sum,
and elimination adds to them (the algorithm of Grassmann, Taksar and Heyman), so steps are accurate in all directions,
however small the weights of some of them are.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import triton
import triton.language as tl

from ..gpu.plans import PROGRAMS
from ..gpu.tools import add2, split_threshold

# Up to FEW rows, a program has 2 warps, or 4 for more than LONG items; otherwise one.
FEW, LONG = 2 * PROGRAMS, 256
FAR = tl.constexpr(1e6)  # as good as infinite for z
LARGEST_STEP = tl.constexpr(1e18)
NO_WEIGHT = tl.constexpr(1e-30)


class TransportPlan(NamedTuple):
    """How the kernels of sorted transport process a row.

    Attributes:
        places: Number of places of the plan.
        block_places: The same as a power of 2, at least 8.
        block: Items of a tile, one for each thread, which has its entries at all places: up to 16 in float32 or 8 in
            float64.
        warps: Warps of a program.
    """

    places: int
    block_places: int
    block: int
    warps: int


def transport_plan(rows: int, n: int, k: int) -> TransportPlan:
    """The :class:`TransportPlan` of so many rows of n."""
    places, warps = min(k + 1, n), 1 if rows > FEW else 2 if n <= LONG else 4
    return TransportPlan(places, max(8, 1 << (places - 1).bit_length()), 32 * warps, warps)


@triton.jit
def epsilon(DTYPE: tl.constexpr):
    if DTYPE == tl.float64:
        return 2.220446049250313e-16
    else:
        return 1.1920929e-07


@triton.jit
def rounding_error(t, scale, DTYPE: tl.constexpr, WORK: tl.constexpr):
    """The usual error of sums over the items and, in scales, of the thresholds themselves, with a margin."""
    digits = 2.0**-47 if DTYPE == tl.float32 else 2.0**-50
    return (32.0 * epsilon(WORK) + digits * (tl.max(tl.abs(t), 0) / scale)).to(tl.float32)


@triton.jit
def load_thresholds(t_ptr, places, PLACES: tl.constexpr, DTYPE: tl.constexpr):
    """The thresholds above the places; any for the first place, here the one below it; the lowest after the last."""
    place, lowest = tl.arange(0, PLACES), -1e308 if DTYPE == tl.float64 else -3e38
    return tl.load(t_ptr + tl.maximum(place - 1, 0), mask=place < places, other=lowest)


@triton.jit
def _add_pairs(high, low, more, more_low):
    """The sum of two numbers of twice the digits."""
    total = high + more
    part = total - high
    return total, low + more_low + ((high - (total - part)) + (more - part))


@triton.jit
def tile_scores(x, t, inv_scale, WORK: tl.constexpr):
    """s (PLACES, BLOCK) of items x (BLOCK,), up to a number for each item; the largest is about 0.

    It is the sum of -z over the thresholds ``t`` (PLACES,) above. There may be so many of them, and so far away, that
    only pairs of numbers keep the digits of the near ones.
    """
    if x.dtype == tl.float64:
        z = (x[None, :] - t[:, None]) * inv_scale
    else:
        high, low = split_threshold(t, tl.float32)
        z = ((x[None, :] - high[:, None]) - low[:, None]) * inv_scale
    z = tl.minimum(tl.maximum(z.to(WORK), -FAR), FAR)
    high, low = tl.associative_scan((-z, 0.0 * z), 0, _add_pairs)
    return (high - tl.max(high, 0)[None, :]) + low


@triton.jit
def add_weights(weights, plan, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    """Adds half of a tile's P P^T, up to a part that its transpose restores, to ``weights`` (warps, PLACES, PLACES).

    P is split into parts with as many bits as matrix units take, and the product of the smaller parts is left out. Each
    warp has its own 32 items.
    """
    plan = tl.permute(tl.reshape(plan.to(tl.float32), (PLACES, BLOCK // 32, 32)), (1, 0, 2))
    high = (plan.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # the bits of a TF32
    transposed = tl.permute(high, (0, 2, 1))
    weights = tl.dot(0.5 * high, transposed, weights)
    return tl.dot(plan - high, transposed, weights)


@triton.jit
def all_weights(weights):
    """W from the sums of :func:`add_weights`."""
    weights = tl.sum(weights, 0)
    return weights + tl.trans(weights)


@triton.jit
def solve_laplacian(weights, right, places, damping, PLACES: tl.constexpr):
    """The h (PLACES,), 0 at the last place, with Laplacian * h = ``right`` at the others.

    By Gauss-Jordan elimination: a finished part of h is a constant plus an average of the rest. ``damping`` connects
    every place to the last one by that share of its weight, so that noise does not separate places that nothing else
    connects.
    """
    place = tl.arange(0, PLACES)
    i, j, last = place[:, None], place[None, :], places - 1
    weights = tl.where((i != j) & (i <= last) & (j <= last), weights, 0.0)
    weights += tl.where(j == last, tl.sum(weights, 1)[:, None] * damping + NO_WEIGHT, 0.0)
    weights += tl.where((i == last) & (j < last), tl.sum(weights, 0)[None, :] * damping + NO_WEIGHT, 0.0)
    for a in range(0, last):
        row = tl.sum(tl.where(i == a, weights, 0.0), 0)
        column = tl.sum(tl.where(j == a, weights, 0.0), 1)
        degree, value = tl.reduce((tl.where(place > a, column, 0.0), tl.where(place == a, right, 0.0)), 0, add2)
        row, value = row / degree, value / degree
        weights = tl.where(i == a, row[None, :], weights + column[:, None] * row[None, :])
        right = tl.where(place == a, value, right + column * value)
    return tl.where(place < last, tl.minimum(tl.maximum(right, -LARGEST_STEP), LARGEST_STEP), 0.0)
