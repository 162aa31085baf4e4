"""Units given their number of ones, with draws and derivatives, in numba.

Short rows have a table, see :mod:`.numba_table`; others are in :mod:`.numba_long`. Rows that are left to other code are
NaN, and their draws False.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..cpu.lanes import LANES
from ..cpu.loops import kernel, over_rows, per_row
from ..cpu.random_numbers import uniform_pair
from . import TABLE, numba_long, reference
from .numba_table import bend, descend, empty_block, is_sound, lanes_of, row_of, tabulate, widest_of

BLOCK_TASKS = 4  # blocks that keep all threads busy; with fewer of them their draws are distributed
DRAWS_A_TASK = 64
NONE = np.empty(0)


def _has_table(n: int, low: Tensor, high: Tensor) -> bool:
    return n * _widest(n, low, high) <= TABLE


def _widest(n: int, low: Tensor, high: Tensor) -> int:
    return min(int(high.max()), n - int(low.min()))


def _blocks(n: int, low: Tensor, high: Tensor) -> tuple[int, int]:
    """The number of blocks of rows with these sizes, and the items that they are worth."""
    blocks = -(-len(low) // LANES)
    return blocks, blocks * n * (16 + 4 * _widest(n, low, high))


@kernel
def _law_blocks(begin, end, logits, low, high, none, tilt, log_total, complement, inclusion):
    rows, n = logits.shape
    block = empty_block(n, widest_of(low, high, n), False)
    for number in range(begin, end):
        tabulate(block, number, logits, low, high, none)
        descend(block, n)
        for lane in range(lanes_of(number, rows)):
            r, total = number * LANES + lane, block.total[lane]
            known = 1.0 if is_sound(total) else np.nan
            tilt[r], log_total[r] = known * block.shift[lane], known * math.log(total)
            for i in range(n):
                out, included = block.out[i * LANES + lane], block.included[i * LANES + lane]
                if block.sign[lane] < 0:
                    out, included = included, out
                size = known * (out + included)
                complement[r, i], inclusion[r, i] = out / size, included / size
    return 0


def bernoulli_count(logits: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tilt, the law of the count and the inclusion probabilities.

    Args:
        logits: ``(R, n)`` float64.
        low: ``(R,)`` integers, the smallest possible count, 0 <= low <= high <= n.
        high: ``(R,)`` integers, the largest one.

    Returns:
        Tilts t ``(R,)``; ``(R,)`` of the logarithm of the total weight of all draws, where a draw has the weight
        :func:`bernoulli_count_log_prob`; the probabilities ``(R, n)`` that units are zeros, and that they are ones.
    """
    if not _has_table(logits.shape[-1], low, high):
        return numba_long.bernoulli_count(logits, high)
    rows = len(logits)
    results = logits.new_empty(rows), logits.new_empty(rows), torch.empty_like(logits), torch.empty_like(logits)
    given = (x.numpy() for x in (logits, low, high))
    over_rows(_law_blocks, *_blocks(logits.shape[-1], low, high), *given, NONE, *(x.numpy() for x in results))
    return results


@per_row
def _place_cotangents(block, number, complement, inclusion, g):
    """Places the cotangents of a block, without a mean in rows of one size, in which it does not matter."""
    rows, n = g.shape
    for lane in range(LANES):
        r, is_flipped = row_of(number, lane, rows), block.sign[lane] < 0
        total = spread = 0.0
        for i in range(n):
            variance = complement[r, i] * inclusion[r, i]
            total += variance * g[r, i]
            spread += variance
        mean = total / spread if spread > 0 and block.low[lane] == block.high[lane] else 0.0
        for i in range(n):
            block.z[i * LANES + lane] = g[r, i] - mean
            block.out[i * LANES + lane] = inclusion[r, i] if is_flipped else complement[r, i]
            block.included[i * LANES + lane] = complement[r, i] if is_flipped else inclusion[r, i]


