"""``generator=`` of everything that draws: the same sampler, with another source of randomness than torch's."""

import ast
import inspect
from functools import partial
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution

import khot
from khot import (
    PhantomUnit,
    PlackettLuce,
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    Sampford,
    StraightThrough,
    perturbed_topk,
)
from khot.distributions.base import KHotDistribution, draw
from tests.loops import for_each
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, PERTURBED

SOURCE = Path(khot.__file__).parent
LOGITS = torch.tensor([[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.7, -1.1, 0.2, 2.0, 0.4], dtype=torch.float64)


def rows_of_two_sizes(logits, case):
    return case.make(logits=logits, k=torch.tensor([1, 3], device=logits.device))


DRAWING = {  # (logits) -> distribution
    "relaxed": lambda logits: RelaxedKHot(0.5, logits=logits, k=2),
    "relaxed_straight_through": lambda logits: RelaxedKHotStraightThrough(0.5, logits=logits, k=2),
    "phantom_unit": lambda logits: PhantomUnit(Sampford, logits=logits),
    "plackett_luce": lambda logits: PlackettLuce(logits, 2),
}
for case in DESIGNS:
    DRAWING[case.name] = lambda logits, case=case: case.make(logits=logits, k=2)
    DRAWING[f"{case.name}_rows"] = partial(rows_of_two_sizes, case=case)
for case in PERTURBED:
    DRAWING[case.name] = lambda logits, case=case: case.make(logits=logits, k=2)
for case in ESTIMATORS:
    DRAWING[case.name] = lambda logits, case=case: case.wrap(Sampford(logits=logits, k=2))
WITH_RSAMPLE = [name for name, make in DRAWING.items() if make(LOGITS).has_rsample]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def check_source(draw):
    """``draw(generator)`` is a function of the generator's state, and without one of the global state."""
    torch.manual_seed(5)
    from_global = draw(None)
    state = torch.get_rng_state()
    assert torch.equal(draw(seeded(5)), from_global)  # the same sampler
    generator = seeded(6)
    first, second = draw(generator), draw(generator)
    assert torch.equal(draw(seeded(6)), first) and not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "pareto_exact" else []) for name in DRAWING]
)
def test_draws(name):
    design = DRAWING[name](LOGITS)
    check_source(lambda generator: design.sample((40,), generator=generator))


@for_each("case", DESIGNS)
def test_indices(case):
    design = case.make(logits=LOGITS, k=2)
    check_source(lambda generator: design.sample_indices((40,), generator=generator))


@for_each("name", WITH_RSAMPLE)
def test_draws_with_gradients(name):
    def gradient(generator):
        logits = LOGITS.clone().requires_grad_()
        value = DRAWING[name](logits).rsample((40,), generator=generator)
        return torch.cat((value.detach(), torch.autograd.grad((value @ WEIGHTS).square().sum(), logits)[0][None]))

    check_source(gradient)


@for_each("case", FUNCTIONS)
def test_functions(case):
    def gradient(generator):
        logits = LOGITS.clone().requires_grad_()
        values = []
        losses = lambda x: values.append(x) or (x @ WEIGHTS).square()  # noqa: E731
        surrogate = case.estimate(Sampford(logits=logits, k=2), losses, 6, generator=generator)
        return torch.cat((torch.autograd.grad(surrogate.sum(), logits)[0], *values[0].detach()))

    if case.name == "enumerated":  # draws nothing
        assert torch.equal(gradient(seeded(0)), gradient(None))
    else:
        check_source(gradient)


def test_perturbed_topk():
    check_source(lambda generator: perturbed_topk(LOGITS, 2, generator=generator))


@for_each("wrap", [lambda d: d.to_event(1), lambda d: d.mask(torch.tensor([True, False]))])
def test_pathwise_through_what_wraps_a_design(wrap):
    design = wrap(StraightThrough(Sampford(logits=LOGITS, k=2)))
    check_source(lambda generator: draw(design, (7,), generator, "rsample"))


@for_each("name", DRAWING)
def test_other_things_are_no_generators(name):
    design = DRAWING[name](LOGITS)
    for method in ("sample", "rsample") if design.has_rsample else ("sample",):
        with pytest.raises(TypeError, match="`generator` must be a torch.Generator or None, but got 3"):
            getattr(design, method)((2,), generator=3)
    with pytest.raises(TypeError, match="positional"):
        design.sample((2,), seeded(0))


@for_each("name", sorted(DRAWING.keys() - {"phantom_unit"}))  # its sizes need a real one
def test_generators_of_another_device_are_refused(name):
    """Fake tensors on a device that need not exist."""
    with FakeTensorMode():
        design = DRAWING[name](torch.zeros(2, 5, device="cuda"))
        with pytest.raises(ValueError, match="`generator` must be on the device of the draws, cuda.*but is on cpu"):
            design.sample((2,), generator=seeded(0))


def test_distributions_that_take_none():
    with pytest.raises(TypeError, match=r"`generator` must be None here: Normal.sample takes no generator"):
        khot.score_function(dist.Normal(torch.zeros(3), 1).to_event(1), lambda x: x.sum(-1), generator=seeded(0))
    with pytest.raises(TypeError, match=r"`generator` must be a torch.Generator or None, but got 'a'"):
        khot.unordered_set(Sampford(logits=LOGITS, k=2), lambda x: x.sum(-1), generator="a")
    with pytest.raises(TypeError, match=r"`generator` must be a torch.Generator or None, but got 'a'"):
        perturbed_topk(LOGITS, 2, generator="a")


def functions_that_draw():
    """All public functions that draw."""
    classes = [getattr(khot, name) for name in khot.__all__ if inspect.isclass(getattr(khot, name))]
    found = [case.public for case in FUNCTIONS] + [perturbed_topk]
    for cls in (cls for cls in classes if issubclass(cls, KHotDistribution)):
        found += [getattr(cls, name) for name in ("sample", "rsample", "sample_indices") if hasattr(cls, name)]
    return [function for function in dict.fromkeys(found) if function is not Distribution.rsample]  # which raises


def test_generator_is_a_keyword():
    for function in functions_that_draw():
        generator = inspect.signature(function).parameters["generator"]
        assert generator.kind is generator.KEYWORD_ONLY and generator.default is None, function


RANDOM = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "poisson", "multinomial", "standard_gamma"}
RANDOM |= {f"{name}_like" for name in RANDOM} | {f"_{name}" for name in RANDOM}
RANDOM |= {f"{name}_" for name in ("uniform", "normal", "exponential", "cauchy", "geometric", "log_normal", "random")}
OTHERS = (SOURCE / "infer", SOURCE / "sklearn")  # in Pyro's chains and scikit-learn's fits a generator has no place
FILES = [
    file
    for file in SOURCE.rglob("*.py")
    if "random_numbers" not in (file.stem, file.parent.name) and not any(map(file.is_relative_to, OTHERS))
]


def test_random_numbers_have_one_source():
    """Whoever draws by another way than those modules has forgotten the generator."""
    for file in FILES:
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        calls = [f for f in calls if isinstance(f, ast.Attribute) and ast.unparse(f.value) != "random_numbers"]
        assert not RANDOM & {func.attr for func in calls}, file
