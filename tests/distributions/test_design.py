"""What designs say of themselves, of a relaxation that makes no inclusion probabilities, and of pathwise samples."""

import pytest
import torch

from khot import (
    Brewer,
    ConditionalPoisson,
    GumbelTopK,
    ParetoSampling,
    PhantomUnit,
    Pivotal,
    RelaxedKHot,
    Sampford,
    StraightThrough,
    Systematic,
    log_sigmoid_topk,
    sigmoid_topk,
    successive_softmax_topk,
)
from khot.distributions.design import defined_by, designs_with
from khot.distributions.sizes import size_of
from tests.inputs import normal
from tests.loops import for_each
from tests.registry import DESIGNS

LOGITS = torch.tensor([[3.0, 1.0, 0.2, -1.0, 0.5], [8.0, 0.0, 0.0, 0.0, 0.0]])


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("case", DESIGNS)
def test_parameters_that_require_gradients_in_inference_mode(case, dtype):
    names = [name for name in ("log_prob", "entropy") if getattr(case, f"has_{name}")]
    for k in (3, torch.tensor([1, 3])):
        logits = LOGITS.to(dtype).requires_grad_()

        def results(logits=logits, k=k):
            design, kept = case.make(logits=logits, k=k), case.make(logits=logits, k=k)
            with torch.inference_mode():
                kept.mean  # noqa: B018  # which later calls outside this mode must not use
            mean = design.mean
            value = torch.ones_like(mean).cumsum(-1).le(torch.as_tensor(k)[..., None]).to(dtype)
            args = {"log_prob": (value,), "entropy": ()}
            design.sample()
            return [mean, kept.mean, *(getattr(design, name)(*args[name]) for name in names)]

        with torch.inference_mode():
            found = results()
        for x, expected in zip(found, results(), strict=True):
            assert expected.requires_grad
            torch.testing.assert_close(x, expected.detach())


@for_each("design_class", [Pivotal, Sampford])
@for_each("relaxation", [log_sigmoid_topk, successive_softmax_topk, lambda x, k, t: torch.sigmoid(x)])
def test_relaxation_must_give_inclusion_probabilities(design_class, relaxation):
    with pytest.raises(ValueError, match=r"each row of what `relaxation` .* returns must lie in \[0, 1\] and sum to"):
        design_class(logits=LOGITS, k=3, relaxation=relaxation).sample()


def test_relaxation_is_not_looked_at_under_transforms_and_without_validation():
    mean = torch.func.vmap(lambda row: Pivotal(logits=row, k=3, validate_args=True).mean)(LOGITS)
    torch.testing.assert_close(mean, sigmoid_topk(LOGITS, 3))
    Pivotal(logits=LOGITS, k=3, relaxation=log_sigmoid_topk, validate_args=False).mean  # noqa: B018


def test_sums_that_are_no_integer_are_pointed_to_the_phantom_unit():
    with pytest.raises(ValueError, match="sum 1.5 .*PhantomUnit"):
        Pivotal(probs=torch.tensor([0.5, 0.5, 0.5]))


