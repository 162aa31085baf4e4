"""How many pixels to look at is learned along with which: a phantom unit and a price per pixel against a sweep over k.

    python experiments/learned_k.py                                scikit-learn's digits
    python experiments/learned_k.py --data mnist --data-dir DIR    MNIST, where you have its files

As in feature_selection_methods.py, a mask of the pixels is learned together with the classifier that sees the rest. The
objective charges for what is looked at:

    cross-entropy + penalty * (number of pixels chosen) / (number of pixels)

The sweep trains with each of several fixed k, by StraightThrough on Pivotal. The rows "learned" train by
StraightThrough on a PhantomUnit, whose inclusion probabilities sigmoid(logits) may have any sum, so that the gradient
of the objective moves the sum as well. They start from several sizes, with equal probabilities.

This is figure 5 of "Differentiable top-k: from one-hot to k-hot" (2025), https://openreview.net/forum?id=HxLmtJYfBi,
which sets the learned k, on MNIST and from several initial sizes, against the sweep: one training in place of many.

Protocol: classifier, optimiser, epochs, minibatches and initial weights are the same for every row. Images are tested
through the one mask of the k largest logits, with k the rounded sum of the probabilities. The best fixed k is that of
the least mean objective on the validation images; the test images, the same for all seeds, give the scores.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor

from common import Table, each_seed, experiment_parser, parse, save_figure
from feature_selection import centred
from feature_selection_methods import ACCURACY, LOSS, Selection, evaluate, train
from image_data import Labelled, load_split
from khot import PhantomUnit, Pivotal, StraightThrough

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)  # of the pixels, in the sweep
STARTS = (0.05, 0.2, 0.5, 0.8)
SIZE, OBJECTIVE = "k", "objective"


def fixed(share: float, pixels: int) -> str:
    return f"fixed, {round(share * pixels)}"


def learned(share: float, pixels: int) -> str:
    return f"learned, from {round(share * pixels)}"


class Run(NamedTuple):
    """One seed: validation objective of the sweep, and the mean size after each epoch of the learned ones."""

    sweep: dict[str, float]
    sizes: dict[str, list[float]]


def scores(selection: Selection, k: int, penalty: float, data: Labelled) -> dict[str, float]:
    values = evaluate(selection, k, data)
    objective = values[LOSS] + penalty * k / len(selection.logits)
    return {SIZE: float(k), ACCURACY: values[ACCURACY], OBJECTIVE: objective}


def run_seed(seed: int, args: Namespace, table: Table, after_epoch: Callable[[], object]) -> Run:
    """Adds a row for each fixed and each initial size."""
    split = centred(load_split(args.data, seed, args.data_dir))
    pixels = split.train.images.shape[-1]
    run = Run({}, {})
    for share in SHARES:
        k = round(share * pixels)

        def of_size_k(logits: Tensor, draws: int, k: int = k) -> Tensor:
            return StraightThrough(Pivotal(logits=logits, k=k)).rsample((draws,))

        pyro.set_rng_seed(seed)
        selection = train(split.train, of_size_k, torch.zeros(pixels), args.epochs, lambda logits: after_epoch())
        table.add(fixed(share, pixels), scores(selection, k, args.penalty, split.test))
        run.sweep[fixed(share, pixels)] = scores(selection, k, args.penalty, split.validation)[OBJECTIVE]

    def of_any_size(logits: Tensor, draws: int) -> Tensor:
        return StraightThrough(PhantomUnit(Pivotal, logits=logits)).rsample((draws,))

    def price(logits: Tensor) -> Tensor:
        return args.penalty * torch.sigmoid(logits).mean()

    for share in STARTS:
        sizes = [share * pixels]

        def note(logits: Tensor, sizes: list[float] = sizes) -> None:
            sizes.append(torch.sigmoid(logits).sum().item())
            after_epoch()

        pyro.set_rng_seed(seed)
        first = torch.full((pixels,), share).logit()
        selection = train(split.train, of_any_size, first, args.epochs, note, price)
        table.add(learned(share, pixels), scores(selection, round(sizes[-1]), args.penalty, split.test))
        run.sizes[learned(share, pixels)] = sizes
    return run


def best_fixed(runs: list[Run]) -> str:
    """The row of the sweep with the least mean objective on the validation images."""
    return min(runs[0].sweep, key=lambda row: sum(run.sweep[row] for run in runs))


def draw_figure(table: Table, runs: list[Run], title: str) -> Figure:
    """The objective against k, learned and fixed, and the learned sizes by epoch."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    sweep = [(table.values(row, SIZE)[0], table.values(row, OBJECTIVE)) for row in runs[0].sweep]
    sizes, objectives = zip(*sweep, strict=True)
    deviations = [values.std() for values in objectives]
    left.errorbar(sizes, [values.mean() for values in objectives], deviations, color="0.4", capsize=3, label="fixed")
    for row in runs[0].sizes:
        dots = left.plot(table.values(row, SIZE), table.values(row, OBJECTIVE), "o", label=row, alpha=0.8)
        curves = np.array([run.sizes[row] for run in runs])
        right.plot(curves.T, color=dots[0].get_color(), alpha=0.6)
    left.set(xlabel="k", ylabel="test objective (fixed: mean and sd)")
    left.legend()
    right.set(xlabel="epoch", ylabel="mean number of pixels, by seed", ylim=(0, None))
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__, data=("digits", "mnist", "fashion-mnist"))
    parser.add_argument("--penalty", type=float, default=1.0, help="price of all pixels, in nats; default: %(default)g")
    parser.add_argument("--epochs", type=int, default=40, help="of training (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "epochs": 1})

    title = f"Which and how many pixels, {args.data}, penalty {args.penalty:g}"
    table = Table(f"{title}: test scores", {SIZE: ".1f", ACCURACY: ".1f", OBJECTIVE: ".3f"})
    runs = []
    for seed, progress in each_seed(args, steps=(len(SHARES) + len(STARTS)) * args.epochs):
        runs.append(run_seed(seed, args, table, progress.update))
    table.reference = best_fixed(runs)
    for row in runs[0].sizes:
        claim = f"“{row}” beats the best of the sweep, “{table.reference}”"
        table.find(claim, row, table.reference, OBJECTIVE, lower=True)
    table.save(args, "learned_k")
    save_figure(draw_figure(table, runs, title), args, "learned_k")
    return table


if __name__ == "__main__":
    main()
