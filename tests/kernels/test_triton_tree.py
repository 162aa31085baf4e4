"""Conditional Poisson designs through the kernels of the product tree: on an accelerator, or in the interpreter."""

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE, INTERPRETED, kernel_marks

pytestmark = kernel_marks()

import khot.kernels
from khot.kernels.count import forest
from khot.laws import conditional_poisson as cps
from tests import gof, oracle
from tests.inputs import normal
from tests.log_partition import log_partition

CASES = [
    case for case in oracle.cases("conditional_poisson") if not INTERPRETED or case["id"] in ("cps-009", "cps-016")
]


def close(actual: Tensor, expected: Tensor | float) -> None:
    torch.testing.assert_close(actual.cpu(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_oracle(case):
    k, logits = case["k"], oracle.tensor(case["theta"]).to(DEVICE).requires_grad_()
    log_z, mean = log_partition(logits, k), cps.inclusion_probabilities(logits, k)
    close(log_z, case["log_Z"])
    close(mean, oracle.tensor(case["pi"]))
    close(torch.autograd.grad(log_z, logits)[0], oracle.tensor(case["pi"]))
    value = torch.zeros(len(case["subsets"]), case["n"]).scatter_(1, torch.tensor(case["subsets"]), 1.0)
    close(cps.log_prob(logits, k, value.to(DEVICE)), oracle.tensor(case["log_prob"]))
    if "g" in case:
        grad = torch.autograd.grad(mean, logits, oracle.tensor(case["g"]).to(DEVICE))[0]
        close(grad, oracle.tensor(case["pi_vjp_theta"]))


def test_trees_below_a_torch_tree(monkeypatch):
    """Rows too long for one operation: the lowest levels, then pairs level by level, with windows on a device."""
    n, k = (61, 20) if INTERPRETED else (5000, 2000)
    if INTERPRETED:
        monkeypatch.setattr(forest, "FOREST_LEVELS", 4)
    logits = normal(2, n)
    found = [f(logits.to(DEVICE), k) for f in (log_partition, cps.inclusion_probabilities)]
    with khot.kernels.backend("torch"):
        for value, f in zip(found, (log_partition, cps.inclusion_probabilities), strict=True):
            close(value, f(logits, k))
    draws = cps.sample(logits.to(DEVICE), k, (50,)).cpu()
    gof.check_k_hot(draws, k)
    for row in range(2):
        gof.check_inclusion(draws[:, row], found[1][row].cpu())


def test_third_derivatives():
    logits = normal(3).to(DEVICE)

    def third(f):
        return torch.func.jacrev(torch.func.jacrev(f))(logits)

    found = third(lambda t: cps.inclusion_probabilities(t, 1))
    with khot.kernels.backend("torch"):
        torch.testing.assert_close(found, third(lambda t: cps.inclusion_probabilities(t, 1)))


def test_sampler():
    torch.manual_seed(20)
    logits = 1.5 * normal(5)
    members = torch.combinations(torch.arange(5))
    support = torch.zeros(len(members), 5, dtype=torch.float64).scatter_(1, members, 1.0)
    pmf = (support @ logits).softmax(0)
    count = gof.num_draws(pmf) // (200 if INTERPRETED else 16) + 1
    draws = cps.sample(logits.to(DEVICE).expand(16, 5), 2, (count,)).cpu().flatten(0, 1)
    gof.check_k_hot(draws, 2)
    gof.check_sampler(draws, support, pmf)


def test_sampler_with_certain_units_and_all_sizes():
    logits = normal(4, 21).to(DEVICE)
    logits[:, 3], logits[:, 7] = torch.inf, -torch.inf
    k = torch.tensor([1, 7, 19, 20], device=DEVICE)
    draws = cps.sample(logits, k, (30,))
    assert torch.equal(draws.sum(-1), k.double().expand(30, 4))
    assert (draws[..., 3] == 1).all() and (draws[..., 7] == 0).all()


def test_a_seed_fixes_the_draws():
    logits = normal(3, 9).to(DEVICE)
    generator = torch.Generator(DEVICE)
    first, second = (cps.sample(logits, 4, (5,), generator.manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
