"""The two-sided Laplace sums, fast way and safe way, and the quantiles in wide gaps."""

import pytest
import torch

from khot.kernels.order import decayed_sums, soft_count_inverse, sorted_positions, sums
from khot.kernels.order.sums import FAR
from tests.inputs import normal


def positions(items):
    """z and the gaps of items (..., n), in units of 1."""
    return sorted_positions(items / 2, torch.full((*items.shape[:-1], 1), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("spread", [0.01, 1.0, 50.0])
def test_both_ways_are_the_definition(n, spread):
    z, gap = positions((spread * normal(3, n)).sort(-1).values)
    left, right = normal(3, n, seed=1), normal(3, n, seed=2)
    kernel = (-(z.unsqueeze(-1) - z.unsqueeze(-2)).abs()).exp()  # (3, n, n)
    before, after = kernel.tril(-1) @ left.unsqueeze(-1), kernel.triu(1) @ right.unsqueeze(-1)
    for found in (
        sums.sums_by_cumsum(z.exp(), (-z).exp(), left, right),
        sums.sums_by_doubling(gap, left, right),
        decayed_sums(z, gap, left, right),
    ):
        for result, expected in zip(found, (before, after), strict=True):
            torch.testing.assert_close(result, expected.squeeze(-1), rtol=1e-12, atol=1e-12)


def test_wide_spread_takes_the_safe_way():
    z, gap = positions(torch.tensor([[-5000.0, -4999.0, 0.0, 4998.0, 5000.0]], dtype=torch.float64))
    assert gap[0, 0] == gap[0, 2] == FAR
    before, after = decayed_sums(z, gap, torch.ones_like(z), torch.ones_like(z))
    e = torch.tensor([-1.0, -2.0], dtype=torch.float64).exp()
    torch.testing.assert_close(before, torch.tensor([[0, e[0], 0, 0, e[1]]]))
    torch.testing.assert_close(after, torch.tensor([[e[0], 0, 0, e[1], 0]]))


def test_cuts_in_gaps_beyond_underflow():
    """Two items on the left and one on the right pull the cut between them off the middle by log(A / B) / 2."""
    z, gap = positions(torch.tensor([-2000.0, -2000.0, -500.0], dtype=torch.float64))
    offset, anchor, below = soft_count_inverse(z, gap, True)
    expected = torch.tensor([0.0, 750 + 0.5 * torch.tensor(2.0).log()], dtype=torch.float64)
    torch.testing.assert_close(offset, expected)
    assert below.tolist() in ([2, 2], [0, 2]) and anchor[1] == 1


def test_operators():
    values, scale = normal(2, 5).sort(-1).values, torch.ones(2, 1).double()
    torch.library.opcheck(torch.ops.khot.sorted_positions.default, (values, scale))
    z, gap = sorted_positions(values, scale)
    torch.library.opcheck(torch.ops.khot.decayed_sums.default, (z, gap, normal(2, 5), normal(2, 5, seed=1)))
    for between in (False, True):
        torch.library.opcheck(torch.ops.khot.soft_count_inverse.default, (z, gap, between))
    strided = z.mT.contiguous().mT
    torch.library.opcheck(torch.ops.khot.decayed_sums.default, (strided, gap, strided, z))
    order, below = torch.tensor([[4, 2, 0, 1, 3], [0, 1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 4]] * 2)
    cuts = values, scale, order, values[:, 1:], torch.full((2, 4), -0.1).double()
    torch.library.opcheck(torch.ops.khot.slice_weights.default, (*cuts, below, torch.float32))
    torch.library.opcheck(torch.ops.khot.slice_weights_derivative.default, (*cuts, normal(2, 5, 5)))