def test_a_sum_that_fits_several_sizes_needs_one():
    """Also in float32, where a row of this length may miss its sum by more than 1 after a rescaling."""
    n, k = 1_500_000, 1_200_000
    probs = torch.full((n,), (k + 1.94) / n)
    for case in DESIGNS:
        with pytest.raises(ValueError, match="`k` must be given with `probs` in torch.float32.*pass k=.*float64"):
            case.make(probs=probs, validate_args=False)
    assert (Sampford(probs=probs.double().mul(k / probs.sum(dtype=torch.float64))).k == k).all()
    assert (Sampford(probs=torch.full((n,), 1e5 / n)).k == 100_000).all()
    for order in ("fixed", "random"):  # the other designs draw k in any case
        for size, excess in ((800_000, 1.4), (k, 1.94), (2_400_000, 4.4)):
            row = torch.full((size * 5 // 4,), (size + excess) / (size * 5 // 4))
            drawn = Systematic(probs=row, k=size, order=order, validate_args=True).sample()
            assert drawn.sum(dtype=torch.float64) == size
    with pytest.raises(ValueError, match="sum to its integer k"):
        Sampford(probs=probs, k=k - 3, validate_args=True)


def test_rsample_says_what_to_do():
    with pytest.raises(NotImplementedError, match="wrap it in an estimator, such as khot.ReinMax.*StraightThrough"):
        ConditionalPoisson(logits=LOGITS, k=3).rsample()


def test_repr_tells_the_arguments():
    logits = torch.zeros(3, 4)
    assert repr(ConditionalPoisson(logits=logits, k=2)) == "ConditionalPoisson(logits: (3, 4), k: 2)"
    fixed = Systematic(probs=torch.full((4,), 0.5))
    assert repr(StraightThrough(fixed)) == "StraightThrough(Systematic(probs: (4,), k: 2, order: fixed))"
    phantom = PhantomUnit(Pivotal, probs=torch.full((3,), 0.5))
    assert repr(phantom) == "PhantomUnit(probs: (3,), k: 1, design_class: Pivotal)"
    relaxed = RelaxedKHot(0.5, logits, torch.tensor([1, 2, 3]))
    assert repr(relaxed) == "RelaxedKHot(logits: (3, 4), k: (3,), temperature: 0.5)"


HAS = {
    "log_prob": "has_log_prob",
    "entropy": "has_entropy_at_any_size",
    "pairwise_inclusion": "has_pairwise_at_any_size",
}


@for_each("wanted", HAS)
def test_errors_name_the_designs_that_have_it(wanted):
    """By what their classes define; the registry says what they do."""
    named = designs_with(wanted)
    for case in DESIGNS:
        design = case.make(logits=LOGITS, k=3)
        name = type(design).__name__
        in_this_order = f"{name}(order='{getattr(design, 'order', None)}')"
        assert (name in named or in_this_order in named) == getattr(case, HAS[wanted])


@for_each("given", ["probs", "logits"])
def test_a_design_says_what_it_was_made_from(given):
    x = torch.full((2, 4), 0.5)
    design = Sampford(**{given: x}, k=2)
    assert design.parameter is x and design.parameter_name == given and size_of(design) == 2
    rows = Sampford(**{given: x}, k=torch.tensor([2, 2]))
    assert size_of(rows).tolist() == [2, 2]


@for_each("make", [Brewer, ParetoSampling, GumbelTopK, Sampford])
def test_enumerated_results_do_not_depend_on_what_was_asked_before(make):
    """In single precision: covariances are differences of what is not rounded yet, in whatever order they come."""
    logits = 8 * normal(6, seed=1).float()
    fresh, used, double = make(logits=logits, k=3), make(logits=logits, k=3), make(logits=logits.double(), k=3)
    _ = used.mean, used.entropy(), used.log_prob(used.sample())
    assert torch.equal(fresh.covariance_matrix, used.covariance_matrix)
    assert torch.equal(fresh.entropy(), used.entropy())
    torch.testing.assert_close(fresh.covariance_matrix.double(), double.covariance_matrix, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(fresh.entropy().double(), double.entropy(), rtol=1e-6, atol=0)


ENUMERATED = [c for c in DESIGNS if c.has_log_prob and not (c.has_entropy_at_any_size and c.has_pairwise_at_any_size)]


@for_each("case", ENUMERATED)
@for_each("dtype", [torch.bfloat16, torch.float32])
def test_what_is_enumerated_is_rounded_once(case, dtype):
    logits = LOGITS.to(dtype)
    design, exact = (case.make(logits=x, k=torch.tensor([2, 3])) for x in (logits, logits.double()))
    results = {"entropy": lambda d: d.entropy()} if "entropy" not in defined_by(type(design)) else {}
    if "pairwise_inclusion" not in defined_by(type(design)):
        results |= {"pairs": lambda d: d.pairwise_inclusion, "covariance": lambda d: d.covariance_matrix}
    for result in results.values():
        torch.testing.assert_close(result(design), result(exact).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-10)


@for_each("case", [case for case in DESIGNS if case.has_log_prob])
def test_mode_of_rows_of_different_k(case):
    sizes, theta = [1, 3], normal(2, 5)
    together = case.make(logits=theta, k=torch.tensor(sizes)).mode
    apart = [case.make(logits=row, k=k).mode for row, k in zip(theta, sizes, strict=True)]
    assert together.equal(torch.stack(apart))


def test_mode_of_too_many_vectors_says_who_has_it():
    with pytest.raises(NotImplementedError, match=r"no mode of \d+ k-hot vectors.*ConditionalPoisson"):
        _ = Brewer(probs=torch.full((60,), 0.5)).mode
