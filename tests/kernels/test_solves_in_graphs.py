"""The logits of given probabilities in compiled and exported graphs, where their solution is an operator."""

import pytest
import torch

from khot import ConditionalPoisson, GumbelTopK, ParetoSampling, sigmoid_topk
from tests.inputs import normal

WEIGHTS = normal(3, 6, seed=1)
POINTS = [sigmoid_topk(normal(3, 6, seed=seed), 2) for seed in (0, 2)]
pytestmark = pytest.mark.slow


class Logits(torch.nn.Module):
    def __init__(self, design, k):
        super().__init__()
        self.design, self.k = design, k

    def forward(self, probs):
        return self.design(probs=probs, k=self.k).logits


def gradient(function, point):
    point = point.clone().requires_grad_()
    return torch.autograd.grad((function(point) * WEIGHTS).sum(), point)[0]


@pytest.mark.needs_torch("2.8")  # compiled designs
@pytest.mark.parametrize("k", [2, torch.tensor([2, 2, 2])], ids=["int", "tensor"])
@pytest.mark.parametrize("design", [ConditionalPoisson, GumbelTopK])
def test_compiled(design, k):
    function = Logits(design, k)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for point in POINTS:
        torch.testing.assert_close(compiled(point), function(point))
        torch.testing.assert_close(gradient(compiled, point), gradient(function, point))


@pytest.mark.needs_torch("2.8")  # exported designs
@pytest.mark.parametrize("design", [ConditionalPoisson, GumbelTopK])
def test_exported(design):
    function = Logits(design, 2)
    exported = torch.export.export(function, (POINTS[0],)).module()
    torch.testing.assert_close(exported(POINTS[1]), function(POINTS[1]))


def test_inside_of_a_dispatch_mode():
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    design = ParetoSampling(probs=POINTS[0], adjust="exact")
    expected = design.sample((2,), generator=torch.Generator().manual_seed(0))
    with Counting():
        again = ParetoSampling(probs=POINTS[0], adjust="exact")
        assert torch.equal(again.sample((2,), generator=torch.Generator().manual_seed(0)), expected)
