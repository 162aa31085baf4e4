"""What the members of a design share is made once, and a design whose parameter was changed in place raises."""

import copy
import functools
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import kl_divergence

from khot import (
    Brewer,
    ConditionalPoisson,
    ParetoSampling,
    PhantomUnit,
    ReinMax,
    RelaxedKHot,
    Sampford,
    StraightThrough,
    Systematic,
    sigmoid_topk,
)
from khot.kernels.count.kept_tree import KeptTree, leaf_outside
from khot.kernels.count.tree import ProductTree
from khot.laws import conditional_poisson, unit_by_unit
from tests.inputs import normal
from tests.log_partition import log_partition
from tests.loops import for_each
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
def made(monkeypatch):
    """What designs keep, from here on: product trees, or what recursions over the units find."""
    made = []
    plant = ProductTree.__init__

    def counted(self, *args, **kwargs):
        made.append(self)
        plant(self, *args, **kwargs)

    monkeypatch.setattr(ProductTree, "__init__", counted)
    solve = unit_by_unit._solve
    monkeypatch.setattr(unit_by_unit, "_solve", lambda *args: made.append(args) or solve(*args))
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


@pytest.mark.parametrize("make", [Brewer, Systematic])
def test_what_draws_share_is_kept(make):
    """It was not by a design that had kept nothing so far, as an empty record is falsy."""
    design = make(probs=torch.full((4,), 0.5))
    design.sample()
    kept = dict(design._kept)
    design.sample()
    assert kept and all(design._kept[name] is value for name, value in kept.items())


@for_each("case", SCORED)
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


