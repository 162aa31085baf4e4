"""normal_topk: what its light tails ask for beyond the contract."""

import pytest
import torch

from khot import lapsum_topk, normal_topk, sigmoid_topk
from khot.kernels.links.normal import NORMAL
from khot.kernels.threshold import solve_threshold
from tests.loops import for_each


def test_invertible_up_to_a_shift():
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shift = x - 0.9 * NORMAL.inverse(normal_topk(x, 6.3, 0.9))
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift), rtol=0, atol=1e-10)


@for_each("distance", [3.0, 30.0, 300.0, 3e5])
def test_threshold_balances_tails_that_underflow(distance):
    """Two entries meet half way; two against one, the logarithm of 2 divided by the distance further."""
    x = torch.tensor([[-distance, 0.0], [-distance, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(solve_threshold(x, 1, 1.0, NORMAL), torch.full((2,), -distance / 2).double())
    if distance >= 30:
        t = solve_threshold(torch.tensor([[-distance, -distance, 0.0]], dtype=torch.float64), 1, 1.0, NORMAL).item()
        assert (t + distance / 2) * distance == pytest.approx(0.6931, rel=1e-2)


def test_tails_are_lighter_than_exponential():
    x = torch.tensor([0.0, 8.0, 30.0], dtype=torch.float64)
    light, exponential = normal_topk(x, 1.5), torch.stack([sigmoid_topk(x, 1.5), lapsum_topk(x, 1.5)])
    assert light[0] < 1e-14 and (exponential[:, 0] > 1e-5).all()
    assert (light[0] > 0).all() and light[1].item() == pytest.approx(0.5)
