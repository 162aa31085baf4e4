"""What every module of khot.nn does: its definition, its state, copies, graphs, dtypes and gradients."""

import copy
import io
import itertools
import pickle
from functools import partial

import numpy as np
import pytest
import torch

from khot.nn import TopK
from tests.inputs import normal
from tests.maps import members, only_for
from tests.modules import MODULES, ModuleCase, N, largest

X = normal(6, N, dtype=torch.float32)


def trained(case):
    """In evaluation mode, with the state that a step of training leaves."""
    torch.manual_seed(0)
    module = case.make()
    case.call(module, X.clone())  # which a wrong module may write to
    return module.eval()


def outcome(case, module, x=X):
    torch.manual_seed(1)
    return case.call(module, x)


@only_for(lambda case: case.expected is not None)
def check_definition(case):
    x = X.double()
    torch.testing.assert_close(case.make().double()(x), case.expected(x), rtol=1e-6, atol=1e-6)


def check_input_is_untouched(case):
    x = X.clone()
    for module in (case.make(), trained(case)):
        case.call(module, x)
        assert torch.equal(x, X)


@only_for(lambda case: case.target is None)
def check_shapes(case):
    """Any batch, empty ones included, but for what has state of a shape."""
    module, fixed = case.make(), case.name.endswith("_scores")
    for shape in ((6, N),) if fixed else ((6, N), (2, 6, N), (0, 6, N)):
        y = module.train()(torch.zeros(shape).normal_())
        assert y.shape == shape and y.isfinite().all()


@only_for(lambda case: case.target is None and not case.random)
def check_evaluation_is_deterministic(case):
    module = trained(case)
    assert torch.equal(outcome(case, module), case.call(module, X))


def check_state(case):
    """A fresh module that loads the state of another one behaves like it, also if it had no data before."""
    module, file = trained(case), io.BytesIO()
    for parameter in module.parameters():
        parameter.data += 0.1
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    with torch.device("meta"):
        empty = case.make()
    for fresh, assign in ((case.make(), False), (case.make(), True), (empty, True)):
        fresh.load_state_dict(case.make().state_dict(), assign=assign)  # of a module that has never been called
        fresh.load_state_dict(state, assign=assign)
        assert torch.equal(outcome(case, fresh.eval()), outcome(case, module))
        own = dict(itertools.chain(fresh.named_parameters(), fresh.named_buffers()))
        assert all((own[name].data_ptr() == saved.data_ptr()) == assign for name, saved in state.items())


def check_copies(case):
    module = trained(case)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert torch.equal(outcome(case, twin), outcome(case, module))
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert ours is not theirs


def check_repr(case):
    assert repr(case.make()).startswith(f"{case.public.__name__}(")
    assert "\n" not in repr(case.make())
    with torch.device("meta"):
        assert repr(case.make()).startswith(f"{case.public.__name__}(")


@only_for(lambda case: isinstance(case.make, partial))
def check_numbers_of_numpy(case):
    """Made with NumPy's numbers it is the same module."""
    kinds = {int: np.uint8, float: np.float64}
    theirs = {name: kinds.get(type(value), lambda v: v)(value) for name, value in case.make.keywords.items()}
    module = case.make.func(*(kinds.get(type(value), lambda v: v)(value) for value in case.make.args), **theirs)
    assert repr(module) == repr(case.make())
    assert torch.equal(outcome(case, module), outcome(case, case.make()))


def compiled_alone(module, backend, fullgraph=True):
    """The module, as one graph; what other cases compiled does not count towards torch's limit."""
    torch.compiler.reset()
    return torch.compile(module, fullgraph=fullgraph, backend=backend)


FIRST = [next(case for case in MODULES if case.public is public) for public in {case.public for case in MODULES}]
# Of each module the first member, and those whose options add state, a custom derivative or another computation.
IN_GRAPHS = FIRST + [
    case
    for case in MODULES
    if case.name
    in (
        "topk_straight_through",
        "batch_topk_relaxed",
        "batch_topk_cap",
        "jump_relu_learned",
        "one_of_two_tiles",
        "magnitude_relaxed",
        "token_choice_capacity",
        "token_choice_bias",
        "gate_learned_reinmax",
    )
]


@only_for(lambda case: case in FIRST and case.target is None)
def check_compiles_in_evaluation(case):
    module = trained(case)
    compiled = compiled_alone(module, "eager")  # of whose operators training makes graphs, too
    with torch.device("cpu"):  # a mode of torch, under which compilers know less
        torch.testing.assert_close(case.call(compiled, X), case.call(module, X))


