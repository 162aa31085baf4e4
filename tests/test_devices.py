"""Results stay on the device of the arguments, and no operation there meets a tensor of the host; see tests/elsewhere.

The device there is simulated, but has numbers, so that searches and checks run in plain torch, too. Whether Triton's
own launchers keep to the rule can be seen only on an accelerator.
"""

import pyro
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributions import Distribution, kl_divergence

import khot
from khot import (
    AutoKHot,
    ConditionalPoisson,
    KHotReparam,
    KHotSwap,
    PhantomUnit,
    PlackettLuce,
    Sampford,
    compare_estimators,
    horvitz_thompson,
    knn_loss,
    perturbed_topk,
    score_function,
    sigmoid_topk,
    subset_categorical,
    subset_index,
    subset_vector,
)
from khot.kernels import backend
from khot.nn import GatherTopK, route, topk_attention
from tests.elsewhere import DEVICE, Elsewhere, elsewhere, numbers, recording, there
from tests.every_map import MAPS, SHORT
from tests.inputs import normal
from tests.loops import for_each
from tests.modules import MODULES, N
from tests.registry import CONSTRAINTS, DESIGNS, ESTIMATORS, FUNCTIONS, LOSSES, PERTURBED, RELAXED

LOGITS = normal(3, 5)
GIVEN = {
    "logits": lambda: {"logits": LOGITS, "k": 2},
    "probs": lambda: {"probs": sigmoid_topk(LOGITS, 2)},
    "logits_rows": lambda: {"logits": LOGITS.float(), "k": torch.tensor([1, 3, 2])},
    "logits_one_row": lambda: {"logits": LOGITS[0], "k": torch.tensor(2)},
    "logits_half": lambda: {"logits": LOGITS.half(), "k": 2},
}
EXCLUDING = {khot.sigmoid_topk, khot.sorted_transport_topk, khot.soft_rank, khot.soft_sort, khot.soft_permutation}
SOFTNESSES = {"number": None, "one": (), "rows": (3,)}
validate = for_each("validate_args", [True, False])
softness_of_each_kind = for_each("softness, validate_args", [("number", True), ("rows", False)])


@pytest.fixture(params=["auto"])
def on_device(request):
    """The device, on which kernels compute, or plain torch if a test asks for that, too."""
    with backend(request.param), elsewhere():
        yield


in_torch_too = pytest.mark.parametrize("on_device", ["auto", "torch"], indirect=True)


def check(*results):
    assert [type(value) for value in results] == [Elsewhere] * len(results)


def check_gradients(value, *leaves, twice=False):
    """A value, the gradients of its sum, and perhaps the gradients of these."""
    first = torch.autograd.grad(value.sum(), leaves, retain_graph=True, create_graph=twice)
    check(value, *first)
    moving = [grad.square().sum() for grad in first if grad.requires_grad]
    if moving and twice:
        check(*torch.autograd.grad(sum(moving), leaves, materialize_grads=True, retain_graph=True))


def given(name, **more):
    """The arguments of a design there, and the one that needs a gradient."""
    arguments = {key: there(v) if isinstance(v, Tensor) else v for key, v in (GIVEN[name]() | more).items()}
    (x,) = (arguments[key].requires_grad_() for key in ("logits", "probs") if key in arguments)
    return arguments, x


def test_the_simulation_is_strict(on_device):
    """The device has numbers, and refuses those of the host unless they are a single one."""
    x = there(LOGITS)
    assert x.device == DEVICE and x.is_cuda and bool((numbers(2 * x) == 2 * LOGITS).all())
    check(x + torch.tensor(1.0), torch.ones(5, device=x.device) * x, x[torch.tensor([0, 1])])
    mixtures = (
        lambda: x + LOGITS,
        lambda: torch.stack([x[0, 0], LOGITS[0, 0]]),
        lambda: torch.where(x > 0, x, LOGITS),
        lambda: LOGITS[0, 0].add_(x[0, 0]),
    )
    for wrong in mixtures:
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            wrong()


