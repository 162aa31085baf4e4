"""Without validation, values outside the support have log-probability -inf and gradient 0 under every law."""

import math
from functools import partial

import pytest
import torch

from khot import (
    IMLE,
    ConditionalPoisson,
    PerturbedTopK,
    PhantomUnit,
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    StraightThrough,
    sigmoid_topk,
)
from tests.loops import for_each
from tests.registry import DESIGNS, ESTIMATORS

LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6]], dtype=torch.float64)
K = 3
INSIDE = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
WRONG = torch.tensor(
    [
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 0.5, 0.5, 0.0],
        [0.6, 0.6, 0.6, 0.6, 0.6],
        [2.0, 1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, -1.0],
        [1.0, 1.0, 1.0 + 1e-12, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1e-30, 0.0],
        [torch.nan, 1.0, 1.0, 1.0, 0.0],
        [torch.inf, 1.0, 1.0, 0.0, 0.0],
        [torch.inf, -torch.inf, 1.0, 1.0, 1.0],
        [-torch.inf, 1.0, 1.0, 1.0, 0.0],
    ],
    dtype=torch.float64,
)
OFF_THE_SIMPLEX = torch.tensor(
    [
        [0.2, 0.3, 0.1, 0.2, 0.4],
        [0.7, 0.8, 0.6, 0.7, 0.9],
        [1.2, 0.5, 0.4, 0.4, 0.5],
        [-0.1, 0.9, 0.7, 0.8, 0.7],
        [1.0, 0.5, 0.5, 0.5, 0.5],
        [0.0, 0.5, 0.9, 0.8, 0.8],
        [1.0, 1.0, 1.0, 0.0, 0.0],
        [torch.nan, 0.5, 0.5, 0.5, 0.5],
        [torch.inf, 0.5, 0.5, 0.5, 0.5],
        [0.6, 0.6, 0.6, 0.6, 0.6 + 1e-3],
    ],
    dtype=torch.float64,
)
SCORED = [case for case in DESIGNS if case.has_log_prob]


def given_probs(case, logits, k, **kwargs):
    return case.make(probs=sigmoid_topk(logits, k), **kwargs)


def wrapped(case, logits, k, **kwargs):
    return case.wrap(ConditionalPoisson(logits=logits, k=k, **kwargs), **kwargs)


def scored_by_another(make, logits, k, **kwargs):
    return make(logits=logits, k=k, log_prob=ConditionalPoisson(logits=logits, k=k, **kwargs), **kwargs)


# Made of logits and k = 3, each with a value inside and the values outside.
HARD = {
    **{case.name: case.make for case in SCORED},
    **{f"{case.name}_probs": partial(given_probs, case) for case in SCORED if not case.slow},
    **{case.name: partial(wrapped, case) for case in ESTIMATORS},
    "perturbed_topk": partial(scored_by_another, PerturbedTopK),
    "imle": partial(scored_by_another, IMLE),
}
LAWS = {
    **{name: (make, INSIDE, WRONG) for name, make in HARD.items()},
    "relaxed": (partial(RelaxedKHot, 0.5), sigmoid_topk(LOGITS[0], K), OFF_THE_SIMPLEX),
    "relaxed_hard": (partial(RelaxedKHot, 0.5), sigmoid_topk(LOGITS[0], K), WRONG[~(WRONG == 0.6).all(-1)]),
    "relaxed_straight_through": (
        partial(RelaxedKHotStraightThrough, 0.5),
        sigmoid_topk(LOGITS[0], K),
        OFF_THE_SIMPLEX,
    ),
}
every_law = for_each("make, inside, outside", LAWS.values())