@only_for(lambda case: case in IN_GRAPHS)
def check_compiles_in_training(case):
    """One graph, unless a design draws, with the draws and the gradients of the module that is not compiled."""
    module = case.make()
    for parameter in module.parameters():
        parameter.data += normal(*parameter.shape, seed=3, dtype=parameter.dtype)
    backend = (
        "aot_eager" if case.name.startswith("batch_topk") else "eager"
    )  # operators, of which some write to buffers
    compiled = compiled_alone(copy.deepcopy(module), backend, fullgraph=not case.random)
    for _ in range(2):  # the second with the state that the first has left
        found = [values_and_gradients(case, each) for each in (compiled, module)]
        torch.testing.assert_close(*found)


def values_and_gradients(case, module):
    x = X.clone().requires_grad_()
    y = outcome(case, module, x)
    leaves = [x, *module.parameters()]
    grads = torch.autograd.grad((y * y.detach().cos()).sum(), leaves) if y.requires_grad else ()
    return [y.detach(), *grads]


@only_for(lambda case: case in IN_GRAPHS)
def check_exports(case):
    module = trained(case)
    arguments = (
        (X,) if case.target is None else (X, case.target.float() if case.target.is_floating_point() else case.target)
    )
    program, file = torch.export.export(module, arguments), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(*arguments), module(*arguments))


def check_autocast(case):
    """Scores of half precision from a layer, parameters in single precision."""
    module, layer = case.make(), torch.nn.Linear(N, N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = layer(X)
        y = case.call(module, x)
    assert y.isfinite().all()
    assert y.dtype == x.dtype


def check_default_device(case):
    """The scores decide where a module computes. A default device without data shows every tensor made elsewhere."""
    module = case.make()
    expected = values_and_gradients(case, copy.deepcopy(module))
    with torch.device("meta"):
        found = values_and_gradients(case, module)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@only_for(lambda case: case.gradient)
def check_gradients(case):
    """Scores and parameters have finite gradients, which are not all zero with a relaxed or learned mask."""
    module = case.make()
    _, *grads = values_and_gradients(case, module)
    for leaf, grad in zip((X, *module.parameters()), grads, strict=True):
        assert grad.shape == leaf.shape and grad.isfinite().all() and grad.any()


def check_step(case):
    """An optimizer moves the parameters, whose constraints hold: a softness stays positive."""
    module = torch.nn.Sequential(torch.nn.Linear(N, N), case.make())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    hidden = module[0](X)
    y = case.call(module[1], hidden)
    assert y.requires_grad == case.gradient
    if y.requires_grad:
        y.sum().backward()
        optimizer.step()
    softness = getattr(module[1], "softness", None)
    assert softness is None or softness > 0


CHECKS = [
    check_definition,
    check_input_is_untouched,
    check_shapes,
    check_evaluation_is_deterministic,
    check_state,
    check_copies,
    check_repr,
    check_numbers_of_numpy,
    check_compiles_in_evaluation,
    check_compiles_in_training,
    check_exports,
    check_autocast,
    check_default_device,
    check_gradients,
    check_step,
]
COSTLY = (check_compiles_in_training, check_compiles_in_evaluation, check_exports)


def has_compiled_design(parameters):
    return parameters.id.startswith("gate") and parameters.id.endswith("compiles_in_training")


CONTRACT = [
    p._replace(marks=[*p.marks, pytest.mark.needs_torch("2.8")]) if has_compiled_design(p) else p
    for p in members(MODULES, CHECKS, costly=COSTLY)
]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch 2.6 about its exports
@pytest.mark.filterwarnings("ignore:Node lifted_tensor_. target lifted_tensor_:UserWarning")
@pytest.mark.parametrize(("case", "check"), CONTRACT)
def test_contract(case, check):
    check(case)


class ForgetsItsState(TopK):
    """Softness outside of the parameters: no state, no gradient."""

    @property
    def softness(self):
        return self.log_softness.detach().exp()


class KeepsOneMore(TopK):
    def __init__(self, k):
        super().__init__(k + 1)


class NanWhereNothingIs(TopK):
    """Masks by multiplication, and ignores that entries may be infinite."""

    def forward(self, x):
        return x * self.mask(x) + 0 * x.abs().amax().reciprocal().log()


class WritesIntoItsInput(TopK):
    def forward(self, x):
        return x.mul_(self.mask(x))


WRONG = [
    (lambda: ForgetsItsState(2, softness=0.5, learn_softness=True), check_gradients),
    (lambda: KeepsOneMore(3), check_definition),
    (lambda: WritesIntoItsInput(3), check_input_is_untouched),
    (lambda: NanWhereNothingIs(3), check_shapes),
]


@pytest.mark.parametrize(("make", "check"), WRONG, ids=["forgets", "one_more", "writes", "nan"])
def test_contract_rejects(make, check):
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(ModuleCase("wrong", make, lambda x: x * largest(x, 3)))
