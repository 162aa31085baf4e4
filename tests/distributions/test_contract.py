"""What every sampling design promises, checked for each member of the registry, and three members that break it."""

import copy
import math
import pickle
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch

from khot.distributions import Systematic
from khot.relaxations import sigmoid_topk
from tests import gof
from tests.backends import in_turn
from tests.inputs import normal
from tests.maps import members, only_for
from tests.registry import DESIGNS, DesignCase

PROBS = torch.tensor([0.3, 0.75, 0.15, 0.6, 0.2], dtype=torch.float64)  # k = 2
LOGITS = torch.tensor(
    [[0.4, -1.2, 0.9, 0.1, -0.3], [1.5, 0.2, -0.7, -2.0, 0.6], [0.0, 0.3, -0.4, 2.5, 1.0]], dtype=torch.float64
)
PAIRS = ("pairwise_inclusion", "covariance_matrix")


@cache
def enumerated(case):
    """A design with its support and reference probabilities."""
    design = case.make(probs=PROBS)
    support = design.enumerate_support()
    return design, support, case.reference(design, support)


def rows(design_of_row):
    return torch.stack([design_of_row(i) for i in range(len(LOGITS))])


def check_shapes_and_dtypes(case):
    for dtype in (torch.float32, torch.float64):
        design = case.make(logits=LOGITS.to(dtype), k=2)
        assert design.batch_shape == (3,) and design.event_shape == (5,) and design.event_dim == 1
        assert type(design).infer_shapes(logits=(3, 5), k=(3,)) == ((3,), (5,))
        for sample_shape in ((), (4,), (2, 4)):
            value = design.sample(torch.Size(sample_shape))
            assert value.shape == (*sample_shape, 3, 5) and value.dtype == dtype
            assert design.sample_indices(torch.Size(sample_shape)).shape == (*sample_shape, 3, 2)
            if case.has_log_prob:
                log_prob = design.log_prob(value)
                assert log_prob.shape == (*sample_shape, 3) and log_prob.dtype == dtype
        assert design.mean.shape == design.variance.shape == (3, 5) and design.mean.dtype == dtype
    empty = case.make(logits=LOGITS[:0], k=2, validate_args=True)
    assert empty.sample().shape == empty.mean.shape == (0, 5)
    assert case.make(probs=LOGITS[:0], validate_args=True).sample((3,)).shape == (3, 0, 5)


def check_law(case):
    design, support, pmf = enumerated(case)
    assert math.isclose(pmf.sum().item(), 1, rel_tol=1e-12)
    if case.has_log_prob:
        log_prob = design.log_prob(support)
        torch.testing.assert_close(log_prob.exp(), pmf, rtol=1e-11, atol=1e-14)
        assert torch.equal(log_prob == -math.inf, pmf == 0)
        assert pmf[(support == design.mode).all(-1)].item() == pytest.approx(pmf.max().item())


