"""Pareto sampling and Gumbel top-k: reference values, special cases, extremes, goodness of fit."""

import itertools
import math

import pytest
import torch

from khot import ConditionalPoisson, GumbelTopK, ParetoSampling, Sampford
from khot.laws.pareto import adjusted
from tests import gof
from tests.backends import BACKENDS
from tests.loops import for_each
from tests.oracle import cases, tensor


def k_hot(subsets, n):
    return torch.zeros(len(subsets), n, dtype=torch.float64).scatter_(-1, torch.tensor(subsets), 1)


def check_oracle(design, case, key="log_prob", mean="pi"):
    listed, expected = k_hot(case["subsets"], case["n"]), tensor(case[key])
    log_prob = design.log_prob(listed)
    assert ((log_prob - expected).abs() <= 1e-11 * (1 + expected.abs())).all()
    if mean in case:
        assert (design.mean - tensor(case[mean])).abs().max() <= 1e-11
    if case["full"]:
        assert design.log_prob(design.mode).item() == pytest.approx(expected.max().item())
        torch.manual_seed(0)
        gof.check_sampler(design.sample((20_000,)), listed, expected.exp())
    return log_prob


@pytest.mark.usefixtures("cpu_backend")
@for_each("case", cases("pareto"))
def test_pareto_oracle(case):
    probs = tensor(case["lam"]).requires_grad_()
    log_prob = check_oracle(ParetoSampling(probs=probs, adjust=None), case)
    if "grad0_log_odds" in case:
        (grad,) = torch.autograd.grad(log_prob[0], probs)
        torch.testing.assert_close(grad * probs * (1 - probs), tensor(case["grad0_log_odds"]), rtol=0, atol=1e-10)
    probs = probs.detach()
    if "log_prob_adjusted" in case:
        check_oracle(ParetoSampling(probs=probs), case, "log_prob_adjusted", "pi_adjusted")
    if "exact_log_odds" in case:
        positions = ParetoSampling(probs=probs, adjust="exact")._positions
        assert (positions - tensor(case["exact_log_odds"])).abs().max() <= 1e-9