@softness_of_each_kind
@in_torch_too
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_maps(case, softness, validate_args, on_device):
    Distribution.set_default_validate_args(validate_args)
    shape = SOFTNESSES[softness]
    s = 0.7 if shape is None else torch.full(shape, 0.7, device=DEVICE, dtype=torch.float64, requires_grad=True)
    x = there(normal(3, 6)).requires_grad_(case.differentiable)
    y = case.call(x, s)
    check(y)
    if case.differentiable:
        leaves = [v for v in (x, s) if isinstance(v, Tensor)]
        check(*torch.autograd.grad(case.call(x, s).sum(), leaves, materialize_grads=True))
        first = torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True, create_graph=True)
        moving = [grad.square().sum() for grad in first if grad.requires_grad]
        check(*(torch.autograd.grad(sum(moving), leaves, materialize_grads=True) if moving else []))


@pytest.mark.parametrize("case", [case for case in MAPS if case.public in EXCLUDING], ids=lambda case: case.name)
def test_excluded_entries(case, on_device):
    x = normal(3, 6)
    x[:, 1] = -torch.inf
    x = there(x).requires_grad_()
    check_gradients(case.call(x, 0.7), x)


@pytest.mark.parametrize("case", [case for case in SHORT if case.differentiable], ids=lambda case: case.name)
def test_transforms_of_maps(case, on_device):
    x = there(normal(3, 6))
    with forward_ad.dual_level():
        check(forward_ad.unpack_dual(case.call(forward_ad.make_dual(x, torch.ones_like(x)), 0.7)).tangent)
    check(torch.func.vmap(torch.func.grad(lambda row: case.call(row, 0.7).sum()))(x))


@validate
def test_rows_are_sorted_once(validate_args, on_device, monkeypatch):
    Distribution.set_default_validate_args(validate_args)
    sort, calls = Tensor.sort, []
    monkeypatch.setattr(Tensor, "sort", lambda x, *args, **kwargs: calls.append(1) or sort(x, *args, **kwargs))
    check(khot.soft_rank(there(normal(3, 6)), 0.7))
    assert len(calls) == 1


# What searches until its rows are solved, or looks how far apart they are, cannot be recorded in a CUDA graph.
SEARCHING = (
    "normal_topk",
    "sorted_transport",
    "sparse_topk_magnitude",
    "sparse_topk_signed",
    "isotonic",
    "permutahedron",
)
RECORDABLE = [case for case in SHORT if case.name != "capped_simplex_map" and not case.name.startswith(SEARCHING)]
RECORDED = {
    "conditional_poisson": ["sample", "mean", "log_prob", "entropy"],
    **{name: ["sample", "mean"] for name in ("pivotal", "systematic_random", "brewer")},
    **{name: ["sample", "mean", "log_prob"] for name in ("systematic_fixed", "sampford")},
    **{name: ["sample"] for name in ("pareto", "gumbel_topk")},
}


@softness_of_each_kind
@pytest.mark.parametrize("case", RECORDABLE, ids=lambda case: case.name)
def test_maps_in_a_cuda_graph(case, softness, validate_args, on_device):
    Distribution.set_default_validate_args(validate_args)
    shape = SOFTNESSES[softness]
    s = 0.7 if shape is None else torch.full(shape, 0.7, device=DEVICE, dtype=torch.float64)
    x = there(normal(3, 6)).requires_grad_(case.differentiable)
    with recording():
        y = case.call(x, s)
        check(y, *(torch.autograd.grad(y.sum(), x) if case.differentiable else ()))


@validate
@for_each("name, what", [(name, what) for name, several in RECORDED.items() for what in several])
def test_designs_in_a_cuda_graph(name, what, validate_args, on_device):
    arguments, x = given("logits", validate_args=validate_args)
    value = (torch.arange(5, device=DEVICE) < 2).float().expand(3, 5)
    with recording():
        (design,) = (case.make(**arguments) for case in DESIGNS if case.name == name)
        if what == "sample":
            check(design.sample((2,)))
        else:
            arguments = [value] if what == "log_prob" else []
            check_gradients(design.mean if what == "mean" else getattr(design, what)(*arguments), x)


@validate
def test_empty_batches(validate_args, on_device):
    Distribution.set_default_validate_args(validate_args)
    x = there(normal(0, 5)).requires_grad_()
    for function in (khot.sigmoid_topk, khot.topk_threshold, khot.soft_sort):
        y = function(x, 2.0)
        check(y, *torch.autograd.grad(y.sum(), x))


