"""What the methods of a design have in common is made once, and never returned for a parameter that it is not of."""

import contextlib
import copy
import functools
import pickle
from functools import partial

import pyro
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributions import kl_divergence

from khot import (
    Brewer,
    ConditionalPoisson,
    ParetoSampling,
    PhantomUnit,
    Pivotal,
    ReinMax,
    RelaxedKHot,
    Sampford,
    StraightThrough,
    Systematic,
    sigmoid_topk,
)
from khot.kernels import backend
from khot.kernels.count.kept_tree import KeptTree, leaf_outside
from khot.kernels.count.tree import ProductTree
from khot.laws import conditional_poisson, pivotal, systematic, unit_by_unit
from khot.laws.kept import Kept
from tests.inputs import normal
from tests.registry import DESIGNS

N, K = 6, 3
VALUE = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
SCORED = [case for case in DESIGNS if case.has_log_prob]


def logits(*batch, seed=0):
    return normal(*batch, N, seed=seed)


def fixed(design):
    """Methods that do not draw, by name."""
    found = {"log_prob": design.log_prob(VALUE), "mean": design.mean}
    for name in ("entropy", "pairwise_inclusion"):
        try:
            value = getattr(design, name)
        except NotImplementedError:
            continue
        try:
            found[name] = value() if callable(value) else value
        except NotImplementedError:
            continue
    return found


def drawn(design):
    torch.manual_seed(0)
    return design.sample((50,))


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


@pytest.fixture
def made(monkeypatch, cpu_backend):
    """What designs keep, from here on: product trees, or what recursions over the units find."""
    made = []
    plant = ProductTree.__init__

    def counted(self, *args, **kwargs):
        made.append(self)
        plant(self, *args, **kwargs)

    monkeypatch.setattr(ProductTree, "__init__", counted)
    for name in ("_solve", "_solve_marked"):
        find = getattr(unit_by_unit, name)
        monkeypatch.setattr(unit_by_unit, name, lambda *args, find=find: made.append(args) or find(*args))
    return made


@pytest.mark.parametrize("given", ["logits", "probs"])
def test_made_once_for_all_that_a_conditional_poisson_design_is_asked(made, given):
    theta = logits(4).requires_grad_()
    design = ConditionalPoisson(**{given: theta if given == "logits" else sigmoid_topk(theta, K)}, k=K)
    _ = design.logits  # of given probabilities they are solved for, with trees of other logits
    made.clear()
    prior = ConditionalPoisson(logits=torch.zeros(4, N, dtype=torch.float64), k=K)
    x = StraightThrough(design).rsample()
    loss = x.sum() + design.log_prob(x.detach()).sum() + design.entropy().sum() + design.mean.square().sum()
    loss = loss + kl_divergence(design, prior).sum()
    prior.log_prob(x.detach())  # for which something else is made
    assert len(made) == 2
    loss.backward()
    assert given == "probs" or len(made) == 2  # the derivative of the solution is one, of a system with a tree


def test_made_once_for_a_step_of_trace_mean_field(made):
    theta = logits(4).requires_grad_()
    designs = []

    def model():
        with pyro.plate("rows", 4):
            prior = ConditionalPoisson(logits=torch.zeros(4, N, dtype=torch.float64), k=K)
            x = pyro.sample("x", prior)
            pyro.factor("data", (x * VALUE).sum(-1))

    def guide():
        with pyro.plate("rows", 4):
            designs.append(ConditionalPoisson(logits=theta, k=K))
            pyro.sample("x", StraightThrough(designs[-1]))

    TraceMeanField_ELBO().differentiable_loss(model, guide).backward()
    assert len(made) == 2  # for the guide, and for the prior


def test_one_tree_for_draws_and_scores_of_sampford(made, cpu_backend):
    design = Sampford(probs=sigmoid_topk(logits(4).requires_grad_(), K), k=K)
    design.log_prob(VALUE)
    assert len(made) == 1
    design.sample()
    whole = 2 if cpu_backend == "torch" else 1  # a draw has a tree of its own
    assert len(made) == whole
    design.log_prob(VALUE).sum().backward()
    assert len(made) == whole


