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
from torch.nn.functional import pad, threshold

from khot._contents import can_look
from khot.kernels.draws import balance
from khot.kernels.random_numbers import uniform

from .once import Once, or_new

SLAB = 2**18  # subsets of slots, times units, of the values scored at a time on a CPU
LARGEST_SHARE = 1 - 2.0**-52  # so that a share of a sum is less than the sum, whatever the rounding
LEAST = 1e-40  # smallest weight, so that derivatives of any order stay finite
MAX_SIZE = 10  # the largest k for which log_prob is feasible: it holds C(k, k / 2) n numbers for every value


@torch.no_grad()
def sample(
    probs: Tensor,
    k: Tensor,
    size: int,
    shape: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    kept: Once | None = None,
) -> Tensor:
    """Draws k-hot vectors ``(*shape, *batch, n)``, bool. O(nk) time each.

    Units of probability 0 are never drawn, and units of probability 1 always.

    Args:
        probs: Inclusion probabilities, which are balanced here.
        k: Number of ones, of the shape of the batch.
        size: At least the largest k of any row; the number of steps if ``k`` cannot be read.
        shape: Shape of the independent draws.
        generator: Source of randomness; by default torch's own.
        kept: What was already made from these probabilities.
    """
    whole = *shape, *probs.shape
    probs = or_new(kept).made_if_constant("balanced", balance, probs, k)
    if probs.device.type == "cpu" and k.numel() and can_look(probs, k):
        size = int((k - (probs >= 1).sum(-1)).max())
    u = uniform((*whole[:-1], size), probs.dtype, probs.device, generator)
    return _draw_by_draw(probs.expand(whole), k, u)


