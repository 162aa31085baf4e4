"""Modules in other people's training stacks: trainers, casts, averages, torch.func, annealing in graphs, FSDP2."""

import copy
import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel

import khot
from khot.nn import (
    BatchTopK,
    ExpertChoice,
    FenchelYoungTopKLoss,
    JumpReLU,
    KHotGate,
    MagnitudeSparsity,
    NMSparsity,
    TokenChoice,
    TopK,
    TopKCrossEntropyLoss,
    TopKMask,
    TopKMetricLoss,
    topk_attention,
)
from tests.compiled import CompileCounter
from tests.inputs import normal
from tests.loops import for_each
from tests.modules import MODULES, ModuleCase, N

X = normal(6, N, dtype=torch.float32)
SCALAR = ModuleCase(
    "jump_relu_scalar", partial(JumpReLU, 0.3, learn_threshold=True, bandwidth=2.0), lambda x: x * (x > 0.3)
)
CUMULATIVE = ModuleCase("batch_topk_cumulative", partial(BatchTopK, 2, momentum=None), None)
ACTIVATIONS = [case for case in (*MODULES, SCALAR, CUMULATIVE) if case.target is None]
each_activation = pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda case: case.name)


def network(case: ModuleCase) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N, N), case.make(), nn.Linear(N, 1))


def train(model, steps=3):
    """Some steps of Adam; the losses."""
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.05), []
    for step in range(steps):
        torch.manual_seed(step)
        loss = (model(X.to(next(model.parameters()).dtype)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(state, other):
    """Compares values, which may be NaN, and dtypes."""
    torch.testing.assert_close(state, other, rtol=0, atol=0, equal_nan=True)


@each_activation
def test_evaluation_comes_first(case):
    """As in Lightning, which validates two batches before it trains, and again after each epoch."""
    model, plain = network(case), network(case)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        model.eval()
        assert all(model(X).isfinite().all() for _ in range(2))
    assert len(caught) == isinstance(model[1], BatchTopK)
    model.train()
    assert train(model) == train(plain)  # the sanity check has left no trace
    assert model.eval()(X).isfinite().all()


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float64])
@each_activation
def test_casts_leave_buffers_alone(case, dtype):
    """Through containers and copies, too; floating-point buffers have float32, counters int64."""
    model = network(case)
    train(model, 1)
    before = buffers(model)
    assert {buffer.dtype for buffer in before.values()} <= {torch.float32, torch.int64}
    twins = [copy.deepcopy(model), copy.deepcopy(model), AveragedModel(model).module]
    for cast in (twins[0].to(dtype), twins[1].to("cpu", dtype), twins[2].to(dtype)):
        assert all(parameter.dtype == dtype for parameter in cast.parameters())
        assert_same(buffers(cast), before)
    for assign in (False, True):
        fresh, state = network(case).to(dtype), model.to(dtype).state_dict()
        halves = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        fresh.load_state_dict(halves, assign=assign)
        assert {name: buffer.dtype for name, buffer in fresh.named_buffers()} == {
            name: buffer.dtype for name, buffer in before.items()
        }


def test_a_running_threshold_moves_in_half_precision():
    """Its steps are smaller than the spacing of bfloat16. Within 6 standard errors of k, and what the rounding adds."""
    module, k = BatchTopK(2, momentum=0.02).bfloat16(), 2
    torch.manual_seed(0)
    for step in range(400):
        module(torch.randn(32, 64).mul(1 + min(step, 100) / 50).bfloat16())
    kept = (module.eval()(torch.randn(4000, 64).mul(3).bfloat16()) != 0).sum(-1).float().mean()
    assert abs(kept / k - 1) < 0.1


# torch.func


@pytest.mark.parametrize("options", [{}, {"softness": 0.5}, {"softness": 0.5, "straight_through": True}])
def test_transforms_of_a_batch_topk_without_running_statistics(options):
    module = BatchTopK(2, **options, track_running_stats=False)
    model = nn.Sequential(nn.Linear(N, N), module)
    assert not list(module.buffers()) and "track_running_stats=False" in repr(module)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return functional_call(model, parameters, x).square().sum()

    found = torch.func.grad(loss)(parameters, X)
    expected = torch.autograd.grad(model(X).square().sum(), list(parameters.values()))
    torch.testing.assert_close(list(found.values()), list(expected))
    batches = normal(3, 4, N, dtype=torch.float32)
    mapped = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batches)
    for i, batch in enumerate(batches):
        of_one = {name: value[i] for name, value in mapped.items()}
        torch.testing.assert_close(of_one, torch.func.grad(loss)(parameters, batch))
    assert torch.equal(module.eval()(X), module.train()(X))
    with pytest.raises(RuntimeError, match="no threshold with track_running_stats=False"):
        module.to_jumprelu()
    with pytest.raises(ValueError, match="`n` counts dead units"):
        BatchTopK(2, n=N, track_running_stats=False)


