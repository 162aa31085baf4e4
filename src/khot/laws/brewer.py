r"""Brewer's draw-by-draw method: exactly the given inclusion probabilities from k draws of one unit each.

Let m be the number of units still to draw, and c the sum of :math:`1 - \pi_i` over those drawn. The weight of the next
unit j is

.. math:: w_j = \pi_j r_j, \qquad r_j = \frac{1}{m} + \frac{(m - 1)(m + c)}{m \, (c + m (1 - \pi_j))},

which equals the published :math:`\pi_j (k - a - \pi_j) / (k - a - \pi_j m)`, where a is the sum of :math:`\pi_i` over
those drawn, but contains no differences. Units of probability 1 are drawn first.

The probability of a vector is a sum over the orders of its units. As m and c only depend on the set T of units drawn so
far, so does the probability f(T) that exactly this set is drawn first. The sum thus runs over subsets:

.. math:: f(T) = \sum_{j \in T} f(T \setminus j) \, w_j / W, \qquad W = \sum_{i \notin T \setminus j} w_i

where w and W belong to :math:`T \setminus j`. The factors :math:`\pi_j` are taken out of the sum.

Probabilities are float64, ``(*batch, n)`` with rows that sum to k. Arguments are not checked here.

References:
    [1] Brewer (1975), "A simple procedure for sampling pi-ps wor", Australian Journal of Statistics 17(3).
    [2] Tillé (2006), "Sampling Algorithms", chapter 6.
"""

import functools
import math
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._torch_internals import count_as_constant
from khot._tracing import broadcast_shapes
from khot.kernels.call import is_first_derivative, is_plain
from khot.kernels.draws import balance, brewer_draw, draw_by_draw, scores
from khot.kernels.exact.row_slabs import by_rows
from khot.kernels.operators.autograd import has_derivative
from khot.kernels.random_numbers import uniform

from . import unit_by_unit
from .kept import Kept, kept_if_constant

SLAB = 2**18  # subsets of slots, times units, of the values scored at a time on a CPU
LEAST = 1e-40  # smallest weight, so that derivatives of any order stay finite
MAX_SIZE = 10  # the largest k for which log_prob is feasible: it holds C(k, k / 2) n numbers for every value


