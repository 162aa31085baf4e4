"""Estimates a population total from k of n units under every sampling design, and compares theory with simulation.

    python experiments/horvitz_thompson.py --units 60 --k 12

The population is generated: towns along a road with known sizes s and an unknown y. It is roughly proportional to s,
by a factor that drifts along the road. Units are drawn with probabilities pi proportional to s (at most 1). For a
sample x the Horvitz-Thompson estimator of the total of y is

    T(x) = sum_i x_i y_i / pi_i        unbiased, whatever the design

Its variance depends on the pairs, pi_ij = E[x_i x_j]. In the form of Sen, Yates and Grundy, for designs of fixed size,

    V = sum_{i<j} (pi_i pi_j - pi_ij) (y_i / pi_i - y_j / pi_j)^2

It is estimated from a sample by the sum over the pairs that were drawn, with each term divided by pi_ij. This has no
bias if all pi_ij > 0. Each seed is a different population. The table gives, for each design, the bias of the simulated
T in its standard errors, the standard deviation of T in % of the total, by theory (`pairwise_inclusion`) and by
simulation, the relative bias of the estimated variance, and how often T +- 1.96 standard errors covers the truth.
"uniform" is simple random sampling, as a baseline; designs without pairs have no theory to show.

What it shows: if sizes are related to y, they make T several times as precise. Designs that follow the order of the
road also benefit from the drift, but they never draw some of the pairs, and so have no honest estimate of their
variance.

References: Horvitz, Thompson (1952), "A generalization of sampling without replacement from a finite universe"; Sen
(1953); Yates, Grundy (1953); Tillé (2006), "Sampling Algorithms".
"""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import (
    Brewer,
    ConditionalPoisson,
    Pivotal,
    Sampford,
    SamplingDesign,
    Systematic,
    capped_softmax,
    horvitz_thompson,
)

CHUNK = 5000  # draws at a time
LEVEL = 1.96  # standard errors to either side in an interval of 95 %
UNIFORM, POISSON, SYSTEMATIC = "uniform", "conditional Poisson", "systematic, in order"
BIAS, THEORY, SIMULATED = "bias, s.e.", "sd by theory, %", "sd simulated, %"
VARIANCE_BIAS, COVERAGE = "bias of estimated variance, %", "coverage, %"


class Population(NamedTuple):
    """What is known of the units, in the order of the road, and what is not."""

    size: Tensor  # (n,)
    y: Tensor  # (n,)


class Result(NamedTuple):
    """One design; without its pairs, nothing is known of its variance."""

    totals: Tensor  # estimates of the total, (draws,)
    variances: Tensor | None  # their estimated variances, (draws,)
    variance: float | None  # by theory


def make_population(units: int, generator: torch.Generator) -> Population:
    size = torch.randn(units, generator=generator, dtype=torch.float64).mul(0.7).exp() * 1000
    drift = 1 + 0.4 * torch.linspace(-1, 1, units, dtype=torch.float64)
    noise = 1 + 0.15 * torch.randn(units, generator=generator, dtype=torch.float64)
    return Population(size, size * drift * noise)


def make_designs(probs: Tensor) -> dict[str, SamplingDesign]:
    n, k = len(probs), round(probs.sum().item())
    return {
        UNIFORM: ConditionalPoisson(probs=torch.full_like(probs, k / n)),
        POISSON: ConditionalPoisson(probs=probs),
        "Sampford": Sampford(probs=probs),
        "Brewer": Brewer(probs=probs),
        "pivotal": Pivotal(probs=probs),
        "systematic": Systematic(probs=probs, order="random"),
        SYSTEMATIC: Systematic(probs=probs, order="fixed"),
    }


def horvitz_thompson_variance(pairs: Tensor, probs: Tensor, y: Tensor) -> Tensor:
    ratio = y / probs
    return ratio @ (pairs - torch.outer(probs, probs)) @ ratio


def sen_yates_grundy_variance(pairs: Tensor, probs: Tensor, y: Tensor) -> Tensor:
    ratio = y / probs
    return ((torch.outer(probs, probs) - pairs) * (ratio[:, None] - ratio).square()).sum() / 2


def pairwise_inclusion(design: SamplingDesign) -> Tensor | None:
    try:
        return design.pairwise_inclusion
    except NotImplementedError:
        return None


