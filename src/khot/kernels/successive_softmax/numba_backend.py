"""Rounds of softmaxes in numba, row by row, in float64 except for what is read and written.

Weights are relative to the largest of the first round. A row whose sum falls below ``SMALLEST`` is left: weights of the
next rounds have lost digits by then, or were 0 from the beginning.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import inlined, kernel, over_rows, per_row, summed
from ..cpu.maths import EXP, LOG
from ..cpu.rows import highest, total_of
from . import Rounds

SMALLEST = 1e-200  # sum of weights above which those that matter have all digits

_exp, _log = EXP[np.float64], LOG[np.float64]


@inlined
def _power(base, exponent):
    return base if exponent == 1.0 else _exp(exponent * _log(base))


@per_row
def _start(x, inverse, w):
    top = highest(x)
    for i in range(x.shape[0]):
        w[i] = _exp((np.float64(x[i]) - top) * inverse)


@per_row
def _leader(w, total):
    """The index of a weight that is more than half of the sum, -1 if there is none, and the sum of the others."""
    if highest(w) <= 0.5 * total:
        return -1, 0.0
    at = 0
    for i in range(w.shape[0]):
        if w[i] > w[at]:
            at = i
    return at, total_of(w[:at]) + total_of(w[at + 1 :])


@per_row
def _lower(w, scale, inverse, leader, rest, after):
    for i in range(w.shape[0]):
        after[i] = w[i] * _power(1.0 - w[i] * scale, inverse)
    if leader >= 0:
        after[leader] = w[leader] * _power(rest * scale, inverse)


@per_row
def _add_shares(w, scale, y):
    for i in range(w.shape[0]):
        y[i] += w[i] * scale


@per_row
def _choose(x, inverse, k, weights, y):
    """Adds all shares to y; returns whether no sum was too small. Row j of ``weights`` is for round j."""
    kept = weights.shape[0]
    _start(x, inverse, weights[0])
    for j in range(k):
        w = weights[j % kept]
        total = total_of(w)
        if not SMALLEST <= total < np.inf:
            return False
        _add_shares(w, 1.0 / total, y)
        if j + 1 < k:
            leader, rest = _leader(w, total)
            _lower(w, 1.0 / total, inverse, leader, rest, weights[(j + 1) % kept])
    return True


@kernel
def _forward(first, last, x, inverse, sizes, y, left):
    n, count = x.shape[1], 0
    weights, row = np.empty((2, n)), np.empty(n)
    for r in range(first, last):
        for i in range(n):
            row[i] = 0.0
        left[r] = not _choose(x[r], inverse[r], sizes[r], weights, row)
        count += left[r]
        for i in range(n):
            y[r, i] = row[i]
    return count


@summed
def _fill_slopes(w, scale, inverse, g, a, slopes):
    """dL/dp of some entries except the leader, and the sum of p dL/dp."""
    total = 0.0
    for i in range(w.shape[0]):
        p = w[i] * scale
        slopes[i] = g[i] - inverse * a[i] / (1.0 - p)
        total += p * slopes[i]
    return total


@per_row
def _add_centred(w, scale, slopes, mean, a):
    for i in range(w.shape[0]):
        a[i] += w[i] * scale * (slopes[i] - mean)


@per_row
def _pull_back(w, inverse, g, a, slopes):
    """Turns dL/dlog w of the next round into that of this round, in place."""
    total = total_of(w)
    scale = 1.0 / total
    leader, rest = _leader(w, total)
    if leader < 0:
        mean = _fill_slopes(w, scale, inverse, g, a, slopes)
        _add_centred(w, scale, slopes, mean, a)
        return
    after = leader + 1
    others = _fill_slopes(w[:leader], scale, inverse, g[:leader], a[:leader], slopes[:leader])
    others += _fill_slopes(w[after:], scale, inverse, g[after:], a[after:], slopes[after:])
    p, q, pulled = w[leader] * scale, rest * scale, inverse * a[leader]
    moved = a[leader] + p * (q * g[leader] - pulled - others)
    slopes[leader] = g[leader] - (pulled / q if pulled != 0 else 0.0)  # q may be 0 in the last round, where pulled is 0
    _add_centred(w, scale, slopes, p * slopes[leader] + others, a)
    a[leader] = moved


@kernel
def _backward(first, last, x, inverse, sizes, most, grad, out):
    n = x.shape[1]
    weights, shares, g = np.empty((most, n)), np.empty(n), np.empty(n)
    a, slopes = np.empty(n), np.empty(n)
    for r in range(first, last):
        for i in range(n):
            shares[i] = a[i] = 0.0
            g[i] = grad[r, i]
        if _choose(x[r], inverse[r], sizes[r], weights, shares):
            for j in range(sizes[r] - 1, -1, -1):
                _pull_back(weights[j], inverse[r], g, a, slopes)
        for i in range(n):
            out[r, i] = a[i] * inverse[r]
    return 0


def _choose_rows(x: Tensor, temperature: Tensor, k: Tensor, most: int) -> tuple[Tensor, Tensor]:
    y, left = torch.empty_like(x), x.new_empty(len(x), dtype=torch.bool)
    arguments = (v.numpy() for v in (x, temperature.reciprocal(), k, y, left))
    over_rows(_forward, len(x), most * x.numel(), *arguments)
    return y, left


def _pull_rows(x: Tensor, temperature: Tensor, k: Tensor, most: int, grad: Tensor) -> Tensor:
    out = torch.empty_like(x)
    arguments = (v.numpy() for v in (x, temperature.reciprocal(), k))
    over_rows(_backward, len(x), 2 * most * x.numel(), *arguments, most, grad.numpy(), out.numpy())
    return out


ROUNDS = Rounds(_choose_rows, _pull_rows)
