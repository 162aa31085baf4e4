"""Units given their number of ones, with draws and derivatives, in numba.

Short rows have a table, see :mod:`.numba_table`; others are in :mod:`.numba_long`. Rows that are left to other code are
NaN, and their draws False.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpu.lanes import LANES
from ..cpu.loops import array_like, kernel, over_rows, per_row
from ..cpu.random_numbers import uniform_pair
from . import TABLE, TABLE_OF_DRAWS, numba_long
from .numba_table import bend, descend, empty_block, is_sound, lanes_of, row_of, tabulate, widest_of

BLOCK_TASKS, ROW_TASKS = 4, 16  # blocks or long rows that keep all threads busy; the draws of fewer are distributed
DRAWS_A_TASK = 64
NONE = np.empty(0)


class Law(NamedTuple):
    """The law of rows of units given their count."""

    tilt: Tensor  # (R,), t
    log_total: Tensor  # (R,), of the weights of all draws, which are those of bernoulli_count_log_prob
    complement: Tensor  # (R, n), the probabilities that units are zeros
    inclusion: Tensor  # (R, n), the probabilities that they are ones
    left: int  # the number of rows that are left to other code


def widest_count(n: int, low: Tensor, high: Tensor) -> int:
    """The largest count of the rarer value in any row."""
    return int(high.minimum(n - low).max())


def _blocks(rows: int, n: int, widest: int) -> tuple[int, int]:
    """The number of blocks of rows, and the items that they are worth."""
    blocks = -(-rows // LANES)
    return blocks, blocks * n * (16 + 4 * widest)


def _apart(
    by_table: Callable[..., Any], by_nodes: Callable[..., Any], results: Sequence[Tensor], *arguments: Tensor
) -> None:
    """Fills results for logits, ends of sizes and more of rows of which some have no table.

    What a row gets does not depend on the others. Ranges of sizes without a table are left to other code.
    """
    logits, low, high, *_ = arguments
    n = logits.shape[-1]
    has_table = n * high.minimum(n - low) <= TABLE
    for result in results:
        result.fill_(torch.nan)
    for at, function in ((has_table, by_table), (~has_table & (low == high), by_nodes)):
        if at.any():
            found = function(*(x[at] for x in arguments))
            for result, part in zip(results, [found] if isinstance(found, Tensor) else found, strict=True):
                result[at] = part


@kernel
def _law_blocks(begin, end, logits, low, high, none, tilt, log_total, complement, inclusion):
    (rows, n), left = logits.shape, 0
    block = empty_block(n, widest_of(low, high, n), False)
    for number in range(begin, end):
        tabulate(block, number, logits, low, high, none)
        descend(block, n)
        for lane in range(lanes_of(number, rows)):
            r, total = number * LANES + lane, block.total[lane]
            known = 1.0 if is_sound(total) else np.nan
            left += not is_sound(total)
            tilt[r], log_total[r] = known * block.shift[lane], known * math.log(total)
            for i in range(n):
                out, included = block.out[i * LANES + lane], block.included[i * LANES + lane]
                if block.sign[lane] < 0:
                    out, included = included, out
                size = known * (out + included)
                complement[r, i], inclusion[r, i] = out / size, included / size
    return left


def bernoulli_count(logits: Tensor, low: Tensor, high: Tensor, widest: int) -> Law:
    """The tilt, the law of the count and the inclusion probabilities.

    Args:
        logits: ``(R, n)`` float64.
        low: ``(R,)`` integers, the smallest possible count, 0 <= low <= high <= n.
        high: ``(R,)`` integers, the largest one.
        widest: The :func:`widest_count` of these.
    """
    rows, n = logits.shape
    results = logits.new_empty(rows), logits.new_empty(rows), torch.empty_like(logits), torch.empty_like(logits)
    if n * widest > TABLE:
        _apart(_law_by_table, numba_long.bernoulli_count, results, logits, low, high)
        return Law(*results, int(results[0].isnan().sum()))
    given = map(Tensor.numpy, (logits, low, high))
    left = over_rows(_law_blocks, *_blocks(rows, n, widest), *given, NONE, *map(Tensor.numpy, results))
    return Law(*results, left)


def _law_by_table(logits: Tensor, low: Tensor, high: Tensor) -> Sequence[Tensor]:
    return bernoulli_count(logits, low, high, widest_count(logits.shape[-1], low, high))[:-1]


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
    (rows, n), widest = logits.shape, widest_count(logits.shape[-1], low, high)
    result, given = torch.empty_like(logits), (logits, low, high, tilt, complement, inclusion, g)
    if n * widest > TABLE:
        _apart(bernoulli_count_derivative, numba_long.bernoulli_count_derivative, [result], *given)
        return result
    blocks, items = _blocks(rows, n, widest)
    over_rows(_derivative_blocks, blocks, 2 * items, *(x.contiguous().numpy() for x in (*given, result)))
    return result


@per_row
def _uniforms(seed, draw, number, names, n, even, odd):
    """Random numbers of the units of a block, those of even units and of odd ones."""
    for place in range((n + 1) // 2):
        for lane in range(even.shape[1]):
            even[place, lane], odd[place, lane] = uniform_pair(
                seed, draw, names[row_of(number, lane, names.shape[0])], place
            )


@per_row
def _draw_sizes(block, seed, draw, number, names, n, width, left):
    """Draws the sizes of what is counted."""
    for lane in range(LANES):
        least, most = block.low[lane], block.high[lane]
        left[lane] = most
        if least < most:
            even, odd = uniform_pair(seed, draw, names[row_of(number, lane, names.shape[0])], n // 2)
            share, before = (odd if n % 2 else even) * block.total[lane], 0.0
            for m in range(least, most):
                before += block.rest[m * LANES + lane] * block.table[(n * width + 1 + m) * LANES + lane]
                if share < before:
                    left[lane] = m
                    break


@per_row
def _draw_block(block, width, n, even, odd, left, drawn):
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
def _draw_tasks(begin, end, parts, none, logits, low, high, names, seed, out):
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
            _uniforms(seed[0], draw, number, names, n, places[0], places[1])
            _draw_sizes(block, seed[0], draw, number, names, n, width, left)
            _draw_block(block, width, n, places[0], places[1], left, drawn)
            for lane in range(lanes_of(number, rows)):
                for i in range(n):
                    out[draw, number * LANES + lane, i] = drawn[i, lane] and is_sound(block.total[lane])
    return 0


def bernoulli_count_draw(
    logits: Tensor, low: Tensor, high: Tensor, seed: Tensor, draws: int, dtype: torch.dtype
) -> Tensor:
    """The draws of each row have their own random numbers. Rows that have no law get no ones."""
    *batch, n = logits.shape
    rows = logits.reshape(-1, n).contiguous(), low.reshape(-1).contiguous(), high.reshape(-1).contiguous()
    out = logits.new_empty((draws, len(rows[1]), n), dtype=torch.bool)
    names = torch.arange(len(rows[1]), device=logits.device)
    left = (rows[1] < rows[2]) | (n * rows[2].minimum(n - rows[1]) <= TABLE_OF_DRAWS)
    ways: Sequence[tuple[Callable[..., Any], Tensor]] = ((_draw_by_halves, ~left), (_draw_by_table, left))
    for draw, some in ways:
        if some.all():
            left[:] = draw(*rows, names, seed, out)
        elif some.any():
            part = out.new_empty((draws, int(some.sum()), n))
            lost = draw(*(x[some] for x in (*rows, names)), seed, part)
            out[:, some], left[some] = part, lost
    return out.view(draws, *batch, n).to(dtype)


def _parts(tasks: int, enough: int, draws: int) -> int:
    """The number of parts into which the draws of a row or block are split; each part computes the table again."""
    return 1 if tasks >= enough else max(1, min(2 * enough, draws // DRAWS_A_TASK))


def _draw_by_table(logits: Tensor, low: Tensor, high: Tensor, names: Tensor, seed: Tensor, out: Tensor) -> bool:
    """Writes draws with the random numbers of rows of these numbers; leaves no row."""
    _, rows, n = out.shape
    blocks, items = _blocks(rows, n, widest_count(n, low, high))
    parts = _parts(blocks, BLOCK_TASKS, len(out))
    arguments = map(Tensor.numpy, map(Tensor.contiguous, (logits, low, high, names, seed, out)))
    over_rows(_draw_tasks, blocks * parts, items * parts + 16 * out.numel(), parts, NONE, *arguments)
    return False


def _draw_by_halves(logits: Tensor, k: Tensor, _: Tensor, names: Tensor, seed: Tensor, out: Tensor) -> Tensor:
    """The same; returns the rows that it leaves to the table."""
    return numba_long.draw(logits, k, names, seed, _parts(len(k), ROW_TASKS, len(out)), out)


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
        excess = 0.0  # how far the size exceeds the one for which a tilt has no weight
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
    rows = map(Tensor.numpy, (logits, low, high, tilt, log_total))
    over_rows(_log_prob_tasks, result.numel(), value.numel(), *rows, array_like(value.contiguous()), result.numpy())
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
    others = map(Tensor.numpy, map(Tensor.contiguous, (g, complement, inclusion, result)))
    over_rows(_log_prob_derivative_rows, len(result), value.numel(), array_like(value.contiguous()), *others)
    return result