@pytest.mark.parametrize(
    ("make", "module", "name"),
    [
        (Pivotal, pivotal, "balance"),
        (Systematic, systematic, "line"),
    ],
)
def test_draws_have_their_preparation_in_common(monkeypatch, make, module, name):
    made, original = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: made.append(args) or original(*args))
    design = make(probs=sigmoid_topk(logits(4), K))
    with backend("torch"):  # loops need no preparation
        for _ in range(3):
            design.sample()
    assert len(made) == 1


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
def test_a_kept_result_is_the_result(case):
    """Of methods called one after another, in any order, and of each on a design of its own."""
    theta = logits(2)
    design = case.make(logits=theta, k=K)
    draw = drawn(design)
    first = fixed(design)
    same(first, fixed(design))
    assert drawn(design).equal(draw) and drawn(case.make(logits=theta, k=K)).equal(draw)
    for name, value in first.items():
        same({name: value}, {name: fixed(case.make(logits=theta, k=K))[name]})


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
def test_a_draw_before_it_leaves_the_gradient_as_it_is(case):
    """What a draw keeps is made without gradient."""
    theta = logits(2).requires_grad_()
    design, fresh = case.make(logits=theta, k=K), case.make(logits=theta, k=K)
    design.sample()
    gradients = [torch.autograd.grad(d.log_prob(VALUE).sum(), theta)[0] for d in (design, fresh)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 3), (30, 11), (150, 70), (601, 40)])
def test_backward_again_and_again(shape):
    """A backward pass uses up its own graph, and nothing that the design keeps."""
    n, k = shape
    theta = normal(2, n, seed=1).requires_grad_()
    design, value = ConditionalPoisson(logits=theta, k=k), torch.arange(n) < k
    losses = (lambda d: d.log_prob(value.double()).sum(), lambda d: d.entropy().sum())
    for loss in (*losses, *losses):
        gradient = torch.autograd.grad(loss(design), theta)[0]
        fresh = torch.autograd.grad(loss(ConditionalPoisson(logits=theta, k=k)), theta)[0]
        torch.testing.assert_close(gradient, fresh, rtol=1e-12, atol=1e-12)


def test_derivatives_of_higher_order():
    theta = logits().requires_grad_()
    design = ConditionalPoisson(logits=theta, k=K)
    design.sample()

    def third(entropy):
        first = torch.autograd.grad(entropy, theta, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), theta, create_graph=True)[0]
        return torch.autograd.grad(second.square().sum(), theta)[0]

    expected = third(conditional_poisson.log_partition(theta, K) - conditional_poisson.log_prob(theta, K, VALUE))
    found = third(conditional_poisson.log_partition(theta, K, design.kept) - design.log_prob(VALUE))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    once, again = third(design.entropy()), third(design.entropy())
    torch.testing.assert_close(once, again, rtol=0, atol=0)