def test_a_graph_neither_reads_nor_takes_from_the_host(on_device):
    x = there(LOGITS)
    with recording():
        reads = (lambda: x.sum().item(), x.nonzero, lambda: x[x > 0], lambda: torch.equal(x, x), x.unique, x.cpu)
        brings = (lambda: LOGITS.to(DEVICE), lambda: x.copy_(LOGITS), lambda: x[torch.tensor([0])])
        for wrong in reads + brings:
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                wrong()


@pytest.mark.parametrize(
    ("case", "name"),
    [  # those that take a relaxation see nothing but inclusion probabilities
        (case, name) for case in DESIGNS for name in (["logits", "logits_rows"] if case.takes_relaxation else GIVEN)
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_designs(case, name, on_device):
    validate_args = name != "logits_half"
    Distribution.set_default_validate_args(validate_args)
    arguments, x = given(name)
    design = case.make(**arguments, validate_args=validate_args)
    value = design.sample((2,))
    twice = name == "logits" and case.name != "pareto_exact"  # its odds are found with first derivatives only
    check(value, design.expand((4, 3)).sample())
    check_gradients(design.mean, x, twice=twice)
    check_gradients(design.variance, x)
    if case.has_log_prob:
        check_gradients(design.log_prob(value), x, twice=twice)
    if case.has_entropy:
        check_gradients(design.entropy(), x)
    if case.has_pairwise:
        check_gradients(design.pairwise_inclusion, x)
        check(*horvitz_thompson(design, value, there(normal(5))))
    if name != "logits_rows":
        check(design.sample_indices((2,)), design.enumerate_support())
        check(design.mode if case.has_log_prob else value)


@pytest.mark.parametrize("case", [case for case in DESIGNS if case.takes_relaxation], ids=lambda case: case.name)
def test_temperatures_of_designs(case, on_device):
    for temperature in (0.5, torch.tensor([0.5, 1.0, 2.0])):
        arguments, x = given("logits", temperature=temperature)
        check_gradients(case.make(**arguments).mean, x)


def test_other_laws(on_device):
    for parameter in ("logits", "probs"):
        x = there(LOGITS.sigmoid()).requires_grad_()
        design = PhantomUnit(ConditionalPoisson, **{parameter: x})
        check_gradients(design.log_prob(design.sample()), x)
        check_gradients(kl_divergence(design, design), x)
    logits = there(LOGITS).requires_grad_()
    order = PlackettLuce(logits=logits, k=2)
    check_gradients(order.log_prob(order.sample()), logits)
    design = ConditionalPoisson(logits=logits, k=2)
    check(subset_categorical(design).probs, subset_index(design.sample()))
    check(subset_vector(torch.arange(3, device=DEVICE), 5, 2))


@for_each("name", ["logits", "logits_rows"])
@pytest.mark.parametrize("case", RELAXED, ids=lambda case: case.public.__name__)
def test_relaxed_laws(case, name, on_device):
    arguments, x = given(name)
    law = case.public(0.5, **arguments)
    value = law.rsample((2,))
    check_gradients(value * x, x)
    check_gradients(law.log_prob(law.sample()), x)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda case: case.name)
@pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
def test_wrappers(case, estimator, on_device):
    arguments, x = given("logits")
    wrapped = estimator.wrap(case.make(**arguments), log_prob="none")
    value = wrapped.rsample((2,))
    check(wrapped.sample(), wrapped.log_prob(value.detach()))
    check_gradients(value.square() * x, x)


@for_each("name", ["logits", "logits_rows"])
@pytest.mark.parametrize("case", PERTURBED, ids=lambda case: case.name)
def test_perturbed_scores(case, name, on_device):
    arguments, x = given(name)
    check_gradients(case.make(**arguments).rsample((2,)) * torch.arange(5.0, device=DEVICE), x)
    check_gradients(perturbed_topk(x, 2, num_samples=4), x)


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_functions(case, on_device):
    arguments, x = given("logits")
    check_gradients(case.estimate(Sampford(**arguments), lambda value: (value * x).sum(-1), 4), x)


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_losses(case, on_device):
    x, target = there(normal(3, 6)).requires_grad_(), there(case.targets(1, 3))
    for softness in (0.7, torch.full((3,), 0.7, device=DEVICE)):
        check_gradients(case.function(x, target, softness, "none"), x, twice=True)
        check_gradients(case.module(softness, "mean")(x, target), x)


def test_losses_and_layers_of_several_tensors(on_device):
    query, keys = there(normal(2, 3, 4)).requires_grad_(), there(normal(2, 6, 4, seed=1)).requires_grad_()
    labels, key_labels = (torch.zeros(2, m, dtype=torch.long, device=DEVICE) for m in (3, 6))
    check_gradients(knn_loss(query, keys, labels, key_labels, 2.5, 0.7), query, keys)
    for softness in (None, 0.3):
        check_gradients(topk_attention(query, keys, keys, 2, softness=softness), query, keys)
    weights, experts = route(query, 2, scores="sigmoid", bias=torch.zeros(4, device=DEVICE), groups=(2, 1), eps=1e-20)
    check(experts)
    check_gradients(weights, query)
    values, indices = GatherTopK(2, softness=0.5)(query.sum(-1), query)
    check(indices)
    check_gradients(values, query)


def moved(module):
    """The module with parameters and buffers there."""
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(there(value)))
        for name, value in list(part.named_buffers(recurse=False)):
            part._buffers[name] = there(value)
    return module


