"""Draws with one marked unit, and their law, with a second table beside that of the count, in numba.

With p = pi, marks have the weight pq for either value of a unit. Let M be the weight of all marks among the first
units, by their count:

    M_{i+1}(m) = q_i M_i(m) + p_i M_i(m - 1) + p_i q_i (F_i(m) + F_i(m - 1))
"""

# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import inlined, kernel, over_rows, per_row, summed
from ..cpu.maths import LOG
from ..cpu.random_numbers import uniform_pair
from .numba_backend import TINY, draw_parts
from .numba_recursion import (
    ONE,
    Beside,
    U,
    beside,
    climb_along,
    descend,
    empty_table,
    plan,
    restore,
    restore_along,
)

Array = np.ndarray[Any, Any]

_log = LOG[np.float64]


class Chances(NamedTuple):
    """The balanced probabilities of ones and of zeros in a row, and the weights of marks, which are their products."""

    p: Array
    q: Array
    weight: Array


@summed
def _sums(probs):
    """The sum of the probabilities, and of the quantities in proportion to which its rounding error is distributed."""
    total = spread = 0.0
    for i in range(probs.shape[0]):
        total += probs[i]
        spread += probs[i] * (1.0 - probs[i])
    return total, spread


@inlined
def _share(total, spread, k):
    return min(max((k - total) / max(spread, TINY), -1.0), 1.0)


@per_row
def _balance(probs, k, chances):
    """Writes the balanced probabilities; returns whether all are numbers and k is a possible sum."""
    p, q, weight = chances
    total, spread = _sums(probs)
    share = _share(total, spread, k)
    for i in range(probs.shape[0]):
        p[i] = probs[i] + share * probs[i] * (1.0 - probs[i])
        q[i] = 1.0 - p[i]
        weight[i] = p[i] * q[i]
        if not 0.0 <= p[i] <= 1.0:
            return False
    return 0 <= k <= probs.shape[0]


@per_row
def _plan_marked(chances, k, table, marked):
    """Computes both tables; returns them with P(B = k) and the weight of all marks."""
    p, q, weight = chances
    chance, table = plan(p, q, k, table)
    marked = beside(table, marked, p.shape[0])
    return chance, climb_along(table, marked, p, q, weight, weight, k), table, marked


@kernel
def _marked_rows(from_row, to_row, probs, k, with_slope, balanced, log_total, slope):
    n = probs.shape[1]
    q, weight, complement, inclusion = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    table, marked, rest = empty_table(n), Beside(np.empty(0), np.empty(0)), np.empty(2 * (n + 3))
    for r in range(from_row, to_row):
        chances = Chances(balanced[r], q, weight)
        if not _balance(probs[r], k[r], chances):
            log_total[r] = np.nan
            slope[r, :] = np.nan
            continue
        chance, total, table, marked = _plan_marked(chances, k[r], table, marked)
        log_total[r] = math.log(total if total > 0 else chance)  # rows without a choice have nothing to mark
        if with_slope:
            descend(table, balanced[r], q, rest, complement, inclusion)
            for i in range(n):
                slope[r, i] = (complement[i] - inclusion[i]) * (chance / total) if total >= TINY else 0.0
    return 0


