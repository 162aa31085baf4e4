"""Draws inside torch.vmap, of every design and of the estimators that perturb: each by itself, or all the same."""

from functools import partial

import torch

from khot import IMLE, GumbelTopK, PerturbedTopK, PhantomUnit, Sampford, sigmoid_topk
from tests import gof
from tests.loops import for_each
from tests.registry import DESIGNS

LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1, -0.3, 1.5], dtype=torch.float64)
PATHWISE = {
    "imle": IMLE,
    "perturbed_topk": partial(PerturbedTopK, num_samples=2),
}


def draws_of(draw, batch=1500):
    """Draws at one parameter, ``(batch, 2, n)``; asserts that those that should be equal are equal."""
    torch.manual_seed(0)
    rows = LOGITS.expand(batch, 6)
    same = torch.vmap(draw, randomness="same")(rows[:5])
    assert (same == same[:1]).all()
    return torch.vmap(draw, randomness="different")(rows)


@for_each("case", DESIGNS)
def test_designs(case):
    value = draws_of(lambda row: case.make(logits=row, k=3).sample((2,)))
    gof.check_k_hot(value, 3)
    gof.check_inclusion(value.flatten(0, 1), case.make(logits=LOGITS, k=3).mean)


def test_phantom_unit():
    value = draws_of(lambda row: PhantomUnit(Sampford, logits=row).sample((2,)))
    gof.check_inclusion(value.flatten(0, 1), LOGITS.sigmoid())


@for_each("name", PATHWISE)
def test_pathwise_estimators(name):
    value = draws_of(lambda row: PATHWISE[name](logits=row, k=3).rsample((2,)))
    gof.check_k_hot(value, 3)
    if name != "perturbed_topk":  # whose noise is another
        gof.check_inclusion(value.flatten(0, 1), GumbelTopK(logits=LOGITS, k=3).mean)


@for_each("case", DESIGNS)
def test_designs_of_given_probabilities(case):
    """Whose sum says how many to draw."""
    design = case.make(probs=sigmoid_topk(LOGITS, 3))
    shift = torch.zeros(1500, 1, dtype=torch.float64)
    value = torch.vmap(lambda zero: case.make(probs=design.probs + zero).sample((2,)), randomness="different")(shift)
    gof.check_k_hot(value, 3)
    gof.check_inclusion(value.flatten(0, 1), design.mean)


@for_each("case", DESIGNS)
def test_one_parameter_for_all(case):
    for logits in (LOGITS, LOGITS.expand(2, 6)):
        design = case.make(logits=logits, k=3)
        value = torch.vmap(lambda c, design=design: c * design.sample((2,)), randomness="different")(torch.ones(300))
        gof.check_k_hot(value, 3)
        assert len(value.flatten(1).unique(dim=0)) > 20
