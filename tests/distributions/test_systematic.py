"""Systematic sampling: reference values, and what rounding must not do."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from khot import Systematic
from khot.kernels.draws import balance
from khot.laws import systematic
from khot.laws.systematic import ONE, choose, line
from tests import gof
from tests.loops import for_each
from tests.oracle import cases, tensor

CASES = [case for case in cases("exact_pips_designs") if case["design"] == "systematic"]
ORDERS = for_each("order", ["random", "fixed"])


@for_each("case", CASES)
def test_oracle(case):
    design = Systematic(probs=tensor(case["pi"]))
    listed = torch.zeros(len(case["subsets"]), case["n"], dtype=torch.float64)
    listed.scatter_(-1, torch.tensor(case["subsets"]), 1)
    expected = tensor(case["log_prob"])
    assert ((design.log_prob(listed) - expected).abs() <= 1e-11 * (1 + expected.abs())).all()
    assert (design.log_prob(design.enumerate_support()) > -math.inf).sum() == len(listed)
    assert (design.pairwise_inclusion - torch.stack([tensor(row) for row in case["pair"]])).abs().max() <= 1e-11
    assert abs(design.entropy().item() - case["entropy"]) <= 1e-11
    assert torch.equal(design.mode, listed[expected.argmax()])
    torch.manual_seed(0)
    gof.check_sampler(design.sample((50_000,)), listed, expected.exp())


@for_each("case", CASES[-4:])
def test_random_order_has_the_inclusion_probabilities(case):
    torch.manual_seed(0)
    draws = Systematic(probs=tensor(case["pi"]), order="random").sample((100_000,))
    gof.check_k_hot(draws, case["k"])
    gof.check_inclusion(draws, tensor(case["pi"]))


def test_random_order_spreads_over_pairs():
    torch.manual_seed(0)
    draws = Systematic(probs=torch.full((7,), 3 / 7, dtype=torch.float64), order="random").sample((100_000,))
    gof.check_pairs(draws, torch.full((7, 7), 1 / 7, dtype=torch.float64))


@ORDERS
@for_each("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_size_is_exact_whatever_the_rounding(order, dtype):
    blocks = [0.2] * 5 + [0.0] * 3 + [1 / 7] * 7
    nearly = [1 - 2**-53] * 40 + [40 * 2.0**-53, 0.0]
    for probs in ([1 / 3] * 3, [1 / 3] * 30, [0.1] * 10 + [1.0], [0.7, 0.3, 0.0, 1.0], blocks, nearly):
        probs = tensor(probs, dtype)
        design = Systematic(probs=probs, order=order)
        draws = design.sample((2000,))
        assert draws.dtype == dtype
        gof.check_k_hot(draws, round(probs.double().sum().item()))
        assert (draws[:, probs == 0] == 0).all() and (draws[:, probs == 1] == 1).all()
        if order == "fixed":
            assert design.log_prob(draws).isfinite().all()


@ORDERS
def test_size_is_exact_wherever_the_points_fall(order):
    # Partial sums of numbers next to 1 are rounded by more than the numbers lack to 1, so that a point might fall on a
    # unit twice or on none; such points are too rare to be drawn.
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(200, 1, generator=generator, dtype=torch.float64)
    probs = torch.cat((first, torch.full((200, 40), 1 - 2**-53, dtype=torch.float64), 1 - first), -1)
    probs = probs.gather(-1, torch.rand(probs.shape, generator=generator).argsort(-1)) if order == "random" else probs
    end = line(probs, torch.tensor(41))
    fraction = (end % ONE).double() / ONE
    for u in torch.cat((fraction, fraction - 2**-54), -1).clamp(0, 1 - 2**-53).split(1, dim=-1):
        gof.check_k_hot(choose(end, u).double(), 41)


def test_fractions_of_a_long_row_keep_their_digits():
    probs = torch.rand(5_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = probs.sum().round().long()
    probs = balance(probs, k)
    exact = list(itertools.accumulate(Fraction(p) for p in probs.tolist()))
    scale = int(k) / exact[-1]  # the sum misses k by rounding
    ends = [Fraction(end, ONE) for end in line(probs, k).tolist()]
    errors = [(e * scale - end) % 1 for e, end in zip(exact, ends, strict=True)]
    assert max(min(error, 1 - error) for error in errors) < 1e-15


@ORDERS
def test_probabilities_next_to_0_and_1(order):
    torch.manual_seed(0)
    for probs in ([1e-17, 1, 0.5, 0.5], [1, 1e-17, 1, 1], [1 - 1e-9, 1e-9, 0, 1 - 1e-9, 1e-9], [5e-324, 0.5, 0.5]):
        design = Systematic(probs=tensor(probs), order=order)
        draws = design.sample((1000,))
        gof.check_k_hot(draws, design.k)
        if order == "fixed":
            assert design.log_prob(draws).isfinite().all() and design.pairwise_inclusion.isfinite().all()


@for_each("probs", [[0.1] * 10 + [0.2] * 5, [0.2, 0.3, 0.5] * 5, [1 / 3] * 9])
def test_coinciding_cuts(probs):
    # Partial sums that differ by an integer up to rounding: the vectors in between are impossible.
    design = Systematic(probs=tensor(probs))
    count = {15: 10 if probs[0] == 0.1 else 3, 9: 3}[len(probs)]
    log_prob = design.log_prob(design.enumerate_support())
    assert (log_prob > -math.inf).sum() == count
    assert log_prob.exp().sum().item() == pytest.approx(1, rel=1e-13)
    assert design.log_prob(design.sample((1000,))).isfinite().all()
    assert ((design.pairwise_inclusion > 1e-12) == (design.pairwise_inclusion > 0.05)).all()


def test_gradient_at_impossible_vectors_is_zero():
    logits = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    design = Systematic(logits=logits, k=3)
    log_prob = design.log_prob(design.enumerate_support())
    impossible = log_prob == -math.inf
    assert impossible.sum() == 18
    (grad,) = torch.autograd.grad(log_prob[impossible].sum(), logits, retain_graph=True)
    assert torch.equal(grad, torch.zeros_like(grad))
    (grad,) = torch.autograd.grad(log_prob[~impossible].sum(), logits)  # at a kink: finite, from one side
    assert grad.isfinite().all()


def test_long_rows():
    torch.manual_seed(0)
    probs = torch.tensor([0.001, 0.2, 0.7, 0.999], dtype=torch.float64).repeat_interleave(10_000)
    probs = probs * (19_000 / probs.sum())
    for order in ("random", "fixed"):
        design = Systematic(probs=probs, order=order)
        draw = design.sample()
        gof.check_k_hot(draw, 19_000)
        for part in range(4):
            group = slice(10_000 * part, 10_000 * (part + 1))
            assert (draw[group].sum() - probs[group].sum()).abs() < gof.Z_LIMIT * design.variance[group].sum().sqrt()
    assert (draw.cumsum(-1) - probs.cumsum(-1)).abs().max() < 1 + 1e-6
    assert design.log_prob(draw).isfinite() and 0 < design.entropy() < math.log(40_000)


@ORDERS
def test_indices_are_those_of_the_samples(order):
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(3, 2, 50, generator=generator, dtype=torch.float64)
    rows[0, 0, 7:20] = 0
    rows = rows * (5 / rows.sum(-1, keepdim=True))
    blocks = tensor([0.2] * 5 + [0.0] * 3 + [1 / 7] * 7)
    certain = tensor([0.7, 0.3, 0.0, 1.0]).expand(2, 4)
    nearly = tensor([1 - 2**-53] * 40 + [40 * 2.0**-53, 0.0])
    for probs in (rows, blocks, blocks.float(), certain, nearly, tensor([0.0, 0.0]), tensor([1.0])):
        design = Systematic(probs=probs, order=order)
        k = int(probs.sum(-1).max().round())
        for sample_shape in ((), (20,), (4, 5), (0,)):
            torch.manual_seed(1)
            indices = design.sample_indices(sample_shape)
            torch.manual_seed(1)
            sample = design.sample(sample_shape)
            assert indices.shape == (*sample.shape[:-1], k) and indices.dtype == torch.long
            assert torch.equal(torch.zeros_like(sample).scatter(-1, indices, 1), sample)


def test_unknown_order():
    with pytest.raises(ValueError, match="`order`.*'sorted'"):
        Systematic(probs=tensor([0.5, 0.5]), order="sorted")
    with pytest.raises(NotImplementedError, match="no log_prob.*Sampford"):
        _ = Systematic(probs=tensor([0.5, 0.5]), order="random").mode


@pytest.mark.parametrize("n", [10, 1000, 100_000])
def test_indices_of_the_last_point(n, monkeypatch):
    """With u next to 1 the last point rounds up to the end of the line, where no unit is."""
    design = Systematic(probs=torch.full((n,), 0.5, dtype=torch.float64))
    last = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
    monkeypatch.setattr(systematic, "start_points", lambda shape, *_: last.expand(*shape[:-1], 1))
    indices = design.sample_indices((2,))
    assert indices.max() == n - 1 and (indices.diff(dim=-1) > 0).all()
    gof.check_k_hot(design.sample((2,)), n // 2)