def marked_count(probs: Tensor, k: Tensor, with_slope: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, n = probs.shape
    balanced, log_total, slope = torch.empty_like(probs), probs.new_empty(rows), torch.empty_like(probs)
    arguments = (x.numpy() for x in (balanced, log_total, slope))
    over_rows(_marked_rows, rows, rows * n * 16, probs.numpy(), k.numpy(), with_slope, *arguments)
    return balanced, log_total, slope


@summed
def _score(probs, value):
    """Log-probability of independent units with these values, and their total distance from the expectation."""
    score = distance = 0.0
    for i in range(probs.shape[0]):
        chance = probs[i] if value[i] == 1 else 1.0 - probs[i]
        distance += 1.0 - probs[i] if value[i] == 1 else probs[i]
        score += _log(chance)
    return score, distance


@kernel
def _log_prob_tasks(from_task, to_task, balanced, log_total, value, result):
    rows = balanced.shape[0]
    for task in range(from_task, to_task):
        s, r = task // rows, task % rows
        score, distance = _score(balanced[r], value[s, r])
        result[s, r] = score + (math.log(distance) if distance > 0 else 0.0) - log_total[r]
    return 0


def marked_count_log_prob(balanced: Tensor, log_total: Tensor, value: Tensor) -> Tensor:
    result = balanced.new_empty(value.shape[:-1])
    arguments = (x.contiguous().numpy() for x in (balanced, log_total, value, result))
    over_rows(_log_prob_tasks, result.numel(), value.numel(), *arguments)
    return result


@per_row
def _pull_through_balance(probs, k, g):
    """Turns cotangents of balanced probabilities into those of the given ones, in place."""
    total, spread = _sums(probs)
    share = _share(total, spread, k)
    common = 0.0
    if abs(share) < 1:
        for i in range(probs.shape[0]):
            common += g[i] * probs[i] * (1.0 - probs[i])
        common /= max(spread, TINY)
    for i in range(probs.shape[0]):
        g[i] = (g[i] - common) * (1.0 + share * (1.0 - 2.0 * probs[i]))


@kernel
def _log_prob_derivative_rows(from_row, to_row, probs, k, balanced, slope, value, g, result):
    draws, _, n = value.shape
    for r in range(from_row, to_row):
        p = balanced[r]
        result[r, :] = 0.0
        for s in range(draws):
            score, distance = _score(p, value[s, r])
            if not score > -np.inf:
                continue
            each = 1.0 / distance if distance >= TINY else 0.0
            for i in range(n):
                if TINY <= p[i] < 1.0:
                    rise = 1.0 / p[i] - each if value[s, r, i] == 1 else each - 1.0 / (1.0 - p[i])
                    result[r, i] += g[s, r] * (rise - slope[r, i])
        _pull_through_balance(probs[r], k[r], result[r])
    return 0


def marked_count_log_prob_derivative(
    probs: Tensor, k: Tensor, balanced: Tensor, slope: Tensor, value: Tensor, g: Tensor
) -> Tensor:
    result = torch.empty_like(probs)
    arguments = (x.contiguous().numpy() for x in (probs, k, balanced, slope, value, g, result))
    over_rows(_log_prob_derivative_rows, len(result), value.numel(), *arguments)
    return result


@per_row
def _draw_block(table, marked, chances, start, stop, counts, open_, seed, origin, out):
    """Draws units ``stop - 1``, ..., ``start`` of many draws, numbered from ``origin`` as in :mod:`.numba_backend`.

    ``counts`` are those of the units up to there, and ``open_`` says whether the mark is among them.
    """
    (p, q, weight), (draw, row, unit) = chances, origin
    for d in range(counts.shape[0]):
        m, is_open = counts[d], open_[d]
        even = odd = 0.0
        for i in range(stop - 1, start - 1, -1):
            place = unit + i
            if place % 2 or i == stop - 1:
                even, odd = uniform_pair(seed, draw + d, row, place // 2)
            at = U(i - start) * table.stride + U(m - table.first[i])
            if is_open:
                stays, grows = q[i] * marked.rows[at + ONE], p[i] * marked.rows[at]
                here, there = weight[i] * table.rows[at + ONE], weight[i] * table.rows[at]
            else:
                stays, grows = q[i] * table.rows[at + ONE], p[i] * table.rows[at]
                here = there = 0.0
            u = (odd if place % 2 else even) * (stays + grows + here + there)
            one = m > 0 and (stays + here == 0 or u < grows + there)
            if one:
                is_open = is_open and (there == 0 or u < grows)
            else:
                is_open = is_open and (here == 0 or u < grows + there + stays)
            out[d, i] = one
            m -= one
        counts[d], open_[d] = m, is_open


@kernel
def _draw_tasks(from_task, to_task, parts, probs, k, seed, first, out):
    draws, _, n = out.shape
    chances = Chances(np.empty(n), np.empty(n), np.empty(n))
    table, marked = empty_table(n), Beside(np.empty(0), np.empty(0))
    for task in range(from_task, to_task):
        r, part = task // parts, task % parts
        start_draw, stop_draw = draws * part // parts, draws * (part + 1) // parts
        mine = out[start_draw:stop_draw, r]
        if not _balance(probs[r], k[r], chances):
            mine[:, :] = False
            continue
        _, total, table, marked = _plan_marked(chances, k[r], table, marked)
        (p, q, weight), origin = chances, (first[0] + start_draw, first[1] + r, first[2])
        counts, open_ = np.full(stop_draw - start_draw, k[r]), np.full(stop_draw - start_draw, total > 0)
        for start in range((n - 1) // table.length * table.length, -1, -table.length):
            stop = min(start + table.length, n)
            restore(table, p, q, start, stop)
            restore_along(table, marked, p, q, weight, weight, start, stop)
            _draw_block(table, marked, chances, start, stop, counts, open_, seed[0], origin, mine)
    return 0


def marked_count_draw(
    probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype
) -> Tensor:
    *batch, n = probs.shape
    rows = math.prod(batch)
    out, parts = torch.empty(draws, rows, n, dtype=torch.bool, device=probs.device), draw_parts(rows, draws)
    arguments = (x.contiguous().numpy() for x in (probs.reshape(rows, n), k.reshape(rows), seed))
    items = (16 * parts + 2 * draws) * rows * n
    over_rows(_draw_tasks, rows * parts, items, parts, *arguments, tuple(first), out.numpy())
    return out.view(draws, *batch, n).to(dtype)
