"""The root finder by itself: few steps on ordinary rows, a bounded number on any, and a well-behaved operator."""

import pytest
import torch

from khot import capped_softmax, lapsum_topk, normal_topk, sigmoid_topk, sparse_topk_magnitude
from khot.kernels import backend
from khot.kernels.exact import newton
from khot.kernels.links.logistic import LOGISTIC, Logistic
from khot.kernels.threshold import exact, solve_threshold


class CountingLogistic(Logistic):
    items = 0

    def value_and_slope(self, z):
        self.items += z.numel()
        return super().value_and_slope(z)

    def log_hazard(self, z):
        self.items += z.numel()
        return super().log_hazard(z)


def residual(x, k, scale, t):
    """sum(F) - k with each entry from the shorter tail, so that it is accurate in wide gaps too."""
    z = (x.double() - t[..., None]) / scale
    tail = torch.sigmoid(-z.abs())
    return torch.where(z > 0, -tail, tail).sum(-1) + ((z > 0).sum(-1) - k), tail.sum(-1)


@pytest.mark.parametrize("temperature", [10.0, 1.0, 0.1])
@pytest.mark.parametrize(
    ("batch", "n", "k"), [(100, 10, 5), (16, 1000, 500), (256, 64, 8), (4, 20_000, 200), (1, 300_000, 10)]
)
def test_ordinary_rows_take_few_steps(batch, n, k, temperature):
    x = torch.randn(batch, n, generator=torch.Generator().manual_seed(n))
    link = CountingLogistic()
    t = solve_threshold(x, k, temperature, link)
    assert link.items <= 12 * x.numel()
    error, scale = residual(x, k, temperature, t)
    assert (error.abs() <= 2e-6 * (scale + 1e-3 * k)).all()


@pytest.mark.parametrize("seed", range(4))
def test_hard_rows_converge(seed):
    """Staircases, outliers, clusters and ties at temperatures far below the gaps, in one batch with easy rows."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(8, 500, generator=generator, dtype=torch.float64)
    x = torch.stack(
        [
            noise[0],
            noise[1].exp().pow(4),
            noise[2].round(),
            torch.where(noise[3] > 2, 1e8 * noise[3], noise[3]),
            noise[4] * 1e-9,
            torch.linspace(0, 1, 500).double(),
            -noise[6].abs().pow(-3),
            1e6 * noise[7].sign() + noise[7],
        ]
    )
    k = torch.tensor([1, 250, 37.5, 499, 0.3, 100, 250, 260.25], dtype=torch.float64)
    for temperature in (1e-6, 1e-2, 1.0, 1e3):
        link = CountingLogistic()
        t = solve_threshold(x, k, temperature, link)
        assert link.items < newton.MAX_STEPS * x.numel()
        error, scale = residual(x, k, temperature, t)
        resolution = 1e-15 * t.abs() / temperature  # of t itself
        assert (error.abs() <= (1e-12 + 4 * resolution) * (scale + 1e-3)).all(), temperature


def test_float32_rows_keep_a_float64_threshold():
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)) + 1e4
    exact = solve_threshold(x.double(), 30, 0.5)
    assert (solve_threshold(x, 30, 0.5) - exact).abs().max() < 1e-6  # float32 numbers near 1e4 are 1e-3 apart


def test_operator():
    x, k, scale = torch.randn(3, 5).double(), torch.full((3,), 2.0).double(), torch.ones(3).double()
    args = (x, k, scale, *LOGISTIC.key, "mask", "temperature", True, False)
    torch.library.opcheck(torch.ops.khot.threshold_mask.default, args)
    batched = torch.func.vmap(lambda k: solve_threshold(x, k, 1.0))(torch.stack([k, k + 0.5]))
    torch.testing.assert_close(batched[1], solve_threshold(x, 2.5))


@pytest.mark.parametrize("relaxation", [sigmoid_topk, lapsum_topk, normal_topk, capped_softmax, sparse_topk_magnitude])
def test_plain_sums_solve_ordinary_rows(relaxation, monkeypatch):
    """None is left to the search in logarithms, which takes several times longer."""

    def fails(*_):
        pytest.fail("a row was left")

    monkeypatch.setattr(exact, "evaluate", fails)
    x = torch.randn(32, 200, generator=torch.Generator().manual_seed(0))
    with backend("torch"):
        for softness in (0.5, 1.0, 10.0):
            relaxation(x, 60, softness)