def test_many_cotangents_at_once_and_forward_mode():
    theta = logits()
    design = ConditionalPoisson(logits=theta, k=K)
    covariance = design.covariance_matrix

    def mean(t):
        return conditional_poisson.inclusion_probabilities(t, K, design.kept)

    for vectorize in (False, True):
        jacobian = torch.autograd.functional.jacobian(mean, theta, vectorize=vectorize)
        torch.testing.assert_close(jacobian, covariance, rtol=1e-12, atol=1e-13)
    hessian = torch.autograd.functional.hessian(
        lambda t: conditional_poisson.log_partition(t, K, design.kept), theta, vectorize=True
    )
    torch.testing.assert_close(hessian, covariance, rtol=1e-12, atol=1e-13)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(theta, torch.eye(N, dtype=theta.dtype)[0])
        tangents = [forward_ad.unpack_dual(f(dual)).tangent for f in (mean, lambda t: design_of(t).log_prob(VALUE))]
    torch.testing.assert_close(tangents[0], covariance[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(tangents[1], VALUE[0] - design.mean[0], rtol=1e-12, atol=1e-13)


def design_of(theta):
    design = ConditionalPoisson(logits=theta, k=K)
    design.sample()
    return design


def update(parameter, how, new):
    if how == "in place":
        with torch.no_grad():
            parameter.copy_(new)
    elif how == "data":
        parameter.data.copy_(new)
    elif how == "other data":
        parameter.data = new.clone()
    else:
        parameter.grad = parameter.detach() - new
        torch.optim.SGD([parameter], lr=1.0).step()


UPDATES = ("in place", "data", "other data", "optimizer")


@pytest.mark.parametrize("how", UPDATES)
def test_a_parameter_that_has_changed_has_new_results(how):
    theta = torch.nn.Parameter(logits(2))
    design = ConditionalPoisson(logits=theta, k=K)
    _ = design.log_prob(VALUE), design.entropy(), design.sample(), design.mean
    for seed in (1, 2):
        update(theta, how, logits(2, seed=seed))
        fresh = ConditionalPoisson(logits=theta.detach().clone(), k=K)
        assert drawn(design).equal(drawn(fresh))
        assert design.log_prob(VALUE).equal(fresh.log_prob(VALUE))
        assert design.entropy().equal(fresh.entropy()) and design.mean.equal(fresh.mean)
        torch.testing.assert_close(design.pairwise_inclusion, fresh.pairwise_inclusion, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", UPDATES)
@pytest.mark.parametrize(
    "make",
    [Sampford, Brewer, Pivotal, Systematic, partial(Systematic, order="random")],
)
def test_probabilities_that_have_changed_have_new_results(make, how):
    probs = torch.nn.Parameter(sigmoid_topk(logits(2), K))
    design = make(probs=probs)
    with contextlib.suppress(NotImplementedError):
        design.log_prob(VALUE)
    design.sample()
    new = sigmoid_topk(logits(2, seed=1), K)
    update(probs, how, new)
    fresh = make(probs=probs.detach().clone())
    assert drawn(design).equal(drawn(fresh))
    if make in (Brewer, Sampford, Systematic):
        same(fixed(design), fixed(fresh))


MEMBERS = (
    "probs",
    "logits",
    "log_odds",
    "mean",
    "variance",
    "mode",
    "pairwise_inclusion",
    "covariance_matrix",
    "entropy",
    "size_probs",
    "enumerate_support",
)
FOLLOWING = {
    **{case.name: lambda theta, make=case.make: make(logits=theta, k=K) for case in DESIGNS},
    **{f"phantom_{cls.__name__}": lambda theta, cls=cls: PhantomUnit(cls, logits=theta) for cls in (Sampford, Brewer)},
    "phantom_pareto": lambda theta: PhantomUnit(ParetoSampling, logits=theta),
    "size_range": lambda theta: ConditionalPoisson(logits=theta, k=(1, 4)),
    "straight_through": lambda theta: StraightThrough(ConditionalPoisson(logits=theta, k=K)),
    "reinmax": lambda theta: ReinMax(Sampford(logits=theta, k=K)),
    "relaxed": lambda theta: RelaxedKHot(0.5, logits=theta, k=K),
}


def everything(law):
    """What a law has, by name; draws come with a seed."""
    torch.manual_seed(0)
    draw = law.rsample((3,)) if law.has_rsample else law.sample((3,))
    found = {"sample": draw.detach(), "log_prob": functools.partial(law.log_prob, draw.detach())}
    for name in MEMBERS:
        found[name] = functools.partial(getattr, law, name)
    result = {}
    for name, value in found.items():
        with contextlib.suppress(NotImplementedError, AttributeError):
            value = value() if callable(value) else value
            result[name] = value() if callable(value) else value
    return result


@pytest.mark.parametrize(
    ("how", "dtype"), [*((how, torch.float64) for how in ("data", "other data", "optimizer")), ("data", torch.bfloat16)]
)
@pytest.mark.parametrize("name", FOLLOWING)
def test_every_result_follows_the_parameter(name, how, dtype):
    make = FOLLOWING[name]
    theta = torch.nn.Parameter(logits(2).to(dtype))
    law = make(theta)
    before = everything(law)
    update(theta, how, logits(2, seed=1).to(dtype))
    found, expected = everything(law), everything(make(theta.detach().clone().requires_grad_()))
    assert found.keys() == expected.keys() >= {"sample"}
    for member, value in expected.items():
        torch.testing.assert_close(found[member], value, rtol=1e-12, atol=1e-12, msg=f"{member} is old")
        assert found[member].requires_grad == value.requires_grad
    if "mean" in expected:
        assert not found["mean"].equal(before["mean"])
        fresh = torch.autograd.grad(found["mean"].float()[..., 0].sum(), theta)[0]  # of a graph of its own
        assert fresh.isfinite().all()


@pytest.mark.parametrize("given", ["temperature", "k"])
def test_every_result_follows_softness_and_size(given):
    for case in DESIGNS:
        settings = {"k": torch.tensor([2, 3])} | ({"temperature": torch.tensor(1.0)} if case.takes_relaxation else {})
        design = case.make(logits=logits(2), **settings)
        before = design.mean
        if given == "temperature":
            if not case.takes_relaxation:
                continue
            design.temperature.fill_(0.5)
            settings["temperature"] = torch.tensor(0.5)
        else:
            design.k.copy_(torch.tensor([3, 3]))
            settings["k"] = torch.tensor([3, 3])
        assert not design.mean.equal(before), case.name
        torch.testing.assert_close(design.mean, case.make(logits=logits(2), **settings).mean, rtol=1e-12, atol=1e-12)


def test_sizes_that_have_changed_have_new_results():
    k = torch.tensor([2, 3])
    design = ConditionalPoisson(logits=logits(2), k=k)
    design.sample()
    design.k.copy_(torch.tensor([4, 1]))
    assert design.sample().sum(-1).tolist() == [4, 1]


def test_copies_and_pickles_hold_the_parameter_alone():
    design = ConditionalPoisson(logits=logits(2), k=K)
    design.sample()
    for other in (copy.copy(design), copy.deepcopy(design), pickle.loads(pickle.dumps(design))):
        assert other.kept is not design.kept
        assert drawn(other).equal(drawn(design))
    assert len(pickle.dumps(design)) == len(pickle.dumps(ConditionalPoisson(logits=logits(2), k=K)))


def test_expanding_to_the_same_shape_keeps_and_to_another_does_not(made):
    design = ConditionalPoisson(logits=logits(2), k=K)
    _ = design.mean
    assert len(made) == 1
    _ = design.expand((2,)).mean
    assert len(made) == 1
    wide = design.expand((3, 2))
    assert wide.entropy().equal(design.entropy().expand(3, 2)) and len(made) == 2
    design.sample()
    assert len(made) == 2  # it has still got its own


def test_designs_of_one_parameter_keep_their_own():
    theta = logits(2)
    one, other = (ConditionalPoisson(logits=theta, k=k) for k in (2, 3))
    assert one.sample().sum(-1).eq(2).all() and other.sample().sum(-1).eq(3).all()
    assert one.kept is not other.kept


def test_what_is_made_in_inference_mode_stays_there():
    theta = logits(2).requires_grad_()
    design = ConditionalPoisson(logits=theta, k=K)
    with torch.inference_mode():
        design.sample()
    design.entropy().sum().backward()
    with torch.inference_mode():
        design.log_prob(VALUE)
    assert theta.grad.isfinite().all()


def test_transforms_see_their_own_contents():
    theta, other = logits(2), logits(2, seed=1)
    design = ConditionalPoisson(logits=theta, k=K)
    expected = design.log_prob(VALUE)

    def score(t):
        d = ConditionalPoisson(logits=t, k=K, validate_args=False)
        return d.log_prob(VALUE.to(t.device)) + d.entropy()

    torch.testing.assert_close(torch.vmap(score)(other), score(other), rtol=1e-12, atol=1e-12)
    gradient = torch.func.grad(lambda v: design.log_prob(v).sum())(VALUE)
    assert gradient.isfinite().all()
    torch.testing.assert_close(torch.vmap(design.log_prob)(VALUE.expand(3, 2, N)), expected.expand(3, 2))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert score(mode.from_tensor(theta)).shape == (2,)
    assert score(theta.to("meta")).shape == (2,)
    assert design.log_prob(VALUE).equal(expected)


@pytest.mark.parametrize("shape", [(2, 1), (7, 3), (64, 20), (150, 75), (600, 290), (1500, 3)])
def test_the_tree_that_is_there_has_the_derivatives_of_one_made_of_operations(shape):
    """Short rows, odd ones, those with Fourier transforms and with windows."""
    n, bound = shape
    p = torch.full((n, 2), bound / n, dtype=torch.float64) * (1 + 0.1 * normal(n, 2).tanh())
    leaf, k = torch.stack((1 - p, p)), torch.full((2,), bound)
    u = normal(2, n, 2, seed=3)
    plain = KeptTree(leaf, k, bound)
    x = leaf.clone().requires_grad_()
    outside = ProductTree(x, k, bound).leaf_outside()
    (expected,) = torch.autograd.grad((outside * u).sum(), x)
    torch.testing.assert_close(plain.bend(u), expected, rtol=1e-11, atol=1e-15)
    y = leaf.clone().requires_grad_()
    kept = leaf_outside(y, plain)
    torch.testing.assert_close(kept, outside, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad((kept * u).sum(), y)[0], expected, rtol=1e-11, atol=1e-15)


def test_the_probability_of_a_single_unit_is_linear():
    leaf = torch.tensor([0.4, 0.6], dtype=torch.float64).view(2, 1, 1)
    assert KeptTree(leaf, torch.tensor([1]), 1).bend(torch.ones_like(leaf)).eq(0).all()


def test_kept_results():
    made = []

    def make(x, factor):
        made.append(x)
        return x * factor

    kept, x = Kept(), torch.tensor([1.0, float("nan")])
    assert kept.result(make, x[:1], 2).item() == 2.0 and kept.result(make, x[:1].clone(), 2).item() == 2.0
    assert len(made) == 1
    assert kept.result(make, x[:1], 3).item() == 3.0 and kept.result(make, x[:1].double(), 3).item() == 3.0
    assert len(made) == 3
    kept.result(make, x, 2)
    kept.result(make, x, 2)  # NaN equals nothing
    assert len(made) == 5
