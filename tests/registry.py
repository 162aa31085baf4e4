"""Designs and estimators under test, with the traits that their contracts read: a new member needs one entry.

What a class or a function says of itself (which parts of its law a design has, whether an estimator is unbiased) is
read from it. ``public`` of a case is what it tests: tests/test_public_api.py looks for every public name among them.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyro
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from torch import Tensor
from torch.distributions.constraints import Constraint

from khot import (
    AutoKHot,
    KHotReparam,
    KHotSwap,
    compare_estimators,
    fenchel_young_topk_loss,
    knn_loss,
    sigmoid_topk,
    sparse_topk,
    straight_through_value,
    subset_categorical,
    subset_index,
    subset_vector,
    topk_cross_entropy,
    topk_mask,
    topk_metric_loss,
    transport_topk,
)
from khot.constraints import capped_simplex, k_hot, ranking
from khot.distributions import (
    Brewer,
    ConditionalPoisson,
    GumbelTopK,
    ParetoSampling,
    PhantomUnit,
    Pivotal,
    PlackettLuce,
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    Sampford,
    SamplingDesign,
    Systematic,
    horvitz_thompson,
)
from khot.distributions.design import defined_by, relaxes_logits
from khot.estimators import (
    IMLE,
    AdaptiveStep,
    MovingAverage,
    PerturbedTopK,
    ReinMax,
    StraightThrough,
    enumerated,
    pathwise,
    perturbed_topk,
    reinmax,
    score_function,
    score_function_surrogate,
    straight_through,
    unordered_set,
)
from khot.estimators.wrapper import wrap_latents
from khot.nn import (
    Anneal,
    FenchelYoungTopKLoss,
    GatherTopK,
    Selection,
    TopK,
    TopKCrossEntropyLoss,
    TopKMetricLoss,
    route,
    topk_attention,
)
from tests import design_references as reference
from tests.inputs import normal
from tests.maps import behind


@dataclass(frozen=True)
class DesignCase:
    """A sampling design under test.

    Attributes:
        name: Identifier of the test.
        make: Called as ``make(probs=...)`` or ``make(logits=..., k=...)``, with further keyword arguments.
        reference: Probabilities of the rows of ``support`` under a design without batch dimensions, computed from its
            ``probs`` or ``logits`` by another way than the library's.
        exact_probs: Whether ``make(probs=p).mean`` is ``p``.
        largest_scored_k: The largest k for which it has a log_prob.
        long_row: How many units it is quick for.
        slow: Whether the quick tests do without it.
    """

    name: str
    make: Callable[..., SamplingDesign]
    reference: Callable[[SamplingDesign, Tensor], Tensor] | None
    exact_probs: bool = True
    largest_scored_k: float = math.inf
    long_row: int = 1000
    slow: bool = False

    @property
    def public(self) -> type[SamplingDesign]:
        return type(self._example)

    @property
    def takes_relaxation(self) -> bool:
        """Whether ``logits`` go through a relaxation, rather than being natural parameters."""
        return relaxes_logits(self._example)

    @property
    def has_log_prob(self) -> bool:
        """Whether the class defines it for these settings, rather than to raise NotImplementedError."""
        return self._defines("log_prob")

    @property
    def has_entropy(self) -> bool:
        """Whether it has one for few subsets at least, by enumeration."""
        return self.has_log_prob

    @property
    def has_pairwise(self) -> bool:
        """Whether it has them for few subsets at least, by enumeration."""
        return self.has_log_prob

    @property
    def draws_all_pairs(self) -> bool:
        """Whether it draws every pair of units that are not excluded."""
        return "order" not in self._example._settings or self._example.order != "fixed"

    @property
    def has_entropy_at_any_size(self) -> bool:
        return self._defines("entropy")

    @property
    def has_pairwise_at_any_size(self) -> bool:
        return self._defines("pairwise_inclusion")

    def _defines(self, method: str) -> bool:
        design = self._example.wrapped if isinstance(self._example, PhantomUnit) else self._example
        settings = [f"{name}={getattr(design, name)!r}" for name in design._settings]
        is_complete = not design._complete_with or design._complete_with in settings
        return is_complete and method in defined_by(type(design))

    @functools.cached_property
    def _example(self) -> SamplingDesign:
        return self.make(logits=torch.tensor([0.1, -0.2, 0.3]), k=1)


DESIGNS = [
    DesignCase("conditional_poisson", ConditionalPoisson, reference.conditional_poisson),
    DesignCase("pivotal", Pivotal, reference.pivotal),
    DesignCase("sampford", Sampford, reference.sampford),
    DesignCase("brewer", Brewer, reference.brewer, largest_scored_k=10),
    DesignCase("systematic_fixed", partial(Systematic, order="fixed"), reference.systematic_fixed),
    DesignCase("systematic_random", partial(Systematic, order="random"), reference.systematic_random),
    DesignCase("pareto", ParetoSampling, reference.pareto, exact_probs=False),
    DesignCase("pareto_exact", partial(ParetoSampling, adjust="exact"), reference.pareto_exact, slow=True),
    DesignCase("pareto_plain", partial(ParetoSampling, adjust=None), reference.pareto_plain, exact_probs=False),
    DesignCase("gumbel_topk", GumbelTopK, reference.gumbel_topk, long_row=200),
]
# Of a size of its own, so that not all of the contract holds; ``k`` is ignored.
PHANTOM = DesignCase("phantom_unit", lambda logits, k: PhantomUnit(ConditionalPoisson, logits=logits), None)


@dataclass(frozen=True)
class RelaxedCase:
    """A relaxed law under test.

    Attributes:
        public: The class, called as ``public(temperature, logits=..., k=...)``.
        is_hard: Whether its draws are k-hot.
    """

    public: type[RelaxedKHot]
    is_hard: bool


RELAXED = [RelaxedCase(RelaxedKHot, is_hard=False), RelaxedCase(RelaxedKHotStraightThrough, is_hard=True)]


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

    @property
    def public(self) -> type:
        return type(self.wrap(ConditionalPoisson(logits=torch.zeros(2), k=1)))


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

    @property
    def public(self) -> type:
        return type(self.make(logits=torch.zeros(2), k=1))


PERTURBED = [
    PerturbedCase("perturbed_topk", PerturbedTopK),
    PerturbedCase("imle", IMLE),
    PerturbedCase("imle_adaptive", lambda **kwargs: IMLE(step=AdaptiveStep(), **kwargs)),
    PerturbedCase("imle_sum_of_gamma", partial(IMLE, noise="sum_of_gamma")),
]


@dataclass(frozen=True)
class FunctionCase:
    """An estimator for custom loops under test.

    Attributes:
        name: Identifier of the test, which contains the name of the function.
        function: Called as ``function(design, f, num_samples)``.
        form: How it is called on a sampling design, if not like this: from the function and these arguments.
        needs_log_prob: Whether the design has to have a log_prob.
        needs_two_draws: Whether these settings need more draws than the function does.
        plain_mean: Whether the value is the mean of f over the draws, all with the same weight.
        distinct: Whether the draws differ from each other.
        needs_relaxation: Whether the design has to have a relaxation, or to be ConditionalPoisson.
    """

    name: str
    function: Callable[..., Tensor]
    form: Callable[..., Tensor] | None = None
    needs_log_prob: bool = True
    needs_two_draws: bool = False
    plain_mean: bool = True
    distinct: bool = False
    needs_relaxation: bool = False

    @property
    def public(self) -> Callable[..., Tensor]:
        return behind(self.function)

    @property
    def estimate(self) -> Callable[..., Tensor]:
        return self.function if self.form is None else partial(self.form, self.function)

    @property
    def unbiased(self) -> bool:
        """Whether the expected gradient is exact."""
        return self.public.unbiased

    @property
    def min_samples(self) -> int:
        """The least ``num_samples`` with these settings."""
        return 2 if self.needs_two_draws else self.public.min_samples


def of_the_wrapped_design(function: Any, design: Any, f: Any, num_samples: int = 1, **kwargs: Any) -> Tensor:
    return function(wrap_latents(design, StraightThrough), f, num_samples, **kwargs)


FUNCTIONS = [
    FunctionCase("score_function", score_function),
    FunctionCase("score_function_moving_average", partial(score_function, baseline="moving_average")),
    FunctionCase(
        "score_function_leave_one_out", partial(score_function, baseline="leave_one_out"), needs_two_draws=True
    ),
    FunctionCase("unordered_set", unordered_set, plain_mean=False, distinct=True),
    FunctionCase("enumerated", enumerated, plain_mean=False),
    FunctionCase("straight_through", straight_through, needs_log_prob=False),
    FunctionCase("reinmax", reinmax, needs_log_prob=False, needs_relaxation=True),
    FunctionCase("pathwise", pathwise, of_the_wrapped_design, needs_log_prob=False),
]


@dataclass(frozen=True)
class LossCase:
    """A loss under test, of scores (..., 6).

    Attributes:
        name: Identifier of the test.
        public: The function and the module.
        settings: How they are called: from the softness and the reduction to keyword arguments.
        targets: From a seed and the number of rows to targets.
        value: The loss of one row by another way than the library's, from x, target and softness.
    """

    name: str
    public: tuple[Callable[..., Tensor], Callable[..., torch.nn.Module]]
    settings: Callable[[Any, str], dict[str, Any]]
    targets: Callable[[int, int], Tensor]
    value: Callable[[Tensor, Tensor, float], float]

    def function(self, x: Tensor, target: Tensor, softness: Any = 1.0, reduction: str = "mean") -> Tensor:
        return self.public[0](x, target, **self.settings(softness, reduction))

    def module(self, softness: Any, reduction: str) -> torch.nn.Module:
        return self.public[1](**self.settings(softness, reduction))


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


def mask_by_roots(scores: Any, size: int, temperature: float) -> Any:
    """The sigmoid mask by a general-purpose root finder."""
    t = scipy.optimize.brentq(lambda t: scipy.special.expit((scores - t) / temperature).sum() - size, -99, 99)
    return scipy.special.expit((scores - t) / temperature)


def cross_entropy_of_sizes(x: Tensor, target: Tensor, temperature: float) -> float:
    """-log(0.5 P(top 1) + 0.3 P(top 3))."""
    one, three = (mask_by_roots(x.numpy(), size, temperature)[target] for size in (1, 3))
    return -math.log(0.5 * one + 0.3 * three)


def ndcg_at_three(x: Tensor, relevance: Tensor, temperature: float) -> float:
    """One minus the NDCG in which the item at rank j is the difference of the masks of sizes j and j - 1."""
    masks = np.array([0 * x.numpy(), *(mask_by_roots(x.numpy(), size, temperature) for size in (1, 2, 3))])
    discounts, gains = 1 / np.log2([2, 3, 4]), 2.0 ** relevance.numpy() - 1
    return 1 - discounts @ np.diff(masks, axis=0) @ gains / (discounts @ np.sort(gains)[:-4:-1])


LOSSES = [
    LossCase(
        "fenchel_young",
        (fenchel_young_topk_loss, FenchelYoungTopKLoss),
        lambda strength, reduction: {"k": 2.5, "strength": strength, "reduction": reduction},
        lambda seed, rows: sigmoid_topk(normal(rows, 6, seed=seed), 2.5),
        largest_of_the_mask,
    ),
    LossCase(
        "topk_cross_entropy",
        (topk_cross_entropy, TopKCrossEntropyLoss),
        lambda temperature, reduction: {
            "p_k": [0.5, 0.0, 0.3],
            "relaxation": sigmoid_topk,
            "softness": temperature,
            "reduction": reduction,
        },
        lambda seed, rows: torch.randint(6, (rows,), generator=torch.Generator().manual_seed(seed)),
        cross_entropy_of_sizes,
    ),
    LossCase(
        "topk_metric",
        (topk_metric_loss, TopKMetricLoss),
        lambda temperature, reduction: {
            "k": 3,
            "relaxation": sigmoid_topk,
            "softness": temperature,
            "gain": "exp2",
            "reduction": reduction,
        },
        lambda seed, rows: torch.randint(1, 5, (rows, 6), generator=torch.Generator().manual_seed(seed)),
        ndcg_at_three,
    ),
]


@dataclass(frozen=True)
class ConstraintCase:
    """A constraint under test.

    Attributes:
        public: The constraint, called as ``public(k)``.
        inside: Rows that it holds for, by their k.
        outside: Rows that it does not hold for, by the same k.
        form: How it is made of k, if not like this: from the constraint and k.
        dtype: Of its values.
    """

    public: Callable[..., Constraint]
    inside: dict[float, list[float]]
    outside: dict[float, list[float]]
    form: Callable[..., Constraint] | None = None
    dtype: torch.dtype = torch.float64

    def make(self, k: Any) -> Constraint:
        return self.public(k) if self.form is None else self.form(self.public, k)


CONSTRAINTS = [
    ConstraintCase(
        k_hot,
        {1: [0.0, 1.0, 0.0], 2: [1.0, 1.0, 0.0], 0: [0.0, 0.0, 0.0], 3: [1.0, 1.0, 1.0]},
        {1: [0.0, 1.0, 1e-6], 2: [0.0, 1.0, 0.0], 0: [0.0, math.nan, 0.0], 3: [1.0, 2.0, 0.0]},
    ),
    ConstraintCase(
        capped_simplex,
        {1: [0.2, 0.5, 0.3], 2.5: [1.0, 0.6, 0.9], 0: [0.0, 0.0, 0.0], 3: [1.0, 1.0, 1.0]},
        {1: [0.2, 0.5, 0.4], 2.5: [1.1, 0.5, 0.9], 0: [-0.1, 0.1, 0.0], 3: [1.0, 1.0, math.nan]},
    ),
    ConstraintCase(
        ranking,
        {1: [2, -1, -1], 2: [0, 2, -1], 0: [-1, -1, -1], 3: [1, 0, 2]},
        {1: [3, -1, -1], 2: [1, 1, -1], 0: [0, -1, -1], 3: [1, -1, 2]},
        form=lambda ranking, k: ranking(3, k),
        dtype=torch.long,
    ),
]


@dataclass(frozen=True)
class ToolCase:
    """What belongs to no family, with its definition.

    Attributes:
        public: What is defined.
        definition: Compares what it does with what it is documented to do.
    """

    public: Any
    definition: Callable[[Any], None]


def adaptive_step_definition(step_class: Any) -> None:
    """alpha times the length of the scores over that of the cotangent; alpha grows while gradients are too sparse."""
    step = step_class(initial=0.5, increment=0.1, target=1.0, decay=0.0)
    assert step.step(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])) == pytest.approx(0.5 * 5 / 2)
    for entries, alpha in (([0.0, 0.0], 0.6), ([1.0, -1.0], 0.5)):
        step.update(torch.tensor(entries))
        assert step.alpha == pytest.approx(alpha)


def moving_average_definition(average_class: Any) -> None:
    """The weights of the losses, latest first, are 1, decay, decay^2, ... over their sum."""
    baseline, losses = average_class(decay=0.8), [3.0, -1.0, 4.0]
    for loss in losses:
        baseline.update(torch.tensor(loss))
    weights = 0.8 ** np.arange(3)[::-1]
    assert float(baseline(None)) == pytest.approx((weights * losses).sum() / weights.sum())


def perturbed_topk_definition(perturbed_topk: Any) -> None:
    """The mean of hard masks of what the same generator perturbs."""
    x, masks = normal(3, 5), []
    noise = torch.randn(7, 3, 5, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    masks = torch.stack([topk_mask(x + 0.3 * z, 2) for z in noise])
    y = perturbed_topk(x, 2, 0.3, num_samples=7, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(y, masks.mean(0))


def surrogate_definition(score_function_surrogate: Any) -> None:
    """Its gradient is the sum of losses times scores, over S, its value the mean loss."""
    logits, losses = normal(2, 5).requires_grad_(), normal(3, 2, seed=1)
    design = ConditionalPoisson(logits=logits, k=2)
    value = design.sample((3,))
    surrogate = score_function_surrogate(design, value, losses)
    (expected,) = torch.autograd.grad((losses * design.log_prob(value)).sum() / 3, logits)
    torch.testing.assert_close(torch.autograd.grad(surrogate.sum(), logits)[0], expected)
    torch.testing.assert_close(surrogate, losses.mean(0))


def knn_definition(knn_loss: Any) -> None:
    """The relaxed mask of minus the squared distances for each query; queries without a matching key are left out."""
    query, keys = normal(2, 3, 4), normal(2, 6, 4, seed=1)
    query_labels, key_labels = torch.tensor([[0, 1, 2], [1, 0, 7]]), torch.tensor([[0, 1, 2, 0, 1, 2]]).repeat(2, 1)
    for relaxation in (sigmoid_topk, transport_topk, sparse_topk):
        rows = torch.zeros(2, 3, dtype=torch.float64)
        for b, q in itertools.product(range(2), range(3)):
            mask = relaxation(-(query[b, q] - keys[b]).square().sum(-1), 2.5, 6.0)
            share = sum(mask[j] for j in range(6) if key_labels[b, j] == query_labels[b, q]) / 2.5
            rows[b, q] = -math.log(share) if share > 0 else 0.0
        arguments = (query, keys, query_labels, key_labels, 2.5, 6.0, relaxation)
        torch.testing.assert_close(knn_loss(*arguments, reduction="none"), rows)
        torch.testing.assert_close(knn_loss(*arguments), rows.sum() / 5)
        torch.testing.assert_close(knn_loss(*arguments, reduction="sum"), rows.sum())


def comparison_definition(compare_estimators: Any) -> None:
    """Of constant estimates g: no variance, the bias |g - exact|, the cosine of the two."""
    design = ConditionalPoisson(logits=torch.zeros(3), k=1)
    exact = torch.tensor([1.0, -1.0, 0.0])

    def estimator(design: Any, f: Any, num_samples: int) -> Tensor:
        return design.logits @ torch.tensor([2.0, 0.0, -2.0])

    (row,) = compare_estimators(design, lambda x: x[..., 0], {"constant": estimator}, 1, 2, exact=exact).rows
    assert (row.variance, row.bias, row.cosine) == (0.0, pytest.approx(math.sqrt(6)), pytest.approx(0.5))


def anneal_definition(anneal: Any) -> None:
    """The softness moves from one value to another in equal steps."""
    module = TopK(2, softness=1.0)
    schedule, found = anneal(module, "softness", end=0.5, steps=2), [module.softness]
    for _ in range(3):
        schedule.step()
        found.append(module.softness)
    assert found == [1.0, 0.75, 0.5, 0.5]


def gather_definition(gather: Any) -> None:
    """The tokens with the largest scores, in the order of the sequence."""
    scores, tokens = normal(3, 6), normal(3, 6, 2, seed=1)
    for row, row_tokens, (values, indices) in zip(
        scores, tokens, zip(*gather(2, softness=0.5)(scores, tokens), strict=True), strict=True
    ):
        best = sorted(sorted(range(6), key=lambda i: -float(row[i]))[:2])
        assert indices.tolist() == best and torch.equal(values, row_tokens[best])


def attention_definition(attention: Any) -> None:
    """Query by query: softmax(S + log A) over the keys, hard and relaxed."""
    query, key, value = normal(2, 4, 3), normal(2, 5, 3, seed=1), normal(2, 5, 6, seed=2)
    for softness, mask in ((None, topk_mask), (0.3, partial(sigmoid_topk, temperature=0.3))):
        found = attention(query, key, value, 2, softness=softness)
        for b, i in itertools.product(range(2), range(4)):
            scores = key[b] @ query[b, i] / math.sqrt(3)
            torch.testing.assert_close(found[b, i], (scores + mask(scores, 2).log()).softmax(-1) @ value[b])


def selection_definition(selection: Any) -> None:
    """The k largest, in order of place."""
    found = TopK(2).select(torch.tensor([3.0, 1.0, 2.0]))
    assert isinstance(found, selection)
    assert (found.values.tolist(), found.indices.tolist()) == ([3, 2], [0, 2])


def reparam_definition(reparam_class: Any) -> None:
    """A site under it has a draw that carries a gradient: k-hot with an estimator, relaxed with a temperature."""
    logits = torch.zeros(5, requires_grad=True)
    for arguments, support in (({}, k_hot(2)), ({"temperature": 0.5}, capped_simplex(2))):
        site = pyro.poutine.reparam(
            lambda: pyro.sample("x", ConditionalPoisson(logits=logits, k=2)), {"x": reparam_class(**arguments)}
        )
        x = site()
        assert x.requires_grad and support.check(x.detach())


def autoguide_definition(guide_class: Any) -> None:
    """Its draws are k-hot in the shape of the site, and its logits have a gradient under an ELBO."""

    def model() -> None:
        with pyro.plate("rows", 3):
            pyro.factor("gain", pyro.sample("x", ConditionalPoisson(logits=normal(4), k=2)) @ normal(4, seed=1))

    pyro.clear_param_store()
    guide = guide_class(model)
    assert k_hot(2).check(guide()["x"]).tolist() == [True, True, True]
    pyro.infer.Trace_ELBO().loss_and_grads(model, guide)
    (logits,) = guide.parameters()
    assert logits.shape == (3, 4) and logits.grad.abs().min() > 0


def swap_definition(kernel_class: Any) -> None:
    """Its chain visits the k-hot vectors as often as the posterior, a conditional Poisson law, says."""
    gain = normal(4)

    def model() -> None:
        with pyro.plate("chains", 2000):
            pyro.factor("gain", pyro.sample("x", ConditionalPoisson(logits=torch.zeros_like(gain), k=2)) @ gain)

    pyro.set_rng_seed(0)
    mcmc = pyro.infer.MCMC(kernel_class(model), num_samples=1, warmup_steps=20, disable_progbar=True)
    mcmc.run()
    found = mcmc.get_samples()["x"][0].mean(0)
    assert (found - ConditionalPoisson(logits=gain, k=2).mean).abs().max() < 5.5 * 0.5 / math.sqrt(2000)


def horvitz_thompson_definition(horvitz_thompson: Any) -> None:
    """Over all draws, the totals and the estimated variances have the mean that they estimate."""
    design, y = Sampford(probs=torch.tensor([0.5, 0.7, 0.4, 0.4], dtype=torch.float64)), normal(4)
    support = design.enumerate_support()
    share = design.log_prob(support).exp()
    total, variance = horvitz_thompson(design, support, y)
    torch.testing.assert_close(share @ total, y.sum())
    torch.testing.assert_close(share @ variance, share @ (total - y.sum()).square())


def plackett_luce_definition(law_class: Any) -> None:
    """Each choice has the softmax of the logits of those that are left."""
    logits = normal(2, 5)
    law = law_class(logits=logits, k=3)
    for value in law.enumerate_support(expand=False):
        left, expected = logits.clone(), 0.0
        for unit in value.squeeze(0):
            expected = expected + left.log_softmax(-1)[:, unit]
            left[:, unit] = -torch.inf
        torch.testing.assert_close(law.log_prob(value), expected)


def straight_through_value_definition(straight_through_value: Any) -> None:
    """The one, with the gradient of the other."""
    soft = normal(2, 5).requires_grad_()
    y = straight_through_value(topk_mask(soft, 2), soft.exp())
    assert torch.equal(y, topk_mask(soft, 2))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), soft)[0], soft.exp())


def subset_vector_definition(subset_vector: Any) -> None:
    """The rows of the support, for one size and for several at once."""
    for n, k in ((6, 3), (7, 5), (4, 0), (1, 1)):
        support = ConditionalPoisson(logits=torch.zeros(n), k=k).enumerate_support()
        number = torch.arange(len(support))
        assert torch.equal(subset_vector(number, n, k), support)
        sizes = torch.tensor([k, 0])
        both = subset_vector(number.unsqueeze(-1), n, sizes)
        assert torch.equal(both[:, 0], support) and both[:, 1].sum() == 0


def subset_index_definition(subset_index: Any) -> None:
    """The inverse of subset_vector, also where the numbers are as large as they can be."""
    for n, k, number in ((50, 25, 126410606437751), (66, 33, 7219428434016265734), (1000, 998, 12345)):
        assert subset_index(subset_vector(number, n, k)).item() == number
    support = ConditionalPoisson(logits=torch.zeros(6), k=2).enumerate_support()
    assert torch.equal(subset_index(support.view(3, 5, 6)), torch.arange(15).view(3, 5))


def subset_categorical_definition(subset_categorical: Any) -> None:
    """The probabilities of the support; 0 beyond that of a row with fewer subsets."""
    logits = normal(2, 5)
    designs = [ConditionalPoisson(logits=row, k=k) for row, k in zip(logits, (2, 4), strict=True)]
    expected = torch.zeros(2, 10, dtype=torch.float64)
    for row, design in zip(expected, designs, strict=True):
        support = design.enumerate_support()
        row[: len(support)] = design.log_prob(support).exp()
        torch.testing.assert_close(subset_categorical(design).probs, row[: len(support)])
    both = subset_categorical(ConditionalPoisson(logits=logits, k=torch.tensor([2, 4])))
    assert type(both) is pyro.distributions.Categorical
    torch.testing.assert_close(both.probs, expected)


def route_definition(route: Any) -> None:
    """The softmax of the k largest, over its sum there."""
    logits = normal(3, 5)
    weights, indices = route(logits, 2)
    mask = topk_mask(logits, 2)
    assert torch.equal(torch.zeros_like(mask).scatter(-1, indices, 1), mask)
    expected = logits.softmax(-1) * mask
    torch.testing.assert_close(weights, (expected / expected.sum(-1, keepdim=True)).gather(-1, indices))


TOOLS = {
    "relaxations": [ToolCase(straight_through_value, straight_through_value_definition)],
    "distributions": [
        ToolCase(PlackettLuce, plackett_luce_definition),
        ToolCase(horvitz_thompson, horvitz_thompson_definition),
    ],
    "estimators": [
        ToolCase(AdaptiveStep, adaptive_step_definition),
        ToolCase(MovingAverage, moving_average_definition),
        ToolCase(perturbed_topk, perturbed_topk_definition),
        ToolCase(score_function_surrogate, surrogate_definition),
    ],
    "diagnostics": [ToolCase(compare_estimators, comparison_definition)],
    "losses": [ToolCase(knn_loss, knn_definition)],
    "nn": [
        ToolCase(Anneal, anneal_definition),
        ToolCase(GatherTopK, gather_definition),
        ToolCase(Selection, selection_definition),
        ToolCase(route, route_definition),
        ToolCase(topk_attention, attention_definition),
    ],
    "infer": [
        ToolCase(AutoKHot, autoguide_definition),
        ToolCase(KHotReparam, reparam_definition),
        ToolCase(KHotSwap, swap_definition),
        ToolCase(subset_categorical, subset_categorical_definition),
        ToolCase(subset_index, subset_index_definition),
        ToolCase(subset_vector, subset_vector_definition),
    ],
}
