"""The pivotal method: reference values, and what rounding must not do."""

import json
import math
from pathlib import Path

import pytest
import torch

from khot.distributions import Pivotal
from khot.kernels.draws import balance, missing_share, tournament
from tests import gof
from tests.kernels.device import mark_interpreted

ORACLES = Path(__file__).parents[1] / "oracles"
REFERENCE = json.loads((ORACLES / "exact_pips_designs.json").read_text())
CASES = [case for case in REFERENCE["cases"] if case["design"] == "pivotal"]
in_each_backend = pytest.mark.usefixtures("cpu_backend")
ORDERS = pytest.mark.parametrize("order", ["random", "fixed"])


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def vectors(subsets, n):
    return torch.zeros(len(subsets), n, dtype=torch.float64).scatter_(-1, torch.tensor(subsets), 1)


@in_each_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_fixed_order_agrees_with_the_reference(case):
    design = Pivotal(probs=tensor(case["pi"]), order="fixed")
    support, listed = design.enumerate_support(), vectors(case["subsets"], case["n"])
    expected = tensor(case["log_prob"])
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(design.log_prob(listed), expected, **close)
    assert (design.log_prob(support) > -math.inf).sum() == len(listed)  # all others have probability 0 exactly
    torch.testing.assert_close(design.pairwise_inclusion, tensor(case["pair"]), **close)
    torch.testing.assert_close(design.entropy(), tensor(case["entropy"]), **close)
    torch.manual_seed(0)
    gof.check_sampler(design.sample((50_000,)), listed, expected.exp())


@in_each_backend
@pytest.mark.parametrize("case", CASES[-4:], ids=lambda case: case["id"])
def test_random_order_has_the_inclusion_probabilities(case):
    torch.manual_seed(0)
    draws = Pivotal(probs=tensor(case["pi"])).sample((100_000,))
    gof.check_k_hot(draws, case["k"])
    gof.check_inclusion(draws, tensor(case["pi"]))


@in_each_backend
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "tags" in case], ids=lambda case: case["id"])
def test_fixed_order_at_a_million_draws(case):
    torch.manual_seed(0)
    draws = Pivotal(probs=tensor(case["pi"]), order="fixed").sample((1_000_000,))
    gof.check_sampler(draws, vectors(case["subsets"], case["n"]), tensor(case["log_prob"]).exp())


@in_each_backend
@ORDERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_size_is_exact_whatever_the_rounding(order, dtype):
    # Sums like those of 1/3 miss the integer by n eps; the design spreads the difference.
    blocks = [0.2] * 5 + [0.0] * 3 + [1 / 7] * 7
    for probs in ([1 / 3] * 3, [1 / 3] * 30, [0.1] * 10 + [1.0], [0.7, 0.3, 0.0, 1.0], blocks):
        probs = tensor(probs, dtype)
        draws = Pivotal(probs=probs, order=order).sample((2000,))
        assert draws.dtype == dtype
        gof.check_k_hot(draws, round(probs.double().sum().item()))
        assert (draws[:, probs == 0] == 0).all() and (draws[:, probs == 1] == 1).all()


@in_each_backend
def test_blocks_with_a_whole_sum_keep_their_number_whatever_the_rounding():
    """Of each 19 units of 1/19 one is chosen, though their sums are 1 - 2 eps and 2 - 7 eps on the way."""
    design = Pivotal(probs=torch.full((57,), 1 / 19, dtype=torch.float64), order="fixed")
    for places, log_prob in (([0, 37, 38], -3 * math.log(19)), ([0, 38, 39], -math.inf), ([19, 20, 39], -math.inf)):
        value = torch.zeros(57, dtype=torch.float64)
        value[places] = 1
        assert design.log_prob(value).item() == pytest.approx(log_prob)


@pytest.mark.parametrize("order", [mark_interpreted("random"), "fixed"])
def test_half_precision_logits_of_long_rows(order):
    torch.manual_seed(0)
    for k in (3, 500, 1999):
        gof.check_k_hot(Pivotal(logits=torch.randn(4, 2000).to(torch.bfloat16), k=k, order=order).sample((5,)), k)


@in_each_backend
@ORDERS
def test_probabilities_next_to_0_and_1(order):
    torch.manual_seed(0)
    tiny, close = 1e-17, 1 - 1e-9
    for probs in ([tiny, 1, 0.5, 0.5], [1, tiny, 1, 1], [close, 1 - close, 0, close, 1 - close], [5e-324, 0.5, 0.5]):
        design = Pivotal(probs=tensor(probs), order=order)
        draws = design.sample((1000,))
        gof.check_k_hot(draws, int(design.k))
        if order == "fixed":
            assert not design.log_prob(draws).isnan().any() and design.pairwise_inclusion.isfinite().all()


