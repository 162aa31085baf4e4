"""Learns to read four-digit numbers from nothing but the order of a few of them.

    python experiments/permutation.py                                    numbers of scikit-learn's digits
    python experiments/permutation.py --data mnist --data-dir DIR        of MNIST's, where you have its files

An image shows four digits side by side. A network gives each image of a sequence a score; its training signal is the
permutation that sorts the sequence, never a number. The rows differ in the loss:

    soft permutation        cross-entropy of soft_permutation(scores) with the true permutation, scale 1
    ..., learned scale      the same with a scale that is learned with the network, from the same start
    soft sort by transport  the same with sorted_transport_topk(scores, n), epsilon 1: optimal transport to n positions
    soft ranks              squared error of soft_rank(scores) to the true ranks
    pairwise logistic       -log sigmoid(difference of scores), over all pairs: no relaxation of sorting at all

Table 4 of LapSum (Struski et al., 2025) reports sequences of 3, 5 and 7 four-digit numbers composed from MNIST; its
figure 9 follows the learned scale. Its finding: the soft permutation sorts more sequences perfectly than other
relaxations (the best of them: 93.0, 83.7 and 74.1 %).

Protocol: network, optimiser, steps, sequences and initial weights are the same for every row; the learning rate was
chosen by the validation scores of the learned scale at n = 5 with seed 100, scale and epsilon were left at 1. Sequences
are composed anew in every step, from training digits only, and tested on 2000 sequences of digits that no seed trains
on.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import softplus

from common import Table, each_seed, experiment_parser, parse, save_figure
from image_data import Labelled, compose_numbers, load_split
from khot import soft_permutation, soft_rank, sorted_transport_topk

DIGITS, LENGTHS = 4, (3, 5, 7)
BATCH_SIZE, TEST_SEQUENCES, LEARNING_RATE = 64, 2000, 1e-2
FIXED, LEARNED, TRANSPORT = "soft permutation", "soft permutation, learned scale", "soft sort by transport"
RANKS, PAIRS = "soft ranks", "pairwise logistic"
PAPER = {"paper, MNIST: sorted, % (n = 3 / 5 / 7)": {LEARNED: "94.2 / 85.3 / 74.1"}}


class Sequences(NamedTuple):
    """Images of numbers, and the numbers."""

    images: Tensor  # (size, n, 1, height, DIGITS * width)
    numbers: Tensor  # (size, n)


def compose(digits: Labelled, size: int, n: int) -> Sequences:
    """Sequences of random numbers, composed of random digits."""
    images, numbers = compose_numbers(digits, size * n, DIGITS)
    return Sequences(images.unflatten(0, (size, n)), numbers.view(size, n))


class Scorer(nn.Module):
    """A convolution whose windows are the digits, and a linear layer from what it reads to one score per image."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 128, (height, width), stride=(height, width)),
            nn.ReLU(),
            nn.Conv2d(128, 32, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * DIGITS, 1),
        )
        self.raw_scale = nn.Parameter(torch.tensor(1.0).expm1().log())  # softplus of it is the scale, 1 at first

    def forward(self, images: Tensor) -> Tensor:
        """(size, n, channels, height, width) -> scores (size, n)."""
        return self.network(images.flatten(0, 1)).view(images.shape[:2])

    @property
    def scale(self) -> Tensor:
        return softplus(self.raw_scale)


def true_permutation_loss(permutations: Tensor, order: Tensor) -> Tensor:
    """Cross-entropy of soft permutations (size, items, positions) with the items in ascending order (size, n)."""
    weights = permutations.gather(-2, order.unsqueeze(-2)).squeeze(-2)  # P[order[j], j]
    return -weights.clamp(min=1e-6).log().mean()


def by_permutation(scorer: Scorer, scores: Tensor, order: Tensor) -> Tensor:
    return true_permutation_loss(soft_permutation(scores), order)


def by_scaled_permutation(scorer: Scorer, scores: Tensor, order: Tensor) -> Tensor:
    return true_permutation_loss(soft_permutation(scores, scorer.scale), order)


def by_transport(scorer: Scorer, scores: Tensor, order: Tensor) -> Tensor:
    """The columns of the sorted transport are ordered from the largest item."""
    permutations = sorted_transport_topk(scores, scores.shape[-1], 1.0)
    return true_permutation_loss(permutations, order.flip(-1))


def by_ranks(scorer: Scorer, scores: Tensor, order: Tensor) -> Tensor:
    ranks = order.argsort(-1) + 1
    return (soft_rank(scores) - ranks).square().mean()


def by_pairs(scorer: Scorer, scores: Tensor, order: Tensor) -> Tensor:
    ascending = scores.gather(-1, order)
    lower, higher = torch.triu_indices(scores.shape[-1], scores.shape[-1], 1)
    return softplus(ascending[:, lower] - ascending[:, higher]).mean()


