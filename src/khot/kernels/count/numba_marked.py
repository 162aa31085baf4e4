"""Draws with one marked unit, and their law, with a second table beside that of the count, in numba.

With p = pi, marks have the weight pq for either value of a unit. Let M be the weight of all marks among the first
units, by their count:

    M_{i+1}(m) = q_i M_i(m) + p_i M_i(m - 1) + p_i q_i (F_i(m) + F_i(m - 1))
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import inlined, kernel, over_rows, per_row, summed
from ..cpu.maths import LOG
from .numba_recursion import descend, draw_parts, draw_row, empty_table, plan

TINY = np.finfo(np.float64).tiny  # as in small_numbers
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
def _balance(probs, k, p, q, weight):
    """Writes the balanced probabilities of ones and of zeros, and the weights of marks, which are their products.

    Returns whether all are numbers and k is a possible sum.
    """
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
    table, rest = empty_table(n), np.empty(4 * (n + 3))
    for r in range(from_row, to_row):
        if not _balance(probs[r], k[r], balanced[r], q, weight):
            log_total[r] = np.nan
            slope[r, :] = np.nan
            continue
        chance, total, table = plan(balanced[r], q, weight, weight, k[r], table)
        log_total[r] = math.log(total if total > 0 else chance)  # rows without a choice have nothing to mark
        if with_slope:
            descend(table, balanced[r], q, rest, complement, inclusion)
            for i in range(n):
                slope[r, i] = (complement[i] - inclusion[i]) * (chance / total) if total >= TINY else 0.0
    return 0


def marked_count(probs: Tensor, k: Tensor, with_slope: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The weight of all draws with k ones and a mark, and its derivative with respect to the marks' probabilities.

    Args:
        probs: Probabilities ``(R, n)`` float64, which add up to k up to rounding.
        k: ``(R,)`` integers.
        with_slope: Whether the derivative is wanted; otherwise anything may be returned for it.

    Returns: The probabilities, balanced so that they add up to k. The logarithm of E[D; B = k], D the distance of x
        from the probabilities, ``(R,)``; in rows without a choice, where D is 0, that of P(B = k). And its derivative
        with respect to a probability in D, E[1 - 2 x_i | B = k] / E[D | B = k], ``(R, n)``.
    """
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
    """Log-probability of k-hot values ``(S, R, n)``, ``(S, R)``: the sum over the possible marks."""
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
    """The derivative of the log-probabilities ``(S, R)`` with respect to ``probs`` ``(R, n)``, times g, summed.

    In E[D; B = k] a probability occurs in D, with the derivative ``slope``, and as the probability of a value. With
    respect to the latter, the derivative of the logarithm is (P(x_i = 1) - p_i) / (p_i (1 - p_i)), where P is the law
    with marks: this is 0, as its inclusion probabilities are p. Impossible values, and probabilities of 0 or 1, have no
    derivative.
    """
    result = torch.empty_like(probs)
    arguments = (x.contiguous().numpy() for x in (probs, k, balanced, slope, value, g, result))
    over_rows(_log_prob_derivative_rows, len(result), value.numel(), *arguments)
    return result


@kernel
def _draw_tasks(from_task, to_task, parts, probs, k, seed, out):
    draws, _, n = out.shape
    p, q, weight, table = np.empty(n), np.empty(n), np.empty(n), empty_table(n)
    for task in range(from_task, to_task):
        r, part = task // parts, task % parts
        start_draw, stop_draw = draws * part // parts, draws * (part + 1) // parts
        mine = out[start_draw:stop_draw, r]
        if not _balance(probs[r], k[r], p, q, weight):
            mine[:, :] = False
            continue
        _, total, table = plan(p, q, weight, weight, k[r], table)
        draw_row(table, p, q, weight, k[r], total > 0, seed[0], start_draw, r, mine)
    return 0


def marked_count_draw(probs: Tensor, k: Tensor, seed: Tensor, draws: int, dtype: torch.dtype) -> Tensor:
    *batch, n = probs.shape
    rows = math.prod(batch)
    out, parts = torch.empty(draws, rows, n, dtype=torch.bool, device=probs.device), draw_parts(rows, draws)
    arguments = (x.contiguous().numpy() for x in (probs.reshape(rows, n), k.reshape(rows), seed))
    items = (16 * parts + 2 * draws) * rows * n
    over_rows(_draw_tasks, rows * parts, items, parts, *arguments, out.numpy())
    return out.view(draws, *batch, n).to(dtype)
