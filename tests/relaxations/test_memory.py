"""How much memory the maps take for long rows, forward and backward, in units of their input."""

import itertools
import tracemalloc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import khot
from khot.kernels import backend
from tests.inputs import normal

N = 10**6
SIZE = N // 3
OF_A_ROW = 16  # numbers that a map may keep for a row beside those of its items


def peak_memory(function, x):
    """The peak memory that torch or NumPy allocates besides x, divided by the size of x.

    A map takes nearly all of its memory from one of them.
    """

    def run():
        y = function(x)
        y.backward(torch.ones((), dtype=y.dtype).expand(y.shape))

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = torch.tensor([event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]).cumsum(0)
    x.grad = None
    tracemalloc.start()
    run()
    of_numpy = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    peak = max(held.max().item(), of_numpy)
    assert peak > x.numel() * x.element_size()  # the gradient alone
    return peak / (x.numel() * x.element_size())


# 8 times the input, or what the documentation says and why. The exact path computes thresholds in float64: of float32
# scores it takes twice as much, in units of them.
MAPS = {
    "soft_rank": (lambda x: khot.soft_rank(x, 0.1), 8),
    "soft_sort": (lambda x: khot.soft_sort(x, 0.1, descending=True), 8),
    "soft_rank_far": (lambda x: khot.soft_rank(x, 1e-12), 8),
    "soft_sort_far": (lambda x: khot.soft_sort(x, 1e-12), 8),
    "soft_sort_flat": (lambda x: khot.soft_sort(x, 1e3), 8),
    "sparse_topk_magnitude": (lambda x: khot.sparse_topk_magnitude(x, SIZE, 0.1), 16),
    "sparse_topk_magnitude_p": (lambda x: khot.sparse_topk_magnitude(x, SIZE, 0.1, 1.5), 16),
    "sparse_topk_magnitude_hard": (lambda x: khot.sparse_topk_magnitude(x, SIZE, 1e-12), 16),
    "sparse_topk_signed": (lambda x: khot.sparse_topk_signed(x, SIZE, 0.1, 1.5), 11),
    "sigmoid_topk": (lambda x: khot.sigmoid_topk(x, SIZE, 0.1), 8),
    "lapsum_topk": (lambda x: khot.lapsum_topk(x, SIZE, 0.1), 8),
    "normal_topk": (lambda x: khot.normal_topk(x, SIZE, 0.1), 8),
    "sparse_topk": (lambda x: khot.sparse_topk(x, SIZE, 0.1, 1.5), 8),
    "capped_softmax": (lambda x: khot.capped_softmax(x, SIZE, 0.1), 8),
    "permutahedron_rank": (lambda x: khot.permutahedron_rank(x, 0.1), 26),
    "permutahedron_sort": (lambda x: khot.permutahedron_sort(x, 0.1), 26),
    "sorted_transport_topk": (lambda x: khot.sorted_transport_topk(x, 3, 0.1), 54),
}
ON_THE_EXACT_PATH = {name for name in MAPS if name.startswith("sparse") or name.endswith(("topk", "softmax"))}
ON_THE_EXACT_PATH -= {"sorted_transport_topk"}  # it has no other
QUICK = ("soft_rank", "sparse_topk_magnitude")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # which dtype makes no difference in units of the input: each in its turn
        pytest.param(name, dtype, marks=[] if name in QUICK else [pytest.mark.exhaustive])
        for name, dtype in zip(MAPS, itertools.cycle([torch.float32, torch.float64]), strict=False)
    ],
    ids=str,
)
def test_peak_memory(name, dtype):
    function, limit = MAPS[name]
    if name in ON_THE_EXACT_PATH:
        with backend("torch"):
            found = peak_memory(function, normal(N, dtype=dtype).requires_grad_())
        assert found <= (limit if dtype == torch.float64 else 2 * limit + 2)
        limit = 8 if name != "sparse_topk_magnitude_hard" else 20  # whose row goes from the fast path to the exact one
    with backend("auto"):
        assert peak_memory(function, normal(N, dtype=dtype).requires_grad_()) <= limit + OF_A_ROW / N