def simulate(design: SamplingDesign, y: Tensor, draws: int) -> Result:
    probs, pairs = design.mean, pairwise_inclusion(design)
    totals, variances = [], []
    for size in [CHUNK] * (draws // CHUNK) + [draws % CHUNK]:
        total, variance = horvitz_thompson(design, design.sample((size,)), y)
        totals.append(total)
        variances.append(variance)
    return Result(
        torch.cat(totals),
        None if pairs is None else torch.cat(variances),
        None if pairs is None else sen_yates_grundy_variance(pairs, probs, y).item(),
    )


def standard_deviation(totals: Tensor) -> tuple[float, float]:
    """Of the estimates, with its standard error."""
    deviation = totals - totals.mean()
    variance = deviation.square().mean()
    error = deviation.square().std() / len(totals) ** 0.5
    return variance.sqrt().item(), (error / (2 * variance.sqrt())).item()


def score(result: Result, total: float) -> dict[str, float]:
    """The columns of the table; NaN for what a design without pairs does not have."""
    totals, nan = 100 * result.totals / total, float("nan")
    sd, _ = standard_deviation(totals)
    scores = {BIAS: (totals.mean().item() - 100) / (sd / len(totals) ** 0.5), THEORY: nan, SIMULATED: sd}
    scores |= {VARIANCE_BIAS: nan, COVERAGE: nan}
    if result.variances is not None and result.variance is not None:
        scores[THEORY] = 100 * result.variance**0.5 / total
        scores[VARIANCE_BIAS] = 100 * (result.variances.mean().item() / result.variance - 1)
        inside = (result.totals - total).abs() <= LEVEL * result.variances.clamp(min=0).sqrt()
        scores[COVERAGE] = 100 * inside.double().mean().item()
    return scores


def run_seed(
    args: Namespace, seed: int, table: Table, after_design: Callable[[], object]
) -> tuple[dict[str, Result], float]:
    """Adds a row for each design; returns their estimates and the true total."""
    population = make_population(args.units, torch.Generator().manual_seed(seed))
    total, results = population.y.sum().item(), {}
    for row, design in make_designs(capped_softmax(population.size.log(), args.k)).items():
        results[row] = simulate(design, population.y, args.draws)
        table.add(row, score(results[row], total))
        after_design()
    return results, total


def draw_figure(results: dict[str, Result], total: float, title: str) -> Figure:
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    position = np.arange(len(results))
    estimates = [(100 * result.totals / total).numpy() for result in results.values()]
    left.violinplot(estimates, position, showextrema=False, widths=0.85)
    left.axhline(100, color="black", linewidth=0.8)
    left.set(title="estimates", ylabel="% of the true total")
    sd, error = zip(*(standard_deviation(torch.from_numpy(row)) for row in estimates), strict=True)
    right.errorbar(position, sd, LEVEL * np.array(error), fmt="o", capsize=4, label="simulated, 95 % interval")
    theory = [np.nan if r.variance is None else 100 * r.variance**0.5 / total for r in results.values()]
    right.plot(position, theory, "_", markersize=18, color="tab:red", label="theory")
    right.set(title="standard deviation of the estimates", ylabel="% of the true total", ylim=(0, None))
    right.legend()
    for axes in (left, right):
        axes.set_xticks(position, list(results), rotation=30, ha="right")
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--units", type=int, default=60, help="size n of the population (default: %(default)s)")
    parser.add_argument("--k", type=int, default=12, help="number of units drawn (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=20_000, help="samples of each design (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "draws": 500})
    if not 0 < args.k < args.units:
        parser.error(f"--k must lie between 0 and --units, but got {args.k} and {args.units}")
    if args.draws < 2:
        parser.error(f"--draws must be at least 2, since the table has their standard deviation, but is {args.draws}")

    columns = {BIAS: ".1f", THEORY: ".2f", SIMULATED: ".2f", VARIANCE_BIAS: ".1f", COVERAGE: ".1f"}
    table = Table(f"Totals estimated from {args.k} of {args.units} units", columns)
    first = None
    for seed, progress in each_seed(args, steps=8):
        result = run_seed(args, seed, table, progress.update)
        first = first or result  # for the figure
    table.find("sizes that go along with y make the estimate more precise", POISSON, UNIFORM, SIMULATED, lower=True)
    table.find("keeping to the order of the road does as well", SYSTEMATIC, POISSON, SIMULATED, lower=True)
    table.find("but then intervals cover the truth less often", SYSTEMATIC, POISSON, COVERAGE, lower=True)
    table.save(args, "horvitz_thompson")
    save_figure(draw_figure(*first, f"{args.k} of {args.units} units, one population"), args, "horvitz_thompson")
    return table


if __name__ == "__main__":
    main()
