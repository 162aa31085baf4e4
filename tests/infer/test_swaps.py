"""Proposals of swaps: their probabilities and the chains that they make, exactly on a few units."""

import itertools
import math

import pytest
import torch

from khot import ConditionalPoisson
from khot.infer.swaps import Point, Proposals, Sizes, Swap, log_ratio
from tests.gof import check_subsets
from tests.inputs import normal
from tests.loops import for_each


def limits_of(rows):
    """Of one block whose rows have these sizes, numbers or ranges."""
    ends = [(row, row) if isinstance(row, int) else row for row in rows]
    low, high = torch.tensor(ends)[None].unbind(-1)
    return Sizes(low, high)


def states_of(sizes, n):
    """All blocks of rows with these sizes, (states, rows, n)."""
    rows = [ConditionalPoisson(logits=normal(n), k=k).enumerate_support() for k in sizes]
    return torch.stack([torch.stack(block) for block in itertools.product(*rows)])


def all_swaps(block, sizes):
    """Every swap in a block (rows, n), each as a batch of one; with unit n, none, those that change a size."""
    for row, x in enumerate(block):
        low, high = (int(end[0, row]) for end in (sizes.low, sizes.high))
        leaving = x.nonzero()[:, 0].tolist() + [len(x)] * bool(x.sum() < high)
        entering = (1 - x).nonzero()[:, 0].tolist() + [len(x)] * bool(x.sum() > low)
        for i, j in itertools.product(leaving, entering):
            if i != j:
                yield Swap(*(torch.tensor([index]) for index in (row, i, j)))


def number_of(block, states):
    return int((states == block).all(-1).all(-1).nonzero())


def proposals(states, sizes, slope, log_joint, share):
    """Every swap of every state: the state's number, the new one's, the probability of the proposal, the log-ratio."""
    for number, block in enumerate(states):
        here = Point(block[None], slope[number][None], log_joint[number][None], sizes)
        for swap in all_swaps(block, sizes):
            new = number_of(swap.of(here.value)[0], states)
            there = Point(states[new][None], slope[new][None], log_joint[new][None], sizes)
            probability = here.proposals.log_prob(swap, share).exp().item()
            yield number, new, probability, log_ratio(swap, here, there, share).item()


def transitions(states, sizes, slope, log_joint, share):
    """The transition matrix of the chain: accepted proposals off the diagonal, and the rest on it."""
    matrix = torch.zeros(len(states), len(states), dtype=torch.float64)
    for number, new, probability, ratio in proposals(states, sizes, slope, log_joint, share):
        matrix[number, new] += probability * math.exp(min(ratio, 0.0))
    return matrix + torch.diag(1 - matrix.sum(-1))


# Any slope that is a function of the state is legal: that of a law quadratic in x, none, one that is wrong, a huge one.
SLOPES = {
    "exact": lambda states, h, coupling: h + 2 * states.flatten(1).matmul(coupling).view_as(states),
    "none": lambda states, h, coupling: torch.zeros_like(states),
    "wrong": lambda states, h, coupling: normal(*states.shape, seed=7),
    "huge": lambda states, h, coupling: 1e3 * normal(*states.shape, seed=8),
}


