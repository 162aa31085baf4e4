"""Draws with one marked unit, and their law, with a second table beside that of the count, in numba.

With p = pi, marks have the weight pq for either value of a unit. Let M be the weight of all marks among the first
units, by their count:

    M_{i+1}(m) = q_i M_i(m) + p_i M_i(m - 1) + p_i q_i (F_i(m) + F_i(m - 1))
"""

# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import inlined, kernel, over_rows, per_row, summed
from ..cpu.maths import LOG
from ..cpu.random_numbers import uniform_pair
from .numba_backend import TINY, draw_parts
from .numba_recursion import ONE, U, climb_along, copy_row, descend, fill, fill_along, plan, with_rows

_log = LOG[np.float64]


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
def _chances(probs, k, p, q, weight):
    """Writes the balanced probabilities; returns whether all are numbers and k is a possible sum."""
    total, spread = _sums(probs)
    share = _share(total, spread, k)
    for i in range(probs.shape[0]):
        p[i] = probs[i] + share * probs[i] * (1.0 - probs[i])
        q[i] = 1.0 - p[i]
        weight[i] = p[i] * q[i]
        if not 0.0 <= p[i] <= 1.0:
            return False
    return 0 <= k <= probs.shape[0]


@kernel
def _marked_rows(from_row, to_row, probs, k, with_slope, balanced, log_total, slope):
    n = probs.shape[1]
    q, weight, complement, inclusion = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    first, last = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    table, marks, rest, marked, marked_marks = np.empty(0), np.empty(0), np.empty(0), np.empty(0), np.empty(0)
    for r in range(from_row, to_row):
        p = balanced[r]
        if not _chances(probs[r], k[r], p, q, weight):
            log_total[r] = np.nan
            slope[r, :] = np.nan
            continue
        chance, length, stride, table, marks = plan(p, q, k[r], first, last, table, marks)
        marked, marked_marks = (
            with_rows(marked, length + 1, stride),
            with_rows(marked_marks, (n - 1) // length + 1, stride),
        )
        total = climb_along(p, q, weight, weight, k[r], first, last, length, stride, table, marked, marks, marked_marks)
        log_total[r] = math.log(total if total > 0 else chance)  # rows without a choice have nothing to mark
        if with_slope:
            rest = with_rows(rest, 2, stride)
            descend(p, q, first, last, length, stride, table, marks, rest, complement, inclusion)
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
    arguments = (x.numpy() for x in (balanced, log_total, value, result))
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
    arguments = (x.numpy() for x in (probs, k, balanced, slope, value, g, result))
    over_rows(_log_prob_derivative_rows, len(result), value.numel(), *arguments)
    return result


@per_row
def _draw_block(table, marked, stride, p, q, weight, first, start, stop, counts, open_, seed, draw, row, unit, out):
    """Draws units ``stop - 1``, ..., ``start`` of many draws.

    ``counts`` are those of the units up to there, and ``open_`` tells whether the mark is among them.
    """
    for d in range(counts.shape[0]):
        m, is_open = counts[d], open_[d]
        even = odd = 0.0
        for i in range(stop - 1, start - 1, -1):
            place = unit + i
            if place % 2 or i == stop - 1:
                even, odd = uniform_pair(seed, draw + d, row, place // 2)
            at = U(i - start) * stride + U(m - first[i])
            if is_open:
                stays, grows = q[i] * marked[at + ONE], p[i] * marked[at]
                here, there = weight[i] * table[at + ONE], weight[i] * table[at]
            else:
                stays, grows = q[i] * table[at + ONE], p[i] * table[at]
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
def _draw_tasks(from_task, to_task, parts, probs, k, seed, first_draw, first_row, first_unit, out):
    draws, _, n = out.shape
    p, q, weight = np.empty(n), np.empty(n), np.empty(n)
    first, last = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    table, marks, marked, marked_marks = np.empty(0), np.empty(0), np.empty(0), np.empty(0)
    for task in range(from_task, to_task):
        r, part = task // parts, task % parts
        start_draw, stop_draw = draws * part // parts, draws * (part + 1) // parts
        mine = out[start_draw:stop_draw, r]
        if not _chances(probs[r], k[r], p, q, weight):
            mine[:, :] = False
            continue
        _, length, stride, table, marks = plan(p, q, k[r], first, last, table, marks)
        marked, marked_marks = (
            with_rows(marked, length + 1, stride),
            with_rows(marked_marks, (n - 1) // length + 1, stride),
        )
        total = climb_along(p, q, weight, weight, k[r], first, last, length, stride, table, marked, marks, marked_marks)
        counts, open_ = np.full(stop_draw - start_draw, k[r]), np.full(stop_draw - start_draw, total > 0)
        for start in range((n - 1) // length * length, -1, -length):
            stop = min(start + length, n)
            if stop < n:
                copy_row(marks, U(start // length), table, U(0), stride)
                copy_row(marked_marks, U(start // length), marked, U(0), stride)
                fill(table, stride, p, q, first, last, start, stop - 1)
                fill_along(table, marked, stride, p, q, weight, weight, first, last, start, stop - 1)
            _draw_block(
                table, marked, stride, p, q, weight, first, start, stop, counts, open_, seed[0],
                first_draw + start_draw, first_row + r, first_unit, mine,
            )  # fmt: skip
    return 0


def marked_count_draw(
    probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype
) -> Tensor:
    *batch, n = probs.shape
    rows = math.prod(batch)
    out, parts = torch.empty(draws, rows, n, dtype=torch.bool, device=probs.device), draw_parts(rows, draws)
    arguments = (x.contiguous().numpy() for x in (probs.reshape(rows, n), k.reshape(rows), seed))
    over_rows(_draw_tasks, rows * parts, (16 * parts + 2 * draws) * rows * n, parts, *arguments, *first, out.numpy())
    return out.view(draws, *batch, n).to(dtype)
