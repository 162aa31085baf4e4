"""Laws of the sampling designs by other ways than the library's: definitions, enumeration, general-purpose solvers.

Each gives the probabilities of the rows of ``support`` under a design without batch dimensions, from its ``probs`` or
``logits``.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special
import torch
from torch import Tensor

from khot.distributions import SamplingDesign


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


def pivotal(design: SamplingDesign, support: Tensor) -> Tensor:
    """The mean over all orders of the tree in which, round by round, each of the first half meets one of the second."""
    pmf = torch.zeros(len(support), dtype=torch.float64)
    for order in itertools.permutations(range(support.shape[-1])):
        trees: list[Any] = list(order)
        while len(trees) > 1:
            half = len(trees) // 2
            trees = [*zip(trees[:half], trees[half:], strict=False), *trees[2 * half :]]
        pmf += pmf_from_duels(design.probs.tolist(), trees[0], support)
    return pmf / math.factorial(support.shape[-1])


def conditional_poisson(design: SamplingDesign, support: Tensor) -> Tensor:
    """exp<theta, x>, normalised over the support; the logits of given ``probs`` by a general-purpose root finder."""
    if design.parameter_name == "logits":
        return torch.softmax(support @ design.logits.detach(), 0)
    target = design.probs.detach().numpy()

    def excess(logits: Any) -> Any:
        weight = scipy.special.softmax(support.numpy() @ logits)
        return weight @ support.numpy() - target + logits.sum()

    root = scipy.optimize.root(excess, scipy.special.logit(target), tol=1e-14)
    return torch.softmax(support @ torch.from_numpy(root.x), 0)


def sampford(design: SamplingDesign, support: Tensor) -> Tensor:
    probs = design.probs.detach()
    weight = torch.where(support == 1, probs / (1 - probs), 1).prod(-1) * (support @ (1 - probs))
    return weight / weight.sum()


def brewer(design: SamplingDesign, support: Tensor) -> Tensor:
    """The sum over the orders in which a subset may be drawn, with Brewer's weights as published."""
    probs = design.probs.tolist()

    def probability_of(order: tuple[int, ...]) -> float:
        probability = 1.0
        for r, unit in enumerate(order):
            rest = len(order) - sum(probs[i] for i in order[:r])
            weights = [
                0.0 if j in order[:r] else p * (rest - p) / (rest - p * (len(order) - r)) for j, p in enumerate(probs)
            ]
            probability *= weights[unit] / sum(weights)
        return probability

    subsets = [row.nonzero().flatten().tolist() for row in support]
    pmf = [sum(probability_of(order) for order in itertools.permutations(subset)) for subset in subsets]
    return torch.tensor(pmf, dtype=torch.float64)


def pmf_from_points(probs: list[float], order: tuple[int, ...], support: Tensor) -> Tensor:
    """Systematic sampling by its definition: where the points u + integer fall, for u between any two cuts."""
    ends = list(itertools.accumulate((probs[unit] for unit in order), initial=0.0))
    cuts = sorted({0.0, 1.0, *(end % 1.0 for end in ends)})
    law: defaultdict[frozenset[int], float] = defaultdict(float)
    for left, right in itertools.pairwise(cuts):
        points = [(left + right) / 2 + m for m in range(len(probs))]
        lines = zip(order, itertools.pairwise(ends), strict=True)
        if right - left > 1e-12:
            law[frozenset(i for i, (start, end) in lines if any(start <= u < end for u in points))] += right - left
    subsets = [frozenset(row.nonzero().flatten().tolist()) for row in support]
    return torch.tensor([law[subset] for subset in subsets], dtype=torch.float64)


def systematic_fixed(design: SamplingDesign, support: Tensor) -> Tensor:
    return pmf_from_points(design.probs.tolist(), tuple(range(support.shape[-1])), support)


def systematic_random(design: SamplingDesign, support: Tensor) -> Tensor:
    orders = list(itertools.permutations(range(support.shape[-1])))
    return torch.stack([pmf_from_points(design.probs.tolist(), order, support) for order in orders]).mean(0)


def order_sampling_pmf(cdf: Callable[[Any], Any], density: Callable[[Any], Any], edges: Any, support: Tensor) -> Tensor:
    """P(S) = int sum_S f_j prod_{S - j} F prod_{not S} (1 - F) dt, by Gauss' rule on each piece.

    Args:
        cdf: Of the ranking variables at times ``(N, 1)``, ``(N, n)``.
        density: Their densities.
        edges: Of the pieces.
        support: Subsets as rows of 0 and 1.
    """
    points, weights = np.polynomial.legendre.leggauss(200)
    pmf = np.zeros(len(support))
    for left, right in itertools.pairwise(edges):
        t, width = (left + (right - left) * (points + 1) / 2)[:, None], (right - left) / 2
        below, slope = cdf(t), density(t)
        for row, subset in enumerate(support.numpy() == 1):
            terms = [
                slope[:, j] * below[:, subset & (np.arange(len(subset)) != j)].prod(-1) for j in subset.nonzero()[0]
            ]
            pmf[row] += width * (weights * sum(terms) * (1 - below[:, ~subset]).prod(-1)).sum()
    return torch.from_numpy(pmf)


def pareto_pmf(log_odds: Any, support: Tensor) -> Tensor:
    """Time v / (1 - v): the ranking variables have the distribution functions o v / (1 - v + o v), o the odds."""
    odds = np.exp(log_odds - log_odds.mean())

    def cdf(v: Any) -> Any:
        return odds * v / (1 - v + odds * v)

    return order_sampling_pmf(cdf, lambda v: odds / (1 - v + odds * v) ** 2, [0.0, 0.5, 1.0], support)


def pareto(design: SamplingDesign, support: Tensor) -> Tensor:
    p = design.probs.detach().numpy()
    log_odds, spread = scipy.special.logit(p), p * (1 - p)
    return pareto_pmf(log_odds - spread * (p - 0.5) / spread.sum() ** 2, support)


def pareto_plain(design: SamplingDesign, support: Tensor) -> Tensor:
    return pareto_pmf(scipy.special.logit(design.probs.detach().numpy()), support)


def pareto_exact(design: SamplingDesign, support: Tensor) -> Tensor:
    """The odds by a general-purpose root finder."""
    p = design.probs.detach().numpy()

    def excess(log_odds: Any) -> Any:
        return pareto_pmf(log_odds, support).numpy() @ support.numpy() - p + log_odds.sum()

    return pareto_pmf(scipy.optimize.root(excess, scipy.special.logit(p), tol=1e-13).x, support)


def gumbel_topk(design: SamplingDesign, support: Tensor) -> Tensor:
    """Successive sampling by its definition: sums over all orders of drawing."""

    def pmf(logits: Any) -> Tensor:
        weight = np.exp(logits - logits.max())
        law = []
        for row in support:
            orders = itertools.permutations(row.nonzero().flatten().tolist())
            law.append(
                sum(math.prod(weight[list(o)] / (weight.sum() - np.cumsum([0, *weight[list(o)]])[:-1])) for o in orders)
            )
        return torch.tensor(law, dtype=torch.float64)

    if design.parameter_name == "logits":
        return pmf(design.logits.detach().numpy())
    target = design.probs.detach().numpy()

    def excess(logits: Any) -> Any:
        return pmf(logits).numpy() @ support.numpy() - target + logits.sum()

    return pmf(scipy.optimize.root(excess, np.log(target), tol=1e-13).x)
