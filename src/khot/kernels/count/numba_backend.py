"""Units given their count, with draws and derivatives, in numba, by recursions over the units of a row or by nodes."""

# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import inlined, kernel, over_rows, per_row
from ..cpu.random_numbers import uniform_pair
from ..cpu.rows import total_of
from ..links.logistic import LOGISTIC
from ..threshold import threshold
from .numba_recursion import ONE, U, chances, clip_rare, empty_table, plan, restore, tilted
from .numba_row import count_law, probabilities, times_covariance, workplace

TINY = np.finfo(np.float64).tiny  # as in small_numbers
ROW_TASKS = 16  # rows that keep all threads busy; with fewer rows their draws are distributed
DRAWS_A_TASK = 64
CLOSE_MEAN = 0.25  # largest distance of the expected number of ones from k; windows of a recursion need less than 1/2
SURE = 1e-3  # P(B = k) above which fates that are rarer than everything that is left out do not count
FAR = 200.0  # e^-100 is negligible compared with 1
LOGISTIC_MASK = *LOGISTIC.key, "mask", "temperature", False


def with_tilts(loop: Callable[[Tensor, Tensor, tuple[Any, Any], float], bool], logits: Tensor, k: Tensor) -> None:
    """Calls a loop with rows, their thresholds and how far the expected number of ones may be from k.

    The loop returns whether it has left rows. A tilt needs few digits: those of float32 logits are enough, except for
    rows of large numbers.
    """
    if loop(logits, k, _thresholds(logits.float(), k), CLOSE_MEAN):
        loop(logits, k, _thresholds(logits, k), np.inf)


def _thresholds(logits: Tensor, k: Tensor) -> tuple[Any, Any]:
    """Anchors and offsets of the logistic map."""
    k = k.double()
    solve = threshold.named("numba")
    anchor, offset = solve(logits, k, torch.ones_like(k), *LOGISTIC_MASK)
    return anchor.numpy(), offset.numpy()


@inlined
def _tilt_of(thresholds, r):
    """Anchor and offset of a row, without parts that are negligible compared with 1."""
    anchors, offsets = thresholds
    return anchors[r], min(max(-offsets[r], -FAR), FAR)


@per_row
def _is_tilted(p, k, close):
    return abs(total_of(p) - k) <= close


@kernel
def _solve_rows(from_row, to_row, theta, k, thresholds, close, tilts, log_count, complement, inclusion):
    n, left = theta.shape[1], 0
    p, q, work = np.empty(n), np.empty(n), workplace(n)
    for r in range(from_row, to_row):
        tilts[r, 0], tilts[r, 1] = _tilt_of(thresholds, r)
        log_count[r, 1] = chances(theta[r], tilts[r, 0], tilts[r, 1], p, q)
        if not _is_tilted(p, k[r], close):
            log_count[r, 0] = log_count[r, 1] = np.nan
            complement[r, :] = inclusion[r, :] = np.nan
            left += 1
            continue
        law = count_law(p, q, k[r], work)
        log_count[r, 0] = math.log(law.chance)
        probabilities(law, work, complement[r], inclusion[r])
    return left


