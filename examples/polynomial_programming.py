"""Which k of n coordinates shall be ones? Polynomial programming: straight-through stops half-way, ReinMax arrives.

    python examples/polynomial_programming.py

Every problem has a target c with entries 1/2 + 0.05 at k coordinates and 1/2 - 0.05 at the others, and is to find the
logits of a sampling design of k-hot vectors x that minimise

    L = E |x - c|_p^p / n

On zeros and ones the loss is linear in x, so that L is known exactly, and so is the best x: the k larger targets. Its
derivative is not that of a linear function, though. A coordinate that was drawn is pushed out by p (1 - c)^(p-1), one
that was not is pulled in by p c^(p-1), both far more than the difference (1 - c)^p - c^p that choosing it makes.
Straight-through believes the derivative and balances these forces at inclusion probabilities in between. The
second-order Jacobian of ReinMax takes, in effect, the mean of the derivatives at 0 and at 1, and tells the coordinates
apart. The third curve descends along the exact gradient.

After figure 9 of "Differentiable top-k: from one-hot to k-hot" and the polynomial programming of Liu et al. (2023),
"Bridging discrete and backpropagation: straight-through and beyond".
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # write files, open no window
import matplotlib.pyplot as plt
import torch
from torch import Tensor
from tqdm import tqdm

from khot import Pivotal, SamplingDesign, reinmax, straight_through, topk_mask

MARGIN = 0.05  # of the targets from 1/2
LEARNING_RATE = 0.2
EXACT, FIRST, SECOND = "exact gradient", "straight-through", "ReinMax"
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
    correct: Tensor  # (steps + 1, problems)
    seconds: float


def make_problems(problems: int, n: int, k: int, power: float, seed: int) -> Problems:
    generator = torch.Generator().manual_seed(seed)
    best = topk_mask(torch.rand(problems, n, generator=generator), k)
    return Problems(0.5 + MARGIN * (2 * best - 1), power, best)


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
    losses, correct = [], []
    start = time.perf_counter()
    for step in range(steps + 1):
        design = Pivotal(logits=logits, k=k)
        probs = design.mean.detach()
        losses.append(problems.expected_loss(probs))
        correct.append((probs * problems.best).sum(-1) / k)
        if step < steps:
            optimizer.zero_grad()
            surrogate(design).sum().backward()
            optimizer.step()
            tick()
    return Curve(torch.stack(losses), torch.stack(correct), time.perf_counter() - start)


def summarise(curves: dict[str, Curve], problems: Problems) -> list[dict[str, object]]:
    """One row per estimator: what is left of the gap between the first expected loss and the optimum."""
    optimum = problems.loss(problems.best)
    rows = []
    for name, curve in curves.items():
        gap = (curve.loss[-1] - optimum) / (curve.loss[0] - optimum)
        rows.append(
            {
                "estimator": name,
                "loss at the start": round(curve.loss[0].mean().item(), 4),
                "loss at the end": round(curve.loss[-1].mean().item(), 4),
                "optimum": round(optimum.mean().item(), 4),
                "gap left, %": round(100 * gap.mean().item(), 1),
                "largest gap left, %": round(100 * gap.max().item(), 1),
                "probability of the best items": round(curve.correct[-1].mean().item(), 3),
                "seconds": round(curve.seconds, 1),
            }
        )
    return rows


def markdown(rows: list[dict[str, object]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def draw_figure(curves: dict[str, Curve], problems: Problems, title: str, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    for name, curve in curves.items():
        steps = range(len(curve.loss))
        for axes, values in ((left, curve.loss), (right, curve.correct)):
            axes.plot(steps, values.mean(-1), label=name, color=COLOURS[name])
            axes.fill_between(steps, values.amin(-1), values.amax(-1), color=COLOURS[name], alpha=0.2, linewidth=0)
    left.axhline(problems.loss(problems.best).mean().item(), color="black", linestyle="--", label="optimum")
    left.set(title="expected loss (mean and range over the problems)", xlabel="step")
    right.set(title="inclusion probability of the best items", xlabel="step", ylim=(None, 1.02))
    left.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Curve]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=100, help="number of coordinates")
    parser.add_argument("--k", type=int, default=50, help="number of ones")
    parser.add_argument("--power", type=float, default=1.5, help="exponent p of the loss")
    parser.add_argument("--problems", type=int, default=128, help="number of independent problems")
    parser.add_argument("--samples", type=int, default=256, help="draws per step and problem")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few small steps, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the figure and the tables")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.n, args.k, args.problems, args.samples, args.steps = 10, 5, 4, 16, 5

    torch.manual_seed(args.seed)
    problems = make_problems(args.problems, args.n, args.k, args.power, args.seed)
    curves = {}
    with tqdm(total=3 * args.steps, unit="step") as progress:
        for estimator in (EXACT, FIRST, SECOND):
            progress.set_description(estimator)
            surrogate = surrogate_of(estimator, problems, args.samples)
            curves[estimator] = descend(problems, args.k, surrogate, args.steps, progress.update)

    args.out.mkdir(parents=True, exist_ok=True)
    rows = summarise(curves, problems)
    stem = args.out / "polynomial_programming"
    stem.with_suffix(".md").write_text(markdown(rows))
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n")
    title = f"{args.problems} problems: {args.k} of {args.n}, p = {args.power:g}, {args.samples} draws a step, pivotal"
    draw_figure(curves, problems, title, stem.with_suffix(".png"))
    print("\n" + markdown(rows))
    print(f"figure and tables: {stem}.png, .md, .json")
    return curves


if __name__ == "__main__":
    main()
