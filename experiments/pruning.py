"""Prunes a network while it trains: each weight matrix keeps its k largest entries, relaxed or hard.

    python experiments/pruning.py                                        scikit-learn's digits
    python experiments/pruning.py --data mnist --data-dir DIR            MNIST, if you have its files
    python experiments/pruning.py --data mnist --data-dir DIR --hidden 128        the same with wide hidden layers

Every weight matrix W of a multilayer perceptron is replaced by a pruned one in each forward pass, with k the number of
weights that the sparsity leaves. The rows differ only in the pruning:

    dense                       W itself
    hard                        the k largest in absolute value; only these get a gradient
    hard, straight-through      the same, but all weights get the gradient of those that took their place
    relaxed, p = 2 or 4/3       MagnitudeSparsity with a strength: near the threshold weights shrink rather than jump
    relaxed, p = 2, 1e-4        the same with the strength of the paper

Sparsity is the final one from the first step, or, in the rows marked "rising", grows to it over the first half of
training as 1 - (1 - t)^3. Whatever the row, every network is pruned to exactly k weights per matrix before it is
tested, so that sparsities are equal. This is the experiment of figure 5 of Sander et al. (2023), who prune a perceptron
on MNIST; their finding is that the relaxed operator loses less accuracy than the hard one. On MNIST the settings are
theirs: two hidden layers of 32, p = 2, strength 1e-4, 90 % pruned, SGD with a learning rate of 1e-2, minibatches of
128, 30 epochs. `--hidden 128` is a second network, ours.

Protocol: network, optimiser, epochs, minibatches and initial weights are the same for every row, and the network after
the last epoch is tested. The strengths, except for the paper's, were chosen by validation accuracy with seeds 100 and
101 and hidden layers of 128, and kept for those of 32: on digits at 98 % from 0.1, 0.3, 1 (p = 2) and 0.03, 0.1 (p =
4/3), on larger data sets on MNIST from 0.03, 0.1 (p = 2; with seed 100 also 0.3, 1) and 0.01, 0.03 (p = 4/3; with seed
100 also 0.003, 0.1). That of p = 4/3 has to fit the size of the weights. The test images are the same for every seed;
20 % of the others (10 % of larger data sets) were set aside for that choice.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from common import Table, experiment_parser, minibatches, parse, save_figure
from image_data import Labelled, Split, load_split
from khot.nn import MagnitudeSparsity
from runs import Fitted, Result, Run, add_run_arguments, run_grid

CLASSES, BATCH_SIZE = 10, 128
PAPERS_STRENGTH = 1e-4
DENSE, HARD, STRAIGHT = "dense", "hard", "hard, straight-through"
RELAXED, RELAXED_SMOOTH, PAPERS = "relaxed, p = 2", "relaxed, p = 4/3", "relaxed, p = 2, 1e-4"

PAPER = (
    "The paper shows its accuracies as a figure, without numbers to compare with. Its network has two hidden layers of "
    "32, and its strength is that of the row “relaxed, p = 2, 1e-4”. What differs: a tenth of the training images is "
    "set aside here."
)
SEEN = (
    "When the findings about hidden layers of 32 were stated, one run of 12 epochs had been seen: hard 45.6 %, p = 2 "
    "at 1e-4 43.0, p = 2 at 0.03 46.3, p = 4/3 at 0.03 69.7, dense 91.5."
)
TRIED = (
    "The strength decides. With those chosen on digits, 0.3 (p = 2) and 0.1 (p = 4/3), the same seeds gave the relaxed "
    "rows 88.5, 87.6 and, rising, 90.8 %; the finding about p = 4/3 was stated after that, and before the runs above."
)

Prune = Callable[[Tensor, float], Tensor]  # (weights, density) -> weights of which about that share is not 0


class Settings(NamedTuple):
    """Of a data set; the strengths of p = 2 and of p = 4/3 and the width of the hidden layers are defaults."""

    sparsities: tuple[float, ...]
    optimizer: Callable[..., torch.optim.Optimizer]
    strengths: tuple[float, float]
    hidden: int


DIGITS = Settings((0.9, 0.98), partial(torch.optim.Adam, lr=5e-3), (0.3, 0.1), 128)
SANDERS = Settings((0.9,), partial(torch.optim.SGD, lr=1e-2), (0.03, 0.03), 32)


def settings_of(data: str) -> Settings:
    return DIGITS if data == "digits" else SANDERS


class Method(NamedTuple):
    """What prunes, and the part of training during which sparsity rises."""

    prune: Prune
    ramp: float = 0.0


def hard(weights: Tensor, density: float) -> Tensor:
    return MagnitudeSparsity(density)(weights)


def relaxed(weights: Tensor, density: float, strength: float, p: float = 2.0) -> Tensor:
    return MagnitudeSparsity(density, strength=strength, p=p)(weights)


def straight_through(weights: Tensor, density: float) -> Tensor:
    return weights + (hard(weights, density) - weights).detach()


def methods_of(strengths: Sequence[float]) -> dict[str, Method]:
    of_square, of_four_thirds = strengths
    square = partial(relaxed, strength=of_square)
    return {
        HARD: Method(hard),
        STRAIGHT: Method(straight_through),
        RELAXED: Method(square),
        RELAXED_SMOOTH: Method(partial(relaxed, strength=of_four_thirds, p=4 / 3)),
        PAPERS: Method(partial(relaxed, strength=PAPERS_STRENGTH)),
        f"{HARD}, rising": Method(hard, ramp=0.5),
        f"{STRAIGHT}, rising": Method(straight_through, ramp=0.5),
        f"{RELAXED}, rising": Method(square, ramp=0.5),
    }


DENSE_METHOD = Method(lambda weights, density: weights)
ROWS = list(methods_of(DIGITS.strengths))


def make_network(pixels: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def pruned(network: nn.Module, prune: Prune, sparsity: float) -> dict[str, Tensor]:
    """The parameters of the network, with pruned weight matrices."""
    parameters = dict(network.named_parameters())
    for name, weights in parameters.items():
        if weights.dim() == 2:
            parameters[name] = prune(weights, 1 - sparsity)
    return parameters


def train(
    run: Run, split: Split, method: Method, sparsity: float, settings: Settings, epochs: int
) -> tuple[nn.Module, dict[str, Tensor], Fitted]:
    """Trains with pruning; returns the network and the parameters to test it with, exactly k per weight matrix."""
    network = make_network(split.train.images[0].numel(), settings.hidden)
    optimizer = settings.optimizer(network.parameters())
    steps = len(split.train.labels) // BATCH_SIZE
    ramp = method.ramp * epochs * steps

    def train_epoch(epoch: int) -> None:
        for i, (images, labels) in enumerate(minibatches(BATCH_SIZE, *split.train)):
            step = epoch * steps + i
            reached = sparsity * (1 - (1 - step / ramp) ** 3) if step < ramp else sparsity
            logits = functional_call(network, pruned(network, method.prune, reached), images)
            loss = cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def exactly_pruned() -> dict[str, Tensor]:
        return pruned(network, lambda weights, density: hard(method.prune(weights, density), density), sparsity)

    @torch.no_grad()
    def validate() -> float:
        logits = functional_call(network, exactly_pruned(), split.validation.images)
        return cross_entropy(logits, split.validation.labels).item()

    fitted = run.fit(network, optimizer, train_epoch, validate, epochs, patience=None)
    return network, exactly_pruned(), fitted


@torch.no_grad()
def accuracy(network: nn.Module, parameters: dict[str, Tensor], data: Labelled) -> float:
    logits = functional_call(network, parameters, data.images)
    return 100 * (logits.argmax(-1) == data.labels).float().mean().item()


def column(sparsity: float) -> str:
    return f"{100 * sparsity:g} % pruned"


def trainings(data: str) -> dict[str, tuple[str, float]]:
    """Row and sparsity of each training by its name."""
    pairs = [(row, sparsity) for row in ROWS for sparsity in settings_of(data).sparsities]
    return {DENSE: (DENSE, 0.0)} | {f"{row}, {column(sparsity)}": (row, sparsity) for row, sparsity in pairs}


def run_row(run: Run, args: Namespace) -> Result:
    """Accuracies, and how many weights each pixel has left in the first matrix."""
    row, sparsity = trainings(args.data)[run.row]
    method = DENSE_METHOD if row == DENSE else methods_of(args.strengths)[row]
    split = load_split(args.data, run.seed, args.data_dir, args.images)
    settings = settings_of(args.data)._replace(hidden=args.hidden)
    network, parameters, fitted = train(run, split, method, sparsity, settings, args.epochs)
    left_over = (parameters["1.weight"] != 0).sum(0)
    return {
        "accuracy": accuracy(network, parameters, split.test),
        "validation": accuracy(network, parameters, split.validation),
        "left over": left_over.tolist(),
        "seconds": sum(fitted.seconds),
    }


def fill(table: Table, results: dict[str, list[Result]], sparsities: tuple[float, ...]) -> None:
    """Of rows that were run at every sparsity; the dense network has one accuracy for all."""
    for row in (DENSE, *ROWS):
        names = [DENSE if row == DENSE else f"{row}, {column(sparsity)}" for sparsity in sparsities]
        for of_seed in zip(*(results.get(name, []) for name in names), strict=False):
            values = [result["accuracy"] for result in of_seed]
            table.add(row, dict(zip(table.columns, values, strict=True)))
    table.add_time(results)


def draw_figure(table: Table, results: dict[str, list[Result]], sparsity: float) -> Figure:
    """Accuracy of every row at every sparsity, and how many weights each pixel has left at ``sparsity``, first seed."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    places, height = np.arange(len(table.scores)), 0.8 / len(table.columns)
    for i, name in enumerate(table.columns):
        values = np.array([table.values(row, name) for row in table.scores])  # (rows, seeds)
        axes.barh(places + i * height, values.mean(1), height, xerr=values.std(1), label=name)
    axes.set_yticks(places + height / 2, list(table.scores))
    axes.invert_yaxis()
    axes.set(xlabel="test accuracy, % (mean and sd)")
    left.legend(loc="outside lower center", ncols=len(table.columns))
    panels = right.subplots(2, 4).flat
    right.suptitle(f"first matrix, {column(sparsity)}: weights left per pixel")
    counted = {row: results.get(f"{row}, {column(sparsity)}") for row in ROWS}
    left_over = {row: torch.tensor(of_seeds[0]["left over"]) for row, of_seeds in counted.items() if of_seeds}
    most = max(int(counts.max()) for counts in left_over.values())
    for panel, (row, counts) in zip(panels, left_over.items(), strict=False):
        side = round(len(counts) ** 0.5)
        image = panel.imshow(counts.view(side, side).numpy(), cmap="viridis", vmin=0, vmax=most)
        panel.set_title(row, fontsize=8)
    for panel in right.axes:
        panel.set_axis_off()
    right.colorbar(image, ax=right.axes, shrink=0.8)
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__, data=("digits", "mnist", "fashion-mnist"))
    add_run_arguments(parser)
    parser.add_argument("--epochs", type=int, default=30, help="of training (default: %(default)s)")
    parser.add_argument(
        "--strengths", nargs=2, type=float, metavar=("P2", "P43"), help="of p = 2 and 4/3 (default: the data set's)"
    )
    parser.add_argument("--hidden", type=int, help="units of each of the two hidden layers (default: the data set's)")
    args = parse(parser, arguments, smoke={"seeds": 2, "epochs": 1})

    settings = settings_of(args.data)
    sparsities, name = settings.sparsities, "pruning"
    args.strengths = args.strengths or list(settings.strengths)
    args.hidden = args.hidden or settings.hidden
    if args.hidden != settings.hidden:
        name = f"pruning_{args.hidden}"
    columns = {column(sparsity): ".1f" if args.data == "digits" else ".2f" for sparsity in sparsities}
    title = f"Test accuracy in % after pruning, {args.data}, two hidden layers of {args.hidden}"
    table = Table(title, columns, reference=HARD)
    if args.data == "mnist":
        table.notes = [PAPER]
        if not args.smoke:
            table.notes.append(SEEN if args.hidden == settings.hidden else TRIED)
    results = run_grid(args, name, list(trainings(args.data)), run_row)
    fill(table, results, sparsities)
    for share in columns:
        table.find(f"{share}: relaxed as in the paper beats hard (Sander et al., figure 5)", PAPERS, HARD, share)
        table.find(f"{share}: relaxed beats hard pruning", RELAXED, HARD, share)
        table.find(f"{share}: relaxed with p = 4/3 beats hard pruning", RELAXED_SMOOTH, HARD, share)
        table.find(f"{share}: relaxed beats straight-through hard pruning", RELAXED, STRAIGHT, share)
        table.find(f"{share}, rising: relaxed beats hard pruning", f"{RELAXED}, rising", f"{HARD}, rising", share)
    table.save(args, name)
    if table.scores.keys() & set(ROWS):
        save_figure(draw_figure(table, results, sparsities[-1]), args, name)
    return table


if __name__ == "__main__":
    main()
