"""Polynomial programming over k-hot vectors: straight-through stops half-way, and ReinMax finds the optimum.

    python experiments/polynomial_programming.py

Every problem has a target c with entries 1/2 + 0.05 at k coordinates and 1/2 - 0.05 at the others. The task is to find
the logits of a sampling design of k-hot vectors x that minimise

    L = E |x - c|_p^p / n

On zeros and ones the loss is linear in x, so that L is known exactly, and so is the best x: the k larger targets. Its
derivative is not that of a linear function, though. A coordinate that was drawn is pushed out by p (1 - c)^(p-1), and
one that was not drawn is pulled in by p c^(p-1). Both are far larger than (1 - c)^p - c^p, which is the change of the
loss if the coordinate is chosen. Straight-through balances these forces at inclusion probabilities between 0 and 1. The
second-order Jacobian of ReinMax in effect takes the mean of the derivatives at 0 and at 1, which distinguishes the
coordinates. The third row descends along the exact gradient.

A seed is a batch of problems. The table gives the part of the gap between the first expected loss and the optimum that
is left at the end, on average and in the worst problem, and the mean inclusion probability of the k items to find.

After figure 9 of "Differentiable top-k: from one-hot to k-hot" and the polynomial programming of Liu et al. (2023),
"Bridging discrete and backpropagation: straight-through and beyond".
"""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import Pivotal, SamplingDesign, reinmax, straight_through, topk_mask

MARGIN = 0.05  # of the targets from 1/2
LEARNING_RATE = 0.2
EXACT, FIRST, SECOND = "exact gradient", "straight-through", "ReinMax"
GAP, LARGEST_GAP, FOUND = "gap left, %", "largest gap left, %", "probability of the best, %"
COLOURS = {EXACT: "0.5", FIRST: "tab:blue", SECOND: "tab:red"}


class Problems(NamedTuple):
    """Targets, and what is known of the solutions."""

    target: Tensor  # (problems, n)
    power: float
    best: Tensor  # (problems, n), k-hot

    def loss(self, x: Tensor) -> Tensor:
        return ((x - self.target).abs() ** self.power).mean(-1)

    def expected_loss(self, probs: Tensor) -> Tensor:
        """The mean of the loss over k-hot vectors with these inclusion probabilities."""
        zeros = torch.zeros_like(probs)
        at_zero, at_one = (((x - self.target).abs() ** self.power) for x in (zeros, 1 - zeros))
        return (at_zero + probs * (at_one - at_zero)).mean(-1)


class Curve(NamedTuple):
    """Of one estimator, by step: expected loss of every problem, mean inclusion probability of its best items."""

    loss: Tensor  # (steps + 1, problems)
    found: Tensor  # (steps + 1, problems)


def make_problems(args: Namespace) -> Problems:
    best = topk_mask(torch.rand(args.problems, args.n), args.k)
    return Problems(0.5 + MARGIN * (2 * best - 1), args.power, best)


def surrogate_of(estimator: str, problems: Problems, samples: int) -> Callable[[SamplingDesign], Tensor]:
    if estimator == EXACT:
        return lambda design: problems.expected_loss(design.mean)
    function = {FIRST: straight_through, SECOND: reinmax}[estimator]
    return lambda design: function(design, problems.loss, samples)


def descend(
    problems: Problems, k: int, surrogate: Callable[[SamplingDesign], Tensor], steps: int, tick: Callable[[], object]
) -> Curve:
    logits = torch.zeros_like(problems.target, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    losses, found = [], []
    for step in range(steps + 1):
        design = Pivotal(logits=logits, k=k)
        probs = design.mean.detach()
        losses.append(problems.expected_loss(probs))
        found.append((probs * problems.best).sum(-1) / k)
        if step < steps:
            optimizer.zero_grad()
            surrogate(design).sum().backward()
            optimizer.step()
            tick()
    return Curve(torch.stack(losses), torch.stack(found))


def score(curve: Curve, problems: Problems) -> dict[str, float]:
    optimum = problems.loss(problems.best)
    gap = 100 * (curve.loss[-1] - optimum) / (curve.loss[0] - optimum)
    return {GAP: gap.mean().item(), LARGEST_GAP: gap.max().item(), FOUND: 100 * curve.found[-1].mean().item()}


def draw_figure(curves: dict[str, Curve], problems: Problems, title: str) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    for row, curve in curves.items():
        steps = range(len(curve.loss))
        for axes, values in ((left, curve.loss), (right, 100 * curve.found)):
            axes.plot(steps, values.mean(-1), label=row, color=COLOURS[row])
            axes.fill_between(steps, values.amin(-1), values.amax(-1), color=COLOURS[row], alpha=0.2, linewidth=0)
    left.axhline(problems.loss(problems.best).mean().item(), color="black", linestyle="--", label="optimum")
    left.set(title="expected loss (mean and range over the problems)", xlabel="step", ylabel="expected loss")
    right.set(title="inclusion probability of the best items", xlabel="step", ylabel="%", ylim=(None, 102))
    left.legend()
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--n", type=int, default=100, help="number of coordinates (default: %(default)s)")
    parser.add_argument("--k", type=int, default=50, help="number of ones (default: %(default)s)")
    parser.add_argument("--power", type=float, default=1.5, help="exponent p of the loss (default: %(default)s)")
    parser.add_argument("--problems", type=int, default=16, help="independent problems of a seed (%(default)s)")
    parser.add_argument("--samples", type=int, default=256, help="draws per step and problem (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of descent (default: %(default)s)")
    smoke = {"seeds": 2, "n": 10, "k": 5, "problems": 4, "samples": 16, "steps": 5}
    args = parse(parser, arguments, smoke)

    table = Table(f"The best {args.k} of {args.n}, p = {args.power:g}", {GAP: ".1f", LARGEST_GAP: ".1f", FOUND: ".1f"})
    first = None
    for _, progress in each_seed(args, steps=3 * args.steps):
        problems, curves = make_problems(args), {}
        for row in (EXACT, FIRST, SECOND):
            surrogate = surrogate_of(row, problems, args.samples)
            curves[row] = descend(problems, args.k, surrogate, args.steps, progress.update)
            table.add(row, score(curves[row], problems))
        first = first or (curves, problems)
    table.find("ReinMax leaves less than straight-through (k-hot paper, figure 9)", SECOND, FIRST, lower=True)
    table.save(args, "polynomial_programming")
    title = f"{args.problems} problems: {args.k} of {args.n}, p = {args.power:g}, {args.samples} draws a step, pivotal"
    save_figure(draw_figure(*first, title), args, "polynomial_programming")
    return table


if __name__ == "__main__":
    main()
