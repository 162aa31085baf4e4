"""An exponent that is annealed has another value at each step, of which nothing is kept for good."""

import gc
import itertools
from functools import partial

import pytest
import torch

import khot
import khot.nn
from tests.inputs import normal

FIRST, THEN = 260, 40  # steps: more than any cache holds, and what follows when it is full
USES = {
    "mask": lambda x, p: khot.sparse_topk(x, 2, 1.0, p=p),
    "signed": lambda x, p: khot.sparse_topk_signed(x, 2, 1.0, p=p),
    "magnitude": lambda x, p: khot.sparse_topk_magnitude(x, 2, 1.0, p=p),
    "loss": lambda x, p: khot.fenchel_young_topk_loss(x, torch.tensor([1.0, 1.0, 0.0, 0.0]), 2, 1.0, p=p),
    "module": lambda x, p: khot.nn.TopK(2, softness=1.0, relaxation=partial(khot.sparse_topk, p=p))(x),
}


@pytest.fixture(scope="module", autouse=True)
def _what_was_there_does_not_count():
    gc.collect()
    gc.freeze()  # or each of the collections below takes a second, after thousands of other tests


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_nothing_is_kept_of_exponents(use):
    x = normal(4, dtype=torch.float32).requires_grad_()

    def objects_after(steps):
        for i in steps:
            use(x, 1.6 + 1e-4 * i).sum().backward()
        gc.collect()
        return len(gc.get_objects())

    ends = 0, FIRST, FIRST + THEN, FIRST + 2 * THEN
    counts = [objects_after(range(*steps)) for steps in itertools.pairwise(ends)]
    grown = [after - before for before, after in itertools.pairwise(counts)]
    assert min(grown) < THEN // 4  # what is made once, at any time, is in one of the two
