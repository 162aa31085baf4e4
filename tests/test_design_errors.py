"""What users write instead of a design: each error names the argument and the cure."""

import numpy as np
import pytest
import torch
from torch.distributions import biject_to, transform_to

from khot import (
    IMLE,
    ConditionalPoisson,
    GumbelTopK,
    KHotReparam,
    PerturbedTopK,
    PhantomUnit,
    ReinMax,
    RelaxedKHot,
    Sampford,
    StraightThrough,
    constraints,
    horvitz_thompson,
)
from khot.diagnostics import compare_estimators
from khot.infer import subset_categorical
from khot.nn import KHotGate
from tests.loops import for_each
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, PHANTOM, RELAXED

PUBLIC = sorted({case.public for case in DESIGNS}, key=lambda public: public.__name__)


@for_each("public", PUBLIC)
def test_scores_and_a_size_by_position(public):
    with pytest.raises(ValueError, match=rf"second position is `logits`.*{public.__name__}\(logits=scores, k=2\)"):
        public(torch.zeros(4), 2)


@for_each("scores", [torch.arange(4.0), torch.tensor([-0.5, 0.5, 1.0, 1.0])])
@for_each("public", PUBLIC)
def test_scores_in_the_place_of_probs(public, scores):
    with pytest.raises(ValueError, match=r"`probs` must lie in \[0, 1\], but got entries from .*logits=scores"):
        public(scores, k=2)


def test_sizes_in_the_place_of_probs():
    """Other software takes sizes, to which it makes the probabilities proportional."""
    with pytest.raises(ValueError, match=r"sizes as probs=capped_softmax\(sizes\.log\(\), k\)$"):
        Sampford(torch.tensor([1.0, 2.0, 5.0]), k=2)


@for_each("public", PUBLIC)
def test_scores_that_could_be_probs_by_their_range(public):
    with pytest.raises(ValueError, match="sum to its integer k.*logits=scores"):
        public(torch.zeros(4), k=2, validate_args=True)
    with pytest.raises(ValueError, match="`probs` must lie in .*contain NaN$"):
        public(torch.full((4,), torch.nan), validate_args=True)


@for_each("public", [*PUBLIC, *(case.public for case in ESTIMATORS)])
def test_an_unknown_argument_names_the_class_that_was_called(public):
    for made_from in ((), (ConditionalPoisson(logits=torch.zeros(4), k=2),)):
        with pytest.raises(TypeError, match=rf"^{public.__name__}\.__init__\(\).*'units'"):
            public(*made_from, units=20)


@for_each("public", PUBLIC)
def test_the_number_of_ones_is_not_n(public):
    name = public.__name__
    with pytest.raises(TypeError, match=rf"^{name} takes no `n`.*ones is `k`.*{name}\(probs=capped_softmax\(sizes.log"):
        public(torch.rand(4), n=2)


@for_each("value", [[1.0, 1.0, 0.0, 0.0], np.ones(4)])
@for_each("case", [*DESIGNS, PHANTOM])
def test_a_value_that_is_no_tensor(case, value):
    design = case.make(logits=torch.zeros(4), k=2)
    for law in (design, design._unchecked(), StraightThrough(design, log_prob="none", validate_args=False)):
        with pytest.raises(TypeError, match=r"`value` must be a torch.Tensor, but got \w+: pass torch.as_tensor"):
            law.log_prob(value)


@for_each("public", PUBLIC)
def test_logits_without_a_size(public):
    with pytest.raises(ValueError, match=rf"`k`.*required.*{public.__name__}\(logits=logits, k=2\)"):
        public(logits=torch.zeros(4))


@for_each("case", [case for case in DESIGNS if case.has_log_prob])
def test_a_relaxed_value_names_the_reparameterisation_once(case):
    advice = r"entries between 0 and 1 are relaxed: relax the model too \(khot\.infer\.KHotReparam\)$"
    with pytest.raises(ValueError, match=advice):
        case.make(logits=torch.zeros(4), k=2).log_prob(torch.full((4,), 0.5))