@for_each("case", SCORED)
def test_a_draw_before_it_leaves_the_gradient_as_it_is(case):
    """What a draw keeps is made without gradient."""
    theta = logits(2).requires_grad_()
    design, fresh = case.make(logits=theta, k=K), case.make(logits=theta, k=K)
    design.sample()
    gradients = [torch.autograd.grad(d.log_prob(VALUE).sum(), theta)[0] for d in (design, fresh)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@for_each("shape", [(6, 3), (30, 11), (150, 70), (601, 40)])
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

    expected = third(log_partition(theta, K) - conditional_poisson.log_prob(theta, K, VALUE))
    found = third(log_partition(theta, K, design._kept) - design.log_prob(VALUE))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    once, again = third(design.entropy()), third(design.entropy())
    torch.testing.assert_close(once, again, rtol=0, atol=0)


def update(parameter, how):
    """Changes a parameter, as users do."""
    if how == "in place":
        with torch.no_grad():
            parameter[..., 0] += 1
    else:
        parameter.grad = torch.ones_like(parameter)
        getattr(torch.optim, how)([parameter], lr=1.0, foreach=True).step()


LAWS = {
    **{case.name: lambda theta, make=case.make: make(logits=theta, k=K) for case in DESIGNS},
    **{f"phantom_{cls.__name__}": lambda theta, cls=cls: PhantomUnit(cls, logits=theta) for cls in (Sampford, Brewer)},
    "phantom_pareto": lambda theta: PhantomUnit(ParetoSampling, logits=theta),
    "size_range": lambda theta: ConditionalPoisson(logits=theta, k=(1, 4)),
    "straight_through": lambda theta: StraightThrough(ConditionalPoisson(logits=theta, k=K)),
    "reinmax": lambda theta: ReinMax(Sampford(logits=theta, k=K)),
    "relaxed": lambda theta: RelaxedKHot(0.5, logits=theta, k=K),
}


def members(law):
    """What users can ask a law for, by name: its public members, of which methods are called with valid arguments."""
    drawn = law.sample()
    arguments = {"log_prob": (drawn,), "attach_gradient": (drawn,), "from_scores": (drawn,), "expand": ((3, 2),)}
    names = {name for base in type(law).__mro__ if base.__module__.startswith("khot.") for name in vars(base)}

    def get(name):
        member = getattr(law, name)
        return member(*arguments.get(name, ())) if callable(member) and not isinstance(member, torch.Tensor) else member

    names = sorted(name for name in names if not name.startswith("_"))
    static = ("arg_constraints", "has_enumerate_support", "has_rsample", "infer_shapes", "stand_in")
    given = {"dtype", "parameter", "design", "log_prior"}
    given |= set() if isinstance(law, PhantomUnit) else {"k", "largest_k"}  # whose sizes follow from its parameter
    for name in names:
        if name.startswith(static) or name in given:
            continue
        try:
            get(name)
        except (NotImplementedError, AttributeError):
            continue
        yield name, functools.partial(get, name)


@for_each("name", LAWS)
def test_no_member_of_a_design_survives_a_change_of_its_parameter(name):
    for dtype in (torch.float64, torch.bfloat16):
        for how in ("in place", "SGD", "Adam"):
            theta = torch.nn.Parameter(logits(2).to(dtype))
            law = LAWS[name](theta)
            asked = dict(members(law))
            assert {"sample", "log_prob", "mean", "mode", "logits", "support"} & asked.keys()
            update(theta, how)
            for member, get in asked.items():
                with pytest.raises(RuntimeError, match="changed in place.* make it inside the step"):
                    get()
                    raise AssertionError(f"{member} of {name} is old after {how}")
            for copied in (lambda law: copy.copy(law).sample(), copy.deepcopy, pickle.dumps):
                with pytest.raises(RuntimeError, match="make it inside the step"):
                    copied(law)
            if "logits" in asked:  # which wrappers do not have
                assert LAWS[name](theta).logits.equal(LAWS[name](theta.detach()).logits)


def test_a_change_of_another_argument_is_noticed():
    """k, a temperature, a prior over the size; also by another view of the same memory."""
    theta, k = logits(2), torch.tensor([2, 3])
    temperature, prior = torch.tensor([1.0, 2.0]), torch.zeros(4)
    designs = {
        "k": (ConditionalPoisson(logits=theta, k=k), k),
        "temperature": (Sampford(logits=theta, k=K, temperature=temperature), temperature),
        "prior": (ConditionalPoisson(logits=theta, k=(0, 3, prior)), prior),
        "row": (ConditionalPoisson(logits=theta[1], k=K), theta[1]),
    }
    for name, (design, tensor) in designs.items():
        design.sample()
        tensor[..., 0] += 1
        with pytest.raises(RuntimeError, match="changed in place"):
            design.sample()
            raise AssertionError(name)


def test_parameters_without_a_count_of_writes():
    """Those made in inference mode, and those that a transform wraps."""
    with torch.inference_mode():
        theta = logits(2)
        design = ConditionalPoisson(logits=theta, k=K)
        assert design.mean.sum(-1).allclose(torch.tensor(3.0, dtype=torch.float64))
    assert design.log_prob(VALUE).isfinite().all() and Sampford(logits=theta, k=K).mean.isfinite().all()

    def score(t):
        d = Sampford(logits=t, k=K, validate_args=False)
        return d.log_prob(VALUE) + d.mean[..., 0]

    torch.testing.assert_close(torch.vmap(score)(logits(2)), score(logits(2)), rtol=1e-12, atol=1e-12)
    assert torch.func.grad(lambda t: score(t).sum())(logits(2)).isfinite().all()


def test_copies_and_pickles_hold_the_parameter_alone():
    design = ConditionalPoisson(logits=logits(2), k=K)
    design.sample()
    for other in (copy.copy(design), copy.deepcopy(design), pickle.loads(pickle.dumps(design))):
        assert other._kept is not design._kept
        assert drawn(other).equal(drawn(design))
    assert len(pickle.dumps(design)) == len(pickle.dumps(ConditionalPoisson(logits=logits(2), k=K)))


def test_designs_of_one_parameter_keep_their_own():
    theta = logits(2)
    one, other = (ConditionalPoisson(logits=theta, k=k) for k in (2, 3))
    assert one.sample().sum(-1).eq(2).all() and other.sample().sum(-1).eq(3).all()
    assert one._kept is not other._kept


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


@for_each("shape", [(2, 1), (7, 3), (64, 20), (150, 75), (600, 290), (1500, 3)])
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
