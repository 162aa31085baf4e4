"""Every design on an accelerator: draws and numbers stay there, and agree with the CPU's."""

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)
pytest.importorskip("pyro", reason="designs need Pyro")

from khot import ConditionalPoisson, sigmoid_topk
from tests.gof import check_inclusion, check_k_hot
from tests.registry import DESIGNS


@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_design(case):
    probs = sigmoid_topk(torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 3)
    here, there = case.make(probs=probs), case.make(probs=probs.cuda())
    value = there.sample((100,))
    assert value.is_cuda and value.shape == (100, 3, 8)
    check_k_hot(value.cpu(), 3)
    check_inclusion(value[:, 0].cpu(), probs[0])
    torch.testing.assert_close(there.mean.cpu(), here.mean)
    if case.has_log_prob:
        torch.testing.assert_close(there.log_prob(value).cpu(), here.log_prob(value.cpu()))
    if case.has_pairwise:
        torch.testing.assert_close(there.pairwise_inclusion.cpu(), here.pairwise_inclusion)


def test_captured_in_a_graph():
    logits = torch.randn(8, 300, device="cuda")
    value = (torch.arange(300, device="cuda") < 20).float()

    def log_prob():
        return ConditionalPoisson(logits=logits, k=20, validate_args=False).log_prob(value)

    log_prob()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = log_prob()
    logits.normal_()
    graph.replay()
    torch.testing.assert_close(found, log_prob())
