"""What loops over rows build on: counts, neighbours of a threshold, brackets with exactly k entries above them."""

import math

import numpy as np
import pytest
import torch

from tests.inputs import normal
from tests.kernels.test_selection import ROWS

numba = pytest.importorskip("numba", reason="numba is not installed")

from khot.kernels.selection.numba_counting import (  # noqa: E402 - skipped before it imports numba
    ANYWHERE,
    SUSPECT,
    count_above,
    cut,
    guesses_of_sample,
    neighbours,
)


@numba.njit
def bracket(x, k, guesses):
    """The k-th largest entry and the next one, and whether they differ: then k entries are above the smaller one."""
    t, above = cut(x, k, guesses, SUSPECT)
    if above != k:
        return t, t, False
    below, last = neighbours(x, t)
    return last, below, True


@numba.njit
def all_of(x, k, t):
    guesses = guesses_of_sample(x, k, np.empty(min(x.shape[0], 64), x.dtype))
    return count_above(x, t), neighbours(x, t), bracket(x, k, ANYWHERE), bracket(x, k, guesses), guesses


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_brackets(kind, dtype):
    x = ROWS[kind](normal(200)).to(dtype)
    ordered = x.sort(descending=True).values.tolist()
    for k in (1, 20, 100, 199):
        t = x.numpy().dtype.type(ordered[50])
        count, (below, above), found, again, guesses = all_of(x.numpy(), k, t)
        assert count == sum(v > t for v in ordered)
        assert below == max(v for v in ordered if v <= t) and above == min(
            [v for v in ordered if v > t], default=math.inf
        )
        last, following = ordered[k - 1 : k + 1]
        assert found == again == (last, following, last != following)
        assert guesses[0] <= guesses[1] <= guesses[2]


def test_brackets_at_the_ends():
    x = normal(200).numpy()
    assert all_of(x, 0, 0.0)[2] == (math.inf, x.max(), True)
    assert all_of(x, 200, 0.0)[2] == (x.min(), -math.inf, True)


@pytest.mark.parametrize(
    "guesses", [(5.0, 5.0, 5.0), (-math.inf, -math.inf, math.inf), (9.0, -9.0, 0.0), (math.nan,) * 3]
)
def test_any_guesses_will_do(guesses):
    x = normal(100)
    ordered = x.sort(descending=True).values.tolist()
    for k in (3, 50):
        assert bracket(x.numpy(), k, guesses) == (*ordered[k - 1 : k + 1], True)
