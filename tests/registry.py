"""The members of each family, with the traits that their contract tests read: a new member joins by one entry."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import scipy.optimize
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from khot import capped_simplex_map, log_sigmoid_topk, sigmoid_topk
from khot.distributions import ConditionalPoisson, Pivotal, SamplingDesign
from khot.estimators import StraightThrough
from khot.relaxations import Link


@dataclass(frozen=True)
class RelaxationCase:
    """A relaxed top-k mask under test.

    Attributes:
        name: Identifier of the test.
        map: Called as ``map(x, k, softness, dim=...)``.
        cdf: The link function on float64 NumPy arrays, from another source than the library's.
        softness: What the map calls its softness.
        log: The logarithm of the map, if there is one.
        smooth: Whether the map is twice differentiable everywhere.
        symmetric: Whether F(-z) = 1 - F(z).
    """

    name: str
    map: Callable[..., Tensor]
    cdf: Callable[[Any], Any]
    softness: str = "temperature"
    log: Callable[..., Tensor] | None = None
    smooth: bool = True
    symmetric: bool = True


class Cauchy(Link):
    """A link that the library does not ship, with tails far heavier than any that it does."""

    def value(self, z: Tensor) -> Tensor:
        return torch.atan2(torch.ones_like(z), -z) / torch.pi

    def complement(self, z: Tensor) -> Tensor:
        return self.value(-z)

    def slope(self, z: Tensor) -> Tensor:
        return 1 / (torch.pi * (1 + z * z))

    def inverse(self, p: Tensor) -> Tensor:
        return torch.tan(torch.pi * (p - 0.5))


RELAXATIONS = [
    RelaxationCase("sigmoid_topk", sigmoid_topk, scipy.special.expit, log=log_sigmoid_topk),
    RelaxationCase("capped_simplex_map", partial(capped_simplex_map, link=Cauchy()), scipy.stats.cauchy.cdf, softness="scale"),
]


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


def conditional_poisson_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    """exp<theta, x>, normalised over the support; the logits of given ``probs`` by a general-purpose root finder."""
    if design._given == "logits":
        return torch.softmax(support @ design.logits.detach(), 0)
    target = design.probs.detach().numpy()

    def excess(logits: Any) -> Any:
        weight = scipy.special.softmax(support.numpy() @ logits)
        return weight @ support.numpy() - target + logits.sum()

    root = scipy.optimize.root(excess, scipy.special.logit(target), tol=1e-14)
    return torch.softmax(support @ torch.from_numpy(root.x), 0)


DESIGNS = [
    DesignCase("conditional_poisson", ConditionalPoisson, conditional_poisson_reference, takes_relaxation=False),
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


@dataclass(frozen=True)
class EstimatorCase:
    """A pathwise gradient estimator under test, a distribution that wraps a design.

    Attributes:
        name: Identifier of the test.
        wrap: Called as ``wrap(design)`` or ``wrap(design, log_prob=...)``.
        exact_for_linear: Whether E[<c, x>] gets its exact gradient from every single draw.
    """

    name: str
    wrap: Callable[..., Any]
    exact_for_linear: bool = True


ESTIMATORS = [EstimatorCase("straight_through", StraightThrough)]