def _draw_by_draw(probs: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """One k-hot vector for each row: bool like ``probs``.

    Args:
        probs: Inclusion probabilities ``(..., n)``, balanced.
        k: Number of ones ``(...)``.
        u: Uniform numbers ``(..., size)``, at least as many as there are units to draw; the first serve the last units.
    """
    n, size = probs.shape[-1], u.shape[-1]
    certain = probs >= 1
    left = (k - certain.sum(-1)).unsqueeze(-1)
    u = u.clamp(max=LARGEST_SHARE).masked_fill(left <= torch.arange(size, device=u.device), torch.inf)
    # Rows that have fewer units to draw join later: until then their infinite numbers draw a spare unit, the last one.
    free, rest = (pad(x, (0, 1)) for x in (probs.masked_fill(certain, 0.0), (1 - probs).masked_fill(certain, 1.0)))
    c, may_write = torch.zeros_like(free[..., :1]), can_look(free, u)
    for m in range(size, 0, -1):
        unit = _next_unit(free[..., :n], rest[..., :n], c, m, u[..., m - 1 : m], may_write)
        # A vmap cannot write to tensors that all rows share.
        free = free.scatter_(-1, unit, 0.0) if may_write else free.scatter(-1, unit, 0.0)
        c = c + rest.gather(-1, unit)
    return free[..., :n] != probs


def _next_unit(free: Tensor, rest: Tensor, c: Tensor, m: int, u: Tensor, may_search: bool) -> Tensor:
    """The unit ``(..., 1)`` that is drawn next; under a vmap, where a search needs another layout, by counting."""
    rarity = torch.add(c, rest, alpha=m) / (c + m)
    cumulative = torch.addcdiv(free, free, rarity, value=m - 1).cumsum(-1)  # of m w
    target = u * cumulative[..., -1:]
    if may_search:
        return torch.searchsorted(cumulative, target, right=True)
    return (cumulative <= target).sum(-1, keepdim=True)


class Subsets(NamedTuple):
    """The proper subsets of some slots, by size and then in lexicographic order.

    Attributes:
        lacks: ``(2^slots - 1, slots)`` float64: 1 for the slots that a subset lacks, m of them.
        share: The same: 1 / m for the slots in a subset.
        others: ``(2^slots - 1, 1)``, m - 1.
        larger: Like ``lacks``, integers: the subset of the next size that results from adding a missing slot.
        counts: The number of subsets of each size.
    """

    lacks: Tensor
    share: Tensor
    others: Tensor
    larger: Tensor
    counts: tuple[int, ...]


def _subsets(size: int, device: torch.device) -> Subsets:
    *tables, larger = _listed_subsets(size)
    lacks, share, others = (torch.tensor(x, dtype=torch.float64, device=device).view(len(x), -1) for x in tables)
    counts = tuple(math.comb(size, r) for r in range(size + 1))
    places = torch.tensor(larger, dtype=torch.long, device=device).view(lacks.shape)
    return Subsets(lacks, share, others, places, counts)


@functools.lru_cache
def _listed_subsets(size: int) -> tuple[list[Any], ...]:
    levels = [list(combinations(range(size), r)) for r in range(size + 1)]
    place = [{subset: i for i, subset in enumerate(level)} for level in levels]
    subsets = [subset for level in levels[:-1] for subset in level]
    lacks = [[float(j not in t) for j in range(size)] for t in subsets]
    share = [[(j in t) / (size - len(t)) for j in range(size)] for t in subsets]
    larger = [[place[len(t) + 1].get(tuple(sorted({*t, j})), 0) for j in range(size)] for t in subsets]
    return lacks, share, [[float(size - len(t) - 1)] for t in subsets], larger


def log_prob(probs: Tensor, size: int, value: Tensor, kept: Once | None = None) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, n)``, O(2^k n) time each; ``-inf`` if impossible.

    Differentiable to any order; impossible values and units of probability 0 or 1 have zero gradient.

    Args:
        probs: Inclusion probabilities.
        size: The largest k of any row, at most ``MAX_SIZE``.
        value: k-hot vectors; rows may differ in k.
        kept: What was already made for this size.
    """
    size, certain, kept = max(1, size), probs >= 1, or_new(kept)
    impossible = torch.where(value > 0, probs <= 0, certain).any(-1)  # not 1 - probs, which rounds to 1 for rare units
    free = probs.masked_fill(certain, 0.0)
    inside = free * value
    # Slots are the units of the value. Those with a certain unit, or without a unit because another row has a larger k,
    # get probability 1, so that they are drawn first.
    slots = threshold(inside, 0.0, 1.0).topk(size, -1, largest=False).values
    reached = _chance(kept.made("subsets", _subsets, size, probs.device), slots, free - inside)
    return torch.cat((slots, reached), -1).log().sum(-1).masked_fill(impossible, -torch.inf)


def _chance(subsets: Subsets, slots: Tensor, outside: Tensor) -> Tensor:
    """f of all slots, without their probabilities, ``(..., 1)``."""
    rest = 1 - slots + LEAST
    c = (rest @ subsets.share.T).unsqueeze(-1)  # divided by m, as is the next line
    spread = torch.addcmul(subsets.others, subsets.others, c)
    inverse = (c + torch.cat((1 - outside, rest), -1).unsqueeze(-2)).reciprocal()
    of_outside, of_slots = inverse.split((outside.shape[-1], slots.shape[-1]), -1)
    ratio = torch.addcmul(subsets.lacks, subsets.lacks, spread * of_slots)  # m times r
    of_others = torch.addcmul(outside.sum(-1)[..., None, None], spread, of_outside @ outside.unsqueeze(-1))
    weight = of_others + ratio @ slots.unsqueeze(-1)
    steps = (ratio / (weight + LEAST)).split(subsets.counts[:-1], -2)  # weight is m times W
    f, larger = steps[0].squeeze(-2), subsets.larger.split(subsets.counts[:-1])
    none = f.new_zeros(())
    for of_size, to, count in zip(steps[1:], larger[1:], subsets.counts[2:], strict=True):
        drawn = (f.unsqueeze(-1) * of_size).flatten(-2)
        f = none.expand(*drawn.shape[:-1], count).scatter_add(-1, to.flatten().expand(drawn.shape), drawn)
    return f
