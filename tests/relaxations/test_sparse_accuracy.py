"""Sparse masks in float32: sums and values, next to the caps too, for every exponent."""

from functools import partial

import torch

from khot import Pivotal, sparse_topk, sparse_topk_magnitude, sparse_topk_signed
from khot.constraints import capped_simplex
from khot.kernels import backend
from tests.inputs import normal
from tests.loops import for_each

EPS = torch.finfo(torch.float32).eps
STEEP = [1.2, 1.15, 1.1, 1.07, 1.02]  # exponents p whose links multiply rounding so much that z is a float64
BY_LOGARITHMS = [1.15, 1.07]  # whose powers are not integers


def next_to_the_cap(scale):
    """Rows whose second largest score is less than the largest by a little less than the strength, which is 1."""
    x = normal(60, 50, dtype=torch.float32, scale=scale).sort(-1, descending=True).values
    x[:, 0] = x[:, 1] + (1 - torch.logspace(-6, -1, 60))
    return x


ROWS = {
    "usual": lambda: normal(200, 50, dtype=torch.float32),
    "wide": lambda: normal(200, 50, dtype=torch.float32, scale=30.0),
    "next_to_the_cap": lambda: next_to_the_cap(1.0),
    "wide_next_to_the_cap": lambda: next_to_the_cap(30.0),
}


def in_torch(function, x, k, p):
    """What float32 is compared with: of these links no loop in float64 need be compiled."""
    with backend("torch"):
        return function(x, k, 1.0, p=p)


def bound(p):
    """Of errors: a steep link has z in float64; else the power multiplies the rounding of z by 1 / (p - 1).

    That is three times half of eps at most and rarely half of that. A power by logarithms is off by two units in the
    last place for the exponential and half of one for each of two products; a unit of numbers below 1 is half of eps.
    """
    if p in STEEP:
        return 1.5 * EPS if p in BY_LOGARITHMS else 0.5 * EPS
    return (1.5 + 0.75 / (p - 1)) * EPS


@for_each("rows", ROWS.values())
@for_each("p", [2.0, 1.75, 1.5, 4 / 3, 1.25, *STEEP])
def test_sums_and_values(p, rows):
    x, rounding = rows(), bound(p)
    for k in (1, 2.5):
        y, exact = sparse_topk(x, k, 1.0, p=p), in_torch(sparse_topk, x.double(), k, p)
        assert ((y.double().sum(-1) - k).abs() <= (1.5 * EPS if p in STEEP else 1e-6) * k).all()
        assert ((y - exact).abs() <= rounding).all()
        assert capped_simplex(k).check(y).all()
        masked = torch.cat([x, torch.full((len(x), 14), -torch.inf)], -1)
        assert ((sparse_topk(masked, k, 1.0, p=p)[:, :50] - exact).abs() <= rounding).all()


@for_each("p", STEEP)
def test_signed_masks_of_steep_links(p):
    for x in (normal(60, 50, dtype=torch.float32), normal(60, 50, dtype=torch.float32, scale=30.0)):
        for k in (1, 5, 45):  # of the last, the constraint does not bind in all rows
            y, exact = sparse_topk_signed(x, k, 1.0, p=p), in_torch(sparse_topk_signed, x.double(), k, p)
            assert ((y - exact).abs() <= bound(p)).all()


@for_each("p", [1.07, 1.1, 1.2, 4 / 3, 1.5, 1.9])
@for_each("scale", [1.0, 30.0, 1000.0])
def test_every_mask_is_in_the_capped_simplex(p, scale):
    logits = normal(1000, 50, dtype=torch.float32, scale=scale)
    design = Pivotal(logits=logits, k=5, relaxation=partial(sparse_topk, p=p), temperature=0.1, validate_args=True)
    assert capped_simplex(5).check(design.mean).all()


@for_each("above_one", [1e-3, 1e-6, 1e-9])
@for_each("function", [sparse_topk, sparse_topk_signed, sparse_topk_magnitude])
def test_powers_so_steep_that_loops_have_no_digits_left(function, above_one):
    x, g = (normal(100, 8, dtype=torch.float32, seed=seed) for seed in (0, 1))

    def results(x):
        x, k, s = (v.clone().requires_grad_() for v in (x, torch.tensor(2.5).double(), torch.tensor(1.0).double()))
        y = function(x, k, s, p=1 + above_one)
        return y.detach().double(), *(v.double() for v in torch.autograd.grad((y * g).sum(-1).mean(), (x, k, s)))

    torch.testing.assert_close(results(x), results(x.double()), rtol=2 * EPS, atol=2 * EPS)
