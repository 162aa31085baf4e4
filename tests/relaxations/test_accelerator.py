"""The contract of the relaxed masks on an accelerator: inputs go there, results come back, the checks stay."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)

from khot import sigmoid_topk
from tests.maps import RELAXATIONS, RelaxationCase, members
from tests.relaxations import test_contract as contract

CPU_ONLY = (
    contract.check_errors,  # arguments that are no tensors
    contract.check_saves_x_and_numbers_per_row,  # compares storages
    contract.check_autocast,  # of the CPU
)


def on_accelerator(case: RelaxationCase) -> RelaxationCase:
    def there(function):
        def call(*args, **kwargs):
            return function(*(a.cuda() if isinstance(a, Tensor) else a for a in args), **kwargs).cpu()

        return call

    return replace(case, map=there(case.map), log=case.log and there(case.log))


@pytest.mark.parametrize(("case", "check"), members(RELAXATIONS, [c for c in contract.CHECKS if c not in CPU_ONLY]))
def test_contract(case, check):
    check(on_accelerator(case))


def test_compiled_without_breaks():
    x = torch.randn(8, 300, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda x: sigmoid_topk(x, 20, 0.5), fullgraph=True)
    torch.testing.assert_close(compiled(x), sigmoid_topk(x, 20, 0.5))
    grads = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, lambda x: sigmoid_topk(x, 20, 0.5))]
    torch.testing.assert_close(*grads)


def test_captured_in_a_graph():
    x = torch.randn(8, 300, device="cuda")
    sigmoid_topk(x, 20)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sigmoid_topk(x, 20)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, sigmoid_topk(x, 20))
