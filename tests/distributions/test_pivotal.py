"""The pivotal method: reference values, and what rounding must not do."""

import json
from pathlib import Path

import pytest
import torch

from khot.distributions import Pivotal
from khot.kernels.draws import balance, missing_share, tournament
from tests import gof
from tests.loops import for_each

ORACLES = Path(__file__).parents[1] / "oracles"
REFERENCE = json.loads((ORACLES / "exact_pips_designs.json").read_text())
CASES = [case for case in REFERENCE["cases"] if case["design"] == "sampford"]


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def vectors(subsets, n):
    return torch.zeros(len(subsets), n, dtype=torch.float64).scatter_(-1, torch.tensor(subsets), 1)


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("case", CASES[-4:], ids=lambda case: case["id"])
def test_inclusion_probabilities(case):
    torch.manual_seed(0)
    draws = Pivotal(probs=tensor(case["pi"])).sample((20_000,))
    gof.check_k_hot(draws, case["k"])
    gof.check_inclusion(draws, tensor(case["pi"]))


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_size_is_exact_whatever_the_rounding(dtype):
    # Sums like those of 1/3 miss the integer by n eps; the design spreads the difference.
    blocks = [0.2] * 5 + [0.0] * 3 + [1 / 7] * 7
    for probs in ([1 / 3] * 3, [1 / 3] * 30, [0.1] * 10 + [1.0], [0.7, 0.3, 0.0, 1.0], blocks):
        probs = tensor(probs, dtype)
        draws = Pivotal(probs=probs).sample((2000,))
        assert draws.dtype == dtype
        gof.check_k_hot(draws, round(probs.double().sum().item()))
        assert (draws[:, probs == 0] == 0).all() and (draws[:, probs == 1] == 1).all()


@pytest.mark.interpreted
def test_half_precision_logits_of_long_rows():
    torch.manual_seed(0)
    for k in (3, 500, 1999):
        gof.check_k_hot(Pivotal(logits=torch.randn(4, 2000).to(torch.bfloat16), k=k).sample((5,)), k)


def test_probabilities_next_to_0_and_1():
    torch.manual_seed(0)
    tiny, close = 1e-17, 1 - 1e-9
    for probs in ([tiny, 1, 0.5, 0.5], [1, tiny, 1, 1], [close, 1 - close, 0, close, 1 - close], [5e-324, 0.5, 0.5]):
        design = Pivotal(probs=tensor(probs))
        draws = design.sample((1000,))
        gof.check_k_hot(draws, int(design.k))


@pytest.mark.interpreted
def test_single_units():
    assert Pivotal(probs=tensor([1.0])).sample().tolist() == [1.0]
    assert Pivotal(probs=tensor([0.0])).sample().tolist() == [0.0]
    both = Pivotal(logits=tensor([[3.0], [-1.0]]), k=torch.tensor([1, 0]))
    assert both.sample().tolist() == [[1.0], [0.0]]


def test_draws_spread_over_pairs():
    # All units equal: by symmetry every pair has the same probability, k (k - 1) / (n (n - 1)).
    torch.manual_seed(0)
    draws = Pivotal(probs=torch.full((7,), 3 / 7, dtype=torch.float64)).sample((20_000,))
    gof.check_pairs(draws, torch.full((7, 7), 1 / 7, dtype=torch.float64))


def test_long_rows():
    # n = 40 000: size exact; inclusion counts by group, each a sum of many negatively dependent units, at 5.5 s.d.
    torch.manual_seed(0)
    probs = torch.tensor([0.001, 0.2, 0.7, 0.999], dtype=torch.float64).repeat_interleave(10_000)
    probs = probs * (19_000 / probs.sum())
    design = Pivotal(probs=probs)
    draw = design.sample()
    gof.check_k_hot(draw, 19_000)
    for group in range(4):
        part = slice(10_000 * group, 10_000 * (group + 1))
        expected, variance = probs[part].sum(), design.variance[part].sum()
        assert (draw[part].sum() - expected).abs() < gof.Z_LIMIT * variance.sqrt()


def test_balance():
    probs = torch.tensor([[0.0, 1.0, 0.3, 0.6], [0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    balanced = balance(probs, torch.tensor([2, 2]))
    torch.testing.assert_close(balanced.sum(-1), tensor([2.0, 2.0]))
    assert balanced[0, :2].tolist() == [0.0, 1.0] and torch.equal(balanced[1], probs[1])


def test_balance_moves_no_probability_out_of_its_range():
    """Where the sum misses k by more than the probabilities can be moved."""
    for values, k, share in (([1.0, 1.0, 0.4, 0.001], 2, -1.0), ([0.1, 0.6, 0.999], 3, 1.0)):
        probs = tensor(values).requires_grad_()
        balanced = balance(probs, torch.tensor(k))
        assert ((balanced >= 0) & (balanced <= 1)).all() and missing_share(probs, torch.tensor(k)).item() == share
        (gradient,) = torch.autograd.grad(balanced.sum(), probs)
        torch.testing.assert_close(gradient, 1 + share * (1 - 2 * probs.detach()))


def test_tournament_leaves_its_input_alone():
    probs = torch.full((3, 5), 0.4, dtype=torch.float64)
    value = tournament(probs, 2, share=missing_share(probs, torch.full((3,), 2)))
    assert (value.sum(-1) == 2).all()
    assert value.shape == (2, 3, 5) and value.dtype == torch.bool and (probs == 0.4).all()
