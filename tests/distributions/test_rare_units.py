"""Units that are hardly ever chosen, or hardly ever not, take no digits of the gradients of all others."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from khot import ConditionalPoisson, GumbelTopK, ParetoSampling, log_sigmoid_topk, sigmoid_topk
from khot.laws.inverse import solve_logits
from tests.inputs import normal
from tests.loops import for_each


def of_probs(make: Callable[..., torch.distributions.Distribution]) -> Callable[[Tensor, int], Tensor]:
    def log_prob(x: Tensor, k: int) -> Callable[[Tensor], Tensor]:
        return make(probs=sigmoid_topk(x, k)).log_prob

    return log_prob


def exact_pareto(x: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    return ParetoSampling(logits=x, k=k, adjust="exact").log_prob


# Laws whose logits are solved for, as functions of scores, which all approach the law of the other units as one goes.
LAWS = {
    "conditional_poisson": of_probs(ConditionalPoisson),
    "gumbel_topk": of_probs(GumbelTopK),
    "exact_pareto": exact_pareto,
}


@functools.cache
def drawn(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Scores, and a vector of k ones at scores of all sizes."""
    x = normal(n, seed=n, scale=2.0)
    return x, torch.zeros(n, dtype=torch.float64).index_fill(0, x.argsort()[:: max(1, n // k)][-k:], 1.0)


def gradient(law: Callable[..., Callable[[Tensor], Tensor]], x: Tensor, k: int, value: Tensor) -> Tensor:
    """Of the logarithm of a probability in the scores."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(law(x, k)(value), x)[0]


@for_each("name", list(LAWS))
@for_each("n, k", [(4, 2), (9, 3), (20, 7), (40, 12)])  # each for another way to solve
@for_each("distance", [38.0, 100.0, 300.0])
def test_others_do_not_notice(distance: float, n: int, k: int, name: str) -> None:
    x, value = drawn(n, k)
    far = x.new_tensor([x.min() - distance, x.max() + distance, x.min() - 1.1 * distance])
    expected = gradient(LAWS[name], x, k, value)
    value = torch.cat((x.new_tensor([0.0, 1.0, 0.0]), value))
    found = gradient(LAWS[name], torch.cat((far, x)), k + 1, value)
    # Logits are found to some 1e-14 of the largest, by rules for integrals in families other than the first.
    grain = (1e-9 if name != "conditional_poisson" else 1e-13 * distance) * expected.abs().max()
    assert (found[3:] - expected).abs().max() <= grain
    assert found[:3].abs().max() <= grain


@for_each("dtype", [torch.float32, torch.float64])
@for_each("gap", [40.0, 60.0, 85.0])
def test_sharp_scores(gap: float, dtype: torch.dtype) -> None:
    """At scores (0, 0.4, 1) the gradient is that of three units, however far away a fourth one is."""
    x = torch.tensor([0.0, 0.4, 1.0], dtype=dtype)
    value = torch.tensor([0.0, 1.0, 1.0], dtype=dtype)
    expected = gradient(LAWS["conditional_poisson"], x.double(), 2, value.double())
    far = torch.cat((x, x.new_tensor([-gap])))
    found = gradient(LAWS["conditional_poisson"], far, 2, torch.cat((value, value.new_zeros(1))))
    torch.testing.assert_close(found[:3].double(), expected, rtol=0, atol=20 * torch.finfo(dtype).eps)
    assert found[3].abs() < 1e-15


@for_each("n", [6, 20, 60])
def test_logits_of_rare_units_move_much_and_others_do_not(n: int) -> None:
    """The logits have the mean 0, so that all of them depend on all; what has no mean does not."""
    x = normal(n, seed=2)
    x[:2] -= 45.0
    probs = sigmoid_topk(x, 2).requires_grad_()
    logits = solve_logits(probs, 2)
    others = torch.autograd.grad((logits[3:] - logits[2]) @ normal(n - 3, seed=4), probs)[0]
    without = sigmoid_topk(x[2:], 2).requires_grad_()
    logits = solve_logits(without, 2)
    expected = torch.autograd.grad((logits[1:] - logits[0]) @ normal(n - 3, seed=4), without)[0]
    torch.testing.assert_close(others[2:], expected, rtol=1e-11, atol=1e-11)
    logits = solve_logits(probs, 2)
    (rare,) = torch.autograd.grad(logits[0], probs)
    assert (rare[0] * probs[0]).item() == pytest.approx(1 - 1 / n, rel=1e-9)  # less its part of the mean


# What probabilities near 1 have lost in the first place: more, the rarer the unit that is chosen or left out.
LOST = [(1, 0, 1e-13), (1, 20, 1e-11), (1, 35, 1e-8), (-1, 0, 1e-11), (-1, 5, 1e-9)]


@for_each("k, outliers, lost", LOST)
@for_each("n", [12, 33, 40, 200])
def test_the_least_probable_unit_is_chosen(n: int, k: int, outliers: int, lost: float) -> None:
    """One chosen unit, or one that is left out of all, has the probability that the law is made of."""
    x = normal(50, n, seed=n)
    x[:, 0] += outliers
    x[:, -1] -= outliers
    x.requires_grad_()
    value = torch.nn.functional.one_hot(x.argmin(-1), n).double()
    (expected,) = torch.autograd.grad((log_sigmoid_topk(x, 1) * value).sum(), x)
    law = ConditionalPoisson(probs=sigmoid_topk(k * x, k % n))
    (found,) = torch.autograd.grad(law.log_prob(value if k == 1 else 1 - value).sum(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=lost)
