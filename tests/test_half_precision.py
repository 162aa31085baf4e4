"""bfloat16 and float16: every result is the rounded result of float32, for each member of each family.

Draws are those of float32 with the same seed, so that their laws are, too. What is compared is at most one number of
the half type apart: float32 results that lie next to the middle of two numbers may round either way.
"""

import math
from functools import partial

import pytest
import torch
from torch.distributions import biject_to, kl_divergence

from khot import (
    ConditionalPoisson,
    GumbelTopK,
    MovingAverage,
    ParetoSampling,
    PhantomUnit,
    Pivotal,
    RelaxedKHot,
    Sampford,
    horvitz_thompson,
    perturbed_topk,
    score_function,
    sigmoid_topk,
    subset_categorical,
)
from khot.constraints import capped_simplex
from tests import gof
from tests.every_map import SHORT, AnyMap
from tests.inputs import normal
from tests.loops import for_each
from tests.modules import MODULES, ModuleCase
from tests.registry import DESIGNS, ESTIMATORS, FUNCTIONS, LOSSES, PERTURBED, PHANTOM, RELAXED

HALF_TYPES = [torch.bfloat16, torch.float16]
in_half_types = for_each("dtype", HALF_TYPES)

LOGITS = normal(3, 7, scale=2.0)
PROBS = torch.tensor([[0.25, 0.75, 0.125, 0.625, 0.25], [0.5, 0.5, 0.5, 0.25, 0.25]])  # k = 2, exact in half types


def places(x):
    """Half-type numbers as integers in their order, neighbours 1 apart."""
    bits = x.view(torch.int16).int()
    return torch.where(bits >= 0, bits, -(bits & 0x7FFF))


def assert_rounded(found, exact):
    """``found`` is the float32 ``exact`` rounded to the half type, or a neighbour of it."""
    assert found.shape == exact.shape and exact.dtype == torch.float32 and found.dtype in HALF_TYPES
    rounded = exact.to(found.dtype)
    assert torch.equal(found.isnan(), rounded.isnan()) and torch.equal(found.isinf(), rounded.isinf())
    apart = (places(found.detach()) - places(rounded.detach())).abs()[rounded.isfinite()]
    assert apart.numel() == 0 or apart.max() <= 1, (found, exact)


