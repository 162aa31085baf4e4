"""``torch.compile`` of every design: one graph without breaks, with the results and gradients of eager mode."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.distributions import kl_divergence

from khot import (
    ConditionalPoisson,
    GumbelTopK,
    ReinMax,
    Sampford,
    StraightThrough,
    kernels,
    sigmoid_topk,
    subset_categorical,
    subset_vector,
)
from khot.kernels.order_sampling import EXACT
from tests.registry import DESIGNS

pytestmark = pytest.mark.needs_torch("2.8")  # compiled designs
LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6]], dtype=torch.float64)
INTEGRALS = [case for case in DESIGNS if case.name.startswith(("pareto", "sequential", "gumbel"))]
QUICK = ("gumbel_topk",)
# One of each way to draw and to compute: trees, integrals, duels, a line.
_NAMED = {case.name: case for case in DESIGNS}
OF_EACH_KIND = [_NAMED[name] for name in ("conditional_poisson", "pareto", "pivotal_fixed", "systematic_fixed")]
VALUE = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
WEIGHTS = torch.tensor([0.7, -1.1, 0.2, 2.0, 0.4], dtype=torch.float64)


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def loss(case, given):
    """Of logits: a draw that carries a gradient, and all that the design says about itself without enumeration."""
    has_log_prob, has_entropy = case.has_log_prob, case.has_entropy_at_any_size

    def of_logits(logits):
        design = case.make(logits=logits, k=2) if given == "logits" else case.make(probs=sigmoid_topk(logits, 2), k=2)
        draw = StraightThrough(design, log_prob="none").rsample((3,))
        total = (draw * WEIGHTS).sum() + (design.mean * WEIGHTS.square()).sum()
        if has_log_prob:
            log_prob = design.log_prob(VALUE)
            total = total + torch.where(log_prob > -torch.inf, log_prob, 0.0).sum()
        if has_entropy:
            total = total + design.entropy().sum()
        return total

    return of_logits


def outcome(function, logits):
    torch.manual_seed(0)
    logits = logits.clone().requires_grad_()
    value = function(logits)
    return value.detach(), *torch.autograd.grad(value, logits)


def check_full_graph(function, logits=LOGITS, **options):
    once = compiled(function, **options)
    for x in (logits, logits.cos()):  # the graph is of no particular contents
        torch.testing.assert_close(outcome(once, x), outcome(function, x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else pytest.mark.slow) for c in DESIGNS]
)
def test_forward_and_backward(case):
    """One of each kind also as graphs of operators; breaks come from tracing Python, which is done of all."""
    check_full_graph(loss(case, "logits"), backend="aot_eager" if case in OF_EACH_KIND else "eager")


@pytest.mark.parametrize(
    ("case", "given"),
    list(zip(OF_EACH_KIND, ("probs", "logits") * 2, strict=True)),
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.slow
def test_half_types(case, given):
    """Their float32 copies are made within the graph."""
    function, logits = loss(case, given), LOGITS.bfloat16()
    once = compiled(function, backend="eager")
    torch.testing.assert_close(outcome(once, logits), outcome(function, logits), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("case", "dynamic", "on_a_device"),
    list(zip(OF_EACH_KIND, (True, True, None, None), (False, True, False, True), strict=True)),
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.exhaustive
def test_given_probabilities(case, dynamic, on_a_device):
    """Also for shapes that change, and with a default device: a mode of torch, under which compilers know less."""
    with torch.device("cpu") if on_a_device else nullcontext():
        check_full_graph(loss(case, "probs"), dynamic=dynamic, backend="eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(Sampford, k=2), id="fixed"),
        pytest.param(partial(ConditionalPoisson, k=(1, 2)), id="range"),
    ],
)
def test_enumeration_and_divergences_of_shapes_that_change(make):
    def expected_energy_and_divergence(logits):
        p, q = make(logits=logits), make(logits=logits / 2)
        values = p.enumerate_support()
        energy = (p.log_prob(values).exp() * (values * WEIGHTS).sum(-1)).sum()
        return energy + p.entropy().sum() + kl_divergence(p, q).sum()

    expected_energy_and_divergence(LOGITS)  # torch then remembers which divergence is meant
    check_full_graph(expected_energy_and_divergence, dynamic=True, backend="eager")


@pytest.mark.slow
def test_a_size_that_changes():
    """It is a symbol to the compiler from its second value on."""

    def loss_of_size(logits, k):
        design = Sampford(logits=logits, k=k)
        return design.log_prob((torch.arange(5) < k).double()).sum() + design.mean.square().sum()

    once = compiled(loss_of_size, backend="eager")
    for k in (2, 3, 4):
        torch.testing.assert_close(once(LOGITS, k), loss_of_size(LOGITS, k))


@pytest.mark.slow
@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_graphs_serve_all_sizes_and_numbers_of_draws(case):
    """Two graphs: that of the first call, and one in which both numbers are symbols."""
    if case.name == "brewer":
        pytest.skip("its graphs have an operation for each draw")
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def loss(logits, k, draws):
        design = case.make(logits=logits, k=k)
        return design.sample((draws,)), design.mean

    for k, draws in ((2, 3), (3, 4), (4, 5), (1, 6)):
        values, mean = loss(LOGITS, k, draws)
        assert values.shape == (draws, *LOGITS.shape) and (values.sum(-1) == k).all()
        torch.testing.assert_close(mean, case.make(logits=LOGITS, k=k).mean)
    assert counter.frame_count <= 3  # 1 is a constant again


def test_conditional_poisson_with_a_default_device():
    with torch.device("cpu"):
        check_full_graph(lambda logits: DESIGNS[0].make(logits=logits, k=2).mean[0, 0], backend="eager")


@pytest.mark.parametrize("case", [case for case in DESIGNS if case.name != "brewer"], ids=lambda case: case.name)
@pytest.mark.slow
def test_sizes_of_rows_and_values_with_a_gradient(case):
    """k as a tensor; and the score of a value that has a gradient, as straight-through has.

    Brewer's design draws as many units as the largest k, which a graph does not know.
    """

    def function(logits):
        design = case.make(logits=logits, k=torch.tensor([1, 3]))
        value = StraightThrough(design).rsample()
        return (value * WEIGHTS).sum() + (design.log_prob(value).sum() if case.name == "gumbel_topk" else 0.0)

    check_full_graph(function, dynamic=True if case in OF_EACH_KIND else None, backend="eager")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # which it calls
@pytest.mark.exhaustive
def test_inductor():
    case = _NAMED["pareto"]
    with torch._inductor.config.patch(compile_threads=1, fallback_random=True):  # in this process; torch's own numbers
        check_full_graph(loss(case, "logits"), backend="inductor")


@pytest.mark.parametrize("validate", [True, False])
def test_subset_categorical(validate, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", validate)

    def expected_energy(logits):
        law = subset_categorical(ConditionalPoisson(logits=logits, k=2))
        values = subset_vector(torch.arange(10), 5, 2, dtype=torch.float64)
        return (law.probs * (values @ WEIGHTS)).sum()

    check_full_graph(expected_energy)


@pytest.mark.needs_torch("2.11")  # in 2.9 a backward pass cannot transform a function with its own derivative
@pytest.mark.slow
def test_reinmax():
    check_full_graph(lambda x: (ReinMax(DESIGNS[0].make(logits=x, k=2)).rsample() * WEIGHTS).sum())


def test_vmap_inside_of_a_graph():
    def function(logits):
        def row(x):
            design = GumbelTopK(logits=x, k=2)
            return design.log_prob(VALUE) + design.mean @ WEIGHTS

        return torch.vmap(row)(logits).sum()

    check_full_graph(function)


def test_graphs_hold_the_integrals_as_operators():
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    def function(x):
        design = GumbelTopK(logits=x, k=2)
        return design.log_prob(VALUE) + design.mean.sum(-1)

    torch.compile(function, backend=aot_autograd(fw_compiler=backend))(LOGITS)
    assert {"khot.order_sampling_log_prob.default", "khot.order_sampling_inclusion.default"} <= graphs[0]


@pytest.mark.parametrize("case", INTEGRALS, ids=lambda case: case.name)
def test_operators(case):
    """What torch checks of operators: schema, fakes, autograd, and both under dynamic shapes."""
    from khot.laws import order_sampling

    theta, k = LOGITS.clone().requires_grad_(), torch.tensor(2)
    noise = case.make(logits=LOGITS, k=2)._noise.name
    value = VALUE.expand(3, 2, 5).clone().requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.khot.order_sampling_log_prob.default, (theta, k, value, noise, EXACT), test_utils=tests
    )
    torch.library.opcheck(torch.ops.khot.order_sampling_inclusion.default, (theta, k, noise, EXACT), test_utils=tests)
    assert order_sampling.NOISES[noise].name == noise


def test_operators_return_what_fakes_promise(monkeypatch):
    """The strides of a product of matrices are not the same on all devices, but those of the operator are."""
    from khot.laws import order_sampling

    found = order_sampling._log_prob_in_torch(LOGITS, 2, VALUE.expand(3, 2, 5), "logistic")
    monkeypatch.setattr(order_sampling, "_log_prob_in_torch", lambda *args: found.mT.contiguous().mT)
    arguments = LOGITS, torch.tensor(2), VALUE.expand(3, 2, 5), "logistic", EXACT
    with kernels.backend("torch"):
        torch.library.opcheck(
            torch.ops.khot.order_sampling_log_prob.default, arguments, test_utils=("test_faketensor",)
        )
