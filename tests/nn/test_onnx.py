"""Programs for ONNX: modules in evaluation are plain operations, thresholds found in a fixed number of steps."""

import importlib.util
import io
import operator
from functools import partial

import pytest
import torch
from torch.nn.functional import one_hot

from khot import (
    Brewer,
    ConditionalPoisson,
    GumbelTopK,
    PlackettLuce,
    RelaxedKHotStraightThrough,
    Systematic,
    capped_simplex_map,
    log_sigmoid_topk,
    sparse_topk,
    sparse_topk_magnitude,
)
from khot.kernels.threshold.kinds import LOG_MASK, MASK
from khot.kernels.threshold.portable import LONGEST_REACH, portable_mask
from khot.nn import BatchTopK, ExpertChoice, KHotGate, NMSparsity, TopK, TopKMask
from khot.relaxations.linked import link_of, scale_of
from tests.inputs import normal
from tests.maps import RELAXATIONS, Cauchy

MODULES = {
    "hard": lambda: TopK(3),
    "relaxed": lambda: TopK(2.5, softness=0.5),
    "learned_softness": lambda: TopKMask(2, softness=0.5, relaxation=sparse_topk, learn_softness=True),
    "straight_through": lambda: TopK(3, softness=0.5, straight_through=True),
    "joint": lambda: TopK(5, softness=0.5, dim=(-2, -1)),
    "experts": lambda: ExpertChoice(1, softness=0.5),
    "two_of_four": NMSparsity,
    "batch": lambda: BatchTopK(2),
    "gate": lambda: KHotGate(8, 3),
    "gate_learned": lambda: KHotGate(8),
}
LIGHT_TAILS = [case for case in RELAXATIONS if link_of(case.map).reach <= LONGEST_REACH]
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
X = normal(3, 8, dtype=torch.float32)


def in_evaluation(name):
    module = MODULES[name]()
    module(X)
    for parameter in module.parameters():
        parameter.data += normal(*parameter.shape, seed=2, dtype=torch.float32)
    return module.eval()


@pytest.fixture
def exporting(monkeypatch):
    """As if ``torch.onnx.export`` were at work, which needs packages that khot does not."""
    flags = pytest.importorskip(
        "torch.onnx._internal.exporter._flags", reason="this torch does not tell of its exporter"
    )
    monkeypatch.setattr(flags, "_is_onnx_exporting", True)


@pytest.mark.parametrize("name", MODULES)
def test_programs_have_plain_operations_alone(name, exporting):
    module = in_evaluation(name)
    program = torch.export.export(module, (X,))
    called = {node.target for node in program.graph.nodes if node.op == "call_function"} - {operator.getitem}
    assert {target.namespace for target in called} <= {"aten"}
    torch.testing.assert_close(program.module()(X), module(X), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxscript and onnxruntime, which khot does not")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporter about itself
@pytest.mark.parametrize("name", MODULES)
def test_onnx_runtime(name):
    import onnxruntime

    module, file = in_evaluation(name), io.BytesIO()
    torch.onnx.export(module, (X,), dynamo=True, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (y,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.tensor(y), module(X).detach(), rtol=1e-5, atol=1e-6)


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x):
        return self.function(x)


@pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxscript and onnxruntime, which khot does not")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:overflow:RuntimeWarning")
def test_draws_in_onnx_runtime():
    """Those designs that can be exported draw without replacement and with their probabilities; others are refused."""
    import onnxruntime

    probs = torch.tensor([0.15, 0.3, 0.45, 0.6, 0.7, 0.8])
    successive = GumbelTopK(logits=probs.log(), k=3).mean
    draws = {
        Brewer: (lambda probs: Brewer(probs).sample(), probs),
        Systematic: (lambda probs: Systematic(probs).sample(), probs),
        RelaxedKHotStraightThrough: (
            lambda probs: RelaxedKHotStraightThrough(1.0, logits=probs.log(), k=3).rsample(),
            successive,
        ),
        PlackettLuce: (lambda probs: one_hot(PlackettLuce(probs.log(), 3).sample(), 6).sum(-2), successive),
    }
    x = probs.expand(20_000, 6).contiguous()
    for draw, mean in draws.values():
        file = io.BytesIO()
        torch.onnx.export(Function(draw), (x,), dynamo=True, verbose=False).save(file)
        session = onnxruntime.InferenceSession(file.getvalue())
        y = torch.tensor(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]).double()
        assert ((y == 0) | (y == 1)).all()
        assert (y.sum(-1) == 3).all()
        assert ((y.mean(0) - mean).abs() < 5.5 * (mean * (1 - mean) / 20_000).sqrt()).all()
    for design in (GumbelTopK, ConditionalPoisson):
        with pytest.raises(torch.onnx.errors.OnnxExporterError):
            draw = Function(lambda x, of=design: of(logits=x, k=3).sample())
            torch.onnx.export(draw, (x,), dynamo=True, verbose=False)


@pytest.mark.parametrize("case", LIGHT_TAILS, ids=lambda case: case.name)
def test_portable_masks_are_the_masks(case):
    link = link_of(case.map)
    k, scale = torch.tensor([0.0, 2.5, 7.0, 8.0]), torch.tensor([0.3, 1.0, 5.0, 0.2])
    x = 3 * normal(4, 8)
    x[2, 3] = -torch.inf
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        y = portable_mask(x.to(dtype), k, scale_of(case.map, scale), link, MASK)
        torch.testing.assert_close(y, case.map(x.to(dtype), k, scale), rtol=tolerance, atol=tolerance)
    if case.log:
        y = portable_mask(x[1], 2.5, scale_of(case.map, 1.0), link, LOG_MASK)
        torch.testing.assert_close(y, case.log(x[1], 2.5, 1.0), rtol=1e-9, atol=1e-9)


def test_logarithms(exporting):
    class LogMask(torch.nn.Module):
        def forward(self, x):
            return log_sigmoid_topk(x, 2)

    program = torch.export.export(LogMask(), (X,))
    torch.testing.assert_close(program.module()(X), log_sigmoid_topk(X, 2), rtol=1e-5, atol=1e-5)


def test_links_with_heavy_tails_are_an_error(exporting):
    module = TopK(2, softness=0.5, relaxation=partial(capped_simplex_map, link=Cauchy()))
    with pytest.raises(NotImplementedError, match="links with exponential tails"):
        torch.export.export(module.eval(), (X,))


def test_maps_of_absolute_values_are_an_error(exporting):
    with pytest.raises(NotImplementedError, match="masks of scores"):
        torch.export.export(TopK(2, softness=0.5, relaxation=sparse_topk_magnitude), (X,))
