"""Draws of order sampling in Triton: the ranks of a row, and the k smallest of them, in one kernel.

The rank of unit i is e^noise e^-(theta_i - t), in float32, where t is about the logarithm of the k-th rank. Positive
floats are ordered like their bits, so the k-th rank is found by counting the keys up to an integer, for three integers
at a time near the position that the counts so far suggest. This takes a handful of counts for rows of any length, and
at most 32.

    registers   one program per draw of a row, which stays on chip: theta is read once, x written once
    tiles       longer rows; their ranks are stored in the memory of the result, and are read for every count

Layout: theta (rows, n), unit last stride; k, t (rows,) and x (draws, n), the rows of a sample one after another, are
contiguous.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import Table, plan
from ..gpu.random_numbers import random_words, uniform_and_rest
from ..gpu.tools import add3, arithmetic, load_tile, on_device, rows_of, split_threshold, store_tile, without_expansion

DRAW: Table = {torch.float32: ((512, 1), (1024, 4), (4096, 8), (8192, 16))}  # ranks, for positions of any dtype
REACH = tl.constexpr(40.0)  # bound of theta - t; e^40 times any noise fits into float32, and e^-40 is negligible
INFINITE = tl.constexpr(0x7F800000)  # bits of inf
LARGEST = tl.constexpr(0x7FFFFFFF)
ONE_OVER_E, ONE, E = tl.constexpr(0x3EBC5AB2), tl.constexpr(0x3F800000), tl.constexpr(0x402DF854)  # bits of these
DEVIATIONS = tl.constexpr(1.2)  # between the guesses


@triton.jit
def _odds(u, rest):
    return u / rest


@triton.jit
def _exponential(u, rest):
    """-log u, by its series where it is close to 0."""
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * (0.25 + rest * 0.2))))
    return tl.where(rest < 0.03125, series, -0.6931472 * tl.log2(u))


# The exponential of a noise from a uniform u and 1 - u, by the name of the noise.
NOISES = {"logistic": _odds, "log_exponential": _exponential}


@triton.jit
def _tile_keys(
    theta_ptr, start, n, high, low, seed, draw, row, NOISE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """The bits of a tile of ranks: 0 for included units, INFINITE for excluded ones and beyond the row."""
    theta = load_tile(theta_ptr, start, n, BLOCK, DTYPE)  # (BLOCK,)
    a, b, c, d = random_words(seed, draw, row, start // 2 + tl.arange(0, BLOCK // 2))
    u, rest = uniform_and_rest(tl.interleave(a, c), tl.interleave(b, d))
    centred = ((theta - high) - low).to(tl.float32)
    rank = NOISE(u, rest) * tl.exp(-tl.minimum(tl.maximum(centred, -REACH), REACH))
    key = tl.minimum(rank.to(tl.int32, bitcast=True) & LARGEST, INFINITE)  # NaN is excluded
    return tl.where(theta == float("inf"), 0, tl.where(theta == -float("inf"), INFINITE, key))


@triton.jit
def _load_keys(x_ptr, start, n, BLOCK: tl.constexpr):
    """The ranks stored in the memory of x, as keys."""
    cols = start + tl.arange(0, BLOCK)
    rank = tl.load(x_ptr + cols, mask=cols < n, other=float("inf")).to(tl.float32)
    return rank.to(tl.int32, bitcast=True)


@triton.jit
def _count(key, x_ptr, n, first, second, third, BLOCK: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """The numbers of keys up to each of three integers."""
    first, second, third = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
    if IN_REGISTERS:
        one, two, three = (key <= first).to(tl.int32), (key <= second).to(tl.int32), (key <= third).to(tl.int32)
    else:
        one, two, three = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for start in range(0, n, BLOCK):
            loaded = _load_keys(x_ptr, start, n, BLOCK)
            one += (loaded <= first).to(tl.int32)
            two += (loaded <= second).to(tl.int32)
            three += (loaded <= third).to(tl.int32)
    return tl.reduce((one, two, three), 0, add3)


@triton.jit
def _guess(low, width, share):
    """The integer at a share of the open interval from ``low``."""
    offset = (share * width.to(tl.float32)).to(tl.int64)
    return low + tl.minimum(tl.maximum(offset, 1), width - 1)


@triton.jit
def _find(key, x_ptr, n, k, BLOCK: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """The k smallest keys: all up to ``cut``, and the first ``ties`` of those equal to ``cut + 1``."""
    low = tl.full((), -1, tl.int64)
    high = tl.where(k > 0, LARGEST, -1).to(tl.int64)
    below, upto = tl.zeros((), tl.int32), tl.where(k > 0, n, 0)  # numbers of keys up to low and high
    first, second, third = low * 0 + ONE_OVER_E, low * 0 + ONE, low * 0 + E
    halving = tl.full((), 0, tl.int1)
    while (upto != k) & (high - low > 1):
        one, two, three = _count(key, x_ptr, n, first, second, third, BLOCK, IN_REGISTERS)
        before = high - low
        high = tl.where(one >= k, first, tl.where(two >= k, second, tl.where(three >= k, third, high)))
        upto = tl.where(one >= k, one, tl.where(two >= k, two, tl.where(three >= k, three, upto)))
        low = tl.where(three < k, third, tl.where(two < k, second, tl.where(one < k, first, low)))
        below = tl.where(three < k, three, tl.where(two < k, two, tl.where(one < k, one, below)))
        # If the ranks in between were uniform and independent, the wanted one would be about here. If they are not,
        # every second step still narrows the range at least by a factor of four.
        width, number = high - low, (upto - below).to(tl.float32)
        share = ((k - below).to(tl.float32) + 0.5) / (number + 1.0)
        spread = DEVIATIONS * tl.sqrt(tl.maximum(share * (1.0 - share), 0.0) / (number + 2.0))
        halving = (4 * width > before) & (~halving)
        share, spread = tl.where(halving, 0.5, share), tl.where(halving, 0.25, spread)
        first, second, third = (
            _guess(low, width, share - spread), _guess(low, width, share), _guess(low, width, share + spread),
        )  # fmt: skip
    return tl.where(upto == k, high, low).to(tl.int32), tl.where(upto == k, 0, k - below)


@triton.jit
def _chosen(key, cut, ties, seen):
    """Which entries of a tile are drawn, after ``seen`` ties in earlier tiles; and the new number of ties seen."""
    chosen = key <= cut
    if ties > seen:
        tied = (key == cut + 1).to(tl.int32)
        chosen = chosen | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= ties))
        seen += tl.sum(tied, 0)
    return chosen, seen


@triton.jit
def _order_draw(
    theta_ptr,
    x_ptr,
    t_ptr,
    seed_ptr,
    k_ptr,
    stride_theta,
    rows,
    batch,
    n,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    serial = tl.program_id(0)
    draw, number = serial // batch, serial % batch
    row = (serial % rows).to(tl.int64)
    k = tl.load(k_ptr + row).to(tl.int32)
    t = tl.load(t_ptr + row)
    high, low = split_threshold(tl.where(tl.abs(t) < float("inf"), t, 0.0), DTYPE)
    seed = tl.load(seed_ptr)
    theta_ptr += row * stride_theta
    x_ptr += serial.to(tl.int64) * n
    seen = tl.zeros((), tl.int32)
    if IN_REGISTERS:
        key = _tile_keys(theta_ptr, 0, n, high, low, seed, draw, number, NOISE, BLOCK, DTYPE)
        cut, ties = _find(key, x_ptr, n, k, BLOCK, True)
        chosen, _ = _chosen(key, cut, ties, seen)
        store_tile(x_ptr, chosen.to(tl.float32), 0, n, BLOCK)
    else:
        for start in range(0, n, BLOCK):
            key = _tile_keys(theta_ptr, start, n, high, low, seed, draw, number, NOISE, BLOCK, DTYPE)
            store_tile(x_ptr, key.to(tl.float32, bitcast=True), start, n, BLOCK)
        tl.debug_barrier()  # other threads will read what this one stored
        cut, ties = _find(0, x_ptr, n, k, BLOCK, False)
        tl.debug_barrier()  # no thread may overwrite what the others have yet to count
        for start in range(0, n, BLOCK):
            chosen, seen = _chosen(_load_keys(x_ptr, start, n, BLOCK), cut, ties, seen)
            store_tile(x_ptr, chosen.to(tl.float32), start, n, BLOCK)


def order_draw(
    theta: Tensor, k: Tensor, centre: Tensor, seed: Tensor, draws: int, dtype: torch.dtype, noise: str
) -> Tensor:
    shape, batch = (draws, *theta.shape), centre.numel()
    draws, (theta, centre, k) = without_expansion(draws, theta, centre, k)
    rows, t, sizes = rows_of(theta), centre.reshape(-1).contiguous(), k.reshape(-1).contiguous()
    count, n = rows.shape
    how = plan(count, n, torch.float32, DRAW)
    # In a dtype that can hold the ranks.
    room = dtype if how.resident or dtype in (torch.float32, torch.float64) else torch.float32
    x = torch.empty(draws * count, n, dtype=room, device=theta.device)
    with on_device(theta):
        _order_draw[(draws * count,)](
            rows, x, t, seed, sizes, rows.stride(0), count, batch, n, NOISE=NOISES[noise],
            BLOCK=how.block, IN_REGISTERS=how.resident, DTYPE=arithmetic(theta)[1], num_warps=how.warps,
        )  # fmt: skip
    return x.to(dtype).reshape(shape)