@every_law
def test_is_impossible_without_validation(make, inside, outside):
    for rows in (LOGITS, LOGITS[0]):
        logits = rows.clone().requires_grad_()
        values = torch.cat((inside[None], outside)).view(-1, *[1] * (rows.dim() - 1), 5).requires_grad_()
        law = make(logits=logits, k=K, validate_args=False)
        log_prob = law.log_prob(values)
        assert log_prob.shape == (len(outside) + 1, *rows.shape[:-1])
        assert (log_prob[1:] == -torch.inf).all()
        expected = make(logits=logits, k=K).log_prob(inside.expand(rows.shape))
        torch.testing.assert_close(log_prob[0], expected)
        wanted = torch.autograd.grad(expected.sum(), logits)[0]
        grad, value_grad = torch.autograd.grad(
            log_prob.sum(), (logits, values), allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(grad, wanted)
        assert value_grad[0].isfinite().all() and (value_grad[1:] == 0).all()


@every_law
def test_is_an_error_with_validation(make, inside, outside):
    law = make(logits=LOGITS, k=K, validate_args=True)
    for value in outside:
        with pytest.raises(ValueError, match=r"within the support|no density where an entry is exactly 0 or 1"):
            law.log_prob(value)


@every_law
def test_other_dtypes_and_rows_of_other_sizes(make, inside, outside):
    law = make(logits=LOGITS.float(), k=K, validate_args=False)
    assert (law.log_prob(outside[:2].float().unsqueeze(1)) == -torch.inf).all()
    if (inside == inside.round()).all():
        for dtype in (torch.bool, torch.long):
            torch.testing.assert_close(law.log_prob(inside.to(dtype)), law.log_prob(inside.float()))
        wrong = torch.tensor([1, 0, 0, 1, 0])
        assert (law.log_prob(wrong) == -torch.inf).all() and (law.log_prob(wrong.bool()) == -torch.inf).all()


@every_law
def test_under_vmap(make, inside, outside):
    values = torch.stack((inside, *outside[:3]))

    def log_prob(logits, value):
        return make(logits=logits, k=K, validate_args=False).log_prob(value)

    looped = torch.stack([log_prob(LOGITS[0], value) for value in values])
    torch.testing.assert_close(torch.vmap(log_prob, in_dims=(None, 0))(LOGITS[0], values), looped)


WRAPPABLE = [case for case in SCORED if case.exact_probs and not case.slow]


@for_each("case", WRAPPABLE)
def test_phantom_unit(case):
    """Sums 3 and 3.4: with sizes 3, and 3 or 4."""
    probs = torch.tensor([[0.3, 0.75, 0.75, 0.6, 0.6], [0.9, 0.8, 0.7, 0.5, 0.5]], dtype=torch.float64)
    probs.requires_grad_()
    keywords = getattr(case.make, "keywords", {})
    law = PhantomUnit(getattr(case.make, "func", case.make), probs=probs, validate_args=False, **keywords)
    outside = torch.cat((WRONG[:2], WRONG[3:])).unsqueeze(1).requires_grad_()  # four ones are one of the sizes
    log_prob = law.log_prob(outside)
    assert (log_prob == -torch.inf).all()
    for gradient in torch.autograd.grad(log_prob.sum(), (probs, outside), allow_unused=True, materialize_grads=True):
        assert (gradient == 0).all()
    assert law.log_prob(WRONG[2])[0] == -torch.inf and law.log_prob(WRONG[2]).shape == (2,)


def test_samples_that_remember_their_scores_have_them_scored():
    """Also where rounding took what the value could tell, and not by a law of another size."""
    logits = (40 * LOGITS).float()
    y = RelaxedKHot(0.5, logits=logits, k=K).rsample((50,))
    assert RelaxedKHot(0.5, logits=logits, k=K, validate_args=False).log_prob(y).isfinite().all()
    assert (RelaxedKHot(0.5, logits=logits, k=2, validate_args=False).log_prob(y) == -torch.inf).all()


@for_each("validate_args", (False, True))
def test_complex_values_are_refused(validate_args):
    design = ConditionalPoisson(logits=LOGITS, k=K, validate_args=validate_args)
    for law in (design, StraightThrough(design), RelaxedKHot(0.5, logits=LOGITS, k=K, validate_args=validate_args)):
        with pytest.raises(TypeError, match="`value` must be real, but got a tensor of dtype torch.complex128"):
            law.log_prob(INSIDE.to(torch.complex128))


def test_with_validation_a_value_is_impossible_in_rows_of_another_size():
    design = ConditionalPoisson(logits=torch.zeros(2, 3), k=torch.tensor([1, 2]), validate_args=True)
    found = design.log_prob(torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(found, torch.tensor([-torch.inf, -math.log(3)]))
