"""Rows without items, as of a batch of no tokens among which experts choose."""

import torch

from khot import topk_threshold
from khot.nn import BatchTopK, ExpertChoice
from tests.loops import for_each
from tests.maps import ODD_MAPS, RELAXATIONS

MAPS = {case.name: case.map for case in [*RELAXATIONS, *ODD_MAPS]}


@for_each("name", MAPS)
def test_derivatives_in_both_modes(name):
    x = torch.zeros(3, 0, requires_grad=True)
    for softness in (1.0, torch.ones(3)):
        (grad,) = torch.autograd.grad(MAPS[name](x, 0, softness).sum(), x)
        assert grad.shape == (3, 0)
        y, tangent = torch.func.jvp(lambda x, s=softness: MAPS[name](x, 0, s), (x.detach(),), (x.detach(),))
        assert y.shape == tangent.shape == (3, 0)


def test_threshold():
    x = torch.zeros(3, 0, requires_grad=True)
    (grad,) = torch.autograd.grad(topk_threshold(x, 0).sum(), x)
    assert grad.shape == (3, 0)


@for_each("module", [ExpertChoice(2, softness=0.1), BatchTopK(2, softness=0.1)])
def test_modules(module):
    x = torch.zeros(0, 4, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.shape == (0, 4)
