"""Units given their number of ones in long rows, in numba, by nodes of a characteristic function; draws by a recursion.

A row whose count has almost no variance, in which nodes lose digits, is left to other code: its results are NaN.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import kernel, over_rows, per_row
from ..cpu.rows import total_of
from ..threshold import solve_threshold
from . import numba_series
from .numba_nodes import covariance_times, given_count, law_of_count, room
from .numba_recursion import chances, clip_rare, draw_parts, draw_row, empty_table, plan

CLOSE_MEAN = 0.25  # largest distance of the expected number of ones from k for which nodes are well placed
SURE = 1e-3  # P(B = k) above which fates that are rarer than everything that is left out do not count


@kernel
def _law_rows(begin, end, theta, k, tilt, log_total, complement, inclusion):
    n = theta.shape[1]
    p, q, at, series = np.empty(n), np.empty(n), room(), numba_series.room()
    for r in range(begin, end):
        log_size = chances(theta[r], tilt[r], 0.0, p, q)
        nodes, terms, chance = law_of_count(p, q, k[r], at, series)
        if nodes == 0 or not abs(total_of(p) - k[r]) <= CLOSE_MEAN:
            tilt[r] = log_total[r] = np.nan
            complement[r, :] = inclusion[r, :] = np.nan
            continue
        log_total[r] = math.log(chance) + log_size
        given_count(p, q, nodes, terms, at, series, complement[r], inclusion[r])
    return 0


def bernoulli_count(logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tilt, (rows, n) = solve_threshold(logits, k), logits.shape
    results = tilt, torch.empty_like(tilt), torch.empty_like(logits), torch.empty_like(logits)
    over_rows(_law_rows, rows, rows * n * 16, logits.numpy(), k.numpy(), *(x.numpy() for x in results))
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
def _derivative_rows(begin, end, theta, k, tilt, g, result):
    n = theta.shape[1]
    p, q, t, at, series = np.empty(n), np.empty(n), np.empty(n), room(), numba_series.room()
    for r in range(begin, end):
        chances(theta[r], tilt[r], 0.0, p, q)
        nodes, terms, _ = law_of_count(p, q, k[r], at, series)
        if nodes == 0:
            result[r, :] = np.nan
            continue
        _changes(p, q, g[r], t)
        covariance_times(p, q, t, nodes, terms, at, series, result[r])
    return 0


def bernoulli_count_derivative(logits: Tensor, k: Tensor, tilt: Tensor, g: Tensor) -> Tensor:
    result = torch.empty_like(logits)
    arguments = (x.contiguous().numpy() for x in (logits, k, tilt, g, result))
    over_rows(_derivative_rows, len(k), logits.numel() * 32, *arguments)
    return result


@kernel
def _draw_tasks(begin, end, parts, theta, k, tilt, seed, out):
    draws, _, n = out.shape
    p, q, none, table = np.empty(n), np.empty(n), np.empty(0), empty_table(n)
    for task in range(begin, end):
        r, part = task // parts, task % parts
        start_draw, stop_draw = draws * part // parts, draws * (part + 1) // parts
        chances(theta[r], tilt[r], 0.0, p, q)
        clip_rare(p, q)
        chance, _, table = plan(p, q, none, none, k[r], table)
        if chance < SURE:
            chances(theta[r], tilt[r], 0.0, p, q)
            _, _, table = plan(p, q, none, none, k[r], table)
        draw_row(table, p, q, none, k[r], False, seed[0], start_draw, r, out[start_draw:stop_draw, r])
    return 0


def draw(logits: Tensor, k: Tensor, seed: Tensor, out: Tensor) -> None:
    """Writes draws ``(draws, R, n)``."""
    draws, rows, n = out.shape
    parts = draw_parts(rows, draws)
    arguments = (x.contiguous().numpy() for x in (logits, k, solve_threshold(logits, k), seed))
    over_rows(_draw_tasks, rows * parts, (8 * parts + draws) * rows * n, parts, *arguments, out.numpy())