def bernoulli_count(logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tilt, the law of the count and the inclusion probabilities.

    Args:
        logits: ``(R, n)`` float64.
        k: ``(R,)`` integers, 0 <= k <= n.

    Returns:
        Tilts ``(R, 2)``, anchor and offset, for which B = k is at least about as likely as one over the standard
        deviation of B; ``(R, 2)`` of log P(B = k) and the sum of ``log(1 + e^-|z|)``; the probabilities ``(R, n)`` that
        units are zeros, and that they are ones.
    """
    rows, n = logits.shape
    results = logits.new_empty(rows, 2), logits.new_empty(rows, 2), torch.empty_like(logits), torch.empty_like(logits)
    arrays = [x.numpy() for x in results]

    def loop(logits: Tensor, k: Tensor, thresholds: tuple[Any, Any], close: float) -> bool:
        arguments = logits.numpy(), k.numpy(), thresholds, close, *arrays
        return bool(over_rows(_solve_rows, rows, rows * n * 16, *arguments))

    with_tilts(loop, logits, k)
    return results


@per_row
def _changes(p, q, g, t):
    """Writes how much each p grows along the cotangents, minus a multiple of pq, which changes no conditional law."""
    total = scale = 0.0
    for i in range(p.shape[0]):
        t[i] = p[i] * q[i] * g[i]
        total += t[i]
        scale += p[i] * q[i]
    if scale > 0:
        for i in range(p.shape[0]):
            t[i] -= p[i] * q[i] * (total / scale)


@kernel
def _derivative_rows(from_row, to_row, theta, k, tilts, g, result):
    n = theta.shape[1]
    p, q, t, work = np.empty(n), np.empty(n), np.empty(n), workplace(n)
    for r in range(from_row, to_row):
        if not abs(tilts[r, 1]) < np.inf:
            result[r, :] = np.nan
            continue
        chances(theta[r], tilts[r, 0], tilts[r, 1], p, q)
        _changes(p, q, g[r], t)
        times_covariance(count_law(p, q, k[r], work), work, t, result[r])
    return 0


def bernoulli_count_derivative(logits: Tensor, k: Tensor, tilt: Tensor, g: Tensor) -> Tensor:
    """The derivative of ``<g, inclusion>`` with respect to the logits."""
    rows, n = logits.shape
    result = torch.empty_like(logits)
    arguments = (x.contiguous().numpy() for x in (logits, k, tilt, g, result))
    over_rows(_derivative_rows, rows, rows * n * 32, *arguments)
    return result


@per_row
def _draw_block(table, p, q, weight, start, stop, states, seed, draw, row, out):
    """Draws units ``stop - 1``, ..., ``start`` of many draws.

    ``states`` are twice the numbers of ones among the units up to there, plus 1 if a mark is among them. ``draw`` is
    the number of the first of them.
    """
    rows, bent = table.rows, table.bent
    for d in range(states.shape[0]):
        m, is_open = states[d] // 2, states[d] % 2 == 1
        even = odd = 0.0
        for i in range(stop - 1, start - 1, -1):
            if i % 2 or i == stop - 1:
                even, odd = uniform_pair(seed, draw + d, row, i // 2)
            at = U(i - start) * table.stride + U(m - table.first[i])
            stays, grows, here, there = q[i] * rows[at + ONE], p[i] * rows[at], 0.0, 0.0
            zero, one = stays, grows
            if is_open:
                stays, grows = q[i] * rows[at + bent + ONE], p[i] * rows[at + bent]
                here, there = weight[i] * rows[at + ONE], weight[i] * rows[at]
                zero, one = stays + here, grows + there
            u = (odd if i % 2 else even) * (zero + one)
            is_one = m > 0 and (zero == 0 or u < one)
            if is_open and is_one:
                is_open = there == 0 or u < grows
            elif is_open:
                is_open = here == 0 or u < one + stays
            out[d, i] = is_one
            m -= is_one
        states[d] = 2 * m + is_open


@inlined
def draw_row(table, p, q, weight, k, is_marked, seed, draw, row, out):
    """Draws k ones from the last unit to the first and, if the row ``is_marked``, a mark with its ``weight``."""
    draws, n = out.shape
    states = np.full(draws, 2 * k + is_marked)
    for start in range((n - 1) // table.length * table.length, -1, -table.length):
        stop = min(start + table.length, n)
        restore(table, p, q, weight, weight, start, stop)
        _draw_block(table, p, q, weight, start, stop, states, seed, draw, row, out)


@kernel
def _draw_tasks(from_task, to_task, parts, theta, k, thresholds, close, seed, out):
    draws, _, n = out.shape
    left = 0
    p, q, none, table = np.empty(n), np.empty(n), np.empty(0), empty_table(n)
    for task in range(from_task, to_task):
        r, part = task // parts, task % parts
        start_draw, stop_draw = draws * part // parts, draws * (part + 1) // parts
        mine = out[start_draw:stop_draw, r]
        anchor, offset = _tilt_of(thresholds, r)
        chances(theta[r], anchor, offset, p, q)
        if not _is_tilted(p, k[r], close):
            mine[:, :] = False
            left += 1
            continue
        clip_rare(p, q)
        chance, _, table = plan(p, q, none, none, k[r], table)
        if chance < SURE:
            chances(theta[r], anchor, offset, p, q)
            _, _, table = plan(p, q, none, none, k[r], table)
        draw_row(table, p, q, none, k[r], False, seed[0], start_draw, r, mine)
    return left


def draw_parts(rows: int, draws: int) -> int:
    """The number of parts into which the draws of a row are split; each part builds the table of the row."""
    return 1 if rows >= ROW_TASKS else max(1, min(ROW_TASKS, draws // DRAWS_A_TASK))


def bernoulli_count_draw(logits: Tensor, k: Tensor, seed: Tensor, draws: int, dtype: torch.dtype) -> Tensor:
    *batch, n = logits.shape
    rows = math.prod(batch)
    out = torch.empty(draws, rows, n, dtype=torch.bool, device=logits.device)
    parts = draw_parts(rows, draws)
    place = seed.contiguous().numpy(), out.numpy()

    def loop(logits: Tensor, k: Tensor, thresholds: tuple[Any, Any], close: float) -> bool:
        arguments = logits.numpy(), k.numpy(), thresholds, close, *place
        items = (8 * parts + draws) * rows * n
        return bool(over_rows(_draw_tasks, rows * parts, items, parts, *arguments))

    with_tilts(loop, logits.reshape(rows, n).contiguous(), k.reshape(rows).contiguous())
    return out.view(draws, *batch, n).to(dtype)


@per_row
def _miss(theta, anchor, offset, value):
    """Sum of ``|z|`` over the units whose value is not the likelier one; 0 times inf is 0."""
    total = 0.0
    for i in range(theta.shape[0]):
        z = tilted(theta[i], anchor, offset)
        miss = 1.0 - value[i] if z > 0 else np.float64(value[i])
        if miss != 0:
            total += miss * abs(z)
    return total


@kernel
def _log_prob_tasks(from_task, to_task, theta, tilts, log_count, value, result):
    rows = theta.shape[0]
    for task in range(from_task, to_task):
        s, r = task // rows, task % rows
        result[s, r] = -_miss(theta[r], tilts[r, 0], tilts[r, 1], value[s, r]) - log_count[r, 0] - log_count[r, 1]
    return 0


def bernoulli_count_log_prob(logits: Tensor, tilt: Tensor, log_count: Tensor, value: Tensor) -> Tensor:
    """``log P(x = value | B = k)`` of values ``(S, R, n)`` with k ones, linear in the value, ``(S, R)``."""
    result = logits.new_empty(value.shape[:-1])
    arguments = (x.contiguous().numpy() for x in (logits, tilt, log_count, value, result))
    over_rows(_log_prob_tasks, result.numel(), value.numel(), *arguments)
    return result


@kernel
def _log_prob_derivative_rows(from_row, to_row, value, g, complement, inclusion, result):
    draws, _, n = value.shape
    for r in range(from_row, to_row):
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