def test_transforms_of_a_batch_topk_with_a_threshold():
    module = BatchTopK(2)
    with pytest.raises(RuntimeError, match="track_running_stats=False"):
        torch.func.grad(lambda x: module(x).sum())(X)

    def moved(x, buffers):  # given as an argument, the state is the transform's own
        y = functional_call(module, buffers, x)
        return y.sum(), buffers["threshold"]

    own = {name: buffer.clone() for name, buffer in module.named_buffers()}
    _, threshold = torch.func.grad(moved, has_aux=True)(X, own)
    assert module.threshold == 0 == module.num_batches_tracked
    module(X)
    assert torch.equal(threshold, module.threshold)
    torch.testing.assert_close(torch.func.vmap(module.eval())(X), module(X))


def test_cumulative_average():
    module, smallest = BatchTopK(1, momentum=None), []
    for seed in range(4):
        x = normal(3, 5, seed=seed, dtype=torch.float32)
        smallest.append(x.flatten().sort(descending=True).values[2])
        module(x)
    module(torch.zeros(0, 5))
    torch.testing.assert_close(module.threshold, torch.stack(smallest).mean())
    assert module.num_batches_tracked == 4


# Annealing

VALUES = 8
FALLING = [0.9**i for i in range(VALUES)]
SIZES, SUMS = [2 + i % (N - 2) for i in range(VALUES)], [2 + 0.3 * i for i in range(VALUES)]
LIMITS = [1 + i % 6 for i in range(VALUES)]
TARGETS = {FenchelYoungTopKLoss: khot.topk_mask(X, 2), TopKCrossEntropyLoss: torch.arange(6)}
TARGETS[TopKMetricLoss] = TARGETS[FenchelYoungTopKLoss]
ANNEALED = [
    (partial(TopK, 3, softness=0.5), {"k": SUMS, "softness": FALLING}),
    (partial(TopK, 3, softness=0.5, straight_through=True), {"k": SIZES, "softness": FALLING}),
    (partial(TopK, 3, softness=0.5, learn_softness=True), {"softness": FALLING}),
    (partial(ExpertChoice, 3), {"capacity": LIMITS}),
    (partial(BatchTopK, 3, softness=0.5), {"k": SUMS, "softness": FALLING}),
    (partial(BatchTopK, 3), {"threshold": FALLING}),
    (partial(JumpReLU, 0.3), {"threshold": FALLING}),
    (partial(JumpReLU, 0.3, learn_threshold=True), {"threshold": FALLING}),
    (partial(NMSparsity, 2, 4, softness=0.5), {"n": [i % 5 for i in range(VALUES)], "softness": FALLING}),
    (partial(MagnitudeSparsity, 0.5), {"density": FALLING}),
    (partial(MagnitudeSparsity, 0.5, strength=0.3), {"strength": FALLING}),
    (partial(TokenChoice, 3, capacity=2), {"k": SIZES, "capacity": LIMITS}),
    (partial(TokenChoice, 3, capacity=2.0), {"capacity": FALLING}),
    (partial(FenchelYoungTopKLoss, 2), {"strength": FALLING}),
    (partial(TopKCrossEntropyLoss, [1.0]), {"softness": FALLING}),
    (partial(TopKMetricLoss, 3), {"softness": FALLING}),
]
NAMES = ["-".join([make.func.__name__, *lists]) for make, lists in ANNEALED]


