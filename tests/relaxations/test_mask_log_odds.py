"""The log-odds of relaxed masks, and the designs that start from them."""

import functools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from khot import (
    ConditionalPoisson,
    ParetoSampling,
    PhantomUnit,
    capped_simplex_map,
    lapsum_topk,
    normal_topk,
    sigmoid_topk,
    sparse_topk,
    transport_topk,
)
from khot.relaxations.mask_log_odds import mask_log_odds
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import Cauchy

INF = float("inf")
SMOOTH = {
    "sigmoid": sigmoid_topk,
    "lapsum": lapsum_topk,
    "normal": normal_topk,
    "transport": transport_topk,
    "own": functools.partial(capped_simplex_map, link=Cauchy()),
}


def arguments():
    x = normal(3, 5, seed=1)
    k, softness = torch.tensor([1.3, 2.0, 4.0], dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    return x, k, softness


@for_each("relaxation", SMOOTH.values())
def test_are_those_of_the_mask(relaxation):
    x, k, softness = arguments()
    torch.testing.assert_close(mask_log_odds(relaxation, x, k, softness), relaxation(x, k, softness).logit())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the normal link's logarithms in a vmap
@for_each("relaxation", SMOOTH.values())
def test_derivatives_of_all_arguments(relaxation):
    function = functools.partial(mask_log_odds, relaxation)
    inputs = [value[1:].clone().requires_grad_() for value in arguments()]
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)
    batched = torch.func.vmap(function)(*arguments())
    torch.testing.assert_close(batched, function(*arguments()))


def test_where_the_mask_has_rounded():
    x = torch.tensor([0.0, 80.0, 200.0], dtype=torch.float64)
    function = functools.partial(mask_log_odds, sigmoid_topk, k=1, softness=1.0)
    torch.testing.assert_close(function(x), torch.tensor([-140.0, -60.0, 60.0], dtype=torch.float64))
    halves = torch.tensor([[1.0, -0.5, -0.5], [0.0, 0.5, -0.5], [0.0, -0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(torch.func.jacrev(function)(x), halves)
    torch.testing.assert_close(torch.func.jacfwd(function)(x), halves)


def test_certain_units():
    x = torch.tensor([[INF, 0.0, 1.0, -INF], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]], requires_grad=True)
    z = mask_log_odds(sigmoid_topk, x, torch.tensor([2, 0, 4]), 1.0)
    assert z[0, 0] == INF and z[0, 3] == -INF and z[1].tolist() == [-INF] * 4 and z[2].tolist() == [INF] * 4
    (gradient,) = torch.autograd.grad(z[0, 1], x)
    torch.testing.assert_close(gradient[0], torch.tensor([0.0, 0.5, -0.5, 0.0]))
    assert (gradient[1:] == 0).all()


@for_each("relaxation", [sparse_topk, lambda x, k, softness: x])
def test_of_other_maps_are_not_known(relaxation):
    assert mask_log_odds(relaxation, normal(4), 2, 1.0) is None


@for_each("adjust", ["analytic", "exact", None])
def test_pareto_sampling_takes_scores_that_float32_masks_lose(adjust):
    """Probabilities beyond 1 - 6e-8 round to 1 in float32, but the design is the same as from float64 scores."""
    x = 25 * normal(4, 12, seed=2)
    value = sigmoid_topk(-x, 5).topk(5).indices  # improbable ones
    value = torch.zeros_like(x).scatter(-1, value, 1.0)
    x = x.float()
    assert (sigmoid_topk(x, 5) == 1).any()
    single = ParetoSampling(logits=x, k=5, adjust=adjust, validate_args=False)
    double = ParetoSampling(logits=x.double(), k=5, adjust=adjust, validate_args=False)
    assert double.log_prob(value).isfinite().all()
    torch.testing.assert_close(single.log_prob(value.float()), double.log_prob(value).float())


def test_a_phantom_unit_hands_its_log_odds_over():
    x = torch.tensor([[3.0, 60.0, -80.0, 0.1, -0.2]], requires_grad=True)
    design = PhantomUnit(ConditionalPoisson, logits=x)
    value = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0]])
    assert design.probs[0, 1] == 1  # rounded
    zeros = torch.zeros(5, requires_grad=True)  # where neither side of a probability is the smaller one
    (slope,) = torch.autograd.grad(PhantomUnit(ConditionalPoisson, logits=zeros).wrapped.logits[..., 0], zeros)
    assert slope[0] > 0.5
    log_prob = design.log_prob(value)
    assert -70 < log_prob.item() < -50
    (gradient,) = torch.autograd.grad(log_prob.sum(), x)
    torch.testing.assert_close(gradient[0, 1], torch.tensor(-1.0))
