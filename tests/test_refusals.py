"""What is refused with a reason: ``torch.jit.trace``, subclasses of tensors, and DTensors in designs."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from pyro.infer import MCMC, NUTS, SVI, JitTrace_ELBO, Trace_ELBO, TraceGraph_ELBO
from pyro.ops.provenance import detach_provenance, get_provenance, track_provenance
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import transform_to
from torch.nn import Parameter

import khot
from khot import ConditionalPoisson, Pivotal, PlackettLuce, RelaxedKHot, StraightThrough, sigmoid_topk, soft_rank
from khot.constraints import capped_simplex
from khot.nn import BatchTopK, KHotGate, TopK
from tests.every_map import MAPS
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS

X = normal(3, 6)
VALUE = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
DESIGN = ConditionalPoisson(logits=X, k=2)


# ---- torch.jit.trace

TRACED = {
    "map": lambda x: sigmoid_topk(x, 2),
    "order": soft_rank,
    "perturbed": lambda x: khot.perturbed_topk(x, 2),
    "hard": lambda x: khot.straight_through_value(x, x),
    "loss": lambda x: khot.fenchel_young_topk_loss(x, VALUE, 2),
    "module": TopK(2),
    "trained module": BatchTopK(2).eval(),
    "gate": KHotGate(6, 2).double(),
    "design": lambda x: ConditionalPoisson(logits=x, k=2).mean,
    "relaxed": lambda x: RelaxedKHot(0.5, logits=x, k=2).rsample(),
    "draw": lambda x: x + DESIGN.sample(),
    "log_prob": lambda x: x + DESIGN.log_prob(VALUE).unsqueeze(-1),
    "estimator": lambda x: x + StraightThrough(DESIGN).rsample(),
    "total": lambda x: khot.horvitz_thompson(DESIGN, VALUE.expand(3, 6), x)[0],
    "transform": lambda x: transform_to(capped_simplex(2)).inv(x),
    "constraint": lambda x: capped_simplex(2).check(x),
    "subsets": lambda x: x + khot.subset_vector(torch.tensor(0), 6, 2),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@for_each("name", TRACED)
def test_traces(name):
    with pytest.raises(NotImplementedError, match="torch.jit.trace.*use torch.compile"):
        torch.jit.trace(TRACED[name], X)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_pyro_traces():
    def model():
        y = pyro.sample("y", RelaxedKHot(0.7, logits=torch.zeros(4), k=2))
        pyro.factor("data", -(y[0] - 0.3).square())

    def guide():
        pyro.sample("y", RelaxedKHot(0.7, logits=pyro.param("logits", torch.zeros(4)), k=2))

    pyro.clear_param_store()
    with pytest.raises(NotImplementedError, match="Trace_ELBO in place of JitTrace_ELBO, and NUTS and HMC without jit"):
        SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), JitTrace_ELBO()).step()
    with pytest.raises(NotImplementedError, match="Trace_ELBO in place of JitTrace_ELBO, and NUTS and HMC without jit"):
        MCMC(NUTS(model, jit_compile=True), num_samples=1, warmup_steps=1, disable_progbar=True).run()
    pyro.clear_param_store()


# ---- Subclasses


class Subclass(torch.Tensor):
    pass


class OwnParameter(Parameter):
    pass


@for_each("member", MAPS)
def test_maps_of_a_subclass(member):
    with pytest.raises(TypeError, match=r"must be a torch.Tensor, but got the subclass Subclass.*as_subclass"):
        member.call(X.as_subclass(Subclass), 0.7)


def test_designs_of_a_subclass():
    with pytest.raises(TypeError, match=r"`logits` must be a torch.Tensor, but got the subclass Subclass"):
        ConditionalPoisson(logits=X.as_subclass(Subclass), k=2)
    with pytest.raises(TypeError, match=r"`value` must be a torch.Tensor, but got the subclass Subclass"):
        DESIGN.log_prob(VALUE.as_subclass(Subclass))


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage:UserWarning")
def test_the_cure_for_a_masked_tensor():
    """The advice names another conversion, since ``as_subclass`` of a masked tensor fails inside torch."""
    is_kept = X < 1
    masked = torch.masked.masked_tensor(X, is_kept)
    with pytest.raises(TypeError, match=r"subclass MaskedTensor.*pass the tensor that it wraps, such as x.to_tensor"):
        sigmoid_topk(masked, 2)
    expected = sigmoid_topk(X.masked_fill(~is_kept, -torch.inf), 2)
    torch.testing.assert_close(sigmoid_topk(masked.to_tensor(-torch.inf), 2), expected)


def test_what_is_like_a_tensor_passes():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    buffer = torch.nn.Buffer(X) if hasattr(torch.nn, "Buffer") else X
    for x in (Parameter(X), OwnParameter(X), buffer):
        torch.testing.assert_close(sigmoid_topk(x, 2).detach(), sigmoid_topk(X, 2))
        torch.testing.assert_close(ConditionalPoisson(logits=x, k=2).mean.detach(), DESIGN.mean)
    assert sigmoid_topk(fake, 2).shape == X.shape
    assert torch.func.vmap(lambda x: sigmoid_topk(x, 2))(X).shape == X.shape
    with torch.device("cpu"):  # a mode, under which functions of torch are overridden for all tensors
        torch.testing.assert_close(ConditionalPoisson(logits=X, k=2).mean, DESIGN.mean)


# ---- Tensors by which Pyro tracks dependencies, the exception that TraceGraph_ELBO needs


def check_dependencies(function):
    x = X.clone().requires_grad_()
    expected = function(x)
    found = function(track_provenance(1.0 * x, frozenset({"x"})))
    assert get_provenance(found) == {"x"}
    torch.testing.assert_close(
        torch.autograd.grad(detach_provenance(found).cos().sum(), x), torch.autograd.grad(expected.cos().sum(), x)
    )


@for_each(
    "function",
    [
        lambda x: sigmoid_topk(x, 2, 0.5),
        soft_rank,
        lambda x: ConditionalPoisson(logits=x, k=2).log_prob(VALUE),
        lambda x: ConditionalPoisson(logits=x, k=2).mean,
        lambda x: StraightThrough(ConditionalPoisson(logits=x, k=2)).log_prob(VALUE),
        lambda x: RelaxedKHot(0.5, logits=x, k=2).expand((2, 3)).log_prob(sigmoid_topk(X, 2)),
        lambda x: DESIGN.log_prob(x * 0 + VALUE) + x.sum(-1),
    ],
)
def test_results_know_what_they_depend_on(function):
    check_dependencies(function)


def test_draws_know_what_they_depend_on():
    logits = track_provenance(X, frozenset({"z"}))
    for law in (DESIGN, ConditionalPoisson(logits=logits, k=2), StraightThrough(Pivotal(logits=logits, k=2))):
        expected = frozenset() if law is DESIGN else {"z"}
        assert get_provenance(law.sample()) == expected and get_provenance(law.expand((2, 3)).sample()) == expected
    assert get_provenance(StraightThrough(Pivotal(logits=logits, k=2)).rsample()) == {"z"}


def test_trace_graph_elbo_through_a_relaxation():
    """The parameters of one site depend on another: its gradient goes through what made them."""

    def law(x):
        return StraightThrough(Pivotal(probs=sigmoid_topk(x, 3)), log_prob="none")

    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros_like(X[0]), 1.0).to_event(1))
        pyro.factor("data", (pyro.sample("x", law(z + X[0])) * X[1]).sum())

    def guide():
        z = pyro.sample("z", dist.Normal(pyro.param("loc", 0.1 * X[0]), 0.01).to_event(1))
        pyro.sample("x", law(0.5 * z))

    gradients = []
    for kind in (Trace_ELBO, TraceGraph_ELBO):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        kind().loss_and_grads(model, guide)
        gradients.append(pyro.param("loc").grad.clone())
    pyro.clear_param_store()
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=0)


# ---- DTensors


@pytest.fixture(scope="module")
def spread():
    pytest.importorskip("torch.distributed.tensor", reason="torch was built without distributed tensors")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield functools.partial(distribute_tensor, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)])
    torch.distributed.destroy_process_group()


def refused(name):
    return pytest.raises(TypeError, match=rf"`{name}` must be a plain tensor, but got a DTensor.*full_tensor\(\)")


def test_dtensors_in_designs(spread):
    x = spread(X)
    for case in DESIGNS:
        with refused("logits"):
            case.make(logits=x, k=2)
        with refused("probs"):
            case.make(probs=spread(sigmoid_topk(X, 2)), k=2)
    sizes = torch.tensor([1, 2, 3])
    for name, call in {
        "k": lambda: Pivotal(logits=X, k=spread(sizes)),
        r"k\[0\]": lambda: ConditionalPoisson(logits=X, k=(spread(sizes), 4)),
        r"k\[2\]": lambda: ConditionalPoisson(logits=X, k=(1, 3, x[:, :3])),
        "temperature": lambda: Pivotal(logits=X, k=2, temperature=spread(torch.ones(3))),
        "logits": lambda: PlackettLuce(x, 2),
        "value": lambda: DESIGN.log_prob(spread(VALUE.expand(3, 6))),
        "scores": lambda: RelaxedKHot(0.5, logits=X, k=2).from_scores(x),
        "y": lambda: khot.horvitz_thompson(DESIGN, VALUE.expand(3, 6), x),
    }.items():
        with refused(name):
            call()
    with refused("value"):
        PlackettLuce(X, 2).to_khot(spread(torch.zeros(3, 2, dtype=torch.long)))
    with refused("logits"):
        RelaxedKHot(0.5, logits=x, k=2)
    with refused("value"):
        StraightThrough(DESIGN).attach_gradient(spread(VALUE.expand(3, 6)))
    torch.testing.assert_close(ConditionalPoisson(logits=x.full_tensor(), k=2).mean, DESIGN.mean)
    torch.testing.assert_close(ConditionalPoisson(logits=x.to_local(), k=2).mean, DESIGN.mean)
