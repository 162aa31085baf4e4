"""Draws inside torch.vmap, of every design and of the estimators that perturb: each by itself, or all the same."""

from functools import partial

import pytest
import torch

from khot import IMLE, GumbelTopK, PerturbedTopK, PhantomUnit, RaoBlackwellStraightThrough, Sampford
from tests import gof
from tests.registry import DESIGNS

LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1, -0.3, 1.5], dtype=torch.float64)
CASES = [case for case in DESIGNS if case.name != "brewer"]  # whose sampler asks in between which rows are done
PATHWISE = {
    "imle": IMLE,
    "perturbed_topk": partial(PerturbedTopK, num_samples=2),
    "rao_blackwell": partial(RaoBlackwellStraightThrough, 0.5, num_conditional=2),
}


def draws_of(draw, batch=1500):
    """Draws at one parameter, ``(batch, 2, n)``, after a look at whether those that should be the same are."""
    torch.manual_seed(0)
    rows = LOGITS.expand(batch, 6)
    same = torch.vmap(draw, randomness="same")(rows[:5])
    assert (same == same[:1]).all()
    return torch.vmap(draw, randomness="different")(rows)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_designs(case):
    value = draws_of(lambda row: case.make(logits=row, k=3, validate_args=False).sample((2,)))
    gof.check_k_hot(value, 3)
    gof.check_inclusion(value.flatten(0, 1), case.make(logits=LOGITS, k=3).mean)


def test_phantom_unit():
    value = draws_of(lambda row: PhantomUnit(Sampford, logits=row, validate_args=False).sample((2,)))
    gof.check_inclusion(value.flatten(0, 1), LOGITS.sigmoid())


@pytest.mark.parametrize("name", PATHWISE)
def test_pathwise_estimators(name):
    value = draws_of(lambda row: PATHWISE[name](logits=row, k=3, validate_args=False).rsample((2,)))
    gof.check_k_hot(value, 3)
    if name != "perturbed_topk":  # whose noise is another
        gof.check_inclusion(value.flatten(0, 1), GumbelTopK(logits=LOGITS, k=3).mean)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_parameter_for_all(case):
    design = case.make(logits=LOGITS, k=3)
    value = torch.vmap(lambda c: c * design.sample((2,)), randomness="different")(torch.ones(300))
    gof.check_k_hot(value, 3)
    assert len(value.flatten(1).unique(dim=0)) > 20