def compare(function, *inputs):
    """A function at half-type inputs with the same in float32: its value, and its derivatives where it has any."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    twins = [x.detach().float().requires_grad_() for x in inputs]
    torch.manual_seed(0)
    found = function(*inputs)
    torch.manual_seed(0)
    exact = function(*twins)
    if not exact.is_floating_point():  # of positions
        assert found.equal(exact)
    elif exact.dtype == torch.float64:  # of thresholds, which no type is asked of
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    else:
        assert_rounded(found, exact)
    if exact.requires_grad:
        cotangent = normal(*exact.shape, seed=5).to(inputs[0].dtype).to(found.dtype).masked_fill(~exact.isfinite(), 0)
        grads = torch.autograd.grad(found, inputs, cotangent, allow_unused=True)
        wanted = torch.autograd.grad(exact, twins, cotangent.to(exact.dtype), allow_unused=True)
        for grad, expected in zip(grads, wanted, strict=True):
            assert (grad is None) == (expected is None)
            if grad is not None:
                assert_rounded(grad, expected)


# Maps, losses, modules


@in_half_types
@for_each("case", SHORT)
def test_maps(case: AnyMap, dtype):
    compare(lambda x: case.call(x, 0.5), normal(4, 9, dtype=dtype))
    compare(case.call, normal(4, 9, dtype=dtype, seed=1), torch.tensor([0.25, 0.5, 1.0, 3.0], dtype=dtype))
    compare(lambda x: case.call(x, 0.5), (normal(2, 40, seed=2) + 3).to(dtype))


@in_half_types
@for_each("case", LOSSES)
@for_each("reduction", ["mean", "sum", "none"])
def test_losses(case, reduction, dtype):
    target = case.targets(1, 40)
    target = target.to(dtype) if target.is_floating_point() else target
    compare(lambda x: case.function(x, target, 0.5, reduction), normal(40, 6, dtype=dtype))


@in_half_types
@for_each("case", MODULES)
def test_modules(case: ModuleCase, dtype):
    module, twin = case.make().to(dtype), case.make()
    twin.load_state_dict({name: value.float() for name, value in module.state_dict().items()})
    for x in (normal(6, 8, seed=seed, scale=2.0, dtype=dtype) for seed in range(3)):
        results = []
        for each, scores in ((module, x), (twin, x.float())):
            torch.manual_seed(0)
            leaves = [scores.requires_grad_(), *each.parameters()]
            y = case.call(each, leaves[0])
            grads = torch.autograd.grad(y.sum(), leaves, allow_unused=True) if y.requires_grad else []
            results.append([y, *(grad for grad in grads if grad is not None)])
        for found, exact in zip(*results, strict=True):
            assert_rounded(found, exact)
    if not case.random and case.target is None:
        assert_rounded(module.eval()(x), twin.eval()(x.float()))


# Designs


def members_of(case):
    """The methods of a design, as functions of the design and of k-hot values."""
    found = [lambda design, value: design.mean, lambda design, value: design.variance]
    found.append(lambda design, value: design.probs)
    if case.has_log_prob:
        found.append(lambda design, value: design.log_prob(value))
    if case.has_entropy:
        found.append(lambda design, value: design.entropy())
    if case.has_pairwise:
        found.append(lambda design, value: design.pairwise_inclusion)
        found.append(lambda design, value: design.covariance_matrix)
    return found


def compare_design(make, case, parameter):
    design, twin = make(parameter), make(parameter.float())
    drawn = []
    for each in (design, twin):
        torch.manual_seed(1)
        drawn.append((each.sample((20,)), each.expand((2, *each.batch_shape)).sample()))
    for found, expected in zip(*drawn, strict=True):
        assert found.dtype == parameter.dtype and torch.equal(found.float(), expected)
    assert design.support.check(drawn[0][0]).all()
    for member in members_of(case):
        compare(lambda x, member=member: member(make(x), drawn[0][0]), parameter)


@in_half_types
@for_each("given", ["logits", "probs"])
@for_each("case", DESIGNS)
def test_designs(case, given, dtype):
    if given == "logits":
        compare_design(lambda logits: case.make(logits=logits, k=torch.tensor([1, 3, 6])), case, LOGITS.to(dtype))
    else:
        compare_design(lambda probs: case.make(probs=probs), case, PROBS.to(dtype))
        gof.check_k_hot(case.make(probs=PROBS.to(dtype), k=2).sample((3,)), 2)


@in_half_types
def test_phantom_unit(dtype):
    compare_design(lambda logits: PHANTOM.make(logits=logits, k=None), PHANTOM, LOGITS.to(dtype))
    compare_design(lambda probs: PhantomUnit(ConditionalPoisson, probs=probs), PHANTOM, torch.rand(3, 6).to(dtype))
    logits = torch.full((3000,), -0.6953125, dtype=dtype)  # the rounded probabilities sum to another number
    expected = PhantomUnit(Pivotal, logits=logits.float()).k
    assert torch.equal(PhantomUnit(Pivotal, logits=logits).k, expected)
    assert (PhantomUnit(Pivotal, logits=logits).sample((9,)).double().sum(-1) - expected <= 1).all()


@in_half_types
@for_each("sizes", [(1, 3), (0, 7)])
def test_size_ranges(sizes, dtype):
    make = partial(ConditionalPoisson, k=sizes)
    compare_design(lambda logits: make(logits=logits), DESIGNS[0], LOGITS.to(dtype))
    compare(lambda logits: make(logits=logits).size_probs, LOGITS.to(dtype))


@in_half_types
@for_each("case", DESIGNS)
def test_rounded_probabilities_need_a_size(case, dtype):
    """Of the size that they are roundings of exactly as many are drawn; without it nobody knows."""
    n = 3000 if case.long_row >= 1000 else case.long_row
    for k in (1, n // 3, n - 1):
        probs = sigmoid_topk(torch.zeros(2, n, dtype=dtype), k)
        design = case.make(probs=probs, k=k, validate_args=True)
        gof.check_k_hot(design.sample((3,)), k)
        if case.exact_probs:
            assert_rounded(design.mean, torch.full((2, n), k / n))
    sizes = torch.tensor([n // 2, n - 1])
    skewed = sigmoid_topk(3 * normal(2, n, dtype=dtype), sizes)
    gof.check_k_hot(case.make(probs=skewed, k=sizes).sample((3,)), sizes)
    if n == 3000:
        with pytest.raises(ValueError, match="`k` must be given with `probs` in torch"):
            case.make(probs=sigmoid_topk(torch.full((n,), 0.0, dtype=dtype), 2750), validate_args=False)
    with pytest.raises(ValueError, match="sum to its integer k"):
        case.make(probs=PROBS.to(dtype), k=3, validate_args=True)


@in_half_types
def test_long_rows_of_certain_units(dtype):
    """Ones that represent slightly less than 1 are reduced if the size requires it."""
    for n, k in ((1000, 999), (3000, 2998)):
        design = Pivotal(probs=sigmoid_topk(torch.zeros(n, dtype=dtype), k), k=k)
        gof.check_k_hot(draws := design.sample((400,)), k)
        assert (draws == 0).any(-1).all() and len((draws == 0).nonzero()[:, 1].unique()) > 100


@in_half_types
def test_divergences(dtype):
    """Which cancel."""
    p, q = LOGITS.to(dtype), (LOGITS + 0.1 * normal(3, 7, seed=1)).to(dtype)
    pairs = (ConditionalPoisson, ConditionalPoisson), (Sampford, ConditionalPoisson), (GumbelTopK, Sampford)
    for first, second in pairs:
        compare(lambda x, y, a=first, b=second: kl_divergence(a(logits=x, k=2), b(logits=y, k=2)), p, q)
    of_any_sum = partial(PhantomUnit, ConditionalPoisson)
    equal = torch.full((4,), 0.5, dtype=dtype)
    compare(lambda x, y: kl_divergence(of_any_sum(logits=x), of_any_sum(logits=y)), equal, equal * 1.25)


@in_half_types
@for_each("make", [Sampford, ParetoSampling])
def test_totals(make, dtype):
    design, twin = make(logits=LOGITS.to(dtype), k=3), make(logits=LOGITS.to(dtype).float(), k=3)
    value = design.sample((5,))
    found = horvitz_thompson(design, value.float(), normal(5, 3, 7, seed=2).float())
    for one, other in zip(found, horvitz_thompson(twin, value.float(), normal(5, 3, 7, seed=2).float()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@in_half_types
def test_subsets_by_number(dtype):
    law = subset_categorical(ConditionalPoisson(logits=LOGITS.to(dtype), k=3))
    expected = subset_categorical(ConditionalPoisson(logits=LOGITS.to(dtype).float(), k=3))
    torch.testing.assert_close(law.probs, expected.probs)


# Relaxed laws


@in_half_types
@for_each("case", RELAXED)
def test_relaxed(case, dtype):
    for k in (2, 3):
        temperature = torch.tensor([0.25, 0.5, 2.0], dtype=dtype)
        compare(lambda x, t, k=k: case.public(t, logits=x, k=k).rsample((4,)), LOGITS.to(dtype), temperature)

        def score(x, k=k):
            law = case.public(0.5, logits=x, k=k)
            return law.log_prob(law.rsample((4,)))

        compare(score, LOGITS.to(dtype))


@in_half_types
def test_relaxed_samples_of_long_rows(dtype):
    """Entries far below the smallest normal number of float16 are at most a rounding error of their sum."""
    torch.manual_seed(0)
    for n, k, temperature in ((3000, 5, 0.1), (30152, 5, 0.1), (3000, 1000, 1e4), (100_000, 1, 0.1)):
        law = RelaxedKHot(temperature, logits=torch.zeros(n, dtype=dtype), k=k, validate_args=True)
        x = law.sample((3,))
        rounding = torch.finfo(dtype).eps / 2 * k + n * 2.0**-24
        assert ((x.double().sum(-1) - k).abs() <= rounding).all() and law.support.check(x).all()
        assert ((x > 0) & (x < 1)).all() and not law.log_prob(x.clone()).isnan().any()


@in_half_types
def test_bijection(dtype):
    transform = biject_to(capped_simplex(2.5))
    u = normal(4, 8, dtype=dtype)
    compare(transform, u)
    compare(lambda u: transform.log_abs_det_jacobian(u, transform(u)), u)
    with torch.no_grad():
        y = transform(u).clone()
        assert_rounded(transform.inv(y), y.float().logit()[..., :-1] - y.float().logit()[..., -1:])


# Estimators


def weighted(x):
    """A loss whose derivatives are exact in half types."""
    return (x * torch.tensor([-4, -2, -1, 0, 1, 2, 4]).to(x.dtype)).sum(-1)


@in_half_types
@for_each("design", DESIGNS)
@for_each("case", ESTIMATORS)
def test_wrappers(case, design, dtype):
    compare(lambda x: case.wrap(design.make(logits=x, k=3)).rsample((5,)), LOGITS.to(dtype))


@in_half_types
@for_each("wrap", [case.wrap for case in ESTIMATORS])
def test_wrappers_of_a_phantom_unit(wrap, dtype):
    compare(lambda x: wrap(PhantomUnit(Pivotal, logits=x)).rsample((5,)), LOGITS.to(dtype))
    compare(lambda x: wrap(PhantomUnit(ConditionalPoisson, logits=x)).rsample((5,)), LOGITS.to(dtype))


@in_half_types
@for_each("case", PERTURBED)
def test_perturbed(case, dtype):
    compare(lambda x: case.make(logits=x, k=3).rsample((5,)), LOGITS.to(dtype))
    compare(lambda x: case.make(logits=x, k=torch.tensor([1, 3, 6])).rsample((5,)), (LOGITS + 100).to(dtype))


@in_half_types
@for_each("case", FUNCTIONS)
def test_functions(case, dtype):
    def estimate(x):
        return case.estimate(Sampford(logits=x, k=3), weighted, max(case.min_samples, 8))  # a mean of powers of two

    compare(estimate, LOGITS.to(dtype))


@in_half_types
def test_perturbed_topk(dtype):
    """Noise finer than the spacing of the scores tells equal ones apart, and has a gradient."""
    for scale in (0.5, 1e-3, 1e-5):
        compare(lambda x, scale=scale: perturbed_topk(x, 3, scale, 50), LOGITS.to(dtype))
    torch.manual_seed(0)
    x = torch.tensor([10.0, 10.0], dtype=dtype, requires_grad=True)
    y = perturbed_topk(x, 1, 1e-3, 4000)
    assert abs(y[0].item() - 0.5) < 5 * 0.5 / math.sqrt(4000)  # false alarm 1e-6
    (grad,) = torch.autograd.grad(y[0], x)
    # The derivative of P(s Z > s Z') is 1 / (2 s sqrt(pi)) = 282.1; its terms have a deviation of at most 1 / s.
    assert abs(grad[0].item() - 282.1) < 5 * 1000 / math.sqrt(4000)
    mask = perturbed_topk(torch.full((1000,), 8.0, dtype=dtype), 10, 1e-2, 200).double()
    # Of 2000 ones each lies in the first half with probability 1/2.
    assert abs(mask[:500].sum().item() - 5) < 5 * 0.5 * math.sqrt(10 / 200)


@in_half_types
def test_moving_average(dtype):
    losses, baseline, twin = 100 + 30 * normal(2000, 4), MovingAverage(), MovingAverage()
    for loss in losses.to(dtype):
        baseline.update(loss)
        twin.update(loss.float())
    torch.testing.assert_close(baseline.mean, twin.mean)
    design = ConditionalPoisson(logits=LOGITS.to(dtype), k=2)
    assert score_function(design, weighted, baseline=baseline).dtype == dtype
