"""Cases of operators that DTensors reach directly, and of compiled graphs with DTensors."""

import torch
from torch.distributed.tensor.debug import CommDebugMode

import khot
from khot.kernels import capped_simplex
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.registry import OPERATORS
from tests.distributed.group import case
from tests.distributed.spread import R, S, assert_same, spread
from tests.inputs import normal


@case
def operators_know_how_dtensors_lie():
    x, k, scale = normal(4, 6, 7), torch.full((4, 6), 2.0).double(), torch.full((4, 6), 0.5).double()
    options = LOGISTIC.key, False, "scale", True
    expected = capped_simplex.mask(x, k, scale, *options)
    for placements, free in (([S(0)], True), ([R], True), ([S(1), S(0)], True), ([S(2)], False), ([S(0), S(2)], False)):
        given = [spread(v, [p if p != S(2) or v.dim() == 3 else R for p in placements]) for v in (x, k, scale)]
        with CommDebugMode() as mode:
            results = capped_simplex.mask(*given, *options)
        assert not (free and mode.get_total_counts()), placements
        for result, one in zip(results, expected, strict=True):
            assert_same(result, one, "the result")
    assert "capped_simplex_mask" in OPERATORS


@case
def compiled_maps_of_dtensors():
    """Values: of their gradients torch's DTensors lack rules for what a graph is made of, such as logsigmoid."""
    x = normal(4, 6)
    for function in (khot.sigmoid_topk, khot.sparse_topk):
        compiled = torch.compile(lambda v, f=function: f(v, 2.5), backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            assert_same(compiled(spread(x, [S(0)])), function(x, 2.5), "the value")
