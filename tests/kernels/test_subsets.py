"""The k-hot vectors by rank, against itertools."""

from itertools import combinations

import pytest
import torch

from khot.laws.subsets import k_hot_vectors


@pytest.mark.parametrize(("n", "k"), [(6, 3), (5, 0), (5, 5), (1, 1), (1, 0), (7, 1), (7, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order(n, k, dtype):
    expected = torch.tensor([[i in subset for i in range(n)] for subset in combinations(range(n), k)])
    for start in range(len(expected) + 1):
        values = k_hot_vectors(n, k, start, len(expected), like=torch.zeros(0, dtype=dtype))
        assert torch.equal(values, expected[start:].to(dtype))


def test_far_ranks():
    like = torch.zeros(0)
    last = 2118760 - 1  # C(50, 5) - 1
    assert k_hot_vectors(50, 5, last, last + 1, like).nonzero()[:, 1].tolist() == [45, 46, 47, 48, 49]
    middle = 126410606437752  # C(50, 25): ranks far beyond 32 bits, intermediate counts too
    assert k_hot_vectors(50, 25, middle - 1, middle, like)[0].tolist() == [0.0] * 25 + [1.0] * 25
    assert k_hot_vectors(1000, 2, 0, 1, like).nonzero()[:, 1].tolist() == [0, 1]
    assert k_hot_vectors(1000, 998, 0, 1, like)[0, -3:].tolist() == [1, 0, 0]
