"""Sparse masks in float32: sums and values, next to the caps too, for every exponent."""

import pytest
import torch

from khot import sparse_topk
from khot.constraints import capped_simplex
from tests.inputs import normal

pytestmark = [pytest.mark.loops, pytest.mark.one_of(4), pytest.mark.usefixtures("cpu_backend")]
EPS = torch.finfo(torch.float32).eps


def next_to_the_cap(scale):
    """Rows whose second largest score is less than the largest by a little less than the strength, which is 1."""
    x = normal(200, 50, dtype=torch.float32, scale=scale).sort(-1, descending=True).values
    x[:, 0] = x[:, 1] + (1 - torch.logspace(-6, -1, 200))
    return x


ROWS = {
    "usual": lambda: normal(1000, 50, dtype=torch.float32),
    "wide": lambda: normal(1000, 50, dtype=torch.float32, scale=30.0),
    "next_to_the_cap": lambda: next_to_the_cap(1.0),
    "wide_next_to_the_cap": lambda: next_to_the_cap(30.0),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("p", [2.0, 1.75, 1.5, 4 / 3, 1.25, 1.1, 1.05])
def test_sums_and_values(p, rows):
    """The power multiplies the rounding of z, three times half of eps at most and rarely half of that, by q."""
    x, rounding = rows(), (1.5 + 0.75 / (p - 1)) * EPS
    for k in (1, 2, 2.5):
        y, exact = sparse_topk(x, k, 1.0, p=p), sparse_topk(x.double(), k, 1.0, p=p)
        assert ((y.double().sum(-1) - k).abs() <= max(1e-6, rounding) * k).all()
        assert ((y - exact).abs() <= rounding).all()
        assert capped_simplex(k).check(y).all()
        masked = torch.cat([x, torch.full((len(x), 14), -torch.inf)], -1)
        assert ((sparse_topk(masked, k, 1.0, p=p)[:, :50] - exact).abs() <= rounding).all()
