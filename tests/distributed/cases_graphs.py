"""Cases of operators that DTensors reach directly, and of compiled graphs with DTensors."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import khot
from khot.kernels import threshold
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.registry import OPERATORS
from tests.distributed.group import case
from tests.distributed.spread import R, S, assert_same, compare, spread
from tests.inputs import normal


@case
def operators_know_how_dtensors_lie():
    x, k, scale = normal(4, 6, 7), torch.full((4, 6), 2.0).double(), torch.full((4, 6), 0.5).double()
    options = *LOGISTIC.key, "mask", "scale", True
    expected = threshold.mask(x, k, scale, *options)
    for placements, free in (([S(0)], True), ([R], True), ([S(1), S(0)], True), ([S(2)], False), ([S(0), S(2)], False)):
        given = [spread(v, [p if p != S(2) or v.dim() == 3 else R for p in placements]) for v in (x, k, scale)]
        with CommDebugMode() as mode:
            results = threshold.mask(*given, *options)
        assert not (free and mode.get_total_counts()), placements
        for result, one in zip(results, expected, strict=True):
            assert_same(result, one, "the result")
    assert "threshold_mask" in OPERATORS


@case
def compiled_maps_of_dtensors():
    """Values and gradients, including those in k and the softness."""
    x, k, softness = normal(4, 6), torch.tensor(2.5).double(), torch.full((4,), 0.7).double()
    for function, placements in ((khot.log_sigmoid_topk, [S(0)]), (khot.sparse_topk_magnitude, [S(1)])):
        torch.compiler.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        call = lambda *v, f=function, c=compiled: c(*v) if isinstance(v[0], DTensor) else f(*v)  # noqa: E731 - of this turn
        compare(call, [x, k, softness], [placements, [R], [R]])
