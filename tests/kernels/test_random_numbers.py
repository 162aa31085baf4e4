"""Random numbers that torch draws: Gumbel noise of integers, which needs no float64 on an accelerator."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from khot.kernels.random_numbers import MOST, log_exponential, log_exponential_of


def exact(integer):
    """``log(-log u)`` from whichever of u and 1 - u is next to 0."""
    rest = (MOST - integer) / MOST
    return math.log(-math.log1p(-rest) if rest < 0.5 else -math.log(integer / MOST))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_tails_have_their_digits(dtype):
    ends = [1, 2, 3, 1000, 2**30 + 1, 2**40 + 12345, 2**52 + 1, 2**62 - 1, 2**62, 2**62 + 2**61]
    integers = ends + [MOST - integer for integer in ends]
    found = log_exponential_of(torch.tensor(integers), dtype).double()
    expected = torch.tensor([exact(integer) for integer in integers], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert expected.min() < -43.6 and expected.max() > 3.77  # float64 numbers on [0, 1) end at -36.7


class Dtypes(TorchDispatchMode):
    """The dtypes of all results."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.seen |= {x.dtype for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


def test_accelerators_have_no_float64_in_it():
    with Dtypes() as mode:
        log_exponential((3, 4), torch.float32, torch.device("meta"))
    assert torch.float32 in mode.seen and torch.float64 not in mode.seen
    with Dtypes() as mode:
        log_exponential((3, 4), torch.float32, torch.device("cpu"))
    assert torch.float64 in mode.seen


def test_law():
    """The mean and the variance of the logarithm of an exponential variable are -gamma and pi^2 / 6."""
    integers = torch.randint(1, MOST, (10**5,), generator=torch.Generator().manual_seed(0))
    noise = log_exponential_of(integers, torch.float32).double()
    assert noise.mean().item() == pytest.approx(-0.5772156649, abs=5 * math.pi / math.sqrt(6 * 10**5))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.05)
