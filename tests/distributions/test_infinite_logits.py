"""Units that infinite logits include or exclude: the others have the law, and the derivatives, that they have alone."""

import math

import pytest
import torch
from torch.distributions import kl_divergence

from khot.distributions import ConditionalPoisson
from khot.estimators import StraightThrough
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS, DesignCase

FREE = torch.tensor([0.2, 0.4, -0.3, 0.5], dtype=torch.float64)  # 2 of them
CERTAIN = {"excluded": (-math.inf,), "included": (math.inf,), "both": (math.inf, -math.inf)}


def with_certain(free, certain):
    """The logits of all units, those with infinite logits first, all with a gradient."""
    return torch.cat((torch.tensor(certain, dtype=free.dtype), free.detach())).requires_grad_()


def numbers(case, logits, k, certain=()):
    """What the design says, of vectors that contain the certain units."""
    design = case.make(logits=logits, k=k)
    ones = torch.tensor([float(x > 0) for x in certain], dtype=torch.float64).expand(6, -1)
    found = [design.mean[len(certain) :]]
    if case.has_log_prob:
        free = ConditionalPoisson(logits=FREE, k=2).enumerate_support()
        log_prob = design.log_prob(torch.cat((ones, free), -1))
        found += [log_prob[log_prob > -math.inf]]
    if case.has_entropy:
        found += [design.entropy(), kl_divergence(design, ConditionalPoisson(logits=logits / 2, k=k))]
    return found


@pytest.mark.usefixtures("cpu_backend")  # the integrals of order sampling leave these units out in code of their own
@for_each("create_graph", [False, True])
@for_each("certain", CERTAIN.values())
@for_each("case", DESIGNS)
def test_results_and_gradients_are_those_of_the_others(case: DesignCase, certain, create_graph):
    alone, together = FREE.clone().requires_grad_(), with_certain(FREE, certain)
    k = 2 + sum(x > 0 for x in certain)
    wanted, found = numbers(case, alone, 2), numbers(case, together, k, certain)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)
        weight = normal(*one.shape)
        (grad,) = torch.autograd.grad((one * weight).sum(), alone, retain_graph=True)
        (of_all,) = torch.autograd.grad((other * weight).sum(), together, retain_graph=True, create_graph=create_graph)
        torch.testing.assert_close(of_all[len(certain) :], grad, rtol=1e-7, atol=1e-8)
        assert (of_all[: len(certain)] == 0).all()


def test_scores_of_straight_through_draws_have_a_gradient():
    logits = with_certain(FREE, CERTAIN["both"])
    latent = StraightThrough(ConditionalPoisson(logits=logits, k=3))
    (grad,) = torch.autograd.grad(latent.log_prob(latent.rsample((5,))).sum(), logits)
    assert grad.isfinite().all()