def check_moments(case):
    design, support, pmf = enumerated(case)
    pairs = support.mT @ (pmf[:, None] * support)
    mean, close = pmf @ support, {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(design.mean, mean, **close)
    torch.testing.assert_close(design.variance, mean * (1 - mean), **close)
    torch.testing.assert_close(design.stddev, (mean * (1 - mean)).sqrt(), **close)
    if case.has_pairwise:
        torch.testing.assert_close(design.pairwise_inclusion, pairs, **close)
        torch.testing.assert_close(design.covariance_matrix, pairs - torch.outer(mean, mean), **close)
    if case.has_entropy:
        torch.testing.assert_close(design.entropy(), -torch.xlogy(pmf, pmf).sum(), **close)
    if case.exact_probs:
        torch.testing.assert_close(design.mean, PROBS, rtol=0, atol=1e-9)


def check_sampler(case):
    design, support, pmf = enumerated(case)
    torch.manual_seed(0)
    size = gof.num_draws(pmf)
    gof.check_k_hot(draws := design.sample((size,)), 2)
    gof.check_sampler(draws, support, pmf)
    across_batch = design.expand((2,)).sample((size // 2,)).reshape(-1, 5)  # neighbours lie in different batch rows
    gof.check_sampler(across_batch, support, pmf)
    gof.check_sampler(torch.cat([design.sample((20,)) for _ in range(200)]), support, pmf)


def check_sampling_is_reproducible(case):
    design = case.make(logits=LOGITS, k=2)
    torch.manual_seed(1)
    first, indices = design.sample((50,)), design.sample_indices((50,))
    torch.manual_seed(1)
    assert torch.equal(design.sample((50,)), first)
    assert torch.equal(design.sample_indices((50,)), indices)
    assert (indices.diff(dim=-1) > 0).all() and not first.requires_grad


def check_batch_equals_rows(case):
    k = torch.tensor([1, 2, 4])
    batch = case.make(logits=LOGITS, k=k)
    single = [case.make(logits=LOGITS[i], k=int(k[i])) for i in range(3)]
    value = batch.sample()
    gof.check_k_hot(batch.sample((200,)), k)
    torch.testing.assert_close(batch.mean, rows(lambda i: single[i].mean))
    if case.has_log_prob:
        torch.testing.assert_close(batch.log_prob(value), rows(lambda i: single[i].log_prob(value[i])))
    if case.has_entropy:
        torch.testing.assert_close(batch.entropy(), rows(lambda i: single[i].entropy()))
    if case.has_pairwise:
        torch.testing.assert_close(batch.pairwise_inclusion, rows(lambda i: single[i].pairwise_inclusion))
    for method in (batch.sample_indices, batch.enumerate_support):
        with pytest.raises(NotImplementedError, match="same k in all rows"):
            method()
    assert case.make(logits=LOGITS, k=torch.tensor([2, 2, 2])).sample_indices().shape == (3, 2)


def check_expand(case):
    for touch_first in (False, True):
        design = case.make(logits=LOGITS, k=2)
        if touch_first:
            _ = design.mean, design.probs
        expanded = design.expand((4, 3))
        twice = expanded.expand((2, 4, 3))
        assert type(twice) is type(design) and design.batch_shape == (3,) and expanded.batch_shape == (4, 3)
        assert twice.batch_shape == (2, 4, 3) and twice.event_shape == (5,)
        assert twice.support.check(twice.sample()).all()
        torch.testing.assert_close(twice.mean, design.mean.expand(2, 4, 3, 5))
        assert expanded.enumerate_support(expand=False).shape == (10, 1, 1, 5)
        assert torch.equal(expanded.enumerate_support(), expanded.enumerate_support(expand=False).expand(10, 4, 3, 5))
        if case.has_log_prob:
            value = design.sample((2, 4))
            torch.testing.assert_close(twice.log_prob(value), design.log_prob(value))
            assert expanded.log_prob(expanded.enumerate_support(expand=False)).shape == (10, 4, 3)
    k = torch.tensor([1, 2, 4])
    assert torch.equal(case.make(logits=LOGITS, k=k).expand((2, 3)).k, k.expand(2, 3))
    for validate in (False, True):
        assert case.make(logits=LOGITS, k=2, validate_args=validate).expand((2, 3))._validate_args is validate


def check_enumeration_is_lexicographic(case):
    support = case.make(logits=LOGITS[0], k=3).enumerate_support()
    indices = support.nonzero()[:, 1].view(10, 3).tolist()
    assert indices == sorted(indices) and len({tuple(row) for row in indices}) == 10
    with pytest.raises(ValueError, match=r"C\(40, 20\)"):
        case.make(logits=torch.zeros(40), k=20).enumerate_support()


def check_limits(case):
    for k in (0, 5):
        design = case.make(logits=LOGITS, k=k)
        constant = torch.full((3, 5), float(k == 5), dtype=torch.float64)
        assert torch.equal(design.sample(), constant) and torch.equal(design.mean, constant)
        assert design.sample_indices().shape == (3, k) and design.enumerate_support().shape == (1, 3, 5)
        if case.has_log_prob:
            torch.testing.assert_close(
                design.log_prob(constant), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-15
            )
        if case.has_entropy:
            torch.testing.assert_close(design.entropy(), torch.zeros(3, dtype=torch.float64))


def check_certain_and_excluded_units(case):
    probs = torch.tensor([[0.0, 1.0, 0.3, 0.7, 0.0, 1.0], [0.5, 0.0, 1.0, 0.5, 0.25, 0.75]], dtype=torch.float64)
    probs.requires_grad_()
    design = case.make(probs=probs)
    value = design.sample((500,))
    gof.check_k_hot(value, 3)
    assert (value[:, probs == 0] == 0).all() and (value[:, probs == 1] == 1).all()
    if case.exact_probs:
        torch.testing.assert_close(design.mean, probs, rtol=0, atol=1e-9)
    results = [design.mean[0, 2]]
    if case.has_log_prob:
        log_prob = design.log_prob(design.enumerate_support())
        torch.testing.assert_close(log_prob.exp().sum(0), torch.ones(2, dtype=torch.float64))
        results += [log_prob[log_prob > -math.inf], log_prob.exp().sum(0)]
    if case.has_entropy:
        results.append(design.entropy())
    for result in results:
        (grad,) = torch.autograd.grad(result.sum(), probs, retain_graph=True)
        assert grad.isfinite().all()


def outputs_of(case, given, point):
    """What a design computes from its parameter, with k = 2."""
    outputs = [lambda design: design.mean]
    if case.has_log_prob:
        design = case.make(**{given: point}, k=2)
        support = design.enumerate_support()
        support = support[case.reference(design, support) > 0]
        outputs.append(lambda design: design.log_prob(support))
    if case.has_entropy:
        outputs.append(lambda design: design.entropy())
    if case.has_pairwise:
        outputs.append(lambda design: design.pairwise_inclusion)
    return outputs


def check_forward_mode(case):
    """Along a direction that keeps the sum, it agrees with backward mode."""
    direction = normal(len(PROBS)) - normal(len(PROBS)).mean()
    for given, point in (("probs", PROBS), ("logits", LOGITS[0])):
        for output in outputs_of(case, given, point):

            def function(x, given=given, output=output):
                return output(case.make(**{given: x}, k=2, validate_args=False))

            _, change = torch.func.jvp(function, (point,), (direction,))
            value = function(x := point.clone().requires_grad_())
            weight = normal(*value.shape, seed=1)
            (grad,) = torch.autograd.grad((value * weight).sum(), x)
            torch.testing.assert_close((change * weight).sum(), (grad * direction).sum(), rtol=1e-7, atol=1e-10)


def check_gradients(case):
    logits = LOGITS[0].clone().requires_grad_()
    probs = PROBS.clone().requires_grad_()
    _, support, pmf = enumerated(case)
    for output in outputs_of(case, "logits", LOGITS[0]):
        assert torch.autograd.gradcheck(lambda x, output=output: output(case.make(logits=x, k=2)), logits)
    if case.has_log_prob:  # the score has mean zero along every direction that keeps the sum
        possible = pmf > 0
        log_prob = case.make(probs=probs).log_prob(support[possible])
        (score,) = torch.autograd.grad(pmf[possible] @ log_prob, probs)
        torch.testing.assert_close(score - score.mean(), torch.zeros_like(probs), rtol=0, atol=1e-10)


def check_large_rows(case):
    torch.manual_seed(0)
    n = case.long_row
    logits, k = 3 * torch.randn(4, n), torch.tensor([1, 10, n // 2, n - 1])
    for design in (case.make(logits=logits, k=k), case.make(probs=sigmoid_topk(logits, k))):
        assert torch.equal(design.k, k)
        gof.check_k_hot(value := design.sample((3,)), k)
        assert (design.mean.sum(-1, dtype=torch.float64) - k).abs().max() < 1e-2
        if case.has_log_prob and k.max() <= case.largest_scored_k:
            assert design.log_prob(value).isfinite().all()


@only_for(lambda case: not (case.has_log_prob and case.has_entropy_at_any_size and case.has_pairwise_at_any_size))
def check_missing_parts_name_who_has_them(case):
    """With few subsets, a design with a log_prob has the rest by enumeration; with many, what its class defines."""
    few, many = case.make(probs=PROBS), case.make(logits=torch.zeros(30), k=10)
    calls = {
        "log_prob": (case.has_log_prob, few, lambda: few.log_prob(few.enumerate_support())),
        "entropy": (case.has_entropy_at_any_size, many, lambda: many.entropy()),
        "pairwise_inclusion": (case.has_pairwise_at_any_size, many, lambda: many.pairwise_inclusion),
    }
    for name, (present, design, call) in calls.items():
        if not present:
            limit = f" of {math.comb(30, 10)} k-hot vectors" if case.has_log_prob and design is many else ""
            with pytest.raises(NotImplementedError, match=f"no {name}{limit}.*ConditionalPoisson"):
                call()
    if not case.has_log_prob:
        for name in ("entropy", "pairwise_inclusion"):
            with pytest.raises(NotImplementedError, match=f"no {name};.*ConditionalPoisson"):
                getattr(few, name)() if name == "entropy" else getattr(few, name)


def check_bad_arguments(case):
    good = {"logits": LOGITS, "k": 2}
    errors = [
        (ValueError, "both", {**good, "probs": PROBS}),
        (ValueError, "neither", {}),
        (ValueError, "`k`.*required", {"logits": LOGITS}),
        (ValueError, "0 <= k <= n.*k=-1 with n=5", {**good, "k": -1}),
        (ValueError, "0 <= k <= n.*k=6 with n=5", {**good, "k": 6}),
        (ValueError, "0 <= k <= n", {**good, "k": torch.tensor([1, 2, 6])}),
        (ValueError, r"`k` must broadcast.*\(3,\).*\(2,\)", {**good, "k": torch.tensor([1, 2])}),
        (ValueError, "logits", {**good, "logits": LOGITS.log()}),
        (ValueError, "probs", {"probs": PROBS + 0.3 * torch.tensor([1, 1, -1, -1, 0])}),
        (ValueError, r"`probs` must lie in \[0, 1\] and sum to its.*2\.1.*round or rescale", {"probs": PROBS * 1.05}),
        (ValueError, "`probs` must lie.*k=3", {"probs": PROBS, "k": 3}),
    ]
    for error, match, kwargs in errors:
        with pytest.raises(error, match=match):
            case.make(**kwargs, validate_args=True)
    if case.has_log_prob:
        design = case.make(**good, validate_args=True)
        for value in (torch.full((5,), 0.4), torch.tensor([1.0, 1, 1, 0, 0])):
            with pytest.raises(ValueError, match="support"):
                design.log_prob(value.double())


def check_agreeing_k_is_accepted(case):
    design = case.make(probs=PROBS, k=2)
    assert design.k == 2 and torch.equal(design.support.check(design.sample((3,))), torch.ones(3, dtype=torch.bool))


@only_for(lambda case: case.takes_relaxation)
def check_relaxation_and_temperature_are_used(case):
    design = case.make(logits=LOGITS, k=2, temperature=torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    expected = rows(lambda i: sigmoid_topk(LOGITS[i], 2, 0.5 * 2.0**i))
    torch.testing.assert_close(design.probs, expected)
    torch.testing.assert_close(design.expand((2, 3)).probs, expected.expand(2, 3, 5))
    flat = case.make(logits=LOGITS, k=2, relaxation=lambda x, k, softness: torch.full_like(x, k / x.shape[-1]))
    torch.testing.assert_close(flat.probs, torch.full_like(LOGITS, 0.4))


def check_copies(case):
    logits = LOGITS.clone().requires_grad_()
    design = case.make(logits=logits, k=2)
    _ = design.mean, design.probs  # a cached graph must not stand in the way
    for twin in (copy.deepcopy(design), pickle.loads(pickle.dumps(design)), copy.copy(design)):
        assert type(twin) is type(design) and twin.batch_shape == (3,) and torch.equal(twin.k, design.k)
        torch.testing.assert_close(twin.mean, design.mean)


def outside_inference_mode(function):
    """A function, and what it returns if it can be called, that must not be called in inference mode."""

    def call(*args, **kwargs):
        assert not torch.is_inference_mode_enabled(), "older versions of torch return wrong derivatives here"
        result = function(*args, **kwargs)
        if isinstance(result, tuple):
            return tuple(outside_inference_mode(part) if callable(part) else part for part in result)
        return outside_inference_mode(result) if callable(result) else result

    return call


def check_inference_mode(case):
    """Also of laws that are found by Newton's method, which takes derivatives."""
    transforms = ("vjp", "jvp", "vmap", "grad", "grad_and_value", "jacrev", "jacfwd", "hessian", "linearize")
    refusing = {name: outside_inference_mode(getattr(torch.func, name)) for name in transforms}
    for given, point in (("probs", PROBS), ("logits", LOGITS[0])):
        outputs = outputs_of(case, given, point)
        with torch.inference_mode(), mock.patch.multiple(torch.func, **refusing):
            inside = [output(case.make(**{given: point}, k=2)) for output in outputs]
            case.make(**{given: point}, k=2).sample((3,))
            computed_inside = point + 0
        for output, found in zip(outputs, inside, strict=True):
            torch.testing.assert_close(found, output(case.make(**{given: point}, k=2)), rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(
                output(case.make(**{given: computed_inside}, k=2)), found, rtol=1e-11, atol=1e-11
            )


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
COSTLY = (check_gradients, check_forward_mode, check_sampler, check_large_rows)


@pytest.mark.parametrize(
    ("case", "check", "cpu_backend"),
    in_turn(members(DESIGNS, CHECKS, COSTLY), len(CHECKS)),
    indirect=["cpu_backend"],
)
def test_contract(case: DesignCase, check, cpu_backend):
    check(case)


class OtherSampler(Systematic):
    """Claims the law of the given order, and draws in random order: right size, right mean, wrong pairs."""

    def _sample(self, shape, generator):
        return Systematic(probs=self.probs, order="random").sample(shape, generator=generator)


class OtherMean(Systematic):
    """Reports as mean what the relaxation of another temperature would give."""

    @property
    def _mean(self):
        return sigmoid_topk(self.probs.logit(), self.k, 1.001)


class UnnormalisedLogProb(Systematic):
    def _log_prob(self, value):
        return super()._log_prob(value) + 1e-6


@pytest.mark.parametrize(
    ("wrong", "check"),
    [(OtherSampler, check_sampler), (OtherMean, check_moments), (UnnormalisedLogProb, check_law)],
)
def test_contract_rejects(wrong, check):
    fixed = next(case for case in DESIGNS if case.name == "systematic_fixed")
    case = replace(fixed, name="wrong", make=wrong)
    with pytest.raises(AssertionError):
        check(case)
