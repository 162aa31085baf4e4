"""With masked items loops produce no subnormal numbers, on each of which a processor spends some hundred cycles."""

import pytest
import torch

from khot import soft_permutation
from khot.kernels import backend
from khot.kernels.operators.platforms import HAS_NUMBA
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import RELAXATIONS

pytestmark = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")

TINY = torch.finfo(torch.float32).tiny
MASKS = [-50.0, -93.0, -100.0, -1e3, *(-(10.0**e) for e in (6, 7, 8, 9, 10, 10.5, 13, 17, 19, 20, 30, 38))]
# A user's link has no loop.
IN_LOOPS = {case.name: case.map for case in RELAXATIONS if case.name != "capped_simplex_map"}


@for_each("mask", MASKS)
@pytest.mark.parametrize("name", [*IN_LOOPS, "soft_permutation"])
def test_results_and_gradients(name, mask):
    x = normal(4, 30).float().masked_fill(normal(4, 30, seed=1) > 0.5, mask).requires_grad_()
    with backend("numba"):
        y = soft_permutation(x) if name == "soft_permutation" else IN_LOOPS[name](x, 5)
        (gradient,) = torch.autograd.grad(y, x, normal(*y.shape, seed=2).float())
    for numbers in (y, gradient):
        assert ((numbers == 0) | (numbers.abs() >= TINY)).all()
