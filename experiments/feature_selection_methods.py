"""Compares six ways to learn which k pixels to look at: the estimators of the k-hot paper.

    python experiments/feature_selection_methods.py                                scikit-learn's digits
    python experiments/feature_selection_methods.py --data mnist --data-dir DIR    MNIST, if you have its files

One k-hot mask for all images is learned together with a classifier that sees only the pixels that the mask keeps. Every
image of a minibatch is masked by a draw of its own, and the loss is the cross-entropy. The rows differ in how a mask is
drawn from the logits, and in the gradient that it carries back to them:

    Xie & Ermon      top-k of logits + Gumbel noise, gradient of successive_softmax_topk of the same
    NCPSS            iterated Poisson sampling at sigmoids scaled to sum to k, straight-through
    SIMPLE           StraightThrough on ConditionalPoisson
    Gumbel-sigma_k   top-k of logits + Gumbel noise, gradient of sigmoid_topk of the same
    pi-ST            StraightThrough on Pivotal, whose inclusion probabilities are sigmoid_topk
    pi-ST2           ReinMax on the same

This is table 3 of "Differentiable top-k: from one-hot to k-hot" (2025), https://openreview.net/forum?id=HxLmtJYfBi,
which compares them on MNIST by their test loss. The paper finds that second-order and Gumbel-sigma_k beat plain
straight-through, and that methods with the sigmoid top-k beat Xie and Ermon and NCPSS. On MNIST the settings are the
paper's: k = 50 of 784 pixels, hidden layers of 512 and 256, Adam at 1e-3 for weights and logits, all temperatures 1.
We chose what it does not give: minibatches of 64, pixels in [0, 1], logits that start at 0, and when to stop. On
digits all settings are ours. NCPSS is that of Pervez et al. (2023), "Scalable subset sampling with neural conditional
Poisson networks".

Protocol: classifier, optimiser, initial weights and minibatches are the same for every row, and so is the end of the
training: the loss on the validation images, with sampled masks, has not reached a new minimum for some epochs; then the
state at the minimum is tested. Test images are masked by draws, as in training (several for each image), and by the one
mask of the k largest logits. They are the same for all seeds; each seed sets other images aside for validation. No
setting was chosen by the test scores.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common import Table, experiment_parser, minibatches, parse, save_figure
from feature_selection import BATCH_SIZE, HIDDEN, MASK_LR, WEIGHTS_LR, centred, make_classifier
from image_data import Labelled, Split, load_split
from khot import (
    ConditionalPoisson,
    Pivotal,
    ReinMax,
    RelaxedKHotStraightThrough,
    StraightThrough,
    straight_through_value,
    successive_softmax_topk,
    topk_mask,
)
from runs import Fitted, Result, Run, add_run_arguments, run_grid

XIE_ERMON, NCPSS, SIMPLE, GUMBEL, FIRST, SECOND = "Xie & Ermon", "NCPSS", "SIMPLE", "Gumbel-σ_k", "πST", "πST2"
SAMPLED, LARGEST, ACCURACY, EPOCHS = "loss, sampled masks", "loss, k largest", "accuracy, k largest, %", "epochs"
CHUNK = 1000  # images tested at once
PAPER = {
    XIE_ERMON: "0.113 ± 0.0024",
    NCPSS: "0.134 ± 0.0025",
    SIMPLE: "0.099 ± 0.0009",
    GUMBEL: "0.096 ± 0.0005",
    FIRST: "0.102 ± 0.0014",
    SECOND: "0.098 ± 0.0005",
}
NOTE = (
    "The paper does not give its minibatches or epochs, and does not say how masks are drawn for its test loss, where "
    "the logits start, how pixels are scaled, or whether one mask serves a whole minibatch. We chose minibatches of "
    "64, a mask for each image, logits that start at 0, pixels in [0, 1], and training until the validation loss has "
    "had no new minimum for 20 epochs."
)
FAILED = (
    "With the third seed, NCPSS ends after 37 epochs at 81.7 % (k largest); the other four seeds reach 94.3 to 95.9 "
    "%. The row includes this seed, because no rule fixed beforehand excludes it."
)
TRIED = (
    "We cannot explain the losses that are more than three of the paper's standard deviations above the paper's. We "
    "tried, with one seed: minibatches of 16 (no change); one mask for a whole minibatch (slower); pixels "
    "standardised to mean 0 and variance 1 (SIMPLE after 40 epochs: 0.213, and 0.169 with the k largest); scoring "
    "πST2 by the mean prediction of 10 masks for each image (0.126), or with the inclusion probabilities as the mask "
    "(0.118). The same network, trained on the 50 pixels of πST alone, reaches 0.127, and 0.124 with standardised "
    "pixels."
)

Mask = Callable[[Tensor, int], Tensor]  # (logits, draws) -> (draws, n)
Method = Callable[[Tensor, int, int, float], Tensor]  # (logits, k, draws, temperature) -> (draws, n)


class Settings(NamedTuple):
    """Of a data set; the temperature is that of the Gumbel rows, the others have 1."""

    k: int
    hidden: tuple[int, ...]
    batch_size: int
    weights_lr: float
    mask_lr: float
    temperature: float


DIGITS = Settings(10, (HIDDEN,), BATCH_SIZE, WEIGHTS_LR, MASK_LR, 0.5)
THE_PAPERS = Settings(50, (512, 256), 64, 1e-3, 1e-3, 1.0)


def settings_of(data: str) -> Settings:
    return DIGITS if data == "digits" else THE_PAPERS


def load_vectors(args: Namespace, seed: int) -> Split:
    """Images as vectors: of the digits without their mean, of other data as they are."""
    split = load_split(args.data, seed, args.data_dir, args.images)
    return centred(split) if args.data == "digits" else Split(*(Labelled(x.flatten(1), y) for x, y in split))


def iterated_poisson(probs: Tensor, k: int | Tensor) -> Tensor:
    """k-hot vectors ``(..., n)``: independent draws; surplus ones are removed and missing ones drawn again.

    The sampler of NCPSS (Pervez et al., 2023). Each round draws Poisson samples among the units that may change, with
    probabilities in proportion to ``probs`` (to add) or ``1 - probs`` (to take away) that sum to the surplus, until
    exactly k are left. The inclusion probabilities are near ``probs``, but not equal to them; the designs of khot have
    them exactly.
    """
    value = torch.bernoulli(probs)
    while True:
        surplus = value.sum(-1, keepdim=True) - k
        if not surplus.any():
            return value
        weights = torch.where(surplus > 0, value * (1 - probs), (1 - value) * probs) * (surplus != 0)
        # If rounding leaves too few units with a positive weight, all units that may change get one.
        weights = weights + 1e-6 * torch.where(surplus > 0, value, 1 - value) * (surplus != 0)
        share = surplus.abs() * weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        value = (value - torch.bernoulli(share.clamp(max=1))).abs()


def rescaled_sigmoid(logits: Tensor, k: int) -> Tensor:
    """The inclusion probabilities of NCPSS: sigmoids, scaled up or down so that they sum to k."""
    probs = torch.sigmoid(logits)
    total, n = probs.sum(-1, keepdim=True), logits.shape[-1]
    return torch.where(total >= k, k * probs / total, 1 - (n - k) * (1 - probs) / (n - total))


def ncpss(logits: Tensor, k: int, draws: int, temperature: float) -> Tensor:
    probs = rescaled_sigmoid(logits, k)
    value = iterated_poisson(probs.detach().clamp(0, 1).expand(draws, -1), k)
    return straight_through_value(value, probs)


def xie_ermon(logits: Tensor, k: int, draws: int, temperature: float) -> Tensor:
    law = RelaxedKHotStraightThrough(temperature, logits, k, relaxation=successive_softmax_topk)
    return law.rsample((draws,))


def simple(logits: Tensor, k: int, draws: int, temperature: float) -> Tensor:
    return StraightThrough(ConditionalPoisson(logits=logits, k=k)).rsample((draws,))


def gumbel(logits: Tensor, k: int, draws: int, temperature: float) -> Tensor:
    return RelaxedKHotStraightThrough(temperature, logits, k).rsample((draws,))


def first_order(logits: Tensor, k: int, draws: int, temperature: float) -> Tensor:
    return StraightThrough(Pivotal(logits=logits, k=k)).rsample((draws,))


def second_order(logits: Tensor, k: int, draws: int, temperature: float) -> Tensor:
    return ReinMax(Pivotal(logits=logits, k=k)).rsample((draws,))


METHODS: dict[str, Method] = {
    SIMPLE: simple,
    FIRST: first_order,
    SECOND: second_order,
    GUMBEL: gumbel,
    NCPSS: ncpss,
    XIE_ERMON: xie_ermon,  # takes longer than all others together
}


class Selection(nn.Module):
    """Logits of the mask, and the classifier of the pixels that it leaves."""

    def __init__(self, first: Tensor, hidden: Sequence[int]) -> None:
        super().__init__()
        self.logits = nn.Parameter(first.clone())
        self.classifier = make_classifier(len(first), hidden)

    def sampled_loss(self, mask: Mask, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, every image with a mask of its own."""
        return cross_entropy(self.classifier(images * mask(self.logits, len(images))), labels)


