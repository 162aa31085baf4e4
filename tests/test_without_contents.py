"""Everything where tensors have no numbers in them: meta tensors, FakeTensorMode, another default device."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import kl_divergence

from khot import (
    ConditionalPoisson,
    PhantomUnit,
    RelaxedKHot,
    RelaxedKHotStraightThrough,
    fenchel_young_topk_loss,
    perturbed_topk,
    sigmoid_topk,
    topk_cross_entropy,
    topk_metric_loss,
)
from khot.kernels import backend
from tests.every_map import SHORT
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, PERTURBED


@pytest.fixture(autouse=True)
def _in_plain_torch():
    """Nothing is compiled for tensors without numbers, and nothing need be for those that they are compared with."""
    with backend("torch"):
        yield


LOGITS = normal(3, 5, dtype=torch.float32)
GIVEN = {
    "logits": lambda: {"logits": LOGITS},
    "logits_double": lambda: {"logits": LOGITS.double()},
    "logits_rows": lambda: {"logits": LOGITS, "k": torch.tensor([1, 3, 2])},
    "probs": lambda: {"probs": sigmoid_topk(LOGITS, 2)},
    "probs_alone": lambda: {"probs": sigmoid_topk(LOGITS, 2), "k": None},
}
ENUMERATED = [c for c in DESIGNS if c.has_log_prob and not (c.has_entropy_at_any_size and c.has_pairwise_at_any_size)]
PERTURBED_CASES = [  # before 2.8, torch draws no gamma numbers without contents
    pytest.param(case, marks=pytest.mark.needs_torch("2.8")) if "gamma" in case.name else case for case in PERTURBED
]
every_design = pytest.mark.parametrize("case", DESIGNS, ids=lambda case: case.name)
# The others see only inclusion probabilities, and take all parameters by the same code.
OWN_PARAMETERS = [case for case in DESIGNS if not case.takes_relaxation]


def described(results, device=None):
    return [None if v is None else (v.shape, v.dtype, device or v.device.type) for v in results]


def check(function, draws=True, **tensors):
    """``function`` of these tensors by name: what it returns, of real, of meta and of fake tensors."""

    def results(convert):
        converted = {name: convert(v) if isinstance(v, torch.Tensor) else v for name, v in tensors.items()}
        for value in converted.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.requires_grad_()
        return function(**converted)

    expected = results(lambda tensor: tensor.clone())
    assert described(results(lambda tensor: tensor.to("meta"))) == described(expected, "meta")
    with FakeTensorMode() as mode:
        assert described(results(mode.from_tensor)) == described(expected)
    if not draws:
        with torch.device("meta"):
            found = results(lambda tensor: tensor.clone())
        torch.testing.assert_close([v for v in found if v is not None], [v for v in expected if v is not None])


def with_gradient(value, *parameters):
    """A value, and the gradients of its sum."""
    return [value, *torch.autograd.grad(value.sum(), parameters, retain_graph=True)]


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_maps(case):
    """The map, its gradients, and the gradient of these; softnesses that are a number, one for all, one for each."""

    def everything(x, softness=0.7):
        y = case.call(x, softness)
        if not case.differentiable:
            return [y]
        if not isinstance(softness, torch.Tensor):
            return with_gradient(y, x)
        first = torch.autograd.grad(y.square().sum(), (x, softness), allow_unused=True, create_graph=True)
        moving = [grad for grad in first if grad is not None and grad.requires_grad]
        second = torch.autograd.grad(sum(v.square().sum() for v in moving), x, allow_unused=True) if moving else []
        return [y, *first, *second]

    x, one, each = normal(3, 6), torch.tensor(0.7), torch.full((3,), 0.7)
    soft = one if SHORT.index(case) % 2 else each
    for arguments in ({"x": x.float()}, {"x": normal(6, 3).T, "softness": soft}):
        check(everything, draws=False, **arguments)
    check(everything, x=normal(0, 6).half())


def test_losses():
    hot, classes = torch.eye(6)[:3] + torch.eye(6)[3:], torch.zeros(3, dtype=torch.long)
    loss = fenchel_young_topk_loss
    for function, target in (
        (lambda x, target: loss(x, target, 2), hot),
        (lambda x, target: loss(x, target, torch.full((3,), 2.0, device=x.device), 0.5, 1.5, "magnitude"), hot),
        (lambda x, target: loss(x, 0 * target, 2, kind="signed", reduction="sum"), hot),
        (lambda x, target: topk_cross_entropy(x, target, [0.5, 0.0, 0.5]), classes),
        (lambda x, target: topk_metric_loss(x, target, 3), hot),
    ):
        gradient = lambda x, target, f=function: with_gradient(f(x, target.detach()), x)  # noqa: E731
        check(gradient, draws=False, x=normal(3, 6), target=target)


@pytest.mark.parametrize(
    ("case", "given"),
    [(case, "logits_rows" if i % 2 else "logits") for i, case in enumerate(DESIGNS) if case not in OWN_PARAMETERS]
    + [(case, given) for case in OWN_PARAMETERS for given in GIVEN],
    ids=lambda value: getattr(value, "name", value),
)
def test_designs(case, given):
    validate_args = given != "logits_double"

    def everything(k=2, **parameter):
        (x,) = parameter.values()
        design = case.make(**parameter, k=k, validate_args=validate_args)
        value = design.sample((2,))
        results = [value, *with_gradient(design.mean, x), *with_gradient(design.variance, x)]
        if case.has_log_prob:
            results += with_gradient(design.log_prob(value), x)
        if case.has_entropy_at_any_size or (case.has_entropy and isinstance(k, int)):
            results += with_gradient(design.entropy(), x)
        if case.has_pairwise_at_any_size or (case.has_pairwise and isinstance(k, int)):
            results += with_gradient(design.pairwise_inclusion, x)
        if isinstance(k, int):
            results += [design.sample_indices((2,)), design.enumerate_support(), design.enumerate_support(expand=False)]
            results += [design.mode, design.expand((4, 3)).sample()] if case.has_log_prob else []
        return results

    check(everything, **GIVEN[given]())


@for_each("case, given", itertools.product(ENUMERATED, ("logits_rows", "probs_alone")))
def test_enumeration_needs_sizes(case, given):
    """Entropies and pair probabilities that are sums over all vectors, whose number depends on the contents of k."""
    arguments = {"k": None} | GIVEN[given]()
    design = case.make(**{name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in arguments.items()})
    message = "{} needs `k` as an int under vmap and for tensors without contents"
    if not case.has_entropy_at_any_size:
        with pytest.raises(NotImplementedError, match=message.format("entropy")):
            design.entropy()
    if not case.has_pairwise_at_any_size:
        with pytest.raises(NotImplementedError, match=message.format("pairwise_inclusion")):
            design.pairwise_inclusion.sum()


@pytest.mark.parametrize("given", ["logits", "logits_rows"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda case: case.name)
@pytest.mark.parametrize("case", DESIGNS[:2], ids=lambda case: case.name)
def test_wrappers(case, estimator, given):
    def gradient(k=2, **parameter):
        (x,) = parameter.values()
        wrapped = estimator.wrap(case.make(**parameter, k=k), log_prob="none", validate_args=True)
        value = wrapped.rsample((2,))
        return [wrapped.sample(), wrapped.log_prob(value.detach()), *with_gradient(value, x)]

    check(gradient, **GIVEN[given]())


@pytest.mark.parametrize("case", PERTURBED_CASES, ids=lambda case: case.name)
def test_perturbed_scores(case, validate_args=True):
    def gradient(logits, k=2):
        value = case.make(logits=logits, k=k, validate_args=validate_args).rsample((2,))
        return with_gradient(value * torch.arange(5.0, device=value.device), logits)

    for given in ("logits", "logits_rows"):
        check(gradient, **GIVEN[given]())


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_functions(case):
    def gradient(logits):
        design = ConditionalPoisson(logits=logits, k=2)
        return with_gradient(case.estimate(design, lambda x: (x * logits).sum(-1), 4), logits)

    check(gradient, logits=LOGITS)


@pytest.mark.parametrize("relaxed", [RelaxedKHot, RelaxedKHotStraightThrough])
def test_relaxed(relaxed, validate_args=True):
    def everything(logits, k=2):
        law = relaxed(0.5, logits=logits, k=k, validate_args=validate_args)
        value = law.rsample((2,))
        return [
            law.sample(),
            *with_gradient(value * logits, logits),
            *with_gradient(law.log_prob(law.rsample()), logits),
        ]

    check(everything, logits=LOGITS)
    check(everything, logits=LOGITS.double(), k=torch.tensor([1, 3, 2]))


def test_phantom_unit(validate_args=True):
    def everything(**parameter):
        (x,) = parameter.values()
        design = PhantomUnit(ConditionalPoisson, **parameter, validate_args=validate_args)
        value = design.sample((2,))
        results = [value, *with_gradient(design.mean, x), *with_gradient(design.log_prob(value), x)]
        return [*results, *with_gradient(design.entropy(), x), *with_gradient(kl_divergence(design, design), x)]

    check(everything, logits=LOGITS)
    check(everything, probs=LOGITS.sigmoid())


def test_perturbed_topk():
    check(lambda x: with_gradient(perturbed_topk(x, 2, num_samples=4), x), x=LOGITS)


@for_each("case", DESIGNS)
def test_shapes_are_checked(case):
    design = case.make(logits=LOGITS.to("meta"), k=2, validate_args=True)
    for shape in ((4,), (2, 5), (3, 4)):
        with pytest.raises(ValueError, match="a value must match event_shape"):
            design._validate_sample(torch.empty(shape, device="meta"))
    with pytest.raises(ValueError, match="0 <= k <= n"):
        case.make(logits=LOGITS.to("meta"), k=6)


@every_design
def test_default_device_does_not_matter(case):
    def results():
        logits = LOGITS.double().requires_grad_()
        design, generator = case.make(logits=logits, k=2), torch.Generator().manual_seed(0)
        value = design.sample((4,), generator=generator)
        found = [value, *with_gradient(design.mean, logits)]
        found += [design.sample_indices((4,), generator=generator), design.enumerate_support()]
        found += with_gradient(design.log_prob(value), logits) if case.has_log_prob else []
        found += with_gradient(design.entropy(), logits) if case.has_entropy else []
        found += with_gradient(design.pairwise_inclusion, logits) if case.has_pairwise else []
        return [tensor.detach() for tensor in found]

    expected = results()
    with torch.device("meta"):
        found = results()
    torch.testing.assert_close(found, expected)