@pytest.mark.parametrize(("make", "lists"), ANNEALED, ids=NAMES)
def test_annealing_a_module_compiles_it_once_more(make, lists):
    torch.compiler.reset()
    module, counter = make(), CompileCounter()
    if "threshold" in lists:
        module(X)
        module.eval()
    for parameter in module.parameters():  # without ties
        parameter.data += normal(*parameter.shape, dtype=torch.float32)
    arguments = (X, TARGETS[make.func]) if make.func in TARGETS else (X,)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    compiled(*arguments)
    for values in zip(*lists.values(), strict=True):
        for name, value in zip(lists, values, strict=True):
            setattr(module, name, value)
            assert torch.as_tensor(getattr(module, name)).detach().item() == pytest.approx(value)
        torch.manual_seed(1)
        found = compiled(*arguments)
        torch.manual_seed(1)
        torch.testing.assert_close(found, module(*arguments))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("module", "sizes"),
    [(TopK(3), SIZES), (TopK(3, softness=0.5), SUMS), (BatchTopK(3), SUMS)],
    ids=lambda value: type(value).__name__,
)
def test_calls_with_a_size_of_their_own(module, sizes):
    """A number, without many recompilations, or a tensor."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for of_call in (sizes, list(map(torch.tensor, sizes))):
        for k in of_call:
            torch.manual_seed(1)
            found = compiled(X, k)
            torch.manual_seed(1)
            torch.testing.assert_close(found, module(X, k))
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    ("relaxation", "lists"),
    [
        (khot.straight_through_topk, [SIZES, FALLING]),
        (khot.sparse_topk_magnitude, [SUMS, FALLING]),
        (khot.sorted_transport_topk, [SIZES, FALLING]),
    ],
)
def test_annealing_a_map_compiles_it_once_more(relaxation, lists):
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(relaxation, fullgraph=True, backend=counter)
    for numbers in zip(*lists, strict=True):
        torch.testing.assert_close(compiled(X, *numbers), relaxation(X, *numbers))
    assert counter.frame_count <= 2


# Sizes


def test_one_k_for_each_row():
    k = torch.tensor([1, 3, 2, 0, 8, 4])
    expected = X * khot.topk_mask(X, k)
    for module in (TopK(2), TopK(2, softness=0.5, straight_through=True)):
        assert torch.equal(module(X, k), expected)
    torch.testing.assert_close(TopK(2, softness=0.5)(X, k), X * khot.sigmoid_topk(X, k, 0.5))
    torch.testing.assert_close(TopKMask(2, softness=0.5)(X, k / 2), khot.sigmoid_topk(X, k / 2, 0.5))
    loads = torch.tensor([0, 1, 2, 3, 4, 5, 6, 2])
    assert torch.equal((ExpertChoice(2)(X, loads) != 0).sum(0), loads)
    assert torch.equal(BatchTopK(2)(X, k), BatchTopK(3)(X))
    gate = KHotGate(N, 2)
    assert torch.equal(gate(torch.ones(6, N), k).sum(-1).long(), k)
    assert torch.equal(gate.eval()(torch.ones(5, 6, N), k).sum(-1).long(), k.expand(5, 6))
    with pytest.raises(ValueError, match="`k` of shape .* must broadcast"):
        TopK(2)(X, k[:3])
    with pytest.raises(ValueError, match="`k` must broadcast to the batch shape"):
        gate(X, k[:3])


@pytest.mark.parametrize(
    ("module", "name", "good", "wrong"),
    [
        (TopK(2), "k", [3, 0], [2.5, -1, True, "2", None, torch.tensor(2)]),
        (TopKMask(2, softness=0.5), "k", [2.5, 3], [-1, float("nan"), "2"]),
        (TopK(2, softness=0.5), "softness", [0.1, None, 2], [0.0, -1, float("inf"), "1", torch.tensor(1.0)]),
        (TopK(2.5, softness=0.5), "softness", [0.1], [None]),
        (TopK(2, softness=0.5, straight_through=True), "softness", [0.1], [None, 0.0]),
        (TopK(2, softness=0.5, learn_softness=True), "softness", [0.1, 1.0], [None, 0.0]),
        (ExpertChoice(2), "capacity", [3], [2.5, -1]),
        (BatchTopK(2), "k", [2.5, 1], [0, -1, "2"]),
        (BatchTopK(2), "threshold", [0.5, torch.tensor(0.25)], ["1", float("nan"), torch.ones(2)]),
        (BatchTopK(2, track_running_stats=False), "threshold", [], [0.5]),
        (JumpReLU(0.3), "threshold", [0.5, torch.tensor(0.25)], ["1", float("nan"), torch.ones(3), torch.tensor(1)]),
        (
            JumpReLU(torch.ones(N), learn_threshold=True),
            "threshold",
            [0.5, torch.full((N,), 0.25)],
            ["1", torch.ones(3)],
        ),
        (NMSparsity(2, 4), "n", [1, 4], [5, -1, 1.5]),
        (MagnitudeSparsity(0.3), "density", [0.5, 0, 1], [1.5, -0.1, "1", None]),
        (MagnitudeSparsity(0.3), "strength", [0.5, None], [0.0, -1, "1"]),
        (TokenChoice(2, capacity=3), "capacity", [1, None, 2.5], [0, -2.5, math.inf, "1"]),
        (KHotGate(N, 3), "k", [2, 0, None], [N + 1, -1, 2.5]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_assignment_checks_as_construction_does(module, name, good, wrong):
    arguments, parameters = (X,), dict(module.named_parameters())
    for value in good:
        setattr(module, name, value)
        found, expected = getattr(module, name), value
        if isinstance(found, torch.Tensor):
            expected = torch.as_tensor(value, dtype=found.dtype).expand(found.shape)
            torch.testing.assert_close(found.detach(), expected)
        else:
            assert found == expected
        assert module(*arguments).isfinite().all()
    for value in wrong:
        before = repr(getattr(module, name))
        with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
            setattr(module, name, value)
        assert repr(getattr(module, name)) == before
    assert parameters == dict(module.named_parameters())  # an optimizer has them


# FSDP2


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.needs_torch("2.7")  # fully_shard on a CPU
@each_activation
def test_fully_sharded(group, case):
    """Parameters of every shape, those of the module in a group of their own."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("torch has no FSDP2")
    model, plain = network(case), network(case)
    assert all(parameter.dim() > 0 for parameter in model.parameters())
    if list(model[1].parameters()):
        fsdp.fully_shard(model[1])
    fsdp.fully_shard(model)
    assert repr(model[1])
    torch.testing.assert_close(train(model), train(plain))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    assert_same(buffers(model), buffers(plain))
    torch.testing.assert_close(model.eval()(X), plain.eval()(X))


