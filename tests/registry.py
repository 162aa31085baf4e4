"""Designs and estimators under test, with the traits that their contracts read: a new member joins by one entry."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from khot import FenchelYoungTopKLoss, TopKCrossEntropy, fenchel_young_topk_loss, sigmoid_topk, topk_cross_entropy
from khot.distributions import (
    Brewer,
    ConditionalPoisson,
    GumbelTopK,
    ParetoSampling,
    PhantomUnit,
    Pivotal,
    Sampford,
    SamplingDesign,
    SequentialPoisson,
    Systematic,
)
from khot.estimators import (
    IMLE,
    AdaptiveStep,
    PerturbedTopK,
    RaoBlackwellStraightThrough,
    ReinMax,
    StraightThrough,
    enumerated,
    reinmax,
    score_function,
    straight_through,
    unordered_set,
)
from tests.inputs import normal


@dataclass(frozen=True)
class DesignCase:
    """A sampling design under test.

    Attributes:
        name: Identifier of the test.
        make: Called as ``make(probs=...)`` or ``make(logits=..., k=...)``, with further keyword arguments.
        reference: Probabilities of the rows of ``support`` under a design without batch dimensions, computed from its
            ``probs`` or ``logits`` by another way than the library's.
        exact_probs: Whether ``make(probs=p).mean`` is ``p``.
        takes_relaxation: Whether ``logits`` go through a relaxation, rather than being natural parameters.
        has_log_prob, has_entropy, has_pairwise: Whether the member defines them, or else raises NotImplementedError.
        largest_scored_k: The largest k for which it has a log_prob.
        long_row: How many units it is quick for.
        slow: Whether the quick tests do without it.
    """

    name: str
    make: Callable[..., SamplingDesign]
    reference: Callable[[SamplingDesign, Tensor], Tensor] | None
    exact_probs: bool = True
    takes_relaxation: bool = True
    has_log_prob: bool = True
    has_entropy: bool = True
    has_pairwise: bool = True
    largest_scored_k: float = math.inf
    long_row: int = 1000
    slow: bool = False


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
    if design.parameter_name == "logits":
        return torch.softmax(support @ design.logits.detach(), 0)
    target = design.probs.detach().numpy()

    def excess(logits: Any) -> Any:
        weight = scipy.special.softmax(support.numpy() @ logits)
        return weight @ support.numpy() - target + logits.sum()

    root = scipy.optimize.root(excess, scipy.special.logit(target), tol=1e-14)
    return torch.softmax(support @ torch.from_numpy(root.x), 0)


def sampford_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    probs = design.probs.detach()
    weight = torch.where(support == 1, probs / (1 - probs), 1).prod(-1) * (support @ (1 - probs))
    return weight / weight.sum()


def brewer_reference(design: SamplingDesign, support: Tensor) -> Tensor:
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


def systematic_fixed_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    return pmf_from_points(design.probs.tolist(), tuple(range(support.shape[-1])), support)


def systematic_random_reference(design: SamplingDesign, support: Tensor) -> Tensor:
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


def pareto_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    p = design.probs.detach().numpy()
    log_odds, spread = scipy.special.logit(p), p * (1 - p)
    return pareto_pmf(log_odds - spread * (p - 0.5) / spread.sum() ** 2, support)


def pareto_plain_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    return pareto_pmf(scipy.special.logit(design.probs.detach().numpy()), support)


def pareto_exact_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    """The odds by a general-purpose root finder."""
    p = design.probs.detach().numpy()

    def excess(log_odds: Any) -> Any:
        return pareto_pmf(log_odds, support).numpy() @ support.numpy() - p + log_odds.sum()

    return pareto_pmf(scipy.optimize.root(excess, scipy.special.logit(p), tol=1e-13).x, support)


def sequential_poisson_reference(design: SamplingDesign, support: Tensor) -> Tensor:
    """Between the times at which a probability reaches 1, polynomials of the time."""
    p = design.probs.detach().numpy()
    return order_sampling_pmf(lambda t: np.minimum(1, p * t), lambda t: p * (p * t < 1), [0.0, *sorted(1 / p)], support)


def gumbel_topk_reference(design: SamplingDesign, support: Tensor) -> Tensor:
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
    DesignCase("sampford", Sampford, sampford_reference, has_entropy=False),
    DesignCase("brewer", Brewer, brewer_reference, has_entropy=False, has_pairwise=False, largest_scored_k=10),
    DesignCase("systematic_fixed", partial(Systematic, order="fixed"), systematic_fixed_reference),
    DesignCase(
        "systematic_random",
        partial(Systematic, order="random"),
        systematic_random_reference,
        has_log_prob=False,
        has_entropy=False,
        has_pairwise=False,
    ),
    DesignCase("pareto", ParetoSampling, pareto_reference, exact_probs=False, has_entropy=False, has_pairwise=False),
    DesignCase(
        "pareto_exact",
        partial(ParetoSampling, adjust="exact"),
        pareto_exact_reference,
        has_entropy=False,
        has_pairwise=False,
        slow=True,
    ),
    DesignCase(
        "pareto_plain",
        partial(ParetoSampling, adjust=None),
        pareto_plain_reference,
        exact_probs=False,
        has_entropy=False,
        has_pairwise=False,
    ),
    DesignCase(
        "sequential_poisson",
        SequentialPoisson,
        sequential_poisson_reference,
        exact_probs=False,
        has_entropy=False,
        has_pairwise=False,
        long_row=100,
    ),
    DesignCase(
        "gumbel_topk",
        GumbelTopK,
        gumbel_topk_reference,
        takes_relaxation=False,
        has_entropy=False,
        has_pairwise=False,
        long_row=200,
    ),
]
# Of a size of its own, so that not all of the contract holds; ``k`` is ignored.
PHANTOM = DesignCase("phantom_unit", lambda logits, k: PhantomUnit(ConditionalPoisson, logits=logits), None)


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


def reinmax_on(design: SamplingDesign, **kwargs: Any) -> ReinMax:
    """With a relaxation in the place of one that the design does not know."""
    return ReinMax(design, relaxation=sigmoid_topk if isinstance(design, GumbelTopK) else None, **kwargs)


ESTIMATORS = [
    EstimatorCase("straight_through", StraightThrough),
    EstimatorCase("reinmax", reinmax_on, exact_for_linear=False),
]


@dataclass(frozen=True)
class PerturbedCase:
    """A pathwise gradient estimator under test that draws the top k of perturbed logits.

    Attributes:
        name: Identifier of the test.
        make: Called as ``make(logits=..., k=...)``, with further keyword arguments.
    """

    name: str
    make: Callable[..., Any]


PERTURBED = [
    PerturbedCase("perturbed_topk", PerturbedTopK),
    PerturbedCase("imle", IMLE),
    PerturbedCase("imle_adaptive", lambda **kwargs: IMLE(step=AdaptiveStep(), **kwargs)),
    PerturbedCase("imle_sum_of_gamma", partial(IMLE, noise="sum_of_gamma")),
    PerturbedCase("rao_blackwell_straight_through", partial(RaoBlackwellStraightThrough, 0.5)),
]


@dataclass(frozen=True)
class FunctionCase:
    """An estimator for custom loops under test.

    Attributes:
        name: Identifier of the test, which contains the name of the function.
        estimate: Called as ``estimate(design, f, num_samples)``.
        unbiased: Whether the expected gradient is exact.
        min_samples: The least ``num_samples`` with these settings.
        needs_log_prob: Whether the design has to have a log_prob.
        plain_mean: Whether the value is the mean of f over the draws, all with the same weight.
        distinct: Whether the draws differ from each other.
        needs_relaxation: Whether the design has to have a relaxation, or to be ConditionalPoisson.
    """

    name: str
    estimate: Callable[..., Tensor]
    unbiased: bool = True
    min_samples: int = 1
    needs_log_prob: bool = True
    plain_mean: bool = True
    distinct: bool = False
    needs_relaxation: bool = False


FUNCTIONS = [
    FunctionCase("score_function", score_function),
    FunctionCase("score_function_moving_average", partial(score_function, baseline="moving_average")),
    FunctionCase("score_function_leave_one_out", partial(score_function, baseline="leave_one_out"), min_samples=2),
    FunctionCase("unordered_set", unordered_set, plain_mean=False, distinct=True),
    FunctionCase("enumerated", enumerated, plain_mean=False),
    FunctionCase("straight_through", straight_through, unbiased=False, needs_log_prob=False),
    FunctionCase("reinmax", reinmax, unbiased=False, needs_log_prob=False, needs_relaxation=True),
]


@dataclass(frozen=True)
class LossCase:
    """A loss under test, of scores (..., 6).

    Attributes:
        name: Identifier of the test.
        function: Called as ``function(x, target, softness, reduction)``.
        module: From softness and reduction to the module.
        targets: From a seed and the number of rows to targets.
        value: The loss of one row by another way than the library's, from x, target and softness.
    """

    name: str
    function: Callable[..., Tensor]
    module: Callable[..., torch.nn.Module]
    targets: Callable[[int, int], Tensor]
    value: Callable[[Tensor, Tensor, float], float]


def largest_of_the_mask(x: Tensor, target: Tensor, strength: float) -> float:
    """max_y <x - ..., y> by a general-purpose solver: R(target) - <x, target> - min (R(y) - <x, y>), k = 2.5."""
    scores = x.numpy()

    def regularised(y: Any) -> Any:
        return strength / 2 * (y * y).sum() - y @ scores

    best = scipy.optimize.minimize(
        regularised,
        np.full(len(scores), 2.5 / len(scores)),
        jac=lambda y: strength * y - scores,
        bounds=[(0, 1)] * len(scores),
        constraints={"type": "eq", "fun": lambda y: y.sum() - 2.5, "jac": lambda y: np.ones_like(y)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    return regularised(target.numpy()) - best.fun


def cross_entropy_of_sizes(x: Tensor, target: Tensor, temperature: float) -> float:
    """-log(0.5 P(top 1) + 0.3 P(top 3)), the masks by a general-purpose root finder."""
    scores, inside = x.numpy(), 0.0
    for size, weight in ((1, 0.5), (3, 0.3)):
        t = scipy.optimize.brentq(lambda t, k=size: scipy.special.expit((scores - t) / temperature).sum() - k, -99, 99)
        inside += weight * scipy.special.expit((scores[target] - t) / temperature)
    return -math.log(inside)


LOSSES = [
    LossCase(
        "fenchel_young",
        lambda x, target, strength=1.0, reduction="mean": fenchel_young_topk_loss(
            x, target, 2.5, strength, reduction=reduction
        ),
        lambda strength, reduction: FenchelYoungTopKLoss(2.5, strength, reduction=reduction),
        lambda seed, rows: sigmoid_topk(normal(rows, 6, seed=seed), 2.5),
        largest_of_the_mask,
    ),
    LossCase(
        "topk_cross_entropy",
        lambda x, target, temperature=1.0, reduction="mean": topk_cross_entropy(
            x, target, [0.5, 0.0, 0.3], sigmoid_topk, temperature, reduction
        ),
        lambda temperature, reduction: TopKCrossEntropy([0.5, 0.0, 0.3], sigmoid_topk, temperature, reduction),
        lambda seed, rows: torch.randint(6, (rows,), generator=torch.Generator().manual_seed(seed)),
        cross_entropy_of_sizes,
    ),
]