@pytest.mark.interpreted
@ORDERS
def test_single_units(order):
    assert Pivotal(probs=tensor([1.0]), order=order).sample().tolist() == [1.0]
    assert Pivotal(probs=tensor([0.0]), order=order).sample().tolist() == [0.0]
    both = Pivotal(logits=tensor([[3.0], [-1.0]]), k=torch.tensor([1, 0]), order=order)
    assert both.sample().tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fixed_order_excludes_within_a_block(dtype):
    # Units whose probabilities sum to 1 in the given order: exactly one of them is drawn, and blocks are independent.
    design = Pivotal(probs=tensor([0.1] * 10 + [0.2] * 5, dtype), order="fixed")
    two_in_one_block = torch.zeros(15, dtype=dtype)
    two_in_one_block[[0, 9]] = 1
    assert design.log_prob(two_in_one_block) == -math.inf
    one_in_each = torch.zeros(15, dtype=dtype)
    one_in_each[[9, 14]] = 1
    assert design.log_prob(one_in_each).item() == pytest.approx(math.log(0.02), rel=1e-6)
    torch.testing.assert_close(design.covariance_matrix[:10, 10:], torch.zeros(10, 5, dtype=dtype), rtol=0, atol=1e-8)


def test_gradient_at_impossible_vectors_is_zero():
    logits = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    design = Pivotal(logits=logits, k=3, order="fixed")
    log_prob = design.log_prob(design.enumerate_support())
    impossible = log_prob == -math.inf
    assert impossible.any()
    for part in (log_prob[impossible].exp().sum(), log_prob[impossible].sum()):
        (grad,) = torch.autograd.grad(part, logits, retain_graph=True)
        assert torch.equal(grad, torch.zeros_like(grad))
    (grad,) = torch.autograd.grad(log_prob.exp().sum(), logits)  # at a kink: finite, from one side
    assert grad.isfinite().all()


@in_each_backend
def test_random_order_spreads_over_pairs():
    # All units equal: by symmetry every pair has the same probability, k (k - 1) / (n (n - 1)).
    torch.manual_seed(0)
    draws = Pivotal(probs=torch.full((7,), 3 / 7, dtype=torch.float64)).sample((100_000,))
    gof.check_pairs(draws, torch.full((7, 7), 1 / 7, dtype=torch.float64))


@in_each_backend
def test_long_rows():
    # n = 40 000: size exact; inclusion counts by group, each a sum of many negatively dependent units, at 5.5 s.d.
    torch.manual_seed(0)
    probs = torch.tensor([0.001, 0.2, 0.7, 0.999], dtype=torch.float64).repeat_interleave(10_000)
    probs = probs * (19_000 / probs.sum())
    for order in ("random", "fixed"):
        design = Pivotal(probs=probs, order=order)
        draw = design.sample()
        gof.check_k_hot(draw, 19_000)
        for group in range(4):
            part = slice(10_000 * group, 10_000 * (group + 1))
            expected, variance = probs[part].sum(), design.variance[part].sum()
            assert (draw[part].sum() - expected).abs() < gof.Z_LIMIT * variance.sqrt()
    assert design.log_prob(draw).isfinite()
    gap = draw.cumsum(-1) - probs.cumsum(-1)
    assert gap.abs().max() < 1 + 1e-6  # the given order keeps every partial count within 1 of its expectation


def test_balance():
    probs = torch.tensor([[0.0, 1.0, 0.3, 0.6], [0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    balanced = balance(probs, torch.tensor([2, 2]))
    torch.testing.assert_close(balanced.sum(-1), tensor([2.0, 2.0]))
    assert balanced[0, :2].tolist() == [0.0, 1.0] and torch.equal(balanced[1], probs[1])


def test_tournament_leaves_its_input_alone():
    probs = torch.full((3, 5), 0.4, dtype=torch.float64)
    value = tournament(probs, 2, share=missing_share(probs, torch.full((3,), 2)))
    assert (value.sum(-1) == 2).all()
    assert value.shape == (2, 3, 5) and value.dtype == torch.bool and (probs == 0.4).all()


def test_unknown_order():
    with pytest.raises(ValueError, match="`order`.*'sorted'"):
        Pivotal(probs=tensor([0.5, 0.5]), order="sorted")
