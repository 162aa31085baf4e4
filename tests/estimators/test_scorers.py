"""A law that scores the draws of another must have the same marginals; otherwise an error says how far they differ."""

import re

import pytest
import torch

from khot import (
    ConditionalPoisson,
    GumbelTopK,
    ParetoSampling,
    PhantomUnit,
    Pivotal,
    Sampford,
    StraightThrough,
    sigmoid_topk,
)
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS, ESTIMATORS, PERTURBED

LOGITS = normal(2, 5)
every_wrapper = for_each("case", ESTIMATORS)
every_design = for_each("design_case", DESIGNS)


class Unknown(Pivotal):
    """A law without known inclusion probabilities."""

    @property
    def _mean(self):
        raise NotImplementedError


@every_wrapper
@every_design
@for_each("dtype", [torch.float32, torch.float64])
def test_the_same_marginals_are_accepted(case, design_case, dtype):
    """Those that the design has, to rounding: of another law, from probabilities or from logits, in another dtype."""
    design = design_case.make(logits=LOGITS.to(dtype), k=2)
    scorer = ConditionalPoisson(probs=design.mean)
    case.wrap(design, log_prob=scorer)
    case.wrap(design, log_prob=ConditionalPoisson(logits=scorer.logits + 3, k=2))
    case.wrap(design, log_prob=Sampford(probs=design.mean.double()))
    case.wrap(design, log_prob=design)


@every_wrapper
@every_design
@for_each("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_other_marginals_are_refused(case, design_case, dtype):
    """In both directions; the error names the largest difference."""
    design = design_case.make(logits=LOGITS.to(dtype), k=2, validate_args=True)
    other = ConditionalPoisson(logits=2 * LOGITS.to(dtype), k=2)
    with pytest.raises(ValueError, match="`log_prob` must have the inclusion probabilities of `design`") as error:
        case.wrap(design, log_prob=other)
    said = float(re.search(r"differ by up to (\S+)", str(error.value)).group(1))
    assert said == pytest.approx((design.mean - other.mean).abs().max().item(), rel=1e-2)
    with pytest.raises(ValueError, match="`log_prob` must have the inclusion probabilities"):
        StraightThrough(other, log_prob=design)
    case.wrap(design, log_prob=other, validate_args=False)


@every_design
def test_a_small_difference_is_found(design_case):
    design = design_case.make(logits=LOGITS, k=2)
    off = design.mean + 1e-4 * torch.tensor([1.0, -1, 0, 0, 0], dtype=torch.float64)
    with pytest.raises(ValueError, match="differ by up to 0.0001 "):
        StraightThrough(design, log_prob=ConditionalPoisson(probs=off))


@for_each("n", [5, 1000, 100_000])
@for_each("dtype", [torch.float32, torch.float64])
def test_what_counts_as_rounding_falls_with_the_length_of_the_row(n, dtype):
    probs = sigmoid_topk(normal(n, dtype=dtype), 1)
    swapped = probs.flip(-1)
    StraightThrough(Pivotal(probs=probs, k=1), log_prob=Sampford(probs=probs * (1 + 2e-7), k=1))
    with pytest.raises(ValueError, match="differ by up to"):
        StraightThrough(Pivotal(probs=probs, k=1), log_prob=Sampford(probs=swapped, k=1))


@every_wrapper
def test_other_sizes_are_refused(case):
    design = Pivotal(logits=LOGITS, k=torch.tensor([2, 3]))
    for k in (3, torch.tensor([2, 4])):
        with pytest.raises(ValueError, match="`log_prob` must have the k of `design`"):
            case.wrap(design, log_prob=ConditionalPoisson(logits=LOGITS, k=k))
    case.wrap(design, log_prob=ConditionalPoisson(probs=sigmoid_topk(LOGITS, design.k)))
    phantom = PhantomUnit(Pivotal, logits=LOGITS)
    StraightThrough(phantom, log_prob=PhantomUnit(ConditionalPoisson, logits=LOGITS))
    with pytest.raises(ValueError, match="`log_prob` must have the k of `design`"):
        StraightThrough(phantom, log_prob=ConditionalPoisson(logits=LOGITS, k=phantom.k))


@for_each("case", PERTURBED)
def test_of_perturbed_scores_only_the_size_is_known(case):
    case.make(logits=LOGITS, k=2, log_prob=ConditionalPoisson(logits=2 * LOGITS, k=2))
    with pytest.raises(ValueError, match="`log_prob` must have the k of `design`"):
        case.make(logits=LOGITS, k=2, log_prob=ConditionalPoisson(logits=LOGITS, k=3))


def test_unknown_marginals_are_not_compared():
    StraightThrough(Unknown(logits=LOGITS, k=2), log_prob=ConditionalPoisson(logits=LOGITS, k=2))
    StraightThrough(ConditionalPoisson(logits=LOGITS, k=2), log_prob=Unknown(logits=LOGITS, k=2))


def test_nothing_is_solved_for_to_compare(monkeypatch):
    """Probabilities that are given are compared as they are; the law that has them is for the score to find."""

    def refuse(*args, **kwargs):
        raise AssertionError("a comparison of marginals has solved for a law")

    for module in ("conditional_poisson", "gumbel_topk", "pareto"):
        name = "solve_logits" if module == "conditional_poisson" else "law.solve_positions"
        monkeypatch.setattr(f"khot.distributions.{module}.{name}", refuse)
    probs = sigmoid_topk(LOGITS, 2)
    designs = [
        ConditionalPoisson(probs=probs),
        GumbelTopK(probs=probs),
        ParetoSampling(probs=probs, adjust="exact"),
        PhantomUnit(GumbelTopK, probs=probs),
    ]
    for scorer in designs:
        StraightThrough(Pivotal(probs=probs), log_prob=scorer)
        StraightThrough(scorer, log_prob=Sampford(probs=probs))


def test_gradients_reach_the_design_as_before():
    """The comparison leaves nothing without its graph that the design keeps for later."""
    for make in (ConditionalPoisson, GumbelTopK):
        logits = LOGITS.clone().requires_grad_()
        with torch.no_grad():
            scorer = ConditionalPoisson(probs=make(logits=logits, k=2).mean)
            wrapper = StraightThrough(make(logits=logits, k=2), log_prob=scorer)
        assert torch.autograd.grad(wrapper.rsample()[..., 0].sum(), logits)[0].abs().sum() > 0


def unequal(logits):
    """The mean of a design that is scored by a law of other marginals."""
    design = Pivotal(logits=logits, k=2, validate_args=False)
    scorer = ConditionalPoisson(logits=2 * logits, k=2, validate_args=False)
    return StraightThrough(design, log_prob=scorer, validate_args=True).mean


def test_contents_that_cannot_be_looked_at_are_not():
    """Inside of vmap a comparison of numbers is impossible; a construction is not."""
    torch.testing.assert_close(torch.vmap(unequal)(LOGITS), sigmoid_topk(LOGITS, 2))
    with pytest.raises(ValueError, match="`log_prob` must have the inclusion probabilities"):
        unequal(LOGITS)


def test_expanded_wrappers_keep_their_scorer():
    design = Pivotal(logits=LOGITS, k=2)
    wrapper = StraightThrough(design, log_prob=ConditionalPoisson(probs=design.mean)).expand((3, 2))
    assert wrapper.log_prob(wrapper.sample()).shape == (3, 2)
