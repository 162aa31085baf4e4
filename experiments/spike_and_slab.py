"""Bayesian variable selection: which k of ten variables predict diabetes? Variational inference and the exact answer.

    python experiments/spike_and_slab.py              exactly 4 variables
    python experiments/spike_and_slab.py --k 4.5      4 or 5 of them, half and half a priori

A linear regression on scikit-learn's diabetes data, standardised. x says which coefficients are not zero:

    x ~ uniform over the k-hot vectors    b_i ~ Normal(0, slab)    y | x, b ~ Normal(sum_i x_i b_i z_i, noise)

With the coefficients integrated out, log p(y | x) is a rational function of x, so that only x is left to infer. The
guide is ConditionalPoisson, which has one parameter per variable; if k is not an integer, it is a PhantomUnit, whose
mean size is learned too. There are only 210 ways to choose 4 of 10, so everything is known exactly: the posterior, the
ELBO of any guide, and the best guide. The rows differ only in the estimator of the gradient:

    enumeration               TraceEnum_ELBO, exact
    score function            Trace_ELBO on the bare design
    ..., baseline             TraceGraph_ELBO with the decaying average that the site asks for
    straight-through          StraightThrough, TraceMeanField_ELBO with the exact divergence from the prior
    ReinMax                   the same with the second-order Jacobian

This repeats no paper. The question is that of Liu et al. (2023), who introduced ReinMax: how far from the best guide
does each estimator end, given the same optimiser, steps and draws per step?

Protocol: a seed is a random half of the patients, so each seed has a different posterior. "ELBO gap" is the distance of
    the
final guide from the best one, which is found by following the exact gradient until it vanishes. "Probability error" is
the largest error of an inclusion probability; even the best guide has one.
"""

import math
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from pyro.distributions import TorchDistribution
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.elbo import ELBO
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from torch import Tensor

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import ConditionalPoisson, PhantomUnit, ReinMax, SamplingDesign, StraightThrough, sigmoid_topk

VARIABLES = 10
SLAB = 0.3  # standard deviation of a coefficient, in standard deviations of y per one of its variable
LEARNING_RATE = 0.1
DRAWS = 8  # per step
RIDGE = 1e-6  # keeps the logits of the best guide from drifting
EVALUATIONS = 30  # of the exact ELBO along the way
EXACT, SCORE, BASELINE = "enumeration", "score function", "score function, baseline"
FIRST, SECOND, BEST = "straight-through", "ReinMax", "best guide"
GAP, ERROR, SECONDS = "ELBO gap, nats", "probability error", "CPU seconds"


