"""What designs allocate beside their input, at most, by the record of the allocator."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from khot import Brewer, ParetoSampling, StraightThrough, topk_mask
from tests.inputs import normal
from tests.registry import DESIGNS

ROWS, N, K = 4096, 64, 8
TIMES = 16
NODES = 150 * 2**20  # bytes for the integrals of a slab of rows at all nodes of the quadrature


def peak(function):
    """The peak number of bytes that were allocated while the function ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    allocated = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            most = max(most, allocated)
    assert most > 0
    return most


def straight_through(design, weight):
    (StraightThrough(design, log_prob="none").rsample() * weight).sum().backward()


def score(design, weight):
    design.log_prob(topk_mask(weight, design.k)).sum().backward()


def check(make, steps, shape, k, extra=0, times=TIMES):
    for step in steps:
        logits, weight = (normal(*shape, dtype=torch.float32, seed=seed) for seed in range(2))
        logits.requires_grad_()
        most = peak(lambda step=step, x=logits, w=weight: step(make(logits=x, k=k), w))
        assert most <= times * 4 * logits.numel() + extra, f"{step.__name__}: {most / (4 * logits.numel()):.1f} times"


def check_design(case, shape, k):
    steps = (straight_through, score) if case.has_log_prob else (straight_through,)
    check(case.make, steps, shape, k, times=21 if case.name == "sampford" else TIMES)


CASES = [case for case in DESIGNS if case.exact_probs and not case.slow and case.name not in ("gumbel_topk", "brewer")]
QUICK = ("pivotal", "systematic_fixed")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else [pytest.mark.slow]) for c in CASES]
)
def test_many_rows(case):
    check_design(case, (ROWS, N), K)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_short_rows(case):
    check_design(case, (ROWS, 16, 8), 3)


@pytest.mark.slow
def test_brewer():
    check(Brewer, (straight_through, score), (ROWS, N), 4)


@pytest.mark.slow
def test_order_sampling_has_integrals_of_some_rows_at_a_time():
    check(ParetoSampling, (straight_through, score), (ROWS, N), K, extra=NODES)


@pytest.mark.slow
def test_one_long_row_of_the_pivotal_method():
    case = next(case for case in DESIGNS if case.name == "pivotal")
    check(case.make, (straight_through,), (1, 2**20), 1000, times=12)