@pytest.mark.parametrize("case", [case for case in ACTIVATIONS if list(case.make().parameters())], ids=lambda c: c.name)
def test_pruned_parameters_learn(case):
    model, plain = network(case), network(case)
    for name, _ in list(model[1].named_parameters()):
        prune.identity(model[1], name)  # torch sets a plain attribute before each call, here to the whole parameter
    torch.testing.assert_close(train(model), train(plain))
    for name, parameter in plain[1].named_parameters():
        torch.testing.assert_close(getattr(model[1], f"{name}_orig"), parameter)
        prune.remove(model[1], name)
    torch.testing.assert_close(model.eval()(X), plain.eval()(X))


class Attention(nn.Module):
    """Of tokens to at most four of them."""

    def __init__(self, softness=None):
        super().__init__()
        self.softness = softness

    def forward(self, x):
        return topk_attention(x, x, x, 4, softness=self.softness)


LIMITED = {
    "expert_choice": ExpertChoice(4),
    "expert_choice_relaxed": ExpertChoice(4, softness=0.5),
    "token_choice_capacity": TokenChoice(2, capacity=4),
    "attention": Attention(),
    "attention_relaxed": Attention(0.5),
}


@pytest.mark.needs_torch("2.8")  # earlier, the exporter fixes some of these sizes
@pytest.mark.parametrize("name", LIMITED)
def test_programs_take_fewer_tokens_than_the_limit(name):
    module, strict = LIMITED[name], name.startswith("attention")  # by either tracer
    axes = {0: torch.export.Dim("tokens")}
    program = torch.export.export(module.eval(), (X,), dynamic_shapes=(axes,), strict=strict).module()
    for tokens in (2, 3, 10):
        x = normal(tokens, N, seed=tokens, dtype=torch.float32)
        torch.testing.assert_close(program(x), module(x))


class Exponential(nn.Module):
    """A parametrisation by a positive number."""

    def forward(self, x):
        return x.exp()

    def right_inverse(self, y):
        return y.log()


@pytest.mark.parametrize(
    ("module", "parameter", "name"),
    [
        (TopK(2, softness=2.0, learn_softness=True), "log_softness", "softness"),
        (JumpReLU(0.3, learn_threshold=True), "threshold", "threshold"),
        (JumpReLU(torch.full((N,), 0.3), learn_threshold=True), "threshold", "threshold"),
    ],
    ids=["softness", "threshold", "thresholds"],
)
def test_assigned_numbers_go_through_parametrisations(module, parameter, name):
    parametrize.register_parametrization(module, parameter, Exponential())
    original, before = module.parametrizations[parameter].original, getattr(module, name).detach()
    setattr(module, name, 1.5)
    torch.testing.assert_close(getattr(module, name).detach(), torch.full_like(before, 1.5))
    assert module.parametrizations[parameter].original is original
    (grad,) = torch.autograd.grad(module(X).sum(), original)
    assert grad.shape == original.shape


@pytest.mark.parametrize("name", ["log_softness", "threshold"])
def test_states_with_parameters_without_axes(name):
    """State dictionaries from before parameters had shape (1,)."""
    module = (
        TopK(2, softness=0.5, learn_softness=True) if name == "log_softness" else JumpReLU(0.3, learn_threshold=True)
    )
    model = nn.Sequential(module)
    saved = {f"0.{name}": torch.tensor(-1.5)}
    for assign in (False, True):
        model.load_state_dict(saved, assign=assign)
        assert getattr(model[0], name).tolist() == [-1.5]
    assert saved[f"0.{name}"].dim() == 0
