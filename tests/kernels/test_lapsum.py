"""The two-sided Laplace sums, fast way and safe way, and the quantiles in wide gaps."""

import pytest
import torch

from khot.kernels import lapsum
from tests.inputs import normal


@pytest.mark.parametrize("n", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("spread", [0.01, 1.0, 50.0])
def test_both_ways_are_the_definition(n, spread):
    z = (spread * normal(3, n)).sort(-1).values
    left, right = normal(3, n, seed=1), normal(3, n, seed=2)
    kernel = (-(z.unsqueeze(-1) - z.unsqueeze(-2)).abs()).exp()  # (3, n, n)
    before, after = kernel.tril(-1) @ left.unsqueeze(-1), kernel.triu(1) @ right.unsqueeze(-1)
    for way in (lapsum._by_cumsum, lapsum._by_doubling, lapsum.decayed_sums):
        for result, expected in zip(way(z, left, right), (before, after), strict=True):
            torch.testing.assert_close(result, expected.squeeze(-1), rtol=1e-12, atol=1e-12)


def test_wide_spread_takes_the_safe_way():
    z = torch.tensor([[-5000.0, -4999.0, 0.0, 4998.0, 5000.0]], dtype=torch.float64)
    before, after = lapsum.decayed_sums(z, torch.ones_like(z), torch.ones_like(z))
    e = torch.tensor([-1.0, -2.0], dtype=torch.float64).exp()
    torch.testing.assert_close(before, torch.tensor([[0, e[0], 0, 0, e[1]]]))
    torch.testing.assert_close(after, torch.tensor([[e[0], 0, 0, e[1], 0]]))


def test_cuts_in_gaps_beyond_underflow():
    """Two items on the left and one on the right pull the cut between them off the middle by log(A / B) / 2."""
    z = torch.tensor([-2000.0, -2000.0, 4000.0], dtype=torch.float64)
    t, below = lapsum.soft_count_inverse(z, True)
    torch.testing.assert_close(t, torch.tensor([-2000.0, 1000 + 0.5 * torch.tensor(2.0).log()], dtype=torch.float64))
    assert below.tolist() == [2, 2] or below.tolist() == [0, 2]


def test_operators():
    z = normal(2, 5).sort(-1).values
    torch.library.opcheck(torch.ops.khot.decayed_sums.default, (z, normal(2, 5), normal(2, 5, seed=1)))
    for between in (False, True):
        torch.library.opcheck(torch.ops.khot.soft_count_inverse.default, (z, between))
    strided = z.mT.contiguous().mT
    torch.library.opcheck(torch.ops.khot.decayed_sums.default, (strided, strided, z))
    t, order = z[:, 1:] - 0.1, torch.tensor([[4, 2, 0, 1, 3], [0, 1, 2, 3, 4]])
    torch.library.opcheck(torch.ops.khot.slice_weights.default, (z, order, t, torch.float32))
    torch.library.opcheck(torch.ops.khot.slice_weights_derivative.default, (z, order, t, normal(2, 5, 5)))
