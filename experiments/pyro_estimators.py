"""How close to the log evidence does each estimator bring the ELBO of the README's Pyro model?

    python experiments/pyro_estimators.py

Which three of eight inputs add up to the output?

    x ~ uniform over the 56 k-hot vectors    y ~ Normal(sum_i x_i inputs_i, 0.5), 50 rows

The guide is ConditionalPoisson, trained by Adam at a rate of 0.1. The rows differ in the estimator of the gradient:

    straight-through                    StraightThrough, TraceMeanField_ELBO with the exact divergence from the prior
    ReinMax                             the same with the second-order Jacobian
    score function, decaying baseline   the bare design, TraceGraph_ELBO with the baseline that the site asks for
    score function, leave-one-out       score_function on the log-likelihood of the model's trace, the exact divergence
    enumeration                         TraceEnum_ELBO, exact

The README takes one draw per step. Sixteen draws separate bias from noise, because only noise shrinks with their
number. The score function needs several draws, because the baseline of each is the mean of the others.

The gap is log p(y) less the ELBO of the guide, both summed over all 56 vectors. It is the divergence of the guide from
the posterior. A seed gives the data, those of the README for seed 0, and the draws. Milliseconds are the median CPU
time of a step.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer import SVI, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.elbo import ELBO
from torch import Tensor
from torch.distributions import kl_divergence

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import ConditionalPoisson, ReinMax, SamplingDesign, StraightThrough, score_function

N, K, CHOSEN, ROWS, NOISE = 8, 3, [2, 5, 7], 50, 0.5
LEARNING_RATE, DRAWS = 0.1, 16
EVALUATIONS = 50  # of the gap along the way
TIME = "ms per step"


class Problem(NamedTuple):
    """What is known: ``(ROWS, N)`` inputs and ``(ROWS,)`` sums of three of them."""

    inputs: Tensor
    seen: Tensor

    def model(self) -> None:
        x = pyro.sample("x", uniform())
        with pyro.plate("rows", ROWS):
            pyro.sample("y", dist.Normal((self.inputs * x).sum(-1), NOISE), obs=self.seen)

    def log_likelihood(self, x: Tensor) -> Tensor:
        """log p(y | x), ``(S,)``, of k-hot vectors ``(S, N)``, from a trace of the model."""
        given = poutine.condition(self.model, {"x": x.unsqueeze(-2)})  # vectors to the left of the plate
        trace = poutine.trace(given).get_trace()
        trace.compute_log_prob()
        return trace.nodes["y"]["log_prob"].sum(-1)

    def log_joint(self) -> tuple[Tensor, Tensor]:
        """All k-hot vectors ``(56, N)``, and log p(x, y) of each in float64."""
        x = uniform().enumerate_support()
        return x, self.log_likelihood(x).double() + uniform().log_prob(x)


def uniform() -> ConditionalPoisson:
    return ConditionalPoisson(logits=torch.zeros(N), k=K)


def make_problem(seed: int) -> Problem:
    inputs = torch.randn(ROWS, N, generator=torch.Generator().manual_seed(seed))
    return Problem(inputs, inputs[:, CHOSEN].sum(-1))


def learned() -> ConditionalPoisson:
    """The guide's design, made of Pyro's parameter."""
    return ConditionalPoisson(logits=pyro.param("logits", torch.zeros(N)), k=K)


def gap(problem: Problem) -> float:
    """log p(y) - ELBO of the guide as it is."""
    x, log_joint = problem.log_joint()
    log_guide = ConditionalPoisson(logits=learned().logits.detach().double(), k=K).log_prob(x.double())
    return (log_guide.exp() * (log_guide - log_joint)).sum().item() + log_joint.logsumexp(0).item()


Step = Callable[[], object]


def svi(
    problem: Problem,
    site: Callable[[SamplingDesign], TorchDistribution],
    elbo: type[ELBO],
    draws: int = 1,
    infer: dict[str, Any] | None = None,
) -> Step:
    """A step of Pyro's SVI; the argument makes the site of the guide from its design."""

    def guide() -> None:
        pyro.sample("x", site(learned()), infer=infer or {})

    several = {"num_particles": draws, "vectorize_particles": True} if draws > 1 else {}
    optimizer = pyro.optim.Adam({"lr": LEARNING_RATE})
    return SVI(problem.model, guide, optimizer, elbo(max_plate_nesting=1, **several)).step