@for_each("slope_of, share", zip(SLOPES.values(), (0.1, 1.0, 0.1, 0.0), strict=True))
@for_each("sizes, n", [((2,), 5), ((1, 2), 3), ((0, 1), 3), (((1, 3),), 5), (((0, 5),), 5), (((0, 1), 2), 3)])
def test_chain_is_reversible(sizes, n, slope_of, share):
    """Detailed balance, and with it stationarity, on the full transition matrix."""
    states, limits = states_of(sizes, n), limits_of(sizes)
    h, coupling = normal(len(sizes), n), normal(len(sizes) * n, len(sizes) * n, seed=1)
    coupling = (coupling + coupling.mT) / 2
    flat = states.flatten(1)
    log_joint = flat @ h.flatten() + (flat @ coupling * flat).sum(-1)
    law, slope = log_joint.softmax(0), slope_of(states, h, coupling)
    total = torch.zeros_like(law)
    for number, _, probability, _ in proposals(states, limits, slope, log_joint, share):
        total[number] += probability
    torch.testing.assert_close(total, torch.ones_like(law), rtol=0, atol=1e-12)
    matrix = transitions(states, limits, slope, log_joint, share)
    flow = law[:, None] * matrix
    assert (matrix >= -1e-12).all()
    torch.testing.assert_close(flow, flow.mT, rtol=0, atol=1e-12)
    torch.testing.assert_close(law @ matrix, law, rtol=0, atol=1e-12)


def test_a_linear_law_accepts_by_the_normalisers_alone():
    """Where the slope predicts ratios exactly, what is left is Z(x) / Z(x')."""
    states, h = states_of((2,), 5), normal(1, 5)
    log_joint = (states * h).sum((-2, -1))
    z = [((-h / 2).exp() * x).sum() * ((h / 2).exp() * (1 - x)).sum() for x in states]
    for number, new, _, ratio in proposals(states, limits_of((2,)), h.expand_as(states), log_joint, 0.0):
        assert ratio == pytest.approx(float((z[number] / z[new]).log()), abs=1e-12)


@for_each("share", [0.0, 0.3, 1.0])
@for_each("sizes", [(1, 2), ((1, 2), (0, 3))])
def test_draws_follow_the_probabilities(sizes, share):
    """Chi-square of the swaps of one block with two rows, level 1e-6."""
    torch.manual_seed(0)
    value, slope = states_of((1, 2), 4)[3], normal(2, 4)
    limits = limits_of(sizes)
    swaps = list(all_swaps(value, limits))
    drawn = Proposals.of(value.expand(20_000, 2, 4), slope.expand(20_000, 2, 4), limits).draw(share)
    support = torch.stack([swap.of(value[None])[0] for swap in swaps]).flatten(1)
    proposals = Proposals.of(value[None], slope[None], limits)
    pmf = torch.cat([proposals.log_prob(swap, share) for swap in swaps]).exp()
    check_subsets(drawn.of(value.expand(20_000, 2, 4)).flatten(1), support, pmf)


def test_where_there_is_nothing_to_swap():
    rows = torch.tensor([[1.0, 1, 1], [0, 0, 0], [1, 0, 0]])
    fixed = Sizes(rows.sum(-1)[None], rows.sum(-1)[None])
    by_row, zero = Sizes(fixed.low.mT, fixed.high.mT), torch.zeros_like(rows)
    assert by_row.possible(3).tolist() == [False, False, True] and fixed.possible(3).tolist() == [True]
    total = Proposals.of(rows[:, None], zero[:, None], by_row).total[0]
    assert (total > -torch.inf).tolist() == [False, False, True]
    assert Proposals.of(rows[None], zero[None], fixed).draw(0.5).row.tolist() == [2]
    ranges = Sizes(torch.tensor([[2], [0], [1]]), torch.tensor([[3], [0], [1]]))
    assert ranges.possible(3).tolist() == [True, False, True]
    total = Proposals.of(rows[:, None], zero[:, None], ranges).total[0]
    assert (total > -torch.inf).tolist() == [True, False, True]


def test_ratios_of_what_has_no_probability():
    value = torch.tensor([[[1.0, 0.0]]])
    swap = Swap(*(torch.tensor([index]) for index in (0, 0, 1)))
    here = Point(value, torch.zeros_like(value), torch.zeros(1), limits_of((1,)))
    for log_joint in (torch.nan, -torch.inf):
        there = Point(swap.of(value), torch.zeros_like(value), torch.tensor([log_joint]), limits_of((1,)))
        assert log_ratio(swap, here, there, 0.1).item() == -torch.inf