@pytest.mark.parametrize("case", MODULES, ids=lambda case: case.name)
def test_modules(case, on_device):
    module, x = moved(case.make()), there(normal(6, N).float()).requires_grad_()
    target = None if case.target is None else there(case.target)
    target = target.to(x.dtype) if target is not None and target.is_floating_point() else target
    for training in (True, True, False):
        y = module.train(training)(x) if target is None else module(x, target)
        check(y)
        if y.requires_grad:
            check(*torch.autograd.grad(y.sum(), [x, *module.parameters()], materialize_grads=True))
    check(*module.buffers())


@pytest.mark.parametrize("case", CONSTRAINTS, ids=lambda case: case.public.__name__)
def test_constraints(case, on_device):
    for k, row in case.inside.items():
        value = there(torch.tensor(row, dtype=case.dtype))
        for size in (k, torch.tensor(k), torch.tensor(k, device=DEVICE)):
            check(case.make(size).check(value))


def test_estimates_are_compared(on_device):
    design = ConditionalPoisson(logits=there(LOGITS[0]), k=2)
    rows = compare_estimators(design, lambda x: x[..., 0], {"score": score_function}, 2, 2).rows
    assert len(rows) == 1 and rows[0].variance >= 0


@pytest.mark.usefixtures("fresh_pyro")
def test_inference(on_device):
    """Guides, reparametrised sites, and chains of swaps, one or several."""
    logits, gain = there(LOGITS[0]).requires_grad_(), there(normal(5, seed=1))

    def model():
        design = ConditionalPoisson(logits=logits.detach(), k=2)
        pyro.factor("gain", pyro.sample("x", design) @ gain)

    guide = AutoKHot(model)
    check(guide()["x"])
    pyro.infer.Trace_ELBO().loss_and_grads(model, guide)
    parameters = list(guide.parameters())
    assert parameters
    check(*(parameter.grad for parameter in parameters))
    for arguments in ({}, {"temperature": 0.5}):
        site = pyro.poutine.reparam(
            lambda: pyro.sample("x", ConditionalPoisson(logits=logits, k=2)), {"x": KHotReparam(**arguments)}
        )
        check_gradients(site() * gain, logits)
    for chains in ({}, {"chains": 4}):
        mcmc = pyro.infer.MCMC(KHotSwap(model, **chains), num_samples=2, warmup_steps=5, disable_progbar=True)
        mcmc.run()
        check(mcmc.get_samples()["x"])


@pytest.mark.parametrize("case", MAPS, ids=lambda case: case.name)
def test_graphs(case, monkeypatch):
    """What a compiler is told of the devices of results."""
    monkeypatch.setattr(FakeTensor, "is_cuda", property(lambda x: x.device.type == DEVICE.type), raising=False)
    with FakeTensorMode():
        for shape in SOFTNESSES.values():
            softness = 0.7 if shape is None else torch.full(shape, 0.7, device=DEVICE, requires_grad=True)
            x = torch.empty(3, 6, device=DEVICE, requires_grad=case.differentiable)
            results = [case.call(x, softness)]
            if case.differentiable:
                results += torch.autograd.grad(results[0].sum(), x, create_graph=True)
                if results[1].requires_grad:
                    results += torch.autograd.grad(results[1].square().sum(), x, materialize_grads=True)
            assert {value.device.type for value in results} == {DEVICE.type}
