"""What a compiler is told of the results of operators is what they return: shapes, dtypes, strides."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.every_map import MAPS, quick_first
from tests.inputs import normal

ROWS = {
    "transposed": lambda: normal(6, 3).T,
    "contiguous": lambda: normal(3, 6).float(),
    "permuted": lambda: normal(2, 3, 4, 6).half().transpose(1, 2),
    "empty": lambda: torch.zeros(0, 6),
}


class Recorder(TorchDispatchMode):
    """Keeps the calls of this library's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "khot":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def calls_of(case, x):
    """All that a map asks of operators, forward and backward."""
    softness = torch.full((*x.shape[:-1], 2), 0.7, dtype=torch.float64)[..., 0].requires_grad_()
    x = x.detach().requires_grad_()
    with Recorder() as recorder:
        y = case.call(x, softness)
        if case.differentiable:
            y.sum().backward()
    return recorder.calls


@pytest.mark.slow
def test_the_calls_are_seen():
    seen = {func.name() for case in MAPS for func, _ in calls_of(case, normal(3, 6))}
    thresholds = {"threshold", "threshold_mask", "isotonic", "sorted_transport"}
    others = {
        "threshold_mask_derivative",
        "sorted_transport_derivative",
        "decayed_sums",
        "soft_count_inverse",
        "slice_weights",
    }
    assert {f"khot::{name}" for name in thresholds | others} <= seen


@pytest.mark.parametrize("make", quick_first(ROWS))
@pytest.mark.parametrize("case", MAPS, ids=lambda case: case.name)
def test_results_are_like_their_fakes(case, make):
    for func, arguments in calls_of(case, make()):
        torch.library.opcheck(func, arguments, test_utils="test_faketensor")