def leave_one_out(problem: Problem, draws: int) -> Step:
    """A step of the loop in the Pyro recipes, because Pyro has no such ELBO."""
    optimizer = torch.optim.Adam([learned().logits], lr=LEARNING_RATE)

    def step() -> None:
        design = learned()
        expected = score_function(design, lambda x: -problem.log_likelihood(x), draws, baseline="leave_one_out")
        optimizer.zero_grad()
        (expected + kl_divergence(design, uniform())).backward()
        optimizer.step()

    return step


def bare(design: SamplingDesign) -> SamplingDesign:
    return design


FIRST, SECOND, DECAYING = "straight-through", "ReinMax", "score function, decaying baseline"
LEAVE_ONE_OUT, EXACT = "score function, leave-one-out", "enumeration"
SEVERAL = f", {DRAWS} draws"
METHODS: dict[str, Callable[[Problem], Step]] = {
    FIRST: partial(svi, site=StraightThrough, elbo=TraceMeanField_ELBO),
    FIRST + SEVERAL: partial(svi, site=StraightThrough, elbo=TraceMeanField_ELBO, draws=DRAWS),
    SECOND: partial(svi, site=ReinMax, elbo=TraceMeanField_ELBO),
    SECOND + SEVERAL: partial(svi, site=ReinMax, elbo=TraceMeanField_ELBO, draws=DRAWS),
    DECAYING + SEVERAL: partial(
        svi, site=bare, elbo=TraceGraph_ELBO, draws=DRAWS, infer={"baseline": {"use_decaying_avg_baseline": True}}
    ),
    LEAVE_ONE_OUT + SEVERAL: partial(leave_one_out, draws=DRAWS),
    EXACT: partial(svi, site=bare, elbo=TraceEnum_ELBO, infer={"enumerate": "parallel"}),
}


class Fit(NamedTuple):
    """The gap by step, and milliseconds of CPU time for a step."""

    curve: dict[int, float]
    milliseconds: float


def fit(problem: Problem, method: Callable[[Problem], Step], args: Namespace, tick: Callable[[], object]) -> Fit:
    pyro.clear_param_store()
    take_step = method(problem)
    curve, seconds = {0: gap(problem)}, []
    for step in range(1, args.steps + 1):
        start = time.process_time()
        take_step()
        seconds.append(time.process_time() - start)
        if step % max(1, args.steps // EVALUATIONS) == 0:
            curve[step] = gap(problem)
        tick()
    return Fit(curve, 1e3 * float(np.median(seconds)))


def draw_figure(fits: dict[str, Fit]) -> Figure:
    """The gap by step, of the first seed."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for row, fitted in fits.items():
        axis.plot(fitted.curve.keys(), fitted.curve.values(), label=row)
    axis.set(yscale="log", xlabel="step", ylabel="log-evidence less ELBO, nats", title="the README's data")
    figure.legend(loc="outside right upper")
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of the optimiser (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 10})
    if args.steps % 5:
        parser.error(f"--steps must be a multiple of 5, but is {args.steps}")

    early, late = (f"gap after {steps} steps, nats" for steps in (args.steps // 5, args.steps))
    table = Table(f"{K} of {N} inputs", {early: ".2f", late: ".2f", TIME: ".1f"})
    first: dict[str, Fit] = {}
    for seed, progress in each_seed(args, steps=len(METHODS) * args.steps):
        problem, fits = make_problem(seed), {}
        for row, method in METHODS.items():
            torch.manual_seed(seed)
            fitted = fits[row] = fit(problem, method, args, progress.update)
            values = fitted.curve[args.steps // 5], fitted.curve[args.steps], fitted.milliseconds
            table.add(row, dict(zip(table.columns, values, strict=True)))
        first = first or fits
    for column in (early, late):
        table.find("ReinMax is nearer than straight-through", SECOND, FIRST, column, lower=True)
    table.find("more draws bring straight-through nearer", FIRST + SEVERAL, FIRST, late, lower=True)
    table.find("leave-one-out is nearer than ReinMax of as many draws", LEAVE_ONE_OUT + SEVERAL, SECOND + SEVERAL, late,
               lower=True)  # fmt: skip
    table.find("leave-one-out is nearer than the decaying baseline", LEAVE_ONE_OUT + SEVERAL, DECAYING + SEVERAL, late,
               lower=True)  # fmt: skip
    table.find("enumeration is nearer than leave-one-out", EXACT, LEAVE_ONE_OUT + SEVERAL, late, lower=True)
    table.save(args, "pyro_estimators")
    save_figure(draw_figure(first), args, "pyro_estimators")
    return table


if __name__ == "__main__":
    main()
