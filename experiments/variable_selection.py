"""Variable selection with a likelihood written in two ways that agree on every k-hot x: which estimators differ?

    python experiments/variable_selection.py

Three of twelve correlated covariates X determine y. The vector x says which; the coefficients are integrated out:

    x ~ uniform over the k-hot vectors    b_i ~ Normal(0, 1)    y ~ Normal(sum_i x_i b_i X_i, noise)
    so that y | x ~ Normal(0, C(x) + noise² I), with C(x) the covariance of the sum

On k-hot x two ways to write C give the same matrix. A pathwise estimator differentiates what lies between:

    squared   A = X * x, C = A Aᵀ: x enters as x², whose slope at 0 is 0, so that an excluded covariate gets no signal
    linear    C = X diag(x) Xᵀ

The guide is ConditionalPoisson, trained on E[log p(y | x)] by the estimator in question and on its exact divergence
from the prior. Each estimator takes 4 draws per step.

There are 220 ways to choose 3 of 12, so everything is known exactly. "ELBO gap" is log p(y) less the ELBO at the end:
the divergence of the guide from the posterior. "Probability error" is the largest error of an inclusion probability.
"Exact posterior" is the answer itself, from log p(y | x) of all vectors; "best guide" is where the exact gradient
vanishes. Milliseconds are the median CPU time of a step: forward, backward and optimiser.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import (
    ConditionalPoisson,
    MovingAverage,
    SamplingDesign,
    enumerated,
    reinmax,
    score_function,
    straight_through,
    unordered_set,
)

N, K = 12, 3
CORRELATION, NOISE, ROWS = 0.7, 2.0, 40
LEARNING_RATE, DRAWS = 0.05, 4
RIDGE = 1e-6  # keeps the logits of the best guide from drifting
GAP, ERROR, TIME = "ELBO gap, nats", "probability error", "ms per step"
POSTERIOR, BEST = "exact posterior", "best guide"

Loss = Callable[[Tensor], Tensor]


def squared(covariates: Tensor, x: Tensor) -> Tensor:
    a = covariates * x.unsqueeze(-2)
    return a @ a.mT


def linear(covariates: Tensor, x: Tensor) -> Tensor:
    return (covariates * x.unsqueeze(-2)) @ covariates.mT


FORMS = {"squared": squared, "linear": linear}


class Problem(NamedTuple):
    """Covariates ``(rows, n)`` and response ``(rows,)``."""

    covariates: Tensor
    response: Tensor

    def log_evidence(self, x: Tensor, form: Callable[[Tensor, Tensor], Tensor] = linear) -> Tensor:
        """log p(y | x), ``(...,)``, of vectors ``(..., n)``."""
        noise = NOISE**2 * torch.eye(len(self.response), dtype=x.dtype)
        return MultivariateNormal(torch.zeros_like(self.response), form(self.covariates, x) + noise).log_prob(
            self.response
        )

    def posterior(self) -> tuple[Tensor, Tensor, Tensor]:
        """All k-hot vectors ``(220, n)``, the log-probability of each given y, and log p(y)."""
        prior = uniform(self.covariates.shape[-1], K)
        x = prior.enumerate_support()
        log_joint = prior.log_prob(x) + self.log_evidence(x)
        return x, log_joint.log_softmax(0), log_joint.logsumexp(0)


def uniform(n: int, k: int) -> ConditionalPoisson:
    return ConditionalPoisson(logits=torch.zeros(n, dtype=torch.float64), k=k)


def make_problem(seed: int, n: int = N, k: int = K) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    covariates = CORRELATION**0.5 * draw(ROWS, 1) + (1 - CORRELATION) ** 0.5 * draw(ROWS, n)
    chosen = torch.randperm(n, generator=generator)[:k]
    return Problem(covariates, covariates[:, chosen] @ draw(k) + NOISE * draw(ROWS))


class Method(NamedTuple):
    """An estimator, which may have a state, and its number of draws."""

    make_estimator: Callable[[], Callable[[SamplingDesign, Loss, int], Tensor]]
    draws: int = DRAWS


FIRST, SECOND = "straight-through", "ReinMax"
DECAYING, LEAVE_ONE_OUT = "score function, decaying baseline", "score function, leave-one-out"
UNORDERED, EXACT = "unordered set", "enumeration"
METHODS = {
    FIRST: Method(lambda: straight_through),
    SECOND: Method(lambda: reinmax),
    DECAYING: Method(lambda: partial(score_function, baseline=MovingAverage(0.9))),
    LEAVE_ONE_OUT: Method(lambda: partial(score_function, baseline="leave_one_out")),
    UNORDERED: Method(lambda: unordered_set),
    EXACT: Method(lambda: enumerated, draws=1),
}


def row_name(method: str, form: str) -> str:
    return f"{method}: {form}"


class Fit(NamedTuple):
    """The guide at the end, its gap by step, and milliseconds of CPU time for a step."""

    design: SamplingDesign
    curve: list[tuple[int, float]]
    milliseconds: float


def gap(design: SamplingDesign, problem: Problem) -> float:
    """log p(y) - ELBO, which is the divergence of the guide from the posterior."""
    x, log_posterior, _ = problem.posterior()
    log_guide = design.log_prob(x)
    return (log_guide.exp() * (log_guide - log_posterior)).sum().item()


def fit(problem: Problem, method: Method, form: str, args: Namespace, tick: Callable[[], object]) -> Fit:
    prior, logits = uniform(N, K), torch.zeros(N, dtype=torch.float64, requires_grad=True)
    estimator, optimizer = method.make_estimator(), torch.optim.Adam([logits], lr=LEARNING_RATE)
    curve, seconds = [], []
    for step in range(args.steps + 1):
        if step % max(1, args.steps // 30) == 0:
            curve.append((step, gap(ConditionalPoisson(logits=logits.detach(), k=K), problem)))
        if step == args.steps:
            break
        start = time.process_time()
        design = ConditionalPoisson(logits=logits, k=K)
        expected = estimator(design, lambda x: -problem.log_evidence(x, FORMS[form]), method.draws)
        optimizer.zero_grad()
        (expected + kl_divergence(design, prior)).backward()
        optimizer.step()
        seconds.append(time.process_time() - start)
        tick()
    return Fit(ConditionalPoisson(logits=logits.detach(), k=K), curve, 1e3 * float(np.median(seconds)))


def best_guide(problem: Problem) -> ConditionalPoisson:
    """The conditional Poisson design nearest to the posterior, by quasi-Newton steps from its probabilities."""
    x, log_posterior, _ = problem.posterior()
    logits = torch.logit(log_posterior.exp() @ x, eps=1e-3).requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        log_guide = ConditionalPoisson(logits=logits, k=K).log_prob(x)
        loss = (log_guide.exp() * (log_guide - log_posterior)).sum() + RIDGE * logits.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return ConditionalPoisson(logits=logits.detach(), k=K)


def run_seed(seed: int, args: Namespace, table: Table, tick: Callable[[], object]) -> tuple[Tensor, dict[str, Fit]]:
    """Adds a row for each method in either form and for the two answers; returns exact probabilities and the fits."""
    problem = make_problem(seed)
    fits = {}
    x, log_posterior, _ = problem.posterior()
    exact, start = log_posterior.exp() @ x, time.process_time()
    problem.posterior()
    seconds = time.process_time() - start
    for name, method in METHODS.items():
        for form in FORMS:
            torch.manual_seed(seed)
            fitted = fits[row_name(name, form)] = fit(problem, method, form, args, tick)
            error = (fitted.design.mean - exact).abs().max().item()
            table.add(row_name(name, form), {GAP: gap(fitted.design, problem), ERROR: error, TIME: fitted.milliseconds})
    best = best_guide(problem)
    table.add(BEST, {GAP: gap(best, problem), ERROR: (best.mean - exact).abs().max().item(), TIME: float("nan")})
    table.add(POSTERIOR, {GAP: 0.0, ERROR: 0.0, TIME: 1e3 * seconds})
    return exact, fits


def draw_figure(exact: Tensor, fits: dict[str, Fit]) -> Figure:
    """Inclusion probabilities beside the exact ones, and the gap by step, in either form; of the first seed."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    order = exact.argsort(descending=True)
    for form, (above, below) in zip(FORMS, figure.subplots(2, 2, sharey="row").T, strict=True):
        above.bar(range(N), exact[order].numpy(), color="0.85", label=POSTERIOR)
        for place, name in enumerate(METHODS):
            fitted = fits[row_name(name, form)]
            offset = 0.1 * (place - len(METHODS) / 2)
            above.plot(np.arange(N) + offset, fitted.design.mean[order].numpy(), "o", markersize=3, label=name)
            below.plot(*zip(*fitted.curve, strict=True), label=name)
        above.set(title=f"{form} in x", ylabel="inclusion probability", xlabel="covariate, likeliest first")
        below.set(yscale="log", xlabel="step", ylabel=GAP)
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of the optimiser (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 3})

    table = Table(f"{K} of {N} covariates, {ROWS} rows", {GAP: ".3f", ERROR: ".3f", TIME: ".1f"})
    first = None
    for seed, progress in each_seed(args, steps=len(FORMS) * len(METHODS) * args.steps):
        result = run_seed(seed, args, table, progress.update)
        first = first or result
    name = {method: row_name(method, "linear") for method in METHODS}
    for method in (FIRST, SECOND):
        table.find(f"{method}: the linear form is nearer to the posterior", name[method], row_name(method, "squared"),
                   lower=True)  # fmt: skip
    table.find("ReinMax is nearer than straight-through, both linear", name[SECOND], name[FIRST], lower=True)
    table.find("leave-one-out is nearer than straight-through, linear", name[LEAVE_ONE_OUT], name[FIRST], lower=True)
    table.save(args, "variable_selection")
    save_figure(draw_figure(*first), args, "variable_selection")
    return table


if __name__ == "__main__":
    main()
