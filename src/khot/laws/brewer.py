r"""Brewer's draw-by-draw method: exactly the given inclusion probabilities from k draws of one unit each.

With m units still to draw and c the sum of :math:`1 - \pi_i` over those drawn, unit j is drawn next with weight

.. math:: w_j = \pi_j r_j, \qquad r_j = \frac{1}{m} + \frac{(m - 1)(m + c)}{m \, (c + m (1 - \pi_j))},

which is the published :math:`\pi_j (k - a - \pi_j) / (k - a - \pi_j m)`, a the sum of :math:`\pi_i` over those drawn,
without differences. Units of probability 1 are drawn first.

The probability of a vector is a sum over the orders of its units. As m and c depend on the set T of units drawn so far
alone, so does the probability f(T) of drawing it and nothing else first, and the sum goes over its subsets:

.. math:: f(T) = \sum_{j \in T} f(T \setminus j) \, w_j / W, \qquad W = \sum_{i \notin T \setminus j} w_i

where w and W belong to :math:`T \setminus j`. The factors :math:`\pi_j` come out of the sum.

Probabilities are float64, ``(*batch, n)`` with rows that sum to k. Arguments are not checked here.

References:
    [1] Brewer (1975), "A simple procedure for sampling pi-ps wor", Australian Journal of Statistics 17(3).
    [2] Tillé (2006), "Sampling Algorithms", chapter 6.
"""

import functools
import math
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._torch_internals import count_as_constant
from khot._tracing import broadcast_shapes
from khot.kernels.autograd import has_derivative
from khot.kernels.brewer import brewer_draw, draw_by_draw, drawing_ratio, scores
from khot.kernels.call import is_first_derivative, is_plain
from khot.kernels.random_numbers import uniform
from khot.kernels.row_slabs import by_rows

from . import unit_by_unit

SLAB = 2**11  # units of the values scored at a time in torch, of which there are up to 252 numbers each
MAX_SIZE = 10  # the largest k for which log_prob is feasible: it holds C(k, k / 2) n numbers for every value


@torch.no_grad()
def sample(
    probs: Tensor, k: Tensor, size: int, shape: tuple[int, ...] = (), generator: torch.Generator | None = None
) -> Tensor:
    """Draws k-hot vectors ``(*shape, *batch, n)``, bool. O(nk) time each.

    Never a unit of probability 0, always those of probability 1.

    Args:
        probs: Inclusion probabilities.
        k: Number of ones, of the shape of the batch.
        size: At least the largest k of any row: the number of steps where nobody can look how many there are to do.
        shape: Of the independent draws.
        generator: Source of randomness, torch's default one if None.
    """
    whole = *shape, *probs.shape
    drawn = unit_by_unit.sample(brewer_draw, probs, k, math.prod(shape), generator)
    if drawn is not None:
        return drawn.view(whole)

    def number(m: int) -> Tensor:
        return uniform((*whole[:-1], 1), probs.dtype, probs.device, generator)

    return draw_by_draw(probs.expand(whole), k, size, number)


Subsets = list[tuple[int, ...]]


@count_as_constant
def _subsets(size: int, r: int) -> tuple[Subsets, Subsets]:
    """:func:`_listed_subsets`, kept; compilers trace through what keeps it, and warn."""
    return _listed_subsets(size, r)


@functools.lru_cache
def _listed_subsets(size: int, r: int) -> tuple[Subsets, Subsets]:
    """The r-subsets of ``size`` slots, and for each of their slots the position of the subset without it."""
    previous = {subset: i for i, subset in enumerate(combinations(range(size), r - 1))} if r else {}
    subsets = list(combinations(range(size), r))
    return subsets, [tuple(previous[(*t[:i], *t[i + 1 :])] for i in range(r)) for t in subsets]


def is_fused(probs: Tensor, value: Tensor) -> bool:
    """Whether loops score these values, all at once; they have no derivative in the value."""
    if not (is_plain(probs, value) and probs.numel() and value.numel()):
        return False
    return scores.find(probs) is not None and not has_derivative(value, torch.is_grad_enabled())