@torch.no_grad()
def sample(
    probs: Tensor,
    k: Tensor,
    size: int,
    shape: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Draws k-hot vectors ``(*shape, *batch, n)``, bool. O(nk) time each.

    Units of probability 0 are never drawn, and units of probability 1 always.

    Args:
        probs: Inclusion probabilities, which are balanced here.
        k: Number of ones, of the shape of the batch.
        size: At least the largest k of any row; the number of steps if ``k`` cannot be read.
        shape: Shape of the independent draws.
        generator: Source of randomness; by default torch's own.
        kept: Storage for the balanced probabilities.
    """
    whole = *shape, *probs.shape
    drawn = unit_by_unit.sample(brewer_draw, probs, k, math.prod(shape), generator)
    if drawn is not None:
        return drawn.view(whole)
    probs = kept_if_constant(kept, balance, probs, k)

    def number(m: int) -> Tensor:
        return uniform((*whole[:-1], 1), probs.dtype, probs.device, generator)

    return draw_by_draw(probs.expand(whole), k, size, number)


class Subsets(NamedTuple):
    """The subsets of some slots, by size and then in lexicographic order.

    Attributes:
        member: ``(2^slots, slots)`` float64: 1 for the slots in a subset.
        larger: ``(2^slots, slots)`` integers: the subset of the next size that results from adding a missing slot.
        counts: The number of subsets of each size.
    """

    member: Tensor
    larger: Tensor
    counts: tuple[int, ...]


def _subsets(size: int, device: torch.device) -> Subsets:
    member, larger = _listed_subsets(size)
    counts = tuple(math.comb(size, r) for r in range(size + 1))
    return Subsets(
        torch.tensor(member, dtype=torch.float64, device=device).view(len(member), size),
        torch.tensor(larger, dtype=torch.long, device=device).view(len(larger), size),
        counts,
    )


@count_as_constant  # tracing into the cache would make the compiler warn
def _listed_subsets(size: int) -> tuple[list[list[int]], list[list[int]]]:
    return _kept_subsets(size)


@functools.lru_cache
def _kept_subsets(size: int) -> tuple[list[list[int]], list[list[int]]]:
    levels = [list(combinations(range(size), r)) for r in range(size + 1)]
    place = [{subset: i for i, subset in enumerate(level)} for level in levels] + [{}]
    subsets = [subset for level in levels for subset in level]
    member = [[int(j in subset) for j in range(size)] for subset in subsets]
    larger = [[place[len(t) + 1].get(tuple(sorted({*t, j})), 0) for j in range(size)] for t in subsets]
    return member, larger


def is_fused(probs: Tensor, value: Tensor) -> bool:
    """Whether loops score these values all at once; they have no derivative in the value."""
    if not (is_plain(probs, value) and probs.numel() and value.numel()):
        return False
    return scores.find(probs) is not None and not has_derivative(value, torch.is_grad_enabled())


class _LogProb(Function):
    """The log-probability as a function of probabilities ``(rows, n)`` and values ``(draws, rows, n)``."""

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
                slab = SLAB >> ctx.size
                found = by_rows(lambda p, v: (_log_prob(p, ctx.size, v),), slab, probs, values, most=None)[0]
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
    impossible = torch.where(value > 0, probs <= 0, certain).any(-1)  # not 1 - probs, which rounds to 1 for rare units
    free, rest = probs.masked_fill(certain, 0.0), (1 - probs).masked_fill(certain, 1.0)
    inside, unit = free * value, value.topk(size, -1).indices
    outside = free - inside
    # Slots are the units of the value. Slots with a certain unit, or without a unit because another row has a larger k,
    # count as "drawn" from the beginning.
    slot_free, slot_rest = inside.gather(-1, unit), rest.gather(-1, unit)
    filled = slot_free == 0
    subsets = _subsets(size, probs.device)
    start = (subsets.member == filled.unsqueeze(-2)).all(-1) & ~impossible.unsqueeze(-1)
    step = _steps(subsets.member[:-1], slot_rest, slot_rest.masked_fill(filled, 0.0), slot_free, rest, outside)
    reached = _chance(subsets, start.double(), step)
    chosen = slot_free.masked_fill(filled, 1.0).log().sum(-1)
    return (chosen + reached.masked_fill(impossible, 1.0).log()).masked_fill(impossible, -torch.inf)


def _steps(
    member: Tensor, slot_rest: Tensor, slot_distance: Tensor, slot_free: Tensor, rest: Tensor, outside: Tensor
) -> Tensor:
    """``r_j / W`` for each subset except the full one, and each slot that it lacks, ``(..., subsets, slots)``.

    On the way to a possible value, W is never below 1 / m. For other subsets, for which f is 0, W may be 0.
    """
    m, lacks = (1 - member).sum(-1), 1 - member
    c = slot_distance @ member.T
    spread, c = ((m - 1) * (1 + c / m)).unsqueeze(-1), (c / m).unsqueeze(-1)
    ratio = lacks * (1 + spread / (c + slot_rest.unsqueeze(-2)))  # m times r
    of_others = spread * ((c + rest.unsqueeze(-2)).reciprocal() @ outside.unsqueeze(-1))
    weight = outside.sum(-1)[..., None, None] + of_others + ratio @ slot_free.unsqueeze(-1)  # m times W
    return ratio / weight.clamp(min=LEAST)


def _chance(subsets: Subsets, start: Tensor, step: Tensor) -> Tensor:
    """f of all slots, starting with 1 at the subset ``start``."""
    starts, steps = start.split(subsets.counts, -1), step.split(subsets.counts[:-1], -2)
    f = starts[0]
    for of_size, larger, begun in zip(steps, subsets.larger.split(subsets.counts), starts[1:], strict=False):
        drawn = (f.unsqueeze(-1) * of_size).flatten(-2)
        f = begun.scatter_add(-1, larger.flatten().expand(drawn.shape), drawn)
    return f.squeeze(-1)
