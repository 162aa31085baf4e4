"""The members of each family, with the traits that their contract tests read: a new member joins by one entry."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from khot.distributions import Pivotal, SamplingDesign


@dataclass(frozen=True)
class DesignCase:
    """A sampling design under test.

    Attributes:
        name: Identifier of the test.
        make: Called as ``make(probs=...)`` or ``make(logits=..., k=...)``, with further keyword arguments.
        reference: Probabilities of the rows of ``support`` under a design without batch dimensions, computed from its ``probs``
            or ``logits`` by another way than the library's.
        exact_probs: Whether ``make(probs=p).mean`` is ``p``.
        takes_relaxation: Whether ``logits`` go through a relaxation, rather than being natural parameters.
        has_log_prob, has_entropy, has_pairwise: Whether the member defines them; otherwise it raises NotImplementedError.
    """

    name: str
    make: Callable[..., SamplingDesign]
    reference: Callable[[SamplingDesign, Tensor], Tensor]
    exact_probs: bool = True
    takes_relaxation: bool = True
    has_log_prob: bool = True
    has_entropy: bool = True
    has_pairwise: bool = True


def pmf_from_duels(probs: list[float], tree: Any, support: Tensor) -> Tensor:
    """The pivotal method by its definition: follows both outcomes of every duel.

    Args:
        probs: Inclusion probabilities.
        tree: Who duels whom: a unit, or a pair of trees whose last undecided units meet.
        support: Subsets as rows of 0 and 1.
    """

    def play(tree: Any) -> list[tuple[int, float, frozenset[int], float]]:
        """The possible (undecided unit, its probability, units chosen so far, probability of all this)."""
        if isinstance(tree, int):
            return [(tree, probs[tree], frozenset(), 1.0)]
        outcomes = []
        for (i, p, some, v), (j, q, others, w) in itertools.product(play(tree[0]), play(tree[1])):
            if p + q < 1 - 1e-12:
                i_wins = p / (p + q) if p + q > 0 else 1.0
                outcomes += [(i, p + q, some | others, v * w * i_wins), (j, p + q, some | others, v * w * (1 - i_wins))]
            else:
                i_wins, rest, chosen = (1 - q) / (2 - p - q) if p + q < 2 else 1.0, max(p + q - 1, 0.0), some | others
                outcomes += [(j, rest, chosen | {i}, v * w * i_wins), (i, rest, chosen | {j}, v * w * (1 - i_wins))]
        return [outcome for outcome in outcomes if outcome[-1] > 0]

    law: defaultdict[frozenset[int], float] = defaultdict(float)
    for last, p, chosen, weight in play(tree):
        law[chosen | {last} if p > 0.5 else chosen] += weight
    subsets = [frozenset(row.nonzero().flatten().tolist()) for row in support]
    return torch.tensor([law[subset] for subset in subsets], dtype=torch.float64)


def pivotal_fixed_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    probs = design.probs.tolist()
    return pmf_from_duels(probs, functools.reduce(lambda tree, unit: (tree, unit), range(len(probs))), support)


def pivotal_random_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    """The mean over all orders of the tree in which, round by round, each of the first half meets one of the second."""
    pmf = torch.zeros(len(support), dtype=torch.float64)
    for order in itertools.permutations(range(support.shape[-1])):
        trees: list[Any] = list(order)
        while len(trees) > 1:
            half = len(trees) // 2
            trees = [*zip(trees[:half], trees[half:], strict=False), *trees[2 * half :]]
        pmf += pmf_from_duels(design.probs.tolist(), trees[0], support)
    return pmf / math.factorial(support.shape[-1])


DESIGNS = [
    DesignCase("pivotal_fixed", partial(Pivotal, order="fixed"), pivotal_fixed_reference),
    DesignCase(
        "pivotal_random",
        partial(Pivotal, order="random"),
        pivotal_random_reference,
        has_log_prob=False,
        has_entropy=False,
        has_pairwise=False,
    ),
]