ROWS: dict[str, Callable[[Scorer, Tensor, Tensor], Tensor]] = {
    LEARNED: by_scaled_permutation,
    FIXED: by_permutation,
    TRANSPORT: by_transport,
    RANKS: by_ranks,
    PAIRS: by_pairs,
}


def train(
    loss_of: Callable[[Scorer, Tensor, Tensor], Tensor], digits: Labelled, n: int, steps: int
) -> tuple[Scorer, list[float]]:
    """Trains a scorer on sequences of length n; returns it with its scale in each step."""
    scorer = Scorer(*digits.images.shape[-2:])
    optimizer = torch.optim.Adam(scorer.parameters(), lr=LEARNING_RATE)
    scales = []
    for _ in range(steps):
        images, numbers = compose(digits, BATCH_SIZE, n)
        loss = loss_of(scorer, scorer(images), numbers.argsort(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scales.append(scorer.scale.item())
    return scorer, scales


@torch.no_grad()
def evaluate(scorer: Scorer, test: Sequences) -> tuple[float, float]:
    """Per cent of the sequences sorted perfectly, and of the items that get their true rank."""
    right = scorer(test.images).argsort(-1).argsort(-1) == test.numbers.argsort(-1).argsort(-1)
    return 100 * right.all(-1).float().mean().item(), 100 * right.float().mean().item()


def sorted_column(n: int) -> str:
    return f"sorted, % (n = {n})"


def rank_column(n: int) -> str:
    return f"ranks, % (n = {n})"


class Shown(NamedTuple):
    """What the figure shows: the learned scales of all seeds, and the first seed's scorer with test sequences."""

    scales: dict[int, list[list[float]]]  # by length: (seeds, steps)
    scorer: Scorer
    test: Sequences


def run_seed(seed: int, args: Namespace, table: Table, after_training: Callable[[], object]) -> Shown:
    split = load_split(args.data, seed, args.data_dir)
    scores: dict[str, dict[str, float]] = {row: {} for row in ROWS}
    scales: dict[int, list[list[float]]] = {}
    for n in LENGTHS:
        pyro.set_rng_seed(seed)
        test = compose(split.test, TEST_SEQUENCES, n)
        for row, loss_of in ROWS.items():
            pyro.set_rng_seed(seed)
            scorer, history = train(loss_of, split.train, n, args.steps)
            scores[row][sorted_column(n)], scores[row][rank_column(n)] = evaluate(scorer, test)
            if row == LEARNED:
                scales[n], shown = [history], scorer
            after_training()
    for row in ROWS:
        table.add(row, scores[row])
    return Shown(scales, shown, test)


@torch.no_grad()
def draw_figure(shown: Shown) -> Figure:
    """A test sequence, its soft permutation and its sorted images; the learned scales over training."""
    n = shown.test.numbers.shape[-1]
    scores = shown.scorer(shown.test.images[:1])
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=[1.3, 1, 1.3])
    columns = {"a test sequence": torch.arange(n), "sorted by its scores": scores[0].argsort()}
    for axes, order in zip(left.subplots(n, 2).T, columns.values(), strict=True):
        for panel, item in zip(axes, order, strict=True):
            panel.imshow(shown.test.images[0, item, 0].numpy(), cmap="gray_r")
            panel.set(xticks=[], yticks=[])
    for panel, title in zip(left.axes[:2], columns, strict=True):
        panel.set_title(title)
    heat = middle.subplots()
    heat.imshow(soft_permutation(scores[0], shown.scorer.scale).numpy(), vmin=0, vmax=1, cmap="viridis")
    heat.set(title="its soft permutation", xlabel="position", ylabel="image", xticks=range(n), yticks=range(n))
    curves = right.subplots()
    for length, histories in shown.scales.items():
        values = np.array(histories)
        curves.plot(values.mean(0), label=f"n = {length}")
        curves.fill_between(np.arange(values.shape[1]), values.min(0), values.max(0), alpha=0.2, linewidth=0)
    curves.set(title="learned scale (mean and range over seeds)", xlabel="step", ylim=(0, None))
    curves.legend()
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__, data=("digits", "mnist"))
    parser.add_argument("--steps", type=int, default=400, help="of training (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 5})

    columns = {column(n): ".1f" for column in (sorted_column, rank_column) for n in LENGTHS}
    table = Table("Sorting sequences of n four-digit images, on unseen digits", columns, paper=PAPER)
    shown = None
    for seed, progress in each_seed(args, steps=len(LENGTHS) * len(ROWS)):
        result = run_seed(seed, args, table, progress.update)
        if shown is None:
            shown = result
        else:
            for n in LENGTHS:
                shown.scales[n] += result.scales[n]
    for n in LENGTHS:
        for other in (TRANSPORT, PAIRS):
            table.find(f"n = {n}: soft permutation sorts more than {other}", LEARNED, other, sorted_column(n))
        table.find(f"n = {n}: learning the scale helps", LEARNED, FIXED, sorted_column(n))
    table.save(args, "permutation")
    save_figure(draw_figure(shown), args, "permutation")
    return table


if __name__ == "__main__":
    main()