@kernel
def _derivative_blocks(begin, end, logits, low, high, tilt, complement, inclusion, g, result):
    rows, n = logits.shape
    block = empty_block(n, widest_of(low, high, n), True)
    for number in range(begin, end):
        tabulate(block, number, logits, low, high, tilt)
        _place_cotangents(block, number, complement, inclusion, g)
        bend(block, n)
        for lane in range(lanes_of(number, rows)):
            known = 1.0 if is_sound(block.total[lane]) else np.nan
            for i in range(n):
                result[number * LANES + lane, i] = known * block.z[i * LANES + lane]
    return 0


def bernoulli_count_derivative(
    logits: Tensor, low: Tensor, high: Tensor, tilt: Tensor, complement: Tensor, inclusion: Tensor, g: Tensor
) -> Tensor:
    """The derivative of ``<g, inclusion>`` with respect to the logits."""
    if not _has_table(logits.shape[-1], low, high):
        return numba_long.bernoulli_count_derivative(logits, high, tilt, g)
    result = torch.empty_like(logits)
    arguments = (x.contiguous().numpy() for x in (logits, low, high, tilt, complement, inclusion, g, result))
    blocks, items = _blocks(logits.shape[-1], low, high)
    over_rows(_derivative_blocks, blocks, 2 * items, *arguments)
    return result


