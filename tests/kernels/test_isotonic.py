"""The isotonic solvers: pooling by halves, the compiled loop and dual ascent, against SciPy and each other."""

import pytest
import torch
from scipy.optimize import isotonic_regression

from khot.kernels.isotonic import exact as isotonic
from khot.kernels.isotonic import isotonic as kernel
from khot.kernels.isotonic.exact import Objective, block_minimiser, dual_ascent, pool_by_halves
from tests.inputs import normal


def objective(s, w, p=2.0, strength=1.0, magnitude=False):
    return Objective(s, w, torch.full((len(s), 1), strength, dtype=torch.float64), p, magnitude)


def hard_rows(n):
    """Noise, ties, rows in order, rows in reverse, a rise at the end that pools backwards one by one, a step."""
    place = torch.arange(n, dtype=torch.float64)
    noise = normal(6, n, seed=n)
    last = torch.where(place == n - 1, 2.0 * n, -place)
    return torch.stack(
        [noise[0], noise[1].round(), -place, place, last, noise[2].sort().values - (place < n / 2).double()]
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 31, 33, 100, 1025])
def test_pooling_is_isotonic_regression(n):
    s = hard_rows(n)
    problem = objective(s, torch.zeros_like(s))
    expected = torch.stack([torch.from_numpy(isotonic_regression(row, increasing=False).x.copy()) for row in s.numpy()])
    blocks = pool_by_halves(problem)
    torch.testing.assert_close(block_minimiser(problem, blocks), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("n", [1, 2, 33, 1025])
def test_each_backend_pools(n, magnitude, dtype):
    s = hard_rows(n).to(dtype)
    w, strength = normal(*s.shape, seed=1, dtype=dtype).abs(), torch.linspace(0.1, 2, len(s), dtype=torch.float64)
    v, blocks = kernel(s, w, strength, 2.0, magnitude, False, 0, "s,w")
    problem = Objective(s.double(), w.double(), strength[:, None], 2.0, magnitude)
    assert torch.equal(blocks, pool_by_halves(problem))
    torch.testing.assert_close(v, block_minimiser(problem, blocks), rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("cpu_backend")
def test_contents():
    s, w, one = normal(2, 5), normal(2, 5, seed=1), torch.ones(2, dtype=torch.float64)
    bad = torch.tensor([1.0, torch.nan], dtype=torch.float64)[:, None].expand(2, 5)
    for match, args in [
        ("`x` must be finite, but contains nan", (bad, w, one, 2.0, False)),
        ("`y` must be finite, but contains nan", (s, bad, one, 2.0, False)),
        ("`strength` must be positive and finite, but got 0", (s, w, 0 * one, 2.0, False)),
        ("`w` must not be negative", (s, w, one, 2.0, True)),
    ]:
        with pytest.raises(ValueError, match=match):
            kernel(*args, False, 0, "x,y")


def test_ties_are_not_pooled():
    s = torch.tensor([[2.0] * 20 + [1.0] * 20, [1.0] * 20 + [2.0] * 20], dtype=torch.float64)
    blocks = pool_by_halves(objective(s, torch.zeros_like(s)))
    assert torch.equal(blocks[0], torch.arange(40)) and (blocks[1] == 0).all()


@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize(
    "p",
    [
        2.0,
        pytest.param(1.8, marks=pytest.mark.slow),
        1.5,
        pytest.param(4 / 3, marks=pytest.mark.slow),
        pytest.param(1.1, marks=pytest.mark.slow),
    ],
)
def test_pooling_and_dual_ascent_agree(p, magnitude):
    s, w = normal(4, 25).abs().sort(descending=True).values, normal(4, 25, seed=1).abs()
    w[3] = (torch.arange(25) < 10).double()
    problem = objective(s, w, p, 0.5, magnitude)
    blocks = pool_by_halves(problem)
    v = block_minimiser(problem, blocks)
    assert isotonic._is_optimal(problem, v).all() and (blocks.amax(-1) < 24).all()
    ascent, ascent_blocks = dual_ascent(problem, 500)
    torch.testing.assert_close(ascent, v, rtol=1e-11, atol=1e-11)
    assert torch.equal(ascent_blocks, blocks)


def test_unfinished_dual_ascent_returns_its_iterate():
    s = hard_rows(200)[4:5]
    problem = objective(s, torch.zeros_like(s))
    v = block_minimiser(problem, pool_by_halves(problem))
    with pytest.warns(RuntimeWarning, match="1 of 1 rows still rise"):
        distance = [(dual_ascent(problem, sweeps)[0] - v).abs().max().item() for sweeps in (1, 10, 40)]
    assert distance[0] > distance[1] > distance[2] > 0
    assert torch.equal(dual_ascent(problem, 5000)[0], v)


def test_operator():
    s, w = normal(2, 6), normal(2, 6, seed=1)
    args = (s, w, torch.ones(2, dtype=torch.float64), 2.0, False, False, 0, "s,w")
    torch.library.opcheck(torch.ops.khot.isotonic.default, args)