class Problem(NamedTuple):
    """What log p(y | x) depends on, and the size of x."""

    gram: Tensor  # (n, n), of the variables, over the variance of the noise
    moments: Tensor  # (n,), of variables and y, over the same
    constant: float  # log p(y | x = 0)
    k: float

    def log_evidence(self, x: Tensor) -> Tensor:
        """log p(y | x), ``(...,)``, of k-hot vectors ``(..., n)``, continued to all of [0, 1]^n."""
        n = x.shape[-1]
        scaled = x.unsqueeze(-1) * SLAB**2
        system = torch.eye(n, dtype=x.dtype) + scaled * self.gram
        fit = (self.moments * torch.linalg.solve(system, scaled * self.moments.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return self.constant + (fit - torch.linalg.slogdet(system).logabsdet) / 2

    def prior(self) -> SamplingDesign:
        n = len(self.moments)
        if self.k == int(self.k):
            return ConditionalPoisson(logits=self.moments.new_zeros(n), k=int(self.k))
        return PhantomUnit(ConditionalPoisson, probs=self.moments.new_full((n,), self.k / n))

    def posterior(self, logits: Tensor, extra: Tensor) -> SamplingDesign:
        """The guide's design; ``extra`` is the log-odds of the larger size, if there are two."""
        if self.k == int(self.k):
            return ConditionalPoisson(logits=logits, k=int(self.k))
        size = math.floor(self.k) + torch.sigmoid(extra)
        return PhantomUnit(ConditionalPoisson, probs=sigmoid_topk(logits, size))

    def first_parameters(self) -> dict[str, Tensor]:
        """Those of the posterior at which it is the prior."""
        share = self.moments.new_tensor(self.k - math.floor(self.k))
        return {"logits": torch.zeros_like(self.moments), "extra": torch.logit(share, eps=1e-3)}

    def elbo(self, design: SamplingDesign) -> Tensor:
        x = design.enumerate_support()
        log_q = design.log_prob(x)
        return (log_q.exp() * (self.log_evidence(x) + self.prior().log_prob(x) - log_q)).sum()

    def exact_inclusion(self) -> Tensor:
        x = self.prior().enumerate_support()
        return torch.softmax(self.log_evidence(x) + self.prior().log_prob(x), 0) @ x


def load_problem(seed: int, k: float) -> Problem:
    data = load_diabetes()
    chosen = np.random.default_rng(seed).permutation(len(data.target))[: len(data.target) // 2]
    z, y = data.data[chosen], data.target[chosen]
    z, y = (z - z.mean(0)) / z.std(0), (y - y.mean()) / y.std()
    residuals = y - LinearRegression().fit(z, y).predict(z)
    noise = float(residuals @ residuals) / (len(y) - z.shape[1] - 1)  # variance, as with all variables
    constant = -float(y @ y) / (2 * noise) - len(y) / 2 * math.log(2 * math.pi * noise)
    return Problem(torch.from_numpy(z.T @ z / noise), torch.from_numpy(z.T @ y / noise), constant, k)


class Estimator(NamedTuple):
    """How the site of the guide is made from its design, its hints, and the ELBO to train with."""

    site: Callable[[SamplingDesign], TorchDistribution]
    elbo: type[ELBO]
    infer: dict[str, Any]
    draws: int = DRAWS


def bare(design: SamplingDesign) -> SamplingDesign:
    return design


def second_order(design: SamplingDesign) -> ReinMax:
    phantom = isinstance(design, PhantomUnit)  # whose probabilities are made by sigmoid_topk, which it cannot know
    return ReinMax(design, relaxation=sigmoid_topk if phantom else None)


ESTIMATORS = {
    EXACT: Estimator(bare, TraceEnum_ELBO, {"enumerate": "parallel"}, draws=1),
    SCORE: Estimator(bare, Trace_ELBO, {}),
    BASELINE: Estimator(bare, TraceGraph_ELBO, {"baseline": {"use_decaying_avg_baseline": True}}),
    FIRST: Estimator(StraightThrough, TraceMeanField_ELBO, {}),
    SECOND: Estimator(second_order, TraceMeanField_ELBO, {}),
}


class Fit(NamedTuple):
    """The guide at the end, and its exact ELBO by step."""

    design: SamplingDesign
    curve: list[tuple[int, float]]
    seconds: float


def fit(problem: Problem, estimator: Estimator, steps: int, tick: Callable[[], object]) -> Fit:
    """Stochastic variational inference."""
    pyro.clear_param_store()
    for name, value in problem.first_parameters().items():
        pyro.param(name, value)

    def learned() -> SamplingDesign:
        return problem.posterior(pyro.param("logits").detach(), pyro.param("extra").detach())

    def model() -> None:
        x = pyro.sample("x", problem.prior())
        pyro.factor("evidence", problem.log_evidence(x))

    def guide() -> None:
        design = problem.posterior(pyro.param("logits"), pyro.param("extra"))
        pyro.sample("x", estimator.site(design), infer=estimator.infer)

    several = {"num_particles": estimator.draws, "vectorize_particles": True} if estimator.draws > 1 else {}
    elbo = estimator.elbo(max_plate_nesting=0, **several)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": LEARNING_RATE}), elbo)
    curve, seconds = [], 0.0
    for step in range(steps + 1):
        if step % max(1, steps // EVALUATIONS) == 0:
            curve.append((step, problem.elbo(learned()).item()))
        if step < steps:
            start = time.process_time()
            svi.step()
            seconds += time.process_time() - start
            tick()
    return Fit(learned(), curve, seconds)


def best_guide(problem: Problem) -> SamplingDesign:
    """The guide with the largest ELBO, by quasi-Newton steps that start at the exact inclusion probabilities."""
    first = problem.first_parameters() | {"logits": torch.logit(problem.exact_inclusion(), eps=1e-3)}
    parameters = [value.requires_grad_() for value in first.values()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        # Adding a constant to all logits changes nothing, and the logit of a nearly certain variable matters little.
        loss = RIDGE * parameters[0].square().sum() - problem.elbo(problem.posterior(*parameters))
        loss.backward()
        return loss

    optimizer.step(closure)
    return problem.posterior(*(value.detach() for value in parameters))


def run_seed(seed: int, args: Namespace, table: Table, tick: Callable[[], object]) -> tuple[Tensor, dict[str, Fit]]:
    """Adds a row for each estimator and for the best guide; returns the exact inclusion probabilities and the fits."""
    problem = load_problem(seed, args.k)
    exact, start = problem.exact_inclusion(), time.process_time()
    best = best_guide(problem)
    highest, seconds = problem.elbo(best).item(), time.process_time() - start
    fits = {}
    for row, estimator in ESTIMATORS.items():
        pyro.set_rng_seed(seed)
        fitted = fit(problem, estimator, args.steps, tick)
        gap = highest - problem.elbo(fitted.design).item()
        error = (fitted.design.mean - exact).abs().max().item()
        table.add(row, {GAP: gap, ERROR: error, SECONDS: fitted.seconds})
        fits[row] = fitted._replace(curve=[(step, highest - elbo) for step, elbo in fitted.curve])
    table.add(BEST, {GAP: 0.0, ERROR: (best.mean - exact).abs().max().item(), SECONDS: seconds})
    return exact, fits


def draw_figure(exact: Tensor, fits: dict[str, Fit], k: float) -> Figure:
    """Inclusion probabilities at the end against the exact ones, and the gap of the ELBO by step; of the first seed."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = load_diabetes().feature_names
    order = exact.argsort(descending=True)
    left.bar(range(len(names)), exact[order].numpy(), color="0.85", label="exact posterior")
    for place, (row, fitted) in enumerate(fits.items()):
        offset = 0.14 * (place - len(fits) // 2)
        left.plot(np.arange(len(names)) + offset, fitted.design.mean[order].numpy(), "o", markersize=4, label=row)
        steps, gaps = zip(*fitted.curve, strict=True)
        right.plot(steps, np.maximum(gaps, 1e-6), label=row)
    left.set_xticks(range(len(names)), [names[i] for i in order.tolist()])
    left.set(ylabel="inclusion probability", title=f"{k:g} of {len(names)} variables")
    left.legend()
    right.set(yscale="log", xlabel="step", title="exact ELBO: nats below that of the best guide")
    return figure


def number_of_variables(text: str) -> float:
    if not 1 <= float(text) <= VARIABLES - 1:
        raise ArgumentTypeError(f"must lie between 1 and {VARIABLES - 1}, but is {text}")
    return float(text)


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--k", type=number_of_variables, default=4.0, help="variables chosen; default: %(default)g")
    parser.add_argument("--steps", type=int, default=200, help="of the optimiser (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 10})

    formats = {GAP: ".4f", ERROR: ".3f", SECONDS: ".1f"}
    table = Table(f"{args.k:g} of the {VARIABLES} variables of the diabetes data", formats, FIRST)
    first = None
    for seed, progress in each_seed(args, steps=len(ESTIMATORS) * args.steps):
        result = run_seed(seed, args, table, progress.update)
        first = first or result
    table.find("the second order ends nearer to the best guide than straight-through", SECOND, FIRST, lower=True)
    table.find("straight-through ends nearer than the score function with baseline", FIRST, BASELINE, lower=True)
    table.find("the baseline helps the score function", BASELINE, SCORE, lower=True)
    table.save(args, "spike_and_slab")
    save_figure(draw_figure(*first, args.k), args, "spike_and_slab")
    return table


if __name__ == "__main__":
    main()