@torch.no_grad()
def sampled_score(selection: Selection, mask: Mask, data: Labelled) -> float:
    losses = [
        selection.sampled_loss(mask, images, labels).item() * len(labels)
        for images, labels in zip(data.images.split(CHUNK), data.labels.split(CHUNK), strict=True)
    ]
    return sum(losses) / len(data.labels)


@torch.no_grad()
def largest_scores(selection: Selection, k: int, data: Labelled) -> dict[str, float]:
    """Scores with the one mask of the k largest logits."""
    scores = selection.classifier(data.images * topk_mask(selection.logits, k))
    accuracy = (scores.argmax(-1) == data.labels).float().mean()
    return {LARGEST: cross_entropy(scores, data.labels).item(), ACCURACY: 100 * accuracy.item()}


def no_penalty(logits: Tensor) -> Tensor:
    return logits.new_zeros(())


def train(
    run: Run,
    args: Namespace,
    split: Split,
    first: Tensor,
    mask: Mask,
    penalty: Callable[[Tensor], Tensor] = no_penalty,
    note: Callable[[Tensor], float] = lambda logits: 0.0,
) -> tuple[Selection, Fitted]:
    """Learns logits, from ``first`` on, and a classifier of what ``mask(logits, draws)`` leaves of the images."""
    settings = settings_of(args.data)
    selection = Selection(first, settings.hidden)
    groups = [
        {"params": selection.classifier.parameters(), "lr": settings.weights_lr},
        {"params": [selection.logits], "lr": settings.mask_lr},
    ]
    optimizer = torch.optim.Adam(groups, fused=True)

    def train_epoch(epoch: int) -> None:
        for images, labels in minibatches(settings.batch_size, *split.train):
            loss = selection.sampled_loss(mask, images, labels) + penalty(selection.logits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def validate() -> float:
        return sampled_score(selection, mask, split.validation) + penalty(selection.logits).item()

    epochs = args.epochs, args.patience
    return selection, run.fit(selection, optimizer, train_epoch, validate, *epochs, lambda: note(selection.logits))


def run_row(run: Run, args: Namespace) -> Result:
    split = load_vectors(args, run.seed)
    temperature = settings_of(args.data).temperature

    def mask(logits: Tensor, draws: int) -> Tensor:
        return METHODS[run.row](logits, args.k, draws, temperature)

    selection, fitted = train(run, args, split, torch.zeros(split.train.images.shape[-1]), mask)
    sampled = sum(sampled_score(selection, mask, split.test) for _ in range(args.draws)) / args.draws
    scores = {SAMPLED: sampled, **largest_scores(selection, args.k, split.test), EPOCHS: fitted.best + 1}
    chosen = topk_mask(selection.logits.detach(), args.k)
    return {"scores": scores, "mask": chosen.tolist(), "seconds": sum(fitted.seconds)}


def draw_figure(results: dict[str, list[Result]], k: int) -> Figure:
    """How often each pixel was chosen, over the seeds."""
    figure = Figure(figsize=(13, 2.8), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, (row, of_seeds) in zip(panels, results.items(), strict=True):
        share = torch.tensor([result["mask"] for result in of_seeds]).mean(0)
        side = round(len(share) ** 0.5)
        image = panel.imshow(share.view(side, side).numpy(), cmap="viridis", vmin=0, vmax=1)
        panel.set(title=row, xticks=[], yticks=[])
    figure.suptitle(f"the {k} pixels chosen, mean over {len(of_seeds)} seeds")
    figure.colorbar(image, ax=panels, shrink=0.8)
    return figure


def add_findings(table: Table) -> None:
    for column in (SAMPLED, LARGEST):
        for row in (SECOND, GUMBEL):
            table.find(f"{row} beats plain straight-through (k-hot paper)", row, FIRST, column, lower=True)
        for row in (FIRST, SECOND, GUMBEL):
            for other in (XIE_ERMON, NCPSS):
                table.find(f"{row} beats {other} (k-hot paper)", row, other, column, lower=True)


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__, data=("digits", "mnist", "fashion-mnist"))
    add_run_arguments(parser)
    parser.add_argument("--k", type=int, help="number of pixels (default: 10 of the digits, else 50)")
    parser.add_argument("--epochs", type=int, default=300, help="at most (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=10, help="masks for each test image (default: %(default)s)")
    parser.add_argument("--patience", type=int, default=20, help="epochs without a new minimum (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "epochs": 1, "draws": 1})
    args.k = args.k or settings_of(args.data).k

    columns = {SAMPLED: ".4f", LARGEST: ".4f", ACCURACY: ".1f", EPOCHS: ".0f"}
    compared = SAMPLED, LARGEST, ACCURACY
    table = Table(f"Test scores with {args.k} pixels, {args.data}", columns, FIRST, compared=compared)
    if args.data == "mnist" and args.k == THE_PAPERS.k:
        table.paper, table.notes = {"paper: loss": PAPER}, [NOTE] if args.smoke else [NOTE, TRIED, FAILED]
    results = run_grid(args, "feature_selection_methods", list(METHODS), run_row)
    table.add_all(results)
    add_findings(table)
    table.save(args, "feature_selection_methods")
    save_figure(draw_figure(results, args.k), args, "feature_selection_methods")
    return table


if __name__ == "__main__":
    main()
