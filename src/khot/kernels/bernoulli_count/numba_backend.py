"""Units given their count, with draws and derivatives, by recursions over the units of a row, in numba."""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..numba_tools import kernel, over_rows, per_row, summed
from ..philox_numba import random_words, uniform
from .numba_rows import (
    LIKELY, block_length, chances, climb, climb_along, empty_law, fill, fill_along, solve_tilt, tilted, windows,
)  # fmt: skip

TINY = np.finfo(np.float64).tiny  # as in small_numbers
ROW_TASKS = 16  # rows that are enough for all threads; the draws of fewer are shared out
DRAWS_A_TASK = 64


@per_row
def _plan(p, q, k, first, last, table, marks):
    """The windows and the table of a row, both in place if they fit; P(B = k), the block length and the tables."""
    n = p.shape[0]
    chance = 0.0
    length = n
    for whole in (n <= 32, True):
        widest = windows(p, q, k, whole, first, last)
        length = block_length(n, widest)
        if table.shape[0] < length + 1 or table.shape[1] < widest + 2:
            table = np.empty((length + 1, widest + 2))
            marks = np.empty(((n - 1) // length + 1, widest + 2))
        chance = climb(p, q, k, first, last, length, table, marks)
        if whole or chance > LIKELY:
            break
    return chance, length, table, marks


@summed
def _outside(f, b0, b1, out, p, q):
    """P(B = k) given that a unit is 0 and that it is 1; writes the law of the rest with the unit."""
    zero = one = 0.0
    for j in range(f.shape[0]):
        zero += f[j] * b0[j]
        one += f[j] * b1[j]
        out[j] = q * b0[j] + p * b1[j]
    return zero, one


@per_row
def _descend(p, q, k, first, last, length, table, marks, rest, complement, inclusion):
    n = p.shape[0]
    empty_law(rest[n % 2])
    for start in range((n - 1) // length * length, -1, -length):
        stop = min(start + length, n)
        if stop < n:
            table[0, :] = marks[start // length]
            fill(table, p, q, first, last, start, stop - 1)
        for i in range(stop - 1, start - 1, -1):
            shift, width = first[i + 1] - first[i], last[i] - first[i] + 1
            above, below = rest[(i + 1) % 2], rest[i % 2]
            zero, one = _outside(
                table[i - start, 1 : 1 + width], above[1 - shift : 1 - shift + width],
                above[2 - shift : 2 - shift + width], below[1 : 1 + width], p[i], q[i],
            )  # fmt: skip
            below[0] = below[1 + width] = 0.0
            out, included = q[i] * zero, p[i] * one
            complement[i], inclusion[i] = out / (out + included), included / (out + included)


@kernel
def _solve_rows(begin, end, theta, k, tilts, log_count, complement, inclusion):
    n = theta.shape[1]
    p, q = np.empty(n), np.empty(n)
    first, last = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    table, marks, rest = np.empty((0, 0)), np.empty((0, 0)), np.empty((2, 0))
    for r in range(begin, end):
        anchor, offset = solve_tilt(theta[r], k[r])
        tilts[r, 0], tilts[r, 1] = anchor, offset
        if not abs(offset) < np.inf:
            log_count[r, 0] = log_count[r, 1] = np.nan
            complement[r, :] = inclusion[r, :] = np.nan
            continue
        log_count[r, 1] = chances(theta[r], anchor, offset, p, q)
        chance, length, table, marks = _plan(p, q, k[r], first, last, table, marks)
        log_count[r, 0] = math.log(chance)
        if rest.shape[1] < table.shape[1]:
            rest = np.empty((2, table.shape[1]))
        _descend(p, q, k[r], first, last, length, table, marks, rest, complement[r], inclusion[r])


def bernoulli_count(logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, n = logits.shape
    tilts, log_count = logits.new_empty(rows, 2), logits.new_empty(rows, 2)
    complement, inclusion = torch.empty_like(logits), torch.empty_like(logits)
    arguments = (x.numpy() for x in (logits, k, tilts, log_count, complement, inclusion))
    over_rows(_solve_rows, rows, rows * n * 16, *arguments)
    return tilts, log_count, complement, inclusion


@per_row
def _changes(p, q, g, complement, inclusion, log_odds, t):
    """Writes how much each p grows along the cotangents: less a multiple of pq, which changes no conditional law."""
    total = scale = 0.0
    for i in range(p.shape[0]):
        if not log_odds:
            t[i] = p[i] * q[i] * g[i]
        elif complement[i] < TINY or inclusion[i] < TINY:
            t[i] = 0.0
        else:
            t[i] = g[i] * (p[i] / inclusion[i]) * (q[i] / complement[i])
        total += t[i]
        scale += p[i] * q[i]
    if scale > 0:
        for i in range(p.shape[0]):
            t[i] -= p[i] * q[i] * (total / scale)


@summed
def _outside_along(f, df, b0, b1, db0, db1, out, dout, p, q, t):
    """:func:`_outside` and its derivative."""
    zero = one = dzero = done = 0.0
    for j in range(f.shape[0]):
        zero += f[j] * b0[j]
        one += f[j] * b1[j]
        dzero += df[j] * b0[j] + f[j] * db0[j]
        done += df[j] * b1[j] + f[j] * db1[j]
        out[j] = q * b0[j] + p * b1[j]
        dout[j] = q * db0[j] + p * db1[j] + t * (b1[j] - b0[j])
    return zero, one, dzero, done


@per_row
def _descend_along(p, q, t, k, first, last, length, table, bent, marks, bent_marks, rest, bent_rest, result):
    n = p.shape[0]
    empty_law(rest[n % 2])
    bent_rest[n % 2, :3] = 0.0
    for start in range((n - 1) // length * length, -1, -length):
        stop = min(start + length, n)
        if stop < n:
            table[0, :] = marks[start // length]
            bent[0, :] = bent_marks[start // length]
            fill(table, p, q, first, last, start, stop - 1)
            fill_along(table, bent, p, q, t, first, last, start, stop - 1)
        for i in range(stop - 1, start - 1, -1):
            shift, width = first[i + 1] - first[i], last[i] - first[i] + 1
            above, below = rest[(i + 1) % 2], rest[i % 2]
            bent_above, bent_below = bent_rest[(i + 1) % 2], bent_rest[i % 2]
            zero, one, dzero, done = _outside_along(
                table[i - start, 1 : 1 + width], bent[i - start, 1 : 1 + width],
                above[1 - shift : 1 - shift + width], above[2 - shift : 2 - shift + width],
                bent_above[1 - shift : 1 - shift + width], bent_above[2 - shift : 2 - shift + width],
                below[1 : 1 + width], bent_below[1 : 1 + width], p[i], q[i], t[i],
            )  # fmt: skip
            below[0] = below[1 + width] = bent_below[0] = bent_below[1 + width] = 0.0
            total = q[i] * zero + p[i] * one
            zero, one, dzero, done = zero / total, one / total, dzero / total, done / total
            result[i] = t[i] * zero * one + p[i] * q[i] * (done * zero - one * dzero)


@kernel
def _pull_rows(begin, end, theta, k, tilts, complement, inclusion, g, log_odds, result):
    n = theta.shape[1]
    p, q, t = np.empty(n), np.empty(n), np.empty(n)
    first, last = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    table, marks, rest = np.empty((0, 0)), np.empty((0, 0)), np.empty((2, 0))
    bent, bent_marks, bent_rest = np.empty((0, 0)), np.empty((0, 0)), np.empty((2, 0))
    for r in range(begin, end):
        if not abs(tilts[r, 1]) < np.inf:
            result[r, :] = np.nan
            continue
        chances(theta[r], tilts[r, 0], tilts[r, 1], p, q)
        _, length, table, marks = _plan(p, q, k[r], first, last, table, marks)
        if bent.shape != table.shape or bent_marks.shape != marks.shape:
            bent, bent_marks = np.empty(table.shape), np.empty(marks.shape)
            rest, bent_rest = np.empty((2, table.shape[1])), np.empty((2, table.shape[1]))
        _changes(p, q, g[r], complement[r], inclusion[r], log_odds, t)
        climb_along(p, q, t, first, last, length, table, bent, marks, bent_marks)
        _descend_along(
            p, q, t, k[r], first, last, length, table, bent, marks, bent_marks, rest, bent_rest, result[r]
        )


def bernoulli_count_derivative(
    logits: Tensor, k: Tensor, tilt: Tensor, complement: Tensor, inclusion: Tensor, g: Tensor, log_odds: bool
) -> Tensor:
    rows, n = logits.shape
    result = torch.empty_like(logits)
    arguments = (x.numpy() for x in (logits, k, tilt, complement, inclusion, g))
    over_rows(_pull_rows, rows, rows * n * 32, *arguments, log_odds, result.numpy())
    return result


@per_row
def _draw_block(table, p, q, first, start, stop, counts, seed, draw, row, unit, out):
    """Draws units ``stop - 1``, ..., ``start`` of many draws; ``counts`` are those of the units up to there."""
    for d in range(counts.shape[0]):
        m = counts[d]
        for i in range(stop - 1, start - 1, -1):
            place = unit + i
            if place % 2 or i == stop - 1:
                words = random_words(seed, draw + d, row, place // 2)
            u = uniform(words[2], words[3]) if place % 2 else uniform(words[0], words[1])
            at = 1 + m - first[i]
            stays, grows = q[i] * table[i - start, at], p[i] * table[i - start, at - 1]
            one = m > 0 and (m > i or stays == 0 or (u * (stays + grows) < grows))
            out[d, i] = one
            m -= one
        counts[d] = m


@kernel
def _draw_tasks(begin, end, parts, theta, k, tilts, seed, first_draw, first_row, first_unit, out):
    draws, _, n = out.shape
    p, q = np.empty(n), np.empty(n)
    first, last = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    table, marks = np.empty((0, 0)), np.empty((0, 0))
    for task in range(begin, end):
        r, part = task // parts, task % parts
        start_draw, stop_draw = draws * part // parts, draws * (part + 1) // parts
        mine = out[start_draw:stop_draw, r]
        if not abs(tilts[r, 1]) < np.inf:
            mine[:, :] = False
            continue
        chances(theta[r], tilts[r, 0], tilts[r, 1], p, q)
        _, length, table, marks = _plan(p, q, k[r], first, last, table, marks)
        counts = np.full(stop_draw - start_draw, k[r])
        for start in range((n - 1) // length * length, -1, -length):
            stop = min(start + length, n)
            if stop < n:
                table[0, :] = marks[start // length]
                fill(table, p, q, first, last, start, stop - 1)
            _draw_block(
                table, p, q, first, start, stop, counts, seed[0], first_draw + start_draw, first_row + r, first_unit,
                mine,
            )  # fmt: skip


def bernoulli_count_draw(
    logits: Tensor, k: Tensor, tilt: Tensor, seed: Tensor, first: list[int], draws: int, dtype: torch.dtype
) -> Tensor:
    *batch, n = logits.shape
    rows = math.prod(batch)
    out = torch.empty(draws, rows, n, dtype=torch.bool)
    parts = 1 if rows >= ROW_TASKS else max(1, min(ROW_TASKS, draws // DRAWS_A_TASK))
    tensors = (logits.reshape(rows, n), k.reshape(rows), tilt.reshape(rows, 2), seed)
    over_rows(_draw_tasks, rows * parts, (rows * parts * 8 + rows * draws) * n, parts, *(x.numpy() for x in tensors), *first, out.numpy())
    return out.view(draws, *batch, n).to(dtype)


@per_row
def _miss(theta, anchor, offset, value):
    """Sum of ``|z|`` over the units that are not what is likelier; 0 times inf is 0."""
    total = 0.0
    for i in range(theta.shape[0]):
        z = tilted(theta[i], anchor, offset)
        miss = 1.0 - value[i] if z > 0 else np.float64(value[i])
        if miss != 0:
            total += miss * abs(z)
    return total


@kernel
def _log_prob_tasks(begin, end, theta, tilts, log_count, value, result):
    rows = theta.shape[0]
    for task in range(begin, end):
        s, r = task // rows, task % rows
        result[s, r] = -_miss(theta[r], tilts[r, 0], tilts[r, 1], value[s, r]) - log_count[r, 0] - log_count[r, 1]


def bernoulli_count_log_prob(logits: Tensor, tilt: Tensor, log_count: Tensor, value: Tensor) -> Tensor:
    result = logits.new_empty(value.shape[:-1])
    arguments = (x.numpy() for x in (logits, tilt, log_count, value, result))
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


def bernoulli_count_log_prob_derivative(value: Tensor, g: Tensor, complement: Tensor, inclusion: Tensor) -> Tensor:
    result = torch.empty_like(inclusion)
    arguments = (x.numpy() for x in (value, g, complement, inclusion, result))
    over_rows(_log_prob_derivative_rows, len(result), value.numel(), *arguments)
    return result
