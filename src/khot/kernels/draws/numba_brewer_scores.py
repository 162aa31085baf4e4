r"""Log-probabilities of Brewer's design in numba, by the recursion over the subsets of a value's units.

With f, w and W of :mod:`khot.laws.brewer` and :math:`a(T) = f(T) / W(T)`, and the factors :math:`\pi_j` taken out,
:math:`f(T) = \sum_{j \in T} a(T \setminus j)\, r_j(T \setminus j)`. The derivative goes through the subsets in the
reverse order. With :math:`v = 1 / (c + m (1 - \pi))` and :math:`A = (m - 1)(m + c)`,

.. math:: r = (1 + A v) / m, \qquad \partial r / \partial \pi = A v^2, \qquad
    \partial r / \partial c = -(m - 1) \pi v^2.

Subsets are integers whose bits are units of the value.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import kernel, over_rows, per_row, summed
from ..cpu.rows import total_of
from . import Scores


class Room(NamedTuple):
    """Arrays for one value: its units that are drawn, and the others that might be, without certain ones.

    Attributes:
        units, others: Their indices.
        probs, other_probs: Their probabilities.
        grads, other_grads: Derivatives with respect to these.
        chance, weight, distance, pull: For each subset of the units f, W, c, and the derivative with respect to f.
    """

    units: Any
    others: Any
    probs: Any
    other_probs: Any
    grads: Any
    other_grads: Any
    chance: Any
    weight: Any
    distance: Any
    pull: Any


@per_row
def _room(n, size):
    subsets = 1 << size
    return Room(
        np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n), np.empty(n), np.empty(n), np.empty(n),
        np.empty(subsets), np.empty(subsets), np.empty(subsets), np.empty(subsets),
    )  # fmt: skip


@per_row
def _gather(probs, value, room):
    """Returns how many units of the value are drawn, -1 if it is impossible, and how many others there are."""
    drawn = others = 0
    for i in range(probs.shape[0]):
        p = probs[i]
        if (p >= 1 and not value[i]) or (p <= 0 and value[i]):
            return -1, 0
        if 0 < p < 1:
            if value[i]:
                room.units[drawn], room.probs[drawn] = i, p
                drawn += 1
            else:
                room.others[others], room.other_probs[others] = i, p
                others += 1
    return drawn, others


@summed
def _sum_over_distances(probs, m, c):
    total = 0.0
    for i in range(probs.shape[0]):
        total += probs[i] / (c + m * (1.0 - probs[i]))
    return total


@per_row
def _score(drawn, others, room):
    """The probability of the whole value without the factors pi; writes intermediate values of its subsets."""
    probs, outside, last = room.probs, room.other_probs[:others], (1 << drawn) - 1
    for subset in range(last + 1):
        room.chance[subset] = 0.0
    room.chance[0], room.distance[0], total = 1.0, 0.0, total_of(outside)
    for subset in range(last):
        m, c = drawn, 0.0
        for j in range(drawn):
            if subset >> j & 1:
                m -= 1
                c += 1.0 - probs[j]
        room.distance[subset] = c
        spread = (m - 1) * (m + c)
        weight = total + (spread * _sum_over_distances(outside, m, c) if m > 1 else 0.0)
        for j in range(drawn):
            if not subset >> j & 1:
                weight += probs[j] * (1.0 + spread / (c + m * (1.0 - probs[j])))
        room.weight[subset] = weight / m
        rate = room.chance[subset] / weight  # both of them m times too large
        for j in range(drawn):
            if not subset >> j & 1:
                room.chance[subset | 1 << j] += rate * (1.0 + spread / (c + m * (1.0 - probs[j])))
    return room.chance[last]


@kernel
def _log_prob_tasks(from_task, to_task, probs, values, size, out):
    rows, n = probs.shape
    room = _room(n, size)
    for task in range(from_task, to_task):
        d, r = task // rows, task % rows
        drawn, others = _gather(probs[r], values[d, r], room)
        found = -np.inf
        if drawn >= 0:
            found = math.log(_score(drawn, others, room))
            for j in range(drawn):
                found += math.log(room.probs[j])
        out[d, r] = found
    return 0


@summed
def _pull_weight(probs, m, c, pull, grads):
    """Adds dL/dpi of units outside a value to ``grads``, given ``pull``, dL/dW; returns dL/dc."""
    spread, total = (m - 1) * (m + c), 0.0
    for i in range(probs.shape[0]):
        inverse = 1.0 / (c + m * (1.0 - probs[i]))
        ratio = probs[i] * inverse
        grads[i] += pull * ((1.0 + spread * inverse) / m + spread * ratio * inverse)
        total += ratio * ratio
    return -pull * (m - 1) * total


@per_row
def _pull_back(g, drawn, others, room):
    """The derivatives of g log P, from the values that :func:`_score` has written for the subsets."""
    probs, outside, last = room.probs, room.other_probs[:others], (1 << drawn) - 1
    for i in range(others):
        room.other_grads[i] = 0.0
    for j in range(drawn):
        room.grads[j] = g / probs[j]
    room.pull[last] = g / room.chance[last]
    for subset in range(last - 1, -1, -1):
        c, m = room.distance[subset], drawn
        for j in range(drawn):
            m -= subset >> j & 1
        spread, rate, of_rate = (m - 1) * (m + c), room.chance[subset] / room.weight[subset], 0.0
        for j in range(drawn):
            if not subset >> j & 1:
                of_rate += room.pull[subset | 1 << j] * (1.0 + spread / (c + m * (1.0 - probs[j]))) / m
        room.pull[subset] = of_rate / room.weight[subset]
        of_weight = -of_rate * rate / room.weight[subset]
        of_c = _pull_weight(outside, m, c, of_weight, room.other_grads[:others])
        for j in range(drawn):
            if not subset >> j & 1:
                inverse = 1.0 / (c + m * (1.0 - probs[j]))
                of_ratio = room.pull[subset | 1 << j] * rate + of_weight * probs[j]
                room.grads[j] += of_weight * (1.0 + spread * inverse) / m + of_ratio * spread * inverse * inverse
                of_c -= of_ratio * (m - 1) * probs[j] * inverse * inverse
        for j in range(drawn):
            if subset >> j & 1:
                room.grads[j] -= of_c


@kernel
def _derivative_rows(first, last, probs, values, g, size, out):
    draws, n = g.shape[0], probs.shape[1]
    room = _room(n, size)
    for r in range(first, last):
        for i in range(n):
            out[r, i] = 0.0
        for d in range(draws):
            drawn, others = _gather(probs[r], values[d, r], room)
            if drawn <= 0:
                continue
            _score(drawn, others, room)
            _pull_back(g[d, r], drawn, others, room)
            for j in range(drawn):
                out[r, room.units[j]] += room.grads[j]
            for i in range(others):
                out[r, room.others[i]] += room.other_grads[i]
    return 0


def _log_prob(probs: Tensor, values: Tensor, size: int) -> Tensor:
    draws, rows = values.shape[:2]
    out = probs.new_empty(draws, rows)
    arguments = (x.numpy() for x in (probs, values))
    over_rows(_log_prob_tasks, draws * rows, values.numel() << size, *arguments, size, out.numpy())
    return out


def _derivative(probs: Tensor, values: Tensor, g: Tensor, size: int) -> Tensor:
    out = torch.empty_like(probs)
    arguments = (x.numpy() for x in (probs, values, g))
    over_rows(_derivative_rows, len(probs), values.numel() << size, *arguments, size, out.numpy())
    return out


SCORES = Scores(_log_prob, _derivative)
