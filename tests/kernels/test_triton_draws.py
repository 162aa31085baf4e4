"""Kernels that draw, beyond what every kernel is checked for: ties, sizes out of order, extremes of the noise."""

import pytest
import torch

from tests.kernels.device import DEVICE, kernel_marks

pytestmark = kernel_marks()

import triton
import triton.language as tl

from khot.kernels.draws import pivotal_draw
from khot.kernels.gpu.random_numbers import uniform_and_rest, uniform_double
from khot.kernels.order_sampling import noises, order_draw, rank_centre
from khot.kernels.order_sampling.triton_draw import NOISES
from khot.kernels.random_numbers.philox import draw_seed, uniform
from khot.laws import conditional_poisson


def draw(theta, k, draws=1, noise="logistic", seed=7):
    k = torch.tensor(k, device=DEVICE)
    return order_draw(
        theta, k, rank_centre(theta, k), torch.tensor([seed], device=DEVICE), draws, theta.dtype, noise
    ).cpu()


@pytest.mark.parametrize("n", [40, 9000])
def test_ties_are_broken_by_place(n):
    theta = torch.full((2, n), torch.inf, device=DEVICE)
    theta[1, : n - 10] = -torch.inf
    theta[1, 2] = 0.0
    x = draw(theta, [7, 13])  # as no checked design has it: too many included, too few not excluded
    assert x[0, 0].nonzero().flatten().tolist() == list(range(7))
    assert x[0, 1].nonzero().flatten().tolist() == [0, 1, 2, *range(n - 10, n)]


def test_no_unit_and_all_units():
    theta = torch.randn(2, 33, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(draw(theta, [0, 33], 2), torch.tensor([[0.0], [1.0]]).expand(2, 2, 33))
    probs, k = torch.tensor([[0.0] * 33, [1.0] * 33], device=DEVICE), torch.tensor([0, 33], device=DEVICE)
    x = pivotal_draw(probs, k, draw_seed(probs.device), 2, torch.float32)
    assert torch.equal(x.cpu(), torch.tensor([[0.0], [1.0]]).expand(2, 2, 33))


def test_expanded_parameters_are_not_copied():
    theta = torch.randn(2, 33, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    once = draw(theta.repeat(2, 1, 1), [[5, 9]] * 2, 2)
    k, seed = torch.tensor([5, 9], device=DEVICE), torch.tensor([7], device=DEVICE)
    arguments = [v.expand(2, *v.shape) for v in (theta, k, rank_centre(theta, k))]
    assert torch.equal(order_draw(*arguments, seed, 2, theta.dtype, "logistic").cpu(), once)
    row = [v[:2, :1].expand(2, 2, *v.shape[2:]) for v in arguments]
    x = order_draw(*row, seed, 1, theta.dtype, "logistic")
    assert x.shape == (1, 2, 2, 33) and (x.sum(-1) == 5).all()
    mixed = order_draw(theta, k[:1].expand(2), k[:1].expand(2) * 0.0, seed, 1, theta.dtype, "logistic")
    assert (mixed.sum(-1) == 5).all()
    probs = (torch.ones(1, 8, device=DEVICE) / 2).expand(2, 2, 8)
    assert (pivotal_draw(probs, k[:1].expand(2, 2) - 1, seed, 2, theta.dtype).sum(-1) == 4).all()


def test_nan_ends():
    theta = torch.full((1, 40), torch.nan, device=DEVICE)
    assert draw(theta, [3]).sum() == 3


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e30])
def test_scales_of_positions(scale):
    theta = scale * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    x = draw(theta.to(DEVICE), [5, 25, 49], 2)
    assert torch.equal(x.sum(-1), torch.tensor([[5.0, 25.0, 49.0]]).expand(2, 3))
    if scale > 1:
        top = theta.argsort(-1, descending=True).argsort(-1) < torch.tensor([[5], [25], [49]])
        assert torch.equal(x, top.float().expand(2, 3, 50))


def test_generator_decides():
    theta = torch.zeros(2, 40, device=DEVICE)
    k = torch.full((2,), 20, device=DEVICE)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([order_draw(theta, k, k * 0.0, draw_seed(theta.device), 2, theta.dtype, "logistic")] * 1)
        runs[-1].append(order_draw(theta, k, k * 0.0, draw_seed(theta.device), 2, theta.dtype, "logistic"))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    different = [runs[0][0], runs[0][1], runs[2][0]]
    rows = torch.cat([x.flatten(0, 1) for x in different])
    assert len(rows.unique(dim=0)) == 12  # draws, rows and calls all differ


@triton.jit
def _noise_of(high_ptr, low_ptr, out_ptr, double_ptr, NOISE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    high, low = tl.load(high_ptr + place).to(tl.uint32), tl.load(low_ptr + place).to(tl.uint32)
    u, rest = uniform_and_rest(high, low)
    tl.store(out_ptr + place, NOISE(u, rest))
    tl.store(double_ptr + place, uniform_double(high, low))


def test_every_noise_has_its_exponential():
    assert NOISES.keys() == noises.NOISES.keys()


@pytest.mark.parametrize("noise", NOISES)
def test_both_tails_of_the_noise(noise):
    """Bits next to none and next to all: the smallest and the largest noise, to float32's relative accuracy."""
    ends = [0, 1, 2, 2**20, 2**27, 2**28 - 1, 2**31]
    ends = torch.tensor(ends + [2**32 - 1 - v for v in ends] + [2**28, 2**28 + 1])
    high, low = (v.flatten() for v in torch.meshgrid(ends, ends, indexing="ij"))
    out = torch.empty(256, device=DEVICE)
    double = torch.empty(256, device=DEVICE, dtype=torch.float64)
    _noise_of[(1,)](high.to(DEVICE), low.to(DEVICE), out, double, NOISE=NOISES[noise], BLOCK=256)
    bits = [(int(h) << 32) + int(w) for h, w in zip(high, low, strict=True)]
    u, rest = (
        torch.tensor([v * 2.0**-64 for v in values]).double()
        for values in ([b | 1 for b in bits], [2**64 - 1 - b | 1 for b in bits])
    )
    log = torch.where(u < 0.5, u.log(), torch.log1p(-rest))
    expected = {"logistic": u / rest, "log_exponential": -log}[noise]
    torch.testing.assert_close(out.cpu().double(), expected, rtol=4e-6, atol=0)
    assert torch.equal(double.cpu(), uniform(high, low))


def test_trees_draw_inside_a_vmap():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    each = torch.vmap(lambda row: conditional_poisson.sample(row, 7, (4,)), randomness="different")(logits)
    one = torch.vmap(lambda c: c * conditional_poisson.sample(logits, 7), randomness="different")(each[:, 0, 0] * 0 + 1)
    assert each.shape == (3, 4, 20) and one.shape == (3, 3, 20)
    assert (each.sum(-1) == 7).all() and (one.sum(-1) == 7).all()
