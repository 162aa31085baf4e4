"""Paths of several swaps: their probabilities, the chains that they make, exactly on a few units, and their lengths."""

import itertools
import math

import pytest
import torch

from khot import ConditionalPoisson
from khot.infer.paths import ACCEPTANCE, SINGLE_SHARE, Path, PathLength
from khot.infer.swaps import Point, Sizes, log_ratio
from tests.gof import check_subsets
from tests.infer.test_swaps import SLOPES
from tests.inputs import normal
from tests.loops import for_each


def all_paths(x, length):
    """Every path from a k-hot vector (n,), as one batch."""
    leaving = itertools.permutations(x.nonzero()[:, 0].tolist(), length)
    pairs = list(itertools.product(leaving, itertools.permutations((1 - x).nonzero()[:, 0].tolist(), length)))
    return Path(*(torch.tensor(units) for units in zip(*pairs, strict=True)))


def point(value, slope, log_joint, number):
    """The same state in each of several blocks."""
    sizes = value.sum().long().expand(number, 1)
    one = slope.expand(number, 1, -1), log_joint.expand(number)
    return Point(value.expand(number, 1, -1), *one, Sizes(sizes, sizes))


@for_each("slope_of, share", zip(SLOPES.values(), (0.1, 1.0, 0.1, 0.0), strict=True))
@for_each("k, n, length", [(2, 5, 2), (3, 6, 2), (3, 6, 3), (1, 4, 1)])
def test_chain_is_reversible(k, n, length, slope_of, share):
    """Detailed balance on the full transition matrix; the probabilities of all paths from a state add up to 1."""
    states, h, coupling = ConditionalPoisson(logits=normal(n), k=k).enumerate_support(), normal(n), normal(n, n, seed=1)
    coupling = (coupling + coupling.mT) / 2
    log_joint = states @ h + (states @ coupling * states).sum(-1)
    law, slope = log_joint.softmax(0), slope_of(states, h, coupling)
    flow = torch.zeros(len(states), len(states), dtype=torch.float64)
    for number, x in enumerate(states):
        paths = all_paths(x, length)
        here = point(x, slope[number], log_joint[number], len(paths.leaving))
        probability = paths.log_prob(here, share).exp()
        torch.testing.assert_close(probability.sum().item(), 1.0, rtol=0, atol=1e-12)
        ends = paths.of(here.value)
        new = (ends == states).all(-1).double().argmax(-1)
        there = Point(ends, slope[new].unsqueeze(1), log_joint[new], here.sizes)
        taken = probability * log_ratio(paths, here, there, share).clamp(max=0).exp()
        flow[number].index_add_(0, new, law[number] * taken)
    torch.testing.assert_close(flow, flow.mT, rtol=0, atol=1e-12)
    assert flow.sum() > 0


@for_each("share", [0.0, 0.3, 1.0])
def test_draws_follow_the_probabilities(share):
    """Chi-square of the paths of one state, level 1e-6."""
    torch.manual_seed(0)
    x, number = torch.tensor([1.0, 0, 1, 0, 1]), 20_000
    paths, slope = all_paths(x, 2), 2 * normal(5)
    drawn = Path.draw(point(x, slope, torch.zeros(()), number), 2, share)
    code, powers = torch.cat(drawn, 1), 5 ** torch.arange(4)
    which = ((code @ powers)[:, None] == torch.cat(paths, 1) @ powers).double()
    pmf = paths.log_prob(point(x, slope, torch.zeros(()), len(paths.leaving)), share).exp()
    check_subsets(which, torch.eye(len(pmf)).double(), pmf)


def test_probabilities_of_weights_that_are_far_apart():
    """Of units with log-weights 0, -100, -200 the last two leave next, in this order, with probability almost 1."""
    x, slope = torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([0.0, 200, 400, 0, 0, 0]).double()
    there = point(x, slope, torch.zeros(()), 2)
    order = Path(torch.tensor([[0, 1, 2], [0, 2, 1]]), torch.tensor([[3, 4, 5], [3, 4, 5]]))
    found = order.log_prob(there, 0.0) + math.log(6)
    torch.testing.assert_close(found, torch.tensor([0.0, -100]).double(), rtol=0, atol=1e-12)


@for_each("at_one, mean", [(0.2, 1.0), (0.9, 5.27), (0.999, 20.0)])
def test_lengths_approach_the_best_rate_of_acceptance(at_one, mean):
    """If a swap more multiplies the rate by the same factor."""
    length = PathLength(20)
    for _ in range(2000):
        length.adapt(at_one**length.mean, round(length.mean))
        if length.mean >= 2:
            length.adapt(1.0, 1)
    assert length.mean == pytest.approx(mean, rel=1e-2)
    assert mean in (1, 20) or at_one**mean == pytest.approx(ACCEPTANCE, rel=1e-2)


def test_lengths_are_one_or_next_to_their_mean():
    """Shares within 5 standard errors, level 2e-6."""
    torch.manual_seed(0)
    drawn = torch.tensor([PathLength(9, 3.25).draw() for _ in range(4000)]).double()
    assert {*drawn.tolist()} == {1.0, 3.0, 4.0}
    assert abs((drawn == 1).double().mean() - SINGLE_SHARE) < 5 * math.sqrt(0.1 * 0.9 / 4000)
    assert abs(drawn[drawn > 1].mean() - 3.25) < 5 * math.sqrt(0.25 * 0.75 / 3000)
    assert {PathLength(9, 4.0).draw() for _ in range(99)} == {1, 4}
    assert {PathLength(9, 1.0).draw() for _ in range(9)} == {1}
