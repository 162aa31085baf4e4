"""Transforms of torch.func in compiled programs: right, or a refusal with ``fullgraph=True``, but never zero."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from khot import (
    ConditionalPoisson,
    GumbelTopK,
    Sampford,
    sigmoid_topk,
    soft_rank,
    soft_sort,
    sparse_topk_magnitude,
)
from tests.inputs import normal
from tests.loops import for_each

pytestmark = [pytest.mark.needs_torch("2.8"), pytest.mark.slow]
X, WEIGHT, VALUE = normal(5), normal(5, seed=1), torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
MAPS = {
    "sigmoid": lambda x: sigmoid_topk(x, 2, 0.5),
    "magnitude": lambda x: sparse_topk_magnitude(x, 2, 0.5),
    "rank": soft_rank,
    "sort": soft_sort,
}
FUNCTIONS = {name: lambda x, f=f: (f(x) * WEIGHT).sum() for name, f in MAPS.items()} | {
    "log_prob": lambda x: ConditionalPoisson(logits=x, k=2).log_prob(VALUE),
    "integral": lambda x: GumbelTopK(logits=x, k=2).log_prob(VALUE),
    "pairs": lambda x: (Sampford(logits=x, k=2).pairwise_inclusion * WEIGHT).sum(),
}
TRANSFORMS = {
    "grad": grad,
    "grad_of_grad": lambda f: grad(lambda x: (grad(f)(x) * WEIGHT).sum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (WEIGHT,))[1],
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "vmap_of_grad": lambda f: lambda x: vmap(grad(f))(torch.stack([x, x.cos()])),
    "grad_of_vmap": lambda f: grad(lambda x: vmap(f)(torch.stack([x, x.cos()])).sum()),
    "value": lambda f: f,
}
SOME = [("sigmoid", name) for name in TRANSFORMS if name not in ("grad", "value")]
SOME += [("magnitude", "grad_of_grad"), ("rank", "grad_of_grad")]
SOME += [("log_prob", "grad"), ("log_prob", "grad_of_grad"), ("integral", "grad"), ("pairs", "value")]


@for_each("name, transform", SOME)
def test_transforms(name, transform):
    function = TRANSFORMS[transform](FUNCTIONS[name])
    torch._dynamo.reset()
    try:
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(X)
    except torch._dynamo.exc.Unsupported:  # a refusal
        torch._dynamo.reset()
        found = torch.compile(function, backend="aot_eager")(X)
    torch.testing.assert_close(found, function(X))


def test_gradients_of_maps_are_one_graph():
    def gradients(x):
        return [grad(FUNCTIONS[name])(x) for name in MAPS]

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(gradients, backend="aot_eager", fullgraph=True)(X), gradients(X))
