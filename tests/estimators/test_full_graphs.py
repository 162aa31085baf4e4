"""``torch.compile`` of every estimator: one graph without breaks, with the draws and gradients of eager mode."""

import pytest
import torch

from khot import IMLE, ConditionalPoisson, Sampford, perturbed_topk, reinmax
from tests.registry import ESTIMATORS, FUNCTIONS, PERTURBED

pytestmark = pytest.mark.needs_torch("2.8")  # compiled designs
LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.7, -1.1, 0.2, 2.0, 0.4], dtype=torch.float64)
ADAPTIVE = "imle_adaptive"  # whose backward passes change a Python object, which no graph can
QUICK = ("imle", "perturbed_topk", "straight_through")


def marked(cases):
    return [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else pytest.mark.slow) for c in cases]


def check_full_graph(loss):
    def outcome(function):
        torch.manual_seed(0)
        logits = LOGITS.clone().requires_grad_()
        value = function(logits)
        return value.detach(), *torch.autograd.grad(value, logits)

    def value_alone(function):
        torch.manual_seed(0)
        return function(LOGITS)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(outcome(compiled), outcome(loss), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value_alone(compiled), value_alone(loss), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", marked(c for c in PERTURBED if c.name != ADAPTIVE))
def test_perturbed_scores(case):
    check_full_graph(lambda x: (case.make(logits=x, k=2).rsample((3,)) * WEIGHTS).sum().square())


@pytest.mark.parametrize("case", marked(FUNCTIONS))
def test_functions(case):
    def f(value):
        return (value * WEIGHTS).sum(-1).square()

    check_full_graph(lambda x: case.estimate(Sampford(logits=x, k=2), f, 3).sum())


def test_perturbed_map():
    check_full_graph(lambda x: (perturbed_topk(x, 2, num_samples=4) * WEIGHTS).sum().square())


def test_steps_of_rows():
    step = LOGITS.new_tensor([0.5, 2.0])
    check_full_graph(lambda x: (IMLE(logits=x, k=2, step=step).rsample((3,)) * WEIGHTS).sum().square())


@pytest.mark.needs_torch("2.11")  # in 2.9 a backward pass cannot transform a function with its own derivative
@pytest.mark.parametrize("sizes", [(1, 3), (0, 5)], ids=str)
def test_reinmax_with_a_range_of_sizes(sizes):
    def f(value):
        return (value * WEIGHTS).sum(-1).square()

    check_full_graph(lambda x: reinmax(ConditionalPoisson(logits=x, k=sizes), f, 3).sum())


@pytest.mark.parametrize("case", marked(c for c in (*ESTIMATORS, *PERTURBED) if c.name != ADAPTIVE))
def test_draws_without_a_gradient(case):
    """As in evaluation; Dynamo treats Functions differently if no input requires a gradient."""

    def law(x):
        return case.make(logits=x, k=2) if case in PERTURBED else case.wrap(ConditionalPoisson(logits=x, k=2))

    @torch.compile(backend="eager", fullgraph=True)
    def draws(x):
        return law(x).sample((3,)), law(x).rsample((3,))

    torch._dynamo.reset()
    logits = LOGITS.clone().requires_grad_()
    found = [*draws(LOGITS), draws(logits)[0]]
    with torch.no_grad():
        found += draws(logits)
    assert all((values.sum(-1) == 2).all() and not values.requires_grad for values in found)