class _LogProb(Function):
    """Of probabilities ``(rows, n)`` and values ``(draws, rows, n)``."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, values: Tensor, size: int) -> Tensor:
        ctx.size = size
        ctx.save_for_backward(probs, values)
        result: Tensor = scores.find(probs).log_prob(probs.detach(), values, size)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        probs, values = ctx.saved_tensors
        further = torch.is_grad_enabled()
        if not is_first_derivative(g):
            with torch.enable_grad():
                probs = probs.view_as(probs) if further else probs.detach().requires_grad_()
                found = by_rows(lambda p, v: (_log_prob(p, ctx.size, v),), SLAB, probs, values, most=None)[0]
                return torch.autograd.grad(found, probs, g, create_graph=further)[0], None, None
        return scores.find(probs).derivative(probs.detach(), values, g.contiguous(), ctx.size), None, None


def _fused_log_prob(probs: Tensor, size: int, value: Tensor) -> Tensor:
    n, shape = probs.shape[-1], broadcast_shapes(probs.shape, value.shape)
    rows = probs.expand(*shape[-probs.ndim : -1], n).reshape(-1, n).contiguous()
    values = (value.expand(shape) > 0).reshape(-1, *rows.shape)
    if torch.is_grad_enabled() and rows.requires_grad:
        result: Tensor = _LogProb.apply(rows, values, size)
    else:
        result = scores.find(rows).log_prob(rows.detach(), values, size)
    return result.view(shape[:-1])


def log_prob(probs: Tensor, size: int, value: Tensor) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, n)``, O(2^k n) time each; ``-inf`` if impossible.

    Differentiable to any order; impossible values and units of probability 0 or 1 have zero gradient.

    Args:
        probs: Inclusion probabilities.
        size: The largest k of any row, at most ``MAX_SIZE``.
        value: k-hot vectors; rows may differ in k.
    """
    return (_fused_log_prob if is_fused(probs, value) else _log_prob)(probs, size, value)


def _log_prob(probs: Tensor, size: int, value: Tensor) -> Tensor:
    probs, value = torch.broadcast_tensors(probs, value.double())
    certain = probs >= 1
    free, rest = probs.masked_fill(certain, 0.0), (1 - probs).masked_fill(certain, 1.0)
    ones, unit = value.topk(size, -1)
    # Slots are the units of the value. Those that hold a certain unit, or none as another row has a larger k, are
    # "drawn" from the beginning.
    filled = (ones == 0) | certain.gather(-1, unit)
    slot_rest = rest.gather(-1, unit)
    slot_free = free.gather(-1, unit).masked_fill(filled, 0.0)
    outside = (free * (1 - value)).unsqueeze(-1)
    outside_sum = outside.sum(-2, keepdim=True)
    contradicted = ((certain & (value == 0)) | ((probs <= 0) & (value == 1))).any(-1)

    per_weight = f = probs.new_zeros(*probs.shape[:-1], 1)
    ratio = probs.new_zeros(*probs.shape[:-1], 1, size)
    for r in range(size + 1):
        slots, without = (torch.tensor(table, dtype=torch.long, device=probs.device) for table in _subsets(size, r))
        member = probs.new_zeros(len(slots), size).scatter(-1, slots, 1)
        f = (member == filled.unsqueeze(-2)).all(-1).to(probs.dtype)
        if r > 0:
            f = f + (per_weight[..., without] * ratio[..., without, slots]).sum(-1)
        if r < size:
            m, c = size - r, (slot_rest.masked_fill(filled, 0.0) @ member.T).unsqueeze(-1)
            ratio = drawing_ratio(slot_rest.unsqueeze(-2), m, c)
            # Of the units outside of the value, the sum of pi r, with what they share in front of it.
            total = (outside_sum + (m - 1) * (m + c) * ((c + m * rest.unsqueeze(-2)).reciprocal() @ outside)) / m
            total = total.squeeze(-1) + (ratio * slot_free.unsqueeze(-2) * (1 - member)).sum(-1)
            # Where T is drawn on the way to a possible value, a weight of one unit is left. Elsewhere there may be next
            # to none, or nothing; f is 0, or the result does not count.
            per_weight = f / total.masked_fill((f == 0) | (total == 0) | contradicted.unsqueeze(-1), 1.0)
    chosen = torch.where((value == 1) & (probs > 0), probs, 1).log().sum(-1)
    return (chosen + f.squeeze(-1).masked_fill(contradicted, 1.0).log()).masked_fill(contradicted, -torch.inf)
