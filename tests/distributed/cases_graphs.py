"""Cases of compiled graphs with DTensors."""

import torch
from torch.distributed.tensor import DTensor

import khot
from tests.distributed.group import case
from tests.distributed.spread import R, S, compare
from tests.inputs import normal


@case
def compiled_maps_of_dtensors():
    """Values and gradients, including those in k and the softness."""
    x, k, softness = normal(4, 6), torch.tensor(2.5).double(), torch.full((4,), 0.7).double()
    for function, placements in ((khot.log_sigmoid_topk, [S(0)]), (khot.sparse_topk_magnitude, [S(1)])):
        torch.compiler.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        call = lambda *v, f=function, c=compiled: c(*v) if isinstance(v[0], DTensor) else f(*v)  # noqa: E731 - of this turn
        compare(call, [x, k, softness], [placements, [R], [R]])
