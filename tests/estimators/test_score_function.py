"""The score function: unbiased by full enumeration with every baseline, and equal to what it is called elsewhere."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO

from khot import ConditionalPoisson, MovingAverage, score_function
from khot.estimators._score_function import _baseline_values, _surrogate
from tests.estimators.enumeration import LOGITS, SCORED, WEIGHT, assert_same, derivatives, exact, leaves, loss, tuples
from tests.loops import for_each


def remembered(value):
    baseline = MovingAverage()
    baseline.update(torch.tensor([value]))
    return baseline


BASELINES = {
    "none": "none",
    "moving_average": "moving_average",
    "leave_one_out": "leave_one_out",
    "object": remembered(1.7),
    "function": lambda design: design.mean[..., 0].square(),
}


def check_unbiased(make, surrogate, num_samples=2):
    """Value, gradients and second derivatives, summed over all tuples of draws."""
    logits, weight = leaves()
    design, f = make(logits), loss(weight)
    values, probability = tuples(design, num_samples)
    expected = (probability * surrogate(design.expand((len(probability),)), values, f(values))).sum()
    truth = exact(design, f)
    torch.testing.assert_close(expected, truth, rtol=0, atol=1e-10)
    assert_same(derivatives(expected, (logits, weight)), derivatives(truth, (logits, weight)))


@for_each("baseline", BASELINES.values())
@for_each("make", SCORED.values())
def test_unbiased(make, baseline):
    check_unbiased(make, lambda *draws: _surrogate(*draws, baseline))


@for_each("baseline", ["none", "moving_average"])
def test_unbiased_with_other_numbers_of_draws(baseline):
    for num_samples in (1, 3):
        check_unbiased(SCORED["conditional_poisson"], lambda *draws: _surrogate(*draws, baseline), num_samples)


def self_inclusive(design, values, losses):
    """The published fault: the mean that a loss is compared with contains it."""
    log_prob = design.log_prob(values)
    return (losses + (losses - losses.mean(0)).detach() * (log_prob - log_prob.detach())).mean(0)


def test_self_inclusive_baseline_is_found_out():
    with pytest.raises(AssertionError):
        check_unbiased(SCORED["conditional_poisson"], self_inclusive)
    logits, f = LOGITS.clone().requires_grad_(), loss(WEIGHT)
    design = ConditionalPoisson(logits=logits, k=2)
    values, probability = tuples(design, 2)
    expected = (probability * self_inclusive(design.expand((36,)), values, f(values))).sum()
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (truth,) = torch.autograd.grad(exact(design, f), logits)
    torch.testing.assert_close(gradient, truth / 2, rtol=0, atol=1e-10)  # (S - 1) / S


def test_constants_in_the_loss():
    """They change no expected gradient, and with the leave-one-out baseline not even a single estimate."""
    logits = LOGITS.clone().requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2)
    values, probability = tuples(design, 2)
    losses, batch = loss(WEIGHT)(values), design.expand((36,))
    for baseline in ("none", "moving_average", "leave_one_out"):
        change = _surrogate(batch, values, losses + 5, baseline) - _surrogate(batch, values, losses, baseline)
        (expected,) = torch.autograd.grad(probability @ change, logits, retain_graph=True)
        torch.testing.assert_close(expected, torch.zeros(4).double(), rtol=0, atol=1e-10)
        (single,) = torch.autograd.grad(change[7], logits, retain_graph=True)
        assert (single.abs().max() < 1e-10) == (baseline == "leave_one_out")


def test_baselines_are_the_means_that_they_are_documented_as():
    losses = torch.tensor([[1.0, 10.0], [3.0, 20.0], [8.0, -30.0]], dtype=torch.float64)
    before = [[0.0, 0.0], [1.0, 10.0], [2.0, 15.0]]
    others = [[5.5, -5.0], [4.5, -10.0], [2.0, 15.0]]
    for name, expected in (("moving_average", before), ("leave_one_out", others)):
        assert _baseline_values(None, losses, name).tolist() == expected
    assert _baseline_values(None, losses, "none") == 0


def test_is_reinforce_of_the_categorical_for_one_of_n():
    logits = LOGITS.clone().requires_grad_()
    values = torch.eye(4, dtype=torch.float64)[[2, 0, 2, 3]]
    losses = loss(WEIGHT)(values)
    for baseline in ("none", "leave_one_out"):
        gradients = [
            torch.autograd.grad(_surrogate(design, values, losses, baseline), logits)[0]
            for design in (ConditionalPoisson(logits=logits, k=1), dist.OneHotCategorical(logits=logits))
        ]
        torch.testing.assert_close(*gradients)
    weight = (losses.detach()[:, None] * (values - torch.softmax(LOGITS, 0))).mean(0)
    torch.testing.assert_close(
        torch.autograd.grad(_surrogate(dist.OneHotCategorical(logits=logits), values, losses, "none"), logits)[0],
        weight,
    )


def test_is_sfess_on_conditional_poisson():
    """SFESS: the mean of the loss times the score, which is x minus the inclusion probabilities."""
    logits = LOGITS.clone().requires_grad_()
    design = ConditionalPoisson(logits=logits, k=2)
    torch.manual_seed(0)
    values, losses = design.sample((6,)), []
    torch.manual_seed(0)
    surrogate = score_function(design, lambda x: losses.append(loss(WEIGHT)(x)) or losses[0], num_samples=6)
    torch.testing.assert_close(surrogate, losses[0].mean())
    (gradient,) = torch.autograd.grad(surrogate, logits)
    support = design.enumerate_support()
    mean = torch.softmax(support @ LOGITS, 0) @ support
    torch.testing.assert_close(gradient, (losses[0][:, None] * (values - mean)).mean(0))


def test_moving_average_remembers():
    baseline, design = MovingAverage(decay=0.9), ConditionalPoisson(logits=torch.zeros(3, 4), k=2)
    seen = []
    for loss_value in (4.0, 2.0, -1.0):
        score_function(design, lambda x, c=loss_value: x.new_full(x.shape[:-1], c), 5, baseline=baseline)
        seen.append(loss_value)
        weights = torch.tensor([0.9 ** (len(seen) - 1 - i) for i in range(len(seen))])
        torch.testing.assert_close(baseline(design), (weights * torch.tensor(seen)).sum() / weights.sum())
    with pytest.raises(ValueError, match="keys \\['logits'\\]"):
        baseline.load_state_dict({"logits": torch.zeros(4)})
    before = baseline.mean.clone()
    score_function(ConditionalPoisson(logits=torch.zeros(0, 4), k=2), lambda x: x.sum(-1), baseline=baseline)
    assert torch.equal(baseline.mean, before)  # no losses, nothing to remember
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match="`decay` must satisfy"):
            MovingAverage(decay)


def test_baseline_of_a_call_is_from_before_it():
    """The first call with a fresh MovingAverage is the one without baseline, and the next is not."""
    gradients = []
    for baseline in ("none", shared := MovingAverage(), shared):
        logits = LOGITS.clone().requires_grad_()
        torch.manual_seed(0)
        surrogate = score_function(ConditionalPoisson(logits=logits, k=2), loss(WEIGHT), 3, baseline=baseline)
        gradients += torch.autograd.grad(surrogate, logits)
    assert torch.equal(gradients[0], gradients[1]) and not torch.allclose(gradients[0], gradients[2])


def test_baseline_errors():
    design = ConditionalPoisson(logits=torch.zeros(3, 4), k=2)
    with pytest.raises(ValueError, match="`num_samples` must be at least 2 with baseline='leave_one_out', but got 1"):
        score_function(design, lambda x: x.sum(-1), baseline="leave_one_out")
    for wrong in ("mean", None, torch.zeros(3)):
        with pytest.raises(ValueError, match="`baseline` must be a function of the design or one of"):
            score_function(design, lambda x: x.sum(-1), baseline=wrong)
    with pytest.raises(ValueError, match=r"`baseline\(design\)` must broadcast .*\(3,\), but got shape \(2,\)"):
        score_function(design, lambda x: x.sum(-1), baseline=lambda design: torch.zeros(2))
    with pytest.raises(TypeError, match="`baseline` must return a number or a tensor, but returned str"):
        score_function(design, lambda x: x.sum(-1), baseline=lambda design: "none")


@pytest.mark.slow
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceGraph_ELBO])
def test_pyro_sites_with_baselines(elbo):
    """A bare design is a score-function site to Pyro; TraceGraph_ELBO subtracts the baseline that the site names."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    best = torch.tensor([0.0, 2.0, -1.0, 1.5])

    def model():
        x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
        pyro.factor("gain", 5 * x @ best)

    def guide():
        logits = pyro.param("logits", lambda: torch.zeros(4))
        pyro.sample(
            "x", ConditionalPoisson(logits=logits, k=2), infer={"baseline": {"use_decaying_avg_baseline": True}}
        )

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo(num_particles=4))
    for _ in range(100):
        svi.step()
    averages = [name for name in pyro.get_param_store() if "baseline" in name]
    assert bool(averages) == (elbo is TraceGraph_ELBO)
    mean = ConditionalPoisson(logits=pyro.param("logits").detach(), k=2).mean
    assert set(mean.topk(2).indices.tolist()) == {1, 3}
    pyro.clear_param_store()