@for_each("argument", ["relaxation", "temperature"])
@for_each("case", [case for case in DESIGNS if not case.takes_relaxation])
def test_natural_parameters_have_no_relaxation(case, argument):
    with pytest.raises(TypeError, match=rf"takes no `{argument}`.*natural parameters.*sigmoid_topk"):
        case.make(logits=torch.zeros(4), k=2, **{argument: 0.5})


TAKERS = {case.name: case.wrap for case in ESTIMATORS}
TAKERS |= {f"function_{case.name}": lambda x, case=case: case.function(x, torch.sum, 2) for case in FUNCTIONS}
TAKERS |= {
    "compare_estimators": lambda x: compare_estimators(x, torch.sum),
    "horvitz_thompson": lambda x: horvitz_thompson(x, torch.ones(4), torch.ones(4)),
    "subset_categorical": subset_categorical,
}


@for_each("public", [ConditionalPoisson, GumbelTopK])
@for_each("taker", TAKERS)
def test_a_class_instead_of_an_instance(taker, public):
    with pytest.raises(TypeError, match=rf"`design`.*the class {public.__name__}: pass an instance"):
        TAKERS[taker](public)


@for_each("public", PUBLIC)
def test_rsample_names_the_recommended_estimator_first(public):
    with pytest.raises(NotImplementedError, match=r"khot.ReinMax\(design\).*StraightThrough"):
        public(logits=torch.zeros(4), k=2).rsample()


@for_each("registry", [biject_to, transform_to])
def test_a_k_hot_site_without_a_transform_names_what_samples_it(registry):
    with pytest.raises(ValueError, match=r"k_hot\(2\).*KHotSwap.*KHotReparam.*init_to_sample.*subset_categorical"):
        registry(constraints.k_hot(2))


@for_each("case", ESTIMATORS)
def test_a_class_as_what_scores(case):
    design = ConditionalPoisson(logits=torch.zeros(4), k=2)
    for public in (ConditionalPoisson, GumbelTopK):
        with pytest.raises(TypeError, match=f"`log_prob` .* the class {public.__name__}: pass an instance"):
            case.wrap(design, log_prob=public)
    with pytest.raises(TypeError, match="`log_prob` .*but got the class StraightThrough$"):
        case.wrap(design, log_prob=StraightThrough)


NO_ESTIMATORS = [*PUBLIC, PhantomUnit, *(case.public for case in RELAXED), PerturbedTopK, IMLE]


@for_each("taker", [KHotReparam, lambda estimator: KHotGate(4, 2, estimator=estimator)])
@for_each("public", NO_ESTIMATORS)
def test_a_class_of_designs_as_an_estimator(public, taker):
    with pytest.raises(TypeError, match=f"`estimator`.*such as ReinMax.*but got the class {public.__name__}"):
        taker(public)


@for_each("taker", [KHotReparam, lambda estimator: KHotGate(4, 2, estimator=estimator)])
@for_each("case", ESTIMATORS)
def test_estimators_are_taken_as_classes_and_functions(case, taker):
    design = ConditionalPoisson(logits=torch.zeros(4), k=2)
    made = case.wrap(design)
    taker(type(made)), taker(case.wrap), taker(lambda design: case.wrap(design))
    with pytest.raises(TypeError, match=f"`estimator`.*: pass the class, {type(made).__name__}"):
        taker(made)
    with pytest.raises(TypeError, match="`estimator`.*ConditionalPoisson"):
        taker(design)


@for_each("design", [StraightThrough, ReinMax, RelaxedKHot])
def test_a_gate_of_no_sampling_design(design):
    with pytest.raises(TypeError, match=f"`design` must be a class of sampling designs.*{design.__name__}"):
        KHotGate(4, 2, design=design)


def test_scores_in_the_place_of_the_class_of_a_phantom_unit():
    for given in ({"logits": torch.zeros(4)}, {"design_class": torch.zeros(4)}):
        with pytest.raises(TypeError, match=r"`design_class`.*PhantomUnit\(Pivotal, logits=logits\)"):
            PhantomUnit(**given)