@per_row
def _uniforms(seed, draw, number, rows, n, even, odd):
    """Random numbers of the units of a block, those of even units and of odd ones."""
    for place in range((n + 1) // 2):
        for lane in range(even.shape[1]):
            even[place, lane], odd[place, lane] = uniform_pair(seed, draw, row_of(number, lane, rows), place)


@per_row
def _draw_sizes(block, seed, draw, number, rows, n, width, left):
    """Draws the sizes of what is counted."""
    for lane in range(LANES):
        least, most = block.low[lane], block.high[lane]
        left[lane] = most
        if least < most:
            even, odd = uniform_pair(seed, draw, row_of(number, lane, rows), n // 2)
            share, before = (odd if n % 2 else even) * block.total[lane], 0.0
            for m in range(least, most):
                before += block.rest[m * LANES + lane] * block.table[(n * width + 1 + m) * LANES + lane]
                if share < before:
                    left[lane] = m
                    break


@per_row
def _draw_block(block, width, n, even, odd, left, rows, drawn):
    """Draws the units of a block from the last one to the first, given how many are left to count."""
    for i in range(n - 1, -1, -1):
        for lane in range(LANES):
            at_count = (i * width + 1 + left[lane]) * LANES + lane
            zero = block.zero[i * LANES + lane] * block.table[at_count]
            one = block.one[i * LANES + lane] * block.table[at_count - LANES]
            is_flipped = block.sign[lane] < 0
            u = odd[i // 2, lane] if i % 2 else even[i // 2, lane]
            is_one = u * (zero + one) < (zero if is_flipped else one)
            drawn[i, lane] = is_one
            left[lane] -= is_one != is_flipped


@kernel
def _draw_tasks(begin, end, parts, logits, low, high, none, seed, out, is_lost):
    draws, rows, n = out.shape
    block = empty_block(n, widest_of(low, high, n), False)
    places, left, drawn = np.empty((2, n // 2 + 1, LANES)), np.empty(LANES, np.int64), np.empty((n, LANES), np.bool_)
    for task in range(begin, end):
        number, part = task // parts, task % parts
        tabulate(block, number, logits, low, high, none)
        width = 3
        for lane in range(LANES):
            width = max(width, block.high[lane] + 3)
        for draw in range(draws * part // parts, draws * (part + 1) // parts):
            _uniforms(seed[0], draw, number, rows, n, places[0], places[1])
            _draw_sizes(block, seed[0], draw, number, rows, n, width, left)
            _draw_block(block, width, n, places[0], places[1], left, rows, drawn)
            for lane in range(lanes_of(number, rows)):
                for i in range(n):
                    out[draw, number * LANES + lane, i] = drawn[i, lane]
        for lane in range(lanes_of(number, rows)):
            is_lost[number * LANES + lane] = not is_sound(block.total[lane])
    return 0


def bernoulli_count_draw(
    logits: Tensor, low: Tensor, high: Tensor, seed: Tensor, draws: int, dtype: torch.dtype
) -> Tensor:
    *batch, n = logits.shape
    logits, low, high = logits.reshape(-1, n).contiguous(), low.reshape(-1).contiguous(), high.reshape(-1).contiguous()
    out = logits.new_empty((draws, len(logits), n), dtype=torch.bool)
    if _has_table(n, low, high):
        _draw_blocks(logits, low, high, seed, out)
    elif torch.equal(low, high):
        numba_long.draw(logits, high, seed, out)
    else:
        out = reference.bernoulli_count_draw(logits, low, high, seed, draws, torch.bool)
    return out.view(draws, *batch, n).to(dtype)


def _draw_blocks(logits: Tensor, low: Tensor, high: Tensor, seed: Tensor, out: Tensor) -> None:
    draws, rows, n = out.shape
    blocks, items = _blocks(n, low, high)
    parts = 1 if blocks >= BLOCK_TASKS else max(1, min(2 * BLOCK_TASKS, draws // DRAWS_A_TASK))
    lost = out.new_empty(rows)
    arguments = *(x.numpy() for x in (logits, low, high)), NONE, seed.contiguous().numpy(), out.numpy(), lost.numpy()
    over_rows(_draw_tasks, blocks * parts, items * parts + 16 * out.numel(), parts, *arguments)
    if lost.any():
        out[:, lost] = reference.draw(logits, low, high, seed, draws, lost)


@per_row
def _miss(theta, tilt, value):
    """Sum of ``|z|`` over the units whose value is not the likelier one; 0 times inf is 0."""
    total = 0.0
    for i in range(theta.shape[0]):
        z = theta[i] - tilt if abs(theta[i]) < np.inf else theta[i]
        miss = 1.0 - value[i] if z > 0 else np.float64(value[i])
        if miss != 0:
            total += miss * abs(z)
    return total


@kernel
def _log_prob_tasks(begin, end, theta, low, high, tilt, log_total, value, result):
    rows, n = theta.shape
    for task in range(begin, end):
        s, r = task // rows, task % rows
        excess = 0.0  # of the size over that for which a tilt has no weight
        if low[r] < high[r]:
            for i in range(n):
                excess += value[s, r, i]
            excess -= low[r] if tilt[r] < 0 else high[r]
        size = excess * tilt[r] if excess != 0 else 0.0
        result[s, r] = size - _miss(theta[r], tilt[r], value[s, r]) - log_total[r]
    return 0


def bernoulli_count_log_prob(
    logits: Tensor, low: Tensor, high: Tensor, tilt: Tensor, log_total: Tensor, value: Tensor
) -> Tensor:
    """``log P(x = value)`` of values ``(S, R, n)`` of possible sizes, linear in the value, ``(S, R)``."""
    result = logits.new_empty(value.shape[:-1])
    arguments = (x.contiguous().numpy() for x in (logits, low, high, tilt, log_total, value, result))
    over_rows(_log_prob_tasks, result.numel(), value.numel(), *arguments)
    return result


@kernel
def _log_prob_derivative_rows(begin, end, value, g, complement, inclusion, result):
    draws, _, n = value.shape
    for r in range(begin, end):
        result[r, :] = 0.0
        for s in range(draws):
            for i in range(n):
                x = np.float64(value[s, r, i])
                result[r, i] += g[s, r] * (x * complement[r, i] - (1.0 - x) * inclusion[r, i])
    return 0


def bernoulli_count_log_prob_derivative(value: Tensor, g: Tensor, complement: Tensor, inclusion: Tensor) -> Tensor:
    """The derivative of the log-probabilities ``(S, R)`` with respect to the logits ``(R, n)``, times g, summed."""
    result = torch.empty_like(inclusion)
    arguments = (x.contiguous().numpy() for x in (value, g, complement, inclusion, result))
    over_rows(_log_prob_derivative_rows, len(result), value.numel(), *arguments)
    return result
