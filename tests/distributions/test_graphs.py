"""``torch.compile`` around designs: graphs end there, results are those of eager mode, ``fullgraph=True`` says why."""

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.distributions import kl_divergence

from khot import (
    ConditionalPoisson,
    ReinMax,
    RelaxedKHot,
    Sampford,
    StraightThrough,
    horvitz_thompson,
    score_function,
    sigmoid_topk,
    subset_categorical,
)
from tests.compiled import CompileCounter
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS

LOGITS = normal(2, 5)
VALUE = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
DESIGN = ConditionalPoisson(logits=LOGITS, k=2)
REASON = "chooses its steps by the contents of tensors" if torch.__version__ >= "2.8" else "disable"


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, **{"backend": "eager", **options})


def mean(design):
    """A function of its own, since Dynamo compiles no part of one that reads a property at which graphs end."""
    return design.mean


def loss(case):
    has_log_prob = case.has_log_prob  # makes a design when it is first asked, of which Dynamo would count a graph

    def of_logits(logits):
        logits = logits.sin() * 2.0  # a graph of its own
        design = case.make(logits=logits, k=2)
        draw = StraightThrough(design, log_prob="none").rsample((3,))
        # Uses the logits again, since Dynamo compiles nothing after the constructor if no tensor is left there.
        total = (draw * logits.cos()).sum().square() + mean(design).square().sum()
        return total + design.log_prob(VALUE).sum() if has_log_prob else total

    return of_logits


def outcome(function):
    torch.manual_seed(0)
    logits = LOGITS.clone().requires_grad_()
    value = function(logits)
    return value.detach(), *torch.autograd.grad(value, logits)


@pytest.mark.slow
@pytest.mark.parametrize("case", DESIGNS[::4], ids=lambda case: case.name)
def test_steps_are_those_of_eager_mode(case):
    counter = CompileCounter()
    torch.testing.assert_close(outcome(compiled(loss(case), backend=counter)), outcome(loss(case)))
    assert counter.frame_count >= 2  # what comes before and after the design is still compiled


@pytest.mark.slow
def test_a_model_trains_as_in_eager_mode():
    def losses(wrap):
        torch.manual_seed(0)
        layer = torch.nn.Linear(6, 5)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x):
            design = ConditionalPoisson(logits=layer(x).tanh(), k=2)
            draw = ReinMax(design).rsample()
            return ((draw * layer.weight.sum(-1)).sum(-1) - 1).square().mean() - 0.1 * design.entropy().mean()

        step, found = wrap(step), []
        for i in range(4):
            value = step(normal(8, 6, seed=i, dtype=torch.float32))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found

    assert losses(lambda step: compiled(step, backend="aot_eager")) == pytest.approx(
        losses(lambda step: step), rel=1e-5
    )


CALLS = {
    "constructor": lambda x: ConditionalPoisson(logits=x, k=2).batch_shape,
    "relaxed": lambda x: RelaxedKHot(0.5, logits=x, k=2).batch_shape,
    "log_prob": lambda x: x.sum() + DESIGN.log_prob(VALUE),
    "sample": lambda x: x + DESIGN.sample(),
    "mean": lambda x: x + DESIGN.mean,
    "entropy": lambda x: x[..., 0] + DESIGN.entropy(),
    "estimator": lambda x: x + StraightThrough(DESIGN).rsample(),
    "function": lambda x: x[..., 0] + score_function(DESIGN, lambda value: value.sum(-1)),
    "divergence": lambda x: x[..., 0] + kl_divergence(DESIGN, DESIGN),
    "total": lambda x: x[..., 0] + horvitz_thompson(DESIGN, VALUE.expand(2, 5), LOGITS)[0],
    "categorical": lambda x: x[..., 0] + subset_categorical(DESIGN).entropy(),
}


# In torch 2.6, Dynamo already stops inside torch's own kl_divergence.
@for_each("name", [name for name in CALLS if name != "divergence" or torch.__version__ >= "2.7"])
def test_whole_graphs_are_refused_with_the_reason(name):
    CALLS[name](LOGITS)  # torch looks up a divergence at its first call, in code that Dynamo does not trace
    with pytest.raises(Unsupported, match=REASON):
        compiled(CALLS[name], fullgraph=True)(LOGITS)


@pytest.mark.slow
def test_graphs_end_at_every_member():
    def everything(x):
        found = []
        for call in CALLS.values():
            found.append(call(x.sin()))
        return found

    results = []
    for function in (everything, compiled(everything)):
        torch.manual_seed(0)
        results.append(function(LOGITS))
    torch.testing.assert_close(*results)


def test_maps_around_designs_stay_whole():
    whole = compiled(lambda x: sigmoid_topk(x, 2).square(), fullgraph=True)
    torch.testing.assert_close(Sampford(probs=whole(LOGITS).sqrt()).mean, sigmoid_topk(LOGITS, 2))


@for_each("size", [2, (1, 2), torch.tensor([1, 2])])
def test_a_whole_graph_reads_sizes(size):
    design = ConditionalPoisson(logits=LOGITS, k=size)
    read = compiled(lambda x: x * design.k * design.largest_k, fullgraph=True)
    assert torch.equal(read(LOGITS[:, 0]), LOGITS[:, 0] * design.k * design.largest_k)
