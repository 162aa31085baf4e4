"""Expectations by full enumeration: what an estimator gives for every outcome of its draws, weighted and summed."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from khot import Brewer, ConditionalPoisson, PhantomUnit, Sampford, Systematic

LOGITS = torch.tensor([0.4, -1.2, 0.9, 0.1], dtype=torch.float64)
WEIGHT = torch.tensor([0.3, 1.0, -0.5, 2.0], dtype=torch.float64)
SCORED = {  # n = 4, k = 2, on logits that require a gradient
    "conditional_poisson": lambda logits: ConditionalPoisson(logits=logits, k=2),
    "sampford": lambda logits: Sampford(logits=logits, k=2),
    "brewer": lambda logits: Brewer(logits=logits, k=2),
    "systematic_fixed": lambda logits: Systematic(logits=logits, k=2, order="fixed"),
    "phantom_unit": lambda logits: PhantomUnit(Sampford, logits=logits),
}


def loss(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of k-hot vectors that is no quadratic one, with a parameter."""
    return lambda x: torch.sin(3 * (x * weight).sum(-1)) + (x * weight).square().cumsum(-1).prod(-1) + 2


def leaves() -> tuple[Tensor, Tensor]:
    return LOGITS.clone().requires_grad_(), WEIGHT.clone().requires_grad_()


def possible(design) -> tuple[Tensor, Tensor]:
    """The vectors of positive probability and their probabilities, without gradient."""
    with torch.no_grad():
        support = design.enumerate_support()
        probability = design.log_prob(support).exp()
        return support[probability > 0], probability[probability > 0]


def exact(design, f) -> Tensor:
    support, _ = possible(design)
    return (design.log_prob(support).exp() * f(support)).sum(0)


def tuples(design, num_samples: int) -> tuple[Tensor, Tensor]:
    """All ``num_samples``-tuples of vectors (S, T, n), and the probabilities (T,) of drawing them independently."""
    support, probability = possible(design)
    index = torch.tensor(list(itertools.product(range(len(support)), repeat=num_samples))).T
    return support[index], probability[index].prod(0)


def derivatives(value: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """First derivatives, and the second ones along fixed directions."""
    first = torch.autograd.grad(value, inputs, create_graph=True)
    mixed = sum((g * torch.arange(1.0, 5.0).double().cos()).sum() for g in first)
    return [*first, *torch.autograd.grad(mixed, inputs, retain_graph=True)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-10)