@pytest.mark.usefixtures("cpu_backend")
@for_each("case", cases("gumbel_topk"))
def test_gumbel_topk_oracle(case):
    logits = tensor(case["theta"]).requires_grad_()
    log_prob = check_oracle(GumbelTopK(logits=logits, k=case["k"]), case)
    if "grad0_theta" in case:
        (grad,) = torch.autograd.grad(log_prob[0], logits)
        torch.testing.assert_close(grad, tensor(case["grad0_theta"]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_gumbel_top_1_is_categorical(scale):
    logits = scale * torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    design, log_softmax = GumbelTopK(logits=logits, k=1), logits.log_softmax(-1)
    torch.testing.assert_close(design.log_prob(design.enumerate_support()).T, log_softmax, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(design.mean, log_softmax.exp(), rtol=1e-11, atol=1e-14)
    first = design.log_prob(torch.eye(40, dtype=torch.float64)[0])
    ours, theirs = (torch.autograd.grad(f.sum(), logits)[0] for f in (first, logits.log_softmax(-1)[:, 0]))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_one_unit():
    for make in (ParetoSampling, GumbelTopK):
        for k in (0, 1):
            design = make(logits=torch.tensor([[0.3], [-2.0]]), k=k)
            assert torch.equal(design.sample(), torch.full((2, 1), float(k)))
            assert torch.equal(design.mean, design.sample()) and torch.equal(
                design.log_prob(design.mode), torch.zeros(2)
            )


def test_adjustments_approach_the_target():
    probs = ConditionalPoisson(logits=torch.linspace(-2, 2, 12, dtype=torch.float64), k=4).mean
    plain, analytic, exact = (
        (ParetoSampling(probs=probs, adjust=adjust)._inclusion - probs).abs().max()
        for adjust in (None, "analytic", "exact")
    )
    assert plain > 2 * analytic > 1e-4 and exact < 1e-11
    with pytest.raises(ValueError, match="`adjust`.*'exactly'"):
        ParetoSampling(probs=probs, adjust="exactly")


@for_each("dtype", [torch.float32, torch.float64])
@for_each("n, k, scale, temperature", [(2, 1, 1.0, 1), (10, 5, 3.0, 0.7), (10, 5, 100.0, 0.1), (3000, 40, 1.0, 1.0)])
def test_positions_in_one_loop(dtype, n, k, scale, temperature):
    """As from the log-odds, up to a shift, with their gradient, for which infinite logits do not count."""
    logits = scale * torch.randn(20, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    if n == 10:
        logits[::2, 3], logits[::3, 7] = math.inf, -math.inf
    logits.requires_grad_()
    design = ParetoSampling(logits=logits, k=k, temperature=temperature)
    weight = torch.randn(20, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight -= weight.masked_fill(logits.isinf(), 0.0).sum(-1, keepdim=True) / logits.isfinite().sum(-1, keepdim=True)
    results = []
    for found in (design._positions, adjusted(design._log_odds)):
        (gradient,) = torch.autograd.grad(found, logits, weight)
        finite = found.detach().where(logits.isfinite(), -torch.inf)
        results.append((found - finite.amax(-1, keepdim=True), gradient))
    accuracy = 8 * torch.finfo(dtype).eps * weight.abs().max() / temperature
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-14, atol=1e-13 / temperature)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=accuracy)


def test_positions_do_not_depend_on_other_rows():
    """Of float32 scores some of which are settled before others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 40, generator=generator) * 300 * torch.rand(64, 1, generator=generator)
    some = torch.randperm(64, generator=generator)[:32]
    found, of_some = (ParetoSampling(logits=rows, k=13)._positions for rows in (x, x[some]))
    assert torch.equal(found[some], of_some)


def test_gumbel_topk_from_probs_inverts_its_mean():
    logits = 2 * torch.randn(2, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = (logits - logits.mean(-1, keepdim=True)).requires_grad_()
    solved = GumbelTopK(probs=GumbelTopK(logits=logits, k=9).mean, k=9).logits
    torch.testing.assert_close(solved, logits, rtol=0, atol=1e-9)
    cotangent = torch.linspace(-1, 1, 30, dtype=torch.float64)
    (grad,) = torch.autograd.grad((solved * cotangent).sum(), logits)
    torch.testing.assert_close(grad, cotangent.expand(2, 30), rtol=0, atol=1e-8)


@pytest.mark.parametrize("make", [ParetoSampling, GumbelTopK])
@pytest.mark.slow
def test_long_row(make):
    torch.manual_seed(0)
    design = make(logits=3 * torch.randn(50_000), k=20)
    indices = design.sample_indices((4,))
    assert indices.shape == (4, 20) and (indices.diff(dim=-1) > 0).all()
    value = torch.zeros(4, 50_000).scatter_(-1, indices, 1)
    assert design.log_prob(value).isfinite().all()


@pytest.mark.interpreted
@pytest.mark.parametrize("make", [ParetoSampling, GumbelTopK])
def test_sample_indices_are_those_of_sample(make):
    design = make(logits=torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), k=4)
    torch.manual_seed(1)
    indices = design.sample_indices((8,))
    torch.manual_seed(1)
    assert torch.equal(torch.zeros(8, 3, 9).scatter_(-1, indices, 1), design.sample((8,)))


@pytest.mark.slow
def test_improbable_draws():
    """The far tail of the noise is drawn as it should be: the least of 2000 ranks, and the largest."""
    torch.manual_seed(0)
    weight = torch.cat((torch.full((1000,), 1.0), torch.full((1000,), 3.0)))
    share = 3 * GumbelTopK(logits=weight.log(), k=1).mean[0]
    drawn = GumbelTopK(logits=weight.log(), k=1).sample_indices((20_000,))
    gof.check_inclusion((drawn >= 1000).double(), 1000 * share[None])
    last = GumbelTopK(logits=weight.log(), k=1999)
    left_out = 1 - last.sample((20_000,))
    gof.check_inclusion(left_out[:, 1000:].sum(-1, keepdim=True), 1000 * (1 - last.mean[1000:1001].double()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cpu_backend"),
    list(zip(itertools.cycle([torch.float32, torch.float64]), BACKENDS, strict=False)),
    indirect=["cpu_backend"],
)
def test_goodness_of_fit(dtype, cpu_backend):
    """The designs closest to each, given the same inclusion probabilities, are told apart."""
    case = next(case for case in cases("pareto") if case.get("tags") == ["discriminating"])
    probs = tensor(case["lam"])
    designs = [
        ParetoSampling(probs=probs.to(dtype), adjust="exact"),
        ParetoSampling(probs=probs.to(dtype)),
        GumbelTopK(probs=probs.to(dtype)),
    ]
    support = ParetoSampling(probs=probs).enumerate_support()
    for design in designs:
        torch.manual_seed(0)
        pmf = design.log_prob(support.to(dtype)).double().exp()
        draws = design.sample((10**6,))
        gof.check_sampler(draws, support, pmf / pmf.sum())
        for other in (Sampford(probs=probs), ConditionalPoisson(probs=probs)):
            with pytest.raises(AssertionError, match="subsets"):
                gof.check_subsets(draws.double(), support, other.log_prob(support).exp())


@pytest.mark.parametrize("probs", [[0.999, 0.001], [0.95, 0.05], [0.0067, 0.9933, 3e-7, 1 - 3e-7]])
def test_analytic_adjustment_improves_on_none_where_few_units_are_undecided(probs):
    probs = torch.tensor(probs, dtype=torch.float64)
    errors = [(ParetoSampling(probs=probs, adjust=a).mean - probs).abs().max() for a in ("analytic", None)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("half", [50.0, 350.0, 400.0, 560.0])
def test_exact_positions_of_log_odds_that_no_probability_shows(half):
    """The positions of two units are plus and minus half of their distance."""
    logits = torch.tensor([2 * half, -1e17, 0.0], dtype=torch.float64)
    design = ParetoSampling(logits=logits, k=1, adjust="exact")
    assert design.sample().tolist() == [1.0, 0.0, 0.0]
    expected = torch.tensor([1.0, 0.0, math.exp(-half)], dtype=torch.float64)
    torch.testing.assert_close(design.mean, expected, rtol=1e-6, atol=0)
